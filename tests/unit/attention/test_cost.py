"""Closed forms of cost against what transports count, brute-force masks and what autograd saves."""

import random
import threading
from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_codraft.attention import block_draft, kernels, trunk
from hf_codraft.attention.block_draft import DraftBlocks, block_attention
from hf_codraft.attention.blocks import num_in
from hf_codraft.attention.cost import (
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    Heads,
    Visibility,
    block_cost,
    kept_cost,
    ring_cost,
)
from hf_codraft.attention.kernels import expand_heads
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.plans import balanced_plan, contiguous_plan, segment_zigzag_plan, zigzag_plan
from hf_codraft.attention.reference import visible_mask
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.tiled import TiledPasses, tiled_loss
from hf_codraft.attention.transport import HEADER_BYTES, run_local_ranks
from hf_codraft.attention.trunk import Trunk

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=4, dtype=torch.float32)
PLANS = (contiguous_plan, zigzag_plan, segment_zigzag_plan, balanced_plan)
ROWS = ([23], [3, 14, 1, 6], [2])  # the last has fewer tokens than ranks
NUM_PASSES = 3


def draw(num: int, heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, heads, HEADS.head_dim, generator=generator).requires_grad_()


def saving(saved: dict[tuple, int]):
    """Notes the bytes of every tensor that autograd saves; one of which it saves two copies counts once."""

    def pack(x):
        saved[x.data_ptr(), x.shape] = x.numel() * x.element_size()  # and not its storage, which may be a whole parcel
        return x.detach()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


def sent_by_trunk(layout, *, route, num_kept=None, window=None, expands=False, dtype=torch.float32):
    """Bytes and messages forward, and of forward and backward, by every rank, and the bytes of what autograd saved."""

    def rank(transport):
        shard = Shard(layout, transport.rank, transport)
        q, k, v = (draw(shard.num_tokens, heads, 0).to(dtype) for heads in (4, 2, 2))
        if expands:
            k, v = expand_heads(k, 4), expand_heads(v, 4)
        saved: dict[tuple, int] = {}
        trunk = Trunk(k, v, shard=shard, scale=0.5, window=window, route=route, num_kept=num_kept)
        queries, branch, outs = trunk.queries(), [], []
        for number in range(NUM_PASSES):
            own_q = q.detach().clone().requires_grad_()
            if number:
                branch.append([x.detach().clone().requires_grad_() for x in (k, v)])
            with saving(saved):
                branch_k, branch_v = zip(*branch) if branch else ((), ())
                outs.append(trunk.attend(own_q, queries, branch_k=branch_k, branch_v=branch_v))
        forward = transport.traffic.num_bytes, transport.traffic.num_messages
        sum(out.sum() for out in outs).backward()
        return forward, (transport.traffic.num_bytes, transport.traffic.num_messages), sum(saved.values())

    return run_local_ranks(rank, layout.world)


def expected(costs):
    return [((c.forward.num_bytes, c.forward.num_messages), (c.sent.num_bytes, c.sent.num_messages)) for c in costs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("plan", PLANS)
def test_trunk_sends_what_is_computed(plan, world):
    for lengths in ROWS:
        layout = plan(PackedLayout.from_lengths(lengths).cu_seqlens, world)
        for window in (None, 1, 5):
            visible = Visibility(layout, window=window)
            ring = sent_by_trunk(layout, route="ring", window=window)
            assert [r[:2] for r in ring] == expected(ring_cost(visible, HEADS, num_passes=NUM_PASSES))
            for num_kept in {0, 1, None}:
                sent = sent_by_trunk(layout, route="direct", num_kept=num_kept, window=window)
                costs = kept_cost(visible, HEADS, num_passes=NUM_PASSES, num_kept=num_kept)
                assert [r[:2] for r in sent] == expected(costs), (lengths, window, num_kept)


def test_expanded_keys_and_other_dtypes_send_what_is_computed():
    layout = zigzag_plan((0, 5, 21), 3)
    visible = Visibility(layout)
    sent = sent_by_trunk(layout, route="ring", expands=True)
    assert [r[:2] for r in sent] == expected(ring_cost(visible, HEADS.expanded, num_passes=NUM_PASSES))
    for dtype in (torch.bfloat16, torch.float64):
        heads = Heads(4, 2, 4, dtype)
        sent = sent_by_trunk(layout, route="direct", dtype=dtype)
        assert [r[:2] for r in sent] == expected(kept_cost(visible, heads, num_passes=NUM_PASSES))


@pytest.mark.parametrize(("route", "num_kept"), [("ring", None), ("direct", None), ("direct", 1), ("direct", 0)])
def test_autograd_saves_what_is_computed(route, num_kept):
    layout = zigzag_plan((0, 9, 64), 3)
    for window in (None, 5):
        sent = sent_by_trunk(layout, route=route, num_kept=num_kept, window=window)
        visible = Visibility(layout, window=window)
        if route == "ring":
            costs, kept = ring_cost(visible, HEADS, num_passes=NUM_PASSES), 0
        else:
            costs, kept = kept_cost(visible, HEADS, num_passes=NUM_PASSES, num_kept=num_kept), num_kept
        for rank, (cost, (_, _, saved)) in enumerate(zip(costs, sent, strict=True)):
            nearest = [(rank - step) % 3 for step in range(1, 3)][:kept]
            num_keys = layout.num_local(rank) + sum(visible.num_needed[rank][other] for other in nearest)
            assert saved == cost.saved_bytes + num_keys * HEADS.key_bytes


def run_tiled(shard, tile_size, *, num_kept=None, window=None, saved=None):
    """All passes of one rank; `saved` gets, for every tile, the bytes of what autograd saved."""
    weight = torch.nn.Parameter(torch.ones(()))
    q, k, v = (draw(shard.num_tokens, heads, 0).detach() for heads in (4, 2, 2))

    def tile_loss(trunk, queries, tile):
        held: dict[tuple, int] = {}
        own_k, own_v = ([x[tile] * weight for _ in range(NUM_PASSES - 1)] for x in (k, v))
        own_q = [q[tile] * weight for _ in range(NUM_PASSES)]
        with saving(held):
            outs = [
                trunk.attend(x, queries, branch_k=own_k[:number], branch_v=own_v[:number])
                for number, x in enumerate(own_q)
            ]
        if saved is not None:
            saved.append(sum(held.values()))
        return sum(out.sum() for out in outs), torch.zeros(1)

    def project(rows):
        return k[rows] * weight, v[rows] * weight

    rows = torch.arange(shard.num_tokens)
    passes = TiledPasses(project, tile_loss, shard, rows, tile_size, 0.5, num_kept=num_kept, window=window)
    tiled_loss(passes, [weight])[0].backward()


@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_tiled_loss_sends_and_saves_what_is_computed(num_kept):
    layout, tile_size = contiguous_plan((0, 9, 23), 3), 3

    def rank(transport):
        saved: list[int] = []
        run_tiled(Shard(layout, transport.rank, transport), tile_size, num_kept=num_kept, saved=saved)
        return transport.traffic.num_bytes, transport.traffic.num_messages, max(saved)

    visible = Visibility(layout)
    costs = kept_cost(visible, HEADS, num_passes=NUM_PASSES, num_kept=num_kept, tile_size=tile_size)
    for number, (cost, (num_bytes, num_messages, saved)) in enumerate(
        zip(costs, run_local_ranks(rank, 3), strict=True)
    ):
        assert (num_bytes, num_messages) == (cost.sent.num_bytes, cost.sent.num_messages)
        nearest = [(number - step) % 3 for step in range(1, 3)][:num_kept]
        num_keys = layout.num_local(number) + sum(visible.num_needed[number][other] for other in nearest)
        assert saved == cost.saved_bytes + num_keys * HEADS.key_bytes


class Held:
    """Bytes of some storages that are alive, and the most there were at one time; of one rank."""

    def __init__(self):
        self.most, self._noted = 0, []

    def note(self, storage):
        self._noted = [(ref, size) for ref, size in self._noted if not ref.expired()]
        self._noted.append((StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self._noted))


def watched(run, world, monkeypatch, *, arriving, made_in=None) -> list[int]:
    """The most bytes of other ranks' keys (or queries) and gradients that each rank held at one time.

    Args:
        run (callable): one rank, with its transport.
        world (`int`): ranks.
        arriving (`tuple[str, ...]`): which parcels count.
        made_in (module, *optional*): where `stat_zeros` makes gradients; those of what came count.
    """
    local = threading.local()
    if made_in is not None:
        plain = made_in.stat_zeros

        def stat_zeros(x):
            zeros = plain(x)
            if StorageWeakRef(x.untyped_storage()) in local.arrived:
                local.held.note(zeros.untyped_storage())
            return zeros

        monkeypatch.setattr(made_in, "stat_zeros", stat_zeros)

    def rank(transport):
        local.held, local.arrived = Held(), set()
        exchange = transport.exchange

        class Watched:
            def __init__(self, delivery):
                self.delivery = delivery

            def wait(self):
                tensors = self.delivery.wait()
                if tensors and tensors[0].numel():
                    local.held.note(tensors[0].untyped_storage())
                    local.arrived.add(StorageWeakRef(tensors[0].untyped_storage()))
                return tensors

        def watched_exchange(*args, what, **options):
            deliveries = exchange(*args, what=what, **options)
            return [Watched(delivery) for delivery in deliveries] if what in arriving else deliveries

        transport.exchange = watched_exchange
        run(transport)
        return local.held.most

    return run_local_ranks(rank, world)


@pytest.mark.slow
@pytest.mark.parametrize("num_kept", [0, 1, 2, None])
@pytest.mark.parametrize("tile_size", [None, 8])
def test_trunk_holds_what_is_computed_of_other_ranks(monkeypatch, num_kept, tile_size):
    """And no more on top than the next rank's keys, and headers."""
    layout = zigzag_plan((0, 40, 200), 4)

    def run(transport):
        shard = Shard(layout, transport.rank, transport)
        if tile_size is not None:
            run_tiled(shard, tile_size, num_kept=num_kept)
            return
        q, k, v = (draw(shard.num_tokens, heads, 0) for heads in (4, 2, 2))
        opened = Trunk(k, v, shard=shard, scale=0.5, num_kept=num_kept)
        sum(opened.attend(q, opened.queries()).sum() for _ in range(NUM_PASSES)).backward()

    found = watched(run, 4, monkeypatch, arriving=("keys and values",), made_in=trunk)
    visible = Visibility(layout)
    costs = kept_cost(visible, HEADS, num_passes=NUM_PASSES, num_kept=num_kept, tile_size=tile_size)
    for rank, (cost, held) in enumerate(zip(costs, found, strict=True)):
        next_keys = 0 if num_kept is None else max(visible.num_needed[rank]) * HEADS.key_bytes
        assert cost.remote_bytes < held <= cost.remote_bytes + next_keys + 3 * HEADER_BYTES


def test_ring_holds_what_is_computed_of_other_ranks(monkeypatch):
    """And no more on top than the shard that comes while this one leaves."""
    layout = zigzag_plan((0, 40, 200), 4)

    def run(transport):
        shard = Shard(layout, transport.rank, transport)
        q, k, v = (draw(shard.num_tokens, heads, 0) for heads in (4, 2, 2))
        opened = Trunk(k, v, shard=shard, scale=0.5, route="ring")
        opened.attend(q, opened.queries()).sum().backward()

    found = watched(run, 4, monkeypatch, arriving=("keys and values", "gradients of keys and values"))
    for cost, held in zip(ring_cost(Visibility(layout), HEADS), found, strict=True):
        assert cost.remote_bytes < held <= 2 * cost.remote_bytes + 4 * HEADER_BYTES


@pytest.mark.parametrize("window", [None, 1, 4])
def test_pairs_and_flops_are_those_of_the_mask(window):
    layout = balanced_plan((0, 4, 5, 30), 4)
    costs = kept_cost(Visibility(layout, window=window), HEADS, num_passes=NUM_PASSES)
    for rank, cost in enumerate(costs):
        trunk = int(visible_mask(layout, layout.index(rank), window=window).sum())
        pairs = NUM_PASSES * trunk + layout.num_local(rank) * sum(range(NUM_PASSES))
        assert cost.num_pairs == pairs
        assert cost.forward_flops == FORWARD_FLOPS * pairs * 16
        assert cost.backward_flops == BACKWARD_FLOPS * pairs * 16


def run_blocks(transport, blocks, route, saved, *, is_causal=False) -> tuple[int, int]:
    """One rank's blocks, forward and backward; returns bytes and messages of the forward."""
    shard, num_slots = Shard(blocks.layout, transport.rank, transport), blocks.num_slots
    num_rows = len(blocks.owned(transport.rank)) * num_slots
    q, block_k, block_v = (draw(num_rows, heads, seed) for seed, heads in enumerate((4, 2, 2)))
    k, v = (draw(shard.num_tokens, 2, seed) for seed in (3, 4))
    with saving(saved):
        out = block_attention(
            *(x.unflatten(0, (-1, num_slots)) if x is q else x for x in (q, k, v)),
            block_k_ASMD=block_k.unflatten(0, (-1, num_slots)), block_v_ASMD=block_v.unflatten(0, (-1, num_slots)),
            blocks=blocks, shard=shard, scale=0.5, route=route, is_causal=is_causal,
        )  # fmt: skip
    forward = transport.traffic.num_bytes, transport.traffic.num_messages
    out.sum().backward()
    return forward


@pytest.mark.parametrize("route", ["keys", "queries"])
def test_blocks_hold_what_is_computed_of_other_ranks(monkeypatch, route):
    """And no more on top than the gradients of one rank's, which are freed when the next exist, and headers."""
    layout = zigzag_plan((0, 40, 200), 4)
    blocks = DraftBlocks(layout, tuple(range(5, 200, 9)), 3)
    found = watched(
        lambda transport: run_blocks(transport, blocks, route, {}), 4, monkeypatch,
        arriving=("keys and values", "queries"), made_in=block_draft,
    )  # fmt: skip
    for rank, (cost, held) in enumerate(zip(block_cost(blocks, route, HEADS), found, strict=True)):
        others = [other for other in range(4) if other != rank]
        if route == "keys":
            more = max(num_in(blocks.keys(rank, other)) for other in others) * HEADS.gradient_bytes
        else:
            more = max(num_in(blocks.rows(other, rank)) for other in others) * 4 * 4 * 4
        assert cost.remote_bytes < held <= cost.remote_bytes + more + 3 * HEADER_BYTES


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("route", ["keys", "queries"])
def test_blocks_send_and_save_what_is_computed(route, world, window):
    layout = zigzag_plan((0, 11, 40), world)
    anchors = tuple(sorted(random.Random(0).sample(range(40), 7)))
    blocks = DraftBlocks(layout, anchors, 3, window=window)

    def rank(transport):
        saved: dict[tuple, int] = {}
        forward = run_blocks(transport, blocks, route, saved)
        return (forward, (transport.traffic.num_bytes, transport.traffic.num_messages)), sum(saved.values())

    costs = block_cost(blocks, route, HEADS)
    found = run_local_ranks(rank, world)
    assert [sent for sent, _ in found] == expected(costs)
    for number, (cost, (_, saved)) in enumerate(zip(costs, found, strict=True)):
        others = [other for other in range(world) if other != number]
        kept = {
            "keys": sum(num_in(blocks.keys(number, other)) for other in others) * HEADS.key_bytes,
            "queries": sum(num_in(blocks.rows(other, number)) for other in others) * 4 * 4 * 4,
        }
        assert saved == cost.saved_bytes + layout.num_local(number) * HEADS.key_bytes + kept[route]
    if window is None:  # 3 slots see the keys before their anchor, and their block
        starts = [layout.segment_of(anchor)[0] for anchor in anchors]
        pairs = sum(3 * (anchor - start) + 9 for anchor, start in zip(anchors, starts))
        assert sum(cost.num_pairs for cost in block_cost(blocks, route, HEADS)) == pairs


def asked_of_kernels(run, world, monkeypatch) -> list[Counter]:
    """Pairs of a query and a key that every rank asks kernels for, forward and backward."""
    local = threading.local()

    def counted(name, kernel, tensors):
        def count(*args):
            q, k, is_causal = args[tensors], args[tensors + 1], args[-3]
            num_calls, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
            assert not is_causal or num_queries == num_keys
            pairs = num_queries * (num_queries + 1) // 2 if is_causal else num_queries * num_keys
            local.pairs[name] += num_calls * pairs
            return kernel(*args)

        return count

    monkeypatch.setattr(kernels, "_forward", counted("forward", kernels._forward, 0))
    monkeypatch.setattr(kernels, "_backward", counted("backward", kernels._backward, 1))

    def rank(transport):
        local.pairs = Counter()
        run(transport)
        return local.pairs

    return run_local_ranks(rank, world)


def assert_asked(found, costs, heads, num_branch):
    """`num_branch` pairs of a rank are with branch keys, which no kernel is asked for."""
    for pairs, cost, num_other in zip(found, costs, num_branch, strict=True):
        assert pairs["forward"] == pairs["backward"] == cost.num_pairs - num_other > 0
        assert cost.forward_flops == 4 * heads.num_heads * heads.head_dim * (pairs["forward"] + num_other)
        assert cost.backward_flops == 10 * heads.num_heads * heads.head_dim * (pairs["backward"] + num_other)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("mode", ["ring", "kept", "streamed", "tiled"])
def test_kernels_are_asked_for_the_pairs_that_are_computed(monkeypatch, mode, window):
    layout = balanced_plan((0, 4, 5, 60), 3)
    visible = Visibility(layout, window=window)

    def run(transport):
        shard = Shard(layout, transport.rank, transport)
        if mode == "tiled":
            run_tiled(shard, 5, window=window)
            return
        options = {"ring": {"route": "ring"}, "kept": {}, "streamed": {"num_kept": 0}}[mode]
        q, k, v = (draw(shard.num_tokens, heads, 0) for heads in (4, 2, 2))
        opened, branch = Trunk(k, v, shard=shard, scale=0.5, window=window, **options), [k, k][: NUM_PASSES - 1]
        outs = [
            opened.attend(q, opened.queries(), branch_k=branch[:number], branch_v=branch[:number])
            for number in range(NUM_PASSES)
        ]
        sum(out.sum() for out in outs).backward()

    costs = {
        "ring": lambda: ring_cost(visible, HEADS, num_passes=NUM_PASSES),
        "kept": lambda: kept_cost(visible, HEADS, num_passes=NUM_PASSES),
        "streamed": lambda: kept_cost(visible, HEADS, num_passes=NUM_PASSES, num_kept=0),
        "tiled": lambda: kept_cost(visible, HEADS, num_passes=NUM_PASSES, tile_size=5),
    }[mode]()
    num_branch = [num_local * sum(range(NUM_PASSES)) for num_local in visible.num_local]
    assert_asked(asked_of_kernels(run, 3, monkeypatch), costs, HEADS, num_branch)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("route", ["keys", "queries"])
def test_kernels_are_asked_for_the_pairs_of_blocks_on_every_rank(monkeypatch, route, window, is_causal):
    blocks = DraftBlocks(zigzag_plan((0, 11, 60), 3), tuple(range(2, 60, 4)), 3, window=window)
    found = asked_of_kernels(
        lambda transport: run_blocks(transport, blocks, route, {}, is_causal=is_causal), 3, monkeypatch
    )
    assert_asked(found, block_cost(blocks, route, HEADS, is_causal=is_causal), HEADS, [0] * 3)


def test_blocks_on_a_long_row_send_what_was_designed():
    """512 anchors x 16 slots on 256K tokens and 8 ranks. All of a rank's rows go to every other, if none is early."""
    layout, heads = zigzag_plan((0, 2**18), 8), Heads(32, 8, 128)
    blocks = DraftBlocks(layout, tuple(range(2**17 + 100, 2**18, 256)), 16)
    (ring, *_), queries = ring_cost(Visibility(layout), heads), block_cost(blocks, "queries", heads)
    assert ring.sent.num_bytes == pytest.approx(4.03e9, rel=2e-3)
    mean = sum(cost.sent.num_bytes for cost in queries) / 8
    assert mean == pytest.approx(0.354e9, rel=5e-3)


def test_long_rows_are_weighed_without_tensors():
    layout = zigzag_plan((0, 2**20), 8)
    costs = kept_cost(Visibility(layout), HEADS)
    assert sum(cost.num_pairs for cost in costs) == 2**19 * (2**20 + 1)
    assert "_index" not in vars(layout) and "position_ids_T" not in vars(layout)
