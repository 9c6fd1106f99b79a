"""GPUs of one host: slots on the sink's GPU, into which the source's copy engine writes. Not run on a GPU.

Headers and cursors go through a control ring in the host's shared memory; the order of reads and writes of a slot is kept
by events on the devices, so that no host waits for a device:

    source  current: produce -> record produced
            side:    wait produced, wait consumed[slot] -> copy -> record ready[slot]       host: write the header
    sink    host:    read the header
            current: wait ready[slot] -> the draft reads -> record consumed[slot]           host: release
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from hf_codraft.taps.protocol import (
    Header,
    Ring,
    RingKey,
    RingPlan,
    TapTimeout,
    gather_results,
    naming_the_last_wait,
    payload_view,
)
from hf_codraft.taps.transports.device import DeviceLayer
from hf_codraft.taps.transports.shm import ShmRing, ShmTransport


class CudaIpcRing:
    """One end of a ring on the sink's GPU.

    A source must not change a published tensor in place before its slot is used again: the copy may still run.

    Args:
        control ([`ShmRing`]): of headers.
        layer ([`DeviceLayer`]): this rank's device.
        slots (`Sequence[torch.Tensor]` of shape `(bytes,)`, uint8): on the sink's GPU.
        ready (`Sequence`), consumed (`Sequence`): an event per slot, shared by both ends.
        side: stream of the copies. One serves all rings: a stream waits only for what was enqueued before the wait (a slot's
            `consumed` is recorded before the release for which the host waited), so that no waits form a circle.
    """

    def __init__(
        self,
        control: ShmRing,
        layer: DeviceLayer,
        *,
        slots: Sequence[torch.Tensor],
        ready: Sequence[Any],
        consumed: Sequence[Any],
        side: Any,
    ):
        self.control, self.layer, self.side = control, layer, side
        self.slots, self.ready, self.consumed = slots, ready, consumed
        self._produced = layer.new_event()
        self._num_written = self._num_released = 0

    def write(self, header: Header, payload: torch.Tensor) -> None:
        self.control.wait_for_room(header.sequence)
        slot = (header.sequence - 1) % len(self.slots)
        self.layer.record(self._produced, stream="current")
        self.layer.wait(self._produced, stream=self.side)
        self.layer.wait(self.consumed[slot], stream=self.side)
        self.layer.copy(payload_view(self.slots[slot], header), payload, stream=self.side)
        self.layer.record(self.ready[slot], stream=self.side)
        # After the record: the sink's stream waits for what was recorded last when it asks.
        self.control.write(header, payload)
        self._num_written = header.sequence

    def read(self, sequence: int) -> tuple[Header, torch.Tensor]:
        header, _ = self.control.read(sequence)
        slot = (sequence - 1) % len(self.slots)
        self.layer.wait(self.ready[slot], stream="current")
        return header, payload_view(self.slots[slot], header)

    def release(self) -> None:
        self.layer.record(self.consumed[self._num_released % len(self.slots)], stream="current")
        self._num_released += 1
        self.control.release()

    def finish_sends(self) -> None:
        """Waits until the sink has released all that this source sent: it no longer needs the source's events."""
        if self._num_written:
            with naming_the_last_wait(self.control.plan, self.progress):
                self.control.wait_for_room(self._num_written + len(self.slots))

    def progress(self) -> str:
        return self.control.progress()


class CudaIpcTransport:
    """Rings on the sinks' GPUs, with control rings in shared memory.

    Args:
        group (`ProcessGroup`): used during setup alone.
        layer ([`DeviceLayer`]): this rank's device.
        timeout_s (`float`): seconds before a wait of the host becomes an error.
    """

    def __init__(self, group: dist.ProcessGroup, layer: DeviceLayer, *, timeout_s: float):
        self.group, self.layer, self.timeout_s = group, layer, timeout_s
        self.control = ShmTransport(group, timeout_s=timeout_s)
        self._side: Any = None
        self._rings: dict[RingKey, CudaIpcRing] = {}  # kept after an abort: others may still use what they opened

    def open(self, plans: Sequence[RingPlan]) -> Mapping[RingKey, Ring]:
        control = self.control.open([replace(plan, carries_payload=False) for plan in plans])
        own = [plan for plan in plans if (plan.route.tap_id, plan.sink_rank) in control]
        rank, memory, events = dist.get_rank(self.group), {}, {}

        def export() -> dict[tuple[RingKey, int], tuple[Any, list[Any]]]:
            handles = {}
            self._side = self.layer.new_stream()
            for plan in own:
                key, shared = (plan.route.tap_id, plan.sink_rank), None
                events[key] = [self.layer.new_event(is_shared=True) for _ in range(plan.num_slots)]
                if rank == plan.sink_rank:
                    memory[key] = self.layer.allocate(plan.num_slots * plan.payload_bytes)
                    shared = self.layer.export_memory(memory[key])
                handles[key, rank] = shared, [self.layer.export_event(event) for event in events[key]]
            return handles

        every = {name: handle for of_rank in gather_results(export, self.group) for name, handle in of_rank.items()}
        for plan in own:
            key = (plan.route.tap_id, plan.sink_rank)
            is_sink = rank == plan.sink_rank
            peer_memory, peer_events = every[key, plan.route.owner_rank if is_sink else plan.sink_rank]
            opened = [self.layer.open_event(handle) for handle in peer_events]
            ring_control = control[key]
            assert isinstance(ring_control, ShmRing)
            self._rings[key] = CudaIpcRing(
                ring_control,
                self.layer,
                slots=(memory[key] if is_sink else self.layer.open_memory(peer_memory)).split(plan.payload_bytes),
                ready=opened if is_sink else events[key],
                consumed=events[key] if is_sink else opened,
                side=self._side,
            )
        return self._rings

    def abort(self, reason: str) -> None:
        self.control.abort(reason)

    def close(self) -> None:
        for ring in self._rings.values():
            ring.finish_sends()
        if self._rings and not self.layer.finish(self._side, timeout_s=self.timeout_s):
            raise TapTimeout(
                f"rank {dist.get_rank(self.group)}: close waited {self.timeout_s:g} s for the GPU to end the copies of taps."
            )
        self.control.close()
        self._rings = {}
