"""Simulated steps against closed formulas and against a longest path found by another route."""

import math
import random
from functools import cache
from itertools import pairwise

import pytest

from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.parallel.simulator import (
    PLACEMENTS,
    StepCosts,
    balanced_sinks,
    draw_timeline,
    nominal_sinks,
    overhead_table,
    simulate,
)
from hf_codraft.taps.slots import Action, place_draft

CASES = [
    ("1F1B", 4, 4, 8),
    ("1F1B", 2, 2, 5),
    ("GPipe", 4, 4, 6),
    ("Interleaved1F1B", 4, 8, 8),
    ("Interleaved1F1B", 2, 8, 6),
]


def random_costs(rng, num_stages, **more):
    return StepCosts([rng.random() for _ in range(num_stages)], [rng.random() for _ in range(num_stages)], **more)


def longest_path_s(order, costs):
    """Step time as the longest chain of actions, by recursion from the ends; shares no code with the simulator."""
    place = {action: (rank, k) for rank, actions in order.items() for k, action in enumerate(actions)}
    last_stage = len(costs.forward_s) - 1

    @cache
    def end_s(action):
        rank, k = place[action]
        before = [end_s(order[rank][k - 1])] if k else [0.0]
        other = None
        if action.kind == "F" and action.stage > 0:
            other = Action("F", action.stage - 1, action.microbatch)
        if action.kind == "B" and action.stage < last_stage:
            other = Action("B", action.stage + 1, action.microbatch)
        if action.kind == "D" or (action.kind == "B" and action.stage == last_stage):
            other = Action("F", last_stage, action.microbatch)
        if other is not None:
            before.append(end_s(other) + (costs.transfer_s if place[other][0] != rank else 0.0))
        own = {"F": costs.forward_s, "B": costs.backward_s, "D": [costs.draft_s] * (last_stage + 1)}[action.kind]
        return max(before) + own[action.stage]

    return max(end_s(action) for actions in order.values() for action in actions)


@pytest.mark.parametrize("placement", ["none", "last_inside", "last_deferred", "spread"])
@pytest.mark.parametrize("case", CASES)
def test_step_is_the_longest_chain_of_actions(case, placement):
    rng = random.Random(str((case, placement)))
    order = schedule_order(*case)
    placed = order if placement == "none" else place_draft(order, placement)
    for _ in range(20):
        costs = random_costs(rng, case[2], draft_s=rng.random(), transfer_s=0.3 * rng.random())
        assert simulate(order, costs, placement=placement).step_s == pytest.approx(longest_path_s(placed, costs))


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 2), (2, 7), (4, 8), (8, 16)])
def test_equal_stages_take_the_textbook_time(name, num_ranks, num_microbatches):
    order = schedule_order(name, num_ranks, num_ranks, num_microbatches)
    timeline = simulate(order, StepCosts([2.0] * num_ranks, [3.0] * num_ranks), placement="none")
    assert timeline.step_s == (num_microbatches + num_ranks - 1) * (2.0 + 3.0)
    assert timeline.idle_s == ((num_ranks - 1) * 5.0,) * num_ranks


@pytest.mark.parametrize(
    "num_ranks, per_rank, num_microbatches", [(2, 2, 4), (4, 2, 8), (4, 2, 16), (4, 4, 16), (8, 2, 16)]
)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(num_ranks, per_rank, num_microbatches):
    """Megatron-LM (Narayanan et al. 2021, section 2.2.2): the bubble is (P - 1)(f + b) / v of a rank's f and b."""
    num_stages = num_ranks * per_rank
    order = schedule_order("Interleaved1F1B", num_ranks, num_stages, num_microbatches)
    costs = StepCosts([1.0 / per_rank] * num_stages, [2.0 / per_rank] * num_stages)
    timeline = simulate(order, costs, placement="none")
    assert timeline.step_s == pytest.approx(3.0 * num_microbatches + (num_ranks - 1) * 3.0 / per_rank)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_busy_with_all_the_work_and_nothing_else(case, placement):
    _, _, num_stages, num_microbatches = case
    order = schedule_order(*case)
    costs = random_costs(random.Random(1), num_stages, draft_s=0.7, transfer_s=0.1)
    timeline = simulate(order, costs, placement=placement)
    work_s = num_microbatches * (sum(costs.forward_s) + sum(costs.backward_s) + 0.7 * (placement != "none"))
    assert sum(timeline.busy_s) == pytest.approx(work_s)
    assert [b + i for b, i in zip(timeline.busy_s, timeline.idle_s)] == pytest.approx([timeline.step_s] * case[1])
    for spans in timeline.spans:
        assert all(span.end_s <= following.start_s for span, following in pairwise(spans))
    if placement in ("last_deferred", "spread", "spread_balanced"):
        alone = simulate(order, costs, placement="none")
        policy = [tuple(span for span in spans if span.action.kind != "D") for spans in timeline.spans]
        assert tuple(policy) == alone.spans


@pytest.mark.parametrize("placement", PLACEMENTS[1:])
@pytest.mark.parametrize("case", CASES)
def test_a_free_draft_costs_nothing(case, placement):
    costs = random_costs(random.Random(2), case[2])
    order = schedule_order(*case)
    assert simulate(order, costs, placement=placement).step_s == simulate(order, costs, placement="none").step_s


@pytest.mark.parametrize(
    "num_ranks, num_microbatches, draft_s", [(4, 8, 0.3), (4, 16, 1.2), (2, 5, 0.5), (8, 16, 0.1)]
)
def test_each_placement_adds_what_its_formula_says(num_ranks, num_microbatches, draft_s):
    """1F1B with f = 1, b = 2. The last stage ends (P - 1) b before stage 0, which deferred work may fill."""
    order = schedule_order("1F1B", num_ranks, num_ranks, num_microbatches)
    costs = StepCosts([1.0] * num_ranks, [2.0] * num_ranks, draft_s=draft_s, draft_reduce_s=0.25)
    step_s = {placement: simulate(order, costs, placement=placement).step_s for placement in PLACEMENTS}
    added_s = {placement: seconds - step_s["none"] for placement, seconds in step_s.items()}
    assert added_s["last_inside"] == pytest.approx(num_microbatches * draft_s)
    assert added_s["last_deferred"] == pytest.approx(max(0.0, num_microbatches * draft_s - (num_ranks - 1) * 2.0))
    assert added_s["spread"] == pytest.approx(math.ceil(num_microbatches / num_ranks) * draft_s + 0.25)
    assert added_s["spread_balanced"] <= min(added_s["last_deferred"] + 0.25, added_s["spread"]) + 1e-9


def test_fewer_layers_on_the_last_stage_make_room_for_the_draft():
    """Eight layers on four ranks, a draft as long as one layer: with one layer less at the end no rank is overfull."""
    order = schedule_order("1F1B", 4, 4, 32)
    even = StepCosts([2.0] * 4, [4.0] * 4, draft_s=3.0)
    uneven = StepCosts([7 / 3] * 3 + [1.0], [14 / 3] * 3 + [2.0], draft_s=3.0)
    assert (
        simulate(order, uneven, placement="last_inside").step_s < simulate(order, even, placement="last_inside").step_s
    )
    assert simulate(order, uneven, placement="none").step_s > simulate(order, even, placement="none").step_s


@pytest.mark.parametrize("case", [("1F1B", 3, 3, 4), ("1F1B", 2, 2, 6), ("Interleaved1F1B", 2, 4, 6)])
def test_no_assignment_of_microbatches_beats_the_balanced_one(case):
    """Every table of sinks is tried. With equal drafts only the number on each rank counts, so counts stand for tables."""
    _, num_ranks, num_stages, num_microbatches = case
    order = schedule_order(*case)
    rng = random.Random(3)
    for _ in range(5):
        costs = random_costs(rng, num_stages, draft_s=rng.random())
        best = math.inf
        for table in range(num_ranks**num_microbatches):
            sinks = [table // num_ranks**m % num_ranks for m in range(num_microbatches)]
            if sinks == sorted(sinks):
                best = min(best, longest_path_s(place_draft(order, "spread", sink_of_microbatch=sinks), costs))
        assert simulate(order, costs, placement="spread_balanced").step_s == pytest.approx(best)


def test_balanced_sinks_fill_the_drain_of_late_stages_first():
    order = schedule_order("1F1B", 4, 4, 8)
    sinks = balanced_sinks(order, StepCosts([1.0] * 4, [2.0] * 4, draft_s=1.0))
    # rank 3 ends 6 s before rank 0, rank 2 ends 4 s before it, rank 1 ends 2 s before it
    assert [sinks.count(rank) for rank in range(4)] == [0, 0, 3, 5]
    assert set(balanced_sinks(order, StepCosts([1.0] * 4, [2.0] * 4, draft_s=9.0))) == {0, 1, 2, 3}


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_sinks_chosen_before_anything_is_measured_beat_m_mod_p_whatever_the_draft_costs(schedule, num_ranks):
    num_stages = num_ranks * (2 if schedule == "Interleaved1F1B" else 1)
    order = schedule_order(schedule, num_ranks, num_stages, 4 * num_ranks)
    sinks = nominal_sinks(order, [3] * num_stages)
    assert set(sinks) <= set(range(num_ranks))
    for draft_share in (0.05, 0.1, 0.2, 0.4, 0.6):
        costs = StepCosts([1.0] * num_stages, [2.0] * num_stages, draft_share * 3.0 * num_stages / num_ranks)
        ours, theirs = (
            longest_path_s(place_draft(order, "spread", sink_of_microbatch=table), costs) for table in (sinks, None)
        )
        assert ours <= theirs + 1e-9, draft_share


def test_the_table_has_a_row_for_every_combination_and_spread_meets_its_aim():
    rows = overhead_table((2, 4), (0.1, 0.4), schedules=("1F1B", "Interleaved1F1B"))
    assert len({(r.schedule, r.num_ranks, r.draft_share, r.placement) for r in rows}) == len(rows) == 2 * 2 * 2 * 5
    overhead = {(r.schedule, r.num_ranks, r.draft_share, r.placement): r.overhead for r in rows}
    for key, value in overhead.items():
        assert (value == 0) if key[3] == "none" else (value >= 0)
        assert 0 <= value <= key[2] * 1.0001
    for schedule in ("1F1B", "Interleaved1F1B"):
        for share in (0.1, 0.4):
            assert overhead[schedule, 4, share, "spread"] <= overhead[schedule, 4, share, "last_inside"] / 3
    # 1F1B, P = 4, M = 16: 16 * 0.4 and 4 * 0.4 on a step of 19
    assert overhead["1F1B", 4, 0.4, "last_inside"] == pytest.approx(6.4 / 19)
    assert overhead["1F1B", 4, 0.4, "spread"] == pytest.approx(1.6 / 19)


def test_costs_must_be_one_for_each_stage():
    with pytest.raises(ValueError, match=r"forward_s \(3 entries\) and backward_s \(4\)"):
        simulate(schedule_order("GPipe", 4, 4, 4), StepCosts([1.0] * 3, [1.0] * 4), placement="none")


def test_an_order_that_deadlocks_is_refused():
    order = schedule_order("GPipe", 2, 2, 2)
    backwards_first = {rank: sorted(actions, key=lambda a: a.kind) for rank, actions in order.items()}
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(backwards_first, StepCosts([1.0] * 2, [1.0] * 2), placement="none")


def test_timeline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    costs = StepCosts([1.0] * 2, [2.0] * 2, draft_s=0.5)
    draw_timeline(simulate(schedule_order("GPipe", 2, 2, 4), costs, placement="spread"), str(tmp_path / "step.svg"))
    text = (tmp_path / "step.svg").read_text()
    assert text.count("#74c476") == 4 and text.count("#9ecae1") == 8 and text.count("#fdae6b") == 8


def test_spread_follows_the_sinks_it_is_given():
    order, costs = schedule_order("1F1B", 2, 2, 4), StepCosts([1.0] * 2, [2.0] * 2, draft_s=1.5)
    balanced = balanced_sinks(order, costs)
    for sinks, like in ((balanced, "spread_balanced"), ([1] * 4, "last_deferred"), ([0, 1, 0, 1], "spread")):
        given = simulate(order, costs, placement="spread", sink_of_microbatch=sinks)
        assert given.spans == simulate(order, costs, placement=like).spans
