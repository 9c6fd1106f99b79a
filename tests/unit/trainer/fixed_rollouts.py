"""Both trainers on the same rollouts: completions are looked up in a seeded table, nothing is generated."""

import gc
import random
import warnings
from pathlib import Path

import tiny
import torch
from trl import GRPOConfig, GRPOTrainer

from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer

EOS, FIRST_LETTER = 1, 3
# The draft's plainest training: one step on all rows of the policy's.
ONE_UPDATE = {"draft_learning_rate": 2e-3, "draft_updates_per_step": 1, "draft_rollback": False}

gc.collect()
gc.freeze()  # accelerate collects garbage at every `train()`; over all imported modules that is most of a short run


def completion(step: int, row: int, longest: int) -> list[int]:
    """The completion of a row of a step: of 1 to `longest` tokens, now ended, now cut off."""
    draw = random.Random(f"{step} {row}")
    ids = [draw.randrange(FIRST_LETTER, tiny.VOCAB) for _ in range(draw.randint(1, longest))]
    return ids if len(ids) == longest else [*ids[:-1], EOS]


class _FixedRollouts:
    """Mixed in before a trainer; the step alone decides what comes, as a resumed run needs."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        step, longest = self.state.global_step, self.max_completion_length
        return [completion(step, row, longest) for row in range(len(prompt_ids))], None


class FixedGRPOTrainer(_FixedRollouts, GRPOTrainer):
    pass


class FixedCoDraftGRPOTrainer(_FixedRollouts, CoDraftGRPOTrainer):
    pass


def settings(folder: Path, **changes) -> dict:
    return dict(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
        max_steps=3, learning_rate=1e-3, bf16=False, logging_steps=1, report_to="none", save_strategy="no",
        use_cpu=True, gradient_checkpointing=False, disable_tqdm=True, seed=7,
    ) | changes  # fmt: skip


def _policy() -> torch.nn.Module:
    return tiny.policy("qwen3", num_hidden_layers=4, attention_dropout=0.1)  # the order of random draws matters


def grpo(
    folder: Path, *, model=None, trainer=FixedGRPOTrainer, peft_config=None, eval_dataset=None, **changes
) -> GRPOTrainer:
    """TRL's own trainer on a tiny policy."""
    torch.manual_seed(1)
    return trainer(
        _policy() if model is None else model, tiny.reward, GRPOConfig(**settings(folder, **changes)),
        train_dataset=tiny.prompts(), processing_class=tiny.tokenizer(), peft_config=peft_config, eval_dataset=eval_dataset,
    )  # fmt: skip


def codraft(
    folder: Path,
    *,
    draft="eagle3",
    model=None,
    trainer=FixedCoDraftGRPOTrainer,
    peft_config=None,
    eval_dataset=None,
    train_dataset=None,
    processing_class=None,
    environment_factory=None,
    **changes,
) -> CoDraftGRPOTrainer:
    """Ours on the same policy."""
    torch.manual_seed(1)
    changes = (ONE_UPDATE if draft is not None else {}) | changes
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="use_vllm=False")
        return trainer(
            _policy() if model is None else model, tiny.reward, CoDraftGRPOConfig(**settings(folder, **changes)),
            train_dataset=tiny.prompts() if train_dataset is None else train_dataset,
            processing_class=processing_class or tiny.tokenizer(),
            peft_config=peft_config, draft=draft, eval_dataset=eval_dataset, environment_factory=environment_factory,
        )  # fmt: skip


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logged(trainer: GRPOTrainer, *, without: tuple[str, ...] = ()) -> list[dict]:
    """The log of a run, without times."""
    timing = ("time/", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", *without)
    return [{k: v for k, v in entry.items() if not k.startswith(timing)} for entry in trainer.state.log_history]
