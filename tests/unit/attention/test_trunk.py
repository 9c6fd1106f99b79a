"""Passes over a sharded trunk against one dense softmax in fp64: every planner, route, dtype, head shape and window."""

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from attention_cases import (
    MODES,
    PLANS,
    SCALE,
    TrunkCase,
    assert_exact,
    every_pair,
    join,
    leaves,
    output_gradients,
    recorded,
    run_rank,
    run_threads,
    split,
    truth,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_codraft.attention.blocks import needed_keys
from hf_codraft.attention.cost import Visibility
from hf_codraft.attention.layout import PackedLayout, Piece
from hf_codraft.attention.reference import visible_mask
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import HEADER_BYTES, Delivery, run_local_ranks
from hf_codraft.attention.trunk import Trunk, num_kept_within, trunk_attention

AXES = {
    "lengths": [(5, 1, 9, 1), (1, 1, 1), (2,), (40, 3, 2, 2, 1, 2), (33,)],
    "world": [1, 2, 3, 4, 8],
    "plan": list(PLANS),
    "mode": list(MODES),
    "dtype": [torch.float64, torch.float32, torch.bfloat16],
    "heads": [(4, 4), (6, 2), (9, 3), (3, 1)],  # multi-head, grouped, grouped by three, multi-query
    "head_dim": [16, 64, 128],
    "window": [None, 1, 7, 1000],
    "num_passes": [1, 2, 4],
    "supervised": ["all", "one rank", "none"],
    "queries": ["all", "some"],
}


@pytest.mark.parametrize("case", [TrunkCase(**case) for case in every_pair(AXES)], ids=str)
def test_values_and_gradients_equal_a_dense_softmax(case):
    assert_exact(case, run_threads(case))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_the_whole_cross_equals_a_dense_softmax(part):
    pick = random.Random(part)
    for _ in range(150):
        case = TrunkCase(**{axis: pick.choice(values) for axis, values in AXES.items()})
        assert_exact(case, run_threads(case))


@pytest.mark.parametrize("mode", MODES)
def test_the_eager_kernel_gives_the_same(mode):
    case = TrunkCase(mode=mode, kernel="eager", window=7, heads=(9, 3))
    assert_exact(case, run_threads(case))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("owners", ["alternate", "back to front", "one rank has all", "one token apart"])
def test_any_pieces_equal_a_dense_softmax(owners, mode, monkeypatch):
    """Layouts that no planner makes; in most, many a rank has keys that many another does not see."""
    of_token = {
        "alternate": lambda token: token % 3,
        "back to front": lambda token: 2 - token // 6,
        "one rank has all": lambda token: 1,
        "one token apart": lambda token: 2 if token == 7 else 0,
    }[owners]
    case = TrunkCase(lengths=(5, 1, 9, 1), mode=mode)
    layout = PackedLayout((0, 5, 6, 15, 16), 3, tuple(Piece(n, n + 1, of_token(n)) for n in range(16)))
    monkeypatch.setattr(TrunkCase, "layout", property(lambda case: layout))
    for window in (None, 3):
        case = replace(case, window=window)
        assert_exact(case, run_threads(case))


# A rank that is left out, one that waits


@pytest.mark.parametrize("mode", MODES)
def test_the_future_and_other_segments_change_nothing_bit_for_bit(mode):
    case = TrunkCase(lengths=(17, 8), world=3, mode=mode, num_passes=3, dtype=torch.float32)
    plain = leaves(case, case.dtype)
    zero = [torch.zeros_like(x) for x in output_gradients(case)]
    before = run_threads(case, whole=plain, gradients=zero)[: case.num_passes]
    for token in (0, 6, 11, 16, 17, 24):
        changed = [x.clone() for x in plain]
        for x in changed:  # queries, keys and values, those of its branch too
            x[token] += 3
        after = run_threads(case, whole=changed, gradients=zero)[: case.num_passes]
        sees = visible_mask(case.layout, torch.arange(25))[:, token]
        for x, y in zip(before, after):
            assert torch.equal(x[~sees], y[~sees])
            assert (x[sees] != y[sees]).flatten(1).any(1).all()


def test_a_token_outside_of_the_window_changes_nothing_bit_for_bit():
    case = TrunkCase(lengths=(17, 8), world=3, window=4, num_passes=1)
    plain = leaves(case, case.dtype)
    changed = [x.clone() for x in plain]
    for x in changed[1:]:
        x[5] += 3
    before, after = (run_threads(case, whole=x)[0] for x in (plain, changed))
    is_seen = visible_mask(case.layout, torch.arange(25), window=4)[:, 5]
    assert is_seen.sum() == 4
    assert torch.equal(before[~is_seen], after[~is_seen])
    assert (before[is_seen] != after[is_seen]).flatten(1).any(1).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(40, 3, 2), (2,), (1, 1, 1)], ids=str)
def test_all_ranks_make_the_same_collectives_in_the_same_order(mode, lengths):
    case = TrunkCase(lengths=lengths, world=4, mode=mode, num_passes=2)

    def one_rank(transport):
        calls = recorded(transport)
        run_rank(case, transport)
        return calls

    first, *others = run_local_ranks(one_rank, case.world, timeout_s=20)
    assert first
    assert all(calls == first for calls in others)


def traffic(case) -> list[tuple[int, int]]:
    """Bytes and messages that each rank sends, forward and backward."""

    def one_rank(transport):
        run_rank(case, transport)
        return transport.traffic.num_bytes, transport.traffic.num_messages

    return run_local_ranks(one_rank, case.world, timeout_s=20)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_and_messages_are_the_closed_form(dtype, num_passes, window):
    case = TrunkCase(lengths=(21, 4, 8), world=3, num_passes=num_passes, dtype=dtype, window=window)
    layout, world = case.layout, case.world
    pair_bytes = 2 * case.heads[1] * case.head_dim * dtype.itemsize  # one token's key and value
    gradient_bytes = 2 * case.heads[1] * case.head_dim * (8 if dtype == torch.float64 else 4)
    shard = Shard(PackedLayout(layout.cu_seqlens))  # blocks of any two ranks, by a single one's shard
    shard = replace(shard, layout=layout, transport=_Nobody(world))
    seen = [
        [sum(b - a for a, b in needed_keys(shard.blocks(q, k, window))) for k in range(world)] for q in range(world)
    ]
    for mode, num_kept in (("kept", world - 1), ("partly kept", 1), ("streamed", 0)):
        want = []
        for rank in range(world):
            num_bytes = num_messages = 0
            for step in range(1, world):
                target, source = (rank + step) % world, (rank - step) % world
                fetches = 1 if step <= num_kept else 2 * num_passes  # streamed keys come in each forward and backward
                returns = 1 if step <= num_kept else num_passes
                if seen[target][rank]:
                    num_bytes += fetches * (HEADER_BYTES + seen[target][rank] * pair_bytes)
                    num_messages += fetches
                if seen[rank][source]:
                    num_bytes += returns * (HEADER_BYTES + seen[rank][source] * gradient_bytes)
                    num_messages += returns
            want.append((num_bytes, num_messages))
        assert traffic(replace(case, mode=mode)) == want, mode
    ring = []
    for rank in range(world):
        held = [layout.num_local((rank - step) % world) for step in range(world)]
        keys = sum(HEADER_BYTES + held[step] * pair_bytes for step in range(world - 1))
        gradients = sum(HEADER_BYTES + held[step] * gradient_bytes for step in range(world))
        ring.append((num_passes * (2 * keys + gradients), num_passes * (2 * (world - 1) + world)))
    assert traffic(replace(case, mode="ring")) == ring


class _Nobody:
    """A transport that reaches nobody: enough for a shard that is only asked what its ranks see."""

    def __init__(self, world):
        self.world, self.rank = world, 0


# Memory


class PeakBytes(TorchDispatchMode):
    """The most bytes that were alive at one time of what operators of this thread made or unpacked."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@dataclass(frozen=True)
class WatchedDelivery:
    delivery: Delivery
    see: Callable

    def wait(self):
        arrived = self.delivery.wait()
        self.see(arrived[0].untyped_storage())
        return arrived


def watch_arrivals(transport, see) -> None:
    """Calls `see` with the storage of every parcel that comes."""
    exchange = transport.exchange
    transport.exchange = lambda *args, **options: [
        WatchedDelivery(delivery, see) for delivery in exchange(*args, **options)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streaming_holds_less_in_the_backward_than_keeping(dtype):
    """On the last rank of a contiguous row, which sees all keys and whose own nobody else sees."""
    layout = PLANS["contiguous"]((0, 1024), 8)

    def one_rank(transport, keep_remote):
        shard = Shard(layout, transport.rank, transport)
        q, k, v = (torch.ones(128, 2, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        with PeakBytes() as live:
            trunk_attention(q, k, v, shard=shard, scale=SCALE, keep_remote=keep_remote).sum().backward()
        return live.peak

    kept, streamed = (
        run_local_ranks(lambda t, keep=keep: one_rank(t, keep), 8, timeout_s=20)[-1] for keep in (True, False)
    )
    assert streamed < 0.6 * kept


@pytest.mark.parametrize("mode", ["kept", "partly kept", "streamed"])
def test_at_most_two_parcels_of_gradients_are_on_their_way(mode):
    case = TrunkCase(lengths=(64,), world=8, mode=mode, num_passes=2)

    def one_rank(transport):
        exchange, posted, most = transport.exchange, [], [0]

        def watched(sends, receives, *, what, **rest):
            deliveries = exchange(sends, receives, what=what, **rest)
            if what == "gradients of keys and values":
                posted.append(weakref.ref(deliveries[0]))
                most.append(sum(delivery() is not None for delivery in posted))
            return deliveries

        transport.exchange = watched
        run_rank(case, transport)
        return max(most)

    assert run_local_ranks(one_rank, case.world, timeout_s=20) == [2] * case.world


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_frees_the_keys_of_its_first_forward(mode):
    """Own keys, and what came from other ranks, until the backward makes and asks for them anew."""
    case = TrunkCase(mode=mode, num_passes=1)
    route, num_kept = MODES[mode]

    def one_rank(transport, is_checkpointed):
        layout, shard = case.layout, Shard(case.layout, transport.rank, transport)
        q, k, v = (layout.shard(x, transport.rank).requires_grad_() for x in leaves(case, case.dtype))
        held = []
        watch_arrivals(transport, lambda storage: held.append(StorageWeakRef(storage)))

        def layer(q, k, v):
            k, v = k * 2, v * 3  # the projection
            held.extend(StorageWeakRef(x.untyped_storage()) for x in (k, v))
            trunk = Trunk(k, v, shard=shard, scale=SCALE, route=route, num_kept=num_kept)
            return trunk.attend(q, trunk.queries())

        if is_checkpointed:
            out = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            out = layer(q, k, v)
        alive = [not x.expired() for x in held]
        out.backward(layout.shard(output_gradients(case)[0], transport.rank))
        return alive, [not x.expired() for x in held], [q.grad, k.grad, v.grad]

    plain, dropped = (
        run_local_ranks(lambda t, flag=flag: one_rank(t, flag), case.world, timeout_s=20) for flag in (False, True)
    )
    for (held, after, want), (freed, freed_after, got) in zip(plain, dropped, strict=True):
        assert held[:2] == [True] * 2 and len(freed) == len(held) > 2
        assert not any(freed) and not any(after) and not any(freed_after)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("around", ["all passes", "all passes, reentrant", "each pass"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_change_no_bit(mode, around):
    case = TrunkCase(lengths=(17, 8), mode=mode, num_passes=3, dtype=torch.float32, window=7)
    plain = run_threads(case)
    options = {"use_reentrant": "reentrant" in around, "preserve_rng_state": False}

    def one_rank(transport):
        layout, shard = case.layout, Shard(case.layout, transport.rank, transport)
        own = [layout.shard(x, transport.rank).requires_grad_() for x in leaves(case, case.dtype)]
        route, num_kept = MODES[mode]

        def passes(*tensors):
            queries, (k, v), branch_k, branch_v = split(case, tensors)
            trunk = Trunk(k, v, shard=shard, scale=SCALE, window=7, route=route, num_kept=num_kept)

            def attend(number, q):
                return trunk.attend(q, trunk.queries(), branch_k=branch_k[:number], branch_v=branch_v[:number])

            if around == "each pass":
                attend = partial(torch.utils.checkpoint.checkpoint, attend, **options)
            return tuple(attend(number, q) for number, q in enumerate(queries))

        outs = passes(*own) if around == "each pass" else torch.utils.checkpoint.checkpoint(passes, *own, **options)
        torch.autograd.backward(outs, [layout.shard(x, transport.rank) for x in output_gradients(case)])
        return [*(out.detach() for out in outs), *(x.grad for x in own)]

    assert all(map(torch.equal, join(case, run_local_ranks(one_rank, case.world, timeout_s=20)), plain))


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_asks_for_no_keys_leaves_nothing_to_the_next(mode):
    """Passes run in it as in any other, but the keys' gradients are not fetched from the trunk."""
    case = TrunkCase(lengths=(17, 8), mode=mode, dtype=torch.float32, num_passes=3)

    def one_rank(transport):
        layout, shard = case.layout, Shard(case.layout, transport.rank, transport)
        own = [layout.shard(x, transport.rank).requires_grad_() for x in leaves(case, case.dtype)]
        queries, (k, v), branch_k, branch_v = split(case, own)
        route, num_kept = MODES[mode]
        trunk = Trunk(k, v, shard=shard, scale=SCALE, route=route, num_kept=num_kept)
        outs = [
            trunk.attend(q, trunk.queries(), branch_k=branch_k[:n], branch_v=branch_v[:n])
            for n, q in enumerate(queries)
        ]
        grads = [layout.shard(x, transport.rank) for x in output_gradients(case)]
        backward = partial(torch.autograd.grad, retain_graph=True)
        partly = [
            *backward(outs[1:2], queries[1:2], grads[1:2]),
            *backward(outs, [*branch_k, *branch_v], grads),
            *backward(outs[2:], queries[2:], grads[2:]),
        ]
        wanted = [queries[1], *branch_k, *branch_v, queries[2]]
        torch.autograd.backward(outs, grads, retain_graph=True)
        assert all(torch.equal(got, x.grad) for got, x in zip(partly, wanted, strict=True))
        first = [x.grad.clone() for x in own]
        torch.autograd.backward(outs, grads)
        assert all(torch.equal(x.grad, 2 * once) for x, once in zip(own, first, strict=True))
        return [*(out.detach() for out in outs), *first]

    got = join(case, run_local_ranks(one_rank, case.world, timeout_s=20))
    assert all(map(torch.equal, got, run_threads(case)))


# Precision


def test_bf16_error_is_at_most_twice_that_of_sdpa():
    case = TrunkCase(lengths=(40, 1, 30), world=4, num_passes=4, dtype=torch.bfloat16, head_dim=64)
    tensors = [x.requires_grad_() for x in leaves(case, torch.bfloat16)]
    num = case.num_passes
    mask = visible_mask(case.layout, torch.arange(71))
    outs = []
    for n, q in enumerate(tensors[:num]):
        own = torch.eye(71, dtype=torch.bool).repeat(1, n)
        k = torch.cat([tensors[num], *tensors[num + 2 : num + 2 + n]])
        v = torch.cat([tensors[num + 1], *tensors[2 * num + 1 : 2 * num + 1 + n]])
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        seen = torch.cat([mask, own], 1)[None, None]
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=SCALE, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    plain = [*outs, *torch.autograd.grad(outs, tensors, output_gradients(case))]
    for ours, theirs, want in zip(run_threads(case), plain, truth(case), strict=True):
        assert (ours.double() - want).norm() <= 2 * (theirs.double() - want).norm()


def test_autocast_does_not_round_what_it_was_not_asked_to():
    case = TrunkCase(lengths=(6, 3), world=2, dtype=torch.float32, num_passes=3)

    def inside(transport):
        with torch.autocast("cpu", torch.bfloat16):
            return run_rank(case, transport)

    plain, under = run_threads(case), join(case, run_local_ranks(inside, 2))
    assert all(torch.equal(x, y) for x, y in zip(plain, under, strict=True))


# The interface


def test_parts_of_queries_equal_all_of_them():
    case = TrunkCase(lengths=(17, 8), world=3, window=5, num_passes=1)

    def one_rank(transport):
        shard = Shard(case.layout, transport.rank, transport)
        q, k, v = (case.layout.shard(x, transport.rank) for x in leaves(case, case.dtype))
        trunk = Trunk(k, v, shard=shard, scale=SCALE, window=5)
        whole = trunk.queries()
        expected = trunk.attend(q, whole)
        for fresh in (whole, trunk.queries()):  # blocks known already, and not
            parts = [trunk.attend(q[a : a + 3], fresh.part(a, min(a + 3, len(q)))) for a in range(0, len(q), 3)]
            torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-13)

    run_local_ranks(one_rank, 3)


@pytest.mark.parametrize("keep_remote", [False, True])
def test_trunk_attention_is_one_pass(keep_remote):
    case = TrunkCase(lengths=(17, 8), world=3, num_passes=1)

    def one_rank(transport):
        shard = Shard(case.layout, transport.rank, transport)
        own = [case.layout.shard(x, transport.rank).requires_grad_() for x in leaves(case, case.dtype)]
        out = trunk_attention(*own, shard=shard, scale=SCALE, keep_remote=keep_remote)
        out.backward(case.layout.shard(output_gradients(case)[0], transport.rank))
        return [out.detach(), *(x.grad for x in own)]

    assert_exact(case, join(case, run_local_ranks(one_rank, 3)))


@pytest.mark.parametrize("window", [None, 7])
def test_what_is_kept_fits_the_budget_and_one_more_would_not(window):
    layout = PLANS["zigzag"]((0, 40, 43, 64), 4)
    shard = replace(Shard(PackedLayout(layout.cu_seqlens)), layout=layout, transport=_Nobody(4))

    def spent(num_kept: int) -> int:
        return 10 * max(
            sum(
                end - start
                for step in range(1, num_kept + 1)
                for start, end in needed_keys(shard.blocks(rank, (rank - step) % 4, window))
            )
            for rank in range(4)
        )

    assert spent(1) < spent(3)
    for budget in {0, spent(1) - 1, *(spent(num) for num in range(4)), 10**9}:
        num_kept = num_kept_within(layout, bytes_per_token=10, budget_bytes=budget, window=window)
        assert spent(num_kept) <= budget
        assert num_kept == 3 or spent(num_kept + 1) > budget


@pytest.mark.parametrize("window", [None, 6])
def test_a_trunk_keeps_what_its_budget_allows(window):
    """Tokens of 2 heads of 8 channels in bf16: 64 bytes of keys and values, 128 of their gradients."""
    layout = PLANS["zigzag"]((0, 40, 43, 64), 4)
    needed = [Visibility(layout, window=window).num_needed[rank][(rank - 1) % 4] for rank in range(4)]
    found = {}
    for budget in (0, 192 * max(needed) - 1, 192 * max(needed), 10**9):

        def one_rank(transport, budget=budget):
            k = torch.zeros(layout.num_local(transport.rank), 2, 8, dtype=torch.bfloat16)
            shard = Shard(layout, transport.rank, transport)
            return Trunk(k, k, shard=shard, scale=1.0, window=window, max_kept_bytes=budget).num_kept

        by_rank = run_local_ranks(one_rank, 4)
        assert by_rank == [num_kept_within(layout, bytes_per_token=192, budget_bytes=budget, window=window)] * 4
        found[budget] = by_rank[0]
    zero, below, at, all_kept = found.values()
    assert (zero, below, all_kept) == (0, 0, 3)
    assert at >= 1


def test_tensors_and_options_that_do_not_fit_are_refused():
    shard = Shard(PackedLayout.from_lengths([4]))
    k = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"route must be one of .*, got 'tree'"):
        Trunk(k, k, shard=shard, scale=1.0, route="tree")
    with pytest.raises(ValueError, match="a row for each of this rank's 4 tokens"):
        Trunk(k[1:], k[1:], shard=shard, scale=1.0)
    for options in ({"num_kept": 1}, {"route": "ring"}):
        with pytest.raises(ValueError, match="max_kept_bytes decides num_kept of route 'direct'"):
            Trunk(k, k, shard=shard, scale=1.0, max_kept_bytes=0, **options)
    with pytest.raises(ValueError, match="must have one shape"):
        Trunk(k, k[:, :1], shard=shard, scale=1.0)
    with pytest.raises(ValueError, match="kernel must be one of"):
        Trunk(k, k, shard=shard, scale=1.0, kernel="triton")
    with pytest.raises(ValueError, match="window must be at least 1 token, got 0"):
        trunk_attention(k, k, k, shard=shard, scale=1.0, window=0)
    trunk = Trunk(k, k, shard=shard, scale=1.0)
    with pytest.raises(ValueError, match="queries were made by a trunk of another layout or of window 2, not None"):
        trunk.attend(k, Trunk(k, k, shard=shard, scale=1.0, window=2).queries())
    with pytest.raises(ValueError, match="runs of rank 0 have 4 tokens, but k_TMD has 4 rows and v_TMD 3"):
        trunk.exchange.own(k, k[1:])
    with pytest.raises(ValueError, match="q_AND has 3 rows, but there are 4 queries"):
        trunk.attend(k[1:], trunk.queries())
    for q in (torch.zeros(4, 2, 16), torch.zeros(4, 2, 4), torch.zeros(4, 3, 8), torch.zeros(4, 1, 8), k[:, 0]):
        with pytest.raises(ValueError, match=r"q_AND \(4, .* with a multiple of the trunk's 2 key/value heads"):
            trunk.attend(q, trunk.queries())
    with pytest.raises(ValueError, match="branch_k has 1 tensors and branch_v 0"):
        trunk.attend(k, trunk.queries(), branch_k=[k])
    for wrong in (k[1:], k[:, :1], k[..., :4], k.repeat(1, 2, 1)):
        for name in ("branch_k", "branch_v"):
            branches = {"branch_k": [k, k], "branch_v": [k, k]} | {name: [k, wrong]}
            with pytest.raises(ValueError, match=rf"{name}\[1\] \(.*\) must have the shape \(4, 2, 8\)"):
                trunk.attend(k, trunk.queries(), **branches)


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [-1, 2], [2, 4], [1, 3, 2]], ids=str)
def test_rows_that_do_not_ascend_within_the_tokens_are_refused(rows):
    k = torch.zeros(4, 2, 8)
    trunk = Trunk(k, k, shard=Shard(PackedLayout.from_lengths([4])), scale=1.0)
    with pytest.raises(ValueError, match=r"rows must ascend, none twice, from 0 or more to less than 4"):
        trunk.queries(torch.tensor(rows))
    for others in (torch.ones(4, dtype=torch.bool), torch.zeros(1), torch.tensor(2)):
        with pytest.raises(ValueError, match="rows must be one axis of int64 rows"):
            trunk.queries(others)
    assert trunk.queries(torch.tensor([], dtype=torch.long)).num_queries == 0
