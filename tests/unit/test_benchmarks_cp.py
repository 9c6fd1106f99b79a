"""The benchmark of sharded attention runs, and what it writes is what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "context_parallel.py"


def run(*args: str) -> None:
    ended = subprocess.run([sys.executable, str(BENCHMARK), *args], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.slow
def test_quick_run_measures_every_scheme(tmp_path):
    run("--quick", "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    results = report["results"]
    assert {(row["world"], row["scheme"]) for row in results["traffic"]} == {
        (world, scheme)
        for world in (1, 2, 4)
        for scheme in ("ring", "all-gather", "expanded ring", "kept", "kept, chunked loss", "tiled")
    }
    assert all(row["is_as_computed"] for row in results["traffic"] + results["blocks"])
    assert all(row["bytes"] == 0 for row in results["traffic"] if row["world"] == 1)
    assert max(row["gradient_error"] for row in results["errors"]) < 1e-5
    assert max(row["routes_differ_by"] for row in results["blocks"]) < 1e-3
    assert len(report["aims"]) == 9


@pytest.mark.slow
def test_tables_in_docs_are_what_the_script_writes(tmp_path):
    run("--tables", str(tmp_path / "tables.md"))
    docs = BENCHMARK.parents[1] / "docs" / "context_parallel.md"
    assert (tmp_path / "tables.md").read_text() == docs.read_text()


def test_the_gpu_benchmark_runs_its_steps_on_a_cpu(tmp_path):
    script = BENCHMARK.with_name("gpu_context_parallel.py")
    command = [sys.executable, str(script), "--quick", "--json", str(tmp_path / "report.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    by_scheme = {(row["num_tokens"], row["scheme"]): row for row in report["rows"]}
    assert len(by_scheme) == 12 and not report["left_out"]
    for num_tokens in (96, 160):
        sent = {scheme: by_scheme[num_tokens, scheme]["sent_bytes"] for _, scheme in by_scheme}
        assert sent["one rank"] == 0
        assert sent["kept"] == sent["tiled"] < sent["ring"] / 2  # two passes
        assert sent["block queries"] > 0 and sent["block keys"] > 0
