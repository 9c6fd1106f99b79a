"""What a run leaves on disk, and that a resumed one continues bit for bit (groups G2-G4, G6)."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from fixed_rollouts import codraft, logged, same, weights
from safetensors.torch import load_file
from tiny_hub import files_of, hub
from transformers import Trainer

from hf_codraft import load_draft
from hf_codraft.hub import checkpoint
from hf_codraft.hub.history import begin_run, last_complete_checkpoint

CASES = {
    "plain": {},
    "schedule": dict(draft_lr_scheduler_type="linear", draft_lr_warmup_steps=1, draft_weight_decay=0.1),
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
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


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


def test_best_model_at_the_end_is_policy_and_draft_of_one_step(tmp_path):
    trainer = codraft(
        tmp_path, eval_dataset=tiny.prompts(4, seed=3), eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-3"  # the last step's is another
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path, tmp_path / "saved"):
        assert same(load_file(folder / "draft" / "model.safetensors"), load_file(best / "draft" / "model.safetensors"))
    assert same(load_file(tmp_path / "saved" / "model.safetensors"), load_file(best / "model.safetensors"))
    assert same(weights(trainer.draft), load_file(best / "draft" / "model.safetensors"))


def test_resume_with_another_draft_is_refused_by_name(tmp_path):
    codraft(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    resumed = codraft(tmp_path, max_steps=2, draft_tap_layers=[0, 1, 2])
    with pytest.raises(
        ValueError, match=r"eagle_aux_hidden_state_layer_ids is \[1, 2, 3\] there and \[0, 1, 2\] here"
    ):
        resumed.train(resume_from_checkpoint=True)


def steps_saved(folder, *, resume=None, **changes):
    """A run that saves at every step; it dies after `max_steps` of them."""
    run = codraft(folder, save_strategy="steps", save_steps=1, **changes)
    run.train(resume_from_checkpoint=resume)
    return run


def test_resume_takes_no_checkpoint_that_a_run_before_it_left(tmp_path, monkeypatch):
    steps_saved(tmp_path, max_steps=3)
    with pytest.warns(
        UserWarning, match="holds checkpoints of an earlier run .*checkpoint-1, checkpoint-2, checkpoint-3"
    ):
        second = steps_saved(tmp_path, max_steps=1, seed=8)
    assert {folder.name for folder in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    with pytest.warns(UserWarning, match="checkpoint-3 is of an earlier run"):
        assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    resumed = steps_saved(tmp_path, max_steps=2, seed=8, resume=True)
    assert resumed.learner.num_steps == 2
    assert resumed._runs[0] == second._runs[0]
    # From an older one of its own: what came after it is left behind too.
    killed = codraft(tmp_path, max_steps=3, seed=8, save_strategy="steps", save_steps=1)
    monkeypatch.setattr(killed, "training_step", _kill)
    with pytest.raises(KeyboardInterrupt):
        killed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    with pytest.warns(UserWarning, match="checkpoint-2 is of an earlier run"):
        assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    with pytest.warns(UserWarning, match="checkpoint-3 is of an earlier run .* goes on from it as you ask"):
        begin_run(tmp_path, tmp_path / "checkpoint-3", writes=False)


def test_resume_after_a_run_that_left_nothing_is_an_error(tmp_path, monkeypatch):
    steps_saved(tmp_path, max_steps=1)
    killed = codraft(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    monkeypatch.setattr(killed, "training_step", _kill)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    with pytest.raises(ValueError, match="no complete checkpoint with a draft"):
        codraft(tmp_path).train(resume_from_checkpoint=True)


def test_push_of_a_draft_uses_the_runs_token_and_privacy(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr("hf_codraft.trainer.push_draft", lambda *args, **kwargs: pushed.append((args, kwargs)))
    trainer = codraft(tmp_path, hub_token="hf_mine", hub_private_repo=True, num_speculative_tokens=5)
    trainer.push_draft_to_hub("me/draft")
    trainer.push_draft_to_hub("me/draft", private=False, token="hf_other")
    folder = tmp_path / "draft"
    assert [args for args, _ in pushed] == [(folder, "me/draft")] * 2
    assert [kwargs for _, kwargs in pushed] == [
        {"private": True, "token": "hf_mine"}, {"private": False, "token": "hf_other"},
    ]  # fmt: skip
    assert '"num_speculative_tokens": 5' in (folder / "README.md").read_text()


def test_every_push_of_a_run_is_policy_and_draft_of_one_step(tmp_path, monkeypatch):
    with hub(monkeypatch) as server:
        trainer = codraft(
            tmp_path, max_steps=2, save_strategy="steps", save_steps=1, push_to_hub=True, hub_model_id="me/policy",
            hub_token="hf_mine", hub_always_push=True,
        )  # fmt: skip
        trainer.train()
        trainer.push_to_hub()
    commits = [files_of(request) for request in server.requests if "/commit/" in request[0]]
    commits = [files for files in commits if "model.safetensors" in files]
    assert len(commits) == 3  # of both steps and at the end
    for files, step in zip(commits, (1, 2, 2), strict=True):
        for name in ("model.safetensors", "draft/model.safetensors"):
            assert files[name] == (tmp_path / f"checkpoint-{step}" / name).read_bytes()
        assert not any(name.startswith(("_", "checkpoint")) for name in files)


def test_draft_of_a_finished_run_starts_another(tmp_path):
    first = codraft(tmp_path, max_steps=2, save_strategy="steps")
    first.train()
    second = codraft(tmp_path / "second", draft=str(Path(tmp_path) / "draft"), max_steps=1)
    assert same(weights(first.draft), weights(second.draft))
    second.train()
    assert not same(weights(first.draft), weights(second.draft))
