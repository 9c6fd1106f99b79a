"""Carries taps from the pipeline's stages to the rank where the draft learns.

A source publishes the taps of microbatch m before its stage sends the activation of m on, so they are under way before
any later stage can start m: `collect` adds no wait that the pipeline has not. Only a full ring makes a source wait, until
the sink releases the microbatch `num_slots` before.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType

import torch
from torch import distributed as dist

from hf_codraft.taps.peers import host_identity
from hf_codraft.taps.protocol import (
    DTYPES,
    MAX_DIMS,
    SOURCE_PATIENCE,
    Header,
    Ring,
    RingKey,
    RingPlan,
    TapError,
    TapPeerLost,
    TapProtocolError,
    TapRoute,
    TapTimeout,
    Transport,
    gather_objects,
    gather_results,
    tensor_crc,
)
from hf_codraft.taps.transports.choice import Choice, Surroundings, choose_transport
from hf_codraft.taps.transports.cuda_ipc import CudaIpcTransport
from hf_codraft.taps.transports.device import CudaLayer, DeviceLayer, export_probe, open_probe
from hf_codraft.taps.transports.gloo import GlooTransport
from hf_codraft.taps.transports.local import LocalRing
from hf_codraft.taps.transports.nccl import NcclTransport
from hf_codraft.taps.transports.relay import Relay, RelayTransport
from hf_codraft.taps.transports.shm import ShmTransport, shared_memory_problem

__all__ = [
    "ChannelTotals",
    "TapChannel",
    "TapError",
    "TapPeerLost",
    "TapProtocolError",
    "TapRoute",
    "TapTimeout",
]


@dataclass(frozen=True)
class ChannelTotals:
    """What passed through this rank's end of a channel since setup; read by benchmarks.

    Args:
        num_published (`int`), num_collected (`int`): tensors, the local ones included.
        bytes_published (`int`): bytes sent to other ranks; by relay also those that this rank's stages only hand on.
        publish_s (`float`), collect_s (`float`): seconds inside the two calls, waits included.
    """

    num_published: int = 0
    num_collected: int = 0
    bytes_published: int = 0
    publish_s: float = 0.0
    collect_s: float = 0.0


@dataclass
class _Step:
    step_id: int
    num_microbatches: int
    num_published: dict[RingKey, int] = field(default_factory=dict)
    num_collected: int = 0
    held: deque[tuple[int, list[tuple[Ring, Header, torch.Tensor]]]] = field(default_factory=deque)


def _compare_terms(every: Sequence[dict[str, str]]) -> None:
    """
    Raises:
        TapProtocolError: if two ranks differ; says which rank has what. `every` is the same on all, so all raise.
    """
    differences = []
    for name in dict.fromkeys(name for terms in every for name in terms):
        ranks_of: dict[str, list[int]] = {}
        for rank, terms in enumerate(every):
            ranks_of.setdefault(terms.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            who = ", ".join(f"rank(s) {ranks} have {value}" for value, ranks in ranks_of.items())
            differences.append(f"{name}: {who}")
    if differences:
        raise TapProtocolError(f"the ranks disagree about the taps. {'; '.join(differences)}.")


class TapChannel:
    """One rank's end of the taps' way; every rank of the group makes one with the same arguments.

    All checks of what may come when are here, the same for every transport. The first error ends the channel on this
    rank and, as fast as the transport can tell them, on all others; use it as a context manager so that an error in the
    model does so too.

    Args:
        routes (`Sequence[TapRoute]`): all taps of all stages.
        sink_ranks (`Sequence[int]`): microbatch m is collected by rank `sink_ranks[m % len(sink_ranks)]` of the group: one
            rank for a draft on the last stage, `range(P)` for one spread over all.
        num_slots (`int`): microbatches of a tap that may lie between publishing and release, see `taps.slots`.
        group (`ProcessGroup`, *optional*): the pipeline's ranks; used in [`setup`] alone. Default: all ranks.
        device (`torch.device`, *optional*, defaults to the CPU): where the taps lie.
        transport (`str`, *optional*, defaults to `"auto"`): see [`choose_transport`].
        timeout_s (`float`, *optional*, defaults to 60): seconds before a sink's wait for a source becomes an error, half again
            as many for a source's; must be shorter than the group's own, which would say less.
        check_crc (`bool`, *optional*, defaults to `False`): compare the bytes on arrival and again at release. For
            debugging; reads every tap three times. By relay the bytes are compared where a stage hands them to the
            pipeline, and from arrival to release; the pipeline's own transfers between the two carry no crc.
        device_layer ([`DeviceLayer`], *optional*): of `device`; made here for CUDA.
    """

    def __init__(
        self,
        routes: Sequence[TapRoute],
        sink_ranks: Sequence[int],
        *,
        num_slots: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        transport: str = "auto",
        timeout_s: float = 60.0,
        check_crc: bool = False,
        device_layer: DeviceLayer | None = None,
    ):
        self.routes = {route.tap_id: route for route in routes}
        self._all_routes = tuple(routes)
        self.sink_ranks, self.num_slots = tuple(sink_ranks), num_slots
        self.device = device or torch.device("cpu")
        self.timeout_s, self.check_crc = timeout_s, check_crc
        self._group, self._asked_transport, self._layer = group, transport, device_layer
        self.rank = -1
        self.choice: Choice | None = None
        self.transport: Transport | None = None
        self.totals = ChannelTotals()
        self._rings: dict[RingKey, Ring] = {}
        self._num_written: dict[RingKey, int] = {}
        self._num_read: dict[RingKey, int] = {}
        self._step: _Step | None = None
        self._ended = ""

    # Setup

    def _known_group(self) -> dist.ProcessGroup:
        group = self._group or dist.group.WORLD
        if group is None:
            raise RuntimeError("TapChannel needs torch.distributed; call init_process_group first.")
        return group

    def choose(self) -> Choice:
        """Compares everything that must be alike and chooses the transport; collective, and opens nothing.

        Raises:
            TapProtocolError: on every rank, if two ranks were given different things.
            ValueError: on every rank, if one was given something impossible.
        """
        group = self._known_group()
        self.rank = dist.get_rank(group)
        try:
            problem = self._problem(group)
        except Exception as error:  # such as a number that is none: the others wait to hear of it
            problem = f"{type(error).__name__}: {error}"
        every = gather_objects((self._terms(), problem), group)
        _compare_terms([terms for terms, _ in every])
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(every) if problem]
        if problems:
            raise ValueError(" ".join(problems))
        return choose_transport(
            self._asked_transport,
            routes=self._all_routes,
            sink_ranks=self.sink_ranks,
            surroundings=self._look_round(group),
        )

    def setup(self) -> None:
        """Does what [`choose`] does and opens the rings; collective.

        Raises:
            TapProtocolError, ValueError: as in [`choose`].
            TapError: on every rank, if one could not open its rings; names it.
        """
        if self.choice is not None:
            raise TapProtocolError(f"rank {self.rank}: setup was called twice.")
        self.choice = self.choose()
        group = self._known_group()
        self.transport = self._make_transport(group, self.choice.name)
        plans = [
            RingPlan(route, sink_rank, self.num_slots)
            for route in self._all_routes
            for sink_rank in sorted(set(self.sink_ranks))
        ]
        with self._error_ends_all():
            gather_results(lambda: self._open_rings(plans), group)
        self._num_written, self._num_read = dict.fromkeys(self._rings, 0), dict.fromkeys(self._rings, 0)

    def _open_rings(self, plans: Sequence[RingPlan]) -> None:
        if self.transport is not None:
            self._rings = dict(self.transport.open([plan for plan in plans if not plan.is_local]))
        for plan in plans:
            if plan.is_local and plan.sink_rank == self.rank:
                self._rings[plan.route.tap_id, plan.sink_rank] = LocalRing(plan)

    def _terms(self) -> dict[str, str]:
        terms = {
            "sink_ranks": str(list(self.sink_ranks)),
            "num_slots": str(self.num_slots),
            "transport": self._asked_transport,
            "device type": self.device.type,
            "check_crc": str(self.check_crc),
            "tap ids": str([route.tap_id for route in self._all_routes]),
        }
        return terms | {f"tap {route.tap_id}": str(route) for route in self._all_routes}

    def _problem(self, group: dist.ProcessGroup) -> str:
        """What is wrong with this rank's arguments, or an empty string."""
        num_ranks = dist.get_world_size(group)
        if not self._all_routes or len(self.routes) != len(self._all_routes):
            return f"routes must name at least one tap and none twice; got {[x.tap_id for x in self._all_routes]}."
        for route in self._all_routes:
            if route.dtype not in DTYPES or route.max_numel < 1 or not 0 <= route.owner_rank < num_ranks:
                return f"{route} needs a dtype among {DTYPES}, max_numel >= 1 and an owner_rank below {num_ranks}."
        if not self.sink_ranks or not all(0 <= rank < num_ranks for rank in self.sink_ranks):
            return f"sink_ranks ({list(self.sink_ranks)}) must be ranks below {num_ranks}."
        if self.num_slots < 1:
            return f"num_slots ({self.num_slots}) must be at least 1."
        # The group's limit can be read from its backend only; torch has no public way.
        limit_s = group._get_backend(self.device).options._timeout.total_seconds()
        if not 0 < SOURCE_PATIENCE * self.timeout_s < limit_s:
            return (
                f"timeout_s ({self.timeout_s:g}) times {SOURCE_PATIENCE} must be shorter than the process group's timeout "
                f"({limit_s:g} s), whose error would not name the tap; set it to a quarter of that."
            )
        return ""

    def _look_round(self, group: dist.ProcessGroup) -> Surroundings:
        is_cuda = self.device.type == "cuda"
        if is_cuda and self._layer is None:
            self._layer = CudaLayer(self.device)
        num_hosts = len(set(gather_objects(host_identity(), group)))
        shm_problem = shared_memory_problem(group) if num_hosts == 1 else ""
        probes = gather_objects(export_probe(self._layer), group)
        ipc_problems = [problem for _, problem in probes if problem]
        if not ipc_problems and num_hosts == 1:
            next_handle = probes[(self.rank + 1) % len(probes)][0]
            found = "" if len(probes) == 1 else open_probe(self._layer, next_handle)
            ipc_problems = [problem for problem in gather_objects(found, group) if problem]
        nccl_problems = [problem for problem in gather_objects(self._nccl_problem(), group) if problem]
        return Surroundings(
            is_cuda=self._layer is not None,
            num_hosts=num_hosts,
            shm_problem=shm_problem,
            ipc_problem=ipc_problems[0] if ipc_problems else "",
            nccl_problem=nccl_problems[0] if nccl_problems else "",
        )

    def _nccl_problem(self) -> str:
        """Why NCCL can't carry the rings of which this rank is an end, or an empty string."""
        if self._layer is None:
            return ""  # which is decided by the device already
        if not dist.is_nccl_available():
            return "this torch was built without NCCL"
        ends = [(route.owner_rank, sink) for route in self._all_routes for sink in set(self.sink_ranks)]
        return self._layer.queue_problem(sum(source != sink and self.rank in (source, sink) for source, sink in ends))

    def _make_transport(self, group: dist.ProcessGroup, name: str) -> Transport | None:
        if name in ("cuda_ipc", "nccl"):
            assert self._layer is not None
            kind = CudaIpcTransport if name == "cuda_ipc" else NcclTransport
            return kind(group, self._layer, timeout_s=self.timeout_s)
        if name == "gloo":
            return GlooTransport(group, timeout_s=self.timeout_s)
        if name == "shm":
            return ShmTransport(group, timeout_s=self.timeout_s)
        if name == "relay":
            return RelayTransport(
                self._all_routes, rank=self.rank, sink_rank=self.sink_ranks[0], check_crc=self.check_crc
            )
        return None

    def describe(self) -> str:
        """Transport, reason and size, in one line for logs."""
        if self.choice is None:
            return "taps: not set up"
        return (
            f"taps {list(self.routes)} to rank(s) {list(self.sink_ranks)} by {self.choice.name} ({self.choice.reason}), "
            f"{self.num_slots} slot(s)"
        )

    # Steps

    def sink_of(self, microbatch: int) -> int:
        """The rank that collects a microbatch."""
        return self.sink_ranks[microbatch % len(self.sink_ranks)]

    def begin_step(self, step_id: int, num_microbatches: int) -> None:
        """Opens a training step; outside of one nothing may be published. Not collective.

        Raises:
            TapProtocolError: if a step is open.
        """
        with self._error_ends_all():
            self._check_alive(f"begin_step({step_id})")
            if self._step is not None:
                raise TapProtocolError(
                    f"rank {self.rank}: begin_step({step_id}) while step {self._step.step_id} is open; end_step comes first."
                )
            if num_microbatches < 1:
                raise TapProtocolError(f"rank {self.rank}: num_microbatches ({num_microbatches}) must be at least 1.")
            self._step = _Step(step_id, num_microbatches)

    def relay(self) -> Relay | None:
        """What the pipeline has to carry in the open step; `None` for a transport with a way of its own."""
        step, _ = self._open_step("relay()")
        if not isinstance(self.transport, RelayTransport):
            return None
        return Relay(self.transport, step.step_id, step.num_microbatches, self._count_relayed)

    def _count_relayed(self, num_bytes: int) -> None:
        self._count(bytes_published=num_bytes, start=monotonic())

    def publish(self, microbatch: int, tap_id: int, tensor: torch.Tensor) -> None:
        """Sends a tap of this rank on its way; waits only while the ring is full.

        Args:
            microbatch (`int`): in ascending order for every tap and sink.
            tap_id (`int`): one of this rank's.
            tensor (`torch.Tensor` of any shape of up to 6 dimensions): copied, unless the sink is this rank (then the sink
                gets this very memory) or the taps lie on GPUs (then it must not change in place before its release).

        Raises:
            TapProtocolError: if it is not this tensor's turn or place.
            TapTimeout, TapPeerLost: if the sink does not release what came before.
        """
        start = monotonic()
        with self._error_ends_all():
            step, where = self._open_step(f"publish({microbatch}, tap {tap_id})")
            self._check_publish(step, microbatch, tap_id, tensor)
            key = (tap_id, self.sink_of(microbatch))
            tensor = tensor.detach()
            self._num_written[key] += 1
            header = Header(
                self._num_written[key], step.step_id, microbatch, step.num_microbatches, tap_id, tensor.dtype,
                tuple(tensor.shape), tensor_crc(tensor) if self.check_crc else 0,
            )  # fmt: skip
            with self._naming(f"{where} waits for rank {key[1]} to release room", key):
                self._rings[key].write(header, tensor)
            step.num_published[key] = step.num_published.get(key, 0) + 1
        # What is relayed is counted where a stage sends it, on every hop.
        leaves = key[1] != self.rank and not isinstance(self.transport, RelayTransport)
        self._count(num_published=1, bytes_published=header.num_bytes if leaves else 0, start=start)

    def _check_publish(self, step: _Step, microbatch: int, tap_id: int, tensor: torch.Tensor) -> None:
        route = self.routes.get(tap_id)
        name = f"rank {self.rank}, step {step.step_id}: publish({microbatch}, tap {tap_id}):"
        if route is None:
            raise TapProtocolError(f"{name} there is no such tap; the routes have {list(self.routes)}.")
        if route.owner_rank != self.rank:
            raise TapProtocolError(f"{name} the tap belongs to stage {route.owner_stage} on rank {route.owner_rank}.")
        sink_rank = self.sink_of(microbatch)
        mine = self._microbatches_of(sink_rank, step)
        num_published = step.num_published.get((tap_id, sink_rank), 0)
        expected = mine[num_published] if num_published < len(mine) else None
        if microbatch != expected:
            twice = " it was published before (a second forward?);" if microbatch in mine[:num_published] else ""
            due = "nothing more" if expected is None else f"microbatch {expected}"
            raise TapProtocolError(
                f"{name}{twice} rank {sink_rank} is due {due} of {step.num_microbatches} microbatches."
            )
        if tensor.dtype != route.dtype or tensor.device.type != self.device.type or tensor.dim() > MAX_DIMS:
            raise TapProtocolError(
                f"{name} a tensor of {tensor.dtype} and {tensor.dim()} dimensions on {tensor.device}; the route says "
                f"{route.dtype} on {self.device.type}, at most {MAX_DIMS} dimensions."
            )
        if tensor.numel() > route.max_numel:
            raise TapProtocolError(
                f"{name} shape {tuple(tensor.shape)} has {tensor.numel()} elements, a slot has room for {route.max_numel}."
            )

    def collect(self, microbatch: int) -> dict[int, torch.Tensor]:
        """Waits for all taps of a microbatch; returns them by tap id, in the order of the routes.

        Args:
            microbatch (`int`): one of this rank's, in ascending order. The tensors are valid until its [`release`].

        Raises:
            TapProtocolError: if it is not this microbatch's turn, every slot is held, or something else arrived.
            TapTimeout, TapPeerLost: if a source does not publish it.
        """
        start = monotonic()
        with self._error_ends_all():
            step, where = self._open_step(f"collect({microbatch})")
            self._check_collect(step, microbatch, where)
            taken: list[tuple[Ring, Header, torch.Tensor]] = []
            for route in self._all_routes:
                key = (route.tap_id, self.rank)
                name = (
                    f"{where}: tap {route.tap_id} of microbatch {microbatch} from rank {route.owner_rank} "
                    f"(stage {route.owner_stage})"
                )
                with self._naming(f"{name} did not come", key):
                    header, tensor = self._rings[key].read(self._num_read[key] + 1)
                self._num_read[key] += 1
                self._check_arrival(header, tensor, step=step, microbatch=microbatch, route=route, name=name)
                taken.append((self._rings[key], header, tensor))
            step.num_collected += 1
            step.held.append((microbatch, taken))
        self._count(num_collected=len(taken), start=start)
        return {header.tap_id: tensor for _, header, tensor in taken}

    def _check_collect(self, step: _Step, microbatch: int, where: str) -> None:
        mine = self._microbatches_of(self.rank, step)
        expected = mine[step.num_collected] if step.num_collected < len(mine) else None
        if microbatch != expected:
            due = "nothing more" if expected is None else f"microbatch {expected}"
            raise TapProtocolError(f"{where}: due is {due}; this rank collects {mine}, in this order.")
        travels = any(route.owner_rank != self.rank for route in self._all_routes)
        if travels and len(step.held) >= self.num_slots:
            raise TapProtocolError(
                f"{where}: microbatches {[held for held, _ in step.held]} hold all {self.num_slots} slots; release one first."
            )

    def _check_arrival(
        self, header: Header, tensor: torch.Tensor, *, step: _Step, microbatch: int, route: TapRoute, name: str
    ) -> None:
        sequence = self._num_read[route.tap_id, self.rank]
        due = (sequence, step.step_id, microbatch, step.num_microbatches, route.tap_id, route.dtype)
        came = (
            header.sequence, header.step, header.microbatch, header.num_microbatches, header.tap_id, header.dtype
        )  # fmt: skip
        if came != due:
            names = ("sequence", "step", "microbatch", "num_microbatches", "tap", "dtype")
            differing = ", ".join(f"{x} {b} instead of {a}" for x, a, b in zip(names, due, came) if a != b)
            raise TapProtocolError(f"{name}: arrived with {differing}.")
        self._check_bytes(header, tensor, f"{name}: the bytes are not those that were published (crc).")

    def _check_bytes(self, header: Header, tensor: torch.Tensor, message: str) -> None:
        if self.check_crc and tensor_crc(tensor) != header.crc:
            raise TapProtocolError(message)

    def release(self, microbatch: int) -> None:
        """Gives the slots of a collected microbatch back; its tensors must not be read any more.

        Raises:
            TapProtocolError: if it is not the oldest one held, or `check_crc` finds that its bytes changed.
        """
        with self._error_ends_all():
            step, where = self._open_step(f"release({microbatch})")
            held = [x for x, _ in step.held]
            if not held or held[0] != microbatch:
                raise TapProtocolError(f"{where}: held are {held}, of which the first must go first.")
            for ring, header, tensor in step.held[0][1]:
                self._check_bytes(
                    header, tensor, f"{where}: tap {header.tap_id} changed between collect and release (crc)."
                )
                with self._naming(f"{where} can't release tap {header.tap_id}", (header.tap_id, self.rank)):
                    ring.release()
            step.held.popleft()

    def end_step(self) -> None:
        """Closes the step. Not collective, no wait.

        Raises:
            TapProtocolError: if something of this rank was not published, collected or released.
        """
        with self._error_ends_all():
            step, where = self._open_step("end_step")
            missing = []
            for (tap_id, sink_rank), route in self._rings_with_routes():
                mine = self._microbatches_of(sink_rank, step)
                left = mine[step.num_published.get((tap_id, sink_rank), 0) :]
                if route.owner_rank == self.rank and left:
                    missing.append(
                        f"tap {tap_id} (stage {route.owner_stage}) of microbatches {left} was not published"
                    )
            left = self._microbatches_of(self.rank, step)[step.num_collected :]
            if left:
                missing.append(f"microbatches {left} were not collected")
            if step.held:
                missing.append(f"microbatches {[held for held, _ in step.held]} were not released")
            if missing:
                raise TapProtocolError(f"{where}: {'; '.join(missing)}.")
            self._step = None

    # The end

    def abort(self, error: BaseException) -> None:
        """Ends the channel on all ranks because of an error on this one; may be called again.

        Over shared memory the others raise [`TapPeerLost`] with this error's text at their next wait; over gloo they see
        the connection close, which carries no text.
        """
        if self._ended:
            return
        self._ended = f"{type(error).__name__}: {error}"
        self._forget()
        if self.transport is not None:
            self.transport.abort(self._ended)

    def close(self) -> None:
        """Ends the channel after its last step; waits until the sinks have room for what this rank published.

        Raises:
            TapProtocolError: if a step is open.
        """
        if self._ended:
            return
        with self._error_ends_all():
            if self._step is not None:
                raise TapProtocolError(f"rank {self.rank}: close() while step {self._step.step_id} is open.")
            self._forget()
            if self.transport is not None:
                self.transport.close()
        self._ended = "closed"

    def _forget(self) -> None:
        self._rings, self._step = {}, None

    def __enter__(self) -> "TapChannel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()

    # Checks and messages

    def _check_alive(self, call: str) -> None:
        if self._ended:
            raise TapError(f"rank {self.rank}: {call} on a channel that has ended ({self._ended}).")
        if self.choice is None:
            raise TapProtocolError(f"{call} before setup.")

    def _open_step(self, call: str) -> tuple[_Step, str]:
        self._check_alive(call)
        if self._step is None:
            raise TapProtocolError(
                f"rank {self.rank}: {call} outside a step. Only training forwards between begin_step and end_step have taps."
            )
        return self._step, f"rank {self.rank}, step {self._step.step_id}: {call}"

    def _microbatches_of(self, sink_rank: int, step: _Step) -> list[int]:
        return [m for m in range(step.num_microbatches) if self.sink_of(m) == sink_rank]

    def _rings_with_routes(self) -> Iterator[tuple[RingKey, TapRoute]]:
        for key in self._rings:
            yield key, self.routes[key[0]]

    @contextmanager
    def _error_ends_all(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    @contextmanager
    def _naming(self, what: str, key: RingKey) -> Iterator[None]:
        """Says what a ring's error was about; rings know only their own bytes."""
        try:
            yield
        except TapError as error:
            progress = self._rings[key].progress()
            raise type(error)(f"{what}: {str(error).rstrip('.')}. {self.num_slots} slot(s); {progress}.") from error

    def _count(
        self, *, start: float, num_published: int = 0, num_collected: int = 0, bytes_published: int = 0
    ) -> None:
        seconds, totals = monotonic() - start, self.totals
        self.totals = ChannelTotals(
            totals.num_published + num_published,
            totals.num_collected + num_collected,
            totals.bytes_published + bytes_published,
            totals.publish_s + (seconds if num_published else 0.0),
            totals.collect_s + (seconds if num_collected else 0.0),
        )
