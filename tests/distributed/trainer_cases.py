"""Runs of the trainer whose policy is wrapped in every way, on rollouts that do not depend on the number of ranks."""

import gc
import os
import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import distributed as dist
from trl import GRPOTrainer

from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer
from hf_codraft.policy import anatomy

EOS, FIRST_LETTER = 1, 3
WARM = dict(draft_warmup_rollouts=12, draft_warmup_epochs=2, draft_warmup_batch_size=4)


class _ShardedOnCpu(GRPOTrainer):
    """Stands between our trainer and TRL's, where the accelerator is made.

    accelerate knows no FSDP on CPU ranks (`MULTI_CPU` is not in its list of kinds that may become `FSDP`), so with
    `fsdp_plugin` the state of the accelerator is set to what it is on two GPUs, right after it was made.
    """

    fsdp_plugin: FullyShardedDataParallelPlugin | None = None

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.fsdp_plugin is not None:
            os.environ["ACCELERATE_USE_FSDP"] = "true"
            for state in (AcceleratorState, PartialState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            AcceleratorState._shared_state["fsdp_plugin"] = self.fsdp_plugin
            self.is_fsdp_enabled = True
            assert self.accelerator.is_fsdp2 == (self.fsdp_plugin.fsdp_version == 2)


class RankTrainer(CoDraftGRPOTrainer, _ShardedOnCpu):
    """Completions by prompt in the warm start, by (step, row of the whole batch) in training; remembers gradients."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        first = self.accelerator.process_index * len(prompt_ids)
        return [
            _completion(
                (self.state.global_step, first + row) if self._is_warm else tuple(ids), self.max_completion_length
            )
            for row, ids in enumerate(prompt_ids)
        ], None

    def _build_learner(self):
        super()._build_learner()
        self.gradients = []
        self.learner.optimizer.register_step_pre_hook(
            lambda *_: self.gradients.append([p.grad.detach().clone() for p in self.learner.parameters])
        )


def _completion(key: tuple, longest: int) -> list[int]:
    draw = random.Random(str(key))
    ids = [draw.randrange(FIRST_LETTER, tiny.VOCAB) for _ in range(draw.randint(1, longest))]
    return ids if len(ids) == longest else [*ids[:-1], EOS]


def fsdp(version: int = 2, **changes) -> FullyShardedDataParallelPlugin:
    plugin = dict(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"], state_dict_type="FULL_STATE_DICT",
    )  # fmt: skip
    return FullyShardedDataParallelPlugin(**plugin | changes)


def zero(stage: int) -> dict:
    """Settings for DeepSpeed. It has no CPU ranks in accelerate either: its state is made here, with gloo."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    return dict(
        deepspeed=config | dict.fromkeys(auto, "auto"),
        use_cpu=False,
        accelerator_config={"use_configured_state": True},
    )


def plain() -> dict:
    return {}


def fsdp2() -> dict:
    return dict(plugin=fsdp())


def build(folder: Path, *, plugin=None, tie=True, model=None, trainer=RankTrainer, lora=False, **changes):
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings = dict(
        output_dir=str(folder), per_device_train_batch_size=4 // num_ranks, num_generations=4, max_completion_length=12,
        max_steps=3, learning_rate=0.3, optim="sgd", lr_scheduler_type="constant", bf16=False, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, gradient_checkpointing=False, disable_tqdm=True, seed=7,
        draft_learning_rate=2e-3, max_grad_norm=0.0, draft_updates_per_step=1, draft_rollback=False,
    ) | WARM | changes  # fmt: skip
    peft_config = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear") if lora else None
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return type("_", (trainer,), {"fsdp_plugin": plugin})(
            model or tiny.policy("qwen3", num_hidden_layers=4, tie=tie), tiny.reward, CoDraftGRPOConfig(**settings),
            train_dataset=tiny.prompts(), processing_class=tiny.tokenizer(), peft_config=peft_config, draft="eagle3",
        )  # fmt: skip


def whole(model) -> dict[str, torch.Tensor]:
    """All weights of a policy, gathered: FSDP2's by `full_tensor`, ZeRO-3's by DeepSpeed."""
    weights = {}
    for name, p in model.named_parameters():
        if hasattr(p, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                weights[name] = p.detach().clone().float()
        else:
            weights[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone().float()
    return weights


@dataclass(frozen=True)
class Result:
    """What a run left; the same on every rank."""

    draft: dict[str, torch.Tensor]
    policy: dict[str, torch.Tensor]
    gradients: list[list[torch.Tensor]]
    losses: list[float]
    num_gathers: int
    kind: str


def run(folder: Path, *, alone: bool = False, **changes) -> Result:
    """Trains; with `alone` after a warm start by itself."""
    trainer = build(folder, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if alone:
            trainer.warm_up_draft()
        gathers = []
        whole_of = anatomy.whole
        anatomy.whole = lambda tensor: gathers.append(tensor) or whole_of(tensor)
        try:
            trainer.train()
        finally:
            anatomy.whole = whole_of
    return Result(
        {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()},
        whole(trainer.model),
        trainer.gradients,
        [entry["draft/loss"] for entry in trainer.state.log_history if "draft/loss" in entry],
        len(gathers),
        type(trainer.model).__name__,
    )


def forget() -> None:
    """Lets the next trainer of this process have another accelerator."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    gc.collect()


def be_rank(rank: int, num_ranks: int = 2) -> None:
    """What a launcher sets."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in ranks.items()}


def run_all(rank: int, cases: dict, folder: Path) -> dict[str, Result]:
    """One rank's part of all cases in one process group: starting processes costs more than training."""
    be_rank(rank)
    results = {}
    for name, (wrap, changes) in cases.items():
        results[name] = run(folder, **wrap(), **changes)
        forget()
    return results


def assert_like_one_process(results: list[Result], changes: dict, folder: Path) -> None:
    """Compares what every rank has with the same run by one process."""
    changes = dict(changes)
    changes.pop("alone", None)
    if "gradient_accumulation_steps" in changes:
        changes["per_device_train_batch_size"] = 2
    if changes.get("draft_warmup_rollouts") == 13:  # ranks have equal shares
        changes["draft_warmup_rollouts"] = 14
    want = run(folder, **changes)
    forget()
    for got in results:
        assert got.losses == pytest.approx(want.losses, rel=1e-3)  # Adam: the sign of a gradient near 0 is rounding
        assert got.policy.keys() == want.policy.keys()
        for name in want.policy:
            torch.testing.assert_close(
                got.policy[name], want.policy[name], rtol=0, atol=1e-5
            )  # rounding; weights move by 1e-2
        assert len(got.gradients) == len(want.gradients) >= 9  # of the warm start too
        for ours, theirs in zip(got.gradients, want.gradients, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert (a - b).norm() <= 3e-3 * b.norm()
        for name, tensor in got.draft.items():
            assert torch.equal(tensor, results[0].draft[name])
