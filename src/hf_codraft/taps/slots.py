"""How many slots a tap ring needs, from the order in which a pipeline's ranks work.

A source publishes the tap of microbatch m in its forward of m, before it sends the activation on, so the tap travels ahead of
everything that could wait for it. Only a full ring makes a source wait: with S slots, its k-th publish follows the release of
its (k - S)-th message.

    source rank   F0 ── F1 ── F2 ── F3            S = 2: F2 waits until D0 has released its slot,
                   │     │  ↗  │  ↗  │                   F3 until D1 has.
    sink rank     F0─D0─F1─D1─F2─D2─F3─D3

These edges join the order of each rank and the edges between stages. If the whole has a cycle, the step deadlocks whatever
the timing; where the order alone already puts the release before the publish, no timing can make the source wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Action:
    """One piece of a rank's work; made by `parallel.schedule` and [`place_draft`], read here and by the simulator.

    Args:
        kind (`str`): `"F"` forward, `"B"` backward (of the inputs, where the schedule splits it), `"W"` backward of the
            weights, `"D"` the draft's forward and backward, which begins with `collect` and ends with `release`.
        stage (`int`): global stage; of a `"D"` the last one, whose final hidden state the draft waits for.
        microbatch (`int`): which microbatch.
    """

    kind: str
    stage: int
    microbatch: int


Order = Mapping[int, Sequence[Action]]  # pipeline rank -> its actions, first to last


@dataclass(frozen=True)
class Ring:
    """Who fills a ring and who empties it; made by [`rings_of`].

    Args:
        source_stage (`int`): global stage whose forward publishes.
        sink_rank (`int`): pipeline rank that runs the draft on what was published for it.
    """

    source_stage: int
    sink_rank: int


@dataclass(frozen=True)
class SlotBounds:
    """How many slots rings need; made by [`slot_bounds`], read by the channel's setup.

    Args:
        minimum (`int`): with fewer, the step deadlocks whatever the timing.
        never_stalls (`int`): with these, no publish can find its ring full whatever the timing.
    """

    minimum: int
    never_stalls: int


def _size(order: Order) -> tuple[int, int]:
    """Stages and microbatches of an order, after a look at whether each stage sees each microbatch once."""
    actions = [action for actions in order.values() for action in actions]
    if not actions:
        raise ValueError("order has no actions.")
    num_stages = 1 + max(action.stage for action in actions)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    seen: dict[tuple[str, int], list[int]] = {(kind, stage): [] for kind in "FB" for stage in range(num_stages)}
    for action in actions:
        seen.setdefault((action.kind, action.stage), []).append(action.microbatch)
    for (kind, stage), microbatches in seen.items():
        if sorted(microbatches) != list(range(num_microbatches)):
            raise ValueError(
                f"order must hold '{kind}' of stage {stage} once for each of the {num_microbatches} microbatches; got "
                f"{microbatches}."
            )
    return num_stages, num_microbatches


def place_draft(
    order: Order, placement: str, *, within: str = "F", sink_of_microbatch: Sequence[int] | None = None
) -> dict[int, list[Action]]:
    """Adds the draft's work to a schedule's order.

    Args:
        order (`Order`): the policy's own work.
        placement (`str`): `"last_inside"`: on the last stage's rank, within the schedule. `"last_deferred"`: there, after
            that rank's own work. `"spread"`: on many ranks, after the own work of each.
        within (`str`): of `"last_inside"`, the action of the last stage that the draft is part of: the microbatch's `"F"` (a
            draft with a backward of its own) or its `"B"` (a draft whose loss is added to the policy's); so the last
            stage sends no gradient before the release.
        sink_of_microbatch (`Sequence[int]`, *optional*): of `"spread"`, the rank by microbatch; default m mod P.

    Raises:
        ValueError: for an argument that is not in these lists.
    """
    num_stages, num_microbatches = _size(order)
    last_rank = next(rank for rank, actions in order.items() if any(a.stage == num_stages - 1 for a in actions))
    drafts = [Action("D", num_stages - 1, m) for m in range(num_microbatches)]
    if placement == "last_inside":
        if within not in ("F", "B"):
            raise ValueError(f"within ({within!r}) must be 'F' or 'B'.")
        inside: list[Action] = []
        for action in order[last_rank]:
            draft = [drafts[action.microbatch]] if action.stage == num_stages - 1 and action.kind == within else []
            inside.extend([action, *draft] if within == "F" else [*draft, action])
        return {rank: inside if rank == last_rank else list(actions) for rank, actions in order.items()}
    if placement == "last_deferred":
        sinks: Sequence[int] = [last_rank] * num_microbatches
    elif placement == "spread":
        sinks = (
            sink_of_microbatch if sink_of_microbatch is not None else [m % len(order) for m in range(num_microbatches)]
        )
    else:
        raise ValueError(f"placement ({placement!r}) must be one of last_inside, last_deferred, spread.")
    if len(sinks) != num_microbatches or not set(sinks) <= set(order):
        raise ValueError(
            f"sink_of_microbatch ({list(sinks)}) must name one of the ranks {sorted(order)} for each of the "
            f"{num_microbatches} microbatches."
        )
    return {
        rank: [*actions, *(draft for draft in drafts if sinks[draft.microbatch] == rank)]
        for rank, actions in order.items()
    }


def rings_of(order: Order, source_stages: Sequence[int]) -> list[Ring]:
    """The rings of a step: one for each tapped stage and each rank on which [`place_draft`] has put draft work."""
    sink_ranks = [rank for rank, actions in order.items() if any(a.kind == "D" for a in actions)]
    return [Ring(stage, rank) for stage in source_stages for rank in sink_ranks]


def _graph(order: Order) -> dict[Action, list[Action]]:
    """What follows each action: its rank's next one, and the stages that wait for what it computes."""
    num_stages, _ = _size(order)
    followers: dict[Action, list[Action]] = {a: [] for actions in order.values() for a in actions}
    for actions in order.values():
        for action, following in pairwise(actions):
            followers[action].append(following)
    for action, after in followers.items():
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F" and stage + 1 < num_stages:
            after.append(Action("F", stage + 1, microbatch))
        elif action.kind == "F":
            after.append(Action("B", stage, microbatch))
            draft = Action("D", stage, microbatch)
            after.extend([draft] if draft in followers else [])
        elif action.kind == "B" and stage:
            after.append(Action("B", stage - 1, microbatch))
    return followers


def _sorted(followers: Mapping[Action, Sequence[Action]]) -> list[Action] | None:
    """The actions in an order in which they can run, or `None` if they deadlock."""
    num_awaited = dict.fromkeys(followers, 0)
    for after in followers.values():
        for action in after:
            num_awaited[action] += 1
    ready = [action for action, count in num_awaited.items() if count == 0]
    done = []
    while ready:
        action = ready.pop()
        done.append(action)
        for following in followers[action]:
            num_awaited[following] -= 1
            if num_awaited[following] == 0:
                ready.append(following)
    return done if len(done) == len(followers) else None


def _messages(order: Order, ring: Ring) -> tuple[list[Action], list[Action]]:
    """The forwards that publish into a ring and the draft works that release from it, message by message."""
    releases = [a for a in order[ring.sink_rank] if a.kind == "D"]
    wanted = {a.microbatch for a in releases}
    source = [a for actions in order.values() for a in actions if a.stage == ring.source_stage and a.kind == "F"]
    publishes = [a for a in source if a.microbatch in wanted]
    if [a.microbatch for a in publishes] != [a.microbatch for a in releases]:
        raise ValueError(
            f"the draft on rank {ring.sink_rank} takes microbatches {[a.microbatch for a in releases]}, and stage "
            f"{ring.source_stage} publishes them as {[a.microbatch for a in publishes]}; a ring is emptied in the order in "
            "which it is filled."
        )
    return publishes, releases


def _never_stalls(
    followers: Mapping[Action, Sequence[Action]],
    running_order: Sequence[Action],
    messages: tuple[list[Action], list[Action]],
) -> int:
    """Largest distance in messages from a publish back to the last release that must have come before it."""
    publishes, releases = messages
    number = {release: k for k, release in enumerate(releases)}
    released = dict.fromkeys(followers, -1)
    for action in running_order:
        latest = number.get(action, released[action])
        for following in followers[action]:
            released[following] = max(released[following], latest)
    return max(k - released[publish] for k, publish in enumerate(publishes))


def slot_bounds(order: Order, rings: Sequence[Ring]) -> SlotBounds:
    """Slots that rings of one size need, all of them together.

    Together means that a cycle may run through several rings; bounds of one ring come from a list of one. "Never stalls"
    takes it that a source sees a release no later than what the sink sent after it, as in shared memory; over a network a
    release may come later by its own way.

    Args:
        order (`Order`): every rank's work with the draft's, from [`place_draft`].
        rings (`Sequence[Ring]`): from [`rings_of`].

    Raises:
        ValueError: if the order deadlocks on its own, lacks work, or a sink takes microbatches in another order than their
            source publishes them.
    """
    messages = [_messages(order, ring) for ring in rings]
    followers = _graph(order)
    running_order = _sorted(followers)
    if running_order is None:
        raise ValueError("order deadlocks without any tap: an action comes before one that it waits for.")
    never_stalls = max((_never_stalls(followers, running_order, each) for each in messages), default=1)

    def deadlocks(num_slots: int) -> bool:
        bounded = {action: list(after) for action, after in followers.items()}
        for publishes, releases in messages:
            for release, publish in zip(releases, publishes[num_slots:]):
                bounded[release].append(publish)
        return _sorted(bounded) is None

    minimum, above = 1, never_stalls
    while minimum < above:  # fewer slots only add edges, so deadlock ends at one number
        middle = (minimum + above) // 2
        if deadlocks(middle):
            minimum = middle + 1
        else:
            above = middle
    return SlotBounds(minimum, never_stalls)


def check_num_slots(num_slots: int | None, order: Order, *, source_stages: Sequence[int], schedule: str) -> int:
    """Returns the number of slots to use: the given one if it cannot deadlock, for `None` the one that never stalls.

    Args:
        num_slots (`int`, *optional*): slots of each ring, as the user asked for them.
        order (`Order`): every rank's work with the draft's, from [`place_draft`].
        source_stages (`Sequence[int]`): stages that publish.
        schedule (`str`): the schedule's name, for the message.

    Raises:
        ValueError: if the step would deadlock, naming schedule, stage and bound.
    """
    rings = rings_of(order, source_stages)
    bounds = slot_bounds(order, rings)
    if num_slots is None:
        return bounds.never_stalls
    if num_slots >= bounds.minimum:
        return num_slots
    hardest = max(rings, key=lambda ring: slot_bounds(order, [ring]).minimum)
    raise ValueError(
        f"num_slots ({num_slots}) must be at least {bounds.minimum} for schedule {schedule!r} on {len(order)} ranks: with "
        f"fewer, the publish of stage {hardest.source_stage} waits for a release on rank {hardest.sink_rank} that waits for "
        f"it. Leave num_slots unset for {bounds.never_stalls}, with which no publish ever waits."
    )
