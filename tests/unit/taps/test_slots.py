"""Slot bounds against an interpreter that runs the order with bounded rings under many timings."""

import heapq
import random
from collections import deque

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase

from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.taps.slots import Action, Ring, check_num_slots, place_draft, rings_of, slot_bounds

SCHEDULES = {"1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B, "GPipe": ScheduleGPipe}


class RecordingStage(_PipelineStageBase):
    """Notes in `log` what a schedule computes, and neither sends nor computes anything."""

    def __init__(self, stage, num_stages, num_ranks, log):
        self.stage_index, self.num_stages, self.log = stage, num_stages, log
        self.group_size, self.group_rank = num_ranks, stage % num_ranks
        self.submod = None

    def forward_one_chunk(self, microbatch, *args, **kwargs):
        self.log.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch, *args, **kwargs):
        self.log.append(Action("B", self.stage_index, microbatch))

    def _no_transfers(self, *args, **kwargs):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers
    perform_reduce_grad = _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = _no_transfers


def recorded_order(name, num_ranks, num_stages, num_microbatches):
    """What torch's schedule really does on each rank, seen by running it: `pipeline_order` only says what it should do."""
    order = {}
    for rank in range(num_ranks):
        log = []
        stages = [RecordingStage(stage, num_stages, num_ranks, log) for stage in range(rank, num_stages, num_ranks)]
        is_multi = name == "Interleaved1F1B"
        schedule = SCHEDULES[name](stages if is_multi else stages[0], num_microbatches)
        initialize = "_initialize_stages" if is_multi else "_initialize_stage"
        setattr(schedule, initialize, lambda *args: None)
        schedule._step_microbatches()
        order[rank] = log
    return order


CASES = [
    ("1F1B", 2, 2, 8), ("1F1B", 4, 4, 8), ("1F1B", 8, 8, 16), ("GPipe", 2, 2, 4), ("GPipe", 4, 4, 8),
    ("Interleaved1F1B", 2, 4, 8), ("Interleaved1F1B", 3, 6, 9), ("Interleaved1F1B", 4, 8, 16),
    ("Interleaved1F1B", 2, 8, 8), ("Interleaved1F1B", 4, 16, 16),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_schedule_order_is_what_torch_runs(case):
    assert {rank: list(actions) for rank, actions in schedule_order(*case).items()} == recorded_order(*case)


class Interpreter:
    """Runs an order with bounded rings, one duration per action; knows nothing of graphs.

    A source computes its forward, then waits for a free slot, then hands on both tap and activation. A sink frees the slot
    at the end of its draft work.
    """

    def __init__(self, order, rings, num_slots, duration):
        self.order, self.num_slots, self.duration = order, num_slots, duration
        self.last_stage = max(action.stage for actions in order.values() for action in actions)
        self.rings = {ring: deque() for ring in rings}
        self.sink_of = {a.microbatch: rank for rank, actions in order.items() for a in actions if a.kind == "D"}
        self.finished = set()
        self.next = dict.fromkeys(order, 0)
        self.publishing = dict.fromkeys(order)  # an action that has been computed and waits for slots
        self.computing = set()
        self.num_stalls = 0

    def can_start(self, action):
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind == "F":
            return stage == 0 or Action("F", stage - 1, microbatch) in self.finished
        if kind == "B" and stage < self.last_stage:
            return Action("B", stage + 1, microbatch) in self.finished
        return Action("F", stage, microbatch) in self.finished

    def publish(self, rank):
        """Tries to put a computed forward's tap into its ring."""
        action = self.publishing[rank]
        ring = self.rings.get(Ring(action.stage, self.sink_of[action.microbatch])) if action.kind == "F" else None
        if ring is not None:
            if len(ring) == self.num_slots:
                return False
            ring.append(action.microbatch)
        self.finished.add(action)
        self.publishing[rank] = None
        self.next[rank] += 1
        return True

    def run(self):
        """Returns whether the step ended."""
        clock, events = 0.0, []
        while True:
            progress = True
            while progress:
                progress = False
                for rank, actions in self.order.items():
                    if self.publishing[rank] is not None:
                        progress |= self.publish(rank)
                    elif rank not in self.computing and self.next[rank] < len(actions):
                        action = actions[self.next[rank]]
                        if self.can_start(action):
                            self.computing.add(rank)
                            heapq.heappush(events, (clock + self.duration(action), rank))
            if not events:
                return all(self.next[rank] == len(actions) for rank, actions in self.order.items())
            # what ends at the same instant ends together: a release then is in time for a publish
            clock, rank = heapq.heappop(events)
            ended = [rank]
            while events and events[0][0] == clock:
                ended.append(heapq.heappop(events)[1])
            ended.sort(key=lambda each: self.order[each][self.next[each]].kind != "D")
            for rank in ended:
                self.end(rank)

    def end(self, rank):
        action = self.order[rank][self.next[rank]]
        self.computing.remove(rank)
        self.publishing[rank] = action
        if action.kind == "D":
            for ring, held in self.rings.items():
                if ring.sink_rank == rank:
                    assert held.popleft() == action.microbatch
        if not self.publish(rank):
            self.num_stalls += 1


def timings(seed, num_stages):
    """Constant, slow draft, slow source, slow last stage, and random durations."""
    rng = random.Random(seed)
    slow = [rng.choice([1.0, 30.0]) for _ in range(num_stages)]
    return [
        lambda a: 1.0,
        lambda a: 1000.0 if a.kind == "D" else 1.0,
        lambda a: 1000.0 if a.stage == 0 else 1.0,
        lambda a: 1000.0 if a.stage == num_stages - 1 else 1.0,
        lambda a: 1e-6 if a.kind == "F" else 1.0,
        lambda a: slow[a.stage] * rng.random(),
        lambda a: rng.expovariate(1.0) ** 3,
    ]


def run_all(order, rings, num_slots, *, num_stages):
    """Whether the step ended, by timing, and the largest number of publishes that waited."""
    runs = [Interpreter(order, rings, num_slots, timing) for timing in timings(num_slots, num_stages)]
    return [run.run() for run in runs], max(run.num_stalls for run in runs)


PLACEMENTS = [("last_inside", "F"), ("last_inside", "B"), ("last_deferred", "F"), ("spread", "F")]


def check_bounds_by_running(order, rings, *, num_stages):
    bounds = slot_bounds(order, rings)
    ended, _ = run_all(order, rings, bounds.minimum, num_stages=num_stages)
    assert all(ended), bounds
    ended, num_stalls = run_all(order, rings, bounds.never_stalls, num_stages=num_stages)
    assert all(ended) and num_stalls == 0, bounds
    if bounds.minimum > 1:
        ended, _ = run_all(order, rings, bounds.minimum - 1, num_stages=num_stages)
        assert not any(ended), bounds
    if bounds.never_stalls > 1:
        assert stalls_by_a_slow_draft(order, rings, bounds.never_stalls - 1), bounds


def stalls_by_a_slow_draft(order, rings, num_slots):
    """Whether one draft work that takes for ever makes some publish wait; every adversary is of this kind."""
    for slow in [a for actions in order.values() for a in actions if a.kind == "D"]:
        run = Interpreter(order, rings, num_slots, lambda a, slow=slow: 1e6 if a == slow else 1.0)
        run.run()
        if run.num_stalls:
            return True
    return False


@pytest.mark.parametrize("placement, within", PLACEMENTS)
@pytest.mark.parametrize("case", CASES)
def test_bounds_are_sharp_when_run(case, placement, within):
    name, num_ranks, num_stages, num_microbatches = case
    order = place_draft(recorded_order(*case), placement, within=within)
    for stage in sorted({0, 1, num_stages // 2, num_stages - 2, num_stages - 1}):
        check_bounds_by_running(order, rings_of(order, [stage]), num_stages=num_stages)
    everything = rings_of(order, [0, num_stages // 2, num_stages - 1])
    check_bounds_by_running(order, everything, num_stages=num_stages)


@pytest.mark.parametrize(
    "case, within, minimum, never_stalls",
    [
        (("1F1B", 2, 2, 16), "F", 1, 2), (("1F1B", 4, 4, 16), "F", 1, 4), (("1F1B", 8, 8, 32), "F", 1, 8),
        (("1F1B", 4, 4, 16), "B", 1, 4),
        (("Interleaved1F1B", 4, 8, 16), "F", 4, 7), (("Interleaved1F1B", 4, 8, 16), "B", 4, 7),
        (("Interleaved1F1B", 2, 4, 16), "F", 2, 3),
        (("GPipe", 4, 4, 16), "B", 16, 16), (("GPipe", 4, 4, 16), "F", 1, 16),
    ],
)  # fmt: skip
def test_bounds_of_a_tap_on_the_first_stage(case, within, minimum, never_stalls):
    order = place_draft(recorded_order(*case), "last_inside", within=within)
    bounds = slot_bounds(order, rings_of(order, [0]))
    assert (bounds.minimum, bounds.never_stalls) == (minimum, never_stalls)


@pytest.mark.parametrize("case", CASES)
def test_rings_hold_all_their_microbatches_when_the_draft_runs_after_the_schedule(case):
    _, num_ranks, num_stages, num_microbatches = case
    for placement in ("last_deferred", "spread"):
        order = place_draft(recorded_order(*case), placement)
        for ring in rings_of(order, range(num_stages)):
            held = sum(action.kind == "D" for action in order[ring.sink_rank])
            bounds = slot_bounds(order, [ring])
            assert bounds.minimum == bounds.never_stalls == held


def test_spread_takes_a_table_of_sinks():
    order = place_draft(recorded_order("1F1B", 2, 2, 4), "spread", sink_of_microbatch=[1, 1, 0, 1])
    drafts = {rank: [a.microbatch for a in actions if a.kind == "D"] for rank, actions in order.items()}
    assert drafts == {0: [2], 1: [0, 1, 3]}
    assert slot_bounds(order, [Ring(0, 1)]).minimum == 3
    assert slot_bounds(order, [Ring(0, 0)]).minimum == 1


@pytest.mark.parametrize("placement, within", PLACEMENTS)
@pytest.mark.parametrize("case", CASES)
def test_rings_together_need_what_the_hardest_needs_alone(case, placement, within):
    """In these schedules every stage takes microbatches in ascending order, so a cycle through two rings closes in one."""
    order = place_draft(recorded_order(*case), placement, within=within)
    rings = rings_of(order, range(case[2]))
    assert slot_bounds(order, rings).minimum == max(slot_bounds(order, [ring]).minimum for ring in rings)


def test_too_few_slots_are_refused_with_schedule_stage_and_bound():
    order = place_draft(recorded_order("Interleaved1F1B", 4, 8, 16), "last_inside")
    with pytest.raises(
        ValueError, match=r"num_slots \(3\) must be at least 4 for schedule 'Interleaved1F1B'.*stage 0"
    ):
        check_num_slots(3, order, source_stages=[6, 0], schedule="Interleaved1F1B")
    assert check_num_slots(4, order, source_stages=[6, 0], schedule="Interleaved1F1B") == 4
    assert check_num_slots(None, order, source_stages=[6, 0], schedule="Interleaved1F1B") == 7


def test_an_order_without_a_forward_is_refused():
    order = recorded_order("1F1B", 2, 2, 4)
    order[1] = [a for a in order[1] if a != Action("F", 1, 0)]
    with pytest.raises(ValueError, match="'F' of stage 1 once for each of the 4 microbatches"):
        place_draft(order, "spread")


def test_an_order_that_deadlocks_by_itself_is_refused():
    order = place_draft(recorded_order("1F1B", 2, 2, 4), "last_inside")
    order[1] = [order[1][1], order[1][0], *order[1][2:]]  # the draft before the forward that it reads
    with pytest.raises(ValueError, match="deadlocks without any tap"):
        slot_bounds(order, rings_of(order, [0]))


def test_a_sink_that_takes_microbatches_in_another_order_is_refused():
    order = place_draft(recorded_order("1F1B", 2, 2, 4), "last_deferred")
    order[1][-2:] = [order[1][-1], order[1][-2]]
    with pytest.raises(ValueError, match="emptied in the order in which it is filled"):
        slot_bounds(order, rings_of(order, [0]))


@pytest.mark.parametrize(
    "arguments", [{"placement": "first"}, {"placement": "last_inside", "within": "W"}]
    + [{"placement": "spread", "sink_of_microbatch": sinks} for sinks in ([0, 1], [0, 1, 2, 0], [])],
)  # fmt: skip
def test_unknown_placements_are_refused(arguments):
    with pytest.raises(ValueError, match=r"placement|within|sink_of_microbatch"):
        place_draft(recorded_order("1F1B", 2, 2, 4), **arguments)
