"""Who holds which tokens of a packed row: contiguous, zigzag, zigzag per segment, balanced.

A causal token costs one unit for every key it sees, so late tokens of long segments are dear. `zigzag_plan` is the
published layout: right for one long sequence, uneven where a row packs many. `balanced_plan` weighs the segments:
short ones stay whole (nothing of them travels), long ones are cut into strips over as few ranks as carry the load.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from hf_codraft.attention.layout import PackedLayout, Piece


def _checked(cu_seqlens: Sequence[int], world: int) -> PackedLayout:
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}.")
    return PackedLayout(tuple(cu_seqlens))


def _pieces(borders: list[int], owners: list[int]) -> tuple[Piece, ...]:
    """Pieces between neighbouring borders; empty ones are left out (a row shorter than the number of pieces)."""
    return tuple(Piece(a, b, owner) for a, b, owner in zip(borders, borders[1:], owners) if a < b)


def _zigzag(start: int, end: int, ranks: Sequence[int]) -> tuple[Piece, ...]:
    num = 2 * len(ranks)
    borders = [start + (end - start) * n // num for n in range(num + 1)]
    return _pieces(borders, [*ranks, *reversed(ranks)])


def contiguous_plan(cu_seqlens: Sequence[int], world: int) -> PackedLayout:
    """Rank n holds the n-th of `world` nearly equal runs."""
    row = _checked(cu_seqlens, world)
    borders = [row.num_tokens * n // world for n in range(world + 1)]
    return PackedLayout(row.cu_seqlens, world, _pieces(borders, list(range(world))))


def zigzag_plan(cu_seqlens: Sequence[int], world: int) -> PackedLayout:
    """The row in `2 * world` nearly equal pieces; rank n holds the n-th and the n-th from the end (arXiv 2609.07108)."""
    row = _checked(cu_seqlens, world)
    return PackedLayout(row.cu_seqlens, world, _zigzag(0, row.num_tokens, range(world)))


def segment_zigzag_plan(cu_seqlens: Sequence[int], world: int) -> PackedLayout:
    """Every segment in a zigzag of its own: even work, and all of every segment travels."""
    row = _checked(cu_seqlens, world)
    pieces: list[Piece] = []
    for number, (start, end) in enumerate(row.segments):
        ranks = [(number + n) % world for n in range(world)]  # the odd tokens of short segments go round
        pieces += _zigzag(start, end, ranks)
    return PackedLayout(row.cu_seqlens, world, tuple(pieces))


def causal_pairs(length: int, start: int = 0, window: int | None = None) -> int:
    """Key/query pairs of the tokens `[start, length)` of one segment: each sees itself and (`window - 1`) before it."""

    def up_to(n: int) -> int:
        full = n if window is None else min(n, window)
        return full * (full + 1) // 2 + (n - full) * (window or 0)

    return up_to(length) - up_to(start)


class _Loads:
    """Pairs and tokens of every rank while a row is being placed, both in fair shares; what counts is the larger."""

    def __init__(self, row: PackedLayout, world: int, window: int | None):
        self.world, self.window, self.num_tokens = world, window, row.num_tokens
        self.num_pairs = max(sum(causal_pairs(end - start, window=window) for start, end in row.segments), 1)
        self.loads = [(0.0, 0.0)] * world
        self.owned: list[list[tuple[int, int, tuple[float, float]]]] = [[] for _ in range(world)]

    def weight(self, start: int, end: int, segment_start: int) -> tuple[float, float]:
        num_pairs = causal_pairs(end - segment_start, start - segment_start, self.window)
        return num_pairs * self.world / self.num_pairs, (end - start) * self.world / self.num_tokens

    def with_more(self, rank: int, more: tuple[float, float], less: tuple[float, float] = (0.0, 0.0)) -> float:
        """The rank's load with one piece more and another less."""
        pairs, tokens = self.loads[rank]
        return max(pairs + more[0] - less[0], tokens + more[1] - less[1])

    def place(self, start: int, end: int, segment_start: int, preferred: Sequence[int], tolerance: float) -> int:
        more = self.weight(start, end, segment_start)
        room = [rank for rank in preferred if self.with_more(rank, more) <= 1 + tolerance]
        owner = min(room or range(self.world), key=lambda rank: (self.with_more(rank, more), rank))
        self._give(owner, (start, end, more))
        return owner

    def _give(self, rank: int, piece: tuple[int, int, tuple[float, float]]) -> None:
        self.owned[rank].append(piece)
        self._recount(rank)

    def _recount(self, rank: int) -> None:
        weights = [weight for _, _, weight in self.owned[rank]]
        self.loads[rank] = sum(pairs for pairs, _ in weights), sum(tokens for _, tokens in weights)

    def even_out(self, tolerance: float) -> None:
        """Relieves the fullest rank by moving or swapping one piece, as long as it is above tolerance and that helps."""
        for _ in range(8 * self.world):
            fullest, *others = sorted(range(self.world), key=lambda rank: -max(self.loads[rank]))
            best = max(self.loads[fullest]) - 1e-4
            if best <= 1 + tolerance:
                return
            chosen: tuple[int, int, int | None] | None = None
            for rank in reversed(others):
                options: list[tuple[int | None, tuple[float, float]]] = [(None, (0.0, 0.0)), *self._heaviest(rank)]
                for number, weight in self._heaviest(fullest):
                    for other, back in options:
                        after = max(self.with_more(fullest, back, weight), self.with_more(rank, weight, back))
                        if after < best:
                            best, chosen = after, (number, rank, other)
                if chosen is not None:
                    break
            if chosen is None:
                return
            self._exchange(fullest, *chosen)

    def _heaviest(self, rank: int) -> list[tuple[int, tuple[float, float]]]:
        """The pieces that are worth a try (few: every pair of them is tried)."""
        weights = [(number, weight) for number, (_, _, weight) in enumerate(self.owned[rank])]
        return sorted(weights, key=lambda piece: -max(piece[1]))[:24]

    def _exchange(self, fullest: int, number: int, rank: int, other: int | None) -> None:
        piece = self.owned[fullest].pop(number)
        if other is not None:
            self.owned[fullest].append(self.owned[rank].pop(other))
        self.owned[rank].append(piece)
        self._recount(fullest)
        self._recount(rank)


def balanced_plan(
    cu_seqlens: Sequence[int], world: int, *, window: int | None = None, tolerance: float = 0.05
) -> PackedLayout:
    """Even work and even tokens, with as few segments cut as that allows.

    Segments are placed in descending length. One that fits whole under the fair share (of pairs and of tokens, each
    within `tolerance`) stays whole; another is cut into strips, which go to a rank that has some of the segment while
    it has room, else to the least loaded. Strips of one segment are causal: late ones see more and are placed first.
    Pieces of the fullest rank then move or are swapped for others until it is within `tolerance` or nothing helps.

    Args:
        cu_seqlens (`Sequence[int]`): as in [`PackedLayout`].
        world (`int`): number of ranks.
        window (`int`, *optional*): sliding window of the attention, in tokens.
        tolerance (`float`): how far above the fair share a rank may be loaded before another is preferred.
    """
    row = _checked(cu_seqlens, world)
    loads = _Loads(row, world, window)
    for start, end in sorted(row.segments, key=lambda segment: segment[0] - segment[1]):
        more = loads.weight(start, end, start)
        if min(loads.with_more(rank, more) for rank in range(world)) <= 1 + tolerance:
            loads.place(start, end, start, (), tolerance)
            continue
        num_strips = min(end - start, math.ceil(8 * max(more)))
        borders = [start + (end - start) * n // num_strips for n in range(num_strips + 1)]
        owners: list[int] = []
        for a, b in reversed(list(pairwise(borders))):
            owners.append(loads.place(a, b, start, owners, tolerance))
    loads.even_out(tolerance)
    pieces = [Piece(start, end, rank) for rank, owned in enumerate(loads.owned) for start, end, _ in owned]
    return PackedLayout(row.cu_seqlens, world, tuple(sorted(pieces, key=lambda piece: piece.start)))
