"""GPUs across hosts: NCCL on a stream for each ring. Not run on a GPU.

NCCL ignores tags and matches transfers of a communicator by their order, in which several taps of one pair of ranks need
not agree under interleaved schedules: every ring has a communicator of its own. Headers go ahead through a control ring
over gloo; a receive is posted when its header is there, since one posted early would hold a part of the GPU while it waits.

A send ends when its receive runs. On a stream for several rings, whose order two ranks need not share, the sends of both
could stand before the receives that the other waits for: every ring has a stream of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hf_codraft.taps.protocol import (
    SOURCE_PATIENCE,
    Header,
    Ring,
    RingKey,
    RingPlan,
    TapError,
    TapTimeout,
    gather_results,
    payload_view,
)
from hf_codraft.taps.transports.device import DeviceLayer
from hf_codraft.taps.transports.gloo import GlooTransport, agree_on_store

_SOURCE, _SINK = 0, 1  # ranks in a ring's communicator


class NcclRing:
    """One end of a ring whose payloads travel by NCCL.

    A source must not change a published tensor in place before the sink has released it: the transfer may still run.

    Args:
        control ([`Ring`]): of headers.
        layer ([`DeviceLayer`]): this rank's device.
        pair: communicator of source and sink alone.
        slots (`Sequence[torch.Tensor]` of shape `(bytes,)`, uint8): landing slots on the sink's GPU; empty for a source.
    """

    def __init__(self, control: Ring, layer: DeviceLayer, *, pair: Any, slots: Sequence[torch.Tensor]):
        self.control, self.layer, self.pair, self.slots = control, layer, pair, slots
        self._consumed = [layer.new_event() for _ in slots]
        self._done = layer.new_event()
        self.stream = layer.new_stream()
        self._num_released = 0

    def exchange_byte(self, byte: torch.Tensor, *, timeout_s: float) -> None:
        """Lets NCCL set up the communicator: left to the first tap, its source would wait for a sink that is not due yet.

        Args:
            byte (`torch.Tensor` of shape `(1,)`, uint8): sent by the source, overwritten at the sink.

        Raises:
            TapTimeout: if it did not pass.
        """
        self.layer.record(self._done, stream="current")  # behind what used this memory before
        self.layer.wait(self._done, stream=self.stream)
        if self.slots:
            self.layer.receive(byte, pair=self.pair, from_rank=_SOURCE, stream=self.stream)
        else:
            self.layer.send(byte, pair=self.pair, to_rank=_SINK, stream=self.stream)
        if not self.layer.finish(self.stream, timeout_s=timeout_s):
            raise TapTimeout(f"the first byte did not pass: waited {timeout_s:g} s")

    def write(self, header: Header, payload: torch.Tensor) -> None:
        self.control.write(header, payload)
        dense = payload.contiguous()
        self.layer.record(self._done, stream="current")
        self.layer.wait(self._done, stream=self.stream)
        self.layer.send(dense, pair=self.pair, to_rank=_SINK, stream=self.stream)

    def read(self, sequence: int) -> tuple[Header, torch.Tensor]:
        header, _ = self.control.read(sequence)
        slot = (sequence - 1) % len(self.slots)
        landing = payload_view(self.slots[slot], header)
        self.layer.wait(self._consumed[slot], stream=self.stream)
        self.layer.receive(landing, pair=self.pair, from_rank=_SOURCE, stream=self.stream)
        self.layer.record(self._done, stream=self.stream)
        self.layer.wait(self._done, stream="current")
        return header, landing

    def release(self) -> None:
        self.layer.record(self._consumed[self._num_released % len(self.slots)], stream="current")
        self._num_released += 1
        self.control.release()

    def progress(self) -> str:
        return self.control.progress()


class NcclTransport:
    """Rings over NCCL, with control rings over gloo.

    Args:
        group (`ProcessGroup`): whose ranks the taps join.
        layer ([`DeviceLayer`]): this rank's device.
        timeout_s (`float`): seconds before a wait of the host becomes an error. A transfer may wait longer for its receive,
            up to the group's own timeout.
    """

    def __init__(self, group: dist.ProcessGroup, layer: DeviceLayer, *, timeout_s: float):
        self.group, self.layer, self.timeout_s = group, layer, timeout_s
        self.rank = dist.get_rank(group)
        self.control = GlooTransport(group, timeout_s=timeout_s)
        self._pairs: list[Any] = []
        self._rings: dict[RingKey, NcclRing] = {}

    def open(self, plans: Sequence[RingPlan]) -> Mapping[RingKey, Ring]:
        control = self.control.open([replace(plan, carries_payload=False) for plan in plans])
        own = {(plan.route.tap_id, plan.sink_rank): plan for plan in plans}
        own = {key: plan for key, plan in own.items() if key in control}
        memory: dict[RingKey, torch.Tensor] = {}

        def allocate() -> None:
            for key, plan in own.items():
                is_sink = self.rank == plan.sink_rank
                memory[key] = self.layer.allocate(plan.num_slots * plan.payload_bytes if is_sink else 1)

        gather_results(allocate, self.group)  # or others would wait to connect to a rank that has no room
        store = agree_on_store(self.group)
        # All ranks walk the same list, so that no two wait for each other's next communicator.
        rings = {
            key: self._connect(plan, store, control=control[key], memory=memory[key]) for key, plan in own.items()
        }
        self._rings = rings
        return rings

    def _connect(self, plan: RingPlan, store: dist.Store, *, control: Ring, memory: torch.Tensor) -> NcclRing:
        is_sink = self.rank == plan.sink_rank
        pair_rank = _SINK if is_sink else _SOURCE
        pair_store = dist.PrefixStore(f"{plan.route.tap_id}/{plan.sink_rank}", store)
        # A deferred draft reads long after the send; the group's limit can be read from its backend only.
        watchdog_s = self.group._get_backend(self.layer.device).options._timeout.total_seconds()
        try:
            # NCCL waits for the other end without a limit: it is asked when both are here.
            pair_store.set(f"here/{pair_rank}", "")
            pair_store.wait([f"here/{1 - pair_rank}"], timedelta(seconds=self.timeout_s))
            self._pairs.append(self.layer.connect_pair(pair_store, pair_rank, watchdog_s=watchdog_s))
            slots = memory.split(plan.payload_bytes) if is_sink else ()
            ring = NcclRing(control, self.layer, pair=self._pairs[-1], slots=slots)
            ring.exchange_byte(memory[:1], timeout_s=self.timeout_s)
        except RuntimeError as error:
            other = plan.route.owner_rank if is_sink else plan.sink_rank
            raise TapError(
                f"rank {self.rank} can't connect to rank {other} for tap {plan.route.tap_id} to rank {plan.sink_rank} "
                f"(waits at most {self.timeout_s:g} s): {error}"
            ) from error
        return ring

    def _disconnect(self) -> None:
        self._rings = {}
        while self._pairs:
            self.layer.disconnect(self._pairs.pop())

    def abort(self, reason: str) -> None:
        self.control.abort(reason)
        self._disconnect()

    def close(self) -> None:
        self.control.close()
        patience_s = SOURCE_PATIENCE * self.timeout_s
        for (tap_id, sink_rank), ring in self._rings.items():
            if not self.layer.finish(ring.stream, timeout_s=patience_s):
                raise TapTimeout(
                    f"rank {self.rank}: close waited {patience_s:g} s for the transfers of tap {tap_id} to rank {sink_rank} "
                    f"to end; {ring.progress()}."
                )
        self._disconnect()
