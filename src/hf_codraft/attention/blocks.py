"""Who sees whom, as rectangles and triangles that a kernel computes without a mask.

The rule: query i sees key j where both belong to one segment, `j <= i`, and, under a sliding window of W tokens,
`j > i - W`. Cut at the borders of segments and of what ranks hold, that set is made of three shapes:

    full        causal      anticausal
    x x x x     x . .       x x x        anticausal is causal with queries and keys in reverse:
    x x x x     x x .       . x x        the window's lower edge
    x x x x     x x x       . . x
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from hf_codraft.attention.layout import PackedLayout, Run


class Shape(StrEnum):
    """Which pairs of a block are seen (see the drawing above)."""

    FULL = "full"
    CAUSAL = "causal"
    ANTICAUSAL = "anticausal"


@dataclass(frozen=True)
class Block:
    """Queries `[query_start, query_end)` against keys `[key_start, key_end)`: one kernel call.

    Both ranges are rows of local tensors. Triangles are square, and nothing is empty: torch's CPU kernel ends the process
    on no key.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    shape: Shape = Shape.FULL

    def __post_init__(self) -> None:
        if not (0 <= self.query_start < self.query_end and 0 <= self.key_start < self.key_end):
            raise ValueError(f"a block needs a query and a key, got {self}; leave empty blocks out.")

    @property
    def num_pairs(self) -> int:
        queries, keys = self.query_end - self.query_start, self.key_end - self.key_start
        return queries * keys if self.shape is Shape.FULL else queries * (queries + 1) // 2


def cut(queries: Run, keys: Run, window: int | None) -> Iterable[tuple[int, int, int, int, Shape]]:
    """Shapes, in packed indices, of the pairs that two runs of one segment share."""
    low, high = queries.start, queries.end
    # Where the diagonal enters and leaves the keys, and where the window's edge does.
    borders = {keys.start, keys.end}
    if window is not None:
        borders |= {keys.start + window, keys.end + window - 1}
    cuts = sorted({low, high} | {border for border in borders if low < border < high})
    longest = high - low if window is None else max(window - 1, 1)
    for first, last in pairwise(cuts):
        for a in range(first, last, longest):
            yield from _strip(a, min(a + longest, last), keys, window)


def _strip(a: int, b: int, keys: Run, window: int | None) -> Iterable[tuple[int, int, int, int, Shape]]:
    """Shapes of queries `[a, b)`, over which diagonal and window each lie wholly inside or outside the keys."""
    start, end = keys.start, keys.end
    if window is not None and b - window > start:
        edge = max(a - window + 1, start)
        if end <= edge:
            return
        start = edge
        if b - a > 1:  # query a sees all of [edge, b - window + 1), the last one its last key alone
            start = b - window + 1
            yield a, b, edge, start, Shape.ANTICAUSAL
    full_end = min(a, end)
    if full_end > start:
        yield a, b, start, full_end, Shape.FULL
    if end > a and start < b:
        yield a, b, a, b, Shape.CAUSAL


def pieces_of(span: tuple[int, int], runs: Sequence[Run]) -> list[Run]:
    """The parts of ascending runs that lie in a span of the row, such as a segment."""
    start, end = span
    first = bisect.bisect_right(runs, start, key=lambda run: run.end)
    last = bisect.bisect_left(runs, end, first, key=lambda run: run.start)
    return [
        Run(max(run.start, start), min(run.end, end), run.offset + max(start - run.start, 0))
        for run in runs[first:last]
    ]


def runs_taken(runs: Sequence[Run], ranges: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Where the tokens of some runs lie once the rows in `ranges`, ascending, are taken out one after another.

    Args:
        runs (`Sequence[Run]`): ascending, in tokens as in rows, without a gap between rows.
        ranges (iterable of `(start, end)`): of rows, disjoint.
    """
    rows = [Run(run.offset, run.offset + run.end - run.start, run.start) for run in runs]  # tokens and rows swapped
    taken: list[Run] = []
    offset = 0
    for span in ranges:
        for part in pieces_of(span, rows):
            num_tokens = part.end - part.start
            taken.append(Run(part.offset, part.offset + num_tokens, offset))
            offset += num_tokens
    return tuple(taken)


def visible_blocks(
    layout: PackedLayout, queries: Sequence[Run], keys: Sequence[Run], *, window: int | None = None
) -> tuple[Block, ...]:
    """Blocks in which the queries of some runs see the keys of others, each visible pair once.

    Args:
        layout ([`PackedLayout`]): segments of the row.
        queries, keys (`Sequence[Run]`): ascending; what lies where in the two tensors.
        window (`int`, *optional*): a query sees itself and `window - 1` tokens before it.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}; use None for full attention.")
    blocks: list[Block] = []
    for segment in _touched(layout, queries):
        key_runs = pieces_of(segment, keys)
        for query_run in pieces_of(segment, queries):
            for key_run in key_runs:
                if key_run.start >= query_run.end:
                    break
                for a, b, c, d, shape in cut(query_run, key_run, window):
                    to_query, to_key = query_run.offset - query_run.start, key_run.offset - key_run.start
                    _append(blocks, Block(a + to_query, b + to_query, c + to_key, d + to_key, shape))
    return tuple(blocks)


def _touched(layout: PackedLayout, runs: Sequence[Run]) -> list[tuple[int, int]]:
    segments: list[tuple[int, int]] = []
    for run in runs:
        token = run.start
        while token < run.end:
            segment = layout.segment_of(token)
            if not segments or segments[-1] != segment:
                segments.append(segment)
            token = segment[1]
    return segments


def _append(blocks: list[Block], block: Block) -> None:
    """Adds a block, joined with the last one where the two are one rectangle."""
    if blocks:
        last = blocks[-1]
        same_queries = (last.query_start, last.query_end) == (block.query_start, block.query_end)
        if same_queries and last.shape is block.shape is Shape.FULL and last.key_end == block.key_start:
            blocks[-1] = replace(last, key_end=block.key_end)
            return
    blocks.append(block)


def runs_of(index: Sequence[int]) -> tuple[Run, ...]:
    """Ascending packed indices, one a row of some tensor, as runs of neighbours."""
    runs: list[Run] = []
    for row, token in enumerate(index):
        if runs and runs[-1].end == token:
            runs[-1] = replace(runs[-1], end=token + 1)
        else:
            runs.append(Run(token, token + 1, row))
    return tuple(runs)


def clip(blocks: Sequence[Block], start: int, end: int) -> tuple[Block, ...]:
    """The same blocks for queries `[start, end)` alone, which become queries `[0, end - start)`."""
    clipped: list[Block] = []
    for block in blocks:
        a, b = max(block.query_start, start), min(block.query_end, end)
        if a >= b:
            continue
        if block.shape is Shape.FULL:
            clipped.append(Block(a - start, b - start, block.key_start, block.key_end))
            continue
        shift = block.key_start - block.query_start
        clipped.append(Block(a - start, b - start, a + shift, b + shift, block.shape))
        if block.shape is Shape.CAUSAL and a > block.query_start:
            clipped.append(Block(a - start, b - start, block.key_start, a + shift))
        if block.shape is Shape.ANTICAUSAL and b < block.query_end:
            clipped.append(Block(a - start, b - start, b + shift, block.key_end))
    return tuple(clipped)


def merged_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The union of some ranges, ascending and disjoint."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def num_in(ranges: Iterable[tuple[int, int]]) -> int:
    """Rows in some disjoint ranges."""
    return sum(end - start for start, end in ranges)


def needed_keys(blocks: Sequence[Block]) -> tuple[tuple[int, int], ...]:
    """The key ranges that some blocks read, ascending and disjoint."""
    return merged_ranges((block.key_start, block.key_end) for block in blocks)
