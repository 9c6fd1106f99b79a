"""GRPO whose rollouts are drafted, and whose draft learns beside the policy.

The story of a step, top to bottom:

1. rollout: TRL asks the engine, the draft guesses, the policy verifies (`serving.engine`).
2. policy step: TRL's own loss and backward; taps listen to this one forward (`taps.recorder`).
3. draft step: the padded rows become packed ones, the draft is compared with the policy and updated (`drafts.learner`).
4. refit: policy and draft reach the engine before the next rollout (`serving.refit`).
5. save: a draft that vLLM loads, beside TRL's checkpoint (`hub.checkpoint`).

The policy's loss, gradient, clip and update are computed by TRL on the tensors it would have without a draft: its
weights stay the same bit for bit on the same rollouts.
"""

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from hf_codraft._compat import check_version
from hf_codraft._optional import require
from hf_codraft.config import DEFAULT_SPECULATIVE_TOKENS, CoDraftGRPOConfig, check_training
from hf_codraft.drafts.eagle3 import Eagle3Draft
from hf_codraft.drafts.learner import DraftLearner, default_learning_rate, level, rising, settling
from hf_codraft.drafts.replicas import check_same, share
from hf_codraft.drafts.updates import DraftUpdates, WindowReport
from hf_codraft.hub.checkpoint import (
    TRAINING_STATE,
    load_training_state,
    load_weights_into,
    push_draft,
    read_training_state,
    save_draft,
)
from hf_codraft.hub.history import DRAFT_FOLDER, TRAINER_STATE, begin_run, last_complete_checkpoint
from hf_codraft.hub.resolve import FAMILIES, resolve_draft
from hf_codraft.phases import PhaseClock
from hf_codraft.policy.anatomy import PolicyAnatomy, unwrap_peft
from hf_codraft.policy.packing import pack_completions
from hf_codraft.serving.sampling import check_policy, check_speculation
from hf_codraft.taps.packed import PolicyWeights
from hf_codraft.warmup import warm_up

CHECK_EVERY = 50  # optimizer steps between two comparisons of the ranks' drafts


class CoDraftGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with speculative rollouts by a draft that is trained together with the policy.

    Takes everything `GRPOTrainer` takes; with `draft=None` it is `GRPOTrainer`.

    Args:
        model, reward_funcs, args and all others: of `GRPOTrainer`; `args` is a [`CoDraftGRPOConfig`].
        draft (`str` or [`Eagle3Draft`], *optional*):
            `"eagle3"` for a fresh draft, a local path or a Hub id of one that exists, or a draft object.

    Raises:
        ValueError: if the draft does not fit the policy, or a setting cannot work with speculation.
        ImportError: if an installed version of trl, transformers or vllm is not supported.
    """

    _name = "CoDraft GRPO"

    def __init__(self, model, reward_funcs=None, args: CoDraftGRPOConfig | None = None, *others, draft=None, **kwargs):
        for package in ("trl", "transformers", "accelerate"):
            check_version(package)
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = CoDraftGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, CoDraftGRPOConfig):
            raise ValueError(
                f"args must be a CoDraftGRPOConfig (all GRPOConfig fields and the draft's), got {type(args)}."
            )
        self.draft: Eagle3Draft | None = None
        self.learner: DraftLearner | None = None
        self._draft_source = draft
        self.phase_seconds: list[dict[str, float]] = []  # a dict an optimizer step, with or without a draft
        self._pending: dict[str, torch.Tensor] | None = None
        self._borrowed: PolicyWeights | None = None
        self._is_warm = self._ends_when_warm = self._is_prepared_once = False
        self._runs: list[list[Any]] = []  # this one and those that it goes on from
        self.num_warmup_tokens = 0
        given = inspect.signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *others, **kwargs).arguments
        self._check_arguments(args, draft, given.get("processing_class"), given.get("train_dataset"))
        if draft is not None:
            check_training(args, model)
            if args.use_vllm:
                check_policy(args, model)
        with self._engine(args):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        if draft is not None:
            if self.draft is None:
                self._build_draft(self.model)
            self._build_learner()
        waits = draft is not None and self.accelerator.device.type == "cuda"
        self._clock = PhaseClock(torch.cuda.synchronize if waits else None)
        self.add_callback(_StepClock(self))

    def _check_arguments(self, args: CoDraftGRPOConfig, draft: Any, processing_class: Any, dataset: Any) -> None:
        if draft is None:
            without_effect = args.draft_fields_set()
            if "num_speculative_tokens" in without_effect:
                raise ValueError(
                    f"num_speculative_tokens={args.num_speculative_tokens} needs a draft, and draft is None. Pass "
                    "draft='eagle3' (or a path, a Hub id, a draft), or leave num_speculative_tokens out."
                )
            if without_effect:
                warnings.warn(f"draft is None, so these settings have no effect: {without_effect}.", stacklevel=3)
            return
        if isinstance(processing_class, ProcessorMixin):
            raise ValueError("draft needs a text-only policy; got a multimodal processing_class. Pass draft=None.")
        if args.draft_warmup_rollouts > 0 and hasattr(dataset, "__len__") and len(dataset) == 0:
            raise ValueError(
                f"train_dataset has no rows, so draft_warmup_rollouts={args.draft_warmup_rollouts} cannot be sampled. Pass a "
                "dataset with prompts, or set draft_warmup_rollouts=0."
            )
        if args.use_vllm:
            check_speculation(args)
        else:
            warnings.warn(
                "use_vllm=False: the draft is trained, but nothing speculates, so rollouts are no faster. Set use_vllm=True.",
                stacklevel=3,
            )

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self._draft_source is not None and plugin is not None and plugin.fsdp_version == 1:
            raise ValueError(
                "fsdp_version=1 cannot train a draft: outside the forward FSDP1 has the policy's embeddings and head as flat "
                "shards, and TRL's colocated engine never gets them. Set fsdp_version: 2 (accelerate config), use DeepSpeed or "
                "plain data parallelism, or pass draft=None."
            )

    @contextmanager
    def _engine(self, args: CoDraftGRPOConfig) -> Iterator[None]:
        """While open, TRL builds our engine instead of its own."""
        if not args.use_vllm or args.vllm_mode != "colocate":
            yield
            return
        require("vllm", extra="vllm")
        check_version("vllm")
        from hf_codraft.serving.engine import CoDraftVLLMGeneration, Speculation, rollout_engine

        speculation = None
        if self._draft_source is not None:
            tokens = args.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS
            speculation = Speculation(self._build_draft, tokens, args.draft_sample_method)
        with rollout_engine(speculation, args.engine_dtype, check_every=args.check_rollouts_every):
            yield
        if not isinstance(self.vllm_generation, CoDraftVLLMGeneration):
            raise RuntimeError(
                "TRL did not build its engine through VLLMGeneration; see hf_codraft._compat.SUPPORTED."
            )

    def _build_draft(self, model: torch.nn.Module) -> Eagle3Draft:
        device_map = getattr(unwrap_peft(model), "hf_device_map", None) or {}
        if len(set(device_map.values())) > 1:
            raise ValueError(
                f"the policy is spread over {sorted(set(map(str, device_map.values())))} (device_map), and a draft needs it on "
                "one device. Start one process a GPU with `accelerate launch` (shard a large policy by FSDP2 or DeepSpeed), "
                "or make one GPU visible with CUDA_VISIBLE_DEVICES."
            )
        self.anatomy = PolicyAnatomy.of(model)
        # transformers draws initial weights from the global generator, which the policy's own run must find untouched
        with torch.random.fork_rng():
            torch.manual_seed(self.args.seed)
            with DistributedBackend(self.accelerator).gather_params(self.anatomy.initial_parameters()):
                self.draft = resolve_draft(self._draft_source, self.anatomy, self.args)
        self.draft = self.draft.to(self.accelerator.device, torch.float32)
        share(self.draft)  # with fsdp_cpu_ram_efficient_loading only rank 0 has the policy's weights by now
        self._recorder = self.anatomy.recorder(self.draft.tap_ids)
        return self.draft

    def make_learner(self, draft: Eagle3Draft, *, opening: Callable[[int], float]) -> DraftLearner:
        """A learner of a draft as the settings describe it; the trainer's own is `trainer.learner`.

        Args:
            draft ([`Eagle3Draft`]): what it trains.
            opening (callable): see [`DraftLearner`].
        """
        args = self.args
        return DraftLearner(
            draft,
            num_passes=args.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS,
            learning_rate=args.draft_learning_rate
            or default_learning_rate(draft.config.hidden_size, is_warm_start=False),
            weight_decay=args.draft_weight_decay,
            max_grad_norm=args.draft_max_grad_norm,
            loss_type=args.draft_loss_type,
            pass_weights=tuple(args.ttt_pass_weights) if args.ttt_pass_weights else None,
            temperature=args.draft_temperature,
            chunk_size=args.draft_loss_chunk_size,
            scheduler=args.draft_lr_scheduler_type,
            scheduler_options=args.draft_lr_scheduler_kwargs,
            warmup_steps=args.draft_lr_warmup_steps,
            autocast=self._draft_autocast,
            opening=opening,
        )

    def _build_learner(self) -> None:
        args = self.args
        if not args.freeze_draft or self.draft.config.num_speculative_tokens is None:
            self.draft.config.num_speculative_tokens = args.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS
        is_fresh = isinstance(self._draft_source, str) and self._draft_source in FAMILIES
        # A learning rate that the user gave is taken as it is.
        opening = level if args.draft_learning_rate else settling if is_fresh else rising
        self.learner = self.make_learner(self.draft, opening=opening)
        if not is_fresh and isinstance(self._draft_source, (str, Path)):
            folder = Path(self._draft_source)
            if (folder / TRAINING_STATE).is_file():  # of `hf-codraft warmup` or a checkpoint
                self.learner.load_moments(read_training_state(folder)["learner"])
        self.draft_updates = DraftUpdates(
            self.learner,
            num_updates=args.num_draft_updates,
            is_checked=args.draft_rollback,
            is_greedy=args.draft_sample_method == "greedy" or args.rollout_temperature == 0,
            seed=args.seed,
        )

    def _draft_autocast(self) -> AbstractContextManager:
        """As the policy is computed: mixed precision if it has that, its own dtype if it is kept in half precision."""
        if self.accelerator.mixed_precision != "no" or self._compute_dtype == torch.float32:
            return self.accelerator.autocast()
        return torch.autocast(self.accelerator.device.type, self._compute_dtype)

    @property
    def _trains_draft(self) -> bool:
        """Whether the optimizer step that is under way updates the draft."""
        if self.learner is None or self.args.freeze_draft or self.learner.has_stopped:
            return False
        return self.state.global_step % self.args.draft_update_every == 0

    # 1. Rollout

    def _generate(self, prompts: list):
        if not (self.use_vllm and self.vllm_mode == "colocate"):
            with self._clock.phase("generate"):
                return super()._generate(prompts)
        if self.vllm_generation.is_stale():
            self._last_loaded_step = -1  # TRL looks at the step's number, which weights may change without
        output = super()._generate(prompts)
        self._log_rollouts(len(prompts))
        with self._clock.phase("logprob"):
            self._check_rollouts(output)
        return output

    @torch.no_grad()
    def _check_rollouts(self, output: tuple) -> None:
        """Lets the engine compare its log-probs with the policy's, without dropout."""
        if isinstance(self.processing_class, ProcessorMixin):
            return
        prompt_ids, completion_ids, tool_mask, _, logps = output[:5]
        was_training = self.model.training
        self.model.eval()
        try:
            found = self.vllm_generation.check_rollouts(
                prompt_ids,
                completion_ids,
                tool_mask,
                logps,
                logits_of=self._last_logits,
                dtype=self._compute_dtype,
                is_strict=self.rollout_func is None and not getattr(self.model, "is_quantized", False),
            )
        finally:
            self.model.train(was_training)
        if found is not None and self.draft is not None:
            self._metrics["train" if was_training else "eval"]["refit/logp_difference"].append(found.mean)

    def _last_logits(self, ids: list[int], num_tokens: int) -> torch.Tensor:
        """The policy's logits of the last tokens of a row: tokens, vocabulary."""
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        can_keep = "logits_to_keep" in inspect.signature(type(policy).forward).parameters
        kept = {"logits_to_keep": num_tokens} if can_keep else {}
        token_ids = torch.tensor([ids], device=self.accelerator.device)
        with self.accelerator.autocast():
            output = self.model(
                input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False, **kept
            )
        return output.logits[0, -num_tokens:]

    @property
    def _compute_dtype(self) -> torch.dtype:
        """dtype of the policy's matrix products."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, self.model.dtype)

    def _log_rollouts(self, num_rows: int) -> None:
        rollouts = self.vllm_generation.take_rollouts()
        self._clock.move("generate", rollouts.generate_s)
        self._clock.move("refit", rollouts.refit_s)
        if self.draft is None:
            return
        from hf_codraft.serving.acceptance import Acceptance

        histogram = torch.zeros(self.learner.num_passes + 1, dtype=torch.long, device=self.accelerator.device)
        local = Acceptance.total(rollouts.rows).histogram
        histogram[: len(local)] = torch.tensor(local, dtype=torch.long)
        total = Acceptance(tuple(self.accelerator.reduce(histogram).tolist()))
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["draft/accept_length"].append(total.accept_length)
        for position, rate in enumerate(total.accept_rates):
            metrics[f"draft/accept_rate/pos_{position}"].append(rate)
        metrics["refit/version"] = [float(self.vllm_generation.version)]
        # Tool calls generate a row in several turns, whose order TRL keeps to itself. The table wants a value for each row all
        # the same: without, it shows those of an earlier batch.
        lengths = [row.accept_length for row in rollouts.rows]
        self._log_completion_extra("accept_length", lengths if len(lengths) == num_rows else [math.nan] * num_rows)

    def _calculate_rewards(self, *args, **kwargs):
        with self._clock.phase("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with nullcontext() if torch.is_grad_enabled() else self._clock.phase("logprob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    # 2. Policy step

    def _prepare_inputs(self, generation_batch):
        with self._clock.phase("other"):
            return super()._prepare_inputs(generation_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        listens = self.model.training and self._trains_draft
        if listens and self.is_deepspeed_enabled and self.accelerator.sync_gradients:
            # DeepSpeed steps the policy at the end of its backward, before the draft is compared with it.
            self._borrowed = self._policy_weights()
        with self._recorder.recording() if listens else nullcontext():
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._pending = inputs if listens else None
        return loss

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._pending is not None:
            started = time.perf_counter()
            with self._clock.phase("draft"):
                self._draft_step()
            self._add_to_step_time(time.perf_counter() - started)
        if self.learner is not None and not self.args.freeze_draft:
            self._metrics["train"]["draft/has_stopped"] = [float(self.learner.has_stopped)]
        return loss

    # 3. Draft step

    def _draft_step(self) -> None:
        """Keeps this piece of the batch, and updates the draft on all of them where the policy is updated."""
        self.draft_updates.add(pack_completions(self._pending, self._recorder.take()))
        self._pending = None
        if self.accelerator.sync_gradients:
            policy, self._borrowed = self._borrowed or self._policy_weights(), None
            window = self.draft_updates.run(policy)
            self._log_draft_step(window)
            self._clock.move("other", window.listening_s)
            if self.state.global_step % CHECK_EVERY == 0:
                check_same(self.draft)

    def _add_to_step_time(self, seconds: float) -> None:
        """TRL's `step_time` is of its own `training_step`, which has ended before the draft's."""
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"][-1] += seconds
        else:
            self._current_train_step_time += seconds

    def _policy_weights(self) -> PolicyWeights:
        with self._dist.gather_params(self.anatomy.borrowed_parameters()):
            weights = self.anatomy.weights()
            # DeepSpeed updates them in place before they are used, and ZeRO-3 frees them when the context ends.
            return weights.copied() if self.is_deepspeed_enabled else weights

    def _log_draft_step(self, window: WindowReport) -> None:
        metrics = self._metrics["train"]
        metrics["draft/skipped_steps"] = [float(self.learner.num_skipped)]
        metrics["draft/rolled_back"] = [float(self.draft_updates.num_rolled_back)]
        if not math.isnan(window.expected_before):
            for position, rate in enumerate(window.expected_rates):
                metrics[f"draft/expected_accept/pos_{position}"].append(rate)
            metrics["draft/expected_accept_length"].append(window.expected_before)
            metrics["draft/expected_accept_length_updated"].append(window.expected_after)
        metrics["draft/learning_rate"] = [window.learning_rate]
        for step in window.steps:
            if step.is_skipped or math.isnan(step.loss):
                continue
            metrics["draft/loss"].append(step.loss)
            metrics["draft/grad_norm"].append(step.grad_norm)
            metrics["draft/vocab_coverage"].append(step.vocab_coverage)
            for position, loss in enumerate(step.loss_passes):
                metrics[f"draft/loss/pos_{position}"].append(loss)

    # Around the steps

    def evaluate(self, *args, **kwargs):
        with self._clock.aside():
            return super().evaluate(*args, **kwargs)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """`Trainer.train`, with the draft's warm start before its first step.

        `resume_from_checkpoint=True` takes the last complete checkpoint; a resumed run has its warm start behind it.
        """
        if self._is_prepared_once:
            raise RuntimeError(
                "warm_up_draft() has prepared the policy for FSDP or DeepSpeed, which cannot be done twice (its optimizer would "
                "step other tensors). Call train() alone: it warms the draft up before its first step."
            )
        if resume_from_checkpoint is True and self.draft is not None:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"no complete checkpoint with a draft was found in {self.args.output_dir}.")
        if self.draft is not None and self.args.save_strategy != "no":
            self._runs = begin_run(self.args.output_dir, resume_from_checkpoint, writes=self.args.should_save)
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        if self.draft is not None and self.args.save_strategy != "no":
            self._save_draft(Path(self.args.output_dir))
        return output

    @property
    def _needs_warm_up(self) -> bool:
        return self.draft is not None and not self._is_warm and self.args.draft_warmup_rollouts > 0

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        # The warm start needs the policy as it is trained (wrapped, sharded, a checkpoint loaded); this is where it is.
        if self.learner is not None:
            self.learner.schedule(self.args.draft_steps(max_steps))
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._borrowed = None
        if self._needs_warm_up:
            warm_up(self)
            check_same(self.draft)
            self._is_warm = True
            if self.use_vllm:
                self._last_loaded_step = -1  # the engine still has the cold draft
        if self._ends_when_warm:
            raise _Warm
        return prepared

    def warm_up_draft(self) -> None:
        """Starts the draft on rollouts of the policy (`draft_warmup_rollouts` of them); does nothing the second time.

        [`train`] does this itself; alone it prepares the policy as `train` does and stops before the first step. Under FSDP and
        DeepSpeed, which prepare a policy only once, no `train` can follow.
        """
        if not self._needs_warm_up:
            return
        self._ends_when_warm = True
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                super().train()
        except _Warm:
            pass
        finally:
            self._ends_when_warm = self.is_in_train = False
            self._is_prepared_once = self.is_fsdp_enabled or self.is_deepspeed_enabled

    # 5. Save

    def _save_checkpoint(self, model, trial):
        # The draft goes first: the folder counts as complete only with trainer_state.json, which transformers writes last,
        # before it deletes older checkpoints. One of an earlier run must not vouch for a mixture of both.
        if self.draft is not None:
            check_same(self.draft)
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            if self.args.should_save:
                (folder / TRAINER_STATE).unlink(missing_ok=True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                state = self._training_state()
                save_draft(self.draft, folder / DRAFT_FOLDER, base_model=self._base_model, training_state=state)
            folder.mkdir(parents=True, exist_ok=True)  # it is the main process that has made it, if any
            torch.save(self.draft_updates.rows_state_dict(), self._rows_file(folder))
        super()._save_checkpoint(model, trial)

    def _rows_file(self, checkpoint: Path) -> Path:
        """Every rank's own file of the rows that wait, as transformers has one for its random state."""
        return checkpoint / f"draft_rows_{self.accelerator.process_index}.pt"

    def _load_rows(self, checkpoint: Path) -> dict[str, Any]:
        file = self._rows_file(checkpoint)
        if file.is_file():
            return torch.load(file, map_location="cpu", weights_only=True)
        warnings.warn(
            f"{file} is missing (was the checkpoint written by fewer ranks?), so the rows that the draft's last check held "
            "out are lost: the draft's run goes on, but not bit for bit.",
            stacklevel=2,
        )
        return {}

    def _training_state(self) -> dict[str, Any]:
        version = self.vllm_generation.version if self.use_vllm and self.vllm_mode == "colocate" else 0
        return {
            "learner": self.learner.state_dict(),
            "updates": self.draft_updates.state_dict(),
            "refit_version": version,
            "seed": self.args.seed,
            "runs": self._runs,
        }

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.draft is None:
            return
        folder = Path(checkpoint) / DRAFT_FOLDER
        state = load_training_state(self.draft, folder, like=self._training_state())
        share(self.draft)
        self.learner.load_state_dict(state["learner"])
        self.draft_updates.load_state_dict(state["updates"])
        self.draft_updates.load_rows_state_dict(self._load_rows(Path(checkpoint)))
        self._is_warm = True
        if self.use_vllm:
            self.vllm_generation.version = state["refit_version"]
            self._last_loaded_step = -1

    def _load_best_model(self):
        super()._load_best_model()
        if self.draft is None:
            return
        load_weights_into(self.draft, Path(self.state.best_model_checkpoint) / DRAFT_FOLDER)
        share(self.draft)
        if self.use_vllm:
            self._last_loaded_step = -1  # the engine has the last step's weights

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the policy, and the draft in its folder `draft/` in the form that vLLM loads."""
        super().save_model(output_dir, _internal_call)
        if self.draft is not None and not (_internal_call and output_dir):  # checkpoints have theirs already
            self._save_draft(Path(output_dir or self.args.output_dir))

    def _push_from_checkpoint(self, checkpoint_folder):
        # transformers uploads output_dir, whose draft must be of the step that its policy is of
        if self.draft is not None and (self.push_in_progress is None or self.push_in_progress.is_done()):
            self._save_draft(Path(self.args.output_dir))
        super()._push_from_checkpoint(checkpoint_folder)

    def _save_draft(self, folder: Path) -> None:
        if self.args.should_save:
            save_draft(self.draft, folder / DRAFT_FOLDER, base_model=self._base_model)

    @property
    def _base_model(self) -> str:
        return self.anatomy.model.config._name_or_path

    def push_draft_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str | None:
        """Saves the draft, then the main process uploads it with its card; returns the address of the commit there.

        Args:
            repo_id (`str`): made if it does not exist.
            private (`bool`, *optional*): of a new repository; `args.hub_private_repo` by default.
            token (`str`, *optional*): `args.hub_token` by default, and then the one that is logged in.

        Raises:
            RuntimeError: if the upload failed; the draft lies in the folder that the message names.
        """
        if self.draft is None:
            raise ValueError("there is no draft to push: the trainer was made with draft=None.")
        self._save_draft(Path(self.args.output_dir))
        if not self.is_world_process_zero():
            return None
        private = self.args.hub_private_repo if private is None else private
        folder = Path(self.args.output_dir) / DRAFT_FOLDER
        return push_draft(folder, repo_id, private=private, token=token or self.args.hub_token)


class _Warm(Exception):
    """Leaves `train` between its preparations and its first step."""


class _StepClock(TrainerCallback):
    """Logs where the seconds of a step went."""

    def __init__(self, trainer: CoDraftGRPOTrainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._clock.begin()

    def on_step_end(self, args, state, control, **kwargs):
        phases = self.trainer._clock.read()
        self.trainer.phase_seconds.append(phases)
        if self.trainer.draft is None:  # the logs are GRPOTrainer's
            return
        for phase, value in (phases | {"step": sum(phases.values())}).items():
            self.trainer._metrics["train"][f"time/{phase}"].append(value)
