"""Closed forms of cost against what transports count, brute-force masks and what autograd saves."""

import random

import pytest
import torch

from hf_codraft.attention.block_draft import DraftBlocks, block_attention
from hf_codraft.attention.cost import (
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    Heads,
    Visibility,
    block_cost,
    kept_cost,
    ring_cost,
)
from hf_codraft.attention.kernels import expand_heads
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.plans import balanced_plan, contiguous_plan, segment_zigzag_plan, zigzag_plan
from hf_codraft.attention.reference import visible_mask
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.tiled import TiledPasses, tiled_loss
from hf_codraft.attention.transport import run_local_ranks
from hf_codraft.attention.trunk import Trunk

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=4, dtype=torch.float32)
PLANS = (contiguous_plan, zigzag_plan, segment_zigzag_plan, balanced_plan)
ROWS = ([23], [3, 14, 1, 6], [2])  # the last has fewer tokens than ranks
NUM_PASSES = 3


def draw(num: int, heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, heads, HEADS.head_dim, generator=generator).requires_grad_()


def sent_by_trunk(layout, *, route, num_kept=None, window=None, expands=False, dtype=torch.float32):
    """Bytes and messages forward, and of forward and backward, by every rank, and the bytes that autograd saved."""

    def rank(transport):
        shard = Shard(layout, transport.rank, transport)
        q, k, v = (draw(shard.num_tokens, heads, 0).to(dtype) for heads in (4, 2, 2))
        if expands:
            k, v = expand_heads(k, 4), expand_heads(v, 4)
        saved: dict[int, int] = {}

        def pack(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        trunk = Trunk(k, v, shard=shard, scale=0.5, window=window, route=route, num_kept=num_kept)
        queries, branch, outs = trunk.queries(), [], []
        for number in range(NUM_PASSES):
            own_q = q.detach().clone().requires_grad_()
            if number:
                branch.append([x.detach().clone().requires_grad_() for x in (k, v)])
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                branch_k, branch_v = zip(*branch) if branch else ((), ())
                outs.append(trunk.attend(own_q, queries, branch_k=branch_k, branch_v=branch_v))
        forward = transport.traffic.num_bytes, transport.traffic.num_messages
        sum(out.sum() for out in outs).backward()
        return forward, (transport.traffic.num_bytes, transport.traffic.num_messages), sum(saved.values())

    return run_local_ranks(rank, layout.world)


def expected(costs):
    return [((c.forward.num_bytes, c.forward.num_messages), (c.sent.num_bytes, c.sent.num_messages)) for c in costs]


@pytest.mark.parametrize(
    "world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("plan", PLANS)
def test_trunk_sends_what_is_computed(plan, world):
    for lengths in ROWS:
        layout = plan(PackedLayout.from_lengths(lengths).cu_seqlens, world)
        for window in (None, 1, 5):
            visible = Visibility(layout, window=window)
            ring = sent_by_trunk(layout, route="ring", window=window)
            assert [r[:2] for r in ring] == expected(ring_cost(visible, HEADS, num_passes=NUM_PASSES))
            for num_kept in {0, 1, None}:
                sent = sent_by_trunk(layout, route="direct", num_kept=num_kept, window=window)
                costs = kept_cost(visible, HEADS, num_passes=NUM_PASSES, num_kept=num_kept)
                assert [r[:2] for r in sent] == expected(costs), (lengths, window, num_kept)


def test_expanded_keys_and_other_dtypes_send_what_is_computed():
    layout = zigzag_plan((0, 5, 21), 3)
    visible = Visibility(layout)
    sent = sent_by_trunk(layout, route="ring", expands=True)
    assert [r[:2] for r in sent] == expected(ring_cost(visible, HEADS.expanded, num_passes=NUM_PASSES))
    for dtype in (torch.bfloat16, torch.float64):
        heads = Heads(4, 2, 4, dtype)
        sent = sent_by_trunk(layout, route="direct", dtype=dtype)
        assert [r[:2] for r in sent] == expected(kept_cost(visible, heads, num_passes=NUM_PASSES))


def test_autograd_saves_what_is_computed():
    layout = zigzag_plan((0, 64), 2)
    sent = sent_by_trunk(layout, route="direct")
    assert [r[2] for r in sent] == [c.saved_bytes for c in kept_cost(Visibility(layout), HEADS, num_passes=NUM_PASSES)]


@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_tiled_loss_sends_what_is_computed(num_kept):
    layout, tile_size = contiguous_plan((0, 9, 23), 3), 3

    def rank(transport):
        shard = Shard(layout, transport.rank, transport)
        weight = torch.nn.Parameter(torch.ones(()))
        q, k, v = (draw(shard.num_tokens, heads, 0).detach() for heads in (4, 2, 2))

        def tile_loss(trunk, queries, tile):
            branch, loss = [], torch.zeros(())
            for number in range(NUM_PASSES):
                if number:
                    branch.append((k[tile] * weight, v[tile] * weight))
                branch_k, branch_v = zip(*branch) if branch else ((), ())
                out = trunk.attend(q[tile] * weight, queries, branch_k=branch_k, branch_v=branch_v)
                loss = loss + out.sum()
            return loss, torch.zeros(1)

        passes = TiledPasses(
            lambda rows: (k[rows] * weight, v[rows] * weight), tile_loss, shard, torch.arange(shard.num_tokens), tile_size,
            0.5, num_kept=num_kept,
        )  # fmt: skip
        tiled_loss(passes, [weight])[0].backward()
        return transport.traffic.num_bytes, transport.traffic.num_messages

    costs = kept_cost(Visibility(layout), HEADS, num_passes=NUM_PASSES, num_kept=num_kept, tile_size=tile_size)
    assert run_local_ranks(rank, 3) == [(c.sent.num_bytes, c.sent.num_messages) for c in costs]


@pytest.mark.parametrize("window", [None, 1, 4])
def test_pairs_and_flops_are_those_of_the_mask(window):
    layout = balanced_plan((0, 4, 5, 30), 4)
    costs = kept_cost(Visibility(layout, window=window), HEADS, num_passes=NUM_PASSES)
    for rank, cost in enumerate(costs):
        trunk = int(visible_mask(layout, layout.index(rank), window=window).sum())
        pairs = NUM_PASSES * trunk + layout.num_local(rank) * sum(range(NUM_PASSES))
        assert cost.num_pairs == pairs
        assert cost.forward_flops == FORWARD_FLOPS * pairs * 16
        assert cost.backward_flops == BACKWARD_FLOPS * pairs * 16


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("route", ["keys", "queries"])
def test_blocks_send_what_is_computed(route, world, window):
    layout = zigzag_plan((0, 11, 40), world)
    anchors = tuple(sorted(random.Random(0).sample(range(40), 7)))
    blocks = DraftBlocks(layout, anchors, 3, window=window)

    def rank(transport):
        shard = Shard(layout, transport.rank, transport)
        num_own = len(blocks.owned(transport.rank)) * 3
        q, block_k, block_v = (draw(num_own, heads, 1).unflatten(0, (-1, 3)) for heads in (4, 2, 2))
        k, v = (draw(shard.num_tokens, 2, 2) for _ in range(2))
        out = block_attention(
            q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, blocks=blocks, shard=shard, scale=0.5, route=route
        )
        forward = transport.traffic.num_bytes, transport.traffic.num_messages
        out.sum().backward()
        return forward, (transport.traffic.num_bytes, transport.traffic.num_messages)

    assert run_local_ranks(rank, world) == expected(block_cost(blocks, route, HEADS))
    if window is None:  # 3 slots see the keys before their anchor, and their block
        starts = [layout.segment_of(anchor)[0] for anchor in anchors]
        pairs = sum(3 * (anchor - start) + 9 for anchor, start in zip(anchors, starts))
        assert sum(cost.num_pairs for cost in block_cost(blocks, route, HEADS)) == pairs


def test_long_rows_are_weighed_without_tensors():
    layout = zigzag_plan((0, 2**20), 8)
    costs = kept_cost(Visibility(layout), HEADS)
    assert sum(cost.num_pairs for cost in costs) == 2**19 * (2**20 + 1)
    assert "_index" not in vars(layout) and "position_ids_T" not in vars(layout)
