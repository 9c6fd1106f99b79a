"""Trains a draft on what the policy thought: its own optimizer, schedule, clip and counters.

Sums are accumulated and divided once, at the step, by the global number of supervised positions: however a batch is
split over accumulation pieces and ranks, the gradient is that of the whole.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import get_scheduler

from hf_codraft.drafts.eagle3 import Eagle3Draft
from hf_codraft.taps.packed import PackedBatch, PolicyWeights

MAX_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class DraftStep:
    """What one optimizer step of the draft did, over all ranks; made by [`DraftLearner.step`], read by loggers.

    Args:
        loss (`float`): mean loss a supervised position, over passes and ranks; NaN where none was supervised.
        loss_passes (`tuple[float, ...]`): mean loss of every pass.
        accept_passes (`tuple[float, ...]`): mean `1 - TV(teacher, draft)` of every pass: the expected acceptance of a
            token drafted in it, given that the earlier ones were accepted.
        num_supervised (`int`): positions of the first pass that have a loss.
        vocab_coverage (`float`): share of the supervised tokens that the draft can propose.
        grad_norm (`float`): norm of the gradient before clipping.
        is_skipped (`bool`): the loss or gradient was not finite, so nothing was updated.
    """

    loss: float
    loss_passes: tuple[float, ...]
    accept_passes: tuple[float, ...]
    num_supervised: int
    vocab_coverage: float
    grad_norm: float
    is_skipped: bool


@dataclass
class DraftLearner:
    """Owns a draft's training.

    Args:
        draft ([`Eagle3Draft`]): fp32 on the training device.
        num_passes (`int`): passes of the training-time test, the number of tokens drafted in serving.
        learning_rate, weight_decay, max_grad_norm (`float`): of AdamW and the draft's own clip (0 for no clip).
        loss_type, pass_weights, temperature, chunk_size: see [`Eagle3Draft.compute_loss`].
        loss_weight (`float`): factor of the whole loss.
        scheduler (`str`), scheduler_steps (`int`), warmup_steps (`int`): transformers' learning-rate schedule.
        autocast (callable): opens the mixed-precision context of the draft's forward.
        groups (`Sequence[dist.ProcessGroup]`, *optional*): process groups over which gradients and sums are added up, one
            after another; by default the one of all ranks, if there is one.
    """

    draft: Eagle3Draft
    num_passes: int
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    loss_type: str = "kl"
    pass_weights: tuple[float, ...] | None = None
    temperature: float = 1.0
    chunk_size: int | None = 512
    loss_weight: float = 1.0
    scheduler: str = "constant"
    scheduler_steps: int | None = None
    warmup_steps: int = 0
    autocast: Callable[[], AbstractContextManager] = nullcontext
    groups: Sequence[dist.ProcessGroup | None] | None = None
    num_steps: int = field(default=0, init=False)
    num_skipped: int = field(default=0, init=False)
    num_skipped_in_a_row: int = field(default=0, init=False)

    def __post_init__(self):
        if self.pass_weights is not None and len(self.pass_weights) != self.num_passes:
            raise ValueError(
                f"ttt_pass_weights has {len(self.pass_weights)} weights, but the draft is trained for {self.num_passes} "
                "passes (num_speculative_tokens); give one weight a pass."
            )
        self.parameters = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        self.lr_scheduler = get_scheduler(
            self.scheduler,
            self.optimizer,
            num_warmup_steps=self.warmup_steps,
            num_training_steps=self.scheduler_steps,
        )
        self._clear_sums()

    def _clear_sums(self) -> None:
        device = self.parameters[0].device
        # fp64 on every device that has it: counts and sums of a window stay exact
        self._sums = torch.zeros(3, self.num_passes, dtype=torch.float64, device=device)
        self._covered = torch.zeros(2, dtype=torch.float64, device=device)

    def accumulate(self, batch: PackedBatch, policy: PolicyWeights) -> None:
        """Adds the loss sum of one piece of the batch and its gradient; no rank waits for another here."""
        with self.autocast():
            loss = self.draft.compute_loss(
                batch,
                policy,
                num_passes=self.num_passes,
                temperature=self.temperature,
                loss_type=self.loss_type,
                pass_weights=self.pass_weights,
                chunk_size=self.chunk_size,
            )
        loss.loss.backward()
        self._sums += torch.stack([loss.loss_sum_K, loss.accept_sum_K, loss.count_K]).to(self._sums)
        assert loss.num_covered is not None and loss.num_supervised is not None
        self._covered += torch.stack([loss.num_covered, loss.num_supervised])

    def step(self) -> DraftStep:
        """Averages over ranks, clips and updates; every rank must call it the same number of times.

        What was accumulated is gone afterwards, after an error too.

        Raises:
            RuntimeError: when the loss was not finite three times in a row.
            Exception: what this rank could not do. If it came before the sum of the gradients, the other ranks have skipped
                the step, as for a loss that is not finite.
        """
        flat = failure = None
        try:
            flat = self._flat_gradient()
        except Exception as error:  # such as too little memory: no rank may wait for this one's gradient
            failure = error
            self._sums[0].fill_(math.nan)
        self._sum_over_ranks(self._sums, self._covered)
        loss_sum_K, accept_sum_K, count_K = self._sums
        covered = self._covered
        self._clear_sums()
        self.optimizer.zero_grad(set_to_none=True)
        if flat is None:
            assert failure is not None
            raise failure
        weights_K = torch.tensor(self.pass_weights or (1.0,) * self.num_passes).to(count_K)
        denominator = (weights_K * count_K).sum().clamp(min=1.0)
        loss = ((weights_K * loss_sum_K).sum() / denominator).item()
        grad_norm = math.nan
        if math.isfinite(loss):  # which all ranks know alike
            self._sum_over_ranks(flat)
            flat.mul_(self.loss_weight / denominator.to(flat.dtype))
            grad_norm = torch.linalg.vector_norm(flat).item()
        is_skipped = not math.isfinite(grad_norm)
        if is_skipped:
            self._skip(loss, grad_norm)
        elif count_K.sum() > 0:
            if self.max_grad_norm and grad_norm > self.max_grad_norm:
                flat.mul_(self.max_grad_norm / grad_norm)
            self._scatter_gradients(flat)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.lr_scheduler.step()
            self.num_steps += 1
            self.num_skipped_in_a_row = 0
        means = (torch.stack([loss_sum_K, accept_sum_K]) / count_K).tolist()
        return DraftStep(
            loss if count_K.sum() > 0 else math.nan,
            tuple(means[0]),
            tuple(means[1]),
            int(count_K[0].item()),
            (covered[0] / covered[1]).item(),
            grad_norm,
            is_skipped,
        )

    def _skip(self, loss: float, grad_norm: float) -> None:
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"the draft's loss ({loss}) or gradient norm ({grad_norm}) was not finite {self.num_skipped_in_a_row} "
                "times in a row. The policy is unharmed; lower draft_learning_rate, or look for NaN in the policy's "
                "hidden states."
            )

    def _flat_gradient(self) -> torch.Tensor:
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters])

    def _sum_over_ranks(self, *tensors: torch.Tensor) -> None:
        groups = self.groups
        if groups is None:
            has_peers = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            groups = [dist.group.WORLD] if has_peers else []
        for group in groups:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

    def _scatter_gradients(self, flat: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the draft's weights that a bit-exact resume needs."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.num_steps = state["num_steps"]
        self.num_skipped = state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
