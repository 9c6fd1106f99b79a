"""Processes of which some are meant to fail, and tap channels between them."""

import pickle
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from processes import fresh_processes
from torch import distributed as dist

from hf_codraft.taps.channel import TapChannel, TapRoute


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its value, or its error's class name and text, or neither where it died or was stopped."""

    value: Any = None
    error: str = ""
    text: str = ""
    ended_at_s: float = 0.0


def _main(payload: bytes, rank: int, num_ranks: int, address: str, connection) -> None:
    torch.set_num_threads(1)
    function, args = pickle.loads(payload)
    try:
        dist.init_process_group("gloo", address, timedelta(seconds=100), num_ranks, rank)
        outcome = Outcome(value=function(rank, *args), ended_at_s=time.monotonic())
    except Exception as error:
        outcome = Outcome(error=type(error).__name__, text=str(error), ended_at_s=time.monotonic())
    connection.send(outcome)


def shared_files() -> set[str]:
    """What lies in the host's shared memory."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith("sem.")}  # of other programs' locks; taps have none


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def outcomes_of(function: Callable, num_ranks: int, *args: Any, timeout_s: float = 90.0, absent: tuple[int, ...] = ()):
    """Runs `function(rank, *args)` in processes joined by gloo; a list of [`Outcome`], whatever becomes of them.

    Args:
        absent (`tuple[int, ...]`): ranks that are expected never to report; the others are awaited.
    """
    context = fresh_processes()
    payload, address = pickle.dumps((function, args)), free_address()
    processes, receivers = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_main, args=(payload, rank, num_ranks, address, sender), daemon=True))
        processes[-1].start()
        sender.close()
        receivers.append(receiver)
    outcomes = [Outcome() for _ in range(num_ranks)]
    open_ranks = {rank for rank in range(num_ranks) if rank not in absent}
    deadline = time.monotonic() + timeout_s
    while open_ranks and time.monotonic() < deadline:
        for receiver in wait([receivers[rank] for rank in open_ranks], timeout=1.0):
            rank = receivers.index(receiver)
            open_ranks.remove(rank)
            try:
                outcomes[rank] = receiver.recv()
            except EOFError:
                outcomes[rank] = Outcome(error="died")
    for process in processes:
        process.kill()
        process.join()
    assert not open_ranks, f"ranks {sorted(open_ranks)} hung for {timeout_s} s"
    return outcomes


def values_of(function: Callable, num_ranks: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Like [`outcomes_of`], where no rank may fail."""
    outcomes = outcomes_of(function, num_ranks, *args, **kwargs)
    assert not any(x.error for x in outcomes), "\n".join(
        f"rank {i}: {x.error}: {x.text}" for i, x in enumerate(outcomes)
    )
    return [x.value for x in outcomes]


def _run_cases(rank: int, cases: list[tuple[Callable, tuple]]) -> list[Outcome]:
    outcomes = []
    for function, args in cases:
        try:
            outcomes.append(Outcome(value=function(rank, *args), ended_at_s=time.monotonic()))
        except Exception as error:
            outcomes.append(Outcome(error=type(error).__name__, text=str(error), ended_at_s=time.monotonic()))
        dist.barrier()
    return outcomes


def outcomes_of_cases(
    cases: dict[Any, tuple[Callable, tuple]], num_ranks: int, **kwargs: Any
) -> dict[Any, list[Outcome]]:
    """Runs many `function(rank, *args)` one after the other in the same processes; the outcomes of all ranks by case."""
    ranks = values_of(_run_cases, num_ranks, list(cases.values()), **kwargs)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(cases)}


def chain_routes(num_stages: int, *, max_numel: int = 64, dtype: torch.dtype = torch.float32) -> list[TapRoute]:
    """One tap per stage: tap id s + 1 of stage and rank s."""
    return [TapRoute(s + 1, s, s, max_numel, dtype) for s in range(num_stages)]


def expected_tap(step: int, microbatch: int, tap_id: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What tap `tap_id` holds, so that a sink knows without being told."""
    generator = torch.Generator().manual_seed(10007 * step + 101 * microbatch + tap_id)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def open_channel(routes: list[TapRoute], sink_ranks: list[int], **kwargs: Any) -> TapChannel:
    channel = TapChannel(routes, sink_ranks, **({"num_slots": 2, "timeout_s": 20.0} | kwargs))
    channel.setup()
    return channel


def run_step(channel: TapChannel, step: int, num_microbatches: int, shape: tuple[int, ...]) -> int:
    """A forward-only pipeline: publish as fast as the ring allows, collect, compare, release. Returns tensors compared.

    Ranks other than a microbatch's sink do not wait for it; a rank that publishes and collects does so in turn.
    """
    channel.begin_step(step, num_microbatches)
    compared = 0
    for microbatch in range(num_microbatches):
        for route in channel.routes.values():
            if route.owner_rank == channel.rank:
                channel.publish(
                    microbatch, route.tap_id, expected_tap(step, microbatch, route.tap_id, shape, route.dtype)
                )
        if channel.sink_of(microbatch) == channel.rank:
            for tap_id, tensor in channel.collect(microbatch).items():
                expected = expected_tap(step, microbatch, tap_id, shape, channel.routes[tap_id].dtype)
                assert tensor.shape == expected.shape and tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected), f"step {step}, microbatch {microbatch}, tap {tap_id}"
                compared += 1
            channel.release(microbatch)
    channel.end_step()
    return compared
