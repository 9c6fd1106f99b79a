"""Where the seconds of a step go: phases that add up to its wall time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What is none of the others is "policy" inside `training_step` and at the optimizer, and "other" around the rollouts.
PHASES = ("generate", "refit", "reward", "logprob", "policy", "draft", "other")


class PhaseClock:
    """Books every moment to one phase; a phase that opens inside another stops it meanwhile.

    Args:
        synchronize (callable, *optional*): waits for work that a device has queued. It is called at every border, so that the
            work counts to the phase that queued it and not to the one that first reads a result.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None):
        self._synchronize = synchronize
        self._open = ["policy"]
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Starts a step: what was booked before is forgotten."""
        self._book()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def read(self) -> dict[str, float]:
        """Seconds of every phase since the step began."""
        self._book()
        return dict(self._seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Books what happens while open to this phase."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def move(self, name: str, seconds: float) -> None:
        """Books seconds of the phase that is open to another one, for what has its own clock."""
        self._book()
        self._seconds[self._open[-1]] -= seconds
        self._seconds[name] += seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Books what happens while open to no phase: it is not part of a step."""
        self._book()
        kept, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        try:
            yield
        finally:
            self._book()
            self._seconds = kept

    def _book(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
