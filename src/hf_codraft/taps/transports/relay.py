"""Taps that ride on the pipeline's own activations, as detached extra outputs of its stages; the fallback.

A stage returns its hidden state followed by the taps of all stages up to its own, which the schedule sends on like any
activation, without a gradient:

    stage 0                stage 1                      stage 2 (the sink)
    (hidden, tap 0) -----> (hidden, tap 0, tap 3) ----> keeps both

It works wherever the pipeline does, but the taps take the room and the time of activations on every hop, and only a draft
on the last stage's rank can read them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_codraft.taps.protocol import Header, Ring, RingKey, RingPlan, TapProtocolError, TapRoute, tensor_crc
from hf_codraft.taps.transports.local import LocalRing


def carried_into(routes: Sequence[TapRoute], stage: int, *, sink_rank: int) -> tuple[TapRoute, ...]:
    """The taps that a stage receives behind its hidden state, in their order among its inputs.

    What the sink's rank owns itself does not travel.

    Args:
        routes (`Sequence[TapRoute]`): all taps.
        stage (`int`): global stage; `num_stages` gives what the last stage would send on.
        sink_rank (`int`): rank of the last stage.
    """
    carried = [route for route in routes if route.owner_stage < stage and route.owner_rank != sink_rank]
    return tuple(sorted(carried, key=lambda route: (route.owner_stage, route.tap_id)))


class RelayTransport:
    """Packs taps into a stage's outputs and unpacks them from the last stage's inputs. The pipeline calls both.

    Args:
        routes (`Sequence[TapRoute]`): all taps.
        rank (`int`), sink_rank (`int`): this rank and the last stage's, in the channel's group.
        check_crc (`bool`): compare the bytes that a stage sends with those it published, and give what arrives a crc for
            the channel to compare; none travels with an activation.
    """

    def __init__(self, routes: Sequence[TapRoute], *, rank: int, sink_rank: int, check_crc: bool = False):
        self.routes, self.rank, self.sink_rank, self.check_crc = tuple(routes), rank, sink_rank, check_crc
        self.last_stage = max(route.owner_stage for route in routes)
        self._rings: dict[RingKey, LocalRing] = {}
        self._num_delivered = 0

    def open(self, plans: Sequence[RingPlan]) -> Mapping[RingKey, Ring]:
        self._rings = {
            (plan.route.tap_id, plan.sink_rank): LocalRing(plan)
            for plan in plans
            if self.rank in (plan.route.owner_rank, plan.sink_rank)
        }
        return self._rings

    def outputs(self, stage: int, *, microbatch: int, received: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a stage appends to its hidden state: what it received, then what it published in this microbatch.

        Raises:
            TapProtocolError: if a tap of this stage was not published, one of another microbatch was, or `check_crc` finds
                that its bytes changed.
        """
        own = []
        for route in carried_into(self.routes, stage + 1, sink_rank=self.sink_rank):
            if route.owner_stage != stage:
                continue
            messages = self._rings[route.tap_id, self.sink_rank].messages
            if not messages or messages[0][0].microbatch != microbatch:
                found = messages[0][0].microbatch if messages else None
                raise TapProtocolError(
                    f"stage {stage} sends microbatch {microbatch} on, but of tap {route.tap_id} it holds microbatch {found}."
                )
            header, tensor = messages.popleft()
            if self.check_crc and tensor_crc(tensor) != header.crc:
                raise TapProtocolError(
                    f"stage {stage} sends microbatch {microbatch} on: tap {route.tap_id} changed since it was published (crc)."
                )
            own.append(tensor)
        return (*received, *own)

    def deliver(
        self, received: Sequence[torch.Tensor], *, stage: int, step: int, microbatch: int, num_microbatches: int
    ) -> None:
        """Hands what the last stage received to the channel's `collect` of the same rank.

        The pipeline vouches for step and microbatch: no header travels with an activation.

        Raises:
            TapProtocolError: if the number of tensors is not that of [`carried_into`].
        """
        carried = carried_into(self.routes, stage, sink_rank=self.sink_rank)
        if len(received) != len(carried):
            taps = [route.tap_id for route in carried]
            raise TapProtocolError(f"stage {stage} received {len(received)} tensors for its taps {taps}.")
        self._num_delivered += 1
        for route, tensor in zip(carried, received):
            header = Header(
                self._num_delivered,
                step,
                microbatch,
                num_microbatches,
                route.tap_id,
                tensor.dtype,
                tuple(tensor.shape),
                tensor_crc(tensor) if self.check_crc else 0,
            )
            self._rings[route.tap_id, self.sink_rank].write(header, tensor.detach())

    def abort(self, reason: str) -> None:
        """Nothing to tell: the ranks meet in the pipeline's transfers alone, which end by themselves."""

    def close(self) -> None:
        self._rings.clear()


@dataclass(frozen=True)
class Relay:
    """What a pipeline carries beside the hidden states of one step; made by `TapChannel.relay`, called by `parallel.schedule`.

    Args:
        transport ([`RelayTransport`]): of this rank.
        step (`int`), num_microbatches (`int`): the channel's.
        count_sent (callable): told the bytes of taps that a stage sends to the next one.
    """

    transport: RelayTransport
    step: int
    num_microbatches: int
    count_sent: Callable[[int], None]

    def num_into(self, stage: int) -> int:
        """Tensors that a stage receives behind its hidden state, each of the hidden state's shape."""
        return len(carried_into(self.transport.routes, stage, sink_rank=self.transport.sink_rank))

    def pass_on(self, stage: int, microbatch: int, received: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a stage sends behind its hidden state, once it has published its taps; the last stage keeps what it received.

        Raises:
            TapProtocolError: if a tap is missing, or another microbatch's.
        """
        if stage != self.transport.last_stage:
            sent = self.transport.outputs(stage, microbatch=microbatch, received=received)
            self.count_sent(sum(tensor.nbytes for tensor in sent))
            return sent
        self.transport.deliver(
            received, stage=stage, step=self.step, microbatch=microbatch, num_microbatches=self.num_microbatches
        )
        return ()
