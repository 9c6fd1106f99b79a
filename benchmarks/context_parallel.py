"""What sharded attention costs a draft of one layer: bytes, messages, memory, work, CPU time, and its error.

    python benchmarks/context_parallel.py --check                     # all of it, on CPU
    python benchmarks/context_parallel.py --quick                     # shows that it runs, in seconds
    python benchmarks/context_parallel.py --tables docs/context_parallel.md    # the computed tables alone

One layer of an EAGLE-3 kind (norm, q, k, v, o, head with cross-entropy) runs D passes over a packed row that N ranks
share: processes joined by gloo, or threads of one process. Schemes:

- `ring`: whole shards circulate in every pass, forward and backward (arXiv 2609.07108; zigzag plan);
- `all-gather`: every pass gathers all shards, its backward too, and sends gradients to their owners (zigzag plan);
- `expanded ring`: keys are repeated for every query head and then circulate (zigzag plan);
- `kept`: the trunk is exchanged once for all passes, its gradients once (balanced plan);
- `tiled`: kept, and all passes, loss and backward of one tile of positions at a time (balanced plan).

All but `tiled` are an ordinary autograd graph over all passes, with logits of every pass and token, as public trainers
have it; `kept, chunked loss` recomputes logits in the backward, 512 tokens at a time. Block drafts are measured with
keys and with queries travelling (zigzag plan). Ranks that are threads of one process are slow to watch: they skip a
packing and the chunked loss, which sends what `kept` sends.

- bytes and messages: what the transport counted, and the same in closed form (`attention.cost`), which must be equal.
- saved bytes: most that autograd's saved tensors held at one time, weights left out.
- peak bytes: most that tensors held at one time, inputs included, weights not; what a kernel allocates and frees
  inside of one operator is not seen. Slope: growth between two lengths, per token of a rank. Of it, *beyond x, own KV*
  is left without the hidden states and without K, V, dK, dV of the rank's own tokens, *and others' KV* without those of
  other ranks' tokens too. (Hidden states get no gradient here, so none is subtracted.) The aim of 3 KiB "beyond inputs
  and their gradients" is honest with own tokens alone: keys kept of other ranks are what sharding adds, and grow with N.
- CPU-seconds: of the process (gloo's threads included), best of the repeats; other load on the machine adds to them.
  Ranks that are threads run at the same time and count their own thread's: the work alone, without any network.
- work: pairs of a query and a key that a rank computes, the most over the mean (computed).
- error: loss and every gradient against a dense model in fp64, as the norm of the difference over the norm; of block
  drafts too, whose loss is the sum of their outputs' squares.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import pickle
import platform
import random
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hf_codraft.attention.block_draft import DraftBlocks, block_attention
from hf_codraft.attention.cost import Heads, RankCost, Visibility, block_cost, gathered_cost, kept_cost, ring_cost
from hf_codraft.attention.exchange import PeerKeys
from hf_codraft.attention.kernels import attend_blocks_, differentiate_blocks_, expand_heads
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.merge import stat_dtype
from hf_codraft.attention.plans import balanced_plan, segment_zigzag_plan, zigzag_plan
from hf_codraft.attention.reference import reference_attention, visible_mask
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.tiled import TiledPasses, tiled_loss
from hf_codraft.attention.transport import GroupTransport, LocalTransport, Spec, Transport, run_local_ranks
from hf_codraft.attention.trunk import Trunk

PUBLISHED = ("ring", "all-gather", "expanded ring")
SCHEMES = (*PUBLISHED, "kept", "kept, chunked loss", "tiled")
LOCAL_PACKINGS = ("one long", "long-tailed")
LOCAL_TIMED = ("ring", "kept", "tiled")
BLOCK_ROUTES = ("keys", "queries")
BLOCK_PACKINGS = ("one long", "long-tailed")
CHUNK = 512
SLOPE_AIM = 3 * 1024
OWN_KV_WORLD = 2  # with more ranks, other ranks' keys alone are more than the aim (a note says how much)
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Sizes:
    """Of the measured layer."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_passes: int
    tile: int

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, torch.float32)


@dataclass(frozen=True)
class Scale:
    """How much is measured; tokens are of the whole row unless they say otherwise.

    Args:
        sizes ([`Sizes`]): of the layer.
        worlds, local_world (`tuple[int, ...]`, `int`): gloo processes, and ranks of one process.
        lengths (`tuple[int, int]`): rows whose traffic is measured, and whose memory gives the slope.
        memory_lengths (`tuple[int, int]`): tokens of a rank where tiled and untiled memory are compared.
        document (`int`): length of the documents in those rows.
        timed_length, timed_passes, repeats (`int`): of the CPU time.
        anchors, slots (`int`): of the block draft.
        block_lengths (`tuple[int, int]`): rows that it hangs from.
        plan_length (`int`): rows whose plans are weighed.
    """

    sizes: Sizes
    worlds: tuple[int, ...]
    local_world: int
    lengths: tuple[int, int]
    memory_lengths: tuple[int, int]
    document: int
    timed_length: int
    timed_passes: int
    repeats: int
    anchors: int
    slots: int
    block_lengths: tuple[int, int]
    plan_length: int
    error_length: int = 96


FULL = Scale(
    Sizes(hidden=576, num_heads=9, num_kv_heads=3, head_dim=64, vocab=2000, num_passes=7, tile=128),
    worlds=(1, 2, 4), local_world=8, lengths=(512, 1536), memory_lengths=(4096, 8192), document=1024, timed_length=8192,
    timed_passes=3, repeats=1, anchors=64, slots=16, block_lengths=(4096, 16384), plan_length=262144,
)  # fmt: skip
QUICK = Scale(
    Sizes(hidden=48, num_heads=6, num_kv_heads=2, head_dim=8, vocab=96, num_passes=3, tile=16),
    worlds=(1, 2), local_world=4, lengths=(64, 128), memory_lengths=(128, 256), document=64, timed_length=256,
    timed_passes=2, repeats=1, anchors=8, slots=4, block_lengths=(256, 512), plan_length=4096,
)  # fmt: skip


def packings(num_tokens: int, *, seed: int = 1) -> dict[str, list[int]]:
    """Segment lengths of three kinds of rows, each of `num_tokens` tokens."""
    short = max(num_tokens // 32, 1)
    draw = random.Random(seed)
    tailed: list[int] = []
    while sum(tailed) < num_tokens:  # log-normal: the longest is tens of times the median
        drawn = max(int(draw.lognormvariate(0.0, 1.3) * num_tokens / 64), 1)
        tailed.append(min(drawn, num_tokens - sum(tailed)))
    return {
        "one long": [num_tokens],
        "long and short": [num_tokens - 8 * short] + [short] * 8,
        "long-tailed": tailed,
    }


def plan(scheme: str, lengths: list[int], world: int) -> PackedLayout:
    cu_seqlens = PackedLayout.from_lengths(lengths).cu_seqlens
    return (zigzag_plan if scheme in PUBLISHED else balanced_plan)(cu_seqlens, world)


# What is measured with


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators made and that are still alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.num_bytes += storage.nbytes()
        self.peak = max(self.peak, self.num_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result


class SavedBytes:
    """Bytes of the storages that autograd's saved tensors hold, weights left out, and the most there were."""

    def __init__(self, weights: list[torch.Tensor]):
        self.num_bytes = self.peak = 0
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._holders: dict[int, int] = {}

    class _Held:
        def __init__(self, tensor: torch.Tensor):
            self.tensor = tensor.detach()  # the tensor itself would keep its own graph alive

    def _pack(self, tensor: torch.Tensor) -> "SavedBytes._Held":
        held, storage = self._Held(tensor), tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer not in self._weights and size:
            self._holders[pointer] = self._holders.get(pointer, 0) + 1
            if self._holders[pointer] == 1:
                self.num_bytes += size
                self.peak = max(self.peak, self.num_bytes)
            weakref.finalize(held, self._release, pointer, size)
        return held

    def _release(self, pointer: int, size: int) -> None:
        self._holders[pointer] -= 1
        if not self._holders[pointer]:
            self.num_bytes -= size

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
            yield


# What is measured


class GatheredTrunk(Trunk):
    """Every pass gathers all shards, forward and backward, and returns each shard's gradients to its owner."""

    def __init__(self, k_TMD: torch.Tensor, v_TMD: torch.Tensor, *, shard: Shard, scale: float):
        super().__init__(k_TMD, v_TMD, shard=shard, scale=scale, num_kept=0)
        wide = stat_dtype(k_TMD.dtype)
        self._grads = [torch.zeros_like(x, dtype=wide) for x in (self.k_TMD, self.v_TMD)]

    def _exchange(self, sends: list, shards: list[int], dtype: torch.dtype) -> list[list[torch.Tensor]]:
        layout, shape = self.shard.layout, self.k_TMD.shape[1:]
        specs = [[Spec((layout.num_local(rank), *shape), dtype)] * 2 for rank in shards]
        deliveries = self.shard.transport.exchange(
            list(zip(self.shard.peers, sends)), list(zip(self.shard.peers, specs)), layout_id=layout.layout_id,
            device=self.k_TMD.device, what="a gathered shard",
        )  # fmt: skip
        return [delivery.wait() for delivery in deliveries]

    def _all_keys(self) -> list[PeerKeys]:
        own = [self.k_TMD, self.v_TMD]
        arrived = self._exchange([own for _ in self.shard.peers], self.shard.peers, self.k_TMD.dtype)
        peers = [PeerKeys(rank, self.shard.layout.runs(rank), k, v) for rank, (k, v) in zip(self.shard.peers, arrived)]
        return [self.exchange.own(*own), *peers]

    def attend_(self, out_AND, lse_AN, q_AND, queries) -> None:
        for keys in self._all_keys():
            attend_blocks_(
                out_AND, lse_AN, q_AND, keys.k_TMD, keys.v_TMD, blocks=queries.blocks(keys, True), scale=self.scale
            )

    def differentiate_(self, grad_q_AND, grad_AND, q_AND, out_AND, lse_AN, queries) -> None:
        found = []
        for keys in self._all_keys():
            grads = [torch.zeros_like(x, dtype=stat_dtype(x.dtype)) for x in (keys.k_TMD, keys.v_TMD)]
            differentiate_blocks_(
                grad_q_AND, *grads, grad_AND, q_AND, keys.k_TMD, keys.v_TMD, out_AND, lse_AN,
                blocks=queries.blocks(keys, True), scale=self.scale,
            )  # fmt: skip
            found.append(grads)
        own, *others = found
        arrived = self._exchange(others, [self.shard.cp_rank] * len(others), own[0].dtype)
        for grads in (own, *arrived):
            for total, grad in zip(self._grads, grads):
                total += grad

    def take_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._grads[0], self._grads[1]


class DraftLayer(nn.Module):
    """A draft of one layer; pass d reads the hidden states of pass d - 1."""

    def __init__(self, sizes: Sizes, *, seed: int = 0):
        super().__init__()
        self.sizes = sizes
        inner, outer = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.q = nn.Linear(sizes.hidden, inner, bias=False)
        self.k, self.v = (nn.Linear(sizes.hidden, outer, bias=False) for _ in range(2))
        self.o = nn.Linear(inner, sizes.hidden, bias=False)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)  # torch's global one is shared by ranks that are threads
        with torch.no_grad():
            for weight in (layer.weight for layer in (self.q, self.k, self.v, self.o, self.head)):
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)

    def keys(self, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(hidden_TH)
        k, v = (layer(normed).unflatten(-1, (-1, self.sizes.head_dim)) for layer in (self.k, self.v))
        return k, v

    def _loss(self, hidden_AH: torch.Tensor, labels_A: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden_AH), labels_A, reduction="sum")

    def passes(
        self,
        hidden_AH: torch.Tensor,
        labels_DA: torch.Tensor,
        attend: Callable,
        *,
        is_chunked: bool = False,
        expands: bool = False,
    ) -> torch.Tensor:
        """Loss summed over all passes; `attend(q, branch_k, branch_v)`."""
        branch_k: list[torch.Tensor] = []
        branch_v: list[torch.Tensor] = []
        loss = hidden_AH.new_zeros(())
        for number, labels_A in enumerate(labels_DA):
            if number:
                own = self.keys(hidden_AH)
                own = [expand_heads(x, self.sizes.num_heads) for x in own] if expands else own
                branch_k.append(own[0])
                branch_v.append(own[1])
            q_AND = self.q(self.norm(hidden_AH)).unflatten(-1, (-1, self.sizes.head_dim))
            hidden_AH = hidden_AH + self.o(attend(q_AND, branch_k, branch_v).flatten(1))
            if not is_chunked:
                loss = loss + self._loss(hidden_AH, labels_A)
                continue
            for rows, labels in zip(hidden_AH.split(CHUNK), labels_A.split(CHUNK)):
                loss = loss + checkpoint(self._loss, rows, labels, use_reentrant=False)
        return loss


def untiled_loss(layer: DraftLayer, x_TH: torch.Tensor, labels_DT: torch.Tensor, shard: Shard, scheme: str):
    sizes, expands = layer.sizes, scheme == "expanded ring"
    scale = sizes.head_dim**-0.5
    k, v = layer.keys(x_TH)
    if expands:
        k, v = expand_heads(k, sizes.num_heads), expand_heads(v, sizes.num_heads)
    if scheme == "all-gather":
        trunk: Trunk = GatheredTrunk(k, v, shard=shard, scale=scale)
    else:
        trunk = Trunk(k, v, shard=shard, scale=scale, route="ring" if scheme in PUBLISHED else "direct")
    queries = trunk.queries()

    def attend(q, branch_k, branch_v):
        return trunk.attend(q, queries, branch_k=branch_k, branch_v=branch_v)

    return layer.passes(x_TH, labels_DT, attend, is_chunked=scheme.endswith("chunked loss"), expands=expands)


def tiled(layer: DraftLayer, x_TH: torch.Tensor, labels_DT: torch.Tensor, shard: Shard) -> torch.Tensor:
    def tile_loss(trunk, queries, tile):
        def attend(q, branch_k, branch_v):
            return trunk.attend(q, queries, branch_k=branch_k, branch_v=branch_v)

        return layer.passes(x_TH[tile], labels_DT[:, tile], attend), torch.zeros(1)

    passes = TiledPasses(
        lambda tokens: layer.keys(x_TH[tokens]), tile_loss, shard, torch.arange(shard.num_tokens), layer.sizes.tile,
        layer.sizes.head_dim**-0.5,
    )  # fmt: skip
    return tiled_loss(passes, list(layer.parameters()))[0]


def loss_of(layer: DraftLayer, x_TH: torch.Tensor, labels_DT: torch.Tensor, shard: Shard, scheme: str) -> torch.Tensor:
    if scheme == "tiled":
        return tiled(layer, x_TH, labels_DT, shard)
    return untiled_loss(layer, x_TH, labels_DT, shard, scheme)


def dense_loss(layer: DraftLayer, x_TH: torch.Tensor, labels_DT: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """The same from one dense mask and explicit probabilities: the oracle."""
    k, v = layer.keys(x_TH)
    mask = visible_mask(layout, torch.arange(layout.num_tokens))

    def attend(q, branch_k, branch_v):
        scale = layer.sizes.head_dim**-0.5
        return reference_attention(q, k, v, mask, scale=scale, branch_k=branch_k, branch_v=branch_v)

    return layer.passes(x_TH, labels_DT, attend)


def inputs(sizes: Sizes, num_tokens: int, num_passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same hidden states and labels on every rank, of a whole row."""
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(num_tokens, sizes.hidden, generator=generator)
    return x_TH, torch.randint(sizes.vocab, (num_passes, num_tokens), generator=generator)


def step(
    layer: DraftLayer, lengths: list[int], scheme: str, transport: Transport, *, num_passes: int, layout: PackedLayout
) -> dict:
    """Forward and backward of this rank's part; returns what was sent in each, and the loss."""
    shard = Shard(layout, transport.rank, transport)
    x_TH, labels_DT = inputs(layer.sizes, sum(lengths), num_passes)
    x_TH, labels_DT = layout.shard(x_TH, transport.rank), layout.shard(labels_DT, transport.rank, dim=1)
    layer.zero_grad()
    transport.traffic.reset()
    loss = loss_of(layer, x_TH, labels_DT, shard, scheme)
    forward = asdict(transport.traffic)
    loss.backward()
    total = asdict(transport.traffic)
    return {
        "loss": loss.item(),
        "forward_bytes": forward["num_bytes"], "forward_messages": forward["num_messages"],
        "bytes": total["num_bytes"], "messages": total["num_messages"], "tokens": shard.num_tokens,
    }  # fmt: skip


def watched_step(layer: DraftLayer, lengths: list[int], scheme: str, transport: Transport, layout: PackedLayout):
    """As [`step`], with its memory."""
    live, saved = LiveBytes(), SavedBytes(list(layer.parameters()))
    with live, saved.watching():
        report = step(layer, lengths, scheme, transport, num_passes=layer.sizes.num_passes, layout=layout)
    layer.zero_grad()
    return report | {"peak_bytes": live.peak, "saved_bytes": saved.peak}


# One rank's work


def rank_traffic(transport: Transport, scale: Scale) -> list[dict]:
    layer, found, is_local = DraftLayer(scale.sizes), [], isinstance(transport, LocalTransport)
    for num_tokens in scale.lengths:
        for packing, lengths in packings(num_tokens).items():
            if is_local and packing not in LOCAL_PACKINGS:
                continue
            for scheme in SCHEMES:
                if is_local and scheme == "kept, chunked loss":
                    continue
                layout = plan(scheme, lengths, transport.world)
                report = watched_step(layer, lengths, scheme, transport, layout)
                found.append({"packing": packing, "num_tokens": num_tokens, "scheme": scheme} | report)
    return found


def rank_errors(transport: Transport, scale: Scale) -> list[dict]:
    found = []
    for packing, lengths in packings(scale.error_length).items():
        for scheme in SCHEMES:
            layer, num_passes = DraftLayer(error_sizes(scale)), scale.sizes.num_passes
            layout = plan(scheme, lengths, transport.world)
            report = step(layer, lengths, scheme, transport, num_passes=num_passes, layout=layout)
            grads = torch.cat([parameter.grad.flatten() for parameter in layer.parameters()])
            found.append({"packing": packing, "scheme": scheme, "loss": report["loss"], "grads": grads.tolist()})
        for route in BLOCK_ROUTES:
            report = block_error_step(lengths, route, transport, scale)
            found.append({"packing": packing, "scheme": f"block, {route}"} | report)
    return found


def block_error_step(lengths: list[int], route: str, transport: Transport, scale: Scale) -> dict:
    """This rank's part of a small block draft's loss and gradients; the latter with zeros for other ranks' rows."""
    blocks, rank = error_blocks(lengths, transport.world, scale), transport.rank
    shard, owned = Shard(blocks.layout, rank, transport), set(blocks.owned(rank))
    rows = torch.tensor([n for n, anchor in enumerate(blocks.anchors) if anchor in owned], dtype=torch.long)
    index = [rows, shard.index, shard.index, rows, rows]
    whole = block_tensors(error_sizes(scale), len(blocks.anchors), blocks.num_slots, blocks.layout.num_tokens, seed=0)
    own = [x[part].requires_grad_() for x, part in zip(whole, index)]
    loss = attend_slots(own, blocks, shard, route).square().sum()
    grads = torch.autograd.grad(loss, own)
    spread = [torch.zeros_like(x).index_copy(0, part, grad) for x, part, grad in zip(whole, index, grads)]
    return {"loss": loss.item(), "grads": torch.cat([x.flatten() for x in spread]).tolist()}


def error_blocks(lengths: list[int], world: int, scale: Scale) -> DraftBlocks:
    num_tokens = sum(lengths)
    layout = zigzag_plan(PackedLayout.from_lengths(lengths).cu_seqlens, world)
    anchors = sorted(random.Random(0).sample(range(num_tokens), num_tokens // 6))
    return DraftBlocks(layout, tuple(anchors), scale.slots)


def dense_block_loss(tensors: list[torch.Tensor], blocks: DraftBlocks) -> torch.Tensor:
    """Block by block, with explicit probabilities: the oracle of block drafts."""
    q, k, v, block_k, block_v = tensors
    loss = q.new_zeros(())
    for number, anchor in enumerate(blocks.anchors):
        seen = slice(blocks.layout.segment_of(anchor)[0], anchor)
        keys, values = (
            expand_heads(torch.cat([trunk[seen], own[number]]), q.shape[2])
            for trunk, own in ((k, block_k), (v, block_v))
        )
        prob = torch.softmax(torch.einsum("snd,knd->nsk", q[number], keys) * q.shape[3] ** -0.5, -1)
        loss = loss + torch.einsum("nsk,knd->snd", prob, values).square().sum()
    return loss


def error_sizes(scale: Scale) -> Sizes:
    return Sizes(48, 6, 2, 8, 96, scale.sizes.num_passes, 16)


def memory_cases(scale: Scale, world: int) -> list[tuple[int, str]]:
    """Tokens of a rank and scheme. What is not tiled grows alike for every N: its slope is measured on one rank alone."""
    short, long = scale.memory_lengths
    cases = [(short, "tiled"), (long, "tiled"), (long, "kept")]
    if world == 1:
        cases += [(short, "kept"), (short, "kept, chunked loss"), (long, "kept, chunked loss")]
    return cases


def memory_layout(scale: Scale, world: int, num_local: int) -> PackedLayout:
    lengths = [scale.document] * (num_local * world // scale.document)
    return segment_zigzag_plan(PackedLayout.from_lengths(lengths).cu_seqlens, world)


def rank_memory(transport: Transport, scale: Scale) -> list[dict]:
    layer, found = DraftLayer(scale.sizes), []
    for num_local, scheme in memory_cases(scale, transport.world):
        layout = memory_layout(scale, transport.world, num_local)
        report = watched_step(layer, [layout.num_tokens], scheme, transport, layout)
        found.append({"num_local": num_local, "scheme": scheme} | report)
    return found


def clock_of(transport: Transport) -> Callable[[], float]:
    """CPU-seconds of this rank: of its process, or of its thread (whose backward stays in it)."""
    return time.thread_time if isinstance(transport, LocalTransport) else time.process_time


def rank_time(transport: Transport, scale: Scale) -> list[dict]:
    layer, found, clock = DraftLayer(scale.sizes), [], clock_of(transport)
    lengths = [scale.timed_length]
    for scheme in LOCAL_TIMED if isinstance(transport, LocalTransport) else SCHEMES:
        layout = plan(scheme, lengths, transport.world)
        seconds = []
        for _ in range(scale.repeats):
            started = clock()
            step(layer, lengths, scheme, transport, num_passes=scale.timed_passes, layout=layout)
            seconds.append(clock() - started)
        found.append({"scheme": scheme, "cpu_s": min(seconds)})
    return found


def block_tensors(sizes: Sizes, num_blocks: int, num_slots: int, num_tokens: int, *, seed: int) -> list[torch.Tensor]:
    """Queries, trunk keys and values, and keys and values of the slots."""
    generator = torch.Generator().manual_seed(seed)
    in_blocks, (num_heads, num_kv_heads) = (num_blocks, num_slots), (sizes.num_heads, sizes.num_kv_heads)
    shapes = [(*in_blocks, num_heads), *[(num_tokens, num_kv_heads)] * 2, *[(*in_blocks, num_kv_heads)] * 2]
    return [torch.randn(*shape, sizes.head_dim, generator=generator) for shape in shapes]


def attend_slots(tensors: list[torch.Tensor], blocks: DraftBlocks, shard: Shard, route: str) -> torch.Tensor:
    q, k, v, block_k, block_v = tensors
    return block_attention(
        q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, blocks=blocks, shard=shard, scale=q.shape[3] ** -0.5,
        route=route,
    )  # fmt: skip


def draft_blocks(scale: Scale, world: int, num_tokens: int, packing: str) -> DraftBlocks:
    cu_seqlens = PackedLayout.from_lengths(packings(num_tokens)[packing]).cu_seqlens
    anchors = sorted(random.Random(0).sample(range(1, num_tokens - scale.slots), scale.anchors))
    return DraftBlocks(zigzag_plan(cu_seqlens, world), tuple(anchors), scale.slots)


def block_step(blocks: DraftBlocks, transport: Transport, route: str, sizes: Sizes) -> dict:
    """A block draft's attention, forward and backward: what was sent in each, CPU-seconds, the output and gradients."""
    shard, num_own, clock = (
        Shard(blocks.layout, transport.rank, transport),
        len(blocks.owned(transport.rank)),
        clock_of(transport),
    )
    drawn = block_tensors(sizes, num_own, blocks.num_slots, shard.num_tokens, seed=transport.rank)
    tensors = [x.requires_grad_() for x in drawn]
    transport.traffic.reset()
    started = clock()
    out = attend_slots(tensors, blocks, shard, route)
    forward = asdict(transport.traffic)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    total = asdict(transport.traffic)
    return {
        "forward_bytes": forward["num_bytes"], "forward_messages": forward["num_messages"],
        "bytes": total["num_bytes"], "messages": total["num_messages"], "cpu_s": clock() - started,
        "found": [out.detach(), *grads],
    }  # fmt: skip


def rank_blocks(transport: Transport, scale: Scale) -> list[dict]:
    """Either thing travelling, on every row: once for the time, geometry included, and once more for the memory."""
    reports = []
    for num_tokens, packing in itertools.product(scale.block_lengths, BLOCK_PACKINGS):
        outs = []
        for route in BLOCK_ROUTES:
            blocks = draft_blocks(scale, transport.world, num_tokens, packing)
            report = block_step(blocks, transport, route, scale.sizes)
            outs.append(report.pop("found"))
            live, saved = LiveBytes(), SavedBytes([])
            with live, saved.watching():
                block_step(blocks, transport, route, scale.sizes)
            memory = {"peak_bytes": live.peak, "saved_bytes": saved.peak}
            reports.append({"packing": packing, "num_tokens": num_tokens, "scheme": route} | report | memory)
        difference = max((a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(*outs))
        for report in reports[-len(BLOCK_ROUTES) :]:
            report["routes_differ_by"] = difference
    return reports


def rank_main(transport: Transport, scale: Scale, parts: tuple[str, ...]) -> dict[str, list[dict]]:
    work = {
        "traffic": rank_traffic, "errors": rank_errors, "memory": rank_memory, "time": rank_time, "blocks": rank_blocks,
    }  # fmt: skip
    found = {}
    for part in parts:
        if transport.rank == 0:
            print(f"{time.strftime('%X')} {transport.world} ranks: {part}", file=sys.stderr, flush=True)
        found[part] = work[part](transport, scale)
    return found


# Ranks


def _process_main(rank: int, world: int, file: str, scale: Scale, parts: tuple[str, ...], connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{file}", timedelta(seconds=TIMEOUT_S), world, rank)
        answer = (True, rank_main(GroupTransport(), scale, parts))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(answer))


def run_processes(world: int, scale: Scale, parts: tuple[str, ...]) -> list[dict]:
    """`rank_main` in processes joined by gloo; the first failure is raised here."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, connections = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            args = (rank, world, str(Path(folder) / "store"), scale, parts, sender)
            processes.append(context.Process(target=_process_main, args=args, daemon=True))
            processes[-1].start()
            sender.close()
            connections.append(receiver)
        try:
            results: dict[int, dict] = {}
            while len(results) < world:
                ready = wait([c for rank, c in enumerate(connections) if rank not in results], TIMEOUT_S)
                if not ready:
                    raise TimeoutError(f"{world - len(results)} of {world} ranks did not finish in {TIMEOUT_S} s.")
                for connection in ready:
                    is_ok, value = pickle.loads(connection.recv_bytes())
                    if not is_ok:
                        raise RuntimeError(f"rank {connections.index(connection)} of {world} failed:\n{value}")
                    results[connections.index(connection)] = value
            return [results[rank] for rank in range(world)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def run_world(world: int, scale: Scale, parts: tuple[str, ...], *, is_local: bool) -> list[dict]:
    started = time.monotonic()
    if is_local:
        ranks = run_local_ranks(lambda transport: rank_main(transport, scale, parts), world, timeout_s=TIMEOUT_S)
    else:
        ranks = run_processes(world, scale, parts)
    where = "in one process" if is_local else "processes"
    print(f"{world} ranks, {where}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return ranks


# Summaries: one dict a row of a table


def computed(scheme: str, layout: PackedLayout, sizes: Sizes) -> tuple[RankCost, ...]:
    visible, options = Visibility(layout), {"num_passes": sizes.num_passes}
    if scheme == "ring":
        return ring_cost(visible, sizes.heads, **options)
    if scheme == "expanded ring":
        return ring_cost(visible, sizes.heads.expanded, **options)
    if scheme == "all-gather":
        return gathered_cost(visible, sizes.heads, **options)
    return kept_cost(visible, sizes.heads, **options, tile_size=sizes.tile if scheme == "tiled" else None)


def _is_equal(reports: list[dict], costs: tuple[RankCost, ...], scheme: str) -> bool:
    """Whether every rank sent what was computed; `tiled_loss` runs both directions in its forward."""
    for report, cost in zip(reports, costs):
        measured = [report[name] for name in ("forward_bytes", "forward_messages", "bytes", "messages")]
        forward = cost.sent if scheme == "tiled" else cost.forward
        if measured != [forward.num_bytes, forward.num_messages, cost.sent.num_bytes, cost.sent.num_messages]:
            return False
    return True


def summarize_traffic(ranks: list[dict], scale: Scale) -> list[dict]:
    rows = []
    for reports in zip(*(rank["traffic"] for rank in ranks)):
        first = {name: reports[0][name] for name in ("packing", "num_tokens", "scheme")}
        lengths = packings(first["num_tokens"])[first["packing"]]
        costs = computed(first["scheme"], plan(first["scheme"], lengths, len(ranks)), scale.sizes)
        rows.append(
            {"world": len(ranks)} | first | {
                # computed, so that tiled, which sends both in one call, can be told apart; equal to the measured sum
                "forward_bytes": sum(cost.forward.num_bytes for cost in costs),
                "backward_bytes": sum(cost.backward.num_bytes for cost in costs),
                "bytes": sum(report["bytes"] for report in reports),
                "messages": sum(report["messages"] for report in reports),
                "peak_bytes": max(report["peak_bytes"] for report in reports),
                "saved_bytes": max(report["saved_bytes"] for report in reports),
                "is_as_computed": _is_equal(reports, costs, first["scheme"]),
            }
        )  # fmt: skip
    short = {(row["packing"], row["scheme"]): row for row in rows if row["num_tokens"] == scale.lengths[0]}
    grown = (scale.lengths[1] - scale.lengths[0]) / len(ranks)
    for row in rows:
        if row["num_tokens"] == scale.lengths[1]:
            before = short[row["packing"], row["scheme"]]
            for name in ("peak", "saved"):
                row[f"{name}_slope"] = (row[f"{name}_bytes"] - before[f"{name}_bytes"]) / grown
    return rows


def true_gradients(lengths: list[int], scale: Scale) -> dict[str, tuple[float, torch.Tensor]]:
    """Loss and gradients in fp64, from dense models: of the passes (all schemes), and of the block draft."""
    layout, sizes = PackedLayout.from_lengths(lengths), error_sizes(scale)
    layer = DraftLayer(sizes).double()
    x_TH, labels_DT = inputs(sizes, sum(lengths), scale.sizes.num_passes)
    blocks = error_blocks(lengths, 1, scale)
    drawn = block_tensors(sizes, len(blocks.anchors), blocks.num_slots, layout.num_tokens, seed=0)
    tensors = [x.double().requires_grad_() for x in drawn]
    found = {}
    for name, leaves, loss in (
        ("passes", list(layer.parameters()), dense_loss(layer, x_TH.double(), labels_DT, layout)),
        ("blocks", tensors, dense_block_loss(tensors, blocks)),
    ):
        grads = torch.autograd.grad(loss, leaves)
        found[name] = loss.item(), torch.cat([grad.flatten() for grad in grads])
    return found


def summarize_errors(ranks: list[dict], scale: Scale) -> list[dict]:
    rows = []
    for packing, lengths in packings(scale.error_length).items():
        true = true_gradients(lengths, scale)
        for reports in zip(*(rank["errors"] for rank in ranks)):
            if reports[0]["packing"] != packing:
                continue
            true_loss, true_grads = true["blocks" if reports[0]["scheme"].startswith("block") else "passes"]
            grads = sum(torch.tensor(report["grads"], dtype=torch.float64) for report in reports)
            rows.append(
                {
                    "world": len(ranks), "packing": packing, "scheme": reports[0]["scheme"],
                    "loss_error": abs(sum(report["loss"] for report in reports) - true_loss) / true_loss,
                    "gradient_error": ((grads - true_grads).norm() / true_grads.norm()).item(),
                }
            )  # fmt: skip
    return rows


def summarize_memory(ranks: list[dict], scale: Scale) -> list[dict]:
    """Peak of the fullest rank, and of its growth what is left without the hidden states, and without keys.

    *KV* are K, V, dK and dV, of the rank's own tokens and of those whose keys it keeps of other ranks. Nothing else is ever
    subtracted: labels, copies and the weights' gradients are growth.
    """
    sizes, world, rows = scale.sizes, len(ranks), []
    short, long = scale.memory_lengths
    kv_bytes = sizes.heads.key_bytes + sizes.heads.gradient_bytes
    num_received = {num: max(Visibility(memory_layout(scale, world, num)).num_received) for num in (short, long)}
    for reports in zip(*(rank["memory"] for rank in ranks)):
        num_local = reports[0]["num_local"]
        rows.append(
            {
                "world": world, "scheme": reports[0]["scheme"], "num_local": num_local,
                "peak_bytes": max(report["peak_bytes"] for report in reports),
                "saved_bytes": max(report["saved_bytes"] for report in reports),
                "x_bytes": 4 * sizes.hidden * num_local, "own_kv_bytes": kv_bytes * num_local,
                "others_kv_bytes": kv_bytes * num_received[num_local],
            }
        )  # fmt: skip
    before = {row["scheme"]: row for row in rows if row["num_local"] == short}
    for row in rows:
        first = before.get(row["scheme"])
        if row["num_local"] == long and first is not None:
            for name in ("peak", "saved", "x", "own_kv", "others_kv"):
                row[f"{name}_slope"] = (row[f"{name}_bytes"] - first[f"{name}_bytes"]) / (long - short)
            row["beyond_x"] = row["peak_slope"] - row["x_slope"]
            row["beyond_own"] = row["beyond_x"] - row["own_kv_slope"]
            row["beyond_all"] = row["beyond_own"] - row["others_kv_slope"]
    return rows


def summarize_blocks(ranks: list[dict], scale: Scale) -> list[dict]:
    rows = []
    for reports in zip(*(rank["blocks"] for rank in ranks)):
        first = {name: reports[0][name] for name in ("packing", "num_tokens", "scheme")}
        blocks = draft_blocks(scale, len(ranks), first["num_tokens"], first["packing"])
        costs = block_cost(blocks, first["scheme"], scale.sizes.heads)
        spent, pairs = [r["cpu_s"] for r in reports], [cost.num_pairs for cost in costs]
        rows.append(
            {"world": len(ranks)} | first | {
                "forward_bytes": sum(r["forward_bytes"] for r in reports),
                "bytes": sum(r["bytes"] for r in reports), "messages": sum(r["messages"] for r in reports),
                "routes_differ_by": max(r["routes_differ_by"] for r in reports),
                "saved_bytes": max(r["saved_bytes"] for r in reports),
                "peak_bytes": max(r["peak_bytes"] for r in reports),
                "work": max(pairs) * len(ranks) / sum(pairs),
                "cpu_s": spent, "cpu_s_most": max(spent), "cpu_s_total": sum(spent),
                "is_as_computed": _is_equal(list(reports), costs, first["scheme"]),
            }
        )  # fmt: skip
    return rows


def weigh_plans(scale: Scale) -> list[dict]:
    """Work and tokens of the fullest rank over the mean, and keys that travel, of plans for long rows. Computed."""
    rows = []
    plans = {"zigzag": zigzag_plan, "segment zigzag": segment_zigzag_plan, "balanced": balanced_plan}
    for packing, lengths in packings(scale.plan_length).items():
        for world in sorted({*scale.worlds, scale.local_world} - {1}):
            for name, make in plans.items():
                layout = make(PackedLayout.from_lengths(lengths).cu_seqlens, world)
                visible = Visibility(layout)
                rows.append(
                    {
                        "packing": packing, "world": world, "plan": name, "num_segments": len(lengths),
                        "work": max(visible.pairs) * world / sum(visible.pairs),
                        "tokens": max(visible.num_local) * world / layout.num_tokens,
                        "travelling": sum(visible.num_received) / layout.num_tokens / (world - 1),
                    }
                )  # fmt: skip
    return rows


# Aims


def _largest(values: Iterable[float]) -> float:
    """The largest, NaN if there is one: it meets no aim, and `max` might pass it over."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def check_aims(results: dict[str, list[dict]], scale: Scale) -> list[dict]:
    """Every aim with its figure: the worst over packings, lengths and numbers of ranks."""
    traffic = {(r["world"], r["packing"], r["num_tokens"], r["scheme"]): r["bytes"] for r in results["traffic"]}
    share = max(
        traffic[key] / traffic[(*key[:3], "ring")] for key in traffic if key[3] in ("kept", "tiled") and key[0] > 1
    )
    long = [row for row in results["memory"] if row["num_local"] == scale.memory_lengths[1]]
    peaks = {(row["world"], row["scheme"]): row["peak_bytes"] for row in long}
    worlds = sorted({row["world"] for row in long})
    growing = [row for row in long if row["scheme"] == "tiled"]
    shares = [
        share
        for row, share in query_shares(results)
        if row["num_tokens"] == scale.block_lengths[1] and row["packing"] == "one long"
    ]
    seconds = {(row["world"], row["scheme"]): row["cpu_s_total"] for row in results["time"]}
    most = max(scale.worlds)
    passes, per_token = scale.sizes.num_passes, f"{scale.memory_lengths[1]} tokens a rank"
    all_measured = [*results["traffic"], *results["blocks"]]
    aims = [
        ("bytes of the kept trunk over the ring's, in 1/D", share * passes, 1.0),
        (f"tiled peak over untiled, {per_token}", max(peaks[w, "tiled"] / peaks[w, "kept"] for w in worlds), 1 / 8),
        ("tiled peak's growth, bytes a token beyond hidden states and K, V, dK, dV of own and other ranks' tokens",
         max(row["beyond_all"] for row in growing), SLOPE_AIM),
        (f"tiled peak's growth, bytes a token beyond hidden states and K, V, dK, dV of own tokens, N <= {OWN_KV_WORLD}",
         max(row["beyond_own"] for row in growing if row["world"] <= OWN_KV_WORLD), SLOPE_AIM),
        (f"bytes with queries travelling over keys, {scale.block_lengths[1]} tokens in one segment", max(shares), 1 / 4),
        ("work max/mean, long-tailed, balanced plan",
         max(r["work"] for r in results["plans"] if r["packing"] == "long-tailed" and r["plan"] == "balanced"), 1.1),
        (f"CPU-seconds of {most} ranks over 1, tiled", seconds[most, "tiled"] / seconds[1, "tiled"], 1.25),
        (f"CPU-seconds of {most} ranks over 1, kept", seconds[most, "kept"] / seconds[1, "kept"], 1.25),
        ("measurements whose bytes or messages differ from the closed form",
         sum(not row["is_as_computed"] for row in all_measured), 0),
        ("gradient error in fp32 against fp64", _largest(row["gradient_error"] for row in results["errors"]), 1e-5),
    ]  # fmt: skip
    return [
        {"aim": name, "figure": figure, "at_most": limit, "is_met": figure <= limit} for name, figure, limit in aims
    ]


def query_shares(results: dict[str, list[dict]]) -> list[tuple[dict, float]]:
    """Bytes of block drafts whose queries travel, over those whose keys do, with the row of the former."""

    def case(row: dict) -> tuple:
        return row["world"], row["num_tokens"], row["packing"]

    keys = {case(row): row["bytes"] for row in results["blocks"] if row["scheme"] == "keys"}
    queries = [row for row in results["blocks"] if row["scheme"] == "queries"]
    return [(row, row["bytes"] / keys[case(row)] if keys[case(row)] else math.nan) for row in queries]


def notes(results: dict[str, list[dict]], scale: Scale) -> list[str]:
    """What no aim judges but must be seen beside them: the other readings of two aims."""
    lines = []

    def judged(figure: float) -> str:
        return f"{_number(figure)} ({'within' if figure <= SLOPE_AIM else 'ABOVE'} {SLOPE_AIM})"

    for row in results["memory"]:
        if row["scheme"] == "tiled" and "peak_slope" in row:
            lines.append(
                f"tiled peak's growth at N = {row['world']}: {_number(row['peak_slope'])} bytes a token, of them hidden states "
                f"{_number(row['x_slope'])} (no gradient), K, V, dK, dV of own tokens {_number(row['own_kv_slope'])}, of other "
                f"ranks' {_number(row['others_kv_slope'])}; left beyond hidden states {judged(row['beyond_x'])}, and beyond "
                f"own K, V, dK, dV {judged(row['beyond_own'])}, and beyond other ranks' {judged(row['beyond_all'])}"
            )
    for row, share in query_shares(results):
        if (row["num_tokens"], row["packing"]) != (scale.block_lengths[1], "one long"):
            lines.append(
                f"bytes with queries travelling over keys, {row['num_tokens']} tokens, {row['packing']}, N = {row['world']}: "
                f"{'nothing travels' if math.isnan(share) else _number(share)}"
            )
    return lines


# Printing


def _number(value: float) -> str:
    if value == 0 or (isinstance(value, int) and abs(value) < 1e6) or 100 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.3f}"


def print_tables(results: dict[str, list[dict]], scale: Scale) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)

    def show(title: str, columns: dict[str, Callable[[dict], str]], rows: list[dict]) -> None:
        table = Table(title=title)
        for name in columns:
            table.add_column(name, justify="left" if name in ("packing", "scheme", "plan") else "right")
        for row in rows:
            table.add_row(*(cell(row) for cell in columns.values()))
        console.print(table)

    def of(name: str, form: Callable = str) -> Callable[[dict], str]:
        return lambda row: form(row[name]) if name in row else ""

    sizes = scale.sizes
    kind = f"{sizes.num_heads}/{sizes.num_kv_heads} heads x {sizes.head_dim}, fp32, D = {sizes.num_passes}"
    show(
        f"Sent by all ranks, and memory of the fullest: {kind} (slopes over {scale.lengths[0]} tokens, which --json has too)",
        {
            "N": of("world"), "packing": of("packing"), "tokens": of("num_tokens"), "scheme": of("scheme"),
            "forward, MiB": of("forward_bytes", _mib), "backward, MiB": of("backward_bytes", _mib),
            "messages": of("messages"), "saved, MiB": of("saved_bytes", _mib), "B/token": of("saved_slope", _number),
            "peak, MiB": of("peak_bytes", _mib), "slope, B/token": of("peak_slope", _number),
        },
        [row for row in results["traffic"] if row["num_tokens"] == scale.lengths[1]],
    )  # fmt: skip
    show(
        f"Memory of the fullest rank, documents of {scale.document} tokens: {kind}, V = {sizes.vocab}, tile {sizes.tile}",
        {
            "N": of("world"), "scheme": of("scheme"), "tokens a rank": of("num_local"), "saved, MiB": of("saved_bytes", _mib),
            "peak, MiB": of("peak_bytes", _mib), "slope, B/token": of("peak_slope", _number),
            "beyond x": of("beyond_x", _number), "x, own KV": of("beyond_own", _number),
            "and others' KV": of("beyond_all", _number),
        },
        sorted(results["memory"], key=lambda row: (row["world"], row["scheme"], row["num_local"])),
    )  # fmt: skip
    show(
        f"Block draft: {scale.anchors} anchors x {scale.slots} slots; sent by all ranks, memory of the fullest, CPU-seconds",
        {
            "N": of("world"), "packing": of("packing"), "tokens": of("num_tokens"), "scheme": of("scheme"),
            "forward, MiB": of("forward_bytes", _mib), "both, MiB": of("bytes", _mib), "messages": of("messages"),
            "saved, MiB": of("saved_bytes", _mib), "peak, MiB": of("peak_bytes", _mib), "work max/mean": of("work", _number),
            "most of a rank, s": of("cpu_s_most", _number), "total, s": of("cpu_s_total", _number),
        },
        results["blocks"],
    )  # fmt: skip
    show(
        f"Plans of {scale.plan_length} tokens (computed)",
        {
            "packing": of("packing"), "N": of("world"), "plan": of("plan"), "segments": of("num_segments"),
            "work max/mean": of("work", _number), "tokens max/mean": of("tokens", _number),
            "keys that travel": of("travelling", lambda share: f"{share:.0%}"),
        },
        results["plans"],
    )  # fmt: skip
    show(
        f"CPU-seconds, one row of {scale.timed_length} tokens, D = {scale.timed_passes} (the {scale.local_world} ranks are "
        "threads of one process)",
        {
            "N": of("world"), "scheme": of("scheme"), "most of a rank": of("cpu_s_most", _number),
            "total": of("cpu_s_total", _number),
        },
        results["time"],
    )  # fmt: skip
    show(
        f"Error of fp32 against dense fp64, worst of the packings of {scale.error_length} tokens",
        {"N": of("world"), "scheme": of("scheme"), "loss": of("loss_error", "{:.1e}".format),
         "gradients": of("gradient_error", "{:.1e}".format)},
        _worst(results["errors"]),
    )  # fmt: skip


def _worst(rows: list[dict]) -> list[dict]:
    worst: dict[tuple[int, str], dict] = {}
    for row in rows:
        key = row["world"], row["scheme"]
        if key not in worst or row["gradient_error"] > worst[key]["gradient_error"]:
            worst[key] = row
    return list(worst.values())


# Computed tables for rows too long for a CPU

MODELS = {
    "Llama-8B: 32 query heads, 8 key/value heads x 128, hidden 4096": Heads(32, 8, 128),
    "Qwen3-30B-A3B: 32 query heads, 4 key/value heads x 128, hidden 2048": Heads(32, 4, 128),
}
TABLE_PASSES, TABLE_TILE, TABLE_ANCHORS, TABLE_SLOTS, GIB = 7, 128, 512, 16, 2**30


def computed_tables() -> str:
    """A page of Markdown with what one draft layer costs on one long row, from closed forms alone."""
    lines = [
        "# What context parallelism costs",
        "",
        "Generated by `python benchmarks/context_parallel.py --tables docs/context_parallel.md`; do not edit.",
        "",
        "**Every figure here is computed** by `hf_codraft.attention.cost`; nothing was measured and nothing ran on a GPU.",
        "(The same closed forms equal the bytes and messages that transports count on small rows, exactly.) One draft layer",
        f"on one long segment, zigzag plan, D = {TABLE_PASSES} passes, bf16 with fp32 gradients of keys and values. Figures",
        "are those of the rank that pays most; GiB = 2^30 bytes.",
        "",
        "- sent: forward + backward. *Other ranks' keys*: keys, values and their gradients that the backward works on at one",
        "  time; what travels meanwhile (at most two ranks' parcels) comes on top.",
        "- *saved*: queries, outputs, log-sum-exps and branch keys that autograd holds, of all positions or (tiled) of one",
        f"  tile of {TABLE_TILE}. The rank's own keys, hidden states, logits and weights come on top in both.",
        "- attention: TFLOP of a rank, forward + backward, the same for all schemes.",
        "- *half kept*, *none kept*: the keys of the nearest half of the other ranks stay for all passes, or of none; the",
        "  others' come anew in every pass, forward and backward, and their gradients go home in every pass. Not tiled: a",
        "  tiled draft would fetch them for every tile of every pass.",
        f"- block drafts: {TABLE_ANCHORS} anchors, evenly spaced, x {TABLE_SLOTS} slots, one pass. A row is one slot of one",
        f"  anchor, {TABLE_ANCHORS} x {TABLE_SLOTS} = {TABLE_ANCHORS * TABLE_SLOTS} rows over all ranks. *Queries*: every row"
        " goes to each rank that holds a key",
        "  that it sees, and a part of its softmax comes back. *Keys*: what some row of a rank sees comes to that rank. Held",
        "  of other ranks: the keys, or the visiting queries, of all with the gradients of one; what one backward sends and",
        "  gets comes on top.",
        "",
    ]
    for title, heads in MODELS.items():
        for num_tokens in (2**18, 2**20):
            lines += [f"## {title}, {num_tokens // 1024}K tokens (computed)", ""]
            for columns in (_trunk_columns, _streamed_columns, _block_columns):
                lines += _computed_table(columns, heads, num_tokens)
    return "\n".join(lines)


def _computed_table(
    columns: Callable[[int, Heads, int], dict[str, float]], heads: Heads, num_tokens: int
) -> list[str]:
    rows = {world: columns(world, heads, num_tokens) for world in (8, 16, 32, 64)}
    names = ["N", *rows[8]]
    lines = [f"| {' | '.join(names)} |", "|" + "---:|" * len(names)]
    for world, cells in rows.items():
        lines.append(f"| {world} | {' | '.join(_significant(value) for value in cells.values())} |")
    return [*lines, ""]


def _significant(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _gib(costs: tuple[RankCost, ...], figure: Callable[[RankCost], int]) -> float:
    return max(map(figure, costs)) / GIB


def _sent(cost: RankCost) -> int:
    return cost.sent.num_bytes


def _remote(cost: RankCost) -> int:
    return cost.remote_bytes


def _saved(cost: RankCost) -> int:
    return cost.saved_bytes


def _tflop(costs: tuple[RankCost, ...]) -> float:
    return max(cost.forward_flops + cost.backward_flops for cost in costs) / 1e12


def _trunk_columns(world: int, heads: Heads, num_tokens: int) -> dict[str, float]:
    visible, options = Visibility(zigzag_plan((0, num_tokens), world)), {"num_passes": TABLE_PASSES}
    ring, gathered = ring_cost(visible, heads, **options), gathered_cost(visible, heads, **options)
    expanded = ring_cost(visible, heads.expanded, **options)
    kept, tiled_ranks = (kept_cost(visible, heads, **options, tile_size=tile) for tile in (None, TABLE_TILE))
    return {
        "ring, sent": _gib(ring, _sent),
        "all-gather, sent": _gib(gathered, _sent),
        "expanded ring, sent": _gib(expanded, _sent),
        "kept or tiled, sent": _gib(tiled_ranks, _sent),
        "other ranks' keys, ring": _gib(ring, _remote),
        "other ranks' keys, kept": _gib(kept, _remote),
        "saved, untiled": _gib(kept, _saved),
        "saved, tiled": _gib(tiled_ranks, _saved),
        "attention, TFLOP": _tflop(kept),
    }


def _streamed_columns(world: int, heads: Heads, num_tokens: int) -> dict[str, float]:
    visible = Visibility(zigzag_plan((0, num_tokens), world))
    half, none = (
        kept_cost(visible, heads, num_passes=TABLE_PASSES, num_kept=num_kept) for num_kept in ((world - 1) // 2, 0)
    )
    return {
        "half kept, sent": _gib(half, _sent),
        "none kept, sent": _gib(none, _sent),
        "other ranks' keys, half kept": _gib(half, _remote),
        "other ranks' keys, none kept": _gib(none, _remote),
    }


def _block_columns(world: int, heads: Heads, num_tokens: int) -> dict[str, float]:
    layout = zigzag_plan((0, num_tokens), world)
    anchors = tuple(num_tokens * (n + 1) // (TABLE_ANCHORS + 1) for n in range(TABLE_ANCHORS))
    keys, queries = (block_cost(DraftBlocks(layout, anchors, TABLE_SLOTS), route, heads) for route in BLOCK_ROUTES)
    return {
        "block drafts: ring, sent": _gib(ring_cost(Visibility(layout), heads), _sent),
        "keys, sent": _gib(keys, _sent),
        "queries, sent": _gib(queries, _sent),
        "of other ranks, keys": _gib(keys, _remote),
        "of other ranks, queries": _gib(queries, _remote),
        "saved": _gib(keys, _saved),
        "attention with keys, TFLOP": _tflop(keys),
        "with queries": _tflop(queries),
    }


# Run


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds")
    parser.add_argument("--check", action="store_true", help="print a line per aim; exit 1 where one is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument(
        "--tables", type=Path, metavar="FILE", help="write the computed tables there and do nothing else"
    )
    return parser.parse_args(argv)


def measure(scale: Scale) -> dict[str, list[dict]]:
    results: dict[str, list[dict]] = {name: [] for name in ("traffic", "memory", "blocks", "time", "errors")}
    for world, is_local in [*((world, False) for world in scale.worlds), (scale.local_world, True)]:
        parts = ["traffic", "errors"]
        parts += ["blocks"] * (world > 1) + ["time"] + ["memory"] * (not is_local)
        ranks = run_world(world, scale, tuple(parts), is_local=is_local)
        results["traffic"] += summarize_traffic(ranks, scale)
        results["errors"] += summarize_errors(ranks, scale)
        if "memory" in parts:
            results["memory"] += summarize_memory(ranks, scale)
        if "blocks" in parts:
            results["blocks"] += summarize_blocks(ranks, scale)
        for reports in zip(*(rank["time"] for rank in ranks)):
            spent = [report["cpu_s"] for report in reports]
            row = {"world": world, "scheme": reports[0]["scheme"], "cpu_s": spent}
            results["time"].append(row | {"cpu_s_most": max(spent), "cpu_s_total": sum(spent)})
    return results | {"plans": weigh_plans(scale)}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.tables:
        args.tables.write_text(computed_tables())
        return 0
    torch.set_num_threads(1)
    scale = QUICK if args.quick else FULL
    results = measure(scale)
    print_tables(results, scale)
    aims = check_aims(results, scale)
    if args.check:
        for aim in aims:
            verdict = "met   " if aim["is_met"] else "MISSED"
            print(f"{verdict} {aim['aim']}: {_number(aim['figure'])} (at most {_number(aim['at_most'])})")
        for note in notes(results, scale):
            print(f"info   {note}")
        if args.quick:
            print("(Figures of tiny sizes say nothing about real ones.)")
    if args.json:
        machine = {"kind": platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__}
        report = {
            "scale": asdict(scale),
            "machine": machine,
            "results": results,
            "aims": aims,
            "info": notes(results, scale),
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and not all(aim["is_met"] for aim in aims) else 0


if __name__ == "__main__":
    sys.exit(main())
