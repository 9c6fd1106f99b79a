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


@dataclass
class PlayedPair:
    """A communicator: tensors whose sends run, and how many of them their receives have taken."""

    offered: deque = field(default_factory=deque)
    num_offered: int = 0
    num_taken: int = 0

    def offer(self, tensor):
        self.offered.append(tensor)

    def take(self, tensor):
        tensor.copy_(self.offered.popleft())
        self.num_taken += 1


class PlayedDevice:
    """One rank's [`DeviceLayer`].

    `forgets` is an event's role and where the wait for it is left out, on the current stream or beside it. With
    `shares_stream` all rings get the same stream.
    """

    def __init__(
        self, rank: str, streams: PlayedStreams, *, forgets: tuple[str, str] | None = None, shares_stream=False
    ):
        self.rank, self.streams, self.forgets, self.shares_stream = rank, streams, forgets, shares_stream
        self.num_streams = 0

    def compute(self, run):
        self.streams.enqueue((self.rank, "current"), run)

    def new_stream(self):
        self.num_streams += 1
        return "side" if self.shares_stream else f"side {self.num_streams}"

    def new_event(self, *, is_shared=False):
        return PlayedEvent("produced")

    def record(self, event, *, stream):
        event.num_recorded += 1
        number = event.num_recorded
        self.streams.enqueue((self.rank, stream), lambda: setattr(event, "num_reached", number))

    def wait(self, event, *, stream):
        number = event.num_recorded
        if (event.role, stream.split()[0]) != self.forgets:
            self.streams.enqueue((self.rank, stream), lambda: None, lambda: event.num_reached >= number)

    def copy(self, target, source, *, stream):
        self.streams.enqueue((self.rank, stream), lambda: target.copy_(source))

    def send(self, tensor, *, pair, to_rank, stream):
        pair.num_offered += 1
        number = pair.num_offered
        self.streams.enqueue((self.rank, stream), lambda: pair.offer(tensor))
        self.streams.enqueue((self.rank, stream), lambda: None, lambda: pair.num_taken >= number)

    def receive(self, tensor, *, pair, from_rank, stream):
        self.streams.enqueue((self.rank, stream), lambda: pair.take(tensor), lambda: len(pair.offered) > 0)


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
    shared_by = [dict(shared, side=device.new_stream()) for device in (source_device, sink_device)]
    return CudaIpcRing(control[0], source_device, **shared_by[0]), CudaIpcRing(control[1], sink_device, **shared_by[1])


def nccl_rings(source_device, sink_device, control, num_slots):
    pair = PlayedPair()
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


@dataclass
class PlayedRing:
    """Both ends of a ring, and what the hosts have done with it so far."""

    memory: SharedMemory
    control: list[ShmRing]
    source: NcclRing | CudaIpcRing
    sink: NcclRing | CudaIpcRing
    num_written: int = 0
    num_read: int = 0

    def write(self, device: PlayedDevice) -> bool:
        """False where the source's host would have to wait; so does `read` for the sink's."""
        if not self.control[0]._has_room(self.num_written + 1):
            return False
        self.num_written += 1
        tensor = torch.zeros(4)
        device.compute(lambda value=self.num_written: tensor.fill_(value))
        self.source.write(Header(self.num_written, 0, 0, 99, 3, torch.float32, (4,), 0), tensor)
        return True

    def read(self, device: PlayedDevice, found: list[bool]) -> bool:
        if self.num_read == self.num_written:
            return False
        self.num_read += 1
        _, view = self.sink.read(self.num_read)
        device.compute(lambda want=self.num_read: found.append(bool((view == want).all())))
        self.sink.release()
        return True


def play_ring(group, make_rings, source_device, sink_device) -> PlayedRing:
    memory = SharedMemory(group, 4096)
    control = control_rings(memory, 2)
    return PlayedRing(memory, control, *make_rings(source_device, sink_device, control, 2))


def gets_through(group, make_rings, plan, *, seed, shares_stream=False) -> bool:
    """Plays two ranks, each with a list of (ring, action); whether both came to their end."""
    directions, programs = plan
    rng, streams = random.Random(seed), PlayedStreams()
    devices = [PlayedDevice(f"rank {rank}", streams, shares_stream=shares_stream) for rank in range(2)]
    rings = [play_ring(group, make_rings, devices[a], devices[b]) for a, b in directions]
    left, found = [deque(program) for program in programs], []

    def advance_host(rank: int) -> bool:
        if not left[rank]:
            return False
        ring, action = left[rank][0]
        device = devices[rank]
        moved = rings[ring].write(device) if action == "write" else rings[ring].read(device, found)
        if moved:
            left[rank].popleft()
        return moved

    steps = [lambda: advance_host(0), lambda: advance_host(1), lambda: streams.advance(rng)]
    while any(step() for step in rng.sample(steps, len(steps))):
        pass
    for ring in rings:
        ring.memory.close()
    assert all(found)
    num_reads = sum(action == "read" for program in programs for _, action in program)
    return not any(left) and streams.is_idle and len(found) == num_reads


INTERLEAVED = (
    [(0, 1), (0, 1)],
    [[(0, "write"), (0, "write"), (1, "write"), (1, "write")], [(0, "read"), (1, "read"), (0, "read"), (1, "read")]],
)
OPPOSITE = ([(0, 1), (1, 0)], [3 * [(0, "write"), (1, "read")], 3 * [(1, "write"), (0, "read")]])


@pytest.mark.parametrize("plan", [INTERLEAVED, OPPOSITE], ids=["interleaved", "opposite"])
def test_rings_do_not_wait_for_each_other_and_those_over_nccl_would_on_one_stream(group, plan):
    for seed in range(20):
        assert gets_through(group, nccl_rings, plan, seed=seed)
        assert gets_through(group, cuda_ipc_rings, plan, seed=seed, shares_stream=True)
        assert not gets_through(group, nccl_rings, plan, seed=seed, shares_stream=True)
