"""A draft's passes in tiles equal the same passes over the whole row at once, in loss and gradients."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import PLANS
from ranks import tiny_batch, tiny_draft, tiny_weights

from hf_codraft.attention.reference import reference_attention, visible_mask
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.tiled import TiledPasses, tiled_loss
from hf_codraft.attention.transport import run_local_ranks
from hf_codraft.taps.packed import PackedBatch

WIDTH, HEADS, KV_HEADS, HEAD_DIM, NUM_PASSES, SCALE = 12, 6, 2, 4, 3, 0.5
ROW = (0, 11, 12, 21)

_benchmark = importlib.util.spec_from_file_location(
    "context_parallel_benchmark", Path(__file__).parents[3] / "benchmarks" / "context_parallel.py"
)
_module = importlib.util.module_from_spec(_benchmark)
sys.modules[_benchmark.name] = _module
_benchmark.loader.exec_module(_module)
LIVE_BYTES = _module.LiveBytes


def parameters() -> list[torch.nn.Parameter]:
    """Weights of queries, keys, values, and what leads from one pass to the next."""
    generator = torch.Generator().manual_seed(0)
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    shapes = [(WIDTH, size) for size in sizes] + [(HEADS * HEAD_DIM, WIDTH)]
    return [torch.nn.Parameter(torch.randn(*s, generator=generator, dtype=torch.float64) * 0.4) for s in shapes]


def run_passes(attend, state, weights) -> torch.Tensor:
    """Sum of squares of all states; `attend(q, branch_k, branch_v)` is the only thing that looks at other rows."""
    w_q, w_k, w_v, w_o = weights
    branch_k, branch_v, loss = [], [], 0.0
    for step in range(NUM_PASSES):
        if step:
            branch_k.append((state @ w_k).unflatten(1, (KV_HEADS, HEAD_DIM)))
            branch_v.append((state @ w_v).unflatten(1, (KV_HEADS, HEAD_DIM)))
        q = (state @ w_q).unflatten(1, (HEADS, HEAD_DIM))
        state = torch.tanh(state + attend(q, branch_k, branch_v).flatten(1) @ w_o)
        loss = loss + (step + 1) * state.square().sum()
    return loss


def inputs() -> torch.Tensor:
    return torch.randn(ROW[-1], WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_kept", [None, 1, 0], ids=["all kept", "partly kept", "streamed"])
@pytest.mark.parametrize("tile_size", [1, 3, 100])
def test_loss_and_gradients_equal_the_dense_ones(tile_size, num_kept, window):
    weights, x_TH = parameters(), inputs()
    for world, plan, share in ((1, "zigzag", 1), (3, "zigzag", 2), (4, "balanced", 5), (3, "contiguous", 99)):
        layout = PLANS[plan](ROW, world)
        is_query = torch.arange(ROW[-1]) % share == 0  # under the last share two ranks query nothing
        index, (_, w_k, w_v, _) = is_query.nonzero()[:, 0], weights
        k, v = ((x_TH @ w).unflatten(1, (KV_HEADS, HEAD_DIM)) for w in (w_k, w_v))
        mask = visible_mask(layout, index, window=window)
        want = run_passes(
            lambda q, bk, bv, k=k, v=v, mask=mask: reference_attention(
                q, k, v, mask, scale=SCALE, branch_k=bk, branch_v=bv
            ),
            x_TH[index],
            weights,
        )
        wanted = torch.autograd.grad(want, weights)

        def one_rank(transport, layout=layout, is_query=is_query):
            own = layout.shard(x_TH, transport.rank)
            rows = layout.shard(is_query, transport.rank).nonzero()[:, 0]

            def project(tile):
                return tuple((own[tile] @ w).unflatten(1, (KV_HEADS, HEAD_DIM)) for w in weights[1:3])

            def tile_loss(trunk, queries, tile):
                def attend(q, branch_k, branch_v):
                    return trunk.attend(q, queries, branch_k=branch_k, branch_v=branch_v)

                loss = run_passes(attend, own[rows[tile]], weights)
                return loss, torch.tensor(float(len(rows[tile])))

            passes = TiledPasses(
                project, tile_loss, Shard(layout, transport.rank, transport), rows, tile_size, SCALE, window, num_kept
            )
            loss, count = tiled_loss(passes, weights)
            return loss.detach(), torch.autograd.grad(2 * loss, weights), count

        results = run_local_ranks(one_rank, world, timeout_s=20)
        torch.testing.assert_close(sum(r[0] for r in results), want.detach(), rtol=1e-12, atol=0)
        assert sum(r[2] for r in results) == len(index)
        for number, gradient in enumerate(wanted):
            got = sum(r[1][number] for r in results)
            torch.testing.assert_close(got, 2 * gradient, rtol=0, atol=1e-11 * gradient.abs().max().item())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("num_passes", [1, 3, 7])
def test_an_eagle3_draft_on_sharded_rows_equals_one_rank(num_passes, plan):
    policy, batch = tiny_weights(), tiny_batch([(3, 9), (1, 14), (2, 3), (1, 1), (5, 2)])
    draft = tiny_draft(draft_vocab_size=20 if num_passes == 3 else 48)
    weights = list(draft.parameters())
    want = draft.compute_loss(batch, policy, num_passes=num_passes, chunk_size=None)
    wanted = torch.autograd.grad(want.loss, weights)
    layout = PLANS[plan](batch.layout.cu_seqlens, 3)
    for chunk_size in (None, 5):

        def one_rank(transport, chunk_size=chunk_size):
            own = [
                layout.shard(x, transport.rank)
                for x in (batch.token_ids_T, batch.supervised_T, batch.taps_TX, batch.hidden_TH)
            ]
            part = PackedBatch(Shard(layout, transport.rank, transport), *own)
            loss = draft.compute_loss(part, policy, num_passes=num_passes, chunk_size=chunk_size)
            return loss.loss_sum_K, loss.count_K, torch.autograd.grad(loss.loss, weights)

        results = run_local_ranks(one_rank, 3)
        assert torch.equal(sum(r[1] for r in results), want.count_K)
        torch.testing.assert_close(sum(r[0] for r in results), want.loss_sum_K, rtol=1e-11, atol=1e-11)
        for number, gradient in enumerate(wanted):
            error = (sum(r[2][number] for r in results) - gradient).norm()
            assert error <= 1e-11 * gradient.norm().clamp(min=1e-9)


def test_autocast_costs_tiles_no_more_precision_than_the_whole_row():
    rows = [(3, 29), (1, 14), (5, 22)]
    exact_draft, narrow = tiny_draft(), tiny_draft(exact=False)
    narrow.load_state_dict(exact_draft.state_dict())
    exact = exact_draft.compute_loss(tiny_batch(rows), tiny_weights(), num_passes=3, chunk_size=None).loss
    wanted = torch.cat([x.flatten() for x in torch.autograd.grad(exact, list(exact_draft.parameters()))])
    batch, policy = tiny_batch(rows, dtype=torch.float32), tiny_weights(dtype=torch.float32)
    errors = {}
    for chunk_size in (None, 7):
        with torch.autocast("cpu", torch.bfloat16):
            loss = narrow.compute_loss(batch, policy, num_passes=3, chunk_size=chunk_size).loss
        grads = torch.autograd.grad(loss, list(narrow.parameters()))
        assert all(grad.dtype == torch.float32 for grad in grads)
        errors[chunk_size] = (torch.cat([x.flatten() for x in grads]) - wanted).norm() / wanted.norm()
    assert 1e-4 < errors[None] < 0.1  # bf16 it was
    assert errors[7] <= 1.5 * errors[None]


def peak_bytes(draft, num_tokens: int, chunk_size: int | None) -> int:
    """The most that tensors held at one time in a step, inputs and weights left out."""
    batch, policy = tiny_batch([(1, num_tokens - 1)]), tiny_weights()
    with LIVE_BYTES() as live:
        loss = draft.compute_loss(batch, policy, num_passes=7, chunk_size=chunk_size).loss
        torch.autograd.grad(loss, list(draft.parameters()))
    return live.peak


def test_tiles_hold_less_and_grow_less():
    draft = tiny_draft()
    peaks = {chunk: [peak_bytes(draft, tokens, chunk) for tokens in (400, 800)] for chunk in (None, 40)}
    assert peaks[40][1] <= peaks[None][1] / 8
    keys = 2 * 2 * 2 * 12 * 8  # keys, values and their gradients of one token, in fp64
    assert (peaks[40][1] - peaks[40][0]) / 400 <= 3 * keys
    assert (peaks[None][1] - peaks[None][0]) / 400 >= 20 * keys


def test_a_tile_without_a_row_is_refused():
    with pytest.raises(ValueError, match="tile_size must be at least 1, got 0"):
        TiledPasses(None, None, Shard(PLANS["zigzag"](ROW, 1)), torch.arange(3), 0, SCALE)
