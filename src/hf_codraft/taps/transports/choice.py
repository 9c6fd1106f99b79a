"""Which transport taps take, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_codraft.taps.protocol import TapRoute

TRANSPORTS = ("local", "shm", "gloo", "cuda_ipc", "nccl", "relay")


@dataclass(frozen=True)
class Surroundings:
    """What the ranks found out about each other; made by [`TapChannel.setup`], the same on every rank.

    Args:
        is_cuda (`bool`): the taps lie on GPUs.
        num_hosts (`int`): hosts of the group's ranks; two containers with process ids of their own count as two.
        shm_problem (`str`): why the ranks can't share host memory; empty if they can.
        ipc_problem (`str`): why they can't share device memory; empty if they can.
        nccl_problem (`str`): why NCCL can't join them; empty if it can.
    """

    is_cuda: bool
    num_hosts: int
    shm_problem: str
    ipc_problem: str
    nccl_problem: str


@dataclass(frozen=True)
class Choice:
    """A transport and the reason for it, for logs; made by [`choose_transport`]."""

    name: str
    reason: str


def transport_problem(
    name: str, *, routes: Sequence[TapRoute], sink_ranks: Sequence[int], surroundings: Surroundings
) -> str:
    """Why a transport can't carry these taps here, or an empty string."""
    owners = {route.owner_rank for route in routes}
    if name == "local":
        return "" if owners == set(sink_ranks) and len(owners) == 1 else (
            f"taps are owned by ranks {sorted(owners)} and read by ranks {sorted(set(sink_ranks))}"
        )  # fmt: skip
    if name == "relay":
        last = max(routes, key=lambda route: route.owner_stage)
        if set(sink_ranks) == {last.owner_rank}:
            return ""
        sinks = sorted(set(sink_ranks))
        return f"activations only flow to the last stage (rank {last.owner_rank}), and the sinks are {sinks}"
    if name in ("shm", "gloo") and surroundings.is_cuda:
        return f"{name} moves host memory and the taps lie on GPUs"
    if name in ("cuda_ipc", "nccl") and not surroundings.is_cuda:
        return f"{name} moves GPU memory and the taps lie on the CPU"
    if name in ("shm", "cuda_ipc") and surroundings.num_hosts > 1:
        return f"the ranks lie on {surroundings.num_hosts} hosts"
    if name in ("shm", "cuda_ipc") and surroundings.shm_problem:
        return surroundings.shm_problem
    if name == "cuda_ipc":
        return surroundings.ipc_problem
    return surroundings.nccl_problem if name == "nccl" else ""


def choose_transport(
    name: str, *, routes: Sequence[TapRoute], sink_ranks: Sequence[int], surroundings: Surroundings
) -> Choice:
    """The transport that a user named, or with `"auto"` the first of local, shm or cuda_ipc, gloo or nccl, relay that works.

    Args:
        name (`str`): `"auto"` or one of `TRANSPORTS`.
        routes (`Sequence[TapRoute]`): all taps.
        sink_ranks (`Sequence[int]`): ranks that read them.
        surroundings ([`Surroundings`]): the same on every rank, so that all choose alike.

    Raises:
        ValueError: if there is no such transport, it can't work here, or none can.
    """
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"transport ({name!r}) must be 'auto' or one of {', '.join(TRANSPORTS)}.")
    on_cuda = "on GPUs" if surroundings.is_cuda else "on the CPU"
    not_run = "; not run on a GPU" if surroundings.is_cuda else ""
    problems = {
        x: transport_problem(x, routes=routes, sink_ranks=sink_ranks, surroundings=surroundings) for x in TRANSPORTS
    }
    if name != "auto":
        if problems[name]:
            raise ValueError(f"transport={name!r} can't work: {problems[name]}. Use transport='auto'.")
        return Choice(name, "asked for" + (not_run if name in ("cuda_ipc", "nccl") else ""))
    if not problems["local"]:
        return Choice("local", "every tap is read by the rank that owns it")
    near, far = ("cuda_ipc", "nccl") if surroundings.is_cuda else ("shm", "gloo")
    if not problems[near]:
        return Choice(near, f"the taps lie {on_cuda} of one host" + not_run)
    if not problems[far]:
        return Choice(far, f"the taps lie {on_cuda}; not {near}: {problems[near]}" + not_run)
    if not problems["relay"]:
        return Choice("relay", f"not {near}: {problems[near]}; not {far}: {problems[far]}")
    why = "; ".join(f"{x}: {problems[x]}" for x in (near, far, "relay"))
    raise ValueError(f"no transport can carry the taps to sink_ranks ({list(sink_ranks)}): {why}.")
