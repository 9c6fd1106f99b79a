"""Ranks of one host: rings in anonymous shared memory.

The memory has no name in any file system (`memfd_create`): there is nothing to unlink, nothing stays after a crash, not
even after one during setup, and the size of /dev/shm (64 MB in a stock container) is no limit. Peers open it through
/proc/<pid>/fd of the rank that made it.

    | abort word, closed words, abort text | ring | ring | ...
    ring: | released cursor | read cursor | slot 0: header, payload | slot 1 | ...

A source writes payload, header, sequence number, in this order; x86-64 keeps the order of stores and every word is one
aligned store, so a sink that sees the number sees the rest. `shared_memory_problem` turns other machines away.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import distributed as dist

from hf_codraft.taps.peers import Peers
from hf_codraft.taps.protocol import (
    HEADER_BYTES,
    HEADER_WORDS,
    SOURCE_PATIENCE,
    Header,
    Ring,
    RingKey,
    RingPlan,
    TapError,
    TapPeerLost,
    TapTimeout,
    gather_objects,
    payload_view,
)

_LINE_WORDS = 8  # a cache line, so that the cursors of source and sink don't share one
_ABORT_TEXT_BYTES = 1024
_SPINS = 64
_LONGEST_SLEEP_S = 1e-3


class SharedMemory:
    """A block that one rank of a group makes and all map; also which of them aborted, closed or died.

    Args:
        group (`ProcessGroup`): its ranks share the block; every one of them must call this.
        num_bytes (`int`): size of the part that [`bytes_`] shows, behind the control words.

    Raises:
        TapError: on every rank, if one of them could not map the block.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int):
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        control_bytes = 8 * _LINE_WORDS * (1 + self.num_ranks) + _ABORT_TEXT_BYTES
        self._map = self._map_on_all(group, control_bytes + max(num_bytes, 8))
        self._peers = Peers(group)
        if any(gather_objects(bool(self._peers.unseen), group)):
            self._peers.close()
            raise TapError(
                "a rank can't watch the others' processes (pidfd_open), whose death it would then not notice"
            )
        view = memoryview(self._map)
        self._control = view[: control_bytes - _ABORT_TEXT_BYTES].cast("q")
        self._abort_text = view[control_bytes - _ABORT_TEXT_BYTES : control_bytes]
        self.words = view[control_bytes:].cast("B")[: max(num_bytes, 8)].cast("q")
        self.bytes_ = torch.frombuffer(self._map, dtype=torch.uint8)[control_bytes:]

    def _map_on_all(self, group: dist.ProcessGroup, size: int) -> mmap.mmap:
        descriptor, mapped, problem = -1, None, ""
        if self.rank == 0:
            try:
                descriptor = os.memfd_create("taps", os.MFD_CLOEXEC)
                os.posix_fallocate(descriptor, 0, size)  # else too little memory would end the process at a write
            except OSError as error:
                problem = f"rank 0 can't make {size} bytes of shared memory: {error}"
        path, problem = gather_objects((f"/proc/{os.getpid()}/fd/{descriptor}", problem), group)[0]
        try:
            if self.rank != 0 and not problem:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if not problem:
                mapped = mmap.mmap(descriptor, size)
        except OSError as error:
            problem = f"rank {self.rank} can't map shared memory of rank 0: {error}"
        problems = [x for x in dict.fromkeys(gather_objects(problem, group)) if x]
        if descriptor >= 0:
            os.close(descriptor)
        if problems or mapped is None:
            raise TapError("; ".join(problems))
        return mapped

    def abort(self, reason: str) -> None:
        if not self._control[0]:
            text = reason.encode()[: _ABORT_TEXT_BYTES - 1]
            self._abort_text[: len(text)] = text
            self._control[0] = self.rank + 1

    def close(self) -> None:
        """Says goodbye, so that this process may exit without being taken for a lost one."""
        self._control[_LINE_WORDS * (1 + self.rank)] = 1
        self._peers.close()

    def check_peers(self) -> None:
        """
        Raises:
            TapPeerLost: if a rank aborted, or died without closing.
        """
        if self._control[0] and self._control[0] != self.rank + 1:
            text = bytes(self._abort_text).rstrip(b"\0").decode(errors="replace")
            raise TapPeerLost(f"rank {self._control[0] - 1} aborted: {text}")
        for rank in self._peers.ended():
            if not self._control[_LINE_WORDS * (1 + rank)]:
                raise TapPeerLost(f"the process of rank {rank} died")

    def wait_until(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Spins a little, then sleeps between looks.

        Raises:
            TapPeerLost: see [`check_peers`].
            TapTimeout: after `timeout_s` seconds.
        """
        for _ in range(_SPINS):
            if is_ready():
                return
        start, sleep_s = time.monotonic(), 1e-5
        while True:
            try:
                self.check_peers()
            except TapPeerLost:
                if is_ready():  # it wrote before it went
                    return
                raise
            if is_ready():
                return
            if time.monotonic() - start > timeout_s:
                raise TapTimeout(f"waited {timeout_s:g} s")
            time.sleep(sleep_s)
            sleep_s = min(1.2 * sleep_s, _LONGEST_SLEEP_S)


def shared_memory_problem(group: dist.ProcessGroup) -> str:
    """Why the ranks of a group can't share memory, or an empty string; collective, the same answer on all ranks."""
    machine = platform.machine()
    problem = "" if machine == "x86_64" else f"{machine} may reorder stores, which a ring without fences can't bear"
    problems = [f"rank {rank}: {x}" for rank, x in enumerate(gather_objects(problem, group)) if x]
    if problems:
        return "; ".join(problems)
    try:
        SharedMemory(group, 8).close()
    except TapError as error:
        return str(error)
    return ""


class ShmRing:
    """One end of a ring in [`SharedMemory`].

    Args:
        plan ([`RingPlan`]): what travels.
        memory ([`SharedMemory`]): of the group.
        offset (`int`): bytes into it where the ring begins, a multiple of 64.
        timeout_s (`float`): seconds before a wait becomes an error.
    """

    def __init__(self, plan: RingPlan, memory: SharedMemory, *, offset: int, timeout_s: float):
        self.plan, self.memory, self.timeout_s = plan, memory, timeout_s
        self._released = offset // 8
        self._read = self._released + _LINE_WORDS
        self._slots = [
            offset // 8 + 2 * _LINE_WORDS + i * (HEADER_WORDS + plan.payload_bytes // 8) for i in range(plan.num_slots)
        ]

    @staticmethod
    def num_bytes(plan: RingPlan) -> int:
        return 16 * _LINE_WORDS + plan.num_slots * (HEADER_BYTES + plan.payload_bytes)

    def _slot(self, sequence: int) -> int:
        return self._slots[(sequence - 1) % self.plan.num_slots]

    def _payload(self, sequence: int) -> torch.Tensor:
        start = 8 * self._slot(sequence) + HEADER_BYTES
        return self.memory.bytes_[start : start + self.plan.payload_bytes]

    def _has_room(self, sequence: int) -> bool:
        return sequence - self.memory.words[self._released] <= self.plan.num_slots

    def _write_payload(self, header: Header, payload: torch.Tensor) -> None:
        if self.plan.carries_payload:
            payload_view(self._payload(header.sequence), header).copy_(payload)

    def _write_header(self, header: Header) -> None:
        slot = self._slot(header.sequence)
        for i, word in enumerate(header.to_words()[1:], start=1):
            self.memory.words[slot + i] = word

    def _write_sequence(self, sequence: int) -> None:
        self.memory.words[self._slot(sequence)] = sequence

    def wait_for_room(self, sequence: int) -> None:
        self.memory.wait_until(lambda: self._has_room(sequence), timeout_s=SOURCE_PATIENCE * self.timeout_s)

    def write(self, header: Header, payload: torch.Tensor) -> None:
        self.wait_for_room(header.sequence)
        self._write_payload(header, payload)
        self._write_header(header)
        self._write_sequence(header.sequence)

    def read(self, sequence: int) -> tuple[Header, torch.Tensor]:
        words, slot = self.memory.words, self._slot(sequence)
        # A later number than the awaited one means a broken protocol, which the channel names; don't wait for it.
        self.memory.wait_until(lambda: words[slot] >= sequence, timeout_s=self.timeout_s)
        max_bytes = self.plan.route.max_numel * self.plan.route.dtype.itemsize
        header = Header.from_words(words[slot : slot + HEADER_WORDS].tolist(), max_bytes=max_bytes)
        words[self._read] += 1
        if not self.plan.carries_payload:
            return header, self._payload(sequence)
        return header, payload_view(self._payload(sequence), header)

    def release(self) -> None:
        self.memory.words[self._released] += 1

    def progress(self) -> str:
        words = self.memory.words
        written = max(words[slot] for slot in self._slots)
        return f"last sequence written {written}, read {words[self._read]}, released {words[self._released]}"


class ShmTransport:
    """Rings in one block of shared memory, which all ranks of the group map.

    Args:
        group (`ProcessGroup`): used during setup alone.
        timeout_s (`float`): seconds before a wait becomes an error.
    """

    ring_class = ShmRing

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float):
        self.group, self.timeout_s = group, timeout_s
        self._memory: SharedMemory | None = None

    def open(self, plans: Sequence[RingPlan]) -> Mapping[RingKey, Ring]:
        sizes = [self.ring_class.num_bytes(plan) for plan in plans]
        self._memory = memory = SharedMemory(self.group, sum(sizes))
        rank, rings, offset = memory.rank, {}, 0
        for plan, size in zip(plans, sizes):
            if rank in (plan.route.owner_rank, plan.sink_rank):
                ring = self.ring_class(plan, memory, offset=offset, timeout_s=self.timeout_s)
                rings[plan.route.tap_id, plan.sink_rank] = ring
            offset += size
        return rings

    def abort(self, reason: str) -> None:
        if self._memory is not None:
            self._memory.abort(reason)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
