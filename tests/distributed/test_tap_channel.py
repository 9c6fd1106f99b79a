"""Tap channels between processes: the same tensors over every CPU transport, and a named end for every fault."""

import mmap
import os
import re
import signal
import time
import uuid
import weakref
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tap_ranks import chain_routes, open_channel, outcomes_of, outcomes_of_cases, run_step, shared_files, values_of
from torch import distributed as dist

from hf_codraft.taps.channel import TapChannel, TapError, TapProtocolError, TapRoute
from hf_codraft.taps.slots import Action, check_num_slots, place_draft

transports = pytest.mark.parametrize("transport", ["shm", "gloo"])


@pytest.fixture(scope="module")
def pair():
    """Outcomes of all cases that need two ranks, both of which live on; one start of processes for all of them."""
    of_transport = (carries_views, publishes_ahead, fills_ring, counts_differently)
    cases = {(f, transport): (f, (transport,)) for f in of_transport for transport in ("shm", "gloo")}
    cases |= {f: (f, ()) for f in (opens_and_looks, automatic)}
    for transport in ("shm", "gloo"):
        for name, num_stages, num_slots, in_turn in SCHEDULE_RUNS[transport]:
            args = (transport, *schedule_with_draft(name, num_stages), num_slots, in_turn)
            cases[transport, name, num_slots, in_turn] = (follows_schedule, args)
    return outcomes_of_cases(cases, 2)


# The same tensors arrive


PLACEMENTS = {"last": [2], "spread": [0, 1, 2], "first": [0]}
CASES = [(torch.float32, placement, num_slots) for placement in PLACEMENTS for num_slots in (1, 2, 7)]
CASES += [
    (torch.bfloat16, "spread", 1),
    (torch.bfloat16, "last", 2),
    (torch.float16, "last", 2),
    (torch.float64, "last", 2),
]
# One shape a step, another the next, an empty and a 0-dimensional one among them: 22 microbatches.
STEPS = [(4, (2, 3, 35)), (7, (1, 5, 7)), (3, ()), (2, (3, 0, 7)), (5, (210,)), (1, (1, 1, 1, 1, 1, 13))]


def carries_everything(rank: int) -> list[int]:
    compared = []
    for transport in ("shm", "gloo"):
        for dtype, placement, num_slots in CASES:
            routes = chain_routes(3, max_numel=210, dtype=dtype)
            kwargs = dict(transport=transport, num_slots=num_slots, check_crc=True)
            with open_channel(routes, PLACEMENTS[placement], **kwargs) as channel:
                assert channel.choice.name == transport
                compared.append(sum(run_step(channel, step, *x) for step, x in enumerate(STEPS)))
    return compared


@pytest.mark.slow
def test_every_tensor_arrives_bit_for_bit_over_every_transport_placement_and_number_of_slots():
    ranks = values_of(carries_everything, 3)
    spread = [3 * sum(len(range(rank, count, 3)) for count, _ in STEPS) for rank in range(3)]
    expected = {"last": [0, 0, 66], "first": [66, 0, 0], "spread": spread}
    assert list(zip(*ranks)) == 2 * [tuple(expected[placement]) for _, placement, _ in CASES]


def carries_views(rank: int, transport: str) -> list[bool]:
    """A tensor with gradient and strides, changed right after its publication."""
    with open_channel([TapRoute(3, 0, 0, 12, torch.float32)], [1], transport=transport) as channel:
        channel.begin_step(0, 1)
        found = []
        if rank == 0:
            tensor = torch.arange(12.0).view(3, 4).t().requires_grad_()
            channel.publish(0, 3, tensor)
            with torch.no_grad():
                tensor.fill_(-1.0)
        else:
            tensor = channel.collect(0)[3]
            found = [torch.equal(tensor, torch.arange(12.0).view(3, 4).t()), not tensor.requires_grad]
            channel.release(0)
        channel.end_step()
    return found


@transports
def test_the_published_values_arrive_even_if_the_tensor_changes_at_once(pair, transport):
    assert pair[carries_views, transport][1].value == [True, True]


def leaves_early(rank: int, transport: str) -> int:
    channel = open_channel(chain_routes(3), [2], transport=transport, num_slots=3)
    if rank == 1:
        time.sleep(2.0)  # the sink waits for this one when the first is long gone
    compared = run_step(channel, 0, 3, (4, 4))
    channel.close()
    if rank == 0:
        os._exit(0)
    return compared


@pytest.mark.slow
@transports
def test_a_source_may_leave_after_its_last_step(transport):
    outcome = outcomes_of(leaves_early, 3, transport)[2]
    assert outcome.value == 9, outcome


# Publishing does not wait for the sink


def publishes_ahead(rank: int, transport: str) -> int:
    channel = open_channel(chain_routes(1), [1], transport=transport, num_slots=3, timeout_s=10.0)
    channel.begin_step(0, 3)
    if rank == 0:
        for microbatch in range(3):
            channel.publish(microbatch, 1, torch.zeros(4))
        channel.end_step()
        dist.barrier()
    else:
        dist.barrier()  # the source comes here without any help of the sink
        for microbatch in range(3):
            channel.collect(microbatch)
        for microbatch in range(3):
            channel.release(microbatch)
        channel.end_step()
    channel.close()
    return channel.totals.num_published + channel.totals.num_collected


@transports
def test_as_many_microbatches_as_slots_are_published_without_the_sink(pair, transport):
    assert [outcome.value for outcome in pair[publishes_ahead, transport]] == [3, 3]


def fills_ring(rank: int, transport: str) -> None:
    channel = open_channel(chain_routes(1), [1], transport=transport, num_slots=2, timeout_s=1.0)
    channel.begin_step(5, 8)
    try:
        for microbatch in range(8 if rank == 0 else 0):
            channel.publish(microbatch, 1, torch.zeros(4))
    finally:
        dist.barrier()


@pytest.mark.parametrize(("transport", "stuck_at"), [("shm", 2), ("gloo", 4)])
def test_a_full_ring_ends_in_a_timeout_that_names_who_waits_for_whom(pair, transport, stuck_at):
    outcome = pair[fills_ring, transport][0]
    assert outcome.error == "TapTimeout"
    for part in (
        f"rank 0, step 5: publish({stuck_at}, tap 1)",
        "waits for rank 1 to release",
        "waited 1.5 s",
        "2 slot(s)",
    ):
        assert part in outcome.text


# Slots and schedules: two ranks, a tap on stage 0, the draft inside the last stage's forward


NUM_MICROBATCHES = 6
# name, stages, slots (None: the default), in turn?
SOUND_RUNS = [
    ("1F1B", 2, None, True),
    ("1F1B", 2, 1, False),
    ("Interleaved1F1B", 4, None, True),
    ("GPipe", 2, None, True),
    ("GPipe", 2, 1, False),
]
# Too few for GPipe's six; gloo's source has as many snapshots again as its sink has landing slots.
SHORT_RUNS = {"shm": ("GPipe", 2, 5, True), "gloo": ("GPipe", 2, 2, True)}
SCHEDULE_RUNS = {transport: [*SOUND_RUNS, short] for transport, short in SHORT_RUNS.items()}


def schedule_with_draft(name: str, num_stages: int) -> tuple[dict[int, list[Action]], int]:
    """The work of both ranks, and the number of slots that a pipeline takes for it by default."""
    from hf_codraft.parallel.schedule import schedule_order  # in the parent alone: it takes long to import

    order = place_draft(schedule_order(name, 2, num_stages, NUM_MICROBATCHES), "last_inside")
    return order, check_num_slots(None, order, source_stages=[0], schedule=name)


def with_late_drafts(order: dict[int, list[Action]]) -> list[Action]:
    """The work of all ranks one after the other, every draft work only where nothing else can go on without it."""
    left, done = {rank: list(actions) for rank, actions in order.items()}, []
    last_stage = max(action.stage for actions in order.values() for action in actions)

    def awaited(action):
        if action.kind == "F":
            return Action("F", action.stage - 1, action.microbatch) if action.stage else None
        if action.kind == "B" and action.stage < last_stage:
            return Action("B", action.stage + 1, action.microbatch)
        return Action("F", action.stage, action.microbatch)

    while any(left.values()):
        ready = [actions for actions in left.values() if actions and awaited(actions[0]) in (None, *done)]
        done.append(min(ready, key=lambda actions: actions[0].kind == "D").pop(0))
    return done


def follows_schedule(
    rank: int, transport: str, order: dict[int, list[Action]], default: int, num_slots: int | None, in_turn: bool
) -> int:
    """A step without a model: in turn, with every release as late as the schedule permits; or as fast as the ranks can."""
    is_short = in_turn and num_slots is not None
    options = dict(transport=transport, num_slots=num_slots or default, timeout_s=0.4 if is_short else 20.0)
    failure, num_done, sent, last_stage = None, 0, [], max(action.stage for action in order[1])
    with open_channel([TapRoute(0, 0, 0, 4, torch.float32)], [1], **options) as channel:
        channel.begin_step(0, NUM_MICROBATCHES)

        def perform(kind, stage, microbatch):
            forwards = kind == "F"
            tag = 2 * microbatch + forwards
            if kind != "D" and not in_turn and stage != (0 if forwards else last_stage):
                dist.recv(torch.empty(1), 1 - rank, tag=tag)
            if forwards and stage == 0:
                channel.publish(microbatch, 0, torch.full((4,), float(microbatch)))
            if kind == "D":
                assert torch.equal(channel.collect(microbatch)[0], torch.full((4,), float(microbatch)))
                time.sleep(0.0 if in_turn else 0.002)
                channel.release(microbatch)
            if kind != "D" and not in_turn and stage != (last_stage if forwards else 0):
                sent.append(dist.isend(torch.zeros(1), 1 - rank, tag=tag))

        for action in with_late_drafts(order) if in_turn else order[rank]:
            if failure is None and action in order[rank]:
                try:
                    perform(action.kind, action.stage, action.microbatch)
                    num_done += 1
                except TapError as error:
                    failure = error
            if in_turn:
                dist.barrier()
        if failure is not None:
            raise failure
        channel.end_step()
    for transfer in sent:
        transfer.wait()
    return num_done


@transports
def test_no_publish_of_a_schedule_waits_at_the_default_number_of_slots_and_with_one_it_runs(pair, transport):
    for name, num_stages, num_slots, in_turn in SOUND_RUNS:
        source, sink = pair[transport, name, num_slots, in_turn]
        num_forwards_and_backwards = NUM_MICROBATCHES * num_stages
        assert source.value == num_forwards_and_backwards, (name, num_slots, source, sink)
        assert sink.value == num_forwards_and_backwards + NUM_MICROBATCHES, (name, num_slots, source, sink)


@pytest.mark.parametrize(("transport", "stuck_at"), [("shm", 5), ("gloo", 4)])
def test_with_fewer_slots_a_publish_waits_for_a_draft_that_is_late(pair, transport, stuck_at):
    name, _, num_slots, in_turn = SHORT_RUNS[transport]
    source = pair[transport, name, num_slots, in_turn][0]
    assert source.error == "TapTimeout" and f"publish({stuck_at}, tap 0) waits for rank 1" in source.text, source


# Faults of the caller


def misuse(rank: int, transport: str, case: str) -> None:
    routes = [TapRoute(1, 0, 0, 64, torch.float32), TapRoute(2, 1, 1, 64, torch.float32)]
    with open_channel(routes, [1], transport=transport, num_slots=2, timeout_s=8.0) as channel:
        channel.begin_step(7, 4)
        if rank == 0:
            channel.publish(0, 1, torch.zeros(8))
            if case == "double":
                channel.publish(0, 1, torch.zeros(8))
            if case == "order":
                channel.publish(2, 1, torch.zeros(8))
            if case == "owner":
                channel.publish(0, 2, torch.zeros(8))
            if case == "unknown":
                channel.publish(0, 9, torch.zeros(8))
            if case == "long":
                channel.publish(1, 1, torch.zeros(65))
            if case == "dtype":
                channel.publish(1, 1, torch.zeros(8, dtype=torch.bfloat16))
            if case == "not the sink":
                channel.collect(0)
            if case == "lost":
                channel.end_step()
            channel.publish(1, 1, torch.zeros(8))
            channel.publish(2, 1, torch.zeros(8))
            channel.publish(3, 1, torch.zeros(8))
        else:
            for microbatch in range(4):
                channel.publish(microbatch, 2, torch.zeros(8))
            channel.collect(0)
            if case == "release order":
                channel.collect(1)
                channel.release(1)
            if case == "no room":
                channel.collect(1)
                channel.collect(2)
            if case == "collect order":
                channel.collect(2)
            channel.release(0)
            channel.collect(1)
            if case == "not collected":
                channel.release(1)
                channel.end_step()
            channel.release(1)
            channel.collect(2)
        channel.end_step()


FAULTS = {
    "double": (0, "publish(0, tap 1): it was published before (a second forward?); rank 1 is due microbatch 1"),
    "order": (0, "publish(2, tap 1): rank 1 is due microbatch 1 of 4"),
    "owner": (0, "publish(0, tap 2): the tap belongs to stage 1 on rank 1"),
    "unknown": (0, "publish(0, tap 9): there is no such tap; the routes have [1, 2]"),
    "long": (0, "publish(1, tap 1): shape (65,) has 65 elements, a slot has room for 64"),
    "dtype": (0, "publish(1, tap 1): a tensor of torch.bfloat16"),
    "not the sink": (0, "collect(0): due is nothing more; this rank collects []"),
    "lost": (0, "tap 1 (stage 0) of microbatches [1, 2, 3] was not published"),
    "release order": (1, "release(1): held are [0, 1], of which the first must go first"),
    "no room": (1, "collect(2): microbatches [0, 1] hold all 2 slots; release one first"),
    "collect order": (1, "collect(2): due is microbatch 1; this rank collects [0, 1, 2, 3]"),
    "not collected": (1, "microbatches [2, 3] were not collected"),
}


@pytest.fixture(scope="module")
def faults():
    cases = {(transport, case): (misuse, (transport, case)) for transport in ("shm", "gloo") for case in FAULTS}
    return outcomes_of_cases(cases, 2, timeout_s=150.0)


@pytest.mark.slow
@transports
@pytest.mark.parametrize("case", list(FAULTS))
def test_a_fault_of_one_rank_is_named_there_and_ends_the_other(faults, transport, case):
    guilty, message = FAULTS[case]
    outcomes = faults[transport, case]
    assert outcomes[guilty].error == "TapProtocolError"
    assert f"rank {guilty}, step 7" in outcomes[guilty].text and message in outcomes[guilty].text
    other = outcomes[1 - guilty]
    if case in ("not collected", "release order", "no room", "collect order") and not other.error:
        return  # the other rank had published everything and waited for nothing
    assert other.error == "TapPeerLost", other
    if transport == "shm":
        assert f"rank {guilty} aborted: TapProtocolError: " in other.text
    assert other.ended_at_s - outcomes[guilty].ended_at_s < 5.0


def disagrees(rank: int, what: str) -> None:
    routes, kwargs = chain_routes(3), {}
    if rank == 1:
        match what:
            case "tap ids":
                routes = routes[:2]
            case "max_numel":
                routes[1] = TapRoute(2, 1, 1, 65, torch.float32)
            case "sink_ranks":
                kwargs["sink_ranks"] = [0, 1, 2]
            case "num_slots":
                kwargs["num_slots"] = 3
            case "transport":
                kwargs["transport"] = "gloo"
            case "impossible":
                kwargs["num_slots"] = 0
            case "timeout_s":
                kwargs["timeout_s"] = 100.0
    open_channel(routes, **({"sink_ranks": [2], "transport": "shm"} | kwargs))


def disagrees_on_all(rank: int) -> dict[str, tuple[str, str]]:
    found = {}
    for what in ("tap ids", "max_numel", "sink_ranks", "num_slots", "transport", "timeout_s"):
        try:
            disagrees(rank, what)
        except (TapProtocolError, ValueError) as error:
            found[what] = (type(error).__name__, str(error))
    return found


def test_ranks_that_were_given_different_things_all_say_so_before_the_first_step():
    ranks = values_of(disagrees_on_all, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    says = {
        "tap ids": "tap ids: rank(s) [0, 2] have [1, 2, 3], rank(s) [1] have [1, 2]; tap 3: rank(s) [0, 2] have TapRoute(",
        "max_numel": "tap 2: rank(s) [0, 2] have TapRoute(tap_id=2, owner_stage=1, owner_rank=1, max_numel=64,",
        "sink_ranks": "sink_ranks: rank(s) [0, 2] have [2], rank(s) [1] have [0, 1, 2]",
        "num_slots": "num_slots: rank(s) [0, 2] have 2, rank(s) [1] have 3",
        "transport": "transport: rank(s) [0, 2] have shm, rank(s) [1] have gloo",
    }
    for what, text in says.items():
        kind, message = ranks[0][what]
        assert kind == "TapProtocolError" and text in message, message
    assert ranks[0]["timeout_s"][0] == "ValueError"
    assert (
        "rank 1: timeout_s (100) times 1.5 must be shorter than the process group's timeout (100 s)"
        in ranks[0]["timeout_s"][1]
    )


def counts_differently(rank: int, transport: str) -> None:
    channel = open_channel(chain_routes(1), [1], transport=transport, timeout_s=8.0)
    channel.begin_step(3 + rank, 4 - rank)
    if rank == 0:
        channel.publish(0, 1, torch.zeros(3))
        channel.publish(1, 1, torch.zeros(3))
        dist.barrier()
    else:
        try:
            channel.collect(0)
        finally:
            dist.barrier()


@transports
def test_a_step_that_differs_between_ranks_is_named_at_the_first_tap(pair, transport):
    outcome = pair[counts_differently, transport][1]
    assert outcome.error == "TapProtocolError"
    text = "tap 1 of microbatch 0 from rank 0 (stage 0): arrived with step 3 instead of 4, num_microbatches 4 instead of 3"
    assert text in outcome.text


# Faults of the world


def stops_in_step(rank: int, transport: str, victim: int, fault: str, kill_at: str, folder: Path) -> None:
    """Three ranks; `victim` is killed, frozen or errs in the middle of step 2, and notes when."""
    if kill_at == "setup" and rank == victim:
        original = TapChannel._make_transport

        def die(self, group, name):
            original(self, group, name)
            os.kill(os.getpid(), signal.SIGKILL)

        TapChannel._make_transport = die
    with open_channel(chain_routes(3), [2], transport=transport, num_slots=2, timeout_s=4.0) as channel:
        for step in range(2):
            run_step(channel, step, 4, (4, 4))
        channel.begin_step(2, 50)
        for microbatch in range(50):
            if rank == victim and microbatch == 3:
                (folder / "stopped").write_text(str(time.monotonic()))
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "frozen":
                    os.kill(os.getpid(), signal.SIGSTOP)
                raise KeyError("a fault of the model")
            channel.publish(microbatch, rank + 1, torch.zeros(4))
            if rank == 2:
                channel.collect(microbatch)
                channel.release(microbatch)
        channel.end_step()


@pytest.mark.slow
@transports
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault", ["killed", "raised"])
def test_a_rank_that_dies_or_fails_ends_the_others_within_seconds_and_leaves_nothing(
    transport, victim, fault, tmp_path
):
    before = shared_files()
    outcomes = outcomes_of(stops_in_step, 3, transport, victim, fault, "step", tmp_path, timeout_s=60.0)
    stopped_at_s = float((tmp_path / "stopped").read_text())
    assert outcomes[victim].error == ("KeyError" if fault == "raised" else "died")
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error == "TapPeerLost", (rank, outcome)
            assert "step 2" in outcome.text
            assert outcome.ended_at_s - stopped_at_s < 10.0, outcome
            if fault == "killed":  # whoever hears of it from another survivor names the dead one too
                named = rf"the process of rank {victim} died|rank\(s\) \[[^]]*\b{victim}\b[^]]*\] ended"
                assert re.search(named, outcome.text), outcome
    if transport == "shm" and fault == "raised":
        texts = [outcome.text for rank, outcome in enumerate(outcomes) if rank != victim]
        assert any(f"rank {victim} aborted: KeyError: " in text for text in texts), texts
    assert shared_files() <= before


@pytest.mark.slow
@transports
@pytest.mark.parametrize("victim", [0, 2])
def test_a_frozen_rank_is_named_by_the_timeout(transport, victim, tmp_path):
    outcomes = outcomes_of(
        stops_in_step, 3, transport, victim, "frozen", "step", tmp_path, absent=(victim,), timeout_s=60.0
    )
    texts = {rank: outcome.text for rank, outcome in enumerate(outcomes) if rank != victim}
    assert all(outcomes[rank].error in ("TapTimeout", "TapPeerLost") for rank in texts)
    timeouts = [text for rank, text in texts.items() if outcomes[rank].error == "TapTimeout"]
    wanted = {
        # What a frozen rank gave to gloo last may not have left it.
        0: r"step 2: collect\(([123])\): tap 1 of microbatch \1 from rank 0 \(stage 0\) did not come: waited 4 s",
        2: r"step 2: publish\(\d, tap [12]\) waits for rank 2 to release room: waited 6 s",
    }
    assert timeouts and all(re.search(wanted[victim], text) for text in timeouts), texts


@pytest.mark.slow
def test_a_rank_killed_during_setup_leaves_nothing_in_shared_memory(tmp_path):
    before = shared_files()
    # The others wait in the group's own collective, which sees the connection close.
    outcomes = outcomes_of(stops_in_step, 3, "shm", 0, "killed", "setup", tmp_path, timeout_s=60.0)
    assert outcomes[0].error == "died" and outcomes[1].error and outcomes[2].error
    assert shared_files() <= before


def opens_and_looks(rank: int) -> set[str]:
    before = shared_files()
    channel = open_channel(chain_routes(2), [1], transport="shm")
    dist.barrier()
    seen = shared_files() - before
    run_step(channel, 0, 2, (2,))
    return seen


def test_shared_memory_has_no_name_even_while_it_is_used(pair):
    assert [outcome.value for outcome in pair[opens_and_looks]] == [set(), set()]


# Choice


def automatic(rank: int) -> list[str]:
    found = []
    for routes, sinks in ((chain_routes(2), [1]), ([TapRoute(1, 1, 1, 4, torch.float32)], [1])):
        with open_channel(routes, sinks) as channel:
            run_step(channel, 0, 3, (2, 2))
            found.append(channel.describe())
    for name in ("local", "cuda_ipc", "nccl"):
        try:
            open_channel(chain_routes(2), [1], transport=name)
        except ValueError as error:
            found.append(str(error))
    try:
        open_channel(chain_routes(2), [0], transport="relay")
    except ValueError as error:
        found.append(str(error))
    return found


def test_the_choice_names_its_reason_and_a_forced_transport_that_cannot_work_is_refused(pair):
    ranks = [outcome.value for outcome in pair[automatic]]
    assert ranks[0] == ranks[1]
    assert ranks[0] == [
        "taps [1, 2] to rank(s) [1] by shm (the taps lie on the CPU of one host), 2 slot(s)",
        "taps [1] to rank(s) [1] by local (every tap is read by the rank that owns it), 2 slot(s)",
        "transport='local' can't work: taps are owned by ranks [0, 1] and read by ranks [1]. Use transport='auto'.",
        "transport='cuda_ipc' can't work: cuda_ipc moves GPU memory and the taps lie on the CPU. Use transport='auto'.",
        "transport='nccl' can't work: nccl moves GPU memory and the taps lie on the CPU. Use transport='auto'.",
        "transport='relay' can't work: activations only flow to the last stage (rank 1), and the sinks are [0]. "
        "Use transport='auto'.",
    ]


# Rings between devices, on devices that are played: memory that both processes map, streams that are always done


@dataclass(frozen=True)
class PlayedHandle:
    """An open file of the process that exported something: gone with its owner, and never taken for a later one."""

    pid: int
    descriptor: int
    name: str

    @classmethod
    def made(cls, owner, descriptor):
        weakref.finalize(owner, os.close, descriptor)
        return cls(os.getpid(), descriptor, os.readlink(f"/proc/self/fd/{descriptor}"))

    def path(self):
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            is_there = os.readlink(path) == self.name
        except OSError:
            is_there = False
        if not is_there:
            raise RuntimeError("what this handle stands for was freed by the process that made it")
        return path


class PlayedEvent:
    """An event, made here or opened by its handle; every use of it needs the one that was made."""

    def __init__(self, handle=None):
        self.handle = handle or PlayedHandle.made(self, os.memfd_create(f"event-{uuid.uuid4().hex}"))


class PlayedPair:
    """A communicator that the first transfer sets up, for which it waits for the other end, as torch does with NCCL."""

    def __init__(self, store, pair_rank, watchdog_s):
        self.how, self.backend = (store, pair_rank, 2, timedelta(seconds=watchdog_s)), None

    def transfer(self, way, tensor, peer):
        if self.backend is None:
            self.backend = dist.ProcessGroupGloo(*self.how)
        getattr(self.backend, way)([tensor], peer, 0).wait()


class PlayedDevice:
    """A `DeviceLayer` whose device is the host. Nothing of it was run on a GPU."""

    device = torch.device("cpu")

    def __init__(self, *, shares_memory: bool = True, num_free: int = 100, max_rings: int = 100):
        self.shares_memory, self.num_free, self.max_rings = shares_memory, num_free, max_rings
        self.probe = None
        self.pairs: list[PlayedPair] = []
        self.handles: dict[int, PlayedHandle] = {}

    def allocate(self, num_bytes):
        self.num_free -= 1
        if self.num_free < 0:
            raise torch.OutOfMemoryError("the device is full")
        descriptor = os.memfd_create(f"memory-{uuid.uuid4().hex}")
        os.ftruncate(descriptor, num_bytes)
        mapped = mmap.mmap(descriptor, num_bytes)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.handles[memory.data_ptr()] = PlayedHandle.made(mapped, descriptor)
        return memory

    def export_memory(self, memory):
        if not self.shares_memory:
            raise RuntimeError("the allocator's segments can't be exported")
        return self.handles[memory.data_ptr()], len(memory)

    def open_memory(self, handle):
        opened = os.open(handle[0].path(), os.O_RDWR)
        return torch.frombuffer(mmap.mmap(opened, handle[1]), dtype=torch.uint8)

    def new_stream(self):
        return "side"

    def queue_problem(self, num_rings):
        return "" if num_rings <= self.max_rings else f"{num_rings} rings for {self.max_rings} queue(s)"

    def new_event(self, *, is_shared=False):
        return PlayedEvent()

    def export_event(self, event):
        return event.handle

    def open_event(self, handle):
        handle.path()
        return PlayedEvent(handle)

    def record(self, event, *, stream):
        event.handle.path()

    wait = record

    def copy(self, target, source, *, stream):
        target.copy_(source)

    def connect_pair(self, store, pair_rank, *, watchdog_s):
        self.pairs.append(PlayedPair(store, pair_rank, watchdog_s))
        return self.pairs[-1]

    def send(self, tensor, *, pair, to_rank, stream):
        pair.transfer("send", tensor, to_rank)

    def receive(self, tensor, *, pair, from_rank, stream):
        pair.transfer("recv", tensor, from_rank)

    def finish(self, stream, *, timeout_s):
        return True

    def disconnect(self, pair):
        pair.backend.abort()


def sources_leave_first(rank: int) -> list[int]:
    """The sink begins when the sources are through, and are about to free what it has opened."""
    compared = []
    for num_microbatches in (1, 3, 7):
        with open_channel(chain_routes(3), [2], num_slots=3, device_layer=PlayedDevice()) as channel:
            if rank == 2:
                time.sleep(0.2)
            compared.append(run_step(channel, 0, num_microbatches, (4, 4)))
        assert channel.choice.name == "cuda_ipc"
    return compared


def finds_no_room(rank: int) -> list[str]:
    """Rank 1's device has room for the probe and for no slot, or for one of its two rings over NCCL."""
    found = []
    for transport, limits in (
        ("cuda_ipc", dict(num_free=1)),
        ("nccl", dict(num_free=1)),
        ("nccl", dict(max_rings=1)),
    ):
        device = PlayedDevice(**limits if rank == 1 else {})
        kwargs = dict(transport=transport, device_layer=device, timeout_s=3.0)
        with pytest.raises((TapError, ValueError)) as caught:
            open_channel(chain_routes(3), [1], **kwargs)
        assert not device.pairs  # nobody waits to connect to it
        found.append(str(caught.value))
    return found


def plays_devices(rank: int) -> tuple[list[int], list[tuple[str, int]], list[str]]:
    dist.is_nccl_available = lambda: True
    found = []
    for shares_memory in (True, rank != 1):  # then one rank's memory can't be shared
        for sinks in ([2], [0], [0, 1, 2]):
            device = PlayedDevice(shares_memory=shares_memory)
            with open_channel(chain_routes(3), sinks, num_slots=3, device_layer=device, check_crc=True) as channel:
                assert all(pair.backend is not None for pair in device.pairs)
                compared = [run_step(channel, step, count, (4, 4)) for step, count in enumerate((4, 7))]
                found.append((channel.describe(), sum(compared)))
    return sources_leave_first(rank), found, finds_no_room(rank)


@pytest.mark.slow
def test_the_rings_between_devices_are_wired_alike_on_all_ranks_and_a_failed_probe_chooses_another():
    late, ranks, full = zip(*values_of(plays_devices, 3))
    assert late == ([0, 0, 0], [0, 0, 0], [3, 9, 21])
    texts = [text for text, _ in ranks[0]]
    assert all([text for text, _ in rank] == texts for rank in ranks)
    assert all(" by cuda_ipc (the taps lie on GPUs of one host; not run on a GPU)" in text for text in texts[:3])
    why = (
        "not cuda_ipc: this device's memory can't be shared (expandable segments?): the allocator's segments can't be "
        "exported; not run on a GPU"
    )
    assert all(" by nccl (" in text and why in text for text in texts[3:])
    assert [sum(rank[i][1] for rank in ranks) for i in range(6)] == 6 * [33]
    why = "rank 1: OutOfMemoryError: the device is full"
    queues = "transport='nccl' can't work: 2 rings for 1 queue(s). Use transport='auto'."
    assert full == 3 * ([why, why, queues],)
