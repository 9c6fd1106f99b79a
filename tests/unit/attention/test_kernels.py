"""Every kernel and shape against explicit probabilities in fp64.

The flash-attn package needs a GPU. A stand-in that computes on the CPU takes its place: it shows that blocks, heads and
statistics are handed over as the package documents them, not that its kernels run.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hf_codraft.attention.blocks import Block, Shape, visible_blocks
from hf_codraft.attention.kernels import (
    attend_blocks_,
    attend_each_,
    check_kernel,
    differentiate_blocks_,
    differentiate_each_,
    output_product,
    output_with_product,
)
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.merge import empty_part
from hf_codraft.attention.reference import visible_mask

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


# flash-attn


class FlashAttn:
    """flash-attn 2.7's functions of one batch, in fp32, with the arguments and layouts of `flash_attn_interface`.

    q `(batch, queries, heads, head_dim)`, k and v `(batch, keys, kv_heads, head_dim)`, all fp16 or all bf16; log-sum-exp
    `(batch, heads, queries)` in fp32. A causal mask is aligned at the last query and the last key.
    """

    def __init__(self):
        self.seen: list[tuple[bool, int, int]] = []  # causal, queries and keys of every call

    def _check(self, q, k, v, dropout_p, causal, window, softcap, alibi_slopes) -> None:
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        batch, num_queries, num_heads, head_dim = q.shape
        num_keys, num_kv_heads = k.shape[1:3]
        assert k.shape == v.shape == (batch, num_keys, num_kv_heads, head_dim)
        assert head_dim % 8 == 0 and head_dim <= 256 and num_heads % num_kv_heads == 0
        assert batch and num_queries and num_keys
        assert not causal or num_queries == num_keys  # a triangle is the same, at whichever end it is aligned
        assert (dropout_p, window, softcap, alibi_slopes) == (0.0, (-1, -1), 0.0, None)
        self.seen.append((causal, num_queries, num_keys))

    @staticmethod
    def _scores(q, k, softmax_scale, causal) -> torch.Tensor:
        keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores = torch.einsum("bqnd,bknd->bnqk", q.float(), keys) * softmax_scale
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        return scores.masked_fill(hidden, -torch.inf) if causal else scores

    def forward(
        self, q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        self._check(q, k, v, dropout_p, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
        assert not return_softmax
        scores = self._scores(q, k, softmax_scale, causal)
        values = v.float().repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        out = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), values)
        return out.to(q.dtype), scores.logsumexp(-1), torch.empty(0, dtype=q.dtype), torch.empty(2, dtype=torch.int64)

    def backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        self._check(q, k, v, dropout_p, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
        batch, num_queries, num_heads, _ = q.shape
        assert dout.shape == out.shape == q.shape and dout.dtype == out.dtype == q.dtype
        assert softmax_lse.shape == (batch, num_heads, num_queries) and softmax_lse.dtype == torch.float32
        assert softmax_lse.is_contiguous()
        for gradient, x in ((dq, q), (dk, k), (dv, v)):
            assert gradient.shape == x.shape and gradient.dtype == x.dtype
        num_kv_heads, group = k.shape[2], num_heads // k.shape[2]
        k_wide, v_wide = (x.float().repeat_interleave(group, dim=2) for x in (k, v))
        prob = torch.exp(self._scores(q, k, softmax_scale, causal) - softmax_lse[..., None])
        delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
        score = prob * (torch.einsum("bqnd,bknd->bnqk", dout.float(), v_wide) - delta[..., None]) * softmax_scale
        dq.copy_(torch.einsum("bnqk,bknd->bqnd", score, k_wide))
        for gradient, weight, x in ((dk, score, q), (dv, prob, dout)):
            each_head = torch.einsum("bnqk,bqnd->bknd", weight, x.float())
            gradient.copy_(each_head.unflatten(2, (num_kv_heads, group)).sum(3))
        return delta


@pytest.fixture
def flash_attn(monkeypatch) -> FlashAttn:
    stand_in, package = FlashAttn(), ModuleType("flash_attn")
    package.flash_attn_interface = ModuleType("flash_attn.flash_attn_interface")
    package.flash_attn_interface._flash_attn_forward = stand_in.forward
    package.flash_attn_interface._flash_attn_backward = stand_in.backward
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package.flash_attn_interface)
    return stand_in


def assert_close_for(dtype: torch.dtype, got, want) -> None:
    """Each part of a result is rounded once to the dtype, by at most half its epsilon of each number, and so is the output
    that a backward is given; three parts and both make less than two epsilons of the norm. Statistics are fp32, and a
    query that sees one key has a gradient of zero but for rounding."""
    assert torch.equal(got[1].isfinite(), want[1].isfinite())
    torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=1e-5)
    largest = max(x.norm().item() for x in want[2:])
    for number in (0, 2, 3, 4):
        error, norm = (got[number].double() - want[number]).norm(), want[number].norm()
        assert error <= 2 * torch.finfo(dtype).eps * max(norm, 1e-4 * largest), number


WINDOW = PackedLayout((0, 9))
FLASH_BLOCKS = BLOCKS | {"windowed": visible_blocks(WINDOW, WINDOW.runs(0), WINDOW.runs(0), window=4)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", FLASH_BLOCKS)
def test_flash_attn_is_called_as_it_documents(name, heads, dtype, flash_attn):
    blocks = FLASH_BLOCKS[name]
    mask = mask_of(blocks)
    if name == "windowed":
        mask = F.pad(visible_mask(WINDOW, torch.arange(9), window=4), (0, 5))
    tensors = inputs(heads, 16, dtype)
    assert_close_for(dtype, ours(*tensors, blocks, "flash_attn"), dense(*tensors, mask))
    sizes = [(b.shape is not Shape.FULL, b.query_end - b.query_start, b.key_end - b.key_start) for b in blocks]
    assert flash_attn.seen == 2 * sizes  # forward and backward, and a window is none of its flags


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num", [0, 5])
def test_flash_attn_takes_each_of_many(num, is_causal, flash_attn):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(num, 4, heads, 16, generator=generator).bfloat16() for heads in (6, 2, 2, 6))
    out, lse = (x.unflatten(0, (num, 4)) for x in empty_part(q.flatten(0, 1)))
    options = dict(is_causal=is_causal, scale=SCALE, kernel="flash_attn")
    attend_each_(out, lse, q, k, v, **options)
    grad_q = torch.zeros_like(q)
    grad_k, grad_v = differentiate_each_(grad_q, grad, q, k, v, out.bfloat16(), lse, **options)
    mask = torch.ones(4, 4, dtype=torch.bool)
    for n in range(num):
        want = dense(q[n], k[n], v[n], grad[n], mask.tril() if is_causal else mask)
        assert_close_for(torch.bfloat16, [x[n] for x in (out, lse, grad_q, grad_k, grad_v)], want)
    assert flash_attn.seen == [(is_causal, 4, 4)] * (2 if num else 0)  # all at once, and nothing for nothing


# Refusals


def on_gpu(dtype: torch.dtype, head_dim: int = 8) -> torch.Tensor:
    """A tensor of a GPU that need not be there."""
    with FakeTensorMode():
        return torch.empty(1, 1, head_dim, dtype=dtype, device="cuda:0")


def test_kernels_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match=r"kernel must be one of .*, got 'triton'"):
        check_kernel("triton", torch.zeros(1, 1, 8))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=rf"needs fp16 or bf16 tensors on a GPU, got {dtype} on cpu"):
            check_kernel("flash_attn", torch.zeros(1, 1, 8, dtype=dtype))
    with pytest.raises(ValueError, match=r"head_dim that is a multiple of 8 up to 256, got 12; use kernel='aten'"):
        check_kernel("flash_attn", on_gpu(torch.bfloat16, 12))
    with pytest.raises(ValueError, match=r"head_dim that is a multiple of 8 up to 256, got 264"):
        check_kernel("flash_attn", on_gpu(torch.float16, 264))
    with pytest.raises(ValueError, match=r"kernel='aten' has no kernel for torch.float64 on cuda.*use kernel='eager'"):
        check_kernel("aten", on_gpu(torch.float64))


def test_kernels_that_can_run_are_not_refused(flash_attn):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        check_kernel("eager", on_gpu(dtype))
        check_kernel("aten", torch.zeros(1, 1, 8, dtype=dtype))
        if dtype != torch.float64:
            check_kernel("aten", on_gpu(dtype))
    for dtype in (torch.float16, torch.bfloat16):
        check_kernel("flash_attn", on_gpu(dtype))


def test_a_missing_flash_attn_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError, match=r"flash_attn is not installed; .*hf-codraft\[flash-attn\]"):
        check_kernel("flash_attn", on_gpu(torch.bfloat16))
