"""A window's updates on two ranks with rows of their own: one draft, one verdict, whoever brings rows."""

import torch
from ranks import tiny_batch, tiny_draft, tiny_weights

from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.drafts.updates import DraftUpdates

ROWS = [(3, 9), (2, 7), (4, 11), (1, 6), (5, 8), (2, 12), (3, 3), (6, 10)]


def _windows(rank: int, learning_rates: list[float], rows_of_rank: list[int]) -> list[tuple]:
    """What each window did and the draft behind it."""
    learner = DraftLearner(tiny_draft(), num_passes=3, learning_rate=1.0)
    updates, outcomes = DraftUpdates(learner, num_updates=2, seed=3), []
    for number, rate in enumerate(learning_rates):
        learner.lr_scheduler.base_lrs = [rate]
        learner.optimizer.param_groups[0]["lr"] = rate
        if rows_of_rank[rank]:
            updates.add(tiny_batch((ROWS * 3)[: rows_of_rank[rank]], seed=10 * number + rank))
        report = updates.run(tiny_weights())
        weights = torch.cat([p.detach().flatten() for p in learner.parameters])
        lengths = (report.expected_before, report.expected_after)
        outcomes.append((report.is_rolled_back, lengths, learner.lr_scale, weights))
    return outcomes


def _assert_alike(one: list[tuple], other: list[tuple]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a[:3] == b[:3]
        assert torch.equal(a[3], b[3])


def test_ranks_keep_and_undo_the_same_updates(run_ranks):
    one, other = run_ranks(_windows, 2, [1e-3, 30.0, 1e-3], [24, 16])
    _assert_alike(one, other)
    assert [outcome[0] for outcome in one][1:2] == [True]
    assert torch.equal(one[0][3], one[1][3]) and not torch.equal(one[1][3], one[2][3])


def test_a_rank_without_rows_takes_part(run_ranks):
    one, other = run_ranks(_windows, 2, [1e-3, 1e-3], [16, 0])
    _assert_alike(one, other)
    assert not torch.equal(one[0][3], one[1][3])
