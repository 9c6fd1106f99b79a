"""The draft's warm start: whose rollouts, which batches, and that nothing but the draft is different afterwards."""

import math
import random

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset, IterableDataset
from fixed_rollouts import EOS, FixedCoDraftGRPOTrainer, FixedGRPOTrainer, codraft, grpo, logged, same, weights
from transformers import TrainerCallback

from hf_codraft import warmup
from hf_codraft.drafts.learner import OPENING_UPDATES, default_learning_rate, settling

WARM = dict(draft_warmup_rollouts=12, draft_warmup_epochs=2, draft_warmup_batch_size=4)
pytestmark = pytest.mark.filterwarnings("ignore:the draft's warm start is .* optimizer steps")


class _Draws:
    """Rollouts draw from every generator, as tools and environments may."""

    def _generate_single_turn(self, *args, **kwargs):
        random.random(), np.random.rand(), torch.rand(3)
        return super()._generate_single_turn(*args, **kwargs)


class DrawsGRPO(_Draws, FixedGRPOTrainer):
    pass


class Draws(_Draws, FixedCoDraftGRPOTrainer):
    pass


class AtBegin(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.found = [random.random(), np.random.rand(), torch.rand(1).item(), state.num_input_tokens_seen]


def policy():
    return tiny.policy("qwen3", num_hidden_layers=4)


@pytest.mark.parametrize("changes", [{}, dict(bf16=True, draft_vocab_size=64)], ids=str)
def test_policy_is_that_of_plain_grpo_after_a_warm_start_inside_train(tmp_path, changes):
    plain = grpo(tmp_path / "plain", trainer=DrawsGRPO, bf16="bf16" in changes)
    trainer = codraft(tmp_path / "warm", trainer=Draws, **WARM, **changes)
    cold, begins = weights(trainer.draft), (AtBegin(), AtBegin())
    for each, begin in zip((plain, trainer), begins):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        each.add_callback(begin)
        each.train()
    assert begins[0].found == begins[1].found
    assert trainer.learner.num_steps == 3 and not same(cold, weights(trainer.draft))
    assert same(weights(plain.model), weights(trainer.model))
    assert logged(plain) == logged(trainer, without=("draft/",))


# Whose rollouts


def test_rollouts_are_those_of_rollout_func(tmp_path):
    """It writes tokens of its own into a completion; the draft is not asked for those."""
    asked = []

    def rollout(prompts, trainer):
        asked.extend(prompts)
        completions = [[7, 8, 9, 10, 7, EOS] for _ in prompts]
        return {
            "prompt_ids": [[5, 6]] * len(prompts), "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions], "env_mask": [[1, 0, 0, 1, 1, 1]] * len(prompts),
        }  # fmt: skip

    trainer = codraft(tmp_path, model=policy(), draft_vocab_size=8, **WARM)
    trainer.rollout_func = rollout
    trainer.warm_up_draft()
    assert len(asked) == 12 and len(set(asked)) == 12
    # sampled tokens first, then those of prompts, then the lowest ids
    assert trainer.draft.kept_ids.tolist() == [0, 1, 2, 3, 5, 6, 7, 10]
    rows = warmup.roll_out(trainer, 4)
    batch = warmup.tap(trainer, rows)
    assert batch.supervised_T.tolist() == [False, False, True, False, False, True, True, True] * 4
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8, 9, 10, 7, EOS]])
        states = trainer.model(ids, output_hidden_states=True).hidden_states
    want = torch.cat([states[j][0] for j in trainer.draft.tap_ids], -1)
    torch.testing.assert_close(batch.taps_TX[:8], want, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
    torch.testing.assert_close(batch.hidden_TH[8:16], states[-1][0], rtol=1e-5, atol=1e-5)


CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"


class Echo:
    """An environment that says something at its start, and has a tool."""

    instances: list["Echo"] = []

    def __init__(self):
        self.resets = 0
        self.instances.append(self)

    def reset(self, prompt, **kwargs):
        self.resets += 1
        return " abc"

    def shout(self, text: str) -> str:
        """Says it louder.

        Args:
            text: what to say.
        """
        return text.upper()


def test_rollouts_go_through_environments(tmp_path, monkeypatch):
    """Each rollout resets one, and its observation is in the prompt."""
    Echo.instances = []
    monkeypatch.setattr("trl.trainer.grpo_trainer.supports_tool_calling", lambda tokenizer: True)
    monkeypatch.setattr("trl.trainer.grpo_trainer.add_response_schema", lambda tokenizer: tokenizer)
    monkeypatch.setattr("trl.trainer.grpo_trainer.is_chat_template_prefix_preserving", lambda tokenizer: True)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": letter}] for letter in "abcdefgh"]})
    trainer = codraft(
        tmp_path, model=policy(), train_dataset=dataset, processing_class=tokenizer, environment_factory=Echo, **WARM
    )
    rows = warmup.roll_out(trainer, 4)
    assert sum(environment.resets for environment in Echo.instances) == 4
    assert all(tokenizer.decode(row.prompt_ids).replace(" ", "").endswith("abc") for row in rows)
    cold = weights(trainer.draft)
    trainer.warm_up_draft()
    assert not same(cold, weights(trainer.draft))


# How many, and which batches


def stream(num: int) -> IterableDataset:
    return tiny.prompts(num).to_iterable_dataset()


@pytest.mark.parametrize("dataset", [stream(8), tiny.prompts(8)], ids=["stream", "table"])
def test_small_dataset_is_used_again_until_there_are_enough_rollouts(tmp_path, dataset):
    trainer = codraft(tmp_path, model=policy(), train_dataset=dataset)
    examples = warmup._examples(trainer, 32)
    prompts = [example["prompt"] for example in examples]
    assert len(prompts) == 32
    for start in range(0, 32, 8):
        assert sorted(prompts[start : start + 8]) == sorted(tiny.prompts(8)["prompt"])
    assert len(warmup.roll_out(trainer, 30)) == 30


@pytest.mark.parametrize("dataset", [stream(8).filter(lambda row: False), tiny.prompts(0)], ids=["stream", "table"])
def test_empty_dataset_is_an_error(tmp_path, dataset):
    trainer = codraft(tmp_path, model=policy(), **WARM)
    trainer.train_dataset = dataset
    with pytest.raises(ValueError, match=r"train_dataset has no rows.*draft_warmup_rollouts=0"):
        trainer.train()


@pytest.mark.parametrize("num_steps", [1, 2, 5, 64])
def test_every_step_has_a_learning_rate(num_steps):
    factors = [warmup.rise_and_fall(num_steps)(step) for step in range(num_steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert num_steps < 5 or (max(factors) > 0.9 and factors[-1] < factors[0])


def test_single_step_changes_the_draft_and_the_number_of_steps_is_said(tmp_path, capsys):
    trainer = codraft(tmp_path, model=policy(), draft_warmup_rollouts=16, draft_warmup_batch_size=16)
    cold = weights(trainer.draft)
    with pytest.warns(UserWarning, match=r"is 1 optimizer steps.*Raise draft_warmup_rollouts"):
        trainer.warm_up_draft()
    assert not same(cold, weights(trainer.draft))
    assert "16 rollouts" in (said := capsys.readouterr().out) and "1 epochs: 1 steps" in said


def test_hidden_states_that_do_not_fit_are_computed_anew_and_give_the_same_draft(tmp_path, monkeypatch, capsys):
    """Kept whole, kept in part, not kept; each tap is a forward."""
    tapped = []
    tap = warmup.tap
    monkeypatch.setattr(warmup, "tap", lambda trainer, rows: tapped.append(rows) or tap(trainer, rows))
    row_bytes = 4 * tiny.HIDDEN * 4 + 8 + 1  # three taps and the final state in fp32, id, mask
    drafts, counts = [], []
    settings = WARM | dict(draft_warmup_epochs=3)
    for limit in (8.0, 60 * row_bytes / 2**30, 0.0):
        tapped.clear()
        trainer = codraft(tmp_path, model=policy(), draft_warmup_host_gb=limit, **settings)
        trainer.warm_up_draft()
        drafts.append(weights(trainer.draft))
        counts.append(len(tapped))
    assert counts[0] == 3 and 3 < counts[1] < 9 and counts[2] == 9
    assert same(drafts[0], drafts[1]) and same(drafts[0], drafts[2])
    said = capsys.readouterr().out
    assert "3 of 3 batches are kept on the host (0.00 of at most 8 GiB a rank)." in said
    assert "0 of 3 batches" in said and "computed anew in every epoch" in said


def test_hidden_states_of_a_bf16_policy_are_kept_in_bf16(tmp_path):
    trainer = codraft(tmp_path, model=policy().bfloat16(), bf16=True, **WARM)
    batches = warmup.TappedRows(trainer, warmup.roll_out(trainer, 12))
    batches[0]
    kept = batches.kept[0]
    assert kept.taps_TX.dtype == kept.hidden_TH.dtype == torch.bfloat16
    assert math.prod(kept.hidden_TH.shape) == kept.layout.num_tokens * tiny.HIDDEN


def test_warm_start_alone_stops_before_the_first_step(tmp_path):
    trainer = codraft(tmp_path, **WARM)
    began = []

    class Begins(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            began.append(True)

    trainer.add_callback(Begins())
    state = random.getstate(), torch.get_rng_state()
    trainer.warm_up_draft()
    assert not began and trainer.state.global_step == 0
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


# What the warm start learned carries over


def lr_of_updates(trainer) -> list[float]:
    """A list that grows by the learning rate that each of the optimizer's steps has."""
    seen = []
    trainer.learner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
    )
    return seen


def test_moments_and_rate_continue_the_warm_start(tmp_path):
    trainer = codraft(
        tmp_path, draft_learning_rate=None, draft_warmup_rollouts=16, draft_warmup_batch_size=2, max_steps=2
    )
    rates = lr_of_updates(trainer)
    trainer.warm_up_draft()
    num_warm = len(rates)
    moments = [state["exp_avg"].clone() for state in trainer.learner.optimizer.state.values()]
    assert num_warm == 8 and all(moment.any() for moment in moments)
    assert max(rates) <= default_learning_rate(tiny.HIDDEN, is_warm_start=True) and rates[0] > 0
    trainer.train()
    level_rate = default_learning_rate(tiny.HIDDEN, is_warm_start=False)
    assert rates[num_warm:] == [level_rate] * 2
    assert {int(state["step"]) for state in trainer.learner.optimizer.state.values()} == {num_warm + 2}


def test_a_fresh_draft_without_warm_start_begins_at_a_warm_starts_rate_and_settles(tmp_path):
    trainer = codraft(tmp_path, draft_learning_rate=None, max_steps=3)
    rates = lr_of_updates(trainer)
    trainer.train()
    assert rates[0] == pytest.approx(default_learning_rate(tiny.HIDDEN, is_warm_start=True), rel=1e-12)
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 3
    assert settling(OPENING_UPDATES) == 1.0


def test_a_loaded_draft_without_moments_rises_and_one_with_moments_goes_on(tmp_path):
    first = codraft(tmp_path / "first", draft_learning_rate=None, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    without, with_moments = tmp_path / "first" / "draft", tmp_path / "first" / "checkpoint-2" / "draft"
    rate = default_learning_rate(tiny.HIDDEN, is_warm_start=False)

    risen = codraft(tmp_path / "risen", draft=str(without), draft_learning_rate=None, max_steps=2)
    rates = lr_of_updates(risen)
    risen.train()
    assert rates == pytest.approx([rate / 20, rate / 10], rel=1e-12)

    going_on = codraft(tmp_path / "on", draft=str(with_moments), draft_learning_rate=None, max_steps=1)
    rates = lr_of_updates(going_on)
    going_on.train()
    assert rates == [rate]
    assert {int(state["step"]) for state in going_on.learner.optimizer.state.values()} == {3}


def test_rates_fall_with_the_width():
    at_576, at_4096 = (default_learning_rate(width, is_warm_start=False) for width in (576, 4096))
    assert (at_576, at_4096) == pytest.approx((3e-4, 3e-4 * 576 / 4096))
