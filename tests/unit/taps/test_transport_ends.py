"""Transports whose `open` fails half-way: the error says why, and ending them afterwards does not fail."""

import os
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hf_codraft.taps.channel import TapChannel, TapError, TapRoute
from hf_codraft.taps.protocol import RingPlan
from hf_codraft.taps.transports import nccl
from hf_codraft.taps.transports.cuda_ipc import CudaIpcTransport
from hf_codraft.taps.transports.device import CudaLayer
from hf_codraft.taps.transports.gloo import GlooTransport
from hf_codraft.taps.transports.nccl import NcclTransport
from hf_codraft.taps.transports.shm import ShmTransport

ROUTES = [TapRoute(tap_id, 0, 0, 4, torch.float32) for tap_id in (1, 2)]


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=90))
    yield dist.group.WORLD
    dist.destroy_process_group()


class SmallDevice:
    """A device with room for a few allocations and communicators, whose transfers end or not."""

    device = torch.device("cpu")

    def __init__(self, *, num_free=0, max_pairs=100, ends=True):
        self.num_free, self.max_pairs, self.ends = num_free, max_pairs, ends
        self.pairs, self.num_made, self.watchdogs_s, self.transfers = [], 0, set(), []

    def allocate(self, num_bytes):
        self.num_free -= 1
        if self.num_free < 0:
            raise RuntimeError("the device is full")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def connect_pair(self, store, pair_rank, *, watchdog_s):
        if self.num_made == self.max_pairs:
            raise RuntimeError("no more communicators")
        self.num_made += 1
        self.pairs.append(self.num_made)
        self.watchdogs_s.add(watchdog_s)
        return self.num_made

    def disconnect(self, pair):
        self.pairs.remove(pair)

    def new_stream(self):
        return object()

    def record(self, event, *, stream):
        pass

    wait = record

    def receive(self, tensor, *, pair, from_rank, stream):
        self.transfers.append((pair, tensor.numel(), stream))

    def new_event(self, *, is_shared=False):
        return "event"

    def export_event(self, event):
        return event

    def export_memory(self, memory):
        return "memory"

    def finish(self, stream, *, timeout_s):
        return self.ends


def no_memory(*args):
    raise OSError(24, "Too many open files")


def no_connection(*args):
    raise RuntimeError("no interface for this address")


TRANSPORTS = {
    "shm": lambda group: ShmTransport(group, timeout_s=5.0),
    "gloo": lambda group: GlooTransport(group, timeout_s=5.0),
    "cuda_ipc": lambda group: CudaIpcTransport(group, SmallDevice(), timeout_s=5.0),
    "nccl": lambda group: NcclTransport(group, SmallDevice(), timeout_s=5.0),
}
endings = pytest.mark.parametrize("ending", [("close",), ("abort", "close"), ("abort",)], ids="-".join)
transports = pytest.mark.parametrize("name", TRANSPORTS)


def end(transport, ending):
    for way in ending:
        transport.close() if way == "close" else transport.abort("a fault of the model")


@transports
@endings
def test_a_transport_that_was_never_opened_can_be_ended(group, name, ending):
    end(TRANSPORTS[name](group), ending)


@transports
@endings
def test_a_transport_that_could_not_be_opened_says_why_and_can_be_ended(group, monkeypatch, name, ending):
    monkeypatch.setattr(os, "memfd_create", no_memory)
    monkeypatch.setattr(dist, "ProcessGroupGloo", no_connection)
    transport = TRANSPORTS[name](group)
    why = "no interface for this address" if name in ("gloo", "nccl") else "Too many open files"
    with pytest.raises(TapError, match=why):
        transport.open([])
    end(transport, ending)


PLANS = [RingPlan(route, 0, 2) for route in ROUTES]


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
@endings
def test_a_device_that_is_full_half_way_is_let_go_of(group, name, ending):
    transport = TRANSPORTS[name](group)
    transport.layer.num_free = 1  # the slots of the first ring
    with pytest.raises(TapError, match="rank 0: RuntimeError: the device is full"):
        transport.open(PLANS)
    assert not transport.layer.num_made  # or another rank would have waited for the next one
    end(transport, ending)


def open_over_nccl(group, monkeypatch, layer, *, present=(1, 2)):
    """Opens two rings whose other ends have come for the taps `present`; the transport, and the error if there was one."""
    store = dist.HashStore()
    for tap_id in present:
        dist.PrefixStore(f"{tap_id}/0", store).set("here/0", "")
    monkeypatch.setattr(nccl, "agree_on_store", lambda group: store)
    transport = NcclTransport(group, layer, timeout_s=0.3)
    try:
        transport.open(PLANS)
    except TapError as error:
        return transport, str(error)
    return transport, ""


@pytest.mark.parametrize(
    "fault",
    [
        (dict(), (1,), "Wait timeout", 2, 1),
        (dict(max_pairs=1), (1, 2), "no more communicators", 2, 1),
        (dict(ends=False), (1, 2), "the first byte did not pass: waited 0.3 s", 1, 1),
    ],
    ids=["absent", "refused", "mute"],
)
@endings
def test_a_communicator_that_does_not_come_names_both_ends_and_its_tap_and_is_let_go_of(
    group, monkeypatch, fault, ending
):
    kwargs, present, why, tap_id, num_made = fault
    transport, error = open_over_nccl(group, monkeypatch, SmallDevice(num_free=2, **kwargs), present=present)
    told = f"rank 0 can't connect to rank 0 for tap {tap_id} to rank 0 (waits at most 0.3 s): "
    assert error.startswith(told) and why in error
    assert len(transport.layer.pairs) == num_made
    end(transport, ending)
    assert not transport.layer.pairs


def test_communicators_are_set_up_before_the_first_step_each_on_a_stream_of_its_own_with_the_groups_patience(
    group, monkeypatch
):
    transport, error = open_over_nccl(group, monkeypatch, SmallDevice(num_free=2))
    assert not error
    layer = transport.layer
    assert [(pair, num_bytes) for pair, num_bytes, _ in layer.transfers] == [(1, 1), (2, 1)]
    assert len({stream for _, _, stream in layer.transfers}) == 2
    assert layer.watchdogs_s == {90.0}  # not the host's 0.3 s: a send may wait for a draft that is deferred
    layer.ends = False
    with pytest.raises(TapError, match=r"rank 0: close waited 0.45 s for the transfers of tap 1 to rank 0 to end"):
        transport.close()
    layer.ends = True
    transport.close()
    assert not layer.pairs


@pytest.mark.parametrize(
    "asked, fitting, needed", [(None, 2, 10), ("1", 0, 6), ("8", 2, 10), ("32", 14, None), ("64", 14, None)]
)
def test_cuda_has_two_queues_a_ring_beside_four_of_others(monkeypatch, asked, fitting, needed):
    if asked is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", asked)
    layer = CudaLayer(torch.device("cuda"))
    assert not fitting or layer.queue_problem(fitting) == ""
    problem = layer.queue_problem(fitting + 1)
    assert f"CUDA_DEVICE_MAX_CONNECTIONS ({asked or 'not set'}) gives" in problem
    if needed is None:
        assert "gives 32; 32 is the most that CUDA has: use fewer taps or sinks" in problem
    else:
        assert f"; set it to {needed} or more (at most 32) before CUDA starts" in problem


@pytest.mark.parametrize("call", ["with", "close"])
def test_a_channel_whose_memory_could_not_be_made_says_so_to_the_end(group, monkeypatch, call):
    num_made, make = [], os.memfd_create

    def make_once(*args):
        num_made.append(1)
        return make(*args) if len(num_made) == 1 else no_memory()  # the first one only tries whether it can be done

    monkeypatch.setattr(os, "memfd_create", make_once)
    channel = TapChannel(ROUTES, [0], num_slots=2, transport="shm", timeout_s=5.0)
    with pytest.raises(TapError, match=r"rank 0 can't make .* bytes of shared memory: .*Too many open files"):
        if call == "with":
            with channel:
                channel.setup()
        channel.setup()
    channel.close()
