"""Layouts and plans hold every token once; shards and what they borrow put rows where they belong."""

import pytest
import torch
from attention_cases import PLANS

from hf_codraft.attention.layout import PackedLayout, Piece
from hf_codraft.attention.plans import balanced_plan, causal_pairs, zigzag_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import run_local_ranks

ROWS = {"odd": (0, 5, 6, 15, 16), "ones": (0, 1, 2, 3), "one token": (0, 1), "long": (0, 40, 43), "empty": (0,)}
layouts = pytest.mark.parametrize(
    "layout",
    [plan(row, world) for plan in PLANS.values() for row in ROWS.values() for world in (1, 2, 3, 8) if row[-1]],
    ids=lambda layout: f"{layout.cu_seqlens}-{layout.world}",
)


@layouts
def test_shards_hold_every_token_once_and_unshard_to_the_row(layout):
    row = torch.arange(layout.num_tokens * 2).view(-1, 2)
    parts = [layout.shard(row, rank) for rank in range(layout.world)]
    assert [len(part) for part in parts] == [layout.num_local(rank) for rank in range(layout.world)]
    assert torch.equal(layout.unshard(parts), row)
    assert torch.equal(torch.cat([layout.index(rank) for rank in range(layout.world)]).sort().values, row[:, 0] // 2)
    across = [layout.shard(row.T, rank, dim=1) for rank in range(layout.world)]
    assert torch.equal(layout.unshard(across, dim=1), row.T)
    for start, end in layout.segments:
        assert layout.position_ids_T[start:end].tolist() == list(range(end - start))
        assert all(layout.segment_of(token) == (start, end) for token in range(start, end))


@layouts
@pytest.mark.parametrize("num_steps", [1, 3])
def test_rows_ahead_cross_the_edges_of_shards_and_not_of_segments(layout, num_steps):
    ids = torch.arange(layout.num_tokens) * 10

    def one_rank(transport):
        shard = Shard(layout, transport.rank, transport)
        own = layout.shard(ids, transport.rank)
        extended, wide = shard.extend([own, own[:, None].double()], num_steps)
        assert torch.equal(extended[: len(own)], own) and torch.equal(wide[:, 0].long(), extended)
        rows = shard.ahead(num_steps)
        return torch.where(rows < 0, -1, extended[rows.clamp(min=0)]) if len(own) else rows

    parts = run_local_ranks(one_rank, layout.world)
    got = layout.unshard(parts, dim=1)
    for token in range(layout.num_tokens):
        _, end = layout.segment_of(token)
        later = [token + step for step in range(num_steps + 1)]
        assert got[:, token].tolist() == [10 * t if t < end else -1 for t in later]


def test_layout_ids_are_equal_only_for_equal_layouts():
    made = [plan(row, world) for plan in PLANS.values() for row in ROWS.values() for world in (1, 2, 3)]
    for one in made:
        for other in made:
            assert (one.layout_id == other.layout_id) == (one == other)
        assert 0 <= one.layout_id < 2**63


def test_a_balanced_plan_evens_out_the_work_of_a_long_tail():
    lengths = [6000, *[100] * 20, *[30] * 40]
    cu_seqlens = PackedLayout.from_lengths(lengths).cu_seqlens
    work = {}
    for name, plan in (("balanced", balanced_plan), ("zigzag", zigzag_plan)):
        layout = plan(cu_seqlens, 4)
        pairs = [0] * 4
        for piece in layout.pieces:
            token = piece.start
            while token < piece.end:
                start, end = layout.segment_of(token)
                end = min(end, piece.end)
                pairs[piece.owner] += causal_pairs(end - start, token - start)
                token = end
        work[name] = 4 * max(pairs) / sum(pairs)
    assert work["balanced"] <= 1.1 < work["zigzag"]


def test_what_cannot_be_a_layout_is_refused():
    with pytest.raises(ValueError, match=r"lengths must all be at least 1, got \[3, 0\]"):
        PackedLayout.from_lengths([3, 0])
    for cu_seqlens in ((), (1, 2), (0, 3, 3), (0, 4, 2)):
        with pytest.raises(ValueError, match="cu_seqlens must start with 0 and ascend"):
            PackedLayout(cu_seqlens)
    for pieces in ([(0, 2, 0)], [(0, 3, 0), (2, 4, 1)], [(1, 4, 0)], [(0, 2, 0), (3, 4, 1)], [(0, 5, 0)]):
        with pytest.raises(ValueError, match=r"pieces must cover tokens 0..4 in order"):
            PackedLayout((0, 4), 2, tuple(Piece(*piece) for piece in pieces))
    with pytest.raises(ValueError, match=r"owners of pieces must be ranks 0..1"):
        PackedLayout((0, 4), 2, (Piece(0, 4, 2),))
    for plan in PLANS.values():
        with pytest.raises(ValueError, match="world must be at least 1, got 0"):
            plan((0, 4), 0)


def test_tensors_that_do_not_fit_are_refused():
    layout = zigzag_plan((0, 6), 2)
    with pytest.raises(ValueError, match="dimension 0 of x_T has 5 entries, but the layout has 6 tokens"):
        layout.shard(torch.zeros(5), 0)
    with pytest.raises(ValueError, match=r"parts have \[6\] tokens"):
        layout.unshard([torch.zeros(6)])
    with pytest.raises(ValueError, match="plan the layout for the context-parallel group"):
        Shard(layout)
    with pytest.raises(ValueError, match="tensors to extend must be detached"):
        Shard(PackedLayout.from_lengths([6])).extend([torch.zeros(6, requires_grad=True)], 1)
