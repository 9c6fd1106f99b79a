"""The example of context-parallel training, launched as its docstring says."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
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
