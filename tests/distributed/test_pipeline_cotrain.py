"""The example of a draft beside a pipeline, launched as its docstring says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_codraft.hub.checkpoint import load_draft

SCRIPT = Path(__file__).parents[2] / "examples" / "pipeline_cotrain.py"
LINE = re.compile(r"^step (\d+) loss (\S+) draft loss (\S+) accepted .*$", re.MULTILINE)


def run(num_ranks: int, folder: Path, *options: str, problem: str = "") -> list[tuple[int, float, float]]:
    """Step, policy's loss and draft's loss of every line, of a run that ends well, or with `problem`."""
    foreign = ("ACCELERATE_", "PARALLELISM_CONFIG_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    command += [str(SCRIPT), "--output-dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert bool(done.returncode) == bool(problem) and problem in done.stderr, done.stderr[-3000:]
    return [(int(step), float(loss), float(draft)) for step, loss, draft in LINE.findall(done.stdout)]


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict()
    return policy | {f"draft.{name}": tensor for name, tensor in load_draft(folder / "draft").state_dict().items()}


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_on_as_many_ranks_and_on_more(tmp_path):
    whole = run(2, tmp_path / "whole", "--max-steps", "36", "--save-steps", "36")
    assert [step for step, *_ in whole] == list(range(1, 37))
    assert whole[-1][1] < 0.8 * whole[0][1]
    # The draft follows a policy that starts near uniform: its loss rises while the policy sharpens, then it catches up.
    assert whole[-1][2] < 0.8 * max(draft for *_, draft in whole)

    # The second save finds the complete one of an earlier run in its place, and breaks off after the policy is replaced.
    broken = tmp_path / "part" / "checkpoint-5"
    shutil.copytree(tmp_path / "whole" / "checkpoint-36", broken)
    (broken / ".state.new").write_text("not a folder")
    part = run(2, tmp_path / "part", "--max-steps", "5", "--save-steps", "3", problem="File exists")
    weights = [
        (folder / "policy" / "model-00001-of-00002.safetensors")
        for folder in (broken, tmp_path / "whole/checkpoint-36")
    ]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    shutil.copytree(tmp_path / "part", tmp_path / "four")
    rest = run(2, tmp_path / "part", "--max-steps", "36", "--save-steps", "36", "--resume")
    assert part[:3] + rest == whole
    ours, theirs = (
        parameters_of(tmp_path / "part" / "checkpoint-36"),
        parameters_of(tmp_path / "whole" / "checkpoint-36"),
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

    four = run(
        4, tmp_path / "four", "--max-steps", "6", "--save-steps", "6", "--placement", "last_deferred", "--resume"
    )
    assert [step for step, *_ in four] == [4, 5, 6]
    assert [loss for _, loss, _ in four] == pytest.approx([loss for _, loss, _ in whole[3:6]], rel=1e-5)
    assert [draft for *_, draft in four] == pytest.approx([draft for *_, draft in whole[3:6]], rel=1e-4)
