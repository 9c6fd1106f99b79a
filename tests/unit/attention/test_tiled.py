"""A draft's passes in tiles equal the same passes over the whole row at once, in loss and gradients."""

import importlib.util
import random
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from attention_cases import PLANS, every_pair, recorded
from ranks import tiny_batch, tiny_draft, tiny_weights

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.merge import stat_dtype
from hf_codraft.attention.reference import reference_attention, visible_mask
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.tiled import TiledPasses, tiled_loss
from hf_codraft.attention.transport import run_local_ranks

WIDTH = 12

_benchmark = importlib.util.spec_from_file_location(
    "context_parallel_benchmark", Path(__file__).parents[3] / "benchmarks" / "context_parallel.py"
)
_module = importlib.util.module_from_spec(_benchmark)
sys.modules[_benchmark.name] = _module
_benchmark.loader.exec_module(_module)
LIVE_BYTES = _module.LiveBytes


KEEP = {
    "kept": {},
    "partly kept": {"num_kept": 1},
    "streamed": {"num_kept": 0},
    "budget": {"max_kept_bytes": 3000},
    "no budget": {"max_kept_bytes": 0},
}
AXES = {
    # three segments; fewer tokens than ranks; one long segment among many short ones
    "lengths": [(11, 1, 9), (1, 2), (2, 1, 3, 17, 1, 2, 1, 4)],
    "world": [1, 2, 3, 4, 8],
    "plan": list(PLANS),
    "keep": list(KEEP),
    "tile_size": [1, 3, 100],
    "dtype": [torch.float64, torch.float32, torch.bfloat16],
    "heads": [(4, 4), (6, 2), (3, 1)],  # multi-head, grouped, multi-query
    "head_dim": [16, 64, 128],
    "window": [None, 1, 7, 1000],
    "num_passes": [1, 2, 4],
    "queries": ["all", "some", "last two"],  # "last two": most ranks query nothing
    "supervised": ["all", "some", "last token", "none"],  # which queries have a loss
}


@dataclass(frozen=True)
class TiledCase:
    """A layer that reads its own output pass by pass, in tiles; its parameters are the projections."""

    lengths: tuple[int, ...] = (11, 1, 9)
    world: int = 1
    plan: str = "zigzag"
    keep: str = "kept"
    tile_size: int = 100
    dtype: torch.dtype = torch.float64
    heads: tuple[int, int] = (6, 2)
    head_dim: int = 16
    window: int | None = None
    num_passes: int = 3
    queries: str = "all"
    supervised: str = "all"
    seed: int = 0

    @property
    def layout(self):
        return PLANS[self.plan](PackedLayout.from_lengths(self.lengths).cu_seqlens, self.world)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def is_query_T(self) -> torch.Tensor:
        tokens = torch.arange(self.num_tokens)
        return {"all": tokens >= 0, "some": tokens % 3 != 1, "last two": tokens >= self.num_tokens - 2}[self.queries]

    @property
    def weight_T(self) -> torch.Tensor:
        """Of every token's loss."""
        share = {"all": 1, "some": 4, "last token": self.num_tokens, "none": 1000}[self.supervised]
        return (torch.arange(1, self.num_tokens + 1) % share == 0).double()

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
        """Inputs and the weights of queries, keys, values and output, rounded to the dtype of the case."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [heads * self.head_dim for heads in (self.heads[0], self.heads[1], self.heads[1])]
        shapes = [(self.num_tokens, WIDTH), *((WIDTH, size) for size in sizes), (sizes[0], WIDTH)]
        x_TH, *weights = (
            (torch.randn(*shape, generator=generator, dtype=torch.float64) * factor).to(self.dtype).to(dtype)
            for shape, factor in zip(shapes, (1.0, 0.3, 0.3, 0.3, 0.5 * sizes[0] ** -0.5), strict=True)
        )
        return x_TH, [torch.nn.Parameter(weight) for weight in weights]

    def project(self, x_TH, weights) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple((x_TH @ w).unflatten(1, (self.heads[1], self.head_dim)) for w in weights[1:3])

    def run_passes(self, attend, state, weights, weight_A) -> torch.Tensor:
        """Weighted sum of squares of all states; `attend(q, branch_k, branch_v)` alone looks at other rows."""
        branch_k, branch_v, losses = [], [], []
        for step in range(self.num_passes):
            if step:
                k, v = self.project(state, weights)
                branch_k.append(k)
                branch_v.append(v)
            q = (state @ weights[0]).unflatten(1, (self.heads[0], self.head_dim))
            state = torch.tanh(state + attend(q, branch_k, branch_v).flatten(1) @ weights[3])
            wide = state.to(stat_dtype(state.dtype))
            losses.append((step + 1) * (wide.square().sum(1) * weight_A.to(wide.dtype)).sum())
        return torch.stack(losses).sum()


def dense(case: TiledCase) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients by a dense softmax in fp64."""
    x_TH, weights = case.tensors(torch.float64)
    index = case.is_query_T.nonzero()[:, 0]
    k, v = case.project(x_TH, weights)
    mask = visible_mask(case.layout, index, window=case.window)

    def attend(q, branch_k, branch_v):
        return reference_attention(q, k, v, mask, scale=case.scale, branch_k=branch_k, branch_v=branch_v)

    loss = case.run_passes(attend, x_TH[index], weights, case.weight_T[index])
    return loss.detach(), torch.autograd.grad(loss, weights, materialize_grads=True)


def in_tiles(case: TiledCase) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
    """Loss and gradients summed over ranks, and the number of queries on each."""
    layout = case.layout
    x_TH, weights = case.tensors(case.dtype)
    everyone = threading.Barrier(case.world)

    def one_rank(transport):
        calls, rank = recorded(transport), transport.rank
        own, weight = layout.shard(x_TH, rank), layout.shard(case.weight_T, rank)
        rows = layout.shard(case.is_query_T, rank).nonzero()[:, 0]

        def tile_loss(trunk, queries, tile):
            def attend(q, branch_k, branch_v):
                return trunk.attend(q, queries, branch_k=branch_k, branch_v=branch_v)

            loss = case.run_passes(attend, own[rows[tile]], weights, weight[rows[tile]])
            return loss, torch.tensor(float(len(rows[tile])))

        passes = TiledPasses(
            lambda tile: case.project(own[tile], weights), tile_loss, Shard(layout, rank, transport), rows,
            case.tile_size, case.scale, case.window, **KEEP[case.keep],
        )  # fmt: skip
        loss, count = tiled_loss(passes, weights)
        everyone.wait(60)  # no rank's gradients wait for another rank's backward
        grads = torch.autograd.grad(2 * loss, weights)
        assert [x.dtype for x in grads] == [case.dtype] * 4
        return loss.detach().double(), [x.double() / 2 for x in grads], int(count), calls

    losses, grads, counts, calls = zip(*run_local_ranks(one_rank, case.world, timeout_s=20), strict=True)
    assert all(own == calls[0] for own in calls)  # the same exchanges in the same order
    return sum(losses), [sum(column) for column in zip(*grads, strict=True)], list(counts)


def errors_of(case: TiledCase) -> tuple[list[float], float]:
    """Error of every parameter's gradient, and the largest norm of one; the loss is checked here."""
    want, wanted = dense(case)
    loss, grads, counts = in_tiles(case)
    assert sum(counts) == case.is_query_T.sum()
    assert abs(loss - want) <= {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-1}[case.dtype] * want
    norm = max(x.norm().item() for x in wanted)
    return [(got - expected).norm().item() for got, expected in zip(grads, wanted, strict=True)], norm


def check(case: TiledCase) -> None:
    """fp64 within 1e-12 of the largest gradient's norm, fp32 1e-5, bf16 1.5 times the error of one rank at once.

    Errors of bf16 are those of four draws together: one draw of so short a row may be lucky. An error below bf16's own
    rounding (2^-9 of the norm) is none.
    """
    if case.dtype != torch.bfloat16:
        errors, norm = errors_of(case)
        assert max(errors) <= {torch.float64: 1e-12, torch.float32: 1e-5}[case.dtype] * norm
        return
    split = [replace(case, seed=seed) for seed in range(4)]
    at_once = [replace(draw, world=1, keep="kept", tile_size=100) for draw in split]
    found = [[errors_of(draw) for draw in draws] for draws in (split, at_once)]
    together = [torch.tensor([errors for errors, _ in draws]).norm(dim=0) for draws in found]
    norm = torch.tensor([norm for _, norm in found[0]]).norm()
    assert (together[0] <= (1.5 * together[1]).clamp(min=2**-9 * norm)).all(), together


@pytest.mark.parametrize("case", [TiledCase(**case) for case in every_pair(AXES)], ids=str)
def test_loss_and_gradients_equal_the_dense_ones(case):
    check(case)


def sampled(count: int) -> list[TiledCase]:
    """Some of all combinations: three values that go wrong together need not meet in the pairs above."""
    pick = random.Random(1)
    return [TiledCase(**{axis: pick.choice(values) for axis, values in AXES.items()}) for _ in range(count)]


@pytest.mark.slow
def test_combinations_of_everything_equal_the_dense_ones():
    for case in sampled(16):
        check(case)


def ones(tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that nobody asks for."""
    x = torch.ones(tile.stop - tile.start, 1, 16, dtype=torch.bfloat16)
    return x, x


def test_gradients_of_a_thousand_tiles_are_summed_wider_than_bf16():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    shard = Shard(PLANS["zigzag"]((0, 1000), 1))

    def tile_loss(trunk, queries, tile):
        return weight.sum() * 1.0, torch.zeros(())  # the gradient of a sum is expanded: one number for three

    passes = TiledPasses(
        lambda tile: tuple(x * weight[0] for x in ones(tile)), tile_loss, shard, torch.arange(1000), 1, 1.0
    )
    loss, _ = tiled_loss(passes, [weight])
    (gradient,) = torch.autograd.grad(loss, [weight])
    assert loss == 3000  # in fp32, not 3008
    assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [1000] * 3


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


@pytest.mark.slow
def test_tiles_hold_less_and_grow_less():
    draft = tiny_draft()
    peaks = {chunk: [peak_bytes(draft, tokens, chunk) for tokens in (400, 800)] for chunk in (None, 40)}
    assert peaks[40][1] <= peaks[None][1] / 8
    keys = 2 * 2 * 2 * 12 * 8  # keys, values and their gradients of one token, in fp64
    assert (peaks[40][1] - peaks[40][0]) / 400 <= 3 * keys
    assert (peaks[None][1] - peaks[None][0]) / 400 >= 20 * keys


def test_a_tile_without_a_row_is_refused():
    with pytest.raises(ValueError, match="tile_size must be at least 1, got 0"):
        TiledPasses(None, None, Shard(PLANS["zigzag"]((0, 3), 1)), torch.arange(3), 0, 1.0)
