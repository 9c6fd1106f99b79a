"""The example of context-parallel training, launched as its docstring says."""

import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).parents[2] / "examples" / "long_context_sft.py"
LAUNCH = (
    "-m accelerate.commands.launch --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no "
    "--main_process_port 0 --use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_size 2"
)


def losses_of(arguments: list[str]) -> list[float]:
    foreign = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(1, len(found) + 1))
    return [float(loss) for _, loss in found]


@pytest.mark.slow
def test_two_ranks_report_the_losses_of_one_and_they_fall(tmp_path):
    draw, files = random.Random(0), []
    for number in range(80):
        length = draw.choice([1, 2, 30, 90, 400])
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text("".join(draw.choices(["spam ", "eggs ", "ham "], k=length))[:length])
    options = [str(SCRIPT), "--row-tokens", "301", "--max-steps", "12", "--text", *map(str, files)]
    one = losses_of([*options, "--output-dir", str(tmp_path / "one")])
    two = losses_of([*LAUNCH.split(), *options, "--checkpointing", "--output-dir", str(tmp_path / "two")])
    assert len(one) == 12 and one[-1] < 0.7 * one[0]
    assert two == pytest.approx(one, rel=1e-5)
    saved = [dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters()) for name in ("one", "two")]
    assert saved[0].keys() == saved[1].keys()
    for name, parameter in saved[0].items():
        # Adam's first steps are signs: an entry whose gradient is rounding alone may differ by some steps of 3e-3
        assert (parameter - saved[1][name]).abs().mean() < 3e-5, name


@pytest.fixture
def losses_here(monkeypatch, tmp_path, capsys):
    """The example in this process, as one rank, on some text."""

    def run(text: list[str], *options: str) -> list[float]:
        files = [tmp_path / f"{number}.txt" for number in range(len(text))]
        for file, document in zip(files, text):
            file.write_text(document)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--text", *map(str, files)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", capsys.readouterr().out, re.MULTILINE)]

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")):
            monkeypatch.delenv(name)
    reset()
    yield run
    reset()


def test_it_trains_in_mixed_precision(losses_here, monkeypatch):
    text, options = ["spam eggs ham " * 6] * 6, ("--row-tokens", "64", "--max-steps", "5")
    exact = losses_here(text, *options)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as accelerate's launcher does
    rounded = losses_here(text, *options)
    assert len(exact) == 5 and exact[-1] < exact[0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=2**-7)  # a step of bf16


def test_a_row_without_a_target_has_a_loss_of_0_and_training_goes_on(losses_here):
    found = losses_here([*"aaabbb", "ham", "ham"], "--row-tokens", "3")
    assert found[:2] == [0.0, 0.0]
    assert 0 < found[3] < found[2]  # not NaN


def test_too_little_text_is_refused_before_anything_is_saved(losses_here, tmp_path):
    message = r"fills 7 tokens of rows, but one step needs 8 \(a row of 8 for each of 1 data-parallel groups\)"
    with pytest.raises(ValueError, match=message):
        losses_here(["spam", "ham"], "--row-tokens", "8", "--output-dir", str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("option", ["--row-tokens", "--max-steps"])
def test_counts_below_1_are_refused(losses_here, option, capsys):
    with pytest.raises(SystemExit):
        losses_here(["spam"], option, "0")
    assert f"{option} (0)" in capsys.readouterr().err
