"""GPUs across hosts: NCCL on a side stream. Not run on a GPU.

NCCL ignores tags and matches transfers of a communicator by their order, in which several taps of one pair of ranks need
not agree under interleaved schedules: every ring has a communicator of its own. Headers go ahead through a control ring
over gloo; a receive is posted when its header is there, since one posted early would hold a part of the GPU while it waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from hf_codraft.taps.protocol import Header, Ring, RingKey, RingPlan, payload_view
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
        self._num_released = 0

    def write(self, header: Header, payload: torch.Tensor) -> None:
        self.control.write(header, payload)
        dense = payload.contiguous()
        self.layer.record(self._done, stream="current")
        self.layer.wait(self._done, stream="side")
        self.layer.send(dense, pair=self.pair, to_rank=_SINK)

    def read(self, sequence: int) -> tuple[Header, torch.Tensor]:
        header, _ = self.control.read(sequence)
        slot = (sequence - 1) % len(self.slots)
        landing = payload_view(self.slots[slot], header)
        self.layer.wait(self._consumed[slot], stream="side")
        self.layer.receive(landing, pair=self.pair, from_rank=_SOURCE)
        self.layer.record(self._done, stream="side")
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
        timeout_s (`float`): seconds before a wait of the host becomes an error, and NCCL's own watchdog ends a transfer.
    """

    def __init__(self, group: dist.ProcessGroup, layer: DeviceLayer, *, timeout_s: float):
        self.group, self.layer, self.timeout_s = group, layer, timeout_s
        self.control = GlooTransport(group, timeout_s=timeout_s)
        self._pairs: list[Any] = []

    def open(self, plans: Sequence[RingPlan]) -> Mapping[RingKey, Ring]:
        control = self.control.open([replace(plan, carries_payload=False) for plan in plans])
        rank, rings = dist.get_rank(self.group), {}
        store = agree_on_store(self.group)
        for plan in plans:
            key = (plan.route.tap_id, plan.sink_rank)
            if key in control:
                is_sink = rank == plan.sink_rank
                slots: Sequence[torch.Tensor] = ()
                if is_sink:
                    slots = self.layer.allocate(plan.num_slots * plan.payload_bytes).split(plan.payload_bytes)
                # All ranks walk the same list, so that no two wait for each other's next communicator.
                pair_store = dist.PrefixStore(f"{plan.route.tap_id}/{plan.sink_rank}", store)
                pair = self.layer.connect_pair(pair_store, _SINK if is_sink else _SOURCE, timeout_s=self.timeout_s)
                self._pairs.append(pair)
                rings[key] = NcclRing(control[key], self.layer, pair=pair, slots=slots)
        return rings

    def _disconnect(self) -> None:
        while self._pairs:
            self.layer.disconnect(self._pairs.pop())

    def abort(self, reason: str) -> None:
        self.control.abort(reason)
        self._disconnect()

    def close(self) -> None:
        self.control.close()
        self.layer.finish()
        self._disconnect()
