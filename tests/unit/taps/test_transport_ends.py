"""Transports whose `open` fails half-way: the error says why, and ending them afterwards does not fail."""

import os
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hf_codraft.taps.channel import TapChannel, TapError, TapRoute
from hf_codraft.taps.protocol import RingPlan
from hf_codraft.taps.transports.cuda_ipc import CudaIpcTransport
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
    """A device with room for a few allocations and communicators."""

    def __init__(self):
        self.num_free, self.pairs = 0, []

    def take(self):
        self.num_free -= 1
        if self.num_free < 0:
            raise RuntimeError("the device is full")

    def allocate(self, num_bytes):
        self.take()
        return torch.empty(num_bytes, dtype=torch.uint8)

    def connect_pair(self, store, pair_rank, *, timeout_s):
        self.take()
        self.pairs.append(pair_rank)
        return pair_rank

    def disconnect(self, pair):
        self.pairs.remove(pair)

    def new_event(self, *, is_shared=False):
        return "event"

    def export_event(self, event):
        return event

    def export_memory(self, memory):
        return "memory"

    def finish(self):
        pass


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


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
@endings
def test_a_device_that_is_full_half_way_is_let_go_of(group, name, ending):
    transport = TRANSPORTS[name](group)
    transport.layer.num_free = (
        1 if name == "cuda_ipc" else 3
    )  # all that the first ring takes, and the second one's slots
    plans = [RingPlan(route, 0, 2) for route in ROUTES]
    with pytest.raises(RuntimeError, match="the device is full"):
        transport.open(plans)
    assert len(transport.layer.pairs) == (name == "nccl")
    end(transport, ending)
    assert not transport.layer.pairs


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
