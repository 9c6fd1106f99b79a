"""Who holds which tokens of a packed row: contiguous, zigzag, zigzag per segment, balanced.

A causal token costs one unit for every key it sees, so late tokens of long segments are dear. `zigzag_plan` is the
published layout: right for one long sequence, uneven where a row packs many. `balanced_plan` weighs the segments:
short ones stay whole (nothing of them travels), long ones are cut into strips over as few ranks as carry the load.
"""

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


def balanced_plan(
    cu_seqlens: Sequence[int], world: int, *, window: int | None = None, tolerance: float = 0.05
) -> PackedLayout:
    """Even work and even tokens, with as few segments cut as that allows.

    Segments are placed in descending length. One that fits whole under the fair share (of pairs and of tokens, each
    within `tolerance`) stays whole; another is cut into strips, which go to a rank that has some of the segment while
    it has room, else to the least loaded. Strips of one segment are causal: late ones see more and are placed first.

    Args:
        cu_seqlens (`Sequence[int]`): as in [`PackedLayout`].
        world (`int`): number of ranks.
        window (`int`, *optional*): sliding window of the attention, in tokens.
        tolerance (`float`): how far above the fair share a rank may be loaded before another is preferred.
    """
    row = _checked(cu_seqlens, world)
    total_pairs = max(sum(causal_pairs(end - start, window=window) for start, end in row.segments), 1)
    pairs, tokens = [0.0] * world, [0.0] * world  # in fair shares

    def load(rank: int, more_pairs: float, more_tokens: float) -> float:
        return max(pairs[rank] + more_pairs, tokens[rank] + more_tokens)

    pieces: list[Piece] = []

    def place(start: int, end: int, segment_start: int, preferred: Sequence[int]) -> int:
        more_pairs = causal_pairs(end - segment_start, start - segment_start, window) * world / total_pairs
        more_tokens = (end - start) * world / row.num_tokens
        room = [rank for rank in preferred if load(rank, more_pairs, more_tokens) <= 1 + tolerance]
        owner = min(room or range(world), key=lambda rank: (load(rank, more_pairs, more_tokens), rank))
        pairs[owner] += more_pairs
        tokens[owner] += more_tokens
        pieces.append(Piece(start, end, owner))
        return owner

    for start, end in sorted(row.segments, key=lambda segment: segment[0] - segment[1]):
        more = causal_pairs(end - start, window=window) * world / total_pairs, (end - start) * world / row.num_tokens
        if min(load(rank, *more) for rank in range(world)) <= 1 + tolerance:
            place(start, end, start, ())
            continue
        num_strips = min(end - start, 8 * world)
        borders = [start + (end - start) * n // num_strips for n in range(num_strips + 1)]
        owners: list[int] = []
        for a, b in reversed(list(pairwise(borders))):
            owners.append(place(a, b, start, owners))
    return PackedLayout(row.cu_seqlens, world, tuple(sorted(pieces, key=lambda piece: piece.start)))
