"""Blocks cover every visible pair once and no other, however a row is cut."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from attention_cases import PLANS

from hf_codraft.attention.blocks import Block, Shape, clip, needed_keys, pieces_of, runs_of, runs_taken, visible_blocks
from hf_codraft.attention.layout import PackedLayout, Run
from hf_codraft.attention.plans import causal_pairs

WINDOWS = [None, 1, 2, 3, 7, 100]


def brute_force(layout, window) -> torch.Tensor:
    """`(tokens, tokens)` by two plain loops."""
    mask = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.long)
    for start, end in layout.segments:
        for query in range(start, end):
            for key in range(start, query + 1):
                mask[query, key] = window is None or key > query - window
    return mask


def paint(covered, blocks, query_index, key_index) -> None:
    for block in blocks:
        size = (block.query_end - block.query_start, block.key_end - block.key_start)
        assert min(size) > 0
        assert block.shape is Shape.FULL or size[0] == size[1]
        seen = torch.ones(size, dtype=torch.long)
        seen = {Shape.CAUSAL: seen.tril(), Shape.ANTICAUSAL: seen.triu()}.get(block.shape, seen)
        assert block.num_pairs == seen.sum()
        rows, columns = query_index[block.query_start : block.query_end], key_index[block.key_start : block.key_end]
        covered[rows[:, None], columns] += seen


def random_layouts(num: int):
    pick = random.Random(0)
    for _ in range(num):
        lengths = [pick.choice([1, 1, 2, 3, 5, 9, 17]) for _ in range(pick.randint(1, 5))]
        yield PLANS[pick.choice(list(PLANS))](PackedLayout.from_lengths(lengths).cu_seqlens, pick.randint(1, 5)), pick


@pytest.mark.parametrize("window", WINDOWS)
def test_visible_pairs_of_random_layouts_are_covered_once(window):
    for layout, _ in random_layouts(50):
        covered, num_pairs = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.long), 0
        for query_rank in range(layout.world):
            for key_rank in range(layout.world):
                blocks = visible_blocks(layout, layout.runs(query_rank), layout.runs(key_rank), window=window)
                paint(covered, blocks, layout.index(query_rank), layout.index(key_rank))
                num_pairs += sum(block.num_pairs for block in blocks)
        assert torch.equal(covered, brute_force(layout, window)), layout
        lengths = [end - start for start, end in layout.segments]
        assert num_pairs == sum(causal_pairs(length, window=window) for length in lengths)
        if window is None:
            assert num_pairs == sum(length * (length + 1) // 2 for length in lengths)


@pytest.mark.parametrize("window", WINDOWS)
def test_some_queries_and_parts_of_them_see_the_same(window):
    for layout, pick in random_layouts(50):
        tokens = [token for token in range(layout.num_tokens) if pick.random() < 0.6]
        row = PackedLayout(layout.cu_seqlens)
        blocks = visible_blocks(row, runs_of(tokens), row.runs(0), window=window)
        truth, every = brute_force(layout, window), torch.arange(layout.num_tokens)
        covered, index = torch.zeros_like(truth), torch.tensor(tokens, dtype=torch.long)
        paint(covered, blocks, index, every)
        assert torch.equal(covered[index], truth[index])
        size = pick.randint(1, 4)
        parts = torch.zeros_like(truth)
        for start in range(0, len(tokens), size):
            paint(parts, clip(blocks, start, start + size), index[start : start + size], every)
        assert torch.equal(parts, covered)
        keys = [key for start, end in needed_keys(blocks) for key in range(start, end)]
        assert keys == covered.any(0).nonzero()[:, 0].tolist()


def test_runs_of_neighbours():
    runs = runs_of([2, 3, 7, 9, 10])
    assert [(run.start, run.end, run.offset) for run in runs] == [(2, 4, 0), (7, 8, 2), (9, 11, 3)]
    assert runs_of([]) == ()


def test_pieces_and_taken_rows_of_random_layouts_are_those_of_their_tokens():
    for layout, pick in random_layouts(50):
        for rank in range(layout.world):
            runs, index = layout.runs(rank), layout.index(rank).tolist()
            for start, end in [*layout.segments, (0, 0), (0, layout.num_tokens)]:
                pieces = pieces_of((start, end), runs)
                tokens = [index[row] for p in pieces for row in range(p.offset, p.offset + p.end - p.start)]
                assert tokens == [token for token in index if start <= token < end]
                assert tokens == [token for p in pieces for token in range(p.start, p.end)]
            borders = sorted(pick.sample(range(len(index) + 1), min(4, len(index) + 1) // 2 * 2))
            ranges = list(zip(borders[::2], borders[1::2]))
            taken = runs_taken(runs, ranges)
            kept = [index[row] for start, end in ranges for row in range(start, end)]
            assert [token for run in taken for token in range(run.start, run.end)] == kept
            assert [run.offset for run in taken] == [kept.index(run.start) for run in taken]


@dataclass(frozen=True)
class Counted(Sequence):
    """Counts how often one of its runs is looked at."""

    runs: tuple[Run, ...]
    seen: list

    def __len__(self):
        return len(self.runs)

    def __getitem__(self, at):
        self.seen.append(at)
        return self.runs[at]


@pytest.mark.parametrize("num_documents", [100, 400])
def test_steps_grow_with_the_documents_and_not_with_their_square(num_documents):
    layout = PLANS["per segment"](tuple(range(0, 20 * num_documents + 1, 20)), 8)
    seen = []
    queries, keys = (Counted(layout.runs(rank), seen) for rank in (3, 5))
    assert visible_blocks(layout, queries, keys) == visible_blocks(layout, queries.runs, keys.runs)
    assert len(seen) < 50 * num_documents  # of each 3 to 4 bisections of at most 10 steps
    seen.clear()
    ranges = needed_keys(visible_blocks(layout, queries.runs, keys.runs))
    assert runs_taken(keys, ranges) == runs_taken(keys.runs, ranges) != ()
    assert len(seen) <= len(keys) + 1


@pytest.mark.parametrize(
    "rows", [(0, 0, 0, 1), (0, 1, 3, 3), (2, 1, 0, 1), (0, 1, 2, 1), (-1, 1, 0, 1), (0, 1, -1, 1)]
)
def test_a_block_without_a_query_or_a_key_is_refused(rows):
    with pytest.raises(ValueError, match=r"a block needs a query and a key, got Block\(query_start"):
        Block(*rows)


def test_a_whole_segment_is_one_triangle():
    row = PackedLayout.from_lengths([9, 4])
    blocks = visible_blocks(row, row.runs(0), row.runs(0))
    assert [(block.num_pairs, block.shape) for block in blocks] == [(45, "causal"), (10, "causal")]


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_a_token_is_refused(window):
    row = PackedLayout.from_lengths([3])
    with pytest.raises(ValueError, match=f"window must be at least 1 token, got {window}"):
        visible_blocks(row, row.runs(0), row.runs(0), window=window)
