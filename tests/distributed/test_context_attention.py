"""Attention over trunks that lie on gloo ranks, and DDP around tiles, against one rank."""

from dataclasses import replace

import pytest
import torch
from attention_cases import MODES, PLANS, TrunkCase, assert_exact, join, run_rank
from ranks import tiny_batch, tiny_draft, tiny_weights
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import GroupTransport
from hf_codraft.taps.packed import PackedBatch

CASES = [TrunkCase(mode=mode, plan=plan, window=7) for mode, plan in zip(MODES, PLANS)]
ROWS = [(3, 9), (1, 14), (2, 3), (1, 1), (5, 2)]


class DraftLoss(nn.Module):
    """What DDP calls: a draft's loss in tiles."""

    def __init__(self, draft):
        super().__init__()
        self.draft = draft

    def forward(self, batch, num_passes):
        return self.draft.compute_loss(batch, tiny_weights(), num_passes=num_passes, chunk_size=5).loss


def all_cases(rank: int):
    transport, world = GroupTransport(), dist.get_world_size()
    trunks = [run_rank(replace(case, world=world), transport) for case in CASES]
    batch, gradients = tiny_batch(ROWS), []
    layout = PLANS["zigzag"](batch.layout.cu_seqlens, world)
    fields = (batch.token_ids_T, batch.supervised_T, batch.taps_TX, batch.hidden_TH)
    own = PackedBatch(Shard(layout, rank, transport), *(layout.shard(x, rank) for x in fields))
    for num_passes in (1, 3, 7):
        model = DraftLoss(tiny_draft())
        wrapped = DistributedDataParallel(model)  # named, since its hooks die with it
        wrapped(own, num_passes).backward()
        gradients.append([parameter.grad * world for parameter in model.parameters()])  # DDP's is the mean
    return trunks, gradients


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_gloo_ranks_equal_one_rank(run_ranks, world):
    by_rank = run_ranks(all_cases, world)
    for number, case in enumerate(CASES):
        split = replace(case, world=world)
        assert_exact(split, join(split, [trunks[number] for trunks, _ in by_rank]))
    for number, num_passes in enumerate((1, 3, 7)):
        draft = tiny_draft()
        loss = draft.compute_loss(tiny_batch(ROWS), tiny_weights(), num_passes=num_passes, chunk_size=None).loss
        wanted = torch.autograd.grad(loss, list(draft.parameters()))
        for _, gradients in by_rank:
            for got, want in zip(gradients[number], wanted, strict=True):
                assert (got - want).norm() <= 1e-11 * want.norm().clamp(min=1e-9)
