"""Attention over trunks and beside blocks that lie on gloo ranks, and DDP and FSDP2 around tiles, against one rank."""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    MODES,
    PLANS,
    TrunkCase,
    assert_exact,
    block_inputs,
    dense_blocks,
    join,
    join_blocks,
    run_block_rank,
    run_rank,
    seen_by,
)
from dense_eagle3 import shard_batch
from ranks import tiny_batch, tiny_draft, tiny_weights
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_codraft.attention.block_draft import DraftBlocks
from hf_codraft.attention.transport import GroupTransport, run_local_ranks

CASES = [TrunkCase(mode=mode, plan=plan, window=7) for mode, plan in zip(MODES, PLANS)]
CASES += [
    TrunkCase(mode="partly kept", heads=(4, 4), head_dim=64, num_passes=4, dtype=torch.bfloat16),
    TrunkCase(mode="streamed", plan="balanced", heads=(3, 1), num_passes=1, dtype=torch.bfloat16, queries="some"),
    TrunkCase(mode="ring", heads=(9, 3), num_passes=1, supervised="one rank"),
]
BLOCK_RUNS = [(route, dtype) for route in ("keys", "queries") for dtype in (torch.float64, torch.bfloat16)]
ROWS = [(3, 9), (1, 14), (2, 3), (1, 1), (5, 2)]


class DraftLoss(nn.Module):
    """What DDP and FSDP2 wrap: a draft's loss in tiles."""

    def __init__(self, draft):
        super().__init__()
        self.draft = draft

    def forward(self, batch, num_passes):
        return self.draft.compute_loss(batch, tiny_weights(), num_passes=num_passes, chunk_size=5).loss


def blocks_of(world: int) -> DraftBlocks:
    return DraftBlocks(PLANS["zigzag"]((0, 21, 22, 40), world), (0, 3, 4, 17, 20, 21, 30, 39), 3)


def gradients_of(wrap, batch, num_passes: int) -> list[torch.Tensor]:
    """Of a draft that `wrap` has given hooks."""
    model = DraftLoss(tiny_draft())
    wrapped = wrap(model)  # named, since DDP's hooks die with it
    loss = wrapped(batch, num_passes)
    dist.all_reduce(loss.detach().clone())  # as a loop does that logs: no rank may still wait for another's backward
    loss.backward()
    world = dist.get_world_size()  # both wrappers take the mean
    grads = [parameter.grad for parameter in model.parameters()]
    return [(grad.full_tensor() if hasattr(grad, "full_tensor") else grad) * world for grad in grads]


def refusal_of_sharded_submodules(batch) -> str:
    """What tiles say to parameters that their own hooks would gather, tile by tile."""
    model = DraftLoss(tiny_draft())
    fully_shard(model.draft.midlayer.mlp)
    fully_shard(model)
    with pytest.raises(ValueError) as error:
        model(batch, 3)
    return str(error.value)


def all_cases(rank: int):
    transport, world = GroupTransport(), dist.get_world_size()
    trunks = [run_rank(replace(case, world=world), transport) for case in CASES]
    blocks = blocks_of(world)
    tensors, grad = block_inputs(blocks), torch.ones(len(blocks.anchors), blocks.num_slots, 6, 8, dtype=torch.float64)
    hung = [
        run_block_rank(blocks, [x.to(dtype) for x in tensors], grad, transport, route=route)
        for route, dtype in BLOCK_RUNS
    ]
    batch, gradients = tiny_batch(ROWS), []
    # of 4 ranks some have more anchors than a tile, some fewer
    layout = PLANS["contiguous"](batch.layout.cu_seqlens, world)
    own = shard_batch(batch, layout, transport)
    for num_passes in (1, 3, 7):
        gradients.append([gradients_of(wrap, own, num_passes) for wrap in (DistributedDataParallel, fully_shard)])
    return trunks, hung, gradients, refusal_of_sharded_submodules(own)


def check_blocks(world: int, by_rank: list[list[tuple]]) -> None:
    """fp64 equals a dense softmax to 1e-12; bf16 errs at most 1.5 times as much as one rank."""
    one, blocks = blocks_of(1), blocks_of(world)
    grad = torch.ones(len(one.anchors), one.num_slots, 6, 8, dtype=torch.float64)
    for number, (route, dtype) in enumerate(BLOCK_RUNS):
        narrow = [x.detach().to(dtype) for x in block_inputs(one)]
        wide = [x.double().requires_grad_() for x in narrow]
        out = dense_blocks(wide, seen_by(one, is_causal=False))
        wanted = [out, *torch.autograd.grad(out, wide, grad)]
        out, grads, _ = join_blocks(blocks, [hung[number] for hung in by_rank])
        out_alone, grads_alone, *_ = run_block_rank(one, narrow, grad, run_local_ranks(lambda t: t, 1)[0], route=route)
        for got, one_rank, want in zip((out, *grads), (out_alone, *grads_alone), wanted, strict=True):
            assert got.dtype == dtype
            bound = 1e-12 if dtype == torch.float64 else 1.5 * (one_rank.double() - want).norm()
            assert (got.double() - want).norm() <= bound, (route, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_gloo_ranks_equal_one_rank(run_ranks, world):
    by_rank = run_ranks(all_cases, world)
    for number, case in enumerate(CASES):
        split = replace(case, world=world)
        assert_exact(split, join(split, [trunks[number] for trunks, *_ in by_rank]))
    check_blocks(world, [hung for _, hung, *_ in by_rank])
    for number, num_passes in enumerate((1, 3, 7)):
        draft = tiny_draft()
        loss = draft.compute_loss(tiny_batch(ROWS), tiny_weights(), num_passes=num_passes, chunk_size=None).loss
        wanted = torch.autograd.grad(loss, list(draft.parameters()))
        for _, _, gradients, _ in by_rank:
            for wrapped in gradients[number]:
                for got, want in zip(wrapped, wanted, strict=True):
                    assert (got - want).norm() <= 1e-11 * want.norm().clamp(min=1e-9)
    for *_, refusal in by_rank:
        assert (
            "3 of 13 are sharded DTensors; call fully_shard on the module whose forward computes the loss" in refusal
        )
