"""CPU ranks across hosts: receives that wait in landing slots before the message is sent.

Connections of their own carry them: on the pipeline's group a second transfer between the same two ranks could match the
wrong receive. Header and payload travel as one message, so that a tensor can't arrive with another one's header.
"""

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_codraft.taps.peers import Peers
from hf_codraft.taps.protocol import (
    HEADER_BYTES,
    SOURCE_PATIENCE,
    Header,
    Ring,
    RingKey,
    RingPlan,
    TapError,
    TapPeerLost,
    TapTimeout,
    gather_objects,
    naming_the_last_wait,
    payload_view,
)


class GlooRing:
    """One end of a ring whose messages are matched by tag.

    The source keeps a snapshot of each of its last `num_slots` messages (gloo reads the tensor until the other side
    has taken it), the sink as many landing slots. So a source waits only once `2 * num_slots` messages are on their
    way: later than the shared memory's, which the bound on slots allows.

    Args:
        plan ([`RingPlan`]): what travels.
        backend (`ProcessGroupGloo`): connections of the taps alone.
        peers ([`Peers`]): of the group; says who is gone where a connection broke.
        tag (`int`): of this ring alone.
        timeout_s (`float`): seconds before a wait becomes an error.
    """

    def __init__(self, plan: RingPlan, backend: Any, *, peers: Peers, tag: int, timeout_s: float):
        self.plan, self._backend, self._peers, self.tag, self.timeout_s = plan, backend, peers, tag, timeout_s
        self._buffers = [
            torch.empty(HEADER_BYTES + plan.payload_bytes, dtype=torch.uint8) for _ in range(plan.num_slots)
        ]
        self._pending: deque[dist.Work | None] = deque()  # sends of a source, receives of a sink, oldest first
        self._num_sent = self._num_read = self._num_released = 0
        if backend.rank() == plan.sink_rank:
            for slot in range(plan.num_slots):
                self._post_receive(slot)

    def _post_receive(self, slot: int) -> None:
        try:
            work = self._backend.recv([self._buffers[slot]], self.plan.route.owner_rank, self.tag)
        except RuntimeError:
            work = None  # the source has left, as it may after its last step; only a read would miss it
        self._pending.append(work)

    def _finish_oldest(self, timeout_s: float) -> None:
        # gloo's work can't be polled (`is_completed` turns true in `wait` alone), and a wait that times out closes the
        # connection: the error can't be survived, which a tap's timeout is not meant to be.
        start, work = time.monotonic(), self._pending.popleft()
        if work is None:
            raise TapPeerLost(f"the other rank closed the connection; {self._who_left()}")
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - start >= 0.99 * timeout_s:
                raise TapTimeout(f"waited {timeout_s:g} s") from error
            raise TapPeerLost(f"the connection closed; {self._who_left()} ({error})") from error

    def _who_left(self) -> str:
        # Whoever loses a rank aborts: the connection that closes here may be another's than that of the rank that died.
        return self._peers.culprits() or "the other rank died, aborted or left early, its own error says which"

    def write(self, header: Header, payload: torch.Tensor) -> None:
        if len(self._pending) == self.plan.num_slots:
            self._finish_oldest(SOURCE_PATIENCE * self.timeout_s)
        buffer = self._buffers[self._num_sent % self.plan.num_slots]
        buffer[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(header.to_words()))
        num_bytes = HEADER_BYTES
        if self.plan.carries_payload:
            payload_view(buffer[HEADER_BYTES:], header).copy_(payload)
            num_bytes += header.num_bytes
        try:
            self._pending.append(self._backend.send([buffer[:num_bytes]], self.plan.sink_rank, self.tag))
        except RuntimeError as error:
            raise TapPeerLost(f"the connection is closed; {self._who_left()} ({error})") from error
        self._num_sent += 1

    def read(self, sequence: int) -> tuple[Header, torch.Tensor]:
        self._finish_oldest(self.timeout_s)
        buffer = self._buffers[self._num_read % self.plan.num_slots]
        self._num_read += 1
        max_bytes = self.plan.route.max_numel * self.plan.route.dtype.itemsize
        header = Header.from_words(buffer[:HEADER_BYTES].view(torch.int64).tolist(), max_bytes=max_bytes)
        if not self.plan.carries_payload:
            return header, buffer[HEADER_BYTES:]
        return header, payload_view(buffer[HEADER_BYTES:], header)

    def release(self) -> None:
        slot = self._num_released % self.plan.num_slots
        self._num_released += 1
        self._post_receive(slot)

    def finish_sends(self) -> None:
        """Waits until the sink has room for everything that this source sent."""
        with naming_the_last_wait(self.plan, self.progress):
            while self._num_sent and self._pending:
                self._finish_oldest(SOURCE_PATIENCE * self.timeout_s)

    def disconnect(self) -> None:
        """Lets go of the backend, which a traceback through this ring would keep alive, and with it the connections."""
        self._pending.clear()
        del self._backend

    def progress(self) -> str:
        if self._num_sent:
            return f"last sequence sent {self._num_sent}, {len(self._pending)} of them not known to have arrived"
        return f"last sequence read {self._num_read}, released {self._num_released}"


def agree_on_store(group: dist.ProcessGroup) -> dist.Store:
    """A part of the default store that nobody else has used; collective."""
    return dist.PrefixStore(f"taps/{gather_objects(uuid.uuid4().hex, group)[0]}", _get_default_store())


def connect(group: dist.ProcessGroup, *, timeout_s: float) -> Any:
    """Gloo connections between the ranks of a group (a `ProcessGroupGloo`), apart from the group's own; collective.

    Not by `dist.new_group`: it asks all ranks of all replicas to come, or else names the group by its ranks and the
    number of living groups; a second channel on the same ranks would find the dead addresses of the first.

    Raises:
        TapError: on every rank, if two of them can't connect.
    """
    store, rank = agree_on_store(group), dist.get_rank(group)
    backend, problem = None, ""
    try:
        backend = dist.ProcessGroupGloo(store, rank, dist.get_world_size(group), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        problem = f"rank {rank} can't connect to the others: {error}"
    # Nobody goes on, and perhaps closes its connections again, before all have theirs.
    problems = [x for x in gather_objects(problem, group) if x]
    if problems:
        raise TapError("; ".join(problems))
    return backend


class GlooTransport:
    """Rings over gloo connections of their own.

    Args:
        group (`ProcessGroup`): whose ranks the taps join.
        timeout_s (`float`): seconds before a wait becomes an error.
    """

    ring_class = GlooRing

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float):
        self.group, self.timeout_s = group, timeout_s
        self._backend: Any = None
        self._peers: Peers | None = None
        self._rings: dict[RingKey, GlooRing] = {}

    def open(self, plans: Sequence[RingPlan]) -> Mapping[RingKey, Ring]:
        self._backend = connect(self.group, timeout_s=self.timeout_s)
        self._peers = peers = Peers(self.group)
        rank = dist.get_rank(self.group)
        self._rings = {
            (plan.route.tap_id, plan.sink_rank): self.ring_class(
                plan, self._backend, peers=peers, tag=tag, timeout_s=self.timeout_s
            )
            for tag, plan in enumerate(plans)
            if rank in (plan.route.owner_rank, plan.sink_rank)
        }
        return self._rings

    def _disconnect(self) -> None:
        # Connections close with the last reference to the backend, pending receives included.
        for ring in self._rings.values():
            ring.disconnect()
        self._rings, self._backend = {}, None
        if self._peers is not None:
            self._peers.close()

    def abort(self, reason: str) -> None:
        """Closes the connections: the others learn that this rank is gone, not why."""
        self._disconnect()

    def close(self) -> None:
        for ring in self._rings.values():
            ring.finish_sends()
        self._disconnect()
