"""Attention of a draft's branch: causal over the trunk, plus the branch's own few keys.

Legend: T trunk tokens, A anchors (tokens that query), N query heads, M key/value heads, D head size, B branch keys.

Pass d of EAGLE-3's training-time test attends, at anchor i, to the trunk keys of its segment up to i and to the keys
of passes 2..d at i alone (the cache that vLLM's drafter holds at depth d):

    keys ->             trunk 0 1 2 3     pass 2   pass 3
    anchor 2, pass 3:         x x x .     K_2[2]   K_3[2]

The softmax is joint. It is computed as parts and merged by log-sum-exp; the backward is exact (see `kernels`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from hf_codraft.attention.kernels import block_backward, block_forward
from hf_codraft.attention.layout import Block


def expand_heads(x_TMD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeats each key/value head for the query heads of its group: `(tokens, num_heads, head_dim)`."""
    return x_TMD.repeat_interleave(num_heads // x_TMD.shape[1], dim=1)


def _sum_groups(x_TND: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    tokens, num_heads, head_dim = x_TND.shape
    return x_TND.view(tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).sum(2)


def merge_(out_AND: torch.Tensor, lse_AN: torch.Tensor, part_AND: torch.Tensor, part_lse_AN: torch.Tensor) -> None:
    """Merges another part of the same softmax into `out` and `lse` in place; an empty part has lse -inf."""
    joint = torch.logaddexp(lse_AN, part_lse_AN)
    finite = joint.masked_fill(joint == -torch.inf, 0.0)
    out_AND.mul_(torch.exp(lse_AN - finite)[..., None]).add_(part_AND * torch.exp(part_lse_AN - finite)[..., None])
    lse_AN.copy_(joint)


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_AND: torch.Tensor,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
        blocks: tuple[Block, ...],
        scale: float,
        num_branch: int,
        *branch: torch.Tensor,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = q_AND.shape[1], k_TMD.shape[1]
        stat_dtype = torch.float64 if q_AND.dtype == torch.float64 else torch.float32
        out = torch.zeros(q_AND.shape, dtype=stat_dtype, device=q_AND.device)
        lse = torch.full(q_AND.shape[:2], -torch.inf, dtype=stat_dtype, device=q_AND.device)
        k, v = expand_heads(k_TMD, num_heads), expand_heads(v_TMD, num_heads)
        for b in blocks:
            queries, keys = slice(b.query_start, b.query_end), slice(b.key_start, b.key_end)
            part, part_lse = block_forward(q_AND[queries], k[keys], v[keys], is_causal=b.is_causal, scale=scale)
            merge_(out[queries], lse[queries], part.to(stat_dtype), part_lse.to(stat_dtype))
        grouped = q_AND.to(stat_dtype).unflatten(1, (num_kv_heads, -1))
        for k_AMD, v_AMD in zip(branch[:num_branch], branch[num_branch:], strict=True):
            # product and sum, not einsum: under autocast a matrix product would round the scores to bf16
            score_AN = (grouped * k_AMD.to(stat_dtype)[:, :, None]).sum(-1).flatten(1) * scale
            merge_(out, lse, expand_heads(v_AMD, num_heads).to(stat_dtype), score_AN)
        out = out.to(q_AND.dtype)
        ctx.save_for_backward(q_AND, k_TMD, v_TMD, out, lse, *branch)
        ctx.blocks, ctx.scale, ctx.num_branch = blocks, scale, num_branch
        return out

    @staticmethod
    def backward(ctx: Any, grad_AND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_AND, k_TMD, v_TMD, out, lse, *branch = ctx.saved_tensors
        num_heads, num_kv_heads = q_AND.shape[1], k_TMD.shape[1]
        stat_dtype = lse.dtype
        k, v = expand_heads(k_TMD, num_heads), expand_heads(v_TMD, num_heads)
        grad_q = torch.zeros(q_AND.shape, dtype=stat_dtype, device=q_AND.device)
        grad_k, grad_v = (torch.zeros(k.shape, dtype=stat_dtype, device=k.device) for _ in range(2))
        for b in ctx.blocks:
            queries, keys = slice(b.query_start, b.query_end), slice(b.key_start, b.key_end)
            part_q, part_k, part_v = block_backward(
                grad_AND[queries], q_AND[queries], k[keys], v[keys], out[queries], lse[queries],
                is_causal=b.is_causal, scale=ctx.scale,
            )  # fmt: skip
            grad_q[queries] += part_q
            grad_k[keys] += part_k
            grad_v[keys] += part_v

        grads_k, grads_v = [], []
        grad_wide, q_wide = grad_AND.to(stat_dtype), q_AND.to(stat_dtype)
        delta_AN = (grad_wide * out.to(stat_dtype)).sum(-1)
        for k_AMD, v_AMD in zip(branch[: ctx.num_branch], branch[ctx.num_branch :], strict=True):
            k_b, v_b = expand_heads(k_AMD, num_heads).to(stat_dtype), expand_heads(v_AMD, num_heads).to(stat_dtype)
            prob_AN = torch.exp((q_wide * k_b).sum(-1) * ctx.scale - lse)
            grad_score_AN = prob_AN * ((grad_wide * v_b).sum(-1) - delta_AN) * ctx.scale
            grad_q += grad_score_AN[..., None] * k_b
            grads_k.append(_sum_groups(grad_score_AN[..., None] * q_wide, num_kv_heads).to(k_AMD.dtype))
            grads_v.append(_sum_groups(prob_AN[..., None] * grad_wide, num_kv_heads).to(v_AMD.dtype))
        return (
            grad_q.to(q_AND.dtype),
            _sum_groups(grad_k, num_kv_heads).to(k_TMD.dtype),
            _sum_groups(grad_v, num_kv_heads).to(v_TMD.dtype),
            None, None, None, *grads_k, *grads_v,
        )  # fmt: skip


def branch_attention(
    q_AND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    *,
    blocks: Sequence[Block],
    branch_k: Sequence[torch.Tensor] = (),
    branch_v: Sequence[torch.Tensor] = (),
    scale: float,
) -> torch.Tensor:
    """Joint attention of every anchor over its trunk blocks and its own branch keys.

    Args:
        q_AND (`torch.Tensor` of shape `(anchors, heads, head_dim)`): queries.
        k_TMD, v_TMD (`torch.Tensor` of shape `(tokens, kv_heads, head_dim)`): keys and values of the trunk.
        blocks (`Sequence[Block]`): who sees what of the trunk (`layout.trunk_blocks`).
        branch_k, branch_v (sequences of `torch.Tensor` of shape `(anchors, kv_heads, head_dim)`):
            keys and values of the earlier passes and this one; row n belongs to query n alone.
        scale (`float`): factor of the scores, usually `head_dim ** -0.5`.

    Returns:
        `torch.Tensor` of shape `(anchors, heads, head_dim)` in the dtype of `q_AND`. Source: DRAFT_MATH section 2,
        arXiv 2609.07108; exact in values and gradients.
    """
    return _BranchAttention.apply(q_AND, k_TMD, v_TMD, tuple(blocks), scale, len(branch_k), *branch_k, *branch_v)
