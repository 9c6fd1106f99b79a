"""Trains a draft on what the policy thought: its own optimizer, schedule, clip and counters.

Sums are accumulated and divided once, at the step, by the global number of supervised positions: however a batch is
split over accumulation pieces and ranks, the gradient is that of the whole.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from hf_codraft.drafts.eagle3 import Eagle3Draft
from hf_codraft.drafts.expected import ExpectedAcceptance, sampled_log_probs
from hf_codraft.taps.packed import PackedBatch, PolicyWeights

MAX_SKIPPED_IN_A_ROW = 3
REFERENCE_WIDTH = 576  # hidden size at which learning rates were chosen by measuring (docs/co_training.md)
WARM_START_RATE, CO_TRAINING_RATE = 1e-3, 3e-4
OPENING_UPDATES = 100  # of a draft without a warm start in this run
TV_FROM = 0.4  # acceptance of the first guess from which "auto" is total variation
ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")

logger = logging.getLogger(__name__)


def default_learning_rate(hidden_size: int, *, is_warm_start: bool) -> float:
    """Adam's learning rate for a draft of this hidden size.

    It falls as the fan-in of the matrices rises: muP (arXiv 2203.03466, table 8) keeps the size of an update's effect by a rate
    proportional to 1 / fan-in. Below half of the reference width it rises no further.
    """
    rate = WARM_START_RATE if is_warm_start else CO_TRAINING_RATE
    return rate * min(REFERENCE_WIDTH / hidden_size, 2.0)


def rising(update: int) -> float:
    """Factor of the learning rate for a draft that has learnt before, but whose moments are lost: they must gather first."""
    return min((update + 1) / 20, 1.0)


def settling(update: int) -> float:
    """Factor of the learning rate for a fresh draft: from a warm start's rate to co-training's, along a cosine."""
    above = WARM_START_RATE / CO_TRAINING_RATE - 1
    return 1.0 + above * 0.5 * (1 + math.cos(math.pi * min(update / OPENING_UPDATES, 1.0)))


def level(update: int) -> float:
    """Factor of the learning rate for a draft that goes on learning."""
    return 1.0


def check_pass_weights(pass_weights: Sequence[float] | None, num_passes: int) -> None:
    """Raises a `ValueError` where there is not one finite weight a pass, none negative and one above 0."""
    if pass_weights is None:
        return
    if len(pass_weights) != num_passes:
        raise ValueError(
            f"ttt_pass_weights has {len(pass_weights)} weights, but the draft is trained for {num_passes} passes "
            "(num_speculative_tokens); give one weight a pass."
        )
    if not all(0 <= weight < math.inf for weight in pass_weights) or not any(pass_weights):
        raise ValueError(
            f"ttt_pass_weights must be finite, none negative and one above 0, got {list(pass_weights)}; set "
            "freeze_draft=True for a draft that does not learn."
        )


def rate_factor(
    name: str,
    *,
    learning_rate: float,
    num_steps: int | None = None,
    num_warmup_steps: int = 0,
    options: dict[str, Any] | None = None,
) -> Callable[[int], float]:
    """Factor of the learning rate at step 0, 1, ... of transformers' schedule of that name.

    The schedule is entered one step late: with w steps of warm-up the first one has 1 / (w + 1) of the peak, where
    transformers' has 0 and would change nothing. It ends, where it ends, after the last step.

    Args:
        name (`str`): one of transformers' `SchedulerType`.
        learning_rate (`float`): the peak, which some options are relative to.
        num_steps (`int`, *optional*): steps in all; only those of `ENDLESS_SCHEDULES` do without.
        num_warmup_steps (`int`): steps below the peak, of every schedule.
        options (`dict`, *optional*): what else the schedule takes, by transformers' names.

    Raises:
        ValueError: for a name or an option that transformers does not know, and for a schedule that follows a metric.
    """
    known = [kind.value for kind in SchedulerType if kind.value not in SCHEDULES_BY_METRIC]
    if name not in known:
        reason = ", since it follows a metric and the draft's moves with the policy" * (name in SCHEDULES_BY_METRIC)
        raise ValueError(f"draft_lr_scheduler_type cannot be {name!r}{reason}; take one of {known}.")
    if name not in ENDLESS_SCHEDULES and num_steps is not None and num_warmup_steps >= num_steps:
        raise ValueError(
            f"draft_lr_warmup_steps ({num_warmup_steps}) must be below the number of steps of the draft ({num_steps}) with "
            f"draft_lr_scheduler_type={name!r}; lower it, or take one of {ENDLESS_SCHEDULES}."
        )
    options = dict(options or {})
    if name == "inverse_sqrt":
        options.setdefault("timescale", num_warmup_steps or 10_000)  # transformers' default, of the steps as given
    if name in ("constant", "constant_with_warmup") and options:
        raise ValueError(f"draft_lr_scheduler_kwargs must be empty for {name!r}, got {options}.")
    try:
        schedule = get_scheduler(
            "constant_with_warmup" if name == "constant" else name,
            torch.optim.SGD([torch.zeros(1)], lr=learning_rate),
            num_warmup_steps=num_warmup_steps + 1,
            num_training_steps=None if num_steps is None or "num_stable_steps" in options else num_steps + 1,
            scheduler_specific_kwargs=options,
        )
        factors = [schedule.lr_lambdas[0](step + 1) for step in (0, num_warmup_steps, num_warmup_steps + 1)]
        if not all(0 <= factor < math.inf for factor in factors):
            raise ValueError(f"factors of the learning rate would be {factors}")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"draft_lr_scheduler_kwargs={options} does not suit draft_lr_scheduler_type={name!r} at learning rate "
            f"{learning_rate}: {error}."
        ) from error
    return lambda step: schedule.lr_lambdas[0](step + 1)


@dataclass(frozen=True)
class DraftStep:
    """What one optimizer step of the draft did, over all ranks; made by [`DraftLearner.step`], read by loggers.

    Args:
        loss (`float`): mean loss a supervised position, over passes and ranks; NaN where none was supervised.
        loss_passes (`tuple[float, ...]`): mean loss of every pass.
        accept_passes (`tuple[float, ...]`): mean `1 - TV(teacher, draft)` of every pass, with the teacher of the
            loss: renormalised over a reduced vocabulary, so that it overstates what the engine accepts (see
            [`ExpectedAcceptance`] for that).
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
        loss_type (`str`): one of `LOSS_TYPES`, or `"auto"`: `kl` in a warm start and while the first guess is accepted less
            than `TV_FROM` of the time, since `tv` has no gradient where the draft is far off; then `tv`, by which acceptance
            is lost.
        pass_weights, temperature, chunk_size: see [`Eagle3Draft.compute_loss`].
        scheduler (`str`), scheduler_steps (`int`, *optional*), warmup_steps (`int`), scheduler_options (`dict`, *optional*):
            of the learning rate, see [`rate_factor`]. Where the schedule needs to know its number of steps and is not told,
            [`schedule`] is called before the first.
        opening (callable): factor of the scheduled learning rate at each update: [`level`], [`rising`] or [`settling`].
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
    scheduler: str = "constant"
    scheduler_steps: int | None = None
    warmup_steps: int = 0
    scheduler_options: dict[str, Any] | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    groups: Sequence[dist.ProcessGroup | None] | None = None
    opening: Callable[[int], float] = level
    is_warm_start: bool = field(default=False, init=False)
    acceptance: float = field(default=0.0, init=False)
    """Mean acceptance of the first guess in the last update, before it."""
    lr_scale: float = field(default=1.0, init=False)
    """Factor of the scheduled learning rate; a power of 2."""
    num_steps: int = field(default=0, init=False)
    num_skipped: int = field(default=0, init=False)
    num_skipped_in_a_row: int = field(default=0, init=False)

    def __post_init__(self):
        check_pass_weights(self.pass_weights, self.num_passes)
        self.parameters = [p for p in self.draft.parameters() if p.requires_grad]
        # fused: without temporaries as large as the weights
        is_fused = self.parameters[0].device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=is_fused
        )
        self.lr_scheduler: LambdaLR | None = None
        if self.scheduler_steps is not None or self.scheduler in ENDLESS_SCHEDULES:
            self.schedule(self.scheduler_steps)
        self._flat: torch.Tensor | None = None
        self._clear_sums()

    @contextmanager
    def following(self, factor: Callable[[int], float], *, peak: float) -> Iterator[None]:
        """Steps by another learning rate while open, `peak * factor(step)`; moments go on, so the opening is over afterwards.

        What the moments have gathered carries over: an optimizer that begins anew takes full steps in the direction of
        single batches, which undid much of a warm start (loss 0.95 before the first such step, 2.99 after it).
        """
        groups, schedule, counters = self.optimizer.param_groups, self.lr_scheduler, (self.num_steps, self.num_skipped)
        self.opening, self.is_warm_start = level, True
        rates = [(group["lr"], group.get("initial_lr", group["lr"])) for group in groups]
        for group in groups:
            group["lr"] = group["initial_lr"] = peak
        self.lr_scheduler = LambdaLR(self.optimizer, factor)
        try:
            yield
        finally:
            self.lr_scheduler, self.is_warm_start = schedule, False
            self.num_steps, self.num_skipped = counters
            for group, (rate, initial) in zip(groups, rates, strict=True):
                group["lr"], group["initial_lr"] = rate, initial

    @property
    def last_lr(self) -> float:
        """Learning rate of the next step."""
        assert self.lr_scheduler is not None
        return float(self.lr_scheduler.get_last_lr()[0]) * self._lr_factor

    @property
    def _lr_factor(self) -> float:
        return self.lr_scale * self.opening(self.num_steps)

    @property
    def _loss_type(self) -> str:
        if self.loss_type != "auto":
            return self.loss_type
        return "kl" if self.is_warm_start or self.acceptance < TV_FROM else "tv"

    def load_moments(self, state: dict[str, Any]) -> None:
        """Goes on with the moments of another run's `state_dict`, at this learner's own learning rate, without an opening."""
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        self.acceptance = state["acceptance"]
        self.opening = level

    def _clear_sums(self) -> None:
        device = self.parameters[0].device
        # fp64 on every device that has it: counts and sums of a window stay exact
        self._sums = torch.zeros(3, self.num_passes, dtype=torch.float64, device=device)
        self._covered = torch.zeros(2, dtype=torch.float64, device=device)

    def schedule(self, num_steps: int | None) -> None:
        """Starts the learning rate's schedule, over so many optimizer steps."""
        factor = rate_factor(
            self.scheduler,
            learning_rate=self.learning_rate,
            num_steps=num_steps,
            num_warmup_steps=self.warmup_steps,
            options=self.scheduler_options,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate  # an earlier schedule may have left another
        self.lr_scheduler = LambdaLR(self.optimizer, factor)

    @property
    def has_stopped(self) -> bool:
        """Whether the draft has stopped learning, after `MAX_SKIPPED_IN_A_ROW` steps that were not finite. Alike on all ranks."""
        return self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW

    def accumulate(self, batch: PackedBatch, policy: PolicyWeights) -> None:
        """Adds the loss sum of one piece of the batch and its gradient; no rank waits for another here."""
        if self.has_stopped:
            return
        self._flat_gradient()
        with self.autocast():
            loss = self.draft.compute_loss(
                batch,
                policy,
                num_passes=self.num_passes,
                temperature=self.temperature,
                loss_type=self._loss_type,
                pass_weights=self.pass_weights,
                chunk_size=self.chunk_size,
                accumulates=True,
            )
        self._sums += torch.stack([loss.loss_sum_K, loss.accept_sum_K, loss.count_K]).to(self._sums)
        assert loss.num_covered is not None and loss.num_supervised is not None
        self._covered += torch.stack([loss.num_covered, loss.num_supervised])

    def step(self) -> DraftStep:
        """Averages over ranks, clips and updates; every rank must call it the same number of times.

        What was accumulated is gone afterwards, after an error too, and the schedule has moved on by a step. After three steps
        in a row whose loss or gradient was not finite the draft stops learning: it says so once, and later steps are skipped.

        Raises:
            RuntimeError: if the schedule needs to know its number of steps and [`schedule`] was not called.
            Exception: what this rank could not do. If it came before the sum of the gradients, the other ranks have skipped
                the step, as for a loss that is not finite.
        """
        if self.lr_scheduler is None:
            raise RuntimeError(
                f"the schedule {self.scheduler!r} needs a number of steps; call schedule(num_steps) first."
            )
        if self.has_stopped:
            nan_K = (math.nan,) * self.num_passes
            return DraftStep(math.nan, nan_K, nan_K, 0, math.nan, math.nan, is_skipped=True)
        flat = failure = None
        try:
            flat = self._flat_gradient()
        except Exception as error:  # such as too little memory: no rank may wait for this one's gradient
            failure = error
            self._sums[0].fill_(math.nan)
        self.sum_over_ranks(self._sums, self._covered)
        loss_sum_K, accept_sum_K, count_K = self._sums
        covered = self._covered
        self._clear_sums()
        if flat is None:
            assert failure is not None
            if self._flat is not None:
                self._flat.zero_()
            raise failure
        weights_K = torch.tensor(self.pass_weights or (1.0,) * self.num_passes).to(count_K)
        weight = (weights_K * count_K).sum()
        is_empty = weight.item() == 0
        denominator = torch.ones_like(weight) if is_empty else weight
        loss = ((weights_K * loss_sum_K).sum() / denominator).item()
        grad_norm = math.nan
        if math.isfinite(loss):  # which all ranks know alike
            self.sum_over_ranks(flat)
            flat.mul_((1 / denominator).to(flat.dtype))
            grad_norm = torch.linalg.vector_norm(flat).item()
        is_skipped = not math.isfinite(grad_norm)
        if is_skipped:
            self._skip(loss, grad_norm)
        elif not is_empty:
            if self.max_grad_norm and grad_norm > self.max_grad_norm:
                flat.mul_(self.max_grad_norm / grad_norm)
            self._scaled_step()
            self.num_steps += 1
            self.num_skipped_in_a_row = 0
        flat.zero_()
        with warnings.catch_warnings():  # torch's own, where the very first step was skipped
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\)")
            self.lr_scheduler.step()  # whatever became of the step: the schedule ends where the policy's run does
        means = (torch.stack([loss_sum_K, accept_sum_K]) / count_K).tolist()
        if count_K[0] > 0 and math.isfinite(means[1][0]):
            self.acceptance = means[1][0]
        return DraftStep(
            math.nan if is_empty else loss,
            tuple(means[0]),
            tuple(means[1]),
            int(count_K[0].item()),
            (covered[0] / covered[1]).item(),
            grad_norm,
            is_skipped,
        )

    def _scaled_step(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= self._lr_factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def expected_acceptance(
        self, batch: PackedBatch, policy: PolicyWeights, log_p_T: torch.Tensor, *, is_greedy: bool = False
    ) -> ExpectedAcceptance:
        """See [`Eagle3Draft.expected_acceptance`]; in the learner's precision, of the learner's passes and temperature."""
        with self.autocast():
            return self.draft.expected_acceptance(
                batch, policy, num_passes=self.num_passes, log_p_T=log_p_T, temperature=self.temperature, is_greedy=is_greedy,
                chunk_size=self.chunk_size or 512,
            )  # fmt: skip

    def sampled_log_probs(self, batch: PackedBatch, policy: PolicyWeights) -> torch.Tensor:
        """See [`drafts.expected.sampled_log_probs`]; in the learner's precision and at its temperature."""
        with self.autocast():
            return sampled_log_probs(batch, policy, temperature=self.temperature, chunk_size=self.chunk_size or 512)

    def snapshot(self) -> list[torch.Tensor]:
        """Weights and moments as they are, on the host: a device has no room for a second set."""
        return [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]

    @torch.no_grad()
    def restore(self, snapshot: list[torch.Tensor]) -> None:
        """Puts weights and moments back; a moment that did not exist then is 0."""
        for index, tensor in enumerate(self._tensors()):
            if index < len(snapshot):
                tensor.copy_(snapshot[index])
            else:
                tensor.zero_()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Weights, then moments: those may come later, so that a snapshot without them is a beginning of one with them."""
        yield from self.parameters
        for parameter in self.parameters:
            yield from (x for x in self.optimizer.state.get(parameter, {}).values() if isinstance(x, torch.Tensor))

    def _skip(self, loss: float, grad_norm: float) -> None:
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if self.has_stopped:
            message = (
                f"the draft has STOPPED LEARNING: its loss ({loss}) or gradient norm ({grad_norm}) was not finite "
                f"{MAX_SKIPPED_IN_A_ROW} times in a row. The policy is unharmed and trains on, and rollouts stay the policy's "
                "own, but they will be accepted less and less. Lower draft_learning_rate, or look for NaN in the policy's "
                "hidden states, and resume from a checkpoint: the draft then tries again."
            )
            logger.error(message)
            warnings.warn(message, stacklevel=3)

    def _flat_gradient(self) -> torch.Tensor:
        """One buffer, of which every parameter's gradient is a part."""
        if self._flat is None:
            first, sizes = self.parameters[0], [p.numel() for p in self.parameters]
            flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
            for parameter, part in zip(self.parameters, flat.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self._flat = flat
        return self._flat

    def sum_over_ranks(self, *tensors: torch.Tensor) -> None:
        """Adds tensors up over the learner's groups, in place."""
        groups = self.groups
        if groups is None:
            has_peers = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            groups = [dist.group.WORLD] if has_peers else []
        for group in groups:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the draft's weights that a bit-exact resume needs."""
        assert self.lr_scheduler is not None
        return {
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "opening": self.opening.__name__,
            "acceptance": self.acceptance,
            "lr_scale": self.lr_scale,
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from [`state_dict`]; a draft that had stopped learning tries again."""
        assert self.lr_scheduler is not None
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.opening = {opening.__name__: opening for opening in (level, rising, settling)}[state["opening"]]
        self.acceptance = state["acceptance"]
        self.lr_scale = state["lr_scale"]
        self.num_steps = state["num_steps"]
        self.num_skipped = state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"] % MAX_SKIPPED_IN_A_ROW
