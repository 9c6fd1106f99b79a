"""One attention block with its log-sum-exp: torch's kernels, flash-attn's, and a plain one to check them by.

Legend: B independent attentions of one size, Q queries, K keys, N query heads, M key/value heads (N is a multiple of M;
keys are never expanded for a kernel that can group heads itself), D head size.

| kernel | where | dtypes |
|---|---|---|
| `aten` | torch's flash attention on CPU; on CUDA the same (fp16, bf16) or memory-efficient (fp32) | on CUDA no fp64 |
| `flash_attn` | the flash-attn package, 2.7 or later, on CUDA | fp16, bf16 |
| `eager` | explicit probabilities, everywhere | any; the oracle |

Nothing of the CUDA paths has run on a GPU yet; of `flash_attn`, the calls are checked against a stand-in for the package.
"""

import torch
from torch.nn import functional as F

from hf_codraft._optional import require
from hf_codraft.attention.blocks import Block, Shape
from hf_codraft.attention.merge import merge_, stat_dtype

KERNELS = ("aten", "flash_attn", "eager")
aten = torch.ops.aten


def check_kernel(kernel: str, q_QND: torch.Tensor) -> None:
    """Raises a `ValueError` where a kernel cannot take these tensors, an `ImportError` where it is not installed."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {KERNELS}, got {kernel!r}.")
    if kernel == "flash_attn":
        if q_QND.device.type != "cuda" or q_QND.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"kernel='flash_attn' needs fp16 or bf16 tensors on a GPU, got {q_QND.dtype} on {q_QND.device.type}; use "
                "kernel='aten'."
            )
        if q_QND.shape[-1] % 8 or q_QND.shape[-1] > 256:
            raise ValueError(
                f"kernel='flash_attn' needs a head_dim that is a multiple of 8 up to 256, got {q_QND.shape[-1]}; use "
                "kernel='aten'."
            )
        require("flash_attn", extra="flash-attn")
    if kernel == "aten" and q_QND.device.type == "cuda" and q_QND.dtype == torch.float64:
        raise ValueError(
            f"kernel='aten' has no kernel for {q_QND.dtype} on {q_QND.device.type}, which keeps a log-sum-exp; use "
            "kernel='eager', or fp32."
        )


def _swap(x_BQND: torch.Tensor) -> torch.Tensor:
    """Heads before tokens, or back."""
    return x_BQND.transpose(1, 2)


def expand_heads(x_TMD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeats each key/value head for the query heads of its group: `(..., num_heads, head_dim)`."""
    return x_TMD.repeat_interleave(num_heads // x_TMD.shape[-2], dim=-2)


def sum_groups(x_TND: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The transpose of [`expand_heads`]: sums the heads of every group."""
    return x_TND.unflatten(-2, (num_kv_heads, x_TND.shape[-2] // num_kv_heads)).sum(-2)


def _uses_flash(q: torch.Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16)


def _forward(
    q_BQND: torch.Tensor, k_BKMD: torch.Tensor, v_BKMD: torch.Tensor, is_causal: bool, scale: float, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if kernel == "eager":
        return _eager_forward(q_BQND, k_BKMD, v_BKMD, is_causal, scale)
    if kernel == "flash_attn":
        return _flash_attn_forward(q_BQND, k_BKMD, v_BKMD, is_causal, scale)
    if q_BQND.device.type == "cpu":
        q, k, v = _swap(q_BQND), _swap(k_BKMD), _swap(v_BKMD)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return _swap(out), _swap(lse)
    if _uses_flash(q_BQND):
        out, lse, *_ = aten._flash_attention_forward(
            q_BQND, k_BKMD, v_BKMD, None, None, q_BQND.shape[1], k_BKMD.shape[1], 0.0, is_causal, False, scale=scale
        )
        return out, _swap(lse)
    num_heads = q_BQND.shape[2]
    q, k, v = (_swap(x) for x in (q_BQND, expand_heads(k_BKMD, num_heads), expand_heads(v_BKMD, num_heads)))
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return _swap(out), _swap(lse[..., : q_BQND.shape[1]])  # this kernel pads lse to 32 queries


def _backward(
    grad_BQND: torch.Tensor,
    q_BQND: torch.Tensor,
    k_BKMD: torch.Tensor,
    v_BKMD: torch.Tensor,
    out_BQND: torch.Tensor,
    lse_BQN: torch.Tensor,
    is_causal: bool,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if kernel == "eager":
        return _eager_backward(grad_BQND, q_BQND, k_BKMD, v_BKMD, out_BQND, lse_BQN, is_causal, scale)
    lse = _swap(lse_BQN).contiguous()
    if kernel == "flash_attn":
        return _flash_attn_backward(grad_BQND, q_BQND, k_BKMD, v_BKMD, out_BQND, lse, is_causal, scale)
    if q_BQND.device.type == "cpu":
        grad, q, k, v, out = (_swap(x) for x in (grad_BQND, q_BQND, k_BKMD, v_BKMD, out_BQND))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
        return _swap(grads[0]), _swap(grads[1]), _swap(grads[2])
    seed = torch.zeros((), dtype=torch.long, device=q_BQND.device)
    if _uses_flash(q_BQND):
        grads = aten._flash_attention_backward(
            grad_BQND, q_BQND, k_BKMD, v_BKMD, out_BQND, lse, None, None, q_BQND.shape[1], k_BKMD.shape[1],
            0.0, is_causal, seed, seed, scale=scale,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]
    num_heads, num_kv_heads = q_BQND.shape[2], k_BKMD.shape[2]
    k_wide, v_wide = expand_heads(k_BKMD, num_heads), expand_heads(v_BKMD, num_heads)
    grad, q, k, v, out = (_swap(x) for x in (grad_BQND, q_BQND, k_wide, v_wide, out_BQND))
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    grad_q, grad_k, grad_v = (_swap(g) for g in grads[:3])
    return grad_q, sum_groups(grad_k, num_kv_heads), sum_groups(grad_v, num_kv_heads)


def _flash_attn_forward(
    q_BQND: torch.Tensor, k_BKMD: torch.Tensor, v_BKMD: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward as forward

    out, lse, *_ = forward(
        q=q_BQND, k=k_BKMD, v=v_BKMD, dropout_p=0.0, softmax_scale=scale, causal=is_causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out, _swap(lse)


def _flash_attn_backward(
    grad_BQND: torch.Tensor,
    q_BQND: torch.Tensor,
    k_BKMD: torch.Tensor,
    v_BKMD: torch.Tensor,
    out_BQND: torch.Tensor,
    lse_BNQ: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward

    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q_BQND, k_BKMD, v_BKMD))
    backward(
        dout=grad_BQND.contiguous(), q=q_BQND, k=k_BKMD, v=v_BKMD, out=out_BQND.contiguous(),
        softmax_lse=lse_BNQ, dq=grad_q, dk=grad_k, dv=grad_v, dropout_p=0.0, softmax_scale=scale, causal=is_causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _eager_scores(q_BQND: torch.Tensor, k_BKMD: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    wide = stat_dtype(q_BQND.dtype)
    scores = torch.einsum("bqnd,bknd->bnqk", q_BQND.to(wide), expand_heads(k_BKMD, q_BQND.shape[2]).to(wide)) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _eager_forward(
    q_BQND: torch.Tensor, k_BKMD: torch.Tensor, v_BKMD: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_BNQK = _eager_scores(q_BQND, k_BKMD, is_causal, scale)
    lse_BNQ = scores_BNQK.logsumexp(-1)
    prob_BNQK = torch.exp(scores_BNQK - lse_BNQ[..., None])
    v_BKND = expand_heads(v_BKMD, q_BQND.shape[2]).to(prob_BNQK.dtype)
    return torch.einsum("bnqk,bknd->bqnd", prob_BNQK, v_BKND).to(q_BQND.dtype), _swap(lse_BNQ)


def _eager_backward(
    grad_BQND: torch.Tensor,
    q_BQND: torch.Tensor,
    k_BKMD: torch.Tensor,
    v_BKMD: torch.Tensor,
    out_BQND: torch.Tensor,
    lse_BQN: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, num_heads, num_kv_heads = stat_dtype(q_BQND.dtype), q_BQND.shape[2], k_BKMD.shape[2]
    grad, q = grad_BQND.to(wide), q_BQND.to(wide)
    k, v = expand_heads(k_BKMD, num_heads).to(wide), expand_heads(v_BKMD, num_heads).to(wide)
    prob_BNQK = torch.exp(_eager_scores(q_BQND, k_BKMD, is_causal, scale) - _swap(lse_BQN)[..., None])
    delta_BNQ = _swap((grad * out_BQND.to(wide)).sum(-1))
    grad_score = prob_BNQK * (torch.einsum("bqnd,bknd->bnqk", grad, v) - delta_BNQ[..., None]) * scale
    return (
        torch.einsum("bnqk,bknd->bqnd", grad_score, k).to(q_BQND.dtype),
        sum_groups(torch.einsum("bnqk,bqnd->bknd", grad_score, q), num_kv_heads).to(k_BKMD.dtype),
        sum_groups(torch.einsum("bnqk,bqnd->bknd", prob_BNQK, grad), num_kv_heads).to(v_BKMD.dtype),
    )


def output_product(out_QND: torch.Tensor, grad_QND: torch.Tensor) -> torch.Tensor:
    """Each head's output times its gradient, in `stat_dtype`: `(queries, heads)`. A backward takes nothing else of an output."""
    wide = stat_dtype(out_QND.dtype)
    return torch.linalg.vecdot(out_QND.to(wide), grad_QND.to(wide))


def output_with_product(product_QN: torch.Tensor, grad_QND: torch.Tensor) -> torch.Tensor:
    """The shortest output with a given [`output_product`], for kernels that ask for an output; in the gradient's dtype.

    o = product g / |g|^2    with g scaled by its largest entry, so that its square does not vanish
    """
    grad = grad_QND.to(product_QN.dtype)
    largest = grad.abs().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1.0)  # no gradient: the product is 0 too
    unit = grad / largest
    square = torch.linalg.vecdot(unit, unit)[..., None].clamp(min=1.0)  # at least 1 where there is a gradient
    return (product_QN[..., None] / largest / square * unit).to(grad_QND.dtype)


def attend_blocks_(
    out_QND: torch.Tensor,
    lse_QN: torch.Tensor,
    q_QND: torch.Tensor,
    k_KMD: torch.Tensor,
    v_KMD: torch.Tensor,
    *,
    blocks: tuple[Block, ...],
    scale: float,
    kernel: str = "aten",
) -> None:
    """Merges the attention of some blocks into `out` and `lse` (both in `stat_dtype`) in place."""
    for block in blocks:
        queries, keys = slice(block.query_start, block.query_end), slice(block.key_start, block.key_end)
        q, k, v = q_QND[None, queries], k_KMD[None, keys], v_KMD[None, keys]
        if block.shape is Shape.ANTICAUSAL:
            part, lse = _forward(q.flip(1), k.flip(1), v.flip(1), True, scale, kernel)
            part, lse = part.flip(1), lse.flip(1)
        else:
            part, lse = _forward(q, k, v, block.shape is Shape.CAUSAL, scale, kernel)
        merge_(out_QND[queries], lse_QN[queries], part[0].to(out_QND.dtype), lse[0].to(lse_QN.dtype))


def differentiate_blocks_(
    grad_q_QND: torch.Tensor,
    grad_k_KMD: torch.Tensor,
    grad_v_KMD: torch.Tensor,
    grad_QND: torch.Tensor,
    q_QND: torch.Tensor,
    k_KMD: torch.Tensor,
    v_KMD: torch.Tensor,
    out_QND: torch.Tensor,
    lse_QN: torch.Tensor,
    *,
    blocks: tuple[Block, ...],
    scale: float,
    kernel: str = "aten",
) -> None:
    """Adds the gradients of some blocks to `grad_q`, `grad_k`, `grad_v` (all in `stat_dtype`) in place.

    `out` and `lse` are the *joint* ones of the whole softmax, every other part included: the probabilities that a
    kernel computes anew from them are then the joint ones, so each block's gradients are exact parts of the whole, and
    no gradient of a log-sum-exp is ever formed.
    """
    for block in blocks:
        queries, keys = slice(block.query_start, block.query_end), slice(block.key_start, block.key_end)
        rows = (
            (grad_QND, queries),
            (q_QND, queries),
            (k_KMD, keys),
            (v_KMD, keys),
            (out_QND, queries),
            (lse_QN, queries),
        )
        grad, q, k, v, out, lse = (x[None, part] for x, part in rows)
        if block.shape is Shape.ANTICAUSAL:
            grad, q, k, v, out, lse = (x.flip(1) for x in (grad, q, k, v, out, lse))
            parts = [x.flip(1) for x in _backward(grad, q, k, v, out, lse, True, scale, kernel)]
        else:
            parts = [*_backward(grad, q, k, v, out, lse, block.shape is Shape.CAUSAL, scale, kernel)]
        grad_q_QND[queries] += parts[0][0]
        grad_k_KMD[keys] += parts[1][0]
        grad_v_KMD[keys] += parts[2][0]


def attend_each_(
    out_BQND: torch.Tensor,
    lse_BQN: torch.Tensor,
    q_BQND: torch.Tensor,
    k_BKMD: torch.Tensor,
    v_BKMD: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    kernel: str = "aten",
) -> None:
    """Merges independent attentions of one size into `out` and `lse` (both in `stat_dtype`) in place."""
    if q_BQND.numel():  # torch's CPU kernel ends the process on nothing
        part, lse = _forward(q_BQND, k_BKMD, v_BKMD, is_causal, scale, kernel)
        merge_(out_BQND, lse_BQN, part.to(out_BQND.dtype), lse.to(lse_BQN.dtype))


def differentiate_each_(
    grad_q_BQND: torch.Tensor,
    grad_BQND: torch.Tensor,
    q_BQND: torch.Tensor,
    k_BKMD: torch.Tensor,
    v_BKMD: torch.Tensor,
    out_BQND: torch.Tensor,
    lse_BQN: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    kernel: str = "aten",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the queries' gradient of such attentions in place and returns their keys' and values'; see above."""
    if not q_BQND.numel():
        return torch.zeros_like(k_BKMD), torch.zeros_like(v_BKMD)
    grad_q, grad_k, grad_v = _backward(grad_BQND, q_BQND, k_BKMD, v_BKMD, out_BQND, lse_BQN, is_causal, scale, kernel)
    grad_q_BQND += grad_q
    return grad_k, grad_v
