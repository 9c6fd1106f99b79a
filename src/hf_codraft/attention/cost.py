"""What sharded attention costs, in closed form: bytes and messages sent, memory, floating-point operations.

Everything follows from which tokens of one rank some token of another sees ([`Visibility`]); no tensor is made, so that
rows of millions of tokens can be weighed. Bytes and messages are exactly what a transport counts, headers included.

With T_n tokens on rank n, W_nm tokens of rank m that rank n sees, D passes, and k, g bytes a token of keys and values and
of their gradients, rank n sends in forward and backward, apart from 16 bytes a message:

| scheme | forward | backward |
|---|---|---|
| ring, every pass | D (sum_m T_m - T_(n+1)) k | as forward, and D (sum_m T_m) g |
| all-gather, every pass | D (N - 1) T_n k | as forward, and D (sum_m T_m - T_n) g |
| kept | (sum_m W_mn) k | (sum_m W_nm) g |

A kept trunk that keeps only its nearest ranks sends for the others as often as there are passes (times tiles).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_codraft.attention.block_draft import BlockTraffic, DraftBlocks, block_traffic
from hf_codraft.attention.blocks import needed_keys, num_in, visible_blocks
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.merge import stat_dtype
from hf_codraft.attention.transport import Sent

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # of one pair, head and channel: 2 matrix products forward; 1 + 4 backward


@dataclass(frozen=True)
class Heads:
    """Sizes of one attention layer; made by whoever asks for a cost.

    Args:
        num_heads, num_kv_heads, head_dim (`int`): of queries, of keys and values, and their size.
        dtype (`torch.dtype`): of queries, keys and values; gradients of keys and values travel in `stat_dtype`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def key_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of one token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.stat_bytes

    @property
    def stat_bytes(self) -> int:
        return stat_dtype(self.dtype).itemsize

    @property
    def expanded(self) -> "Heads":
        """With keys and values repeated for every query head."""
        return Heads(self.num_heads, self.num_heads, self.head_dim, self.dtype)

    def saved_bytes(self, num_queries: int, num_passes: int) -> int:
        """What autograd holds of `num_queries` until their backward: in every pass their queries, outputs and
        log-sum-exps, and the keys and values of every branch."""
        channels = self.num_heads * self.head_dim
        one_pass = 2 * channels * self.dtype.itemsize + self.num_heads * self.stat_bytes
        return num_queries * (num_passes * one_pass + (num_passes - 1) * self.key_bytes)


@dataclass(frozen=True)
class RankCost:
    """What one rank pays for the attention of one layer; made by the functions below, read by benchmarks and docs.

    Args:
        forward, backward ([`Sent`]): messages.
        remote_bytes (`int`): other ranks' keys and values (or queries that visit) and their gradients that the backward
            works on at one time, at most. What travels meanwhile comes on top: on the ring, the next shard's; on the direct
            route, the next rank's keys and the gradients of two ranks, both those that leave and those that come home; of
            block drafts, everything that one backward sends and gets.
        saved_bytes (`int`): see [`Heads.saved_bytes`]. The trunk's own keys and values, which autograd holds too, come on
            top, and so do those of other ranks that are kept (they are in `remote_bytes`).
        num_pairs (`int`): pairs of a query and a trunk or branch key, over all passes.
        forward_flops, backward_flops (`int`): of those pairs; the backward computes the scores anew.
    """

    forward: Sent
    backward: Sent
    remote_bytes: int
    saved_bytes: int
    num_pairs: int
    forward_flops: int
    backward_flops: int

    @property
    def sent(self) -> Sent:
        return self.forward + self.backward


class Visibility:
    """How many tokens and pairs of every two ranks' tokens see each other: `[query rank][key rank]`.

    Args:
        layout ([`PackedLayout`]): of the row.
        window (`int`, *optional*): sliding window, in tokens.
    """

    def __init__(self, layout: PackedLayout, *, window: int | None = None):
        self.layout, self.world = layout, layout.world
        self.num_local = [layout.num_local(rank) for rank in range(layout.world)]
        self.num_needed: list[list[int]] = []
        self.num_pairs: list[list[int]] = []
        for query_rank in range(layout.world):
            between = [
                visible_blocks(layout, layout.runs(query_rank), layout.runs(key_rank), window=window)
                for key_rank in range(layout.world)
            ]
            self.num_needed.append([num_in(needed_keys(blocks)) for blocks in between])
            self.num_pairs.append([sum(block.num_pairs for block in blocks) for blocks in between])

    @property
    def pairs(self) -> list[int]:
        """Pairs of every rank's queries, one pass."""
        return [sum(row) for row in self.num_pairs]

    @property
    def num_received(self) -> list[int]:
        """Tokens whose keys come to every rank on the direct route."""
        return [sum(row) - row[rank] for rank, row in enumerate(self.num_needed)]


def _parcels(token_counts: Sequence[int], token_bytes: int) -> Sent:
    return sum((Sent.parcel(count * token_bytes) for count in token_counts), Sent())


def _cost(
    visible: Visibility,
    rank: int,
    heads: Heads,
    num_passes: int,
    *,
    forward: Sent,
    backward: Sent,
    remote_bytes: int,
    num_queries: int,
) -> RankCost:
    num_branch_pairs = visible.num_local[rank] * num_passes * (num_passes - 1) // 2
    num_pairs = visible.pairs[rank] * num_passes + num_branch_pairs
    flops = num_pairs * heads.num_heads * heads.head_dim
    return RankCost(
        forward, backward, remote_bytes, heads.saved_bytes(num_queries, num_passes), num_pairs, FORWARD_FLOPS * flops,
        BACKWARD_FLOPS * flops,
    )  # fmt: skip


def ring_cost(visible: Visibility, heads: Heads, *, num_passes: int = 1) -> tuple[RankCost, ...]:
    """Of every rank, where whole shards circulate in every pass (`Trunk(route="ring")`).

    Args:
        visible ([`Visibility`]): of the row.
        heads ([`Heads`]): of the layer; `heads.expanded` for a scheme that repeats keys before it sends them.
        num_passes (`int`): passes of the draft; 1 for a policy's layer.
    """
    costs = []
    for rank in range(visible.world):
        # hop h passes on the shard that came from h ranks behind
        shards = [visible.num_local[(rank - hop) % visible.world] for hop in range(visible.world)]
        keys = _parcels(shards[:-1], heads.key_bytes)
        gradients = _parcels(shards, heads.gradient_bytes) if visible.world > 1 else Sent()
        visiting = max(shards[1:], default=0) * (heads.key_bytes + heads.gradient_bytes)
        costs.append(
            _cost(
                visible,
                rank,
                heads,
                num_passes,
                forward=keys.times(num_passes),
                backward=(keys + gradients).times(num_passes),
                remote_bytes=visiting,
                num_queries=shards[0],
            )
        )
    return tuple(costs)


def gathered_cost(visible: Visibility, heads: Heads, *, num_passes: int = 1) -> tuple[RankCost, ...]:
    """Of every rank, where each pass gathers all shards, forward and backward, and sends gradients to their owners."""
    costs = []
    for rank, num_own in enumerate(visible.num_local):
        others = [num for other, num in enumerate(visible.num_local) if other != rank]
        keys = _parcels([num_own] * len(others), heads.key_bytes)
        gradients = _parcels(others, heads.gradient_bytes)
        costs.append(
            _cost(
                visible,
                rank,
                heads,
                num_passes,
                forward=keys.times(num_passes),
                backward=(keys + gradients).times(num_passes),
                remote_bytes=sum(others) * (heads.key_bytes + heads.gradient_bytes),
                num_queries=num_own,
            )
        )
    return tuple(costs)


def kept_cost(
    visible: Visibility,
    heads: Heads,
    *,
    num_passes: int = 1,
    num_kept: int | None = None,
    tile_size: int | None = None,
) -> tuple[RankCost, ...]:
    """Of every rank, where a trunk is exchanged once and kept (`Trunk(route="direct")`), tiled or not.

    Args:
        visible, heads, num_passes: see [`ring_cost`].
        num_kept (`int`, *optional*): of how many other ranks keys are kept; the others' come anew in every pass.
        tile_size (`int`, *optional*): queries at a time (`tiled_loss`, all tokens querying): what is saved is that of one
            tile, and a rank whose keys are not kept sends them for every tile of every pass.
    """
    world = visible.world
    kept = world - 1 if num_kept is None else min(max(num_kept, 0), world - 1)
    num_rounds, counting = 1, Sent()
    if tile_size is not None and kept < world - 1:
        num_rounds = max(*(math.ceil(num / tile_size) for num in visible.num_local), 1)
        counting = Sent.parcel(4).times(world - 1)  # ranks tell each other their number of tiles
    costs = []
    for rank, num_own in enumerate(visible.num_local):
        behind, ahead = ([(rank + sign * step) % world for step in range(1, world)] for sign in (-1, 1))
        sent_keys = [visible.num_needed[other][rank] for other in ahead]
        received = [visible.num_needed[rank][other] for other in behind]
        streamed = _parcels(sent_keys[kept:], heads.key_bytes).times(num_passes * num_rounds)
        streamed_back = _parcels(received[kept:], heads.gradient_bytes).times(num_passes * num_rounds)
        both = heads.key_bytes + heads.gradient_bytes
        costs.append(
            _cost(
                visible,
                rank,
                heads,
                num_passes,
                forward=_parcels(sent_keys[:kept], heads.key_bytes) + streamed + counting,
                backward=_parcels(received[:kept], heads.gradient_bytes) + streamed + streamed_back,
                remote_bytes=(sum(received[:kept]) + max(received[kept:], default=0)) * both,
                num_queries=num_own if tile_size is None else min(tile_size, num_own),
            )
        )
    return tuple(costs)


def block_cost(blocks: DraftBlocks, route: str, heads: Heads, *, is_causal: bool = False) -> tuple[RankCost, ...]:
    """Of every rank, for one call of `block_attention`.

    Args:
        blocks ([`DraftBlocks`]): where the blocks hang.
        route (`str`): `"keys"` or `"queries"`.
        heads ([`Heads`]): of the layer.
        is_causal (`bool`): whether a slot sees only itself and earlier ones of its block.
    """
    if route not in ("keys", "queries"):
        raise ValueError(
            f"route must be 'keys' or 'queries', got {route!r}; see block_draft.cheaper_route for 'auto'."
        )
    traffic = block_traffic(
        blocks,
        route,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=heads.dtype,
    )
    return tuple(_block_cost(blocks, route, heads, rank, is_causal, traffic) for rank in range(blocks.layout.world))


def _block_cost(
    blocks: DraftBlocks, route: str, heads: Heads, rank: int, is_causal: bool, traffic: BlockTraffic
) -> RankCost:
    num_slots, num_rows = blocks.num_slots, len(blocks.owned(rank)) * blocks.num_slots
    others = [other for other in range(blocks.layout.world) if other != rank]
    num_channels = heads.num_heads * heads.head_dim
    if route == "keys":
        num_asked = [num_in(blocks.keys(rank, other)) for other in others]
        # all keys stay for the backward, which makes their gradients one rank after another
        remote_bytes = sum(num_asked) * heads.key_bytes + max(num_asked, default=0) * heads.gradient_bytes
        served = [(rank, other) for other in range(blocks.layout.world)]
    else:
        visiting = [num_in(blocks.rows(other, rank)) for other in others]
        sizes = heads.dtype.itemsize, heads.stat_bytes
        remote_bytes = num_channels * (sum(visiting) * sizes[0] + max(visiting, default=0) * sizes[1])
        served = [(other, rank) for other in range(blocks.layout.world)]
    own = num_slots * (num_slots + 1) // 2 if is_causal else num_slots**2
    num_pairs = sum(block.num_pairs for pair in served for block in blocks.between(*pair))
    num_pairs += len(blocks.owned(rank)) * own
    flops = num_pairs * num_channels
    # the keys and values of the slots too
    saved_bytes = heads.saved_bytes(num_rows, 1) + num_rows * heads.key_bytes
    return RankCost(
        traffic.forward[rank], traffic.backward[rank], remote_bytes, saved_bytes, num_pairs, FORWARD_FLOPS * flops,
        BACKWARD_FLOPS * flops,
    )  # fmt: skip
