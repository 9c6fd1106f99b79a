"""What a run leaves on disk, and that a resumed one continues bit for bit (groups G2-G4, G6)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fixed_rollouts import codraft, logged, same, weights
from safetensors.torch import load_file
from transformers import Trainer

from hf_codraft import load_draft
from hf_codraft.hub import checkpoint

CASES = {
    "plain": {},
    "schedule": dict(draft_lr_scheduler_type="linear", draft_warmup_steps=1, draft_weight_decay=0.1),
    "accumulation": dict(gradient_accumulation_steps=2, per_device_train_batch_size=2),
    "every second step": dict(draft_update_every=2),
    "reduced vocabulary": dict(draft_vocab_size=64, draft_warmup_rollouts=8),
}


def assert_equal(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_equal(a, b)
    else:
        assert one == other


def assert_same_run(one, other):
    assert same(weights(one.draft), weights(other.draft))
    assert same(weights(one.model), weights(other.model))
    assert_equal(one.learner.state_dict(), other.learner.state_dict())
    last, other_last = logged(one)[-2], logged(other)[-2]  # the entry after it sums up the whole run
    assert last == other_last


def whole_run(folder, **changes):
    trainer = codraft(folder, max_steps=4, save_strategy="steps", save_steps=2, **changes)
    trainer.train()
    return trainer


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, changes):
    whole = whole_run(tmp_path, **changes)
    resumed = codraft(tmp_path / "elsewhere", max_steps=4, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.learner.num_steps == whole.learner.num_steps > 0
    assert "draft/loss" in logged(whole)[2]
    assert_same_run(whole, resumed)


def test_resume_restores_the_count_of_skipped_steps(tmp_path):
    first = codraft(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    first.learner.num_skipped, first.learner.num_skipped_in_a_row = 5, 1
    first.train()
    resumed = codraft(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.learner.num_skipped == 5
    assert resumed.state.log_history[-2]["draft/skipped_steps"] == 5


def test_resume_does_not_warm_up_again(tmp_path, monkeypatch):
    whole_run(tmp_path, draft_warmup_rollouts=4)
    monkeypatch.setattr("hf_codraft.trainer.warm_up", lambda trainer: pytest.fail("a resumed run was warmed up"))
    resumed = codraft(tmp_path, max_steps=4, draft_warmup_rollouts=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_save_total_limit_keeps_the_newest_with_its_draft(tmp_path):
    whole = whole_run(tmp_path, save_total_limit=1)
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert same(weights(load_draft(tmp_path / "checkpoint-4" / "draft")), weights(whole.draft))
    assert checkpoint.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def _kill(*args, **kwargs):
    raise KeyboardInterrupt


def _die_in_the_drafts_weights(monkeypatch):
    monkeypatch.setattr(checkpoint, "save_file", _kill)


def _die_in_the_drafts_state(monkeypatch):
    monkeypatch.setattr(checkpoint.torch, "save", _kill)


def _die_in_the_policys_weights(monkeypatch):
    monkeypatch.setattr(Trainer, "save_model", _kill)


def _die_in_the_policys_optimizer(monkeypatch):
    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", _kill)


def _die_in_the_random_state(monkeypatch):
    monkeypatch.setattr(Trainer, "_save_rng_state", _kill)


@pytest.mark.parametrize(
    "die",
    [
        _die_in_the_drafts_weights,
        _die_in_the_drafts_state,
        _die_in_the_policys_weights,
        _die_in_the_policys_optimizer,
        _die_in_the_random_state,
    ],
)
def test_run_killed_while_saving_resumes_from_the_older_checkpoint(tmp_path, monkeypatch, die):
    """`save_total_limit=1`, so that the older one is the only one: it must not go before the newer one is complete."""
    whole = whole_run(tmp_path / "whole")
    killed = codraft(tmp_path / "killed", max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=1)
    save = killed._save_checkpoint

    def save_and_die(model, trial):
        if killed.state.global_step == 4:
            # what an earlier run had saved there must not vouch for a mixture of both
            shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "killed" / "checkpoint-4")
            die(monkeypatch)
        save(model, trial)

    killed._save_checkpoint = save_and_die
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    monkeypatch.undo()
    resumed = codraft(tmp_path / "killed", max_steps=4)
    with pytest.warns(UserWarning, match="not written to its end"):
        resumed.train(resume_from_checkpoint=True)
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_checkpoint_without_a_whole_trainer_state_is_passed_over(tmp_path, damage):
    whole = whole_run(tmp_path)
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    text = state.read_text()
    state.unlink()
    if damage == "cut":
        state.write_text(text[: len(text) // 2])
    resumed = codraft(tmp_path, max_steps=4)
    with pytest.warns(UserWarning, match="checkpoint-4 was not written to its end"):
        resumed.train(resume_from_checkpoint=True)
    assert_same_run(whole, resumed)


def test_nothing_to_resume_from_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint with a draft"):
        codraft(tmp_path).train(resume_from_checkpoint=True)


def test_checkpoint_of_a_run_without_draft_is_an_error(tmp_path):
    codraft(tmp_path, draft=None, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match="has no draft to resume"):
        codraft(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_policy_and_draft_files_hold_only_their_own_tensors(tmp_path):
    trainer = whole_run(tmp_path)
    policy = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    draft = load_file(tmp_path / "checkpoint-4" / "draft" / "model.safetensors")
    assert policy.keys() == trainer.model.state_dict().keys() - {"lm_head.weight"}  # tied to the embeddings
    assert same(draft, weights(trainer.draft))
    folder = tmp_path / "checkpoint-4"
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    assert sum(len(group["params"]) for group in optimizer["param_groups"]) == len(policy)
    state = torch.load(folder / "draft" / "training_state.pt", weights_only=True)
    assert len(state["learner"]["optimizer"]["state"]) == len(draft)


def test_saved_model_has_a_draft_that_loads(tmp_path):
    trainer = codraft(tmp_path, max_steps=1)
    trainer.train()
    assert not (tmp_path / "draft").exists()  # save_strategy="no"
    for folder in (tmp_path, tmp_path / "other"):
        trainer.save_model(None if folder == tmp_path else str(folder))
        assert same(weights(load_draft(folder / "draft")), weights(trainer.draft))
        assert same(load_file(folder / "draft" / "model.safetensors"), weights(trainer.draft))
        assert (folder / "model.safetensors").is_file()
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_final_draft_is_written_at_an_uneven_last_step(tmp_path):
    trainer = codraft(tmp_path, max_steps=4, save_strategy="steps", save_steps=3)
    trainer.train()
    final, earlier = weights(load_draft(tmp_path / "draft")), weights(load_draft(tmp_path / "checkpoint-3" / "draft"))
    assert same(final, weights(trainer.draft))
    assert not same(final, earlier)


def test_draft_of_a_finished_run_starts_another(tmp_path):
    first = codraft(tmp_path, max_steps=2, save_strategy="steps")
    first.train()
    second = codraft(tmp_path / "second", draft=str(Path(tmp_path) / "draft"), max_steps=1)
    assert same(weights(first.draft), weights(second.draft))
    second.train()
    assert not same(weights(first.draft), weights(second.draft))
