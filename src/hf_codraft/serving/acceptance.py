"""How much of what a draft guessed was accepted."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Verification steps by the number of accepted tokens; made by the engine, read by logs and benchmarks.

    These are vLLM's own counts: a row's last step counts as it ran, also what it accepted behind the row's end (a stop token
    or the limit of its length), so accept lengths of short rows are some percent high.

    Args:
        histogram (`tuple[int, ...]` of length `num_speculative_tokens + 1`):
            entry j counts the steps in which exactly j drafted tokens were accepted; empty if nothing was drafted.
    """

    histogram: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        return sum(self.histogram)

    @property
    def accept_length(self) -> float:
        """Mean tokens a verification step yields, the policy's own included: 1 where nothing is accepted."""
        if self.num_steps == 0:
            return 1.0
        return 1.0 + sum(j * count for j, count in enumerate(self.histogram)) / self.num_steps

    @property
    def accept_rates(self) -> tuple[float, ...]:
        """Share of the steps in which the drafted token of each position was accepted."""
        if self.num_steps == 0:
            return ()
        return tuple(sum(self.histogram[i + 1 :]) / self.num_steps for i in range(len(self.histogram) - 1))

    @classmethod
    def total(cls, rows: Iterable["Acceptance"]) -> "Acceptance":
        """Sum over rows (rows without a step add nothing)."""
        histograms = [row.histogram for row in rows if row.histogram]
        return cls(tuple(sum(column) for column in zip(*histograms, strict=True)))
