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
