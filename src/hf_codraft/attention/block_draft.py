"""Attention of block drafts over a trunk that is sharded over ranks.

Legend: A anchors (blocks) of this rank, S slots of a block, R rows (a slot of a block each), T tokens of this rank, N
query heads, M key/value heads, D head size.

A block of slots hangs from each anchor p and lies on the rank that holds p; its slots stand at p, p + 1, .... Every slot
sees the trunk keys of its segment before p and the slots of its own block, never another block (DFlash, DSpark):

    keys ->         trunk 0 .. p-1 | p p+1 .. | own slots 0 1 2 | other blocks
    slots 0, 1, 2:        x x x x  | .  .  .  |           x x x |      .

Either of two things travels, and both are exact:

| route | forward | backward |
|---|---|---|
| `keys` | the trunk keys that a rank's blocks see come | their gradients go straight home |
| `queries` | slots go to all keys they see, parts of the softmax return | the joint output's gradient goes, dQ returns |
"""

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch

from hf_codraft.attention.blocks import Block, cut, merged_ranges, needed_keys, num_in, pieces_of
from hf_codraft.attention.exchange import Gradients, KeyExchange, PeerKeys, split, take
from hf_codraft.attention.kernels import (
    attend_blocks_,
    attend_each_,
    check_kernel,
    differentiate_blocks_,
    differentiate_each_,
    output_product,
    output_with_product,
)
from hf_codraft.attention.layout import PackedLayout, Run
from hf_codraft.attention.merge import empty_part, merge_, stat_dtype, stat_zeros
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import Delivery, Sent, Spec

ROUTES = ("auto", "keys", "queries")


@dataclass(frozen=True)
class DraftBlocks:
    """Where the blocks of a packed row hang, the same on every rank; made by a draft, read by [`block_attention`].

    Args:
        layout ([`PackedLayout`]): of the row.
        anchors (`tuple[int, ...]`): ascending packed indices, those of all ranks.
        num_slots (`int`): slots of every block.
        includes_anchor (`bool`): whether the slots also see the trunk key of their anchor.
        window (`int`, *optional*): sliding window over the trunk, in tokens: slot j of anchor p sees the trunk keys
            after `p + j - window`. A block always sees all of itself, so the window may not be shorter than a block.
    """

    layout: PackedLayout
    anchors: tuple[int, ...]
    num_slots: int
    includes_anchor: bool = False
    window: int | None = None
    _between: dict[tuple[int, int], tuple[Block, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {self.num_slots}.")
        if self.window is not None and self.window < self.num_slots:
            raise ValueError(
                f"window ({self.window}) must be at least num_slots ({self.num_slots}); use None for full attention."
            )
        borders = (-1, *self.anchors, self.layout.num_tokens)
        if any(a >= b for a, b in pairwise(borders)):
            raise ValueError(
                f"anchors must ascend within tokens 0..{self.layout.num_tokens - 1}, got {self.anchors}; sort them and "
                "leave doubles out."
            )

    @cached_property
    def blocks_id(self) -> int:
        """As `PackedLayout.layout_id`, for the layout and the blocks together."""
        text = repr((self.layout.layout_id, self.anchors, self.num_slots, self.includes_anchor, self.window))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    @cached_property
    def _owned(self) -> tuple[tuple[int, ...], ...]:
        owned: list[list[int]] = [[] for _ in range(self.layout.world)]
        starts = [piece.start for piece in self.layout.pieces]
        for anchor in self.anchors:
            owned[self.layout.pieces[bisect.bisect_right(starts, anchor) - 1].owner].append(anchor)
        return tuple(tuple(anchors) for anchors in owned)

    def owned(self, cp_rank: int) -> tuple[int, ...]:
        """The anchors whose blocks a rank holds, in order."""
        return self._owned[cp_rank]

    def visible(self, query_rank: int, key_runs: Sequence[Run]) -> tuple[Block, ...]:
        """What the slots of a rank see of some trunk keys: each visible pair once, in few rectangles."""
        blocks: list[Block] = []
        numbered = enumerate(self._owned[query_rank])
        for segment, group in groupby(numbered, key=lambda block: self.layout.segment_of(block[1])):
            members = list(group)
            for run in pieces_of(segment, key_runs):
                if self.window is None:
                    blocks += self._staircase(members, run)
                else:
                    blocks += self._windows(members, run)
        return tuple(blocks)

    def _end(self, anchor: int) -> int:
        """End of the trunk keys that a block sees."""
        return anchor + 1 if self.includes_anchor else anchor

    def _staircase(self, members: list[tuple[int, int]], keys: Run) -> Iterable[Block]:
        """Blocks of one segment see prefixes of it, ascending: the step between two halves is one rectangle.

        block 0   x x              x x | .  .  .
        block 1   x x x        =   x x | 0  .  .     0: blocks 1..3, before the halves are cut again
        block 2   x x x x x        x x | 0  2  2
        block 3   x x x x x        x x | 0  2  2
        """
        seen = [(number, min(self._end(anchor), keys.end)) for number, anchor in members]
        seen = [(number, end) for number, end in seen if end > keys.start]
        if not seen:
            return
        numbers, ends = zip(*seen)
        to_row = keys.offset - keys.start

        def rectangle(first: int, last: int, start: int, end: int) -> Block:
            rows = numbers[first] * self.num_slots, (numbers[last] + 1) * self.num_slots
            return Block(*rows, start + to_row, end + to_row)

        yield rectangle(0, len(ends) - 1, keys.start, ends[0])
        halves = [(0, len(ends))]  # blocks of a half are done up to the end of its first
        while halves:
            low, high = halves.pop()
            if ends[low] == ends[high - 1]:
                continue
            middle = (low + high) // 2
            if ends[middle] > ends[low]:
                yield rectangle(middle, high - 1, ends[low], ends[middle])
            halves += [(low, middle), (middle, high)]

    def _windows(self, members: list[tuple[int, int]], keys: Run) -> Iterable[Block]:
        """Slot j of anchor p is a query at `p + j` whose keys end before the anchor."""
        for number, anchor in members:
            seen = Run(keys.start, min(keys.end, self._end(anchor)), keys.offset)
            if seen.end <= seen.start:
                continue
            slots = Run(anchor, anchor + self.num_slots, number * self.num_slots)
            to_query, to_key = slots.offset - slots.start, seen.offset - seen.start
            for a, b, c, d, shape in cut(slots, seen, self.window):
                yield Block(a + to_query, b + to_query, c + to_key, d + to_key, shape)

    def between(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """How the slots of one rank see the tokens of another, computed once."""
        key = (query_rank, key_rank)
        if key not in self._between:
            self._between[key] = self.visible(query_rank, self.layout.runs(key_rank))
        return self._between[key]

    def rows(self, query_rank: int, key_rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges of the rows of `query_rank` that see some token of `key_rank`."""
        return merged_ranges((block.query_start, block.query_end) for block in self.between(query_rank, key_rank))

    def keys(self, query_rank: int, key_rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges of the tokens of `key_rank` that some slot of `query_rank` sees."""
        return needed_keys(self.between(query_rank, key_rank))


@dataclass(frozen=True)
class BlockTraffic:
    """What each rank sends for one call of [`block_attention`]; made by [`block_traffic`]."""

    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]

    @property
    def forward_bytes(self) -> tuple[int, ...]:
        return tuple(sent.num_bytes for sent in self.forward)

    @property
    def backward_bytes(self) -> tuple[int, ...]:
        return tuple(sent.num_bytes for sent in self.backward)

    @property
    def total_bytes(self) -> int:
        return sum(self.forward_bytes) + sum(self.backward_bytes)


def block_traffic(
    blocks: DraftBlocks, route: str, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> BlockTraffic:
    """What is sent, in closed form. With b bytes an element and s a statistic (4, or 8 in fp64), for every pair of ranks:

        keys      forward  2 K M D b           backward  2 K M D s           K keys seen
        queries   forward  R N D b             backward  R N (D b + 2 s)     R rows that see some
                  answer   R N (D s + s)       answer    R N D s

    and 16 bytes for every message that is not empty.
    """
    if route not in ROUTES[1:]:
        raise ValueError(f"route must be one of {ROUTES[1:]}, got {route!r}.")
    world = blocks.layout.world
    size, stat_size = dtype.itemsize, stat_dtype(dtype).itemsize
    forward, backward = [Sent()] * world, [Sent()] * world
    for query_rank in range(world):
        for key_rank in range(world):
            num_rows = num_in(blocks.rows(query_rank, key_rank))
            if query_rank == key_rank or not num_rows:
                continue
            if route == "keys":
                elements = 2 * num_in(blocks.keys(query_rank, key_rank)) * num_kv_heads * head_dim
                forward[key_rank] += Sent.parcel(elements * size)
                backward[query_rank] += Sent.parcel(elements * stat_size)
            else:
                heads = num_rows * num_heads
                forward[query_rank] += Sent.parcel(heads * head_dim * size)
                forward[key_rank] += Sent.parcel(heads * (head_dim + 1) * stat_size)
                backward[query_rank] += Sent.parcel(heads * (head_dim * size + 2 * stat_size))
                backward[key_rank] += Sent.parcel(heads * head_dim * stat_size)
    return BlockTraffic(tuple(forward), tuple(backward))


def cheaper_route(blocks: DraftBlocks, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """The route that sends fewer bytes, over all ranks, forward and backward: one verdict on every rank."""

    def total_bytes(route: str) -> int:
        traffic = block_traffic(
            blocks, route, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
        )
        return traffic.total_bytes

    return min(ROUTES[1:], key=total_bytes)


@dataclass(frozen=True)
class _Call:
    """What does not change between forward and backward."""

    blocks: DraftBlocks
    shard: Shard
    scale: float
    is_causal: bool
    kernel: str

    @property
    def rank(self) -> int:
        return self.shard.cp_rank

    @property
    def steps(self) -> list[tuple[int, int]]:
        """For every distance, the ranks that far behind and ahead: while this one asks the one, the other asks it."""
        world = self.shard.layout.world
        return [((self.rank - step) % world, (self.rank + step) % world) for step in range(1, world)]


@dataclass(frozen=True)
class _Gradients:
    """Where the backward adds up; all in `stat_dtype`."""

    q_RND: torch.Tensor
    k_TMD: torch.Tensor
    v_TMD: torch.Tensor


@dataclass(frozen=True)
class _Joint:
    """Of this rank's rows: queries, the joint output and log-sum-exp, and the output's gradient."""

    q_RND: torch.Tensor
    out_RND: torch.Tensor
    lse_RN: torch.Tensor
    grad_RND: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the backward beside other ranks' keys takes: a product of each row's head stands for its output."""
        return self.grad_RND, output_product(self.out_RND, self.grad_RND), self.lse_RN


class _BlockKeys(KeyExchange):
    """Brings the keys that blocks see."""

    def __init__(self, call: _Call):
        super().__init__(call.shard)
        self.call = call
        self.layout_id = call.blocks.blocks_id

    def ranges(self, query_rank: int, key_rank: int) -> tuple[tuple[int, int], ...]:
        return self.call.blocks.keys(query_rank, key_rank)

    def attend_(
        self,
        out_RND: torch.Tensor,
        lse_RN: torch.Tensor,
        q_RND: torch.Tensor,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Merges the parts of other ranks' keys and returns those keys, for [`differentiate_`]."""
        call, kept = self.call, []
        for keys in self.fetch(k_TMD, v_TMD, range(1, self.world)):
            attend_blocks_(
                out_RND, lse_RN, q_RND, keys.k_TMD, keys.v_TMD, blocks=call.blocks.visible(call.rank, keys.runs),
                scale=call.scale, kernel=call.kernel,
            )  # fmt: skip
            kept += [keys.k_TMD, keys.v_TMD]
        return kept

    def differentiate_(
        self, grads: _Gradients, joint: _Joint, k_TMD: torch.Tensor, v_TMD: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> None:
        call = self.call

        def differentiated(step: int, source: int) -> Gradients:
            keys = PeerKeys(source, self.runs_from(source), kept[2 * step - 2], kept[2 * step - 1])
            grad_k, grad_v = stat_zeros(keys.k_TMD), stat_zeros(keys.v_TMD)
            differentiate_blocks_(
                grads.q_RND, grad_k, grad_v, joint.grad_RND, joint.q_RND, keys.k_TMD, keys.v_TMD, joint.out_RND,
                joint.lse_RN, blocks=call.blocks.visible(call.rank, keys.runs), scale=call.scale, kernel=call.kernel,
            )  # fmt: skip
            return grad_k, grad_v

        steps = enumerate(call.steps, start=1)
        found = ((step, differentiated(step, source)) for step, (source, _) in steps)
        self.return_gradients(found, grads.k_TMD, grads.v_TMD)


class _BlockQueries:
    """Brings slots to the keys that they see."""

    def __init__(self, call: _Call):
        self.call = call

    def _exchange(
        self, target: int, tensors: Sequence[torch.Tensor], source: int, specs: Sequence[Spec], what: str
    ) -> Delivery:
        return self.call.shard.transport.exchange(
            [(target, tensors)], [(source, specs)], layout_id=self.call.blocks.blocks_id, device=tensors[0].device, what=what
        )[0]  # fmt: skip

    def _ask(self, tensors: Sequence[torch.Tensor], what: str) -> list[Delivery]:
        """Sends every rank the rows that see its keys; the same of the others comes, nearest first."""
        call, asked = self.call, []
        for source, target in call.steps:
            wanted, num_rows = call.blocks.rows(call.rank, target), num_in(call.blocks.rows(source, call.rank))
            parts = [take(x, wanted) for x in tensors]
            specs = [Spec((num_rows, *x.shape[1:]), x.dtype) for x in tensors]
            asked.append(self._exchange(target, parts, source, specs, what))
        return asked

    def _answer(self, source: int, target: int, tensors: Sequence[torch.Tensor], what: str) -> Delivery:
        """Returns to `source` what was found for its rows; `target` does the same for this rank's."""
        num_rows = num_in(self.call.blocks.rows(self.call.rank, target))
        specs = [Spec((num_rows, *x.shape[1:]), x.dtype) for x in tensors]
        return self._exchange(source, tensors, target, specs, what)

    def _visitors(self, source: int) -> tuple[Block, ...]:
        """How the rows that came from a rank see this rank's tokens."""
        blocks = self.call.blocks
        starts, offsets, offset = [], [], 0
        for start, end in blocks.rows(source, self.call.rank):
            starts.append(start)
            offsets.append(offset - start)
            offset += end - start
        shifted = []
        for block in blocks.between(source, self.call.rank):
            shift = offsets[bisect.bisect_right(starts, block.query_start) - 1]
            rows = block.query_start + shift, block.query_end + shift
            shifted.append(Block(*rows, block.key_start, block.key_end, block.shape))
        return tuple(shifted)

    def attend_(
        self,
        out_RND: torch.Tensor,
        lse_RN: torch.Tensor,
        q_RND: torch.Tensor,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Merges the parts that other ranks find for this rank's rows and returns their queries, for [`differentiate_`]."""
        call, visiting, answers = self.call, [], []
        asked = self._ask([q_RND], "queries")
        for (source, target), delivery in zip(call.steps, asked):
            (q,) = delivery.wait()
            visiting.append(q)
            out, lse = empty_part(q)
            attend_blocks_(
                out, lse, q, k_TMD, v_TMD, blocks=self._visitors(source), scale=call.scale, kernel=call.kernel
            )
            answers.append(self._answer(source, target, [out, lse], "parts of a softmax"))
        for (_, target), delivery in zip(call.steps, answers):
            out, lse = delivery.wait()
            rows = call.blocks.rows(call.rank, target)
            for (part, (start, end)), (part_lse, _) in zip(split(out, rows), split(lse, rows)):
                merge_(out_RND[start:end], lse_RN[start:end], part, part_lse)
        return visiting

    def differentiate_(
        self, grads: _Gradients, joint: _Joint, k_TMD: torch.Tensor, v_TMD: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> None:
        call, answers = self.call, []
        asked = self._ask(joint.tensors, "gradients of joint outputs")
        for (source, target), delivery, q in zip(call.steps, asked, kept):
            grad, product, lse = delivery.wait()
            grad_q, out = stat_zeros(q), output_with_product(product, grad)
            differentiate_blocks_(
                grad_q, grads.k_TMD, grads.v_TMD, grad, q, k_TMD, v_TMD, out, lse, blocks=self._visitors(source),
                scale=call.scale, kernel=call.kernel,
            )  # fmt: skip
            answers.append(self._answer(source, target, [grad_q], "gradients of queries"))
        for (_, target), delivery in zip(call.steps, answers):
            (grad_q,) = delivery.wait()
            for part, (start, end) in split(grad_q, call.blocks.rows(call.rank, target)):
                grads.q_RND[start:end] += part


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_ASND: torch.Tensor,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
        block_k_ASMD: torch.Tensor,
        block_v_ASMD: torch.Tensor,
        call: _Call,
        route: _BlockKeys | _BlockQueries,
    ) -> torch.Tensor:
        q_RND = q_ASND.flatten(0, 1)
        out, lse = empty_part(q_RND)
        own = call.blocks.between(call.rank, call.rank)
        attend_blocks_(out, lse, q_RND, k_TMD, v_TMD, blocks=own, scale=call.scale, kernel=call.kernel)
        attend_each_(
            out.view(q_ASND.shape), lse.view(q_ASND.shape[:3]), q_ASND, block_k_ASMD, block_v_ASMD,
            is_causal=call.is_causal, scale=call.scale, kernel=call.kernel,
        )  # fmt: skip
        kept = route.attend_(out, lse, q_RND, k_TMD, v_TMD)
        out = out.to(q_ASND.dtype).view(q_ASND.shape)
        ctx.save_for_backward(q_ASND, k_TMD, v_TMD, block_k_ASMD, block_v_ASMD, out, lse, *kept)
        ctx.call, ctx.route = call, route
        return out

    @staticmethod
    def backward(ctx: Any, grad_ASND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_ASND, k_TMD, v_TMD, block_k, block_v, out_ASND, lse, *kept = ctx.saved_tensors
        call: _Call = ctx.call
        grads = _Gradients(stat_zeros(q_ASND.flatten(0, 1)), stat_zeros(k_TMD), stat_zeros(v_TMD))
        joint = _Joint(q_ASND.flatten(0, 1), out_ASND.flatten(0, 1), lse, grad_ASND.flatten(0, 1))
        own = call.blocks.between(call.rank, call.rank)
        differentiate_blocks_(
            grads.q_RND, grads.k_TMD, grads.v_TMD, joint.grad_RND, joint.q_RND, k_TMD, v_TMD, joint.out_RND, lse,
            blocks=own, scale=call.scale, kernel=call.kernel,
        )  # fmt: skip
        grad_q = grads.q_RND.view(q_ASND.shape)
        grad_block_k, grad_block_v = differentiate_each_(
            grad_q, grad_ASND, q_ASND, block_k, block_v, out_ASND, lse.view(q_ASND.shape[:3]),
            is_causal=call.is_causal, scale=call.scale, kernel=call.kernel,
        )  # fmt: skip
        ctx.route.differentiate_(grads, joint, k_TMD, v_TMD, kept)
        return (
            grad_q.to(q_ASND.dtype), grads.k_TMD.to(k_TMD.dtype), grads.v_TMD.to(v_TMD.dtype), grad_block_k, grad_block_v,
            None, None,
        )  # fmt: skip


def _check_shapes(blocks: DraftBlocks, shard: Shard, tensors: dict[str, torch.Tensor]) -> None:
    num_blocks, num_tokens = len(blocks.owned(shard.cp_rank)), shard.num_tokens
    q, k = tensors["q_ASND"], tensors["k_TMD"]
    if q.dim() != 4 or k.dim() != 3 or q.shape[2] % max(k.shape[1], 1):
        raise ValueError(
            f"q_ASND {tuple(q.shape)} must be (blocks, slots, heads, head_dim) and k_TMD {tuple(k.shape)} (tokens, kv_heads, "
            "head_dim), with a multiple of kv_heads heads."
        )
    in_blocks, in_trunk = (num_blocks, blocks.num_slots), (num_tokens,)
    wanted = {
        "q_ASND": (*in_blocks, *q.shape[2:]), "k_TMD": (*in_trunk, k.shape[1], q.shape[3]),
        "v_TMD": (*in_trunk, k.shape[1], q.shape[3]), "block_k_ASMD": (*in_blocks, k.shape[1], q.shape[3]),
        "block_v_ASMD": (*in_blocks, k.shape[1], q.shape[3]),
    }  # fmt: skip
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} (context-parallel rank {shard.cp_rank} owns {num_blocks} anchors and "
                f"{num_tokens} tokens), got {tuple(tensors[name].shape)}."
            )


def block_attention(
    q_ASND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    *,
    block_k_ASMD: torch.Tensor,
    block_v_ASMD: torch.Tensor,
    blocks: DraftBlocks,
    shard: Shard,
    scale: float,
    is_causal: bool = False,
    route: str = "auto",
    kernel: str = "aten",
) -> torch.Tensor:
    """Joint attention of every slot over the trunk before its anchor and its own block. Collective, backward included.

    A rank without anchors or tokens calls it too, with empty tensors, and runs the backward.

    Args:
        q_ASND (`torch.Tensor` of shape `(blocks, slots, heads, head_dim)`): of the blocks that this rank holds, in the
            order of `blocks.owned(shard.cp_rank)`.
        k_TMD, v_TMD (`torch.Tensor` of shape `(tokens, kv_heads, head_dim)`): of this rank's tokens, not expanded.
        block_k_ASMD, block_v_ASMD (`torch.Tensor` of shape `(blocks, slots, kv_heads, head_dim)`): of the slots.
        blocks ([`DraftBlocks`]): where the blocks hang.
        shard ([`Shard`]): which tokens this rank holds.
        scale (`float`): factor of the scores, usually `head_dim ** -0.5`.
        is_causal (`bool`): whether a slot sees only itself and earlier ones of its block.
        route (`str`): `"keys"`, `"queries"`, or `"auto"` for the one that sends less (see [`cheaper_route`]).
        kernel (`str`): see `kernels`.

    Returns:
        `torch.Tensor` of shape `(blocks, slots, heads, head_dim)` in the dtype of `q_ASND`.
    """
    if route not in ROUTES:
        raise ValueError(f"route must be one of {ROUTES}, got {route!r}.")
    if blocks.layout != shard.layout:
        raise ValueError("blocks were planned for another layout than the shard's; build both from one PackedLayout.")
    check_kernel(kernel, q_ASND)
    names = ("q_ASND", "k_TMD", "v_TMD", "block_k_ASMD", "block_v_ASMD")
    tensors = (q_ASND, k_TMD, v_TMD, block_k_ASMD, block_v_ASMD)
    _check_shapes(blocks, shard, dict(zip(names, tensors)))
    if route == "auto":
        route = cheaper_route(
            blocks,
            num_heads=q_ASND.shape[2],
            num_kv_heads=k_TMD.shape[1],
            head_dim=q_ASND.shape[3],
            dtype=q_ASND.dtype,
        )
    call = _Call(blocks, shard, scale, is_causal, kernel)
    return _BlockAttention.apply(*tensors, call, _BlockKeys(call) if route == "keys" else _BlockQueries(call))
