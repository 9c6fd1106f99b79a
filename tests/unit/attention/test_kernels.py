"""Every kernel and shape against explicit probabilities in fp64."""

import pytest
import torch
from torch.nn import functional as F

from hf_codraft.attention.blocks import Block, Shape
from hf_codraft.attention.kernels import (
    attend_blocks_,
    attend_each_,
    check_kernel,
    differentiate_blocks_,
    differentiate_each_,
    output_product,
    output_with_product,
)
from hf_codraft.attention.merge import empty_part

SCALE = 0.3
BLOCKS = {
    "full": (Block(0, 9, 0, 14),),
    "causal": (Block(0, 9, 3, 12, Shape.CAUSAL),),
    "anticausal": (Block(0, 9, 3, 12, Shape.ANTICAUSAL),),
    "one token": (Block(4, 5, 6, 7), Block(0, 1, 0, 1, Shape.CAUSAL), Block(8, 9, 2, 3, Shape.ANTICAUSAL)),
    "three of one softmax": (Block(2, 7, 0, 4), Block(2, 7, 4, 9, Shape.CAUSAL), Block(2, 7, 9, 14, Shape.ANTICAUSAL)),
    "none": (),
}
HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "grouped by three": (9, 3), "multi-query": (3, 1)}
kernels = pytest.mark.parametrize("kernel", ["aten", "eager"])


def mask_of(blocks) -> torch.Tensor:
    mask = torch.zeros(9, 14, dtype=torch.bool)
    for block in blocks:
        seen = torch.ones(block.query_end - block.query_start, block.key_end - block.key_start, dtype=torch.bool)
        seen = {Shape.CAUSAL: seen.tril(), Shape.ANTICAUSAL: seen.triu()}.get(block.shape, seen)
        mask[block.query_start : block.query_end, block.key_start : block.key_end] |= seen
    return mask


def inputs(heads, head_dim=16, dtype=torch.float64) -> list[torch.Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(9, heads[0]), (14, heads[1]), (14, heads[1]), (9, heads[0])]
    return [torch.randn(*s, head_dim, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def dense(q, k, v, grad, mask) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients in fp64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qnd,knd->nqk", q, k.repeat_interleave(group, 1)) * SCALE
    scores = scores.masked_fill(~mask, -torch.inf)
    prob = torch.softmax(scores.masked_fill(~mask.any(-1)[:, None], 0.0), -1).masked_fill(~mask, 0.0)
    out = torch.einsum("nqk,knd->qnd", prob, v.repeat_interleave(group, 1))
    return [out.detach(), scores.logsumexp(-1).T.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def ours(q, k, v, grad, blocks, kernel) -> list[torch.Tensor]:
    out, lse = empty_part(q)
    attend_blocks_(out, lse, q, k, v, blocks=blocks, scale=SCALE, kernel=kernel)
    out = out.to(q.dtype)
    grads = [torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
    differentiate_blocks_(*grads, grad, q, k, v, out, lse, blocks=blocks, scale=SCALE, kernel=kernel)
    return [out, lse, *grads]


@kernels
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_values_statistics_and_gradients_are_exact(blocks, heads, head_dim, kernel):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        tensors = inputs(heads, head_dim, dtype)
        wanted = dense(*tensors, mask_of(blocks))
        # of the largest result: a query that sees one key has a gradient of zero but for rounding
        scale = max(1.0, *(want.nan_to_num(neginf=0).abs().max().item() for want in wanted))
        for got, want in zip(ours(*tensors, blocks, kernel), wanted, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * scale)


@kernels
@pytest.mark.parametrize("shape", ["full", "causal", "anticausal"])
def test_bf16_error_is_at_most_twice_that_of_sdpa(shape, kernel):
    blocks = BLOCKS[shape]
    q, k, v, grad = inputs((6, 2), 64, torch.bfloat16)
    want = dense(q, k, v, grad, mask_of(blocks))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in leaves), attn_mask=mask_of(blocks)[None, None], scale=SCALE, enable_gqa=True
    )[0].transpose(0, 1)
    plain = [plain, *torch.autograd.grad(plain, leaves, grad)]
    got = ours(q, k, v, grad, blocks, kernel)
    for mine, theirs, truth in zip([got[0], *got[2:]], plain, [want[0], *want[2:]], strict=True):
        assert (mine.double() - truth).norm() <= 2 * (theirs.double() - truth).norm()


@kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num", [0, 1, 5])
def test_each_of_many_is_as_if_alone(num, is_causal, kernel):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(num, 4, heads, 16, generator=generator, dtype=torch.float64) for heads in (6, 2, 2, 6)
    )
    out, lse = (x.unflatten(0, (num, 4)) for x in empty_part(q.flatten(0, 1)))
    attend_each_(out, lse, q, k, v, is_causal=is_causal, scale=SCALE, kernel=kernel)
    grad_q = torch.zeros_like(q)
    got = differentiate_each_(grad_q, grad, q, k, v, out, lse, is_causal=is_causal, scale=SCALE, kernel=kernel)
    assert got[0].shape == got[1].shape == k.shape
    mask = torch.ones(4, 4, dtype=torch.bool)
    for n in range(num):
        want = dense(q[n], k[n], v[n], grad[n], mask.tril() if is_causal else mask)
        for ours_n, truth in zip((out[n], lse[n], grad_q[n], got[0][n], got[1][n]), want, strict=True):
            torch.testing.assert_close(ours_n, truth, rtol=0, atol=1e-12)


@kernels
@pytest.mark.parametrize("size", [1.0, 1e-30, 0.0])  # the square of 1e-30 is no number of fp32
def test_a_product_stands_for_the_output_of_a_backward(size, kernel):
    q, k, v, grad = inputs((6, 2), dtype=torch.float32)
    grad *= size
    grad[3] = 0.0
    (block,) = BLOCKS["causal"]
    out, lse = empty_part(q)
    attend_blocks_(out, lse, q, k, v, blocks=(block,), scale=SCALE, kernel=kernel)
    stand_in = output_with_product(output_product(out, grad), grad)
    assert stand_in.isfinite().all() and (stand_in.norm(dim=-1) <= out.norm(dim=-1) * (1 + 1e-5)).all()
    ours, theirs = ([torch.zeros_like(x) for x in (q, k, v)] for _ in range(2))
    for grads, output in ((ours, stand_in), (theirs, out)):
        differentiate_blocks_(*grads, grad, q, k, v, output, lse, blocks=(block,), scale=SCALE, kernel=kernel)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6 * size)


def test_kernels_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match=r"kernel must be one of .*, got 'triton'"):
        check_kernel("triton", torch.zeros(1, 1, 8))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=rf"needs fp16 or bf16 tensors on a GPU, got {dtype} on cpu"):
            check_kernel("flash_attn", torch.zeros(1, 1, 8, dtype=dtype))
