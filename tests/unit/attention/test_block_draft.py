"""Attention of block drafts against one dense softmax in fp64, whichever way its keys and queries travel."""

import random
from functools import partial
from itertools import permutations

import pytest
import torch
from attention_cases import (
    SCALE,
    TrunkCase,
    block_inputs,
    dense_blocks,
    every_pair,
    join,
    join_blocks,
    owned_block_rows,
    recorded,
    run_block_rank,
    run_rank,
    seen_by,
    shard_of,
    truth,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_codraft.attention.block_draft import DraftBlocks, block_attention, block_traffic, cheaper_route
from hf_codraft.attention.layout import PackedLayout, Piece
from hf_codraft.attention.plans import balanced_plan, contiguous_plan, segment_zigzag_plan, zigzag_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import run_local_ranks
from hf_codraft.attention.trunk import trunk_attention

HEAD_DIM = 8
PLANS = [contiguous_plan, zigzag_plan, segment_zigzag_plan, balanced_plan]
LENGTHS = {
    "one token": [1],
    "ones": [1, 1, 1],
    "odd": [5, 1, 9, 1],
    "long and short": [30, 3, 2, 2],
    "one segment": [33],
}


def layout_of(lengths, plan, world) -> PackedLayout:
    return plan(PackedLayout.from_lengths(lengths).cu_seqlens, world)


def some_anchors(num_tokens: int, share: float, seed: int = 0) -> tuple[int, ...]:
    """Random ones; with a share of 1, all tokens."""
    pick = random.Random(seed)
    return tuple(token for token in range(num_tokens) if pick.random() < share)


def run(blocks, tensors, grad, **options):
    """Output, gradients and each rank's traffic (forward, backward) over all ranks of the layout."""
    results = run_local_ranks(
        lambda transport: run_block_rank(blocks, tensors, grad, transport, **options),
        blocks.layout.world,
        timeout_s=20,
    )
    return join_blocks(blocks, results)


def assert_equals_dense(blocks, *, heads=(6, 2), is_causal=False, route="auto", kernel="aten"):
    tensors = block_inputs(blocks, heads=heads)
    want = dense_blocks(tensors, seen_by(blocks, is_causal=is_causal))
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    wanted = torch.autograd.grad(want, tensors, grad)
    out, gradients, traffic = run(blocks, tensors, grad, is_causal=is_causal, route=route, kernel=kernel)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    for got, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    if route != "auto":
        assert traffic == block_traffic(
            blocks, route, num_heads=heads[0], num_kv_heads=heads[1], head_dim=HEAD_DIM, dtype=torch.float64
        )


@pytest.mark.parametrize("route", ["keys", "queries", "auto"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_values_gradients_and_bytes_equal_a_dense_softmax_and_the_closed_form(lengths, world, route):
    pick = random.Random(repr((lengths, world, route)))
    for plan in PLANS:
        layout = layout_of(lengths, plan, world)
        num_slots = pick.choice([1, 2, 5])
        anchors = some_anchors(layout.num_tokens, pick.choice([0.3, 1.0]), pick.randrange(99))
        blocks = DraftBlocks(layout, anchors, num_slots, includes_anchor=pick.random() < 0.5)
        heads = pick.choice([(4, 4), (6, 2), (3, 1), (9, 3)])
        assert_equals_dense(blocks, heads=heads, is_causal=pick.random() < 0.3, route=route)


AXES = {
    "lengths": list(LENGTHS.values()),
    "world": [1, 2, 4, 8],
    "plan": PLANS,
    "route": ["keys", "queries"],
    "dtype": [torch.float64, torch.float32],
    "heads": [(4, 4), (6, 2), (3, 1), (9, 3)],
    "head_dim": [8, 16, 64, 128],
    "num_slots": [1, 2, 5],
    "share": [0.3, 1.0],
    "beyond_slots": [0, 1, 6, None],  # tokens of the window
    "includes_anchor": [False, True],
    "is_causal": [False, True],
    "supervised": ["all", "one rank", "none"],
}
CROSS = every_pair(AXES)


def supervise(grad: torch.Tensor, blocks: DraftBlocks, supervised: str) -> torch.Tensor:
    """Keeps the gradient of the blocks of all ranks, of the last token's owner, or of none."""
    if supervised == "all":
        return grad
    rows = owned_block_rows(blocks, blocks.layout.pieces[-1].owner) if supervised == "one rank" else []
    kept = torch.zeros_like(grad)
    kept[rows] = grad[rows]
    return kept


def assert_right(case: dict, number: int) -> None:
    num_slots, beyond, head_dim, dtype = (case[name] for name in ("num_slots", "beyond_slots", "head_dim", "dtype"))
    layout = layout_of(case["lengths"], case["plan"], case["world"])
    anchors = some_anchors(layout.num_tokens, case["share"], number)
    window = None if beyond is None else num_slots + beyond
    blocks = DraftBlocks(layout, anchors, num_slots, includes_anchor=case["includes_anchor"], window=window)
    drawn = block_inputs(blocks, heads=case["heads"], head_dim=head_dim)
    tensors = [(x.detach() * (8 / head_dim) ** 0.25).to(dtype) for x in drawn]
    wide = [x.double().requires_grad_() for x in tensors]
    want = dense_blocks(wide, seen_by(blocks, is_causal=case["is_causal"]))
    drawn_grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grad = supervise(drawn_grad, blocks, case["supervised"])
    wanted = [want, *torch.autograd.grad(want, wide, grad.to(dtype).double())]
    out, gradients, traffic = run(blocks, tensors, grad, is_causal=case["is_causal"], route=case["route"])
    largest = max(expected.norm() for expected in wanted)
    for got, expected in zip([out, *gradients], wanted, strict=True):
        assert got.dtype == dtype
        error, norm = (
            (got.double() - expected).norm(),
            expected.norm() or largest,
        )  # a slot that sees one key has no dQ
        assert error <= norm * (1e-12 if dtype == torch.float64 else 1e-5), (case, error, norm)
    num_heads, num_kv_heads = case["heads"]
    shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    assert traffic == block_traffic(blocks, case["route"], **shape)


@pytest.mark.parametrize("number", range(len(CROSS)))
def test_any_two_settings_go_together(number):
    assert_right(CROSS[number], number)


@pytest.mark.slow
def test_a_sample_of_the_whole_cross_goes_together():
    pick = random.Random(0)
    for number in range(40):
        assert_right({axis: pick.choice(values) for axis, values in AXES.items()}, number)


def dense_truth(blocks, tensors, grad) -> list[torch.Tensor]:
    out = dense_blocks(tensors, seen_by(blocks, is_causal=False))
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def test_trunks_and_blocks_of_one_shard_keep_apart_what_they_see():
    """One shard a rank, as a policy's layers and a draft's share it; what it makes once may belong to one of them."""
    trunks = [TrunkCase((6, 6), 2, "per segment", num_passes=1, window=window) for window in (None, 2)]
    layout = trunks[0].layout
    hung = [DraftBlocks(layout, anchors, 2) for anchors in ((5, 11), (3, 8))]
    hung.append(DraftBlocks(layout, (2, 5, 9, 11), 2, window=2))
    inputs = [block_inputs(blocks) for blocks in hung]
    grads = [torch.randn(x[0].shape, generator=torch.Generator().manual_seed(3), dtype=x[0].dtype) for x in inputs]
    wanted = [*map(truth, trunks), *map(dense_truth, hung, inputs, grads)]
    for order in permutations(range(5), 2):

        def one_rank(transport, order=order):
            shard = Shard(layout, transport.rank, transport)
            return [
                run_rank(trunks[n], transport, shard=shard)
                if n < 2
                else run_block_rank(hung[n - 2], inputs[n - 2], grads[n - 2], transport, shard=shard, route="keys")
                for n in order
            ]

        for n, parts in zip(order, zip(*run_local_ranks(one_rank, 2, timeout_s=20))):
            if n < 2:
                found = join(trunks[n], parts)
            else:
                out, gradients, _ = join_blocks(hung[n - 2], parts)
                found = [out, *gradients]
            for got, want in zip(found, wanted[n], strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=f"{order}, {n}")


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("window", [4, 7, 1000])
@pytest.mark.parametrize("includes_anchor", [False, True])
def test_a_sliding_window_ends_at_each_slots_own_position(window, includes_anchor, route):
    for world, plan in ((1, contiguous_plan), (3, zigzag_plan), (4, balanced_plan)):
        layout = layout_of([21, 1, 9], plan, world)
        blocks = DraftBlocks(layout, some_anchors(31, 0.5), 4, includes_anchor=includes_anchor, window=window)
        assert_equals_dense(blocks, route=route)


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize(
    ("anchors", "pieces"),
    [
        ((), [(0, 6, 0), (6, 12, 1)]),
        ((0, 8), [(0, 6, 0), (6, 12, 1)]),  # both at the start of a segment: no trunk key at all
        ((3,), [(0, 6, 0), (6, 12, 1)]),  # rank 1 has keys and no anchor
        ((5, 7, 11), [(0, 6, 0), (6, 12, 1)]),  # slots of 5 reach past the shard, those of 7 past the segment
        ((2, 7), [(0, 12, 1)]),  # rank 0 has nothing
        ((1, 11), [(0, 1, 1), (1, 2, 2), (2, 11, 0), (11, 12, 2)]),  # keys of an anchor all lie elsewhere
    ],
    ids=["none", "segment starts", "one rank", "past the border", "empty rank", "far keys"],
)
def test_blocks_at_edges_equal_a_dense_softmax(anchors, pieces, route):
    layout = PackedLayout((0, 8, 12), 3, tuple(Piece(*piece) for piece in pieces))
    assert_equals_dense(DraftBlocks(layout, anchors, 4), route=route)


@pytest.mark.parametrize("route", ["keys", "queries"])
def test_the_eager_kernel_gives_the_same(route):
    layout = layout_of([13, 6], zigzag_plan, 2)
    assert_equals_dense(DraftBlocks(layout, some_anchors(19, 0.5), 3), route=route, kernel="eager")


@pytest.mark.parametrize("window", [None, 5, 40])
def test_visible_pairs_are_covered_once_and_by_few_rectangles(window):
    pick = random.Random(3)
    for _ in range(60):
        lengths = [pick.choice([1, 2, 3, 9, 17]) for _ in range(pick.randint(1, 5))]
        layout = layout_of(lengths, pick.choice(PLANS), pick.randint(1, 4))
        anchors = some_anchors(layout.num_tokens, pick.random(), pick.randrange(99))
        blocks = DraftBlocks(layout, anchors, pick.randint(1, 5), includes_anchor=pick.random() < 0.5, window=window)
        covered = torch.zeros(len(anchors) * blocks.num_slots, layout.num_tokens, dtype=torch.long)
        for query_rank in range(layout.world):
            numbers = torch.tensor(owned_block_rows(blocks, query_rank), dtype=torch.long)
            rows = (numbers[:, None] * blocks.num_slots + torch.arange(blocks.num_slots)).flatten()
            for key_rank in range(layout.world):
                shapes = blocks.between(query_rank, key_rank)
                for block in shapes:
                    size = (block.query_end - block.query_start, block.key_end - block.key_start)
                    assert min(size) > 0
                    seen = torch.ones(size, dtype=torch.long)
                    seen = {"full": seen, "causal": seen.tril(), "anticausal": seen.triu()}[block.shape]
                    local = layout.index(key_rank)[block.key_start : block.key_end]
                    covered[rows[block.query_start : block.query_end, None], local] += seen
                if window is None:
                    num_runs = len(layout.runs(key_rank)) + len(layout.segments)
                    assert len(shapes) <= len(numbers) * num_runs
        wanted = seen_by(blocks, is_causal=False)[..., : layout.num_tokens].flatten(0, 1).long()
        assert torch.equal(covered, wanted)


def test_one_segment_needs_one_rectangle_an_anchor():
    blocks = DraftBlocks(PackedLayout.from_lengths([4096]), tuple(range(5, 4096, 9)), 4)
    assert len(blocks.between(0, 0)) == len(blocks.anchors)


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("token", [9, 14, 25])
def test_no_token_from_the_anchor_on_and_no_foreign_one_changes_a_block(token, route):
    layout = layout_of([20, 10], zigzag_plan, 3)
    blocks = DraftBlocks(layout, some_anchors(30, 0.6), 3)
    tensors = block_inputs(blocks)
    grad = torch.zeros_like(tensors[0])
    plain, *_ = run(blocks, tensors, grad, route=route)
    changed = [x.detach().clone() for x in tensors]
    changed[1][token] += 5
    changed[2][token] -= 3
    other, *_ = run(blocks, changed, grad, route=route)
    start, end = layout.segment_of(token)
    is_later = torch.tensor([start <= token < anchor < end for anchor in blocks.anchors])
    assert torch.equal(plain[~is_later], other[~is_later])
    assert (plain[is_later] != other[is_later]).flatten(1).any(1).all()


def test_another_block_changes_nothing():
    layout = layout_of([20, 10], contiguous_plan, 2)
    blocks = DraftBlocks(layout, (3, 4, 12, 25), 3)
    tensors = block_inputs(blocks)
    grad = torch.zeros_like(tensors[0])
    plain, *_ = run(blocks, tensors, grad)
    changed = [x.detach().clone() for x in tensors]
    for x in (changed[0], changed[3], changed[4]):
        x[1] += 2
    other, *_ = run(blocks, changed, grad)
    assert torch.equal(plain[[0, 2, 3]], other[[0, 2, 3]])


def narrow_errors(blocks, narrow, *, world_route) -> list[float]:
    wide = [x.detach().double().requires_grad_() for x in narrow]
    want = dense_blocks(wide, seen_by(blocks, is_causal=False))
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(9)).to(narrow[0].dtype).double()
    wanted = [want, *torch.autograd.grad(want, wide, grad)]
    out, gradients, _ = run(blocks, narrow, grad, route=world_route)
    return [((got.double() - w).norm() / w.norm()).item() for got, w in zip([out, *gradients], wanted, strict=True)]


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "world", "window"), [(8, 4, None), (16, 2, 4), (64, 8, 20), (128, 8, None)])
def test_error_in_low_precision_grows_at_most_by_half_over_that_of_one_rank(head_dim, world, window, dtype, route):
    lengths = [70, 41, 1, 16]
    split = DraftBlocks(layout_of(lengths, zigzag_plan, world), some_anchors(128, 0.25), 4, window=window)
    whole = DraftBlocks(PackedLayout.from_lengths(lengths), split.anchors, 4, window=window)
    drawn = block_inputs(split, head_dim=head_dim)
    tensors = [(x.detach() * (8 / head_dim) ** 0.25).to(dtype).requires_grad_() for x in drawn]
    together, alone = (narrow_errors(blocks, tensors, world_route=route) for blocks in (split, whole))
    for ours, one_rank in zip(together, alone, strict=True):
        assert ours <= 1.5 * one_rank
        assert dtype == torch.bfloat16 or ours <= 1e-5


def test_bf16_error_is_at_most_twice_that_of_sdpa():
    blocks = DraftBlocks(PackedLayout.from_lengths([70, 41, 1, 16]), some_anchors(128, 0.25), 4)
    narrow = [x.detach().bfloat16().requires_grad_() for x in block_inputs(blocks)]
    ours = narrow_errors(blocks, narrow, world_route="auto")
    q, k, v, block_k, block_v = narrow
    mask = seen_by(blocks, is_causal=False)
    rows = (q.flatten(0, 1), torch.cat([k, block_k.flatten(0, 1)]), torch.cat([v, block_v.flatten(0, 1)]))
    out = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in rows),
        attn_mask=mask.flatten(0, 1)[None, None],
        scale=SCALE,
        enable_gqa=True,
    )
    plain_out = out[0].transpose(0, 1).reshape(q.shape)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    want = dense_blocks(wide, mask)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    plain = [plain_out, *torch.autograd.grad(plain_out, narrow, grad)]
    wanted = [want, *torch.autograd.grad(want, wide, grad.double())]
    for our_error, got, exact in zip(ours, plain, wanted, strict=True):
        assert our_error <= 2 * (got.double() - exact).norm() / exact.norm()


def test_autocast_does_not_round_what_it_was_not_asked_to():
    layout = layout_of([20, 10], zigzag_plan, 2)
    blocks = DraftBlocks(layout, some_anchors(30, 0.5), 3)
    tensors = [x.detach().float().requires_grad_() for x in block_inputs(blocks)]
    grad = torch.ones_like(tensors[0])
    for route in ("keys", "queries"):

        def one_rank(transport, route=route):
            rows = owned_block_rows(blocks, transport.rank)
            own = [layout.shard(x, transport.rank) if n in (1, 2) else x[rows] for n, x in enumerate(tensors)]
            with torch.autocast("cpu", torch.bfloat16):
                return block_attention(
                    *own[:3], block_k_ASMD=own[3], block_v_ASMD=own[4], blocks=blocks,
                    shard=Shard(layout, transport.rank, transport), scale=SCALE, route=route,
                )  # fmt: skip

        plain, *_ = run(blocks, tensors, grad, route=route)
        for rank, inside in enumerate(run_local_ranks(one_rank, 2)):
            assert torch.equal(inside, plain[owned_block_rows(blocks, rank)])


def test_auto_sends_the_less():
    shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    few = DraftBlocks(zigzag_plan((0, 16384), 4), tuple(range(100, 16384, 256)), 16)
    many_short = DraftBlocks(zigzag_plan(tuple(range(0, 16385, 64)), 4), tuple(range(0, 16384, 8)), 16)
    for blocks, want in ((few, "queries"), (many_short, "keys")):
        by_route = {route: block_traffic(blocks, route, **shape).total_bytes for route in ("keys", "queries")}
        assert cheaper_route(blocks, **shape) == want == min(by_route, key=by_route.get)
    tensors = block_inputs(DraftBlocks(zigzag_plan((0, 60), 3), (40, 59), 2))
    blocks = DraftBlocks(zigzag_plan((0, 60), 3), (40, 59), 2)
    *_, traffic = run(blocks, tensors, torch.zeros_like(tensors[0]), route="auto")
    small = dict(num_heads=6, num_kv_heads=2, head_dim=HEAD_DIM, dtype=torch.float64)
    assert traffic == block_traffic(blocks, cheaper_route(blocks, **small), **small)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"anchors": (3, 1)}, r"anchors must ascend within tokens 0..29, got \(3, 1\)"),
        ({"anchors": (3, 3)}, "leave doubles out"),
        ({"anchors": (30,)}, "anchors must ascend"),
        ({"anchors": (-1, 3)}, "anchors must ascend"),
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"window": 3}, r"window \(3\) must be at least num_slots \(4\)"),
    ],
)
def test_blocks_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DraftBlocks(**({"layout": PackedLayout.from_lengths([20, 10]), "anchors": (1, 2), "num_slots": 4} | fields))


def test_tensors_and_options_that_do_not_fit_are_refused():
    layout = PackedLayout.from_lengths([6])
    blocks = DraftBlocks(layout, (1, 4), 3)

    def call(*tensors, **options):
        q, k, v, block_k, block_v = tensors
        options = {"blocks": blocks, "shard": Shard(layout), "scale": SCALE} | options
        return block_attention(q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, **options)

    tensors = block_inputs(blocks)
    assert call(*tensors).shape == tensors[0].shape
    for number, name in enumerate(["q_ASND", "k_TMD", "v_TMD", "block_k_ASMD", "block_v_ASMD"]):
        broken = [x[1:] if n == number else x for n, x in enumerate(tensors)]
        with pytest.raises(ValueError, match=rf"{name} must have shape .*rank 0 owns 2 anchors and 6 tokens"):
            call(*broken)
    with pytest.raises(ValueError, match="with a multiple of kv_heads heads"):
        call(tensors[0][:, :, :5], *tensors[1:])
    with pytest.raises(ValueError, match="route must be one of"):
        call(*tensors, route="ring")
    with pytest.raises(ValueError, match="kernel must be one of"):
        call(*tensors, kernel="triton")
    with pytest.raises(ValueError, match="another layout"):
        call(*tensors, shard=Shard(PackedLayout.from_lengths([5, 1])))
    with pytest.raises(ValueError, match="route must be one of"):
        block_traffic(blocks, "auto", num_heads=6, num_kv_heads=2, head_dim=8, dtype=torch.float64)


@pytest.mark.parametrize("users", [(None, (10,), (4,)), ((10,), (4,), None), ((4,), None, (10,))], ids=str)
def test_a_policy_and_any_drafts_share_one_shard(users):
    """What one user of a shard makes once must not be taken for another's: keys of a trunk, of some blocks, of others."""
    pieces = (Piece(0, 4, 0), Piece(4, 6, 1), Piece(6, 10, 0), Piece(10, 12, 1))
    layout = PackedLayout((0, 6, 12), 2, pieces)

    def one_user(anchors, shard):
        blocks = DraftBlocks(layout, anchors or (4,), 2)
        rows = owned_block_rows(blocks, shard.cp_rank)
        q, k, v, block_k, block_v = own = [
            (layout.shard(x.detach(), shard.cp_rank) if n in (1, 2) else x.detach()[rows]).requires_grad_()
            for n, x in enumerate(block_inputs(blocks))
        ]
        if anchors is None:
            out = trunk_attention(k.repeat_interleave(3, 1), k, v, shard=shard, scale=SCALE)
        else:
            out = block_attention(
                q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, blocks=blocks, shard=shard, scale=SCALE, route="keys"
            )  # fmt: skip
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in own if x.grad is not None)]

    def one_rank(transport):
        shared = Shard(layout, transport.rank, transport)
        together = [one_user(anchors, shared) for anchors in users]
        return together, [one_user(anchors, Shard(layout, transport.rank, transport)) for anchors in users]

    for together, apart in run_local_ranks(one_rank, 2, timeout_s=20):
        for ours, wanted in zip(together, apart, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize("lengths", [[20, 12], [3, 1], [32]], ids=str)
def test_all_ranks_make_the_same_collectives_in_the_same_order(route, lengths):
    blocks = DraftBlocks(layout_of(lengths, zigzag_plan, 4), (2,) if sum(lengths) < 9 else (1, 7, 13), 2)
    tensors = block_inputs(blocks)

    def one_rank(transport):
        calls = recorded(transport)
        run_block_rank(blocks, tensors, torch.ones_like(tensors[0]), transport, route=route)
        return calls

    first, *others = run_local_ranks(one_rank, 4, timeout_s=20)
    assert len(first) == {"keys": 2, "queries": 4}[route] * 3 and all(calls == first for calls in others)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("route", ["keys", "queries"])
def test_checkpoints_change_no_bit(route, use_reentrant):
    blocks = DraftBlocks(layout_of([20, 12], zigzag_plan, 2), (1, 7, 13, 25), 3)
    tensors = block_inputs(blocks)

    def one_rank(transport, is_checkpointed):
        shard, rows = shard_of(blocks.layout, transport), owned_block_rows(blocks, transport.rank)
        own = [
            (blocks.layout.shard(x.detach(), transport.rank) if n in (1, 2) else x.detach()[rows]).requires_grad_()
            for n, x in enumerate(tensors)
        ]

        def attend(q, k, v, block_k, block_v):
            return block_attention(
                q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, blocks=blocks, shard=shard, scale=SCALE, route=route
            )  # fmt: skip

        out = checkpoint(attend, *own, use_reentrant=use_reentrant) if is_checkpointed else attend(*own)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in own)]

    plain, kept = (
        run_local_ranks(partial(one_rank, is_checkpointed=is_checkpointed), 2, timeout_s=20)
        for is_checkpointed in (False, True)
    )
    for ours, wanted in zip(kept, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("route", ["keys", "queries"])
def test_ranks_with_other_anchors_get_an_error_and_not_each_others_rows(route):
    layout = layout_of([20], contiguous_plan, 2)

    def one_rank(transport):
        blocks = DraftBlocks(layout, (12, 13) if transport.rank else (12, 14), 3)
        rows = owned_block_rows(blocks, transport.rank)
        q, k, v, block_k, block_v = (
            layout.shard(x, transport.rank) if n in (1, 2) else x[rows] for n, x in enumerate(block_inputs(blocks))
        )
        shard = Shard(layout, transport.rank, transport)
        block_attention(
            q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, blocks=blocks, shard=shard, scale=SCALE, route=route
        )

    with pytest.raises(RuntimeError, match=r"expected .* of layout .* but that rank sent layout"):
        run_local_ranks(one_rank, 2, timeout_s=5)
