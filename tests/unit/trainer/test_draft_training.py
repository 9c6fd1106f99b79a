"""How the draft learns inside GRPO, without an engine: when, from what, and what is said about it."""

import math
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import tiny
import torch
from fixed_rollouts import EOS, FixedCoDraftGRPOTrainer, codraft, grpo, logged, same, settings, weights
from transformers import TrainerCallback

from hf_codraft import CoDraftGRPOConfig
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
from hf_codraft.taps.packed import PackedBatch

SCALARS = ("loss", "loss/pos_0", "loss/pos_1", "vocab_coverage", "grad_norm", "learning_rate", "skipped_steps")
PHASES = ("generate", "reward", "logprob", "policy", "draft", "other", "step")


class _History(TrainerCallback):
    """The draft's weights before the run and after every step."""

    def __init__(self, draft):
        self.draft = draft
        self.weights = [weights(draft)]

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(weights(self.draft))


def train(trainer):
    history = _History(trainer.draft)
    trainer.add_callback(history)
    trainer.train()
    return history.weights


def steps(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_metrics_of_every_step(tmp_path):
    trainer = codraft(tmp_path, num_speculative_tokens=2, num_iterations=2, beta=0.0, max_steps=4)
    trainer.train()
    assert len(steps(trainer)) == 4
    for entry in steps(trainer):
        for name in SCALARS:
            assert math.isfinite(entry[f"draft/{name}"])
        assert "draft/loss/pos_2" not in entry
        assert entry["draft/vocab_coverage"] == 1.0
        assert entry["draft/learning_rate"] == 2e-3
        for phase in PHASES:
            assert entry[f"time/{phase}"] >= 0
        assert entry["time/policy"] > 0
        assert entry["time/draft"] > 0
    assert [entry["time/generate"] > 0 for entry in steps(trainer)] == [True, False, True, False]
    assert steps(trainer)[0]["time/logprob"] > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_loss_is_that_of_unpadded_rows_and_transformers_hidden_states(tmp_path, temperature):
    """Taps, packing, mask, teacher and temperature, against `output_hidden_states` of one row at a time."""
    seen = {}

    class Watched(FixedCoDraftGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.setdefault("inputs", inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    model = tiny.policy("qwen3", num_hidden_layers=4, tie=False)
    trainer = codraft(
        tmp_path, model=model, trainer=Watched, temperature=temperature, max_steps=1, num_speculative_tokens=2
    )
    oracle_policy, oracle_draft = tiny.policy("qwen3", num_hidden_layers=4, tie=False), weights(trainer.draft)
    borrowed = replace(trainer.anatomy.weights(), head_VH=oracle_policy.lm_head.weight.detach())
    trainer.train()
    trainer.draft.load_state_dict(oracle_draft)

    loss_sum, count = torch.zeros(2), torch.zeros(2)
    inputs = seen["inputs"]
    for row in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        ids = torch.cat([prompt, completion])
        with torch.no_grad():
            states = oracle_policy(ids[None], output_hidden_states=True).hidden_states
            taps = torch.cat([states[j][0] for j in trainer.draft.tap_ids], -1)
            supervised = torch.arange(len(ids)) >= len(prompt)
            batch = PackedBatch(Shard(PackedLayout.from_lengths([len(ids)])), ids, supervised, taps, states[-1][0])
            policy = replace(borrowed, embedding_VH=oracle_policy.get_input_embeddings().weight)
            loss = trainer.draft.compute_loss(batch, policy, num_passes=2, temperature=temperature, chunk_size=None)
        loss_sum += loss.loss_sum_K
        count += loss.count_K
    assert count[0] > count[1] > 0
    entry = steps(trainer)[0]
    # rows of a padded and a single batch differ by the rounding of fp32 sums
    assert entry["draft/loss/pos_0"] == pytest.approx((loss_sum / count)[0].item(), rel=1e-4)
    assert entry["draft/loss/pos_1"] == pytest.approx((loss_sum / count)[1].item(), rel=1e-4)
    assert entry["draft/loss"] == pytest.approx((loss_sum.sum() / count.sum()).item(), rel=1e-4)


def assert_pieces_add_up(folder, **changes):
    entries = []
    for pieces in (1, 2, 4):
        trainer = codraft(
            folder / str(pieces), model=tiny.policy("qwen3", num_hidden_layers=4), max_steps=1,
            gradient_accumulation_steps=pieces, per_device_train_batch_size=4 // pieces, **changes,
        )  # fmt: skip
        trainer.train()
        assert trainer.learner.num_steps == 1
        entries.append(steps(trainer)[0])
    for entry in entries[1:]:
        for name in ("loss", "grad_norm", "loss/pos_2"):
            assert entry[f"draft/{name}"] == pytest.approx(entries[0][f"draft/{name}"], rel=1e-4)  # fp32 sums


def test_accumulation_gives_the_loss_and_gradient_of_the_whole_batch(tmp_path):
    assert_pieces_add_up(tmp_path)


def test_draft_is_updated_every_second_step(tmp_path):
    trainer = codraft(tmp_path, draft_update_every=2, max_steps=4)
    history = train(trainer)
    assert [not same(a, b) for a, b in pairwise(history)] == [True, False, True, False]
    assert [entry.get("draft/loss") is not None for entry in steps(trainer)] == [True, False, True, False]
    assert trainer.learner.num_steps == 2


def test_frozen_draft_stays_as_it_is(tmp_path):
    trainer = codraft(tmp_path, draft_weight_decay=0.1, freeze_draft=True)
    history = train(trainer)
    assert all(same(history[0], later) for later in history[1:])
    assert not any("draft/loss" in entry for entry in steps(trainer))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(draft_lr_scheduler_type="linear", draft_lr_warmup_steps=1), [1 / 2, 1.0, 2 / 3, 1 / 3, 0.0]),
        (dict(draft_lr_warmup_steps=3), [1 / 4, 2 / 4, 3 / 4, 1.0, 1.0]),
        (dict(draft_lr_scheduler_type="linear", draft_update_every=2), [1.0, 1 / 2, 0.0]),
        # an epoch is 32 steps
        (
            dict(draft_lr_scheduler_type="linear", draft_update_every=16, max_steps=-1, num_train_epochs=1),
            [1.0, 1 / 2, 0.0],
        ),
    ],
    ids=["linear", "constant with a ramp", "every second step", "epochs"],
)
def test_draft_learning_rate_follows_its_own_schedule(tmp_path, changes, expected):
    settings = dict(max_steps=4, draft_learning_rate=1.0, draft_max_grad_norm=0) | changes
    trainer = codraft(tmp_path, **settings)
    seen = []
    trainer.learner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
    )
    trainer.train()
    assert seen == pytest.approx(expected[:-1])
    rates = [entry["draft/learning_rate"] for entry in steps(trainer) if "draft/loss" in entry]  # of the step to come
    assert rates == pytest.approx(expected[1:])


def test_evaluation_does_not_touch_the_draft(tmp_path):
    evaluation = dict(eval_dataset=tiny.prompts(4), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    trainer = codraft(tmp_path, **evaluation)
    after_evaluation = []

    class Watch(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            after_evaluation.append(weights(trainer.draft))

    trainer.add_callback(Watch())
    history = train(trainer)
    assert len(after_evaluation) == trainer.learner.num_steps == 3
    assert all(same(a, b) for a, b in zip(history[1:], after_evaluation, strict=True))


# Batches without anything to learn from


class _NothingSupervised(FixedCoDraftGRPOTrainer):
    """Only the second step has completions of more than one token that ended."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.state.global_step == 1:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        ids = [[5, 6, 7] * 4, [EOS]]  # cut off, and empty but for its end
        return [ids[row % len(ids)] for row in range(len(prompt_ids))], None


class _AllTruncated(_NothingSupervised):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.state.global_step == 1:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return [[5, 6, 7] * 4 for _ in prompt_ids], None


class _AllEmpty(_NothingSupervised):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.state.global_step == 1:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return [[EOS] for _ in prompt_ids], None


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("kind", [_NothingSupervised, _AllTruncated, _AllEmpty])
def test_batch_without_supervised_tokens_changes_nothing(tmp_path, kind, pieces):
    trainer = codraft(
        tmp_path, trainer=kind, mask_truncated_completions=True, gradient_accumulation_steps=pieces,
        per_device_train_batch_size=4 // pieces, draft_weight_decay=0.1,
    )  # fmt: skip
    history = train(trainer)
    assert [not same(a, b) for a, b in pairwise(history)] == [False, True, False]
    assert all(tensor.isfinite().all() for tensor in history[-1].values() if tensor.is_floating_point())
    assert [entry["draft/skipped_steps"] for entry in steps(trainer)] == [0, 0, 0]
    assert [entry.get("draft/loss") is not None for entry in steps(trainer)] == [False, True, False]
    assert trainer.learner.num_steps == 1


def test_piece_without_supervised_tokens_adds_nothing(tmp_path):
    """One good and three empty rows."""

    class OneGoodRow(FixedCoDraftGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return [[3, 4, 5, 6, 7, EOS]] + [[EOS]] * (len(prompt_ids) - 1), None

    assert_pieces_add_up(tmp_path, trainer=OneGoodRow)


# Numbers that are not finite


class _Poisoned(FixedCoDraftGRPOTrainer):
    """The taps of some steps are NaN."""

    poisoned_steps = (1,)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step in self.poisoned_steps:
            take = self._recorder.take

            def poisoned():
                self._recorder.take = take
                taps = take()
                return replace(taps, hidden_states=tuple(x * math.nan for x in taps.hidden_states))

            self._recorder.take = poisoned
        return loss


def test_step_with_a_loss_that_is_not_finite_is_skipped_and_counted(tmp_path):
    plain = grpo(tmp_path / "plain", max_steps=4)
    plain.train()
    trainer = codraft(tmp_path / "poisoned", trainer=_Poisoned, max_steps=4)
    history = train(trainer)
    assert [not same(a, b) for a, b in pairwise(history)] == [True, False, True, True]
    assert [entry["draft/skipped_steps"] for entry in steps(trainer)] == [0, 1, 1, 1]
    assert [entry.get("draft/loss") is not None for entry in steps(trainer)] == [True, False, True, True]
    assert same(weights(plain.model), weights(trainer.model))
    assert (trainer.learner.num_skipped, trainer.learner.num_skipped_in_a_row) == (1, 0)


def test_draft_stops_learning_after_three_skipped_steps_and_the_policy_trains_on(tmp_path):
    plain = grpo(tmp_path / "plain", max_steps=6)
    plain.train()
    poisoned = type("_", (_Poisoned,), {"poisoned_steps": (1, 2, 3)})
    trainer = codraft(tmp_path / "poisoned", trainer=poisoned, max_steps=6)
    with pytest.warns(UserWarning, match="the draft has STOPPED LEARNING.*not finite 3 times in a row") as caught:
        history = train(trainer)
    assert sum("STOPPED LEARNING" in str(warning.message) for warning in caught) == 1
    assert [not same(a, b) for a, b in pairwise(history)] == [True, False, False, False, False, False]
    assert [entry["draft/has_stopped"] for entry in steps(trainer)] == [0, 0, 0, 1, 1, 1]
    assert trainer.state.global_step == 6
    assert same(weights(plain.model), weights(trainer.model))


# Warm-up

WARM = dict(draft_warmup_rollouts=12, draft_warmup_epochs=2, draft_warmup_batch_size=4)


@pytest.mark.parametrize("changes", [{}, dict(draft_vocab_size=64), dict(bf16=True)], ids=str)
def test_warm_up_changes_only_the_draft(tmp_path, changes):
    plain = grpo(tmp_path / "plain", bf16=changes.get("bf16", False))
    plain.train()
    trainer = codraft(tmp_path / "warm", **WARM, **changes)
    policy, draft = weights(trainer.model), weights(trainer.draft)
    trainer.warm_up_draft()
    assert same(policy, weights(trainer.model))
    warm = weights(trainer.draft)
    assert not same(draft, warm)
    assert trainer.model.training
    assert trainer.learner.num_steps == 0
    trainer.warm_up_draft()
    assert same(warm, weights(trainer.draft))
    trainer.train()
    assert same(weights(plain.model), weights(trainer.model))
    assert logged(plain) == logged(trainer, without=("draft/",))


def test_warm_up_chooses_the_vocabulary_from_the_rollouts(tmp_path):
    trainer = codraft(tmp_path, draft_vocab_size=32, freeze_draft=True, max_completion_length=20, **WARM)
    assert trainer.draft.is_vocab_open
    trainer.train()
    kept = trainer.draft.kept_ids.tolist()
    assert EOS in kept
    assert kept == sorted(set(kept))
    assert len(kept) == 32


def test_warm_up_lowers_the_first_loss(tmp_path):
    cold = codraft(tmp_path / "cold", draft_loss_type="kl")
    cold.train()
    warm = codraft(tmp_path / "warm", draft_warmup_rollouts=32, draft_warmup_epochs=4, draft_loss_type="kl")
    warm.train()
    assert steps(warm)[0]["draft/loss"] < 0.8 * steps(cold)[0]["draft/loss"]


def test_frozen_draft_is_the_warm_one(tmp_path):
    trainer = codraft(tmp_path, freeze_draft=True, **WARM)
    cold = weights(trainer.draft)
    trainer.warm_up_draft()
    warm = weights(trainer.draft)
    assert not same(cold, warm)
    trainer.train()
    assert same(warm, weights(trainer.draft))


# Two ranks


class _Uneven(_Poisoned):
    """Each rank has rollouts of its own; rank 1 has nothing to learn from in step 0 and NaN in step 2."""

    poisoned_steps = ()

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completions, _ = super()._generate_single_turn([None] * 2 * len(prompt_ids), *args, **kwargs)
        rank = self.accelerator.process_index
        if rank == 1 and self.state.global_step == 0:
            return [[EOS]] * len(prompt_ids), None
        return completions[rank * len(prompt_ids) :][: len(prompt_ids)], None


def _run_rank(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    trainer = codraft(folder, trainer=_Uneven, max_steps=4, draft_vocab_size=64, **WARM)
    if rank == 1:
        trainer.poisoned_steps = (2,)
    history = train(trainer)
    return trainer.accelerator.num_processes, history, weights(trainer.model), steps(trainer)


@pytest.mark.slow
def test_ranks_keep_the_same_draft(tmp_path, run_ranks):
    (ranks, history, policy, log), (_, other_history, other_policy, _) = run_ranks(_run_rank, 2, tmp_path)
    assert ranks == 2
    assert all(same(a, b) for a, b in zip(history, other_history, strict=True))
    assert same(policy, other_policy)
    assert [not same(a, b) for a, b in pairwise(history)] == [True, True, False, True]
    assert [entry["draft/skipped_steps"] for entry in log] == [0, 0, 1, 1]
    assert all(tensor.isfinite().all() for tensor in history[-1].values() if tensor.is_floating_point())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, torch.float32),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_draft_is_computed_in_the_precision_of_the_policy(tmp_path, changes, expected):
    seen = set()
    path = tiny.save(tiny.policy("qwen3", num_hidden_layers=4), tmp_path / "policy")
    trainer = codraft(tmp_path / "out", model=path, max_steps=1, **changes)
    trainer.draft.fc.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    trainer.train()
    assert trainer._compute_dtype == expected
    assert seen == {expected}
    assert trainer.draft.fc.weight.dtype == torch.float32
    assert math.isfinite(steps(trainer)[0]["draft/loss"])


@pytest.mark.parametrize(("rows", "asked", "num_updates"), [(4, None, 1), (32, None, 1), (64, None, 2), (64, 4, 4)])
def test_a_draft_is_updated_once_for_every_32_rows(tmp_path, rows, asked, num_updates):
    args = CoDraftGRPOConfig(
        **settings(
            tmp_path,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=rows // 4,
            draft_updates_per_step=asked,
        )
    )
    assert args.num_draft_updates == num_updates
    assert args.draft_steps(5) == 5 * num_updates
