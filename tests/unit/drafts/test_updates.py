"""A window's updates: which rows teach, what is held out, what is undone, and that a resumed run goes on alike."""

import copy
import io
import random

import pytest
import torch
from ranks import tiny_batch, tiny_draft, tiny_weights

from hf_codraft.drafts.expected import sampled_log_probs
from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.drafts.updates import WINDOWS_TO_RECOVER, DraftUpdates, hold_out
from hf_codraft.taps.packed import PackedBatch

ROWS = [(3, 9), (2, 7), (4, 11), (1, 6), (5, 8), (2, 12), (3, 3), (6, 10)]


def window(seed: int = 0, rows=tuple(ROWS)) -> PackedBatch:
    """Rows whose text the policy could have said: a draft that learns its distribution is accepted more."""
    batch = tiny_batch(list(rows), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    logits = batch.hidden_TH @ tiny_weights().head_VH.T
    said = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].roll(1)
    batch.token_ids_T[batch.supervised_T] = said[batch.supervised_T]
    return batch


def updates_of(draft=None, **settings) -> DraftUpdates:
    names = ("num_updates", "is_checked", "seed", "is_greedy")
    own = {name: settings.pop(name) for name in names if name in settings}
    learner = DraftLearner(draft or tiny_draft(), **({"num_passes": 3, "learning_rate": 1e-3} | settings))
    return DraftUpdates(learner, **own)


def run(updates: DraftUpdates, *batches: PackedBatch):
    for batch in batches:
        updates.add(batch)
    return updates.run(tiny_weights())


def taught(updates: DraftUpdates) -> list[list[tuple[int, ...]]]:
    """A list that grows by the rows (their tokens) that teach in every update."""
    seen, accumulate = [], updates.learner.accumulate

    def watched(batch, policy):
        seen.append([tuple(row.token_ids_T.tolist()) for row in batch.segments()])
        accumulate(batch, policy)

    updates.learner.accumulate = watched
    return seen


def test_every_row_teaches_once_and_held_out_ones_a_window_later():
    updates = updates_of(num_updates=3)
    seen, windows = taught(updates), [window(seed) for seed in range(3)]
    held_before: set = set()
    for batch in windows:
        before = len(seen)
        run(updates, batch)
        held = {tuple(row.token_ids_T.tolist()) for row in updates._held_before}
        rows = {tuple(row.token_ids_T.tolist()) for row in batch.segments()}
        now = [row for update in seen[before:] for row in update]
        assert len(seen) - before == 3 and max(map(len, seen[before:])) - min(map(len, seen[before:])) <= 1
        assert sorted(now) == sorted((rows - held) | held_before)
        assert len(held) == len(ROWS) // 4 and held < rows
        held_before = held


def test_rows_of_one_prompt_are_held_out_together():
    rows = window(rows=[(4, 6)] * 12).segments()
    for number, row in enumerate(rows):
        row.token_ids_T[:4] = number // 2  # six prompts of two completions
    held = hold_out(rows, random.Random(0))
    assert [int(row.token_ids_T[0]) for row in held] == [int(held[0].token_ids_T[0])] * 2


def test_expected_rates_are_of_the_held_out_rows_before_the_updates():
    """A reduced vocabulary is accepted as often as the whole distribution lets it, not the part that it keeps."""
    draft, weights = tiny_draft(draft_vocab_size=20), tiny_weights()
    updates = updates_of(copy.deepcopy(draft), num_updates=2)
    report = run(updates, window())
    held = PackedBatch.join(updates._held_before)
    want = draft.expected_acceptance(held, weights, num_passes=3, log_p_T=sampled_log_probs(held, weights))
    assert report.expected_rates == pytest.approx(want.accept_rates, rel=1e-6)
    assert report.expected_before == pytest.approx(want.accept_length, rel=1e-6)
    assert 0 < report.expected_rates[0] < report.steps[0].accept_passes[0]


def test_few_rows_are_never_held_out():
    assert hold_out(window(rows=ROWS[:3]).segments(), random.Random(0)) == []


def test_one_unchecked_update_is_the_learners_step_on_the_whole_window():
    updates, plain = updates_of(is_checked=False), updates_of().learner
    run(updates, window())
    plain.accumulate(window(), tiny_weights())
    plain.step()
    # the rows are shuffled: sums in another order, which Adam's division shows
    for ours, expected in zip(updates.learner.draft.parameters(), plain.draft.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def trained(num_windows: int = 6, **settings) -> DraftUpdates:
    updates = updates_of(num_updates=2, **settings)
    for seed in range(num_windows):
        run(updates, window(seed, rows=ROWS * 3))
    return updates


def state_of(updates: DraftUpdates) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in updates.learner._tensors()]


def test_updates_that_harm_are_undone_bit_for_bit_and_halve_the_rate():
    updates = trained()
    assert updates.num_rolled_back == 0
    before = state_of(updates)
    for group in updates.learner.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 3.0
    updates.learner.lr_scheduler.base_lrs = [3.0]
    report = run(updates, window(99, rows=ROWS * 3))
    assert report.is_rolled_back and report.expected_after < report.expected_before
    assert updates.num_rolled_back == 1 and updates.learner.lr_scale == 0.5
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(updates), strict=True))


def test_updates_that_teach_are_kept_and_the_rate_recovers():
    updates = trained()
    updates.learner.lr_scale, updates._num_kept_in_a_row = 0.25, 0
    before = state_of(updates)
    for seed in range(WINDOWS_TO_RECOVER):
        report = run(updates, window(50 + seed, rows=ROWS * 3))
        assert not report.is_rolled_back
    assert updates.learner.lr_scale == 0.5
    assert not any(torch.equal(a, b) for a, b in zip(before, state_of(updates), strict=True))


def test_a_draft_that_is_no_longer_finite_is_undone():
    updates = trained(2)
    before = state_of(updates)
    step = updates.learner.step

    def broken():
        report = step()
        with torch.no_grad():
            updates.learner.parameters[0].fill_(torch.nan)
        return report

    updates.learner.step = broken
    assert run(updates, window(7, rows=ROWS * 3)).is_rolled_back
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(updates), strict=True))


def test_first_update_ever_is_undone_with_its_moments():
    updates = updates_of(learning_rate=30.0)
    before = [p.detach().clone() for p in updates.learner.parameters]
    assert run(trained_alike := updates, window(rows=ROWS * 3)).is_rolled_back
    assert all(torch.equal(a, b) for a, b in zip(before, trained_alike.learner.parameters, strict=True))
    assert not any(x.any() for state in updates.learner.optimizer.state.values() for x in state.values())


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_of_a_window_do_not_matter(pieces):
    updates, whole = updates_of(num_updates=2), updates_of(num_updates=2)
    for seed in range(2):
        rows = window(seed).segments()
        size = len(rows) // pieces
        run(updates, *(PackedBatch.join(rows[i : i + size]) for i in range(0, len(rows), size)))
        run(whole, window(seed))
    assert all(torch.equal(a, b) for a, b in zip(state_of(updates), state_of(whole), strict=True))


def test_a_resumed_run_goes_on_bit_for_bit():
    updates = trained(3)
    file = io.BytesIO()
    states = (updates.learner.state_dict(), updates.state_dict(), updates.rows_state_dict())
    torch.save((updates.learner.draft.state_dict(), *states), file)
    file.seek(0)
    weights, learner_state, state, rows = torch.load(file, weights_only=True)
    resumed = updates_of(num_updates=2)
    resumed.learner.draft.load_state_dict(weights)
    resumed.learner.load_state_dict(learner_state)
    resumed.load_state_dict(state)
    resumed.load_rows_state_dict(rows)
    for seed in range(3, 6):
        one, other = (run(x, window(seed, rows=ROWS * 3)) for x in (updates, resumed))
        assert one == other
    assert all(torch.equal(a, b) for a, b in zip(state_of(updates), state_of(resumed), strict=True))


def test_listeners_see_the_rows_before_the_update():
    updates, seen = updates_of(), []
    first = copy.deepcopy(updates.learner.draft.state_dict())
    updates.listeners.append(
        lambda rows, policy: seen.append(
            (
                len(rows),
                all(torch.equal(a, b) for a, b in zip(first.values(), updates.learner.draft.state_dict().values())),
            )
        )
    )
    run(updates, window())
    assert seen == [(len(ROWS), True)]
