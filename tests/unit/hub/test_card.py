"""What a draft's card says, and how it goes up: huggingface_hub's own client against a Hub of this process."""

import json
from pathlib import Path

import pytest
import yaml
from ranks import tiny_draft
from tiny_hub import files_of, hub

from hf_codraft.hub.checkpoint import load_draft, push_draft, save_draft


def card_of(folder: Path, base_model: str, **flags) -> tuple[dict, str]:
    save_draft(tiny_draft(exact=False, **flags), folder, base_model=base_model)
    _, header, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), body


@pytest.mark.parametrize("base_model", ["org/model", "gpt2"])
def test_a_policy_of_the_hub_is_named(tmp_path, base_model):
    header, body = card_of(tmp_path / "draft", base_model)
    assert header["base_model"] == base_model
    assert f"EAGLE-3 draft for {base_model}" in body


@pytest.mark.parametrize(
    "name", ["my-run", "org/my-run", "./my-run", "a/b/my-run", "/nowhere/my-run", "C:\\my-run", ""]
)
def test_a_folder_is_never_named(tmp_path, monkeypatch, name):
    """The Hub refuses a card whose `base_model` is no id of the Hub."""
    monkeypatch.chdir(tmp_path)
    if name and name[0] not in "/C":
        Path(name).mkdir(parents=True)
    header, body = card_of(tmp_path / "draft", name)
    assert "base_model" not in header and "my-run" not in body
    header, body = card_of(tmp_path / "draft", str(tmp_path))
    assert "base_model" not in header and str(tmp_path) not in body


def test_the_card_says_which_policy_to_serve_and_how_many_tokens_to_draft(tmp_path):
    _, body = card_of(tmp_path / "draft", "org/model", num_speculative_tokens=5)
    assert "with the policy that was saved beside it, the one that it was trained with, rather than org/model" in body
    code = body.split("```python")[1].split("```")[0]
    assert '"num_speculative_tokens": 5' in code and "org/model" not in code
    compile(code, "card", "exec")
    _, body = card_of(tmp_path / "draft", "")
    assert "| tokens drafted in training | not recorded |" in body


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_the_number_of_drafted_tokens_is_kept(tmp_path, layout):
    save_draft(tiny_draft(exact=False, num_speculative_tokens=5), tmp_path / "draft", base_model="a/b", layout=layout)
    back = load_draft(tmp_path / "draft").config
    assert (back.num_speculative_tokens, back.base_model_name_or_path) == (5, "a/b")


def test_a_push_carries_the_token_and_makes_a_private_repository(tmp_path, monkeypatch):
    save_draft(tiny_draft(exact=False), tmp_path / "draft", base_model="", training_state={"learner": {}})
    with hub(monkeypatch) as server:
        address = push_draft(tmp_path / "draft", "me/draft", private=True, token="hf_mine")
    assert address == f"{server.address}/me/draft/commit/1"
    assert {token for _, token, _ in server.requests} == {"Bearer hf_mine"}
    created = json.loads(next(body for path, _, body in server.requests if path == "/api/repos/create"))
    assert created["visibility"] == "private"
    files = files_of(next(request for request in server.requests if "/commit/" in request[0]))
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    assert files["model.safetensors"] == (tmp_path / "draft" / "model.safetensors").read_bytes()


def test_a_card_that_the_hub_refuses_is_the_documented_error(tmp_path, monkeypatch):
    save_draft(tiny_draft(exact=False), tmp_path / "draft", base_model="")
    errors = [{"message": '"base_model" is not allowed'}]
    with hub(monkeypatch, errors=errors), pytest.raises(RuntimeError, match=r"could not be pushed .*Invalid metadata"):
        push_draft(tmp_path / "draft", "me/draft", token="hf_mine")
    load_draft(tmp_path / "draft")
