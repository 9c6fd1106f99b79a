"""How tensors get from one context-parallel rank to another: a process group, or threads of one process.

Every message is a *parcel*: tensors of agreed shapes behind a header that says which layout they belong to, so that
two ranks whose layouts differ get an error and not each other's tokens. Both sides know from the layout what comes;
an empty parcel is not sent at all.

Over a process group header and body are two messages of one batch, because what comes must fit where it is awaited: gloo
ends the process if it does not. Headers always fit. The tag of a body says whose it is and how long, so that one that
nobody awaits never arrives, and the header, which is read first, says why.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import distributed as dist

HEADER_BYTES = 16  # the layout's id, and the bytes behind it


@dataclass
class Traffic:
    """What a rank has sent; kept by its transport, read by benchmarks and tests. A message is a parcel, header included."""

    num_bytes: int = 0
    num_messages: int = 0

    def reset(self) -> None:
        self.num_bytes = self.num_messages = 0


@dataclass(frozen=True)
class Sent:
    """What a rank sends by a closed form; made by `cost` and `block_draft`, compared with [`Traffic`]."""

    num_bytes: int = 0
    num_messages: int = 0

    @classmethod
    def parcel(cls, body_bytes: int) -> "Sent":
        """One message with its header; an empty one is not sent."""
        return cls(HEADER_BYTES + body_bytes, 1) if body_bytes else cls()

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.num_bytes + other.num_bytes, self.num_messages + other.num_messages)

    def times(self, count: int) -> "Sent":
        return Sent(self.num_bytes * count, self.num_messages * count)


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor that is expected."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _pack(tensors: Sequence[torch.Tensor], layout_id: int) -> torch.Tensor | None:
    """Header and tensors as bytes; None if there is nothing in them."""
    body = [x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors if x.numel()]
    if not body:
        return None
    header = torch.tensor([layout_id, sum(len(x) for x in body)]).view(torch.uint8)
    return torch.cat([header.to(body[0].device), *body])


def _unpack(parcel: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    tensors, start = [], HEADER_BYTES
    for spec in specs:
        part = parcel[start : start + spec.num_bytes]
        start += spec.num_bytes
        # an empty part has no address, but an offset that a view refuses all the same
        is_aligned = (
            part.data_ptr() % spec.dtype.itemsize == 0 and int(part.storage_offset()) % spec.dtype.itemsize == 0
        )
        tensors.append((part if is_aligned else part.clone()).view(spec.dtype).view(spec.shape))
    return tensors


class Delivery(Protocol):
    """A parcel on its way to this rank."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there."""
        ...


class Transport(Protocol):
    """Point-to-point messages between `world` ranks, in order between each pair."""

    rank: int
    world: int
    traffic: Traffic

    def exchange(
        self,
        sends: Sequence[tuple[int, Sequence[torch.Tensor]]],
        receives: Sequence[tuple[int, Sequence[Spec]]],
        *,
        layout_id: int,
        device: torch.device,
        what: str,
    ) -> list[Delivery]:
        """Posts messages both ways and returns at once; the peers must post the opposite.

        Args:
            sends: peers and the tensors for each.
            receives: peers and what each will send.
            layout_id (`int`): of the layout that both sides must have.
            device (`torch.device`): where what comes is put.
            what (`str`): named in errors.
        """
        ...


@dataclass
class _Sending:
    """Parcels on their way from this rank; they must stay alive until they have left."""

    works: Sequence[Any] = ()
    parcels: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        works, self.works = self.works, ()  # a second wait on gloo's send would wait for another send
        for work in works:
            work.wait()
        self.parcels = ()


@dataclass(frozen=True)
class _Nothing:
    specs: tuple[Spec, ...]
    device: torch.device
    sending: _Sending = field(default_factory=_Sending)

    def wait(self) -> list[torch.Tensor]:
        self.sending.wait()
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in self.specs]


def _check_header(parcel: torch.Tensor, *, layout_id: int, rank: int, peer: int, what: str) -> None:
    got_id, got_bytes = parcel[:HEADER_BYTES].cpu().view(torch.int64).tolist()
    if got_id != layout_id or got_bytes != len(parcel) - HEADER_BYTES:
        raise RuntimeError(
            f"context-parallel rank {rank} expected {what} of layout {layout_id:x} ({len(parcel) - HEADER_BYTES} bytes) "
            f"from rank {peer}, but that rank sent layout {got_id:x} ({got_bytes} bytes). All ranks must build the same "
            "PackedLayout for a row; compare its cu_seqlens and pieces (and the anchors of block drafts)."
        )


@dataclass(frozen=True)
class _GroupDelivery:
    header_works: Sequence[Any]
    body_works: Sequence[Any]
    sending: (
        _Sending  # of the same exchange: a rank that has all it waited for may end, and must not take this with it
    )
    parcel: torch.Tensor
    specs: Sequence[Spec]
    rank: int
    peer: int
    layout_id: int
    what: str

    def wait(self) -> list[torch.Tensor]:
        with self._named_errors():
            for work in self.header_works:
                work.wait()
        _check_header(self.parcel, layout_id=self.layout_id, rank=self.rank, peer=self.peer, what=self.what)
        with self._named_errors():
            for work in self.body_works:
                work.wait()
            self.sending.wait()
        return _unpack(self.parcel, self.specs)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"context-parallel rank {self.rank} waited for {self.what} from rank {self.peer}: {error}. Did that rank "
                "fail, or does its layout differ?"
            ) from error


def _body_tag(layout_id: int, num_bytes: int) -> int:
    """Equal where layout and size are, on every rank; headers have tag 0."""
    return 1 + hash((layout_id, num_bytes)) % (2**31 - 1)


class GroupTransport:
    """Messages over a `torch.distributed` process group (gloo, NCCL), whose timeout ends every wait.

    All ranks of the group make theirs together: over NCCL that is a collective, since torch leaves undefined what happens
    if a group's first messages are a batch that some ranks take no part in. Nothing of NCCL has run on a GPU yet.

    Ranks whose layouts or sizes differ get an error that names both. Not over NCCL if sizes differ: it knows no tags and
    answers a batch as a whole, so that the wait lasts until the group's timeout.

    Args:
        group (`ProcessGroup`, *optional*): the ranks that share a row, in the order of the layout's ranks; all by default.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.traffic = Traffic()
        if "nccl" in dist.get_backend_config(group):
            dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)

    def exchange(
        self,
        sends: Sequence[tuple[int, Sequence[torch.Tensor]]],
        receives: Sequence[tuple[int, Sequence[Spec]]],
        *,
        layout_id: int,
        device: torch.device,
        what: str,
    ) -> list[Delivery]:
        operations: list[dist.P2POp] = []
        sent: list[torch.Tensor] = []
        for peer, tensors in sends:
            parcel = _pack(tensors, layout_id)
            if parcel is not None:
                self.traffic.num_bytes += len(parcel)
                self.traffic.num_messages += 1
                sent.append(parcel)
                operations += self._operations(dist.isend, parcel, peer, layout_id)
        num_sends = len(operations)
        parcels: list[torch.Tensor | None] = []
        for peer, specs in receives:
            size = sum(spec.num_bytes for spec in specs)
            parcels.append(torch.empty(HEADER_BYTES + size, dtype=torch.uint8, device=device) if size else None)
            if (parcel := parcels[-1]) is not None:
                operations += self._operations(dist.irecv, parcel, peer, layout_id)
        works = dist.batch_isend_irecv(operations) if operations else []
        # NCCL answers a batch with one work, gloo with one a message
        is_split = len(works) == len(operations)
        sending, receiving = (works[:num_sends], works[num_sends:]) if is_split else (works, [])
        leaving = _Sending(sending, sent)
        deliveries: list[Delivery] = []
        for (peer, specs), parcel in zip(receives, parcels):
            if parcel is None:
                deliveries.append(_Nothing(tuple(specs), device, leaving))
                continue
            header, body = ([receiving.pop(0)], [receiving.pop(0)]) if is_split else (list(works), [])
            deliveries.append(_GroupDelivery(header, body, leaving, parcel, specs, self.rank, peer, layout_id, what))
        return deliveries

    def _operations(
        self, operation: Callable[..., Any], parcel: torch.Tensor, peer: int, layout_id: int
    ) -> list[dist.P2POp]:
        header, body = parcel[:HEADER_BYTES], parcel[HEADER_BYTES:]
        return [
            dist.P2POp(operation, part, group=self.group, group_peer=peer, tag=tag)
            for part, tag in ((header, 0), (body, _body_tag(layout_id, len(body))))
        ]


@dataclass
class _Mailboxes:
    """What N ranks of one process share: parcels by (source, target, number of the message between the two)."""

    world: int
    timeout_s: float
    parcels: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    failure: BaseException | None = None

    def put(self, key: tuple[int, int, int], parcel: torch.Tensor) -> None:
        with self.changed:
            self.parcels[key] = parcel
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def take(self, key: tuple[int, int, int], what: str) -> torch.Tensor:
        source, target, _ = key
        with self.changed:
            is_there = self.changed.wait_for(lambda: key in self.parcels or self.failure is not None, self.timeout_s)
            if self.failure is not None:
                raise RuntimeError(
                    f"context-parallel rank {target} gives up waiting for {what}: another rank failed."
                ) from self.failure
            if not is_there:
                raise TimeoutError(
                    f"context-parallel rank {target} waited {self.timeout_s:.0f} s for {what} from rank {source}; do all "
                    "ranks make the same calls in the same order?"
                )
            return self.parcels.pop(key)


@dataclass(frozen=True)
class _LocalDelivery:
    mailboxes: _Mailboxes
    key: tuple[int, int, int]
    specs: Sequence[Spec]
    layout_id: int
    what: str

    def wait(self) -> list[torch.Tensor]:
        peer, rank, _ = self.key
        parcel = self.mailboxes.take(self.key, self.what)
        size = HEADER_BYTES + sum(spec.num_bytes for spec in self.specs)
        if len(parcel) != size:
            parcel = torch.cat([parcel[:HEADER_BYTES], parcel.new_zeros(size - HEADER_BYTES)])
        _check_header(parcel, layout_id=self.layout_id, rank=rank, peer=peer, what=self.what)
        return _unpack(parcel, self.specs)


class LocalTransport:
    """Messages between threads of one process: N ranks in one test, or on one GPU. See [`run_local_ranks`]."""

    def __init__(self, mailboxes: _Mailboxes, rank: int):
        self.mailboxes, self.rank, self.world = mailboxes, rank, mailboxes.world
        self.traffic = Traffic()
        self._num_sent, self._num_expected = [0] * self.world, [0] * self.world

    def exchange(
        self,
        sends: Sequence[tuple[int, Sequence[torch.Tensor]]],
        receives: Sequence[tuple[int, Sequence[Spec]]],
        *,
        layout_id: int,
        device: torch.device,
        what: str,
    ) -> list[Delivery]:
        for peer, tensors in sends:
            parcel = _pack(tensors, layout_id)
            if parcel is not None:
                self.traffic.num_bytes += len(parcel)
                self.traffic.num_messages += 1
                self.mailboxes.put((self.rank, peer, self._num_sent[peer]), parcel)
                self._num_sent[peer] += 1
        deliveries: list[Delivery] = []
        for peer, specs in receives:
            if not sum(spec.num_bytes for spec in specs):
                deliveries.append(_Nothing(tuple(specs), device))
                continue
            key = (peer, self.rank, self._num_expected[peer])
            self._num_expected[peer] += 1
            deliveries.append(_LocalDelivery(self.mailboxes, key, specs, layout_id, what))
        return deliveries


def alone() -> LocalTransport:
    """The transport of a rank that holds its whole row."""
    return LocalTransport(_Mailboxes(1, 60.0), 0)


def run_local_ranks(function: Callable[[LocalTransport], Any], world: int, *, timeout_s: float = 60.0) -> list[Any]:
    """Runs `function(transport)` for `world` ranks, each in a thread of this process, and returns what each returned.

    The backward of each rank stays in its own thread (on CUDA one autograd thread would serve all and wait for itself).
    The first failure ends the other ranks and is raised here.

    Args:
        function (callable): one rank's work.
        world (`int`): number of ranks.
        timeout_s (`float`): seconds that a rank waits for one message.
    """
    mailboxes = _Mailboxes(world, timeout_s)
    results: list[Any] = [None] * world

    def main(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(LocalTransport(mailboxes, rank))
        except BaseException as error:
            mailboxes.fail(error)

    threads = [threading.Thread(target=main, args=(rank,), name=f"cp-rank-{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mailboxes.failure is not None:
        raise mailboxes.failure
    return results
