"""Branch attention against one dense softmax in fp64, and its blocks against a brute-force mask."""

import pytest
import torch
from torch.nn import functional as F

from hf_codraft.attention.branch import branch_attention, merge_
from hf_codraft.attention.layout import PackedLayout, trunk_blocks

SCALE, HEAD_DIM = 0.3, 8

LENGTHS_AND_ANCHORS = {
    "every token": ([7], range(7)),
    "several segments, two of length 1": ([5, 1, 9, 1], range(16)),
    "holes": ([6, 8], [0, 2, 3, 5, 9, 10, 13]),
    "one anchor": ([4, 4], [6]),
    "run across a border": ([4, 5], [2, 3, 4, 5]),
    "segments without an anchor": ([3, 1, 5, 2], [4, 7]),
    "no anchor": ([3, 2], []),
}
layouts = pytest.mark.parametrize(("lengths", "anchors"), LENGTHS_AND_ANCHORS.values(), ids=LENGTHS_AND_ANCHORS)


def visible(lengths, anchors) -> torch.Tensor:
    """`(anchors, tokens)`: same segment and not later, by two plain loops."""
    segment = [number for number, length in enumerate(lengths) for _ in range(length)]
    mask = torch.zeros(len(anchors), len(segment), dtype=torch.bool)
    for query, anchor in enumerate(anchors):
        for key in range(len(segment)):
            mask[query, key] = segment[key] == segment[anchor] and key <= anchor
    return mask


def dense_attention(q, k, v, branch_k, branch_v, mask) -> torch.Tensor:
    """One softmax over trunk and branch keys with explicit probabilities."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("and,tnd->nat", q, k).masked_fill(~mask, -torch.inf)
    for key in branch_k:
        own = torch.einsum("and,and->na", q, key.repeat_interleave(group, 1))
        scores = torch.cat([scores, own[..., None]], -1)
    probabilities = torch.softmax(scores * SCALE, -1)
    out = torch.einsum("nat,tnd->and", probabilities[..., : len(k)], v)
    for number, value in enumerate(branch_v):
        weight = probabilities[..., len(k) + number].T[..., None]
        out = out + weight * value.repeat_interleave(group, 1)
    return out


def inputs(lengths, anchors, num_branch, *, heads=(6, 2), seed=0) -> list[torch.Tensor]:
    """q, k, v, then branch keys, then branch values, as fp64 leaves."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    shapes = [(len(anchors), num_heads)] + 2 * [(sum(lengths), num_kv_heads)]
    shapes += 2 * num_branch * [(len(anchors), num_kv_heads)]
    return [
        torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()
        for shape in shapes
    ]


def run(tensors, blocks, num_branch):
    q, k, v, *branch = tensors
    branch_k, branch_v = branch[:num_branch], branch[num_branch:]
    return branch_attention(q, k, v, blocks=blocks, branch_k=branch_k, branch_v=branch_v, scale=SCALE)


def gradients(out, tensors) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return list(torch.autograd.grad((out.double() * weight).sum(), tensors))


@layouts
@pytest.mark.parametrize("num_branch", [0, 1, 3])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)], ids=["gqa", "mha", "mqa"])
def test_values_and_gradients_equal_a_dense_softmax(lengths, anchors, num_branch, heads):
    anchors = list(anchors)
    tensors = inputs(lengths, anchors, num_branch, heads=heads)
    blocks = trunk_blocks(PackedLayout.from_lengths(lengths), anchors)
    out = run(tensors, blocks, num_branch)
    branch = tensors[3:]
    want = dense_attention(*tensors[:3], branch[:num_branch], branch[num_branch:], visible(lengths, anchors))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    for got, expected in zip(gradients(out, tensors), gradients(want, tensors), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@layouts
def test_trunk_blocks_cover_each_visible_key_once_and_no_other(lengths, anchors):
    anchors = list(anchors)
    covered = torch.zeros(len(anchors), sum(lengths), dtype=torch.long)
    for block in trunk_blocks(PackedLayout.from_lengths(lengths), anchors):
        shape = (block.query_end - block.query_start, block.key_end - block.key_start)
        assert min(shape) > 0
        assert not block.is_causal or shape[0] == shape[1]
        seen = torch.ones(shape, dtype=torch.long)
        covered[block.query_start : block.query_end, block.key_start : block.key_end] += (
            seen.tril() if block.is_causal else seen
        )
    assert torch.equal(covered, visible(lengths, anchors).long())


def test_trunk_blocks_of_random_anchors_cover_the_visible_set():
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        lengths = torch.randint(1, 7, (4,), generator=generator).tolist()
        anchors = (torch.rand(sum(lengths), generator=generator) < 0.6).nonzero()[:, 0].tolist()
        test_trunk_blocks_cover_each_visible_key_once_and_no_other(lengths, anchors)


def test_layout_refuses_an_empty_segment():
    with pytest.raises(ValueError, match=r"lengths must all be at least 1, got \[3, 0\]"):
        PackedLayout.from_lengths([3, 0])


def test_a_query_without_a_trunk_key_attends_to_its_branch_alone():
    q, k, v, branch_k, branch_v = tensors = inputs([4], [1, 2], 1)
    out = run(tensors, [], 1)
    torch.testing.assert_close(out, branch_v.repeat_interleave(3, 1), rtol=0, atol=1e-15)
    got_q, got_k, got_v, got_branch_k, got_branch_v = gradients(out, tensors)
    for zero in (got_k, got_v):
        assert torch.equal(zero, torch.zeros_like(zero))
    for tiny in (got_q, got_branch_k):  # a softmax over one key has no slope
        torch.testing.assert_close(tiny, torch.zeros_like(tiny), rtol=0, atol=1e-13)
    assert got_branch_v.abs().min() > 0


@pytest.mark.parametrize("empty", ["first", "second", "both"])
def test_merging_an_empty_part_leaves_the_other_without_nan(empty):
    generator = torch.Generator().manual_seed(0)
    full, full_lse = torch.randn(3, 2, 4, generator=generator), torch.randn(3, 2, generator=generator)
    none, none_lse = torch.zeros(3, 2, 4), torch.full((3, 2), -torch.inf)
    parts = {"first": (none, none_lse, full, full_lse), "second": (full, full_lse, none, none_lse)}
    out, lse, part, part_lse = (x.clone() for x in parts.get(empty, (none, none_lse, none, none_lse)))
    merge_(out, lse, part, part_lse)
    assert torch.equal(out, none if empty == "both" else full)
    assert torch.equal(lse, none_lse if empty == "both" else full_lse)


def test_bf16_error_is_at_most_twice_that_of_sdpa():
    lengths, num_branch = [40, 1, 30], 3
    anchors = list(range(sum(lengths)))
    exact = inputs(lengths, anchors, num_branch, seed=5)
    narrow = [x.detach().bfloat16().requires_grad_() for x in exact]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    mask = visible(lengths, anchors)
    blocks = trunk_blocks(PackedLayout.from_lengths(lengths), anchors)

    def with_sdpa(tensors):
        q, k, v, *branch = tensors
        own = torch.eye(len(anchors), dtype=torch.bool).repeat(1, num_branch)
        k, v = torch.cat([k, *branch[:num_branch]]), torch.cat([v, *branch[num_branch:]])
        full = torch.cat([mask, own], 1)
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=full[None, None], scale=SCALE, enable_gqa=True)
        return out[0].transpose(0, 1)

    want = dense_attention(*wide[:3], wide[3 : 3 + num_branch], wide[3 + num_branch :], mask)
    wanted = [want, *gradients(want, wide)]
    errors = []
    for out in (run(narrow, blocks, num_branch), with_sdpa(narrow)):
        got = [out, *gradients(out, narrow)]
        errors.append([(g.double() - w).norm().item() for g, w in zip(got, wanted, strict=True)])
    for ours, plain in zip(*errors, strict=True):
        assert plain > 0
        assert ours <= 2 * plain


def test_autocast_does_not_round_what_it_was_not_asked_to():
    lengths, anchors = [6, 3], list(range(9))
    tensors = [x.detach().float().requires_grad_() for x in inputs(lengths, anchors, 2)]
    blocks = trunk_blocks(PackedLayout.from_lengths(lengths), anchors)
    plain = run(tensors, blocks, 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(tensors, blocks, 2)
    assert torch.equal(plain, inside)
    for got, want in zip(gradients(inside, tensors), gradients(plain, tensors), strict=True):
        assert torch.equal(got, want)
