"""Two ranks with a part of the batch each take the step of one rank with all of it."""

import math
import time
import warnings

import pytest
import torch
from attention_cases import PLANS
from dense_eagle3 import shard_batch
from ranks import tiny_batch, tiny_draft, tiny_weights
from torch import distributed as dist

from hf_codraft.attention.transport import GroupTransport
from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.taps.packed import PackedBatch

ROWS = [(5, 9), (1, 1), (3, 4, 1, 2), (7, 12), (1, 6), (2, 3), (4, 11), (6, 0)]
# rows of each piece, by rank; a rank may hold fewer pieces, or pieces without a supervised token
SCENARIOS = {
    "halves": ([range(0, 4)], [range(4, 8)]),
    "uneven accumulation": ([range(0, 1), range(1, 5)], [range(5, 6), range(6, 8)]),
    "a rank that supervises nothing": ([range(0, 7), range(1, 2)], [range(7, 8), range(7, 8)]),
    "a rank without a piece": ([range(0, 8)], []),
    "nothing supervised anywhere": ([range(1, 2)], [range(7, 8)]),
}
STEPS = 2


def piece_of(rows, *, poisoned=False) -> PackedBatch:
    whole = tiny_batch(ROWS)
    index = torch.cat([torch.arange(*whole.layout.segments[row]) for row in rows])
    shard = tiny_batch([ROWS[row] for row in rows]).shard
    parts = (whole.token_ids_T, whole.supervised_T, whole.taps_TX, whole.hidden_TH)
    piece = PackedBatch(shard, *(x[index] for x in parts))
    if poisoned:
        piece.taps_TX.fill_(torch.nan)
    return piece


def train(pieces, *, steps=STEPS, poisoned_steps=(), poisons=False):
    """Weights after some steps, the gradients the optimizer saw, what each step reported, and the counters."""
    learner = DraftLearner(tiny_draft(), num_passes=3, learning_rate=1e-2, max_grad_norm=0.05)
    seen = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in learner.parameters]))
    reports = []
    for step in range(steps):
        for rows in pieces:
            learner.accumulate(piece_of(rows, poisoned=poisons and step in poisoned_steps), tiny_weights())
        reports.append(learner.step())
    weights = [p.detach().clone() for p in learner.draft.parameters()]
    return weights, seen, reports, (learner.num_steps, learner.num_skipped)


def one_row_in_tiles() -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Sums, gradients and anchors of one rank's part of a row whose keys come anew in every pass of every tile."""
    batch = tiny_batch(ROWS)
    own = shard_batch(batch, PLANS["contiguous"](batch.layout.cu_seqlens, 2), GroupTransport())
    draft = tiny_draft()
    loss = draft.compute_loss(own, tiny_weights(), num_passes=3, chunk_size=6, max_kept_bytes=0)
    dist.all_reduce(loss.loss_sum_K.clone())  # as a loop does that logs: no rank may still wait for another's backward
    sums = torch.stack([loss.loss_sum_K, loss.accept_sum_K, loss.count_K])
    return sums, list(torch.autograd.grad(loss.loss, list(draft.parameters()))), int(loss.count_K[0])


def both_ways(rank) -> dict:
    """All scenarios in one process group: starting processes costs more than training."""
    results = {name: train(by_rank[rank]) for name, by_rank in SCENARIOS.items()}
    results["tiles"] = one_row_in_tiles()
    results["poisoned"] = train(SCENARIOS["halves"][rank], steps=3, poisoned_steps=(1,), poisons=rank == 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        poison = dict(poisoned_steps=(0, 1, 2), poisons=rank == 1)
        results["stopped"] = train(SCENARIOS["halves"][rank], steps=5, **poison)
    results["warnings"] = [str(warning.message) for warning in caught]
    return results


@pytest.fixture(scope="module")
def two_ranks(run_ranks):
    return run_ranks(both_ways, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_take_the_step_of_one(two_ranks, name):
    pieces = [rows for by_rank in SCENARIOS[name] for rows in by_rank]
    weights, seen, reports, counters = train(pieces)
    for rank in range(2):
        rank_weights, rank_seen, rank_reports, rank_counters = two_ranks[rank][name]
        assert rank_counters == counters
        for ours, want in zip(rank_reports, reports, strict=True):
            assert (ours.num_supervised, ours.is_skipped) == (want.num_supervised, want.is_skipped)
            for field in ("loss", "loss_passes", "accept_passes", "grad_norm", "vocab_coverage"):
                got, expected = getattr(ours, field), getattr(want, field)
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert len(rank_seen) == len(seen) == (0 if name == "nothing supervised anywhere" else STEPS)
        for ours_step, want_step in zip(rank_seen, seen, strict=True):
            for ours, want in zip(ours_step, want_step, strict=True):
                torch.testing.assert_close(ours, want, rtol=0, atol=1e-12)
        # Adam divides by the gradient's size: where it is 1e-10 or less, a rounding of 1e-17 shows in the update
        for ours, want in zip(rank_weights, weights, strict=True):
            torch.testing.assert_close(ours, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*SCENARIOS, "poisoned"])
def test_ranks_stay_equal_bit_for_bit(two_ranks, name):
    assert all(torch.equal(a, b) for a, b in zip(two_ranks[0][name][0], two_ranks[1][name][0], strict=True))


def test_tiles_that_keep_no_keys_equal_one_rank_at_once(two_ranks):
    (sums, grads, few), (others, more, many) = (by_rank["tiles"] for by_rank in two_ranks)
    assert math.ceil(few / 6) != math.ceil(many / 6)  # one rank runs tiles without an anchor, for the other's keys
    draft = tiny_draft()
    want = draft.compute_loss(tiny_batch(ROWS), tiny_weights(), num_passes=3, chunk_size=None)
    wanted = torch.stack([want.loss_sum_K, want.accept_sum_K, want.count_K])
    torch.testing.assert_close(sums + others, wanted, rtol=1e-11, atol=0)
    wanted_grads = torch.autograd.grad(want.loss, list(draft.parameters()))
    for ours, theirs, expected in zip(grads, more, wanted_grads, strict=True):
        assert (ours + theirs - expected).norm() <= 1e-11 * expected.norm()


def test_a_rank_that_is_not_finite_skips_the_step_on_both(two_ranks):
    for rank in range(2):
        _, seen, reports, counters = two_ranks[rank]["poisoned"]
        assert [report.is_skipped for report in reports] == [False, True, False]
        assert not math.isfinite(reports[1].loss)
        assert counters == (2, 1)
        assert len(seen) == 2


def test_both_ranks_stop_learning_after_three_steps_that_one_spoiled(two_ranks):
    for rank in range(2):
        weights, seen, reports, counters = two_ranks[rank]["stopped"]
        assert all(report.is_skipped for report in reports) and not seen
        assert counters == (0, 3)
        assert all(torch.equal(a, b) for a, b in zip(weights, tiny_draft().parameters(), strict=True))
        assert sum("not finite 3 times in a row" in message for message in two_ranks[rank]["warnings"]) == 1


# The fixture itself: it must fail, and soon, where a rank does


def fails(rank, culprit):
    if rank == culprit:
        raise ZeroDivisionError(f"on purpose, on {rank}")
    dist.barrier()


def hangs(rank):
    dist.barrier()  # else the other may end before this one has reached it
    if rank == 1:
        time.sleep(60)
    return rank


def test_a_failing_rank_is_named_with_its_traceback_while_the_other_waits(run_ranks):
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)rank 1 of 2 failed:.*in fails.*ZeroDivisionError: on purpose, on 1"
    ):
        run_ranks(fails, 2, 1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_killed(run_ranks):
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"ranks \[.*1\] of 2 did not finish within 5 s"):
        run_ranks(hangs, 2, timeout_s=5)
    assert time.monotonic() - started < 20
