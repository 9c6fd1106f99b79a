"""A policy step's work on the draft: which rows teach it, in how many updates, and whether these are kept.

    window n      a a a b b b c c c d d d      rows of four prompts that the policy was trained on
    held out                  c c c            measure the draft before and after, and teach in window n + 1
    updates       |a d z|b a z|d b a|z d b|    the others, and z, what window n - 1 held out: each teaches once

One update on all rows and several on parts of them cost the same and see the same rows. Updates that make the draft worse on
the rows that were held out, beyond what chance explains, never reach the engine.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
from hf_codraft.drafts.expected import ExpectedAcceptance
from hf_codraft.drafts.learner import DraftLearner, DraftStep
from hf_codraft.taps.packed import PackedBatch, PolicyWeights

HELD_OUT = 4  # one prompt of so many, or one row of so many where there are fewer prompts
NOISE = 2.0  # standard errors by which the held-out rows must take more steps before updates are undone
WINDOWS_TO_RECOVER = 4  # kept windows after which a learning rate that was halved is doubled again

_TENSORS = ("token_ids_T", "supervised_T", "taps_TX", "hidden_TH")
Listener = Callable[[list[PackedBatch], PolicyWeights], None]


@dataclass(frozen=True)
class WindowReport:
    """What one window did to the draft, over all ranks; made by [`DraftUpdates.run`], read by loggers.

    Args:
        steps (`tuple[DraftStep, ...]`): the updates, in order.
        expected_before, expected_after (`float`): accept length expected on the held-out rows, before and after the updates;
            NaN where none could be held out.
        expected_rates (`tuple[float, ...]`): share of the steps in which the guess of each position is expected to be accepted
            on the held-out rows, before the updates. What the engine's counters show, were these rows drafted once more.
        is_rolled_back (`bool`): the updates were undone.
        learning_rate (`float`): of the window's last update.
        listening_s (`float`): seconds that listeners took.
    """

    steps: tuple[DraftStep, ...]
    expected_before: float
    expected_after: float
    expected_rates: tuple[float, ...]
    is_rolled_back: bool
    learning_rate: float
    listening_s: float = field(default=0.0, compare=False)


@dataclass
class DraftUpdates:
    """Collects the rows of a window (the policy's accumulation pieces) and trains the draft on them.

    Every rank brings its own rows and calls [`run`] at the same time. Which rows are held out and their order follow from the
    seed and the number of the window, so that a resumed run goes on alike.

    Args:
        learner ([`DraftLearner`]): makes the updates.
        num_updates (`int`): optimizer steps a window.
        is_checked (`bool`): hold rows out and undo updates that make the draft worse there.
        is_greedy (`bool`): how the engine's draft guesses, see [`Eagle3Draft.expected_acceptance`].
        seed (`int`): of the order of rows.
    """

    learner: DraftLearner
    num_updates: int = 1
    is_checked: bool = True
    is_greedy: bool = False
    seed: int = 0
    listeners: list[Listener] = field(default_factory=list)
    """Called with the rows of a window before the draft is updated on them: for controls and benchmarks."""
    num_rolled_back: int = field(default=0, init=False)
    num_windows: int = field(default=0, init=False)
    _num_kept_in_a_row: int = field(default=0, init=False)
    _rows: list[PackedBatch] = field(default_factory=list, init=False)
    _held_before: list[PackedBatch] = field(default_factory=list, init=False)

    def add(self, batch: PackedBatch) -> None:
        """Takes one piece of the window; its hidden states wait on the host, since all pieces' would crowd a device."""
        self._rows += batch.to(torch.device("cpu")).segments()

    def run(self, policy: PolicyWeights) -> WindowReport:
        """Trains the draft on the window's rows; every rank must call it.

        Args:
            policy ([`PolicyWeights`]): of the policy that the window's rows come from.
        """
        rows, self._rows = self._rows, []
        started = time.perf_counter()
        for listener in self.listeners:
            listener(rows, policy)
        listening_s = time.perf_counter() - started
        draw = random.Random(f"{self.seed} {self.num_windows}")
        self.num_windows += 1
        held = hold_out(rows, draw) if self.is_checked else []
        teaching = [row for row in rows if not any(row is other for other in held)] + self._held_before
        self._held_before = held
        draw.shuffle(teaching)

        check = self._check_of(held, policy)
        before = check()
        snapshot = self.learner.snapshot() if self.is_checked else []  # on every rank: other ranks' rows may be worse
        steps = tuple(self._update(teaching[number :: self.num_updates], policy) for number in range(self.num_updates))
        after = check()
        is_worse, lengths, rates = self._compare(before, after)
        if is_worse:
            self.learner.restore(snapshot)
            self.learner.lr_scale /= 2
            self.num_rolled_back += 1
        self._num_kept_in_a_row = 0 if is_worse else self._num_kept_in_a_row + 1
        if self._num_kept_in_a_row == WINDOWS_TO_RECOVER:
            self.learner.lr_scale = min(2 * self.learner.lr_scale, 1.0)
            self._num_kept_in_a_row = 0
        return WindowReport(steps, *lengths, rates, is_worse, self.learner.last_lr, listening_s)

    def _update(self, rows: list[PackedBatch], policy: PolicyWeights) -> DraftStep:
        if rows:
            self.learner.accumulate(PackedBatch.join(rows).to(policy.head_VH.device), policy)
        return self.learner.step()

    def _check_of(self, rows: list[PackedBatch], policy: PolicyWeights) -> Callable[[], ExpectedAcceptance]:
        """What tells how much would be accepted of the draft, as it is when asked, on these rows."""
        if not rows:
            nothing = torch.zeros(0, dtype=torch.float64)
            none = ExpectedAcceptance(nothing, nothing, torch.zeros(self.learner.num_passes, dtype=torch.float64))
            return lambda: none
        batch = PackedBatch.join(rows).to(policy.head_VH.device)
        log_p_T = self.learner.sampled_log_probs(batch, policy)  # the updates do not change it
        return lambda: self.learner.expected_acceptance(batch, policy, log_p_T, is_greedy=self.is_greedy)

    def _compare(
        self, before: ExpectedAcceptance, after: ExpectedAcceptance
    ) -> tuple[bool, tuple[float, float], tuple[float, ...]]:
        """Whether the updates cost steps beyond noise, row by row, over all ranks.

        Also the accept length before and after, and the accept rates before.
        """
        more_S = after.steps_S - before.steps_S
        sums = torch.stack([more_S.sum(), more_S.square().sum(), before.steps_S.sum(), after.steps_S.sum()])
        counts = torch.tensor([len(more_S), before.tokens_S.sum()], dtype=torch.float64)
        total = torch.cat([sums, counts, before.reached_K]).to(self.learner.parameters[0].device)
        self.learner.sum_over_ranks(total)
        more, squares, steps_before, steps_after, num_spans, num_tokens, *reached = total.tolist()
        lengths, rates = (math.nan, math.nan), (math.nan,) * len(reached)
        if steps_before > 0:
            lengths = (num_tokens / steps_before, num_tokens / steps_after)
            rates = tuple(steps / steps_before for steps in reached)
        if not math.isfinite(steps_after):
            return True, lengths, rates
        if num_spans < 2:
            return False, lengths, rates
        variance = max(squares - more**2 / num_spans, 0.0) / (num_spans - 1)
        return more > NOISE * math.sqrt(num_spans * variance) and more > 0, lengths, rates

    def state_dict(self) -> dict[str, Any]:
        """Counters, the same on all ranks; the rows that wait are in [`rows_state_dict`]."""
        return {
            "num_windows": self.num_windows,
            "num_rolled_back": self.num_rolled_back,
            "num_kept_in_a_row": self._num_kept_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_windows = state["num_windows"]
        self.num_rolled_back = state["num_rolled_back"]
        self._num_kept_in_a_row = state["num_kept_in_a_row"]

    def rows_state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's rows that were held out in the last window and teach in the next."""
        if not self._held_before:
            return {}
        batch = PackedBatch.join(self._held_before)
        tensors = {name: getattr(batch, name) for name in _TENSORS}
        return {"cu_seqlens": torch.tensor(batch.layout.cu_seqlens), **tensors}

    def load_rows_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._held_before = []
        if state:
            layout = PackedLayout(tuple(state["cu_seqlens"].tolist()))
            self._held_before = PackedBatch(Shard(layout), **{name: state[name] for name in _TENSORS}).segments()


def hold_out(rows: list[PackedBatch], draw: random.Random) -> list[PackedBatch]:
    """A quarter of the rows, by prompt where there are enough: completions of one prompt resemble one another."""
    by_prompt: dict[tuple[int, ...], list[PackedBatch]] = {}
    for row in rows:
        first = int(row.supervised_T.int().argmax()) if row.supervised_T.any() else len(row.supervised_T)
        by_prompt.setdefault(tuple(row.token_ids_T[:first].tolist()), []).append(row)
    groups = list(by_prompt.values()) if len(by_prompt) >= HELD_OUT else [[row] for row in rows]
    return [row for group in draw.sample(groups, len(groups) // HELD_OUT) for row in group]
