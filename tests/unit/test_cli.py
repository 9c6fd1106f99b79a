"""`hf-codraft`: its commands, their options and what they say when an option is wrong."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import yaml
from datasets import DatasetDict
from trl import GRPOConfig

from hf_codraft import CoDraftGRPOConfig, load_draft
from hf_codraft.cli import grpo
from hf_codraft.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
OWN_FIELDS = [f for f in dataclasses.fields(CoDraftGRPOConfig) if f.name not in GRPOConfig.__dataclass_fields__]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return tiny.save(tiny.policy(), tmp_path_factory.mktemp("policy"))


@pytest.fixture
def settings(policy, tmp_path, monkeypatch) -> dict:
    """What a working YAML file says, as a dict to change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the commands add the working directory
    tiny.prompts().to_json(tmp_path / "prompts.jsonl")
    return dict(
        model_name_or_path=policy, dataset_name="prompts.jsonl", reward_funcs=["tiny.reward"], output_dir="out",
        use_vllm=False, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, max_steps=2, save_steps=1,
        per_device_train_batch_size=4, num_generations=2, max_completion_length=8, learning_rate="1e-4",
        draft_warmup_rollouts=8, draft_vocab_size=64,
    )  # fmt: skip


def launch(command: str, settings: dict, *options: str) -> int:
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    return main([command, "--config", "run.yaml", *options])


def refusal(command: str, settings: dict, *options: str, capsys) -> str:
    """The message of a launch that must end with status 2, before anything is trained."""
    with pytest.raises(SystemExit) as ended:
        launch(command, settings, *options)
    assert ended.value.code == 2
    assert not Path("out").exists()
    return capsys.readouterr().err


# What the commands do


def test_grpo_trains_and_saves_policy_and_draft_then_resumes(settings, capsys):
    assert launch("grpo", settings, "--num_speculative_tokens", "2") == 0
    assert Path("out/model.safetensors").is_file() and not load_draft("out/draft").is_vocab_open
    said = capsys.readouterr().out
    assert "Policy: out" in said and "Draft:  out/draft" in said

    resumed = ("--num_speculative_tokens", "2", "--max_steps", "3", "--resume_from_checkpoint", "true")
    assert launch("grpo", settings, *resumed) == 0
    assert Path("out/checkpoint-3/draft/training_state.pt").is_file()
    assert "'draft/loss/pos_1'" in capsys.readouterr().out


def test_grpo_without_draft_is_plain_grpo(settings):
    for name in ("draft_warmup_rollouts", "draft_vocab_size"):
        del settings[name]
    assert launch("grpo", {**settings, "draft": None, "max_steps": 1}) == 0
    assert Path("out/model.safetensors").is_file() and not Path("out/draft").exists()


def test_warmup_needs_no_reward_and_its_draft_trains_on_with_lora(settings, capsys):
    del settings["reward_funcs"]
    assert launch("warmup", {**settings, "reward_weights": [1.0, 0.5], "eval_strategy": "steps"}) == 0
    draft = load_draft("out/draft")
    assert draft.config.draft_vocab_size == 64 and not draft.is_vocab_open
    assert not Path("out/model.safetensors").exists()
    assert "8 rollouts" in capsys.readouterr().out

    lora = ("--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "4")
    cold = ("--draft_warmup_rollouts", "0", "--draft_vocab_size", "none", "--draft", "out/draft", "--max_steps", "1")
    assert launch("grpo", {**settings, "reward_funcs": ["tiny.reward"], "output_dir": "lora"}, *cold, *lora) == 0
    assert Path("lora/adapter_model.safetensors").is_file() and load_draft("lora/draft").config.draft_vocab_size == 64


@pytest.mark.slow
def test_warmup_measures_the_accept_length_in_vllm(settings):
    settings |= dict(use_vllm=True, vllm_max_model_length=64, draft_warmup_rollouts=32, draft_warmup_epochs=2)
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    ended = subprocess.run(
        [sys.executable, "-m", "hf_codraft.cli.main", "warmup", "--config=run.yaml", "--draft_learning_rate", "2e-3"],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    accept_length = float(ended.stdout.split("Accept length ")[1].split()[0])
    assert 1.0 < accept_length <= 4.0
    assert "on training prompts" in ended.stdout


def test_push_sends_the_draft_to_a_repository_of_its_own():
    pushed = []
    trainer = SimpleNamespace(
        draft=object(), hub_model_id="me/policy", args=SimpleNamespace(hub_private_repo=True, hub_token="token"),
        push_to_hub=lambda **kwargs: pushed.append(("policy", kwargs)), is_world_process_zero=lambda: True,
        push_draft_to_hub=lambda name, **kwargs: pushed.append((name, kwargs)) or "address",
    )  # fmt: skip
    grpo.push(trainer, dataset_name="prompts")
    assert pushed == [
        ("policy", {"dataset_name": "prompts"}),
        ("me/policy-speculator.eagle3", {"private": True, "token": "token"}),
    ]


# Data and rewards


@pytest.mark.parametrize("form", ["prompts.jsonl", "prompts.parquet", "folder", "saved", "saved_dict", "mixture"])
def test_local_datasets_load_in_every_form(settings, form):
    data = tiny.prompts()
    data.to_parquet("prompts.parquet")
    data.to_json("folder/train.jsonl")
    data.save_to_disk("saved")
    DatasetDict(train=data).save_to_disk("saved_dict")
    settings["dataset_name"] = form
    if form == "mixture":
        settings["dataset_name"], settings["datasets"] = None, [{"path": "folder"}]
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    options = grpo.parse(["--config", "run.yaml"], command="grpo", description="")
    assert grpo.load_splits(options)["train"]["prompt"][:] == data["prompt"][:]


def test_rewards_are_found_by_name_and_by_path(settings):
    Path("my_rewards.py").write_text("def exact(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    assert grpo.load_reward("my_rewards.exact")(["a", "b"]) == [1.0, 1.0]
    assert grpo.load_reward("think_format_reward").__module__.startswith("trl")
    assert callable(grpo.load_reward("get_soft_overlong_punishment"))


def test_example_config_parses():
    options = grpo.parse(["--config", str(ROOT / "examples/grpo.yaml"), "--use_cpu"], command="grpo", description="")
    assert options.script.draft == "eagle3" and options.training.use_vllm
    assert options.training.draft_fields_set()


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft_learnig_rate", "1"], "did you mean --draft_learning_rate?"),
        (["--draft-learnig-rate", "1"], "did you mean --draft_learning_rate?"),
        (["--xyzzy", "1"], "there is no option --xyzzy."),
        (["--draft_learning_rate", "fast"], "invalid float value: 'fast'"),
        (["--draft_loss_type", "mse"], "draft_loss_type must be"),
        (["--draft_warmup_rollouts", "-1"], "draft_warmup_rollouts must be a number and not negative"),
        (["--reward_funcs", "exact_match"], "or a dotted path such"),
        (["--reward_funcs", "no_such_module.reward"], "No module named 'no_such_module'"),
        (["--reward_funcs", "tiny.no_reward"], "could not be imported"),
        (["--dataset_name", "missing.jsonl"], "there is no such file"),
        (["--dataset_name", "run.yaml"], "must end in one of .json, .jsonl, .parquet"),
        (
            ["--dataset_train_split", "training", "--dataset_name", "folder"],
            "dataset_train_split='training' is not in",
        ),
        (["--config"], "--config needs the name"),
    ],
)
def test_wrong_options_of_grpo_are_explained(settings, options, message, capsys):
    tiny.prompts().to_json("folder/train.jsonl")
    assert message in refusal("grpo", settings, *options, capsys=capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_vocabsize": 64}, "did you mean --draft_vocab_size?"),
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"dataset_name": None}, "dataset_name is missing"),
        ({"reward_funcs": None}, "reward_funcs is missing"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "dataset_test_split='test' is not in the dataset"),
    ],
)
def test_wrong_config_files_of_grpo_are_explained(settings, change, message, capsys):
    assert message in refusal("grpo", {**settings, **change}, capsys=capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_warmup_rollouts": 0, "draft_vocab_size": None}, "draft_warmup_rollouts is 0"),
        ({"draft": "none"}, "nothing to warm up"),
        ({"push_to_hub": True}, "push_to_hub needs hub_model_id"),
    ],
)
def test_warmup_without_work_is_refused(settings, change, message, capsys):
    assert message in refusal("warmup", {**settings, **change}, capsys=capsys)


def test_missing_and_broken_config_files_are_named(settings, capsys):
    for content, message in ((None, "other.yaml"), ("a: [", "other.yaml"), ("- a", "must contain a YAML mapping")):
        if content is not None:
            Path("other.yaml").write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["grpo", "--config", "other.yaml"])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# Help


def test_overview_names_every_command_and_an_unknown_one_fails(capsys):
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in COMMANDS)
    assert main(["evaluate-all"]) == 2
    assert "evaluate-all" in capsys.readouterr().err


@pytest.mark.parametrize("field", OWN_FIELDS, ids=lambda field: field.name)
def test_every_field_has_a_help_text(field):
    text = field.metadata["help"]
    assert len(text) > 20 and text.endswith(".")
    assert "%" not in text.replace("%%", "")  # argparse would format it


@pytest.mark.parametrize("command", ["grpo", "warmup"])
def test_help_lists_the_fields_of_both_libraries(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("draft", "num_generations", "lora_r", "reward_funcs", *(field.name for field in OWN_FIELDS)):
        assert f"--{name} " in text
