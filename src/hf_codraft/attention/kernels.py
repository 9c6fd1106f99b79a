"""One attention block with its log-sum-exp: torch's kernels, flash-attn's, and a plain one to check them by.

Legend: Q queries, K keys, N query heads, M key/value heads (N is a multiple of M; keys are never expanded for a kernel
that can group heads itself), D head size.

| kernel | where | dtypes |
|---|---|---|
| `aten` | torch's flash attention on CPU; on CUDA the same (fp16, bf16) or memory-efficient (fp32) | what torch has |
| `flash_attn` | the flash-attn package | fp16, bf16 |
| `eager` | explicit probabilities, everywhere | any; the oracle |

Nothing of the CUDA paths has run on a GPU yet.
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
        require("flash_attn", extra="flash-attn")


def _heads_first(x_QND: torch.Tensor) -> torch.Tensor:
    return x_QND.transpose(0, 1)[None]


def _tokens_first(x_1NQD: torch.Tensor) -> torch.Tensor:
    return x_1NQD[0].transpose(0, 1)


def expand_heads(x_TMD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeats each key/value head for the query heads of its group: `(tokens, num_heads, head_dim)`."""
    return x_TMD.repeat_interleave(num_heads // x_TMD.shape[1], dim=1)


def sum_groups(x_TND: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The transpose of [`expand_heads`]: sums the heads of every group."""
    return x_TND.unflatten(1, (num_kv_heads, -1)).sum(2)


def _uses_flash(q: torch.Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16)


def _forward(
    q_QND: torch.Tensor, k_KMD: torch.Tensor, v_KMD: torch.Tensor, is_causal: bool, scale: float, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if kernel == "eager":
        return _eager_forward(q_QND, k_KMD, v_KMD, is_causal, scale)
    if kernel == "flash_attn":
        return _flash_attn_forward(q_QND, k_KMD, v_KMD, is_causal, scale)
    if q_QND.device.type == "cpu":
        q, k, v = _heads_first(q_QND), _heads_first(k_KMD), _heads_first(v_KMD)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return _tokens_first(out), lse[0].transpose(0, 1)
    if _uses_flash(q_QND):
        out, lse, *_ = aten._flash_attention_forward(
            q_QND[None],
            k_KMD[None],
            v_KMD[None],
            None,
            None,
            len(q_QND),
            len(k_KMD),
            0.0,
            is_causal,
            False,
            scale=scale,
        )
        return out[0], lse[0].transpose(0, 1)
    num_heads = q_QND.shape[1]
    q, k, v = (_heads_first(x) for x in (q_QND, expand_heads(k_KMD, num_heads), expand_heads(v_KMD, num_heads)))
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return _tokens_first(out), lse[0, :, : len(q_QND)].transpose(0, 1)  # this kernel pads lse to 32 queries


def _backward(
    grad_QND: torch.Tensor,
    q_QND: torch.Tensor,
    k_KMD: torch.Tensor,
    v_KMD: torch.Tensor,
    out_QND: torch.Tensor,
    lse_QN: torch.Tensor,
    is_causal: bool,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if kernel == "eager":
        return _eager_backward(grad_QND, q_QND, k_KMD, v_KMD, out_QND, lse_QN, is_causal, scale)
    lse = lse_QN.transpose(0, 1)[None].contiguous()
    if kernel == "flash_attn":
        return _flash_attn_backward(grad_QND, q_QND, k_KMD, v_KMD, out_QND, lse, is_causal, scale)
    if q_QND.device.type == "cpu":
        grad, q, k, v, out = (_heads_first(x) for x in (grad_QND, q_QND, k_KMD, v_KMD, out_QND))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
        return _tokens_first(grads[0]), _tokens_first(grads[1]), _tokens_first(grads[2])
    seed = torch.zeros((), dtype=torch.long, device=q_QND.device)
    if _uses_flash(q_QND):
        grads = aten._flash_attention_backward(
            grad_QND[None], q_QND[None], k_KMD[None], v_KMD[None], out_QND[None], lse, None, None, len(q_QND), len(k_KMD),
            0.0, is_causal, seed, seed, scale=scale,
        )  # fmt: skip
        return grads[0][0], grads[1][0], grads[2][0]
    num_heads, num_kv_heads = q_QND.shape[1], k_KMD.shape[1]
    k_wide, v_wide = expand_heads(k_KMD, num_heads), expand_heads(v_KMD, num_heads)
    grad, q, k, v, out = (_heads_first(x) for x in (grad_QND, q_QND, k_wide, v_wide, out_QND))
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    grad_q, grad_k, grad_v = (_tokens_first(g) for g in grads[:3])
    return grad_q, sum_groups(grad_k, num_kv_heads), sum_groups(grad_v, num_kv_heads)


def _flash_attn_forward(
    q_QND: torch.Tensor, k_KMD: torch.Tensor, v_KMD: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward as forward

    out, lse, *_ = forward(
        q=q_QND[None], k=k_KMD[None], v=v_KMD[None], dropout_p=0.0, softmax_scale=scale, causal=is_causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out[0], lse[0].transpose(0, 1)


def _flash_attn_backward(
    grad_QND: torch.Tensor,
    q_QND: torch.Tensor,
    k_KMD: torch.Tensor,
    v_KMD: torch.Tensor,
    out_QND: torch.Tensor,
    lse_1NQ: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward

    grad_q, grad_k, grad_v = (torch.empty_like(x[None]) for x in (q_QND, k_KMD, v_KMD))
    backward(
        dout=grad_QND[None].contiguous(), q=q_QND[None], k=k_KMD[None], v=v_KMD[None], out=out_QND[None].contiguous(),
        softmax_lse=lse_1NQ, dq=grad_q, dk=grad_k, dv=grad_v, dropout_p=0.0, softmax_scale=scale, causal=is_causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return grad_q[0], grad_k[0], grad_v[0]


def _eager_scores(q_QND: torch.Tensor, k_KMD: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    wide = stat_dtype(q_QND.dtype)
    scores = torch.einsum("qnd,knd->nqk", q_QND.to(wide), expand_heads(k_KMD, q_QND.shape[1]).to(wide)) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _eager_forward(
    q_QND: torch.Tensor, k_KMD: torch.Tensor, v_KMD: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_NQK = _eager_scores(q_QND, k_KMD, is_causal, scale)
    lse_NQ = scores_NQK.logsumexp(-1)
    prob_NQK = torch.exp(scores_NQK - lse_NQ[..., None])
    v_KND = expand_heads(v_KMD, q_QND.shape[1]).to(prob_NQK.dtype)
    return torch.einsum("nqk,knd->qnd", prob_NQK, v_KND).to(q_QND.dtype), lse_NQ.T


def _eager_backward(
    grad_QND: torch.Tensor,
    q_QND: torch.Tensor,
    k_KMD: torch.Tensor,
    v_KMD: torch.Tensor,
    out_QND: torch.Tensor,
    lse_QN: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, num_heads, num_kv_heads = stat_dtype(q_QND.dtype), q_QND.shape[1], k_KMD.shape[1]
    grad, q = grad_QND.to(wide), q_QND.to(wide)
    k, v = expand_heads(k_KMD, num_heads).to(wide), expand_heads(v_KMD, num_heads).to(wide)
    prob_NQK = torch.exp(_eager_scores(q_QND, k_KMD, is_causal, scale) - lse_QN.T[..., None])
    delta_NQ = (grad * out_QND.to(wide)).sum(-1).T
    grad_score = prob_NQK * (torch.einsum("qnd,knd->nqk", grad, v) - delta_NQ[..., None]) * scale
    return (
        torch.einsum("nqk,knd->qnd", grad_score, k).to(q_QND.dtype),
        sum_groups(torch.einsum("nqk,qnd->knd", grad_score, q), num_kv_heads).to(k_KMD.dtype),
        sum_groups(torch.einsum("nqk,qnd->knd", prob_NQK, grad), num_kv_heads).to(v_KMD.dtype),
    )


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
        q, k, v = q_QND[queries], k_KMD[keys], v_KMD[keys]
        if block.shape is Shape.ANTICAUSAL:
            part, lse = _forward(q.flip(0), k.flip(0), v.flip(0), True, scale, kernel)
            part, lse = part.flip(0), lse.flip(0)
        else:
            part, lse = _forward(q, k, v, block.shape is Shape.CAUSAL, scale, kernel)
        merge_(out_QND[queries], lse_QN[queries], part.to(out_QND.dtype), lse.to(lse_QN.dtype))


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
        tensors = grad_QND[queries], q_QND[queries], k_KMD[keys], v_KMD[keys], out_QND[queries], lse_QN[queries]
        if block.shape is Shape.ANTICAUSAL:
            grad, q, k, v, out, lse = (x.flip(0) for x in tensors)
            parts = tuple(x.flip(0) for x in _backward(grad, q, k, v, out, lse, True, scale, kernel))
        else:
            parts = _backward(*tensors, block.shape is Shape.CAUSAL, scale, kernel)
        grad_q_QND[queries] += parts[0]
        grad_k_KMD[keys] += parts[1]
        grad_v_KMD[keys] += parts[2]
