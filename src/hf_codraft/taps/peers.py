"""The processes of a group's ranks: which have ended or stand still, as far as this host can see."""

import os
import select
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed as dist

from hf_codraft.taps.protocol import gather_objects

_PATIENCE_S = 2.0  # a connection breaks a little before the process behind it is gone
_PF_EXITING = 0x4  # of the flags in /proc/PID/stat


class PeerLost(RuntimeError):
    """A transfer failed because another rank ended or stands still."""


def host_identity() -> tuple[str, str]:
    """Alike for processes that see each other: two containers with process ids of their own count as two hosts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").readlink())


def _open(pid: int) -> int | None:
    """A pidfd, where the system grants one: a killed process stays visible to kill(pid, 0) until its parent reaps it, but
    its pidfd becomes readable at once."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _close(pidfds: Iterable[int]) -> None:
    for pidfd in pidfds:
        os.close(pidfd)


class Peers:
    """Watches the other ranks' processes, as far as they can be seen from here; every rank of the group makes one.

    Args:
        group (`ProcessGroup`): its ranks; used at construction alone.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.rank = dist.get_rank(group)
        places = gather_objects((host_identity(), os.getpid()), group)
        here = places[self.rank][0]
        self._pids = {rank: pid for rank, (host, pid) in enumerate(places) if host == here and rank != self.rank}
        opened = {rank: _open(pid) for rank, pid in self._pids.items()}
        self._rank_of_pidfd = {pidfd: rank for rank, pidfd in opened.items() if pidfd is not None}
        self.unseen = sorted(set(range(len(places))) - {self.rank, *self._rank_of_pidfd.values()})
        self._poll = select.poll()
        for pidfd in self._rank_of_pidfd:
            self._poll.register(pidfd, select.POLLIN)
        self._finalizer = weakref.finalize(self, _close, list(self._rank_of_pidfd))
        # At exit the system closes them; closed sooner, a late look could find other files under their numbers.
        self._finalizer.atexit = False

    def ended(self) -> list[int]:
        """Ranks whose processes are gone."""
        return sorted(self._rank_of_pidfd[pidfd] for pidfd, _ in self._poll.poll(0))

    def stopped(self) -> list[int]:
        """Ranks whose processes a signal or a debugger has stopped."""
        ended = self.ended()
        return [rank for rank, pid in self._pids.items() if rank not in ended and _state(pid)[0] in ("T", "t")]

    def close(self) -> None:
        """Ends the watch; every other rank is unseen then."""
        self._finalizer()
        self.unseen = sorted({*self.unseen, *self._pids})
        self._rank_of_pidfd, self._pids, self._poll = {}, {}, select.poll()

    def culprits(self) -> str:
        """Which ranks have ended or are stopped, or an empty string; to be asked where a connection broke.

        A process that was killed is known here as soon as its connections are closed, before [`ended`] knows.
        """
        leaving = [rank for rank, pid in self._pids.items() if _state(pid)[1] & _PF_EXITING]
        found = []
        if stopped := self.stopped():  # first: others may have ended because they waited for these
            found.append(f"rank(s) {stopped} are stopped, by a signal or a debugger")
        if ended := sorted({*self.ended(), *leaving}):
            found.append(f"rank(s) {ended} ended, killed or with an error that their own output shows")
        return "; ".join(found)

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Says whose fault it was where a transfer inside fails; other errors pass as they are.

        Args:
            what (`str`): what this rank was doing, "a training step".

        Raises:
            PeerLost: instead of the backend's own error, which names an address at best.
        """
        try:
            yield
        except RuntimeError as error:
            if not _is_of_backend(error):
                raise
            raise PeerLost(
                f"rank {self.rank} lost the others in {what}: {self._verdict()}. torch says: {error}"
            ) from error

    def _verdict(self) -> str:
        deadline = time.monotonic() + _PATIENCE_S
        while not (culprits := self.culprits()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if culprits:
            return culprits
        unseen = f", except rank(s) {self.unseen}, which can't be seen from here" if self.unseen else ""
        return f"no process ended or is stopped{unseen}; so one of them hangs, or can't be reached"


def _state(pid: int) -> tuple[str, int]:
    """Letter and flags of a process, nothing where there is none; its name, in brackets, may hold spaces and brackets."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[6])


def _is_of_backend(error: RuntimeError) -> bool:
    """Whether a collective or a transfer failed; gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
