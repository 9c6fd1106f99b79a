"""What a training step of a pipeline costs with a draft beside it, from the costs of its parts.

Each rank runs its actions in order; an action starts when its rank is free and its inputs have arrived. Transfers run beside
the computation. Nothing here is measured: `benchmarks/pipeline.py` compares it with runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_codraft import _optional
from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.taps.slots import Action, Order, place_draft

PLACEMENTS = ("none", "last_inside", "last_deferred", "spread", "spread_balanced")
NOMINAL_DRAFT_SHARE = 0.5  # of a rank's forward and backward: a draft of 0.05 to 0.6 is then no slower than on m mod P


@dataclass(frozen=True)
class Span:
    """When a rank was busy with one action.

    Args:
        action ([`~hf_codraft.taps.slots.Action`]): what it did.
        start_s (`float`): seconds from the start of the step.
        end_s (`float`): seconds from the start of the step.
    """

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """One simulated optimizer step; made by [`simulate`], read by tables and drawings.

    Args:
        spans (`tuple[tuple[Span, ...], ...]`): by pipeline rank, in running order.
        reduce_s (`float`): seconds of the sum of the draft's gradients, which begins when the last rank is done.
    """

    spans: tuple[tuple[Span, ...], ...]
    reduce_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds until every rank can step its optimizer."""
        return max(span.end_s for spans in self.spans for span in spans) + self.reduce_s

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of computation by rank."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.spans)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds without computation by rank, the gradient sum included."""
        return tuple(self.step_s - busy for busy in self.busy_s)


@dataclass(frozen=True)
class StepCosts:
    """Seconds that the parts of a step take; made by the caller of [`simulate`].

    Args:
        forward_s (`Sequence[float]`): by global stage, of one microbatch.
        backward_s (`Sequence[float]`): by global stage, of one microbatch.
        draft_s (`float`): forward and backward of the draft on one microbatch.
        transfer_s (`float`): a hidden state or its gradient from rank to rank.
        draft_reduce_s (`float`): the sum of the draft's gradients over the pipeline, where several ranks train it.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    draft_s: float = 0.0
    transfer_s: float = 0.0
    draft_reduce_s: float = 0.0

    def of(self, action: Action) -> float:
        """Seconds of an action.

        Raises:
            ValueError: for a backward of the weights apart, which the supported schedules don't have.
        """
        if action.kind == "D":
            return self.draft_s
        if action.kind not in ("F", "B"):
            raise ValueError(f"action kind ({action.kind!r}) must be F, B or D.")
        return (self.forward_s if action.kind == "F" else self.backward_s)[action.stage]


def _inputs(action: Action, num_stages: int) -> list[Action]:
    """What an action waits for besides its rank."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    if action.kind == "B" and stage + 1 < num_stages:
        return [Action("B", stage + 1, microbatch)]
    return [Action("F", stage, microbatch)]


def _run(order: Order, costs: StepCosts) -> tuple[tuple[Span, ...], ...]:
    """Start and end of every action of an order with the draft in it."""
    rank_of = {action: rank for rank, actions in order.items() for action in actions}
    spans: dict[int, list[Span]] = {rank: [] for rank in sorted(order)}
    end_s: dict[Action, float] = {}
    num_waiting = len(rank_of)
    while num_waiting:
        num_before = num_waiting
        for rank, done in spans.items():
            for action in order[rank][len(done) :]:
                inputs = _inputs(action, len(costs.forward_s))
                if any(each not in end_s for each in inputs):
                    break
                arrivals = [end_s[each] + costs.transfer_s * (rank_of[each] != rank) for each in inputs]
                start = max(arrivals + [done[-1].end_s if done else 0.0])
                end_s[action] = start + costs.of(action)
                done.append(Span(action, start, end_s[action]))
                num_waiting -= 1
        if num_waiting == num_before:
            stuck = [str(order[rank][len(done)]) for rank, done in spans.items() if len(done) < len(order[rank])]
            raise ValueError(f"order deadlocks: the ranks wait before {', '.join(stuck)}.")
    return tuple(tuple(each) for each in spans.values())


def simulate(
    order: Order, costs: StepCosts, *, placement: str, sink_of_microbatch: Sequence[int] | None = None
) -> StepTimeline:
    """Times one optimizer step.

    Args:
        order (`Order`): the policy's work, from [`~hf_codraft.parallel.schedule.schedule_order`].
        costs ([`StepCosts`]): seconds of its parts.
        placement (`str`): `"none"` (no draft), one of [`~hf_codraft.taps.slots.place_draft`]'s, or `"spread_balanced"`,
            `"spread"` with the microbatches of [`balanced_sinks`].
        sink_of_microbatch (`Sequence[int]`, *optional*): of `"spread"`, as in [`~hf_codraft.taps.slots.place_draft`].

    Raises:
        ValueError: if the costs are not one for each stage, sinks don't fit, or the order deadlocks.
    """
    num_stages = 1 + max(action.stage for actions in order.values() for action in actions)
    if not len(costs.forward_s) == len(costs.backward_s) == num_stages:
        raise ValueError(
            f"forward_s ({len(costs.forward_s)} entries) and backward_s ({len(costs.backward_s)}) must have one for each of "
            f"the {num_stages} stages."
        )
    if placement == "none":
        return StepTimeline(_run(order, costs))
    if placement == "spread_balanced":
        order = place_draft(order, "spread", sink_of_microbatch=balanced_sinks(order, costs))
    else:
        order = place_draft(order, placement, sink_of_microbatch=sink_of_microbatch)
    return StepTimeline(_run(order, costs), costs.draft_reduce_s if placement.startswith("spread") else 0.0)


def balanced_sinks(order: Order, costs: StepCosts) -> list[int]:
    """The rank of each microbatch's draft such that all ranks end at nearly the same time.

    Late stages finish their policy work first, while the last backwards drain towards stage 0. Each microbatch in turn goes
    to the rank that would have finished it first, the later rank on a tie; with equal work and no transfers no other
    assignment of work after a rank's own actions ends earlier.

    Args:
        order (`Order`): the policy's work.
        costs ([`StepCosts`]): seconds of its parts.

    Returns:
        `list[int]`: pipeline rank by microbatch, the same on all ranks that pass the same numbers.
    """
    free_s = {rank: spans[-1].end_s for rank, spans in zip(sorted(order), _run(order, costs))}
    num_microbatches = 1 + max(action.microbatch for actions in order.values() for action in actions)
    sinks = []
    for _ in range(num_microbatches):
        rank = min(free_s, key=lambda each: (free_s[each], -each))
        free_s[rank] += costs.draft_s
        sinks.append(rank)
    return sinks


def nominal_sinks(order: Order, num_layers: Sequence[int]) -> list[int]:
    """[`balanced_sinks`] before anything was measured: a stage's backward takes twice its forward, and both go with its layers.

    Args:
        order (`Order`): the policy's work.
        num_layers (`Sequence[int]`): decoder layers by global stage.
    """
    draft_s = NOMINAL_DRAFT_SHARE * 3.0 * sum(num_layers) / len(order)
    return balanced_sinks(order, StepCosts([float(n) for n in num_layers], [2.0 * n for n in num_layers], draft_s))


@dataclass(frozen=True)
class OverheadRow:
    """One line of the placement table; made by [`overhead_table`].

    Args:
        schedule (`str`): its name.
        num_ranks (`int`): ranks of the pipeline.
        num_stages (`int`): stages, virtual ones included.
        num_microbatches (`int`): of a step.
        draft_share (`float`): time of the draft's microbatch over time of a rank's forward and backward of it.
        placement (`str`): where the draft ran.
        step_s (`float`): seconds of the step where a rank's forward and backward of one microbatch takes one second.
        overhead (`float`): what the draft adds, as a share of the step without it.
        idle_share (`float`): share of the ranks' time without computation.
    """

    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    draft_share: float
    placement: str
    step_s: float
    overhead: float
    idle_share: float


def overhead_table(
    ranks: Sequence[int] = (2, 4, 8, 16),
    draft_shares: Sequence[float] = (0.05, 0.1, 0.2, 0.4),
    *,
    schedules: Sequence[str] = ("1F1B", "Interleaved1F1B"),
    placements: Sequence[str] = PLACEMENTS,
    microbatches_per_rank: int = 4,
    stages_per_rank: int = 2,
    transfer_s: float = 0.0,
    draft_reduce_s: float = 0.0,
) -> list[OverheadRow]:
    """What each placement costs for pipelines of equal stages whose backward takes twice their forward.

    Args:
        ranks (`Sequence[int]`): pipeline sizes.
        draft_shares (`Sequence[float]`): the draft's time on a microbatch over a rank's forward and backward of it.
        schedules (`Sequence[str]`): names that [`~hf_codraft.parallel.schedule.schedule_order`] knows.
        placements (`Sequence[str]`): as in [`simulate`].
        microbatches_per_rank (`int`): microbatches of a step over ranks.
        stages_per_rank (`int`): of schedules that interleave.
        transfer_s (`float`): as in [`StepCosts`], in units of a rank's forward and backward of one microbatch.
        draft_reduce_s (`float`): as in [`StepCosts`], in the same units.
    """
    rows = []
    for schedule in schedules:
        for num_ranks in ranks:
            num_stages = num_ranks * (stages_per_rank if schedule.startswith("Interleaved") else 1)
            num_microbatches = microbatches_per_rank * num_ranks
            order = schedule_order(schedule, num_ranks, num_stages, num_microbatches)
            forward_s = [num_ranks / num_stages / 3] * num_stages
            backward_s = [2 * each for each in forward_s]
            for share in draft_shares:
                costs = StepCosts(forward_s, backward_s, share, transfer_s, draft_reduce_s)
                without_s = simulate(order, costs, placement="none").step_s
                for placement in placements:
                    timeline = simulate(order, costs, placement=placement)
                    step_s = timeline.step_s
                    rows.append(
                        OverheadRow(
                            schedule, num_ranks, num_stages, num_microbatches, share, placement,
                            step_s=step_s, overhead=step_s / without_s - 1, idle_share=sum(timeline.idle_s) / num_ranks / step_s,
                        )
                    )  # fmt: skip
    return rows


def draw_timeline(timeline: StepTimeline, path: str) -> None:
    """Draws who worked on what, one bar a rank, with the microbatch in each box.

    Args:
        timeline ([`StepTimeline`]): what to draw.
        path (`str`): picture to write; the ending says its format.

    Raises:
        ImportError: without matplotlib.
    """
    figure_module = _optional.require("matplotlib.figure", extra="demo")
    figure = figure_module.Figure(figsize=(12, 0.5 * len(timeline.spans) + 0.8), layout="constrained")
    axes = figure.add_subplot()
    colors = {"F": "#9ecae1", "B": "#fdae6b", "D": "#74c476"}
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            width = span.end_s - span.start_s
            axes.barh(rank, width, left=span.start_s, color=colors[span.action.kind], edgecolor="white", height=0.9)
            axes.text(
                span.start_s + width / 2, rank, str(span.action.microbatch), ha="center", va="center", fontsize=7
            )
    axes.set(xlabel="seconds (forward blue, backward orange, draft green)", ylabel="pipeline rank")
    axes.set_yticks(range(len(timeline.spans)))
    axes.invert_yaxis()
    figure.savefig(path)
