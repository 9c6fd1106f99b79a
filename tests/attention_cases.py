"""Passes over a sharded trunk, as one case that threads and processes run and a dense softmax in fp64 judges.

Used by `unit/attention/test_trunk.py` (ranks as threads) and `distributed/test_context_attention.py` (gloo); so are block
drafts, at the end.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch

from hf_codraft.attention.block_draft import BlockTraffic, DraftBlocks, block_attention
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.plans import balanced_plan, contiguous_plan, segment_zigzag_plan, zigzag_plan
from hf_codraft.attention.reference import reference_attention, visible_mask
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import LocalTransport, Sent, Transport, run_local_ranks
from hf_codraft.attention.trunk import Trunk

SCALE = 0.3
PLANS = {
    "contiguous": contiguous_plan,
    "zigzag": zigzag_plan,
    "per segment": segment_zigzag_plan,
    "balanced": balanced_plan,
}
MODES = {"ring": ("ring", None), "kept": ("direct", None), "partly kept": ("direct", 1), "streamed": ("direct", 0)}


@functools.cache
def _made(layout: PackedLayout, rank: int) -> dict:
    return {}


def shard_of(layout: PackedLayout, transport: Transport) -> Shard:
    """A shard that knows what other cases have made once for this layout, as layers and drafts of one row share it."""
    shard = Shard(layout, transport.rank, transport)
    vars(shard)["_made"] = _made(layout, transport.rank)
    return shard


@dataclass(frozen=True)
class TrunkCase:
    """Passes d = 1..`num_passes`, each over the trunk and the branch keys of passes 2..d."""

    lengths: tuple[int, ...] = (5, 1, 9, 1)
    world: int = 3
    plan: str = "zigzag"
    mode: str = "kept"
    dtype: torch.dtype = torch.float64
    heads: tuple[int, int] = (6, 2)
    head_dim: int = 16
    window: int | None = None
    num_passes: int = 2
    supervised: str = "all"  # which outputs have a gradient: "all", those of "one rank", or "none"
    queries: str = "all"  # which tokens query: "all", or "some"
    kernel: str = "aten"

    @property
    def layout(self) -> PackedLayout:
        return PLANS[self.plan](PackedLayout.from_lengths(self.lengths).cu_seqlens, self.world)

    @property
    def alone(self) -> "TrunkCase":
        """The same on one rank."""
        return replace(self, world=1)

    @property
    def is_query_T(self) -> torch.Tensor:
        tokens = torch.arange(sum(self.lengths))
        return tokens % 3 != 1 if self.queries == "some" else tokens >= 0


def leaves(case: TrunkCase, dtype: torch.dtype) -> list[torch.Tensor]:
    """q of every pass, k, v, keys and values of passes 2.., over the whole row; rounded to the dtype of the case."""
    generator = torch.Generator().manual_seed(1)
    num_heads, num_kv_heads = case.heads
    sizes = [num_heads] * case.num_passes + [num_kv_heads] * (2 + 2 * (case.num_passes - 1))
    return [
        torch.randn(sum(case.lengths), size, case.head_dim, generator=generator, dtype=torch.float64)
        .mul_(1.5 * case.head_dim**-0.25)
        .to(case.dtype)
        .to(dtype)
        for size in sizes
    ]


def output_gradients(case: TrunkCase) -> list[torch.Tensor]:
    """Of every pass, `(tokens, heads, head_dim)` in the dtype of the case."""
    layout = case.layout
    generator = torch.Generator().manual_seed(2)
    shape = (sum(case.lengths), case.heads[0], case.head_dim)
    mask = case.is_query_T.clone()
    if case.supervised == "none":
        mask[:] = False
    elif case.supervised == "one rank":
        last = torch.zeros_like(mask)
        last[layout.index(layout.pieces[-1].owner)] = True
        mask &= last
    drawn = [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(case.num_passes)]
    return [(x * mask[:, None, None]).to(case.dtype) for x in drawn]


def split(case: TrunkCase, tensors: Sequence[torch.Tensor]):
    """Queries, (k, v), branch keys, branch values."""
    num = case.num_passes
    return tensors[:num], tensors[num : num + 2], tensors[num + 2 : 2 * num + 1], tensors[2 * num + 1 :]


def truth(case: TrunkCase) -> list[torch.Tensor]:
    """Outputs and gradients over the whole row by one dense softmax in fp64."""
    layout = case.layout
    tensors = [x.requires_grad_() for x in leaves(case, torch.float64)]
    queries, (k, v), branch_k, branch_v = split(case, tensors)
    mask = visible_mask(layout, torch.arange(layout.num_tokens), window=case.window)
    outs = [
        reference_attention(q, k, v, mask, scale=SCALE, branch_k=branch_k[:n], branch_v=branch_v[:n])
        * case.is_query_T[:, None, None]
        for n, q in enumerate(queries)
    ]
    gradients = torch.autograd.grad(outs, tensors, [x.double() for x in output_gradients(case)])
    return [*(out.detach() for out in outs), *gradients]


def cancelling(case: TrunkCase) -> list[float]:
    """For each tensor of [`truth`], the norm of what cancels in it: its rounding is relative to that.

    The gradient of a score is P (g.v - g.o). Where a query sees one key alone the two terms are equal, and of the query's
    and the key's gradient their rounding is all that remains. The second term's share of those gradients:

        dQ: scale |g.o| P K    dK: scale P^T |g.o| Q

    |g.o| is the root of the sum of squares of the product's addends, since each is rounded for itself (as o is in bf16).
    Outputs and the gradients of values have no such term: 0.
    """
    queries, (k, v), branch_k, branch_v = split(case, leaves(case, torch.float64))
    mask = visible_mask(case.layout, torch.arange(case.layout.num_tokens), window=case.window)
    of_queries, share_k = [], torch.zeros_like(k).requires_grad_()
    share_branch_k = [torch.zeros_like(x).requires_grad_() for x in branch_k]
    total = (0 * share_k).sum()
    for n, (q, grad) in enumerate(zip(queries, output_gradients(case))):
        attend = functools.partial(reference_attention, q, k, mask_AT=mask, scale=SCALE, branch_k=branch_k[:n])
        product = SCALE * (attend(v_TMD=v, branch_v=branch_v[:n]) * grad.double()).norm(dim=-1, keepdim=True)
        of_queries.append((product * attend(v_TMD=k, branch_v=branch_k[:n])).norm().item())
        # attention is linear in its values: their gradient is P^T times the output's
        total = total + (attend(v_TMD=share_k, branch_v=share_branch_k[:n]) * product * q).sum()
    of_k, *of_branch_k = (x.norm().item() for x in torch.autograd.grad(total, [share_k, *share_branch_k]))
    num = case.num_passes
    return [*[0.0] * num, *of_queries, of_k, 0.0, *of_branch_k, *[0.0] * (num - 1)]


def run_rank(
    case: TrunkCase,
    transport: Transport,
    *,
    shard: Shard | None = None,
    whole: Sequence[torch.Tensor] | None = None,
    gradients: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """This rank's rows of what [`truth`] gives.

    Args:
        case ([`TrunkCase`]): what to run.
        transport ([`Transport`]): reaches the other ranks.
        shard ([`Shard`], *optional*): of this rank, instead of one that all cases of a layout share.
        whole, gradients (sequences of `torch.Tensor`, *optional*): over the whole row, instead of the case's own
            [`leaves`] and [`output_gradients`].
    """
    layout, rank = case.layout, transport.rank
    shard = shard or shard_of(layout, transport)
    own = [layout.shard(x, rank).requires_grad_() for x in (whole or leaves(case, case.dtype))]
    queries, (k, v), branch_k, branch_v = split(case, own)
    route, num_kept = MODES[case.mode]
    trunk = Trunk(
        k, v, shard=shard, scale=SCALE, window=case.window, route=route, num_kept=num_kept, kernel=case.kernel
    )
    rows = layout.shard(case.is_query_T, rank).nonzero()[:, 0]
    who = trunk.queries(None if case.queries == "all" else rows)
    outs = [
        torch.zeros_like(q).index_put(
            (rows,),
            trunk.attend(
                q[rows], who, branch_k=[x[rows] for x in branch_k[:n]], branch_v=[x[rows] for x in branch_v[:n]]
            ),
        )
        for n, q in enumerate(queries)
    ]
    torch.autograd.backward(outs, [layout.shard(x, rank) for x in gradients or output_gradients(case)])
    assert all(x.grad is not None for x in own)
    return [*(out.detach() for out in outs), *(x.grad for x in own)]


def join(case: TrunkCase, parts: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [case.layout.unshard(column) for column in zip(*parts, strict=True)]


def run_threads(case: TrunkCase, **replaced: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What [`truth`] gives, from ranks that are threads; `replaced` as in [`run_rank`]."""

    def one_rank(transport: LocalTransport) -> list[torch.Tensor]:
        return run_rank(case, transport, **replaced)

    return join(case, run_local_ranks(one_rank, case.world, timeout_s=20))


def assert_exact(case: TrunkCase, got: Sequence[torch.Tensor]) -> None:
    """fp64 within 1e-12, fp32 within 1e-5 of the norm, bf16 within 1.5 times the error of one rank.

    The norm is each tensor's own, or that of what cancels in it where that is larger (see [`cancelling`]). An error below
    two of bf16's roundings (2^-9 of the norm each) is none: the kernel rounds a score's gradient and then what it returns,
    and in a row of two tokens one rank may be lucky with both.
    """
    wanted = truth(case)
    norms = [max(x.norm().item(), cancelled) for x, cancelled in zip(wanted, cancelling(case), strict=True)]
    alone = run_threads(case.alone, gradients=output_gradients(case)) if case.dtype == torch.bfloat16 else got
    for number, (ours, want, one_rank, norm) in enumerate(zip(got, wanted, alone, norms, strict=True)):
        error = (ours.double() - want).norm().item()
        if case.dtype == torch.float64:
            assert (ours - want).abs().max() <= 1e-12, (case, number)
        elif case.dtype == torch.float32:
            assert error <= 1e-5 * norm, (case, number, error, norm)
        else:
            error_alone = (one_rank.double() - want).norm().item()
            assert error <= max(1.5 * error_alone, 2**-8 * norm), (case, number, error, error_alone, norm)
        assert norm > 0 or not ours.any(), (case, number)


def every_pair(axes: dict[str, list]) -> list[dict[str, Any]]:
    """Cases in which any two values of two axes meet at least once."""
    pick = random.Random(0)
    missing = {
        ((a, u), (b, v))
        for a, b in combinations(axes, 2)
        for u, v in product(range(len(axes[a])), range(len(axes[b])))
    }
    cases = []
    while missing:
        drawn = [{axis: pick.randrange(len(values)) for axis, values in axes.items()} for _ in range(60)]
        drawn += [dict(random_case, **dict(pair)) for random_case, pair in zip(drawn, sorted(missing)[:1])]
        best = max(drawn, key=lambda case: len(missing & set(combinations(case.items(), 2))))
        missing -= set(combinations(best.items(), 2))
        cases.append({axis: axes[axis][number] for axis, number in best.items()})
    return cases


def recorded(transport: Transport) -> list[tuple]:
    """What this rank will exchange, as it goes, with peers by their distance: the same on every rank, or one waits."""
    calls: list[tuple] = []
    exchange = transport.exchange

    def record(sends, receives, *, what, **rest):
        to, come = ([(peer - transport.rank) % transport.world for peer, _ in side] for side in (sends, receives))
        calls.append((what, to, come))
        return exchange(sends, receives, what=what, **rest)

    transport.exchange = record
    return calls


# Block drafts


def block_inputs(blocks: DraftBlocks, *, heads: tuple[int, int] = (6, 2), head_dim: int = 8) -> list[torch.Tensor]:
    """q, k, v, keys and values of the blocks, over the whole row, as fp64 leaves."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = heads
    in_blocks, in_trunk = (len(blocks.anchors), blocks.num_slots), (blocks.layout.num_tokens,)
    shapes = [(*in_blocks, num_heads), *2 * [(*in_trunk, num_kv_heads)], *2 * [(*in_blocks, num_kv_heads)]]
    return [
        torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()
        for shape in shapes
    ]


def owned_block_rows(blocks: DraftBlocks, rank: int) -> list[int]:
    """Which of all blocks a rank holds."""
    return [blocks.anchors.index(anchor) for anchor in blocks.owned(rank)]


def seen_by(blocks: DraftBlocks, *, is_causal: bool) -> torch.Tensor:
    """`(anchors, slots, tokens + anchors * slots)`: who sees whom, pair by pair."""
    layout, num_slots, anchors = blocks.layout, blocks.num_slots, blocks.anchors
    mask = torch.zeros(len(anchors), num_slots, layout.num_tokens + len(anchors) * num_slots, dtype=torch.bool)
    for number, anchor in enumerate(anchors):
        start, _ = layout.segment_of(anchor)
        for slot in range(num_slots):
            for key in range(start, anchor + int(blocks.includes_anchor)):
                mask[number, slot, key] = blocks.window is None or key > anchor + slot - blocks.window
            for other in range(slot + 1 if is_causal else num_slots):
                mask[number, slot, layout.num_tokens + number * num_slots + other] = True
    return mask


def dense_blocks(tensors: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """One softmax of every slot over what [`seen_by`] shows."""
    q, k, v, block_k, block_v = tensors
    group = q.shape[2] // k.shape[1]
    keys, values = (
        torch.cat([trunk, own.flatten(0, 1)]).repeat_interleave(group, 1)
        for trunk, own in ((k, block_k), (v, block_v))
    )
    scores = torch.einsum("asnd,knd->ansk", q, keys) * SCALE
    prob = torch.softmax(scores.masked_fill(~mask[:, None], -torch.inf), -1)
    return torch.einsum("ansk,knd->asnd", prob, values)


def run_block_rank(
    blocks: DraftBlocks,
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor,
    transport: Transport,
    *,
    shard: Shard | None = None,
    **options,
) -> tuple[torch.Tensor, list[torch.Tensor], Sent, Sent]:
    """Output, gradients and traffic (forward, backward) of one rank; `options` are those of `block_attention`."""
    layout = blocks.layout
    shard, rows = shard or shard_of(layout, transport), owned_block_rows(blocks, transport.rank)
    q, k, v, block_k, block_v = own = [
        (layout.shard(x.detach(), transport.rank) if number in (1, 2) else x.detach()[rows]).requires_grad_()
        for number, x in enumerate(tensors)
    ]
    transport.traffic.reset()
    out = block_attention(
        q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, blocks=blocks, shard=shard, scale=SCALE, **options
    )
    forward = Sent(transport.traffic.num_bytes, transport.traffic.num_messages)
    transport.traffic.reset()
    out.backward(grad[rows].to(out.dtype))
    backward = Sent(transport.traffic.num_bytes, transport.traffic.num_messages)
    return out.detach(), [x.grad for x in own], forward, backward


def join_blocks(
    blocks: DraftBlocks, results: Sequence[tuple]
) -> tuple[torch.Tensor, list[torch.Tensor], BlockTraffic]:
    """What the ranks' [`run_block_rank`] found, over the whole row."""
    layout = blocks.layout

    def joined(parts, is_trunk):
        if is_trunk:
            return layout.unshard(parts)
        order = torch.tensor(
            [row for rank in range(layout.world) for row in owned_block_rows(blocks, rank)], dtype=torch.long
        )
        return torch.cat(parts)[order.argsort()]

    out = joined([result[0] for result in results], False)
    gradients = [joined([result[1][n] for result in results], n in (1, 2)) for n in range(5)]
    return out, gradients, BlockTraffic(tuple(r[2] for r in results), tuple(r[3] for r in results))
