"""The visibility rule as one dense mask, and attention over it in fp64: what everything else is checked against.

Legend: T packed tokens of the whole row, A queries, N query heads, M key/value heads, D head size.
"""

from collections.abc import Sequence

import torch

from hf_codraft.attention.layout import PackedLayout


def visible_mask(layout: PackedLayout, index_A: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
    """Which tokens the queries at some packed indices see: `(queries, tokens)`, bool."""
    segment_T = torch.cat(
        [torch.full((end - start,), number) for number, (start, end) in enumerate(layout.segments)]
        or [torch.zeros(0, dtype=torch.long)]
    )
    key_T = torch.arange(layout.num_tokens)
    mask = (segment_T == segment_T[index_A][:, None]) & (key_T <= index_A[:, None])
    return mask if window is None else mask & (key_T > index_A[:, None] - window)


def reference_attention(
    q_AND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    mask_AT: torch.Tensor,
    *,
    scale: float,
    branch_k: Sequence[torch.Tensor] = (),
    branch_v: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """One softmax with explicit probabilities over what `mask` shows and each query's own branch keys.

    Args:
        q_AND (`torch.Tensor` of shape `(queries, heads, head_dim)`).
        k_TMD, v_TMD (`torch.Tensor` of shape `(tokens, kv_heads, head_dim)`): of the whole row.
        mask_AT (`torch.Tensor` of shape `(queries, tokens)`, bool): see [`visible_mask`].
        branch_k, branch_v (sequences of `torch.Tensor` of shape `(queries, kv_heads, head_dim)`): as in `trunk`.

    Returns:
        `torch.Tensor` of shape `(queries, heads, head_dim)`; a query that sees nothing gets zeros.
    """
    group = q_AND.shape[1] // k_TMD.shape[1]
    k, v = k_TMD.repeat_interleave(group, 1), v_TMD.repeat_interleave(group, 1)
    scores = torch.einsum("and,tnd->nat", q_AND, k).masked_fill(~mask_AT, -torch.inf)
    for k_AMD in branch_k:
        own = torch.einsum("and,and->na", q_AND, k_AMD.repeat_interleave(group, 1))
        scores = torch.cat([scores, own[..., None]], -1)
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    prob = torch.softmax((scores * scale).masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    out = torch.einsum("nat,tnd->and", prob[..., : len(k)], v)
    for number, v_AMD in enumerate(branch_v):
        weight = prob[..., len(k) + number].T[..., None]
        out = out + weight * v_AMD.repeat_interleave(group, 1)
    return out
