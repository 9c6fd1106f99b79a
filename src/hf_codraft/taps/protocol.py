"""What a tap channel and its transports agree on: routes, headers, rings and errors."""

import ctypes
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import distributed as dist

HEADER_WORDS = 16  # int64 words
HEADER_BYTES = 8 * HEADER_WORDS
MAX_DIMS = 6
# Where a sink waits for a rank that hangs, its other sources soon wait for the sink. A source is more patient, so that the
# rank speaks first which waits for the culprit.
SOURCE_PATIENCE = 1.5
T = TypeVar("T")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TapError(RuntimeError):
    """Base of everything that goes wrong with taps between ranks."""


class TapTimeout(TapError):
    """A rank waited longer for another than the channel allows."""


class TapPeerLost(TapError):
    """Another rank died, closed its connection or aborted."""


class TapProtocolError(TapError):
    """The ranks, or the caller and the channel, disagree about what comes next."""


@dataclass(frozen=True)
class TapRoute:
    """Where one tap comes from; made by the pipeline, the same on every rank, read by [`TapChannel`].

    Args:
        tap_id (`int`): id j is the residual stream after j decoder layers, 0 the embeddings' output and
            `num_layers + 1` the hidden state after the final norm.
        owner_stage (`int`): global stage that produces it.
        owner_rank (`int`): rank of that stage in the channel's group.
        max_numel (`int`): elements of the largest microbatch's tensor; the size of a slot.
        dtype (`torch.dtype`): of every published tensor.
    """

    tap_id: int
    owner_stage: int
    owner_rank: int
    max_numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RingPlan:
    """One ring: the way of one tap from its owner to one sink; made by [`TapChannel`], read by transports.

    Args:
        route ([`TapRoute`]): what travels and from where.
        sink_rank (`int`): where to, in the channel's group.
        num_slots (`int`): messages that may lie between the source's write and the sink's release.
        carries_payload (`bool`): False for a control ring, whose headers announce data that travels another way.
    """

    route: TapRoute
    sink_rank: int
    num_slots: int
    carries_payload: bool = True

    @property
    def is_local(self) -> bool:
        return self.route.owner_rank == self.sink_rank

    @property
    def payload_bytes(self) -> int:
        """Bytes of a slot's payload, rounded up to whole cache lines."""
        num_bytes = self.route.max_numel * self.route.dtype.itemsize if self.carries_payload else 0
        return -(-num_bytes // 64) * 64


@dataclass(frozen=True)
class Header:
    """What travels with every tap; made by the source's channel, checked by the sink's.

    Args:
        sequence (`int`): messages of this ring so far, this one included; never starts again.
        step (`int`), microbatch (`int`), num_microbatches (`int`), tap_id (`int`): what the tensor is.
        dtype (`torch.dtype`), shape (`tuple[int, ...]`): how to read its bytes.
        crc (`int`): CRC-32 of the bytes, 0 where it is not checked.
    """

    sequence: int
    step: int
    microbatch: int
    num_microbatches: int
    tap_id: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to_words(self) -> list[int]:
        shape = [*self.shape, *[0] * (MAX_DIMS - len(self.shape))]
        return [
            self.sequence, self.step, self.microbatch, self.num_microbatches, self.tap_id,
            DTYPES.index(self.dtype), len(self.shape), *shape, self.num_bytes, self.crc, 0,
        ]  # fmt: skip

    @classmethod
    def from_words(cls, words: Sequence[int], *, max_bytes: int) -> "Header":
        """Reads what [`to_words`] wrote.

        Raises:
            TapProtocolError: if the words can't be a header, which means that they were read before they were written
                or overwritten afterwards.
        """
        *ids, dtype_code, num_dims = words[:7]
        num_bytes, crc = words[13:15]
        if 0 <= dtype_code < len(DTYPES) and 0 <= num_dims <= MAX_DIMS and ids[0] > 0:
            header = cls(
                ids[0], ids[1], ids[2], ids[3], ids[4], DTYPES[dtype_code], tuple(words[7 : 7 + num_dims]), crc
            )
            if header.num_bytes == num_bytes <= max_bytes:
                return header
        raise TapProtocolError(f"a slot of at most {max_bytes} bytes holds no tap header but {list(words)}.")


class Ring(Protocol):
    """One end of a FIFO of tensors with a bounded number of slots. The source calls `write`, the sink the rest."""

    def write(self, header: Header, payload: torch.Tensor) -> None:
        """Sends; waits only where every slot is taken. The payload may change as soon as this returns."""

    def read(self, sequence: int) -> tuple[Header, torch.Tensor]:
        """Waits for the message that follows the last one read; the tensor stays valid until its `release`."""

    def release(self) -> None:
        """Gives the slot of the oldest message read and not yet released back to the source."""

    def progress(self) -> str:
        """What this end knows of the ring, for error messages."""


@contextmanager
def naming_the_last_wait(plan: RingPlan, progress: Callable[[], str]) -> Iterator[None]:
    """Says which ring could not be closed; what a ring raises inside says only why."""
    try:
        yield
    except TapError as error:
        raise type(error)(
            f"rank {plan.route.owner_rank}: close waits for rank {plan.sink_rank} to take what is left of tap "
            f"{plan.route.tap_id}: {str(error).rstrip('.')}. {plan.num_slots} slot(s); {progress()}."
        ) from error


RingKey = tuple[int, int]  # (tap id, sink rank)


class Transport(Protocol):
    """Moves the bytes of all rings that travel between ranks; knows nothing of steps and microbatches.

    `abort` and `close` may also be called where `open` was not, or failed half-way.
    """

    def open(self, plans: Sequence[RingPlan]) -> Mapping[RingKey, Ring]:
        """Collective over the group; returns the rings of which this rank is an end."""

    def abort(self, reason: str) -> None:
        """Lets every rank that waits on this one, now or later, fail at once."""

    def close(self) -> None:
        """Ends this rank's part after its last step; what it wrote still reaches the sinks."""


def tensor_crc(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes in row-major order; copies a tensor of an accelerator to the host."""
    dense = tensor.detach().cpu().contiguous()
    if not dense.numel():
        return 0
    return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))


def payload_view(bytes_: torch.Tensor, header: Header) -> torch.Tensor:
    """The first bytes of a slot (`torch.Tensor` of shape `(bytes,)`, uint8) as the tensor that a header describes."""
    return bytes_[: header.num_bytes].view(header.dtype).view(header.shape)


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """`value` of every rank of the group, in rank order, on every rank."""
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_results(make: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """What `make()` returns on every rank of the group, in rank order; where it fails on one, no rank goes on.

    Raises:
        TapError: on every rank; says which ranks failed and why.
    """
    made: list[T] = []
    failure, problem = None, ""
    try:
        made.append(make())
    except Exception as error:
        failure, problem = error, f"{type(error).__name__}: {error}"
    every = gather_objects((made, problem), group)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(every) if problem]
    if isinstance(failure, TapError):  # the ranks have agreed on that one already
        raise failure
    if problems:
        raise TapError("; ".join(problems)) from failure
    return [made[0] for made, _ in every]
