"""Every knob of co-training, beside all of TRL's."""

import dataclasses
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from trl import GRPOConfig

from hf_codraft.drafts.learner import CO_TRAINING_RATE, check_pass_weights, rate_factor
from hf_codraft.losses import LOSS_TYPES

DEFAULT_SPECULATIVE_TOKENS = 3
ROWS_PER_DRAFT_UPDATE = 32  # of fewer rows, some updates harm on other prompts (docs/co_training.md)
GREEDY_BELOW, LEAST_TEMPERATURE = 1e-5, 1e-2  # vLLM samples greedily below the first and raises others to the second
# Options of training that a draft cannot go with, with the reason and the way out.
_REFUSED_TRAINING = {
    "fp16": "the draft's own backward has no loss scaler, so small gradients would vanish. Set bf16=True",
    "torch_compile": "hidden states of the policy are read by hooks, which a compiled model skips. Leave it out",
    "use_liger_kernel": "it was never tried with hidden states being read. Leave it out",
}


@dataclass
class CoDraftGRPOConfig(GRPOConfig):
    """`GRPOConfig` with the draft's settings. All of TRL's fields keep their meaning and default.

    Each field's help text is in its metadata; `hf-codraft grpo --help` prints them.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["draft_lr_scheduler_kwargs"]  # may come as JSON

    num_speculative_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens the draft guesses before each verification, and passes of its training-time test. 3 when a "
            "draft is given; more pays only where acceptance is high."
        },
    )
    draft_sample_method: str = field(
        default="probabilistic",
        metadata={
            "help": "How the draft samples in rollouts: 'probabilistic' (from its distribution) or 'greedy'. Both leave the "
            "policy's distribution unchanged; at temperature 1 'probabilistic' has several times the acceptance."
        },
    )
    draft_loss_type: str = field(
        default="auto",
        metadata={
            "help": "Distance between policy and draft: 'kl', 'tv' (total variation), 'lk' (KL where it is far, TV where it is "
            "near), 'ce'; 'auto' is kl in the warm-up and until the first guess is accepted 0.4 of the time, then tv."
        },
    )
    draft_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the draft's own AdamW during GRPO. By default 3e-4 at hidden size 576 and inversely "
            "proportional to the hidden size (4.2e-5 at 4096), as muP has it for Adam."
        },
    )
    draft_lr_scheduler_type: str = field(
        default="constant",
        metadata={
            "help": "Schedule of the draft's learning rate over its own steps, by transformers' name (not those that follow a "
            "metric). 'constant' suits a moving policy."
        },
    )
    draft_lr_scheduler_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "What else the draft's schedule takes, as lr_scheduler_kwargs is for the policy's: {'min_lr_rate': 0.1} "
            "for 'cosine_with_min_lr', {'num_decay_steps': 100} for 'warmup_stable_decay'."
        },
    )
    draft_lr_warmup_steps: int = field(
        default=0,
        metadata={
            "help": "Optimizer steps over which the draft's learning rate rises, with every schedule: n of them begin at "
            "1 / (n + 1) of the peak."
        },
    )
    draft_weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of the draft's AdamW."})
    draft_max_grad_norm: float = field(
        default=1.0, metadata={"help": "Gradient-norm clip of the draft, apart from the policy's; 0 for none."}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Token ids a fresh draft can propose, chosen from the policy's own rollouts (needs "
            "draft_warmup_rollouts); the whole vocabulary by default. A smaller head drafts faster."
        },
    )
    draft_tap_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "Hidden states a fresh draft reads, in vLLM's convention (id j: after j layers). EAGLE-3: 2, N//2, N-3."
        },
    )
    draft_base_mismatch: str = field(
        default="warn",
        metadata={"help": "What a draft that names another policy as its own meets: 'warn' or 'error'."},
    )
    ttt_pass_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Weight of the loss of every pass (num_speculative_tokens of them); 1 by default."},
    )
    draft_teacher_temperature: str = field(
        default="rollout",
        metadata={
            "help": "Temperature at which draft and policy are compared: 'rollout' (the distribution the engine verifies "
            "against, that of generation_kwargs before that of the config; 1 where rollouts are greedy) or a number. The teacher "
            "is the policy at this temperature, before top_p, top_k and penalties cut it: a draft proposes from its own whole "
            "distribution, so tokens that they forbid are drafted in vain."
        },
    )
    draft_updates_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps of the draft for each of the policy's; they share its rows, so more of them cost no more, "
            "but each sees fewer. By default one for every 32 rows (over all ranks), at least one."
        },
    )
    draft_rollback: bool = field(
        default=True,
        metadata={
            "help": "Measure the draft before and after its updates on a quarter of the step's rows, which teach it one step "
            "later, and undo updates that made it worse there beyond noise."
        },
    )
    draft_update_every: int = field(
        default=1, metadata={"help": "Train the draft on one of this many optimizer steps of the policy."}
    )
    draft_warmup_rollouts: int = field(
        default=0,
        metadata={
            "help": "Completions the policy samples on the training prompts before step 1, over all ranks, to start the draft "
            "on. 0 starts cold."
        },
    )
    draft_warmup_epochs: int = field(default=1, metadata={"help": "Passes over the warm-up rollouts."})
    draft_warmup_batch_size: int = field(
        default=16, metadata={"help": "Rows per optimizer step of the warm-up, over all ranks."}
    )
    draft_warmup_host_gb: float = field(
        default=8.0,
        metadata={
            "help": "With more than one draft_warmup_epochs: GiB of host memory a rank in which hidden states of the policy are "
            "kept between epochs; those that do not fit are computed anew."
        },
    )
    draft_warmup_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Peak learning rate of the warm-up (cosine). By default 1e-3 at hidden size 576, scaled as "
            "draft_learning_rate is. Moments carry over into GRPO."
        },
    )
    freeze_draft: bool = field(
        default=False,
        metadata={"help": "Do not train the draft during GRPO (a warm-up still does): the control of a claim."},
    )
    draft_loss_chunk_size: int = field(
        default=512,
        metadata={
            "help": "Positions that the draft is trained on at a time: all passes, the loss and the backward of so many, then "
            "the next; bounds its memory."
        },
    )
    rollout_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of the colocated engine's weights: 'bfloat16', 'float16', 'float32', or 'auto' (bf16/fp16 as "
            "trained, else the policy's own)."
        },
    )
    check_rollouts_every: int = field(
        default=50,
        metadata={
            "help": "Batches of rollouts from one whose log-probs by the colocated engine are compared with the trainer's to "
            "the next, beginning with the first; a few rows' forward each. A difference that rounding does not explain is an "
            "error (a warning without a draft). 0 for none."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}; leave draft=None for rollouts "
                "without speculation."
            )
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise ValueError(
                f"draft_sample_method must be 'probabilistic' or 'greedy', got {self.draft_sample_method!r}."
            )
        if self.draft_base_mismatch not in ("warn", "error"):
            raise ValueError(f"draft_base_mismatch must be 'warn' or 'error', got {self.draft_base_mismatch!r}.")
        if self.draft_loss_type not in ("auto", *LOSS_TYPES):
            raise ValueError(f"draft_loss_type must be 'auto' or one of {LOSS_TYPES}, got {self.draft_loss_type!r}.")
        if self.rollout_dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ValueError(
                f"rollout_dtype must be 'auto', 'bfloat16', 'float16' or 'float32', got {self.rollout_dtype!r}."
            )
        for name in (
            "draft_update_every",
            "draft_updates_per_step",
            "draft_warmup_epochs",
            "draft_warmup_batch_size",
            "draft_loss_chunk_size",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in (
            "draft_learning_rate", "draft_weight_decay", "draft_max_grad_norm", "draft_warmup_rollouts", "draft_lr_warmup_steps",
            "draft_warmup_learning_rate", "draft_warmup_host_gb", "check_rollouts_every",
        ):  # fmt: skip
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"{name} must be a number and not negative, got {getattr(self, name)}.")
        if self.use_vllm and self.vllm_mode == "colocate" and self.vllm_model_impl == "transformers":
            raise ValueError(
                "vllm_model_impl='transformers' cannot be used with vllm_mode='colocate': vLLM changes the transformers class in "
                "place, and the trainer's own forward then fails (TRL's too). Leave vllm_model_impl at 'auto' or 'vllm'."
            )
        check_pass_weights(self.ttt_pass_weights, self.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS)
        rate_factor(
            self.draft_lr_scheduler_type,
            learning_rate=self.draft_learning_rate or CO_TRAINING_RATE,
            num_steps=self.draft_steps(self.max_steps if self.max_steps > 0 else sys.maxsize),
            num_warmup_steps=self.draft_lr_warmup_steps,
            options=self.draft_lr_scheduler_kwargs,
        )
        self.draft_temperature  # noqa: B018  (raises where it cannot be read)

    @property
    def rollout_temperature(self) -> float:
        """Temperature of rollouts as TRL sends it (`generation_kwargs` before `temperature`) and vLLM takes it; 0 if greedy."""
        sent: Any = (self.generation_kwargs or {}).get("temperature", self.temperature)
        if not isinstance(sent, (int, float)):
            raise ValueError(f"generation_kwargs['temperature'] must be a number, got {sent!r}.")
        return 0.0 if sent < GREEDY_BELOW else max(float(sent), LEAST_TEMPERATURE)

    @property
    def draft_temperature(self) -> float:
        """The number behind `draft_teacher_temperature`."""
        if self.draft_teacher_temperature == "rollout":
            return self.rollout_temperature or 1.0
        try:
            temperature = float(self.draft_teacher_temperature)
        except ValueError:
            temperature = 0.0
        if not 0 < temperature < float("inf"):
            raise ValueError(
                f"draft_teacher_temperature must be 'rollout' or a number above 0, got {self.draft_teacher_temperature!r}."
            )
        return temperature

    def draft_steps(self, max_steps: int) -> int:
        """Optimizer steps of the draft in so many of the policy."""
        return -(-max_steps // self.draft_update_every) * self.num_draft_updates

    @property
    def num_draft_updates(self) -> int:
        """`draft_updates_per_step`, its default resolved."""
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
        return self.draft_updates_per_step or max(rows // ROWS_PER_DRAFT_UPDATE, 1)

    @property
    def engine_dtype(self) -> str:
        """dtype of the engine's weights; `auto` where it is the policy's, since nothing else is said."""
        if self.rollout_dtype != "auto":
            return self.rollout_dtype
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "auto"

    def draft_fields_set(self) -> list[str]:
        """Names of the draft's fields that differ from their default."""
        base = {f.name for f in dataclasses.fields(GRPOConfig)}
        own = [
            f
            for f in dataclasses.fields(self)
            if f.name not in base and f.name not in ("rollout_dtype", "check_rollouts_every")
        ]
        return [f.name for f in own if getattr(self, f.name) != f.default]


def check_training(args: GRPOConfig, model: Any) -> None:
    """Refuses what the training of a draft cannot go with, before anything is built.

    Raises:
        ValueError: naming the option, or the model that is compiled already.
    """
    for name, reason in _REFUSED_TRAINING.items():
        if getattr(args, name):
            raise ValueError(
                f"{name}={getattr(args, name)} cannot be used with a draft: {reason}, or train with draft=None."
            )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")  # of `accelerate launch` and its config file
    is_compiled = isinstance(model, torch.nn.Module) and any(
        is_compiled_module(part) or part._compiled_call_impl is not None for part in model.modules()
    )
    if is_compiled or backend.lower() != "no":
        what = "model is compiled" if is_compiled else f"dynamo_backend={backend!r}"
        raise ValueError(f"{what}, which cannot be used with a draft: {_REFUSED_TRAINING['torch_compile']}.")
