"""The rings between GPUs on a device that is played: streams run late and in any order that events allow.

Nothing here was run on a GPU. A played stream is a list of operations; each test lets hosts and streams take turns at
random and compares what the draft's stream read with what the policy's stream had produced.
"""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hf_codraft.taps.protocol import Header, RingPlan, TapRoute
from hf_codraft.taps.transports.cuda_ipc import CudaIpcRing
from hf_codraft.taps.transports.nccl import NcclRing
from hf_codraft.taps.transports.shm import SharedMemory, ShmRing


@dataclass
class PlayedEvent:
    role: str
    num_recorded: int = 0
    num_reached: int = 0


@dataclass
class PlayedStreams:
    """All streams of both devices; an operation is (may it run?, what it does)."""

    queues: dict[tuple[str, str], deque] = field(default_factory=dict)

    def enqueue(self, stream, run, may_run=lambda: True):
        self.queues.setdefault(stream, deque()).append((may_run, run))

    def advance(self, rng: random.Random) -> bool:
        """Runs one operation of a random stream that isn't blocked."""
        ready = [queue for queue in self.queues.values() if queue and queue[0][0]()]
        if ready:
            rng.choice(ready).popleft()[1]()
        return bool(ready)

    @property
    def is_idle(self) -> bool:
        return not any(self.queues.values())


class PlayedDevice:
    """One rank's [`DeviceLayer`]; `forgets` is an event role and stream whose wait it leaves out."""

    def __init__(self, rank: str, streams: PlayedStreams, *, forgets: tuple[str, str] | None = None):
        self.rank, self.streams, self.forgets = rank, streams, forgets

    def compute(self, run):
        self.streams.enqueue((self.rank, "current"), run)

    def new_event(self, *, is_shared=False):
        return PlayedEvent("produced")

    def record(self, event, *, stream):
        event.num_recorded += 1
        number = event.num_recorded
        self.streams.enqueue((self.rank, stream), lambda: setattr(event, "num_reached", number))

    def wait(self, event, *, stream):
        number = event.num_recorded
        if (event.role, stream) != self.forgets:
            self.streams.enqueue((self.rank, stream), lambda: None, lambda: event.num_reached >= number)

    def copy(self, target, source):
        self.streams.enqueue((self.rank, "side"), lambda: target.copy_(source))

    def send(self, tensor, *, pair, to_rank):
        self.streams.enqueue((self.rank, "side"), lambda: pair.append(tensor.clone()))

    def receive(self, tensor, *, pair, from_rank):
        self.streams.enqueue((self.rank, "side"), lambda: tensor.copy_(pair.popleft()), lambda: len(pair) > 0)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=90))
    yield dist.group.WORLD
    dist.destroy_process_group()


def control_rings(memory: SharedMemory, num_slots: int) -> list[ShmRing]:
    plan = RingPlan(TapRoute(3, 0, 0, 4, torch.float32), 0, num_slots, carries_payload=False)
    memory.words[: ShmRing.num_bytes(plan) // 8] = memoryview(bytes(ShmRing.num_bytes(plan))).cast("q")
    return [ShmRing(plan, memory, offset=0, timeout_s=0.1) for _ in range(2)]


def events(role: str, num_slots: int) -> list[PlayedEvent]:
    return [PlayedEvent(role) for _ in range(num_slots)]


def cuda_ipc_rings(source_device, sink_device, control, num_slots):
    shared = dict(
        slots=torch.zeros(num_slots * 16, dtype=torch.uint8).split(16),
        ready=events("ready", num_slots),
        consumed=events("consumed", num_slots),
    )
    return CudaIpcRing(control[0], source_device, **shared), CudaIpcRing(control[1], sink_device, **shared)


def nccl_rings(source_device, sink_device, control, num_slots):
    pair = deque()
    slots = torch.zeros(num_slots * 16, dtype=torch.uint8).split(16)
    source = NcclRing(control[0], source_device, pair=pair, slots=())
    sink = NcclRing(control[1], sink_device, pair=pair, slots=slots)
    for event in sink._consumed:
        event.role = "consumed"
    sink._done.role = "ready"
    return source, sink


def num_wrong(group, make_rings, *, num_slots, seed, forgets=None, num_messages=40) -> int:
    """Sends `num_messages` with hosts and streams at random speeds; how many the draft's stream read wrongly."""
    rng, streams = random.Random(seed), PlayedStreams()
    devices = [PlayedDevice(rank, streams, forgets=forgets) for rank in ("source", "sink")]
    memory = SharedMemory(group, 4096)
    control = control_rings(memory, num_slots)
    source, sink = make_rings(*devices, control, num_slots)
    held, num_written, num_read, read = 0, 0, 0, []
    for turn in itertools.count():
        assert turn < 100 * num_messages * len(devices), "hosts and streams wait for each other"
        if num_read == num_messages and streams.is_idle:
            break
        choices = [lambda: streams.advance(rng)] * rng.choice([1, 8])
        if num_written < num_messages and control[0]._has_room(num_written + 1):
            choices.append("write")
        if num_read < num_written and held < num_slots:
            choices.append("read")
        if held:
            choices.append("release")
        choice = rng.choice(choices)
        if choice == "write":
            num_written += 1
            tensor = torch.zeros(4)
            devices[0].compute(lambda tensor=tensor, value=num_written: tensor.fill_(value))
            source.write(Header(num_written, 0, num_written, 99, 3, torch.float32, (4,), 0), tensor)
        elif choice == "read":
            num_read, held = num_read + 1, held + 1
            header, view = sink.read(num_read)
            assert header.microbatch == num_read
            for _ in range(2):  # the draft reads twice, with time in between
                devices[1].compute(lambda view=view, want=num_read: read.append(bool((view == want).all())))
        elif choice == "release":
            sink.release()
            held -= 1
        else:
            choice()
    memory.close()
    assert len(read) == 2 * num_messages
    return read.count(False)


makers = pytest.mark.parametrize("make_rings", [cuda_ipc_rings, nccl_rings])


@makers
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_draft_reads_what_the_policy_produced_however_late_the_streams_run(group, make_rings, num_slots):
    assert sum(num_wrong(group, make_rings, num_slots=num_slots, seed=seed) for seed in range(30)) == 0


@makers
@pytest.mark.parametrize("forgets", [("produced", "side"), ("ready", "current"), ("consumed", "side")])
def test_every_wait_of_a_stream_is_needed(group, make_rings, forgets):
    wrong = sum(num_wrong(group, make_rings, num_slots=2, seed=seed, forgets=forgets) for seed in range(30))
    assert wrong > 0
