"""The package from outside: what an import costs, what it offers, and its command."""

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from trl import GRPOConfig

import hf_codraft
from hf_codraft import CoDraftGRPOConfig, _compat, _optional
from hf_codraft.cli.main import COMMANDS, main

HEAVY = ("torch", "trl", "vllm", "transformers", "accelerate", "peft", "datasets", "numpy")


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "statement", ["import hf_codraft", "import hf_codraft.cli.main", "dir(__import__('hf_codraft'))"]
)
def test_import_loads_no_framework(statement):
    code = f"{statement}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    finished = run(sys.executable, "-c", code)
    assert (finished.returncode, finished.stdout.strip()) == (0, "[]"), finished.stderr


def test_public_names_resolve():
    assert set(hf_codraft.__all__) <= set(dir(hf_codraft))
    for name in hf_codraft.__all__:
        assert getattr(hf_codraft, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Eagle4Draft'"):
        _ = hf_codraft.Eagle4Draft


def test_require_returns_the_module():
    assert _optional.require("json.decoder", extra="x").__name__ == "json.decoder"


@pytest.mark.parametrize("module", ["nothing_like_it", "nothing_like_it.inner"])
def test_missing_package_is_named_with_its_extra(module):
    with pytest.raises(
        ImportError, match=r"nothing_like_it is not installed; it comes with `pip install 'hf-codraft\[demo\]'`"
    ):
        _optional.require(module, extra="demo")


def test_package_that_misses_another_one_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import nothing_like_it")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'nothing_like_it'"):
        _optional.require("half_installed", extra="demo")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_help_lists_the_commands(arguments, capsys):
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in COMMANDS)


def test_unknown_command_is_an_error(capsys):
    assert main(["fly"]) == 2
    assert "no command 'fly'; there are demo, grpo, warmup" in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("fly", 2)])
def test_command_ends_with_that_status(argument, status):
    assert run(sys.executable, "-m", "hf_codraft.cli.main", argument).returncode == status


def test_command_is_installed_under_its_name():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"hf-codraft": "hf_codraft.cli.main:main"}
    assert project["version"] == hf_codraft.__version__


def test_declared_versions_are_the_checked_ones():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, declared)}
    for package, (first, end) in _compat.SUPPORTED.items():
        assert first in ranges[package]
        assert end not in ranges[package] or package == "accelerate"  # open above


def test_every_field_of_the_draft_has_help_text():
    trls = {field.name for field in dataclasses.fields(GRPOConfig)}
    own = [field for field in dataclasses.fields(CoDraftGRPOConfig) if field.name not in trls]
    assert len(own) > 15
    assert [field.name for field in own if not field.metadata.get("help", "").endswith(".")] == []


def test_fields_of_trl_keep_their_defaults():
    ours = {field.name: field for field in dataclasses.fields(CoDraftGRPOConfig)}
    for field in dataclasses.fields(GRPOConfig):
        assert ours[field.name].default == field.default
        assert ours[field.name].type == field.type
