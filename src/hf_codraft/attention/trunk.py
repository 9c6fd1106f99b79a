"""Attention over a trunk that is sharded over ranks, joined with keys that stay on the rank of their query.

Legend: T tokens of this rank, A queries (anchors), N query heads, M key/value heads, D head size.

A policy attends to the trunk alone ([`trunk_attention`]). Pass d of EAGLE-3's training-time test attends, at anchor i,
to the trunk keys of its segment up to i and to the keys of passes 2..d at i alone (the cache that vLLM's drafter holds
at depth d):

    keys ->             trunk 0 1 2 3     pass 2   pass 3
    anchor 2, pass 3:         x x x .     K_2[2]   K_3[2]

The softmax is joint. Its parts are computed apart and merged by log-sum-exp; the backward is exact, because every part
is differentiated with the joint output and log-sum-exp (`kernels.differentiate_blocks_`). The published scheme
(arXiv 2609.07108) circulates the trunk in every pass; here it is exchanged once, kept for all passes, and its gradients
return once.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_codraft.attention.blocks import Block, clip, needed_keys, num_in, runs_of, visible_blocks
from hf_codraft.attention.exchange import ROUTES, Gradients, KeyExchange, PeerKeys
from hf_codraft.attention.kernels import (
    attend_blocks_,
    check_kernel,
    differentiate_blocks_,
    expand_heads,
    sum_groups,
)
from hf_codraft.attention.layout import PackedLayout, Run
from hf_codraft.attention.merge import empty_part, merge_, stat_dtype, stat_zeros
from hf_codraft.attention.shard import Shard


class Queries:
    """Some tokens of this rank that query a trunk, and what they see of every rank's keys; made by [`Trunk.queries`].

    Args:
        layout ([`PackedLayout`]): of the trunk.
        runs (`tuple[Run, ...]`): which tokens, and in which rows of the query tensor they lie.
        num_queries (`int`): rows of that tensor.
        window (`int`, *optional*): sliding window.
    """

    def __init__(self, layout: PackedLayout, runs: tuple[Run, ...], num_queries: int, *, window: int | None):
        self.layout, self.runs, self.num_queries, self.window = layout, runs, num_queries, window
        self._blocks: dict[tuple[int, bool], tuple[Block, ...]] = {}

    def blocks(self, keys: PeerKeys, is_whole: bool) -> tuple[Block, ...]:
        """What they see of some keys; `is_whole` where those are all that their rank holds."""
        key = (keys.rank, is_whole)
        if key not in self._blocks:
            self._blocks[key] = visible_blocks(self.layout, self.runs, keys.runs, window=self.window)
        return self._blocks[key]

    def part(self, start: int, end: int) -> "Queries":
        """Queries `[start, end)` of these."""
        part = Queries(self.layout, _clip_runs(self.runs, start, end), end - start, window=self.window)
        part._blocks = {key: clip(blocks, start, end) for key, blocks in self._blocks.items()}
        return part


def _clip_runs(runs: tuple[Run, ...], start: int, end: int) -> tuple[Run, ...]:
    clipped = []
    for run in runs:
        a, b = max(run.offset, start), min(run.offset + run.end - run.start, end)
        if a < b:
            clipped.append(Run(run.start + a - run.offset, run.start + b - run.offset, a - start))
    return tuple(clipped)


@dataclass
class _Found:
    """What passes have found for own and kept keys, in that order; one for all that share a trunk's passes."""

    backward_id: int | None = None  # of the backward that found it; None where the gradients are taken by hand
    gradients: list[Gradients] = field(default_factory=list)


class Trunk:
    """Keys and values of a packed, sharded row, open for any number of passes. Making one is collective.

    Args:
        k_TMD, v_TMD (`torch.Tensor` of shape `(tokens, kv_heads, head_dim)`): of this rank's tokens.
        shard ([`Shard`]): which tokens those are.
        scale (`float`): factor of the scores, usually `head_dim ** -0.5`.
        window (`int`, *optional*): sliding window; a query sees itself and `window - 1` tokens before it.
        route (`str`): `"direct"`, or `"ring"` for the published scheme (nothing is kept then).
        num_kept (`int`, *optional*): of how many other ranks, nearest first, the keys are kept for all passes (and their
            gradients returned once); the others' come anew in every pass. All by default.
        max_kept_bytes (`int`, *optional*): instead of `num_kept`: as many as fit into so many bytes on the fullest rank (see
            [`num_kept_within`]). The same on every rank.
        kernel (`str`): see `kernels`.
    """

    def __init__(
        self,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
        *,
        shard: Shard,
        scale: float,
        window: int | None = None,
        route: str = "direct",
        num_kept: int | None = None,
        max_kept_bytes: int | None = None,
        kernel: str = "aten",
    ):
        if route not in ROUTES:
            raise ValueError(f"route must be one of {ROUTES}, got {route!r}.")
        if max_kept_bytes is not None and (num_kept is not None or route == "ring"):
            raise ValueError("max_kept_bytes decides num_kept of route 'direct'; leave num_kept out.")
        if len(k_TMD) != shard.num_tokens or k_TMD.shape != v_TMD.shape:
            raise ValueError(
                f"k_TMD {tuple(k_TMD.shape)} and v_TMD {tuple(v_TMD.shape)} must have one shape and a row for each of this "
                f"rank's {shard.num_tokens} tokens (context-parallel rank {shard.cp_rank})."
            )
        check_kernel(kernel, k_TMD)
        others = shard.layout.world - 1
        if max_kept_bytes is not None:
            num_kept = self._num_kept_within(max_kept_bytes, k_TMD, shard, window)
        self.shard, self.scale, self.window, self.route, self.kernel = shard, scale, window, route, kernel
        self.num_kept = 0 if route == "ring" else others if num_kept is None else min(max(num_kept, 0), others)
        self.exchange = KeyExchange(shard, window=window)
        self._found = _Found()
        self._bare = copy.copy(self)
        self.k_TMD, self.v_TMD = k_TMD.detach(), v_TMD.detach()
        self._kept = list(self.exchange.fetch(self.k_TMD, self.v_TMD, range(1, self.num_kept + 1)))
        self._opened = _OpenTrunk.apply(k_TMD, v_TMD, self._bare)

    @staticmethod
    def _num_kept_within(budget_bytes: int, k_TMD: torch.Tensor, shard: Shard, window: int | None) -> int:
        bytes_per_token = (
            2 * k_TMD.shape[1] * k_TMD.shape[2] * (k_TMD.element_size() + stat_dtype(k_TMD.dtype).itemsize)
        )
        num_kept = functools.partial(
            num_kept_within, shard.layout, bytes_per_token=bytes_per_token, budget_bytes=budget_bytes, window=window
        )
        return shard.once(("kept within", bytes_per_token, budget_bytes, window), num_kept)

    def bare(self) -> "Trunk":
        """This trunk without its tensors: what the graph's nodes hold between forward and backward.

        Tensors go through `save_for_backward` alone, so that activation checkpointing can drop them and hand the backward
        those of the second forward. Refreshed at every call, for what a subclass has set.
        """
        held = {name: value for name, value in vars(self).items() if name not in _TENSORS}
        vars(self._bare).update(held)
        return self._bare

    def tensors(self) -> list[torch.Tensor]:
        """What [`bare`] lacks: this rank's keys and values, and those that are kept."""
        return [self.k_TMD, self.v_TMD, *(x for keys in self._kept for x in (keys.k_TMD, keys.v_TMD))]

    def holding(self, tensors: Sequence[torch.Tensor]) -> "Trunk":
        """A bare trunk with [`tensors`] again; it shares the gradients that passes have found."""
        trunk = copy.copy(self)
        trunk.k_TMD, trunk.v_TMD = tensors[:2]
        trunk._kept = [
            PeerKeys(peer, self.exchange.runs_from(peer), k, v)
            for peer, k, v in zip(self.shard.peers, tensors[2::2], tensors[3::2])
        ]
        return trunk

    def queries(self, rows: torch.Tensor | None = None) -> Queries:
        """Some of this rank's tokens as queries.

        Args:
            rows (`torch.Tensor` of shape `(queries,)`, int64, *optional*): ascending rows of this rank's tokens, none
                twice; all of them by default.

        Raises:
            ValueError: if `rows` are anything else.
        """
        shard, layout, window = self.shard, self.shard.layout, self.window
        if rows is None:
            return shard.once(
                ("queries", window),
                lambda: Queries(layout, layout.runs(shard.cp_rank), shard.num_tokens, window=window),
            )
        _check_rows(rows, shard)
        return Queries(layout, runs_of(shard.index[rows.cpu()].tolist()), len(rows), window=window)

    def attend(
        self,
        q_AND: torch.Tensor,
        queries: Queries,
        *,
        branch_k: Sequence[torch.Tensor] = (),
        branch_v: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Joint attention of every query over the trunk and its own branch keys. Collective unless all is kept.

        Args:
            q_AND (`torch.Tensor` of shape `(queries, heads, head_dim)`): one row for each of `queries`.
            queries ([`Queries`]): made by [`queries`].
            branch_k, branch_v (sequences of `torch.Tensor` of shape `(queries, kv_heads, head_dim)`):
                keys and values of the earlier passes and this one; row n belongs to query n alone.

        Returns:
            `torch.Tensor` of shape `(queries, heads, head_dim)` in the dtype of `q_AND`.

        Raises:
            ValueError: if a tensor's shape does not fit the queries and the trunk's keys, or the queries the trunk.
        """
        if (queries.layout, queries.window) != (self.shard.layout, self.window):
            raise ValueError(
                f"queries were made by a trunk of another layout or of window {queries.window}, not {self.window}; make them "
                "by this trunk's queries()."
            )
        _check_pass(self.k_TMD, q_AND, queries, branch_k, branch_v)
        return _Attend.apply(q_AND, self._opened, self, queries, len(branch_k), *branch_k, *branch_v)

    def _streamed_steps(self) -> range:
        return range(self.num_kept + 1, self.shard.layout.world)

    def _streamed(self) -> Any:
        if self.route == "ring":
            return self.exchange.circulate(self.k_TMD, self.v_TMD)
        return self.exchange.fetch(self.k_TMD, self.v_TMD, self._streamed_steps())

    def attend_(self, out_AND: torch.Tensor, lse_AN: torch.Tensor, q_AND: torch.Tensor, queries: Queries) -> None:
        """Merges the trunk's part into `out` and `lse` in place."""
        is_ring = self.route == "ring"
        own = self.exchange.own(self.k_TMD, self.v_TMD)
        for source in (iter([own]), iter(self._kept), self._streamed()):
            for keys in source:
                blocks = queries.blocks(keys, is_ring or keys is own)
                attend_blocks_(
                    out_AND, lse_AN, q_AND, keys.k_TMD, keys.v_TMD, blocks=blocks, scale=self.scale, kernel=self.kernel
                )

    def differentiate_(
        self,
        grad_q_AND: torch.Tensor,
        grad_AND: torch.Tensor,
        q_AND: torch.Tensor,
        out_AND: torch.Tensor,
        lse_AN: torch.Tensor,
        queries: Queries,
    ) -> None:
        """Adds the queries' gradient in place, and the keys' and values' to what [`take_gradients`] hands over."""
        own = self.exchange.own(self.k_TMD, self.v_TMD)
        is_ring = self.route == "ring"

        def differentiate(keys: PeerKeys, grad_k: torch.Tensor, grad_v: torch.Tensor) -> Gradients:
            differentiate_blocks_(
                grad_q_AND, grad_k, grad_v, grad_AND, q_AND, keys.k_TMD, keys.v_TMD, out_AND, lse_AN,
                blocks=queries.blocks(keys, is_ring or keys.rank == own.rank), scale=self.scale, kernel=self.kernel,
            )  # fmt: skip
            return grad_k, grad_v

        gradients_found = self._gradients()
        own_grad_k, own_grad_v = gradients_found[0]
        if is_ring:
            grad_k, grad_v = self.exchange.circulate_gradients(self.k_TMD, self.v_TMD, differentiate)
            own_grad_k += grad_k
            own_grad_v += grad_v
            return
        for keys, gradients in zip((own, *self._kept), gradients_found):
            differentiate(keys, *gradients)
        streamed = zip(self._streamed_steps(), self._streamed())
        found = ((step, differentiate(keys, *_zeros(keys))) for step, keys in streamed)
        self.exchange.return_gradients(found, own_grad_k, own_grad_v)

    def _gradients(self) -> list[Gradients]:
        """Of own and kept keys, as found so far."""
        if not self._found.gradients:
            own = self.exchange.own(self.k_TMD, self.v_TMD)
            self._found.gradients += [_zeros(keys) for keys in (own, *self._kept)]
        return self._found.gradients

    def begin_backward(self, backward_id: int | None) -> None:
        """Forgets what another backward has found and not taken.

        `torch.autograd.grad(loss, [weight])` for a weight before the queries runs the passes and never asks for the
        keys' gradients; the next backward runs the same passes again.
        """
        if self._found.backward_id != backward_id:
            self._found.backward_id = backward_id
            self._found.gradients.clear()

    def take_gradients(self) -> Gradients:
        """The gradients of this rank's keys and values over all passes and ranks, and forgets them. Collective.

        For keys and values that are outside of the graph: it sums over every backward since the last call. Where they
        are in the graph, their gradients come through it.
        """
        gradients = self._gradients()
        own = gradients.pop(0)
        found = ((step, gradients.pop(0)) for step in range(1, self.num_kept + 1))
        self.exchange.return_gradients(found, *own)
        return own


_TENSORS = ("k_TMD", "v_TMD", "_kept", "_opened", "_bare")  # of a trunk, and what leads to them


def _check_rows(rows: torch.Tensor, shard: Shard) -> None:
    where = f"this rank's {shard.num_tokens} tokens (context-parallel rank {shard.cp_rank})"
    if rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"rows must be one axis of int64 rows of {where}, got {rows.dtype} {tuple(rows.shape)}.")
    at = rows.cpu()
    if len(at) and (at[0] < 0 or at[-1] >= shard.num_tokens or bool((at[1:] <= at[:-1]).any())):
        raise ValueError(
            f"rows must ascend, none twice, from 0 or more to less than {shard.num_tokens}, over {where}; got "
            f"{at[:8].tolist()}{'...' if len(at) > 8 else ''}, from {int(at.min())} to {int(at.max())}. Sort them, and sort "
            "the rows of q_AND alike."
        )


def _check_pass(
    k_TMD: torch.Tensor,
    q_AND: torch.Tensor,
    queries: Queries,
    branch_k: Sequence[torch.Tensor],
    branch_v: Sequence[torch.Tensor],
) -> None:
    """A kernel would read past the keys where heads do not fit."""
    _, num_kv_heads, head_dim = k_TMD.shape
    if len(q_AND) != queries.num_queries:
        raise ValueError(f"q_AND has {len(q_AND)} rows, but there are {queries.num_queries} queries.")
    if q_AND.ndim != 3 or q_AND.shape[2] != head_dim or q_AND.shape[1] % num_kv_heads:
        raise ValueError(
            f"q_AND {tuple(q_AND.shape)} must be (queries, heads, head_dim) with a multiple of the trunk's {num_kv_heads} "
            f"key/value heads and its head_dim {head_dim}."
        )
    if len(branch_k) != len(branch_v):
        raise ValueError(f"branch_k has {len(branch_k)} tensors and branch_v {len(branch_v)}; give both of each pass.")
    wanted = (queries.num_queries, num_kv_heads, head_dim)
    for name, branch in (("branch_k", branch_k), ("branch_v", branch_v)):
        for number, x in enumerate(branch):
            if x.shape != wanted:
                raise ValueError(
                    f"{name}[{number}] {tuple(x.shape)} must have the shape {wanted} (queries, kv_heads, head_dim): one row "
                    "for each query, heads not expanded."
                )


def _zeros(keys: PeerKeys) -> Gradients:
    return stat_zeros(keys.k_TMD), stat_zeros(keys.v_TMD)


class _OpenTrunk(torch.autograd.Function):
    """Hands the trunk's gradients to autograd after the backward of every pass (each depends on what this returns)."""

    @staticmethod
    def forward(ctx: Any, k_TMD: torch.Tensor, v_TMD: torch.Tensor, bare: Trunk) -> torch.Tensor:
        ctx.bare, ctx.dtypes = bare, (k_TMD.dtype, v_TMD.dtype)
        return k_TMD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_k, grad_v = (grad.to(dtype) for grad, dtype in zip(ctx.bare.take_gradients(), ctx.dtypes))
        return grad_k, grad_v, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_AND: torch.Tensor,
        opened: torch.Tensor,
        trunk: Trunk,
        queries: Queries,
        num_branch: int,
        *branch: torch.Tensor,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = q_AND.shape[1], trunk.k_TMD.shape[1]
        out, lse = empty_part(q_AND)
        trunk.attend_(out, lse, q_AND, queries)
        grouped = q_AND.to(lse.dtype).unflatten(1, (num_kv_heads, -1))
        for k_AMD, v_AMD in zip(branch[:num_branch], branch[num_branch:], strict=True):
            # product and sum, not einsum: under autocast a matrix product would round the scores to bf16
            score_AN = (grouped * k_AMD.to(lse.dtype)[:, :, None]).sum(-1).flatten(1) * trunk.scale
            merge_(out, lse, expand_heads(v_AMD, num_heads).to(lse.dtype), score_AN)
        out = out.to(q_AND.dtype)
        ctx.save_for_backward(q_AND, out, lse, *branch, *trunk.tensors())
        ctx.bare, ctx.queries, ctx.num_branch = trunk.bare(), queries, num_branch
        return out

    @staticmethod
    def backward(ctx: Any, grad_AND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_AND, out, lse, *others = ctx.saved_tensors
        branch, trunk = others[: 2 * ctx.num_branch], ctx.bare.holding(others[2 * ctx.num_branch :])
        is_opened_in_graph = ctx.needs_input_grad[1]  # else whoever opened the trunk takes its gradients
        # torch's own checkpoints tell backwards apart by this id; it has no public name
        trunk.begin_backward(torch._C._current_graph_task_id() if is_opened_in_graph else None)
        num_heads, num_kv_heads = q_AND.shape[1], trunk.k_TMD.shape[1]
        grad_q = stat_zeros(q_AND)
        trunk.differentiate_(grad_q, grad_AND, q_AND, out, lse, ctx.queries)

        grads_k, grads_v = [], []
        grad_wide, q_wide = grad_AND.to(lse.dtype), q_AND.to(lse.dtype)
        delta_AN = (grad_wide * out.to(lse.dtype)).sum(-1)
        for k_AMD, v_AMD in zip(branch[: ctx.num_branch], branch[ctx.num_branch :], strict=True):
            k_b, v_b = expand_heads(k_AMD, num_heads).to(lse.dtype), expand_heads(v_AMD, num_heads).to(lse.dtype)
            prob_AN = torch.exp((q_wide * k_b).sum(-1) * trunk.scale - lse)
            grad_score_AN = prob_AN * ((grad_wide * v_b).sum(-1) - delta_AN) * trunk.scale
            grad_q += grad_score_AN[..., None] * k_b
            grads_k.append(sum_groups(grad_score_AN[..., None] * q_wide, num_kv_heads).to(k_AMD.dtype))
            grads_v.append(sum_groups(prob_AN[..., None] * grad_wide, num_kv_heads).to(v_AMD.dtype))
        opened = torch.zeros((), dtype=trunk.k_TMD.dtype, device=q_AND.device)
        return (grad_q.to(q_AND.dtype), opened, None, None, None, *grads_k, *grads_v)


def trunk_attention(
    q_TND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    *,
    shard: Shard,
    scale: float,
    window: int | None = None,
    route: str = "direct",
    keep_remote: bool = False,
    kernel: str = "aten",
) -> torch.Tensor:
    """Causal attention of every token over its own segment, wherever its keys lie. Collective, backward included.

    Args:
        q_TND (`torch.Tensor` of shape `(tokens, heads, head_dim)`): queries of this rank's tokens.
        k_TMD, v_TMD (`torch.Tensor` of shape `(tokens, kv_heads, head_dim)`): their keys and values, not expanded.
        shard ([`Shard`]): which tokens those are.
        scale, window, route, kernel: see [`Trunk`].
        keep_remote (`bool`): keep the keys of other ranks for the backward instead of fetching them again.

    Returns:
        `torch.Tensor` of shape `(tokens, heads, head_dim)` in the dtype of `q_TND`.
    """
    num_kept = None if keep_remote else 0
    trunk = Trunk(k_TMD, v_TMD, shard=shard, scale=scale, window=window, route=route, num_kept=num_kept, kernel=kernel)
    return trunk.attend(q_TND, trunk.queries())


def num_kept_within(
    layout: PackedLayout, *, bytes_per_token: int, budget_bytes: int, window: int | None = None
) -> int:
    """Of how many other ranks a trunk can be kept in a memory budget: the same answer on every rank.

    Args:
        layout ([`PackedLayout`]): of the row.
        bytes_per_token (`int`): keys, values and the gradients of both, of one token.
        budget_bytes (`int`): bytes that the fullest rank may spend on other ranks' keys.
        window (`int`, *optional*): sliding window.
    """
    spent = [0] * layout.world
    for step in range(1, layout.world):
        for rank in range(layout.world):
            blocks = visible_blocks(
                layout, layout.runs(rank), layout.runs((rank - step) % layout.world), window=window
            )
            spent[rank] += bytes_per_token * num_in(needed_keys(blocks))
        if max(spent) > budget_bytes:
            return step - 1
    return layout.world - 1
