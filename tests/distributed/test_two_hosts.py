"""Gloo's taps between two hosts: two network namespaces, joined by a pair of virtual cards (veth), without and with latency.

The kernel delays the packets of the pair (`tc qdisc add ... netem`). One that was built without netem can't: then the pair
has no latency, and two TAP cards with a wire of our own between them (`slow_wire.py`) take its place in the slow case.

The namespaces share a kernel, so that shared memory would be chosen between them; the transport is named.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
import torch
from tap_ranks import chain_routes, open_channel, run_step
from torch import distributed as dist

from hf_codraft.taps.channel import TapError

ADDRESSES = ("10.213.77.1", "10.213.77.2")
NUM_MICROBATCHES, SHAPE = 8, (2, 256, 64)


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"two network namespaces can't be made here: `{' '.join(words)}`: {done.stderr.strip()}")


def join_directly(names: list[str]) -> list[subprocess.Popen]:
    command(*f"ip link add card netns {names[0]} type veth peer name card netns {names[1]}".split())
    return []


def delay_packets(names: list[str], delay_ms: int) -> str:
    """Why the kernel can't delay what the pair of cards sends, or an empty string."""
    if shutil.which("tc") is None:
        return "no `tc` (iproute2)"
    for name in names:
        words = f"tc -n {name} qdisc add dev card root netem delay {delay_ms}ms".split()
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        if done.returncode:
            return f"`{' '.join(words)}`: {done.stderr.strip()}"
    return ""


def join_slowly(names: list[str], delay_ms: int) -> list[subprocess.Popen]:
    join_directly(names)
    no_netem = delay_packets(names, delay_ms)
    if not no_netem:
        return []
    command(*f"ip -n {names[0]} link delete card".split())  # the other end goes with it
    return join_by_slow_wire(names, delay_ms, no_netem=no_netem)


def join_by_slow_wire(names: list[str], delay_ms: int, *, no_netem: str) -> list[subprocess.Popen]:
    """The two processes that carry the packets."""
    script, processes = str(Path(__file__).parent / "slow_wire.py"), []
    for name, end in zip(names, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)):
        words = ["ip", "netns", "exec", name, sys.executable, script, str(end.fileno()), str(delay_ms)]
        process = subprocess.Popen(
            words, pass_fds=[end.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        end.close()
        processes.append(process)
        if process.stdout.readline() != "ready\n":
            reason = process.stderr.read().strip().splitlines()[-1]
            for started in processes:
                started.kill()
            pytest.skip(
                f"latency between two network namespaces can't be made here: not by netem: {no_netem}; not by TAP cards: {reason}"
            )
    return processes


@pytest.fixture(params=[0, 20], ids=["direct", "20ms"])
def hosts(request):
    """Names of two network namespaces whose cards can reach each other, each way some milliseconds late."""
    if shutil.which("ip") is None:
        pytest.skip("two network namespaces can't be made here: no `ip` (iproute2)")
    names, wire = [f"taps{os.getpid()}{x}" for x in "ab"], []
    try:
        for name in names:
            command("ip", "netns", "add", name)
        wire = join_slowly(names, request.param) if request.param else join_directly(names)
        for name, address in zip(names, ADDRESSES):
            command(*f"ip -n {name} addr add {address}/24 dev card".split())
            # gloo would take the card's own IPv6 address, which reaches nobody without naming the card
            command(*f"ip -n {name} link set card addrgenmode none".split())
            command(*f"ip -n {name} link set card up".split())
            command(*f"ip -n {name} link set lo up".split())
        yield Hosts(names, request.param)
    finally:
        for process in wire:
            process.kill()
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces, and how late packets between them arrive."""

    names: list[str]
    delay_ms: int


def rank_main(rank: int, fault: str) -> None:
    """What runs in a namespace; prints a JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:29571", timedelta(seconds=60), 2, rank)
    report = {}
    start = monotonic()
    try:
        routes = chain_routes(2, max_numel=2 * 256 * 64)
        with open_channel(routes, [1], transport="gloo", num_slots=4, timeout_s=10.0, check_crc=True) as channel:
            report["taps"] = channel.describe()
            if fault and rank == 0:
                channel.begin_step(0, 1)
                os._exit(0)
            report["compared"] = [run_step(channel, step, NUM_MICROBATCHES, SHAPE) for step in range(2)]
            dist.barrier()
            start = monotonic()
            dist.barrier()
            report["barrier_s"] = monotonic() - start
    except TapError as error:
        report["error"] = f"{type(error).__name__}: {error}"
        report["seconds"] = monotonic() - start
    report["received"] = int(Path("/sys/class/net/card/statistics/rx_bytes").read_text())
    print(json.dumps(report))


def run_on(hosts: Hosts, fault: str = "") -> list[dict]:
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    code = f"import sys; sys.path[:0] = {folders!r}; import test_two_hosts as t; t.rank_main(%d, {fault!r})"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "card", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-c", code % rank],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, host in enumerate(hosts.names)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(out.splitlines()[-1]) if out else {"stderr": err} for out, err in outputs]


@pytest.mark.slow
def test_taps_cross_from_one_host_to_another_whole(hosts):
    source, sink = run_on(hosts)
    assert source["compared"] == [0, 0] and sink["compared"] == 2 * [2 * NUM_MICROBATCHES], (source, sink)
    assert sink["taps"].startswith("taps [1, 2] to rank(s) [1] by gloo (asked for)")
    assert sink["barrier_s"] > hosts.delay_ms / 1000  # the way is as long as it should be
    payload_bytes = 2 * NUM_MICROBATCHES * torch.Size(SHAPE).numel() * 4
    assert sink["received"] > payload_bytes > source["received"]  # they went over the wire, one way


@pytest.mark.slow
def test_a_host_that_is_lost_is_named_across_the_wire(hosts):
    sink = run_on(hosts, fault="lost")[1]
    assert sink["error"].startswith(
        "TapPeerLost: rank 1, step 0: collect(0): tap 1 of microbatch 0 from rank 0 (stage 0) did not come: "
    )
    assert sink["seconds"] < 10.0
