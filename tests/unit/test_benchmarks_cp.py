"""The benchmarks of sharded attention: they run, write what they measured, and judge made-up figures rightly."""

import copy
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "context_parallel.py"


def load(script: Path):
    spec = importlib.util.spec_from_file_location(f"{script.stem}_benchmark", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def benchmark():
    yield from load(BENCHMARK)


@pytest.fixture(scope="module")
def gpu_benchmark():
    yield from load(BENCHMARK.with_name("gpu_context_parallel.py"))


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
    } - {(4, "kept, chunked loss")}  # the 4 are threads, which skip it
    assert {(row["world"], row["num_tokens"], row["packing"], row["scheme"]) for row in results["blocks"]} == set(
        itertools.product((2, 4), (256, 512), ("one long", "long-tailed"), ("keys", "queries"))
    )
    for row in results["blocks"] + results["time"]:
        assert len(row["cpu_s"]) == row["world"] and min(row["cpu_s"]) > 0
        assert row["cpu_s_total"] == sum(row["cpu_s"]) >= row["cpu_s_most"] == max(row["cpu_s"])
    assert all(1 <= row["work"] <= row["world"] for row in results["blocks"])
    assert {row["scheme"] for row in results["time"] if row["world"] == 4} == {"ring", "kept", "tiled"}
    tiled = {row["world"]: row for row in results["memory"] if row["scheme"] == "tiled" and "peak_slope" in row}
    assert tiled[1]["beyond_own"] == tiled[1]["beyond_all"] == tiled[1]["peak_slope"] - 192 - 256  # hidden 48, 2 x 8
    assert tiled[2]["beyond_own"] == tiled[2]["beyond_all"] + 192  # two zigzag ranks keep 3/4 of a rank's keys
    assert all(row["is_as_computed"] for row in results["traffic"] + results["blocks"])
    assert all(row["bytes"] == 0 for row in results["traffic"] if row["world"] == 1)
    assert max(row["gradient_error"] for row in results["errors"]) < 1e-5
    assert {row["scheme"] for row in results["errors"]} > {"block, keys", "block, queries"}
    assert max(row["routes_differ_by"] for row in results["blocks"]) < 1e-3
    assert all(0 < row["saved_bytes"] < row["peak_bytes"] for row in results["blocks"])
    assert len(report["aims"]) == 10


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


def made_up(scale) -> dict[str, list[dict]]:
    """Figures of a run that just meets every aim."""
    short, long = scale.memory_lengths
    sent = {
        "ring": 700,
        "all-gather": 650,
        "expanded ring": 2100,
        "kept": 100,
        "kept, chunked loss": 100,
        "tiled": 100,
    }
    memory = [(short, "tiled", 9e9), (short, "kept", 1.0), (long, "tiled", 125.0), (long, "kept", 1000.0)]
    slopes = {
        "peak_slope": 9e9,
        "x_slope": 2304.0,
        "own_kv_slope": 3072.0,
        "others_kv_slope": 12.0,
        "beyond_x": 3136.0,
    }
    return {
        "traffic": [
            {
                "world": world, "packing": packing, "num_tokens": num_tokens, "scheme": scheme, "is_as_computed": True,
                "bytes": num_bytes if world > 1 else 0,
            }
            for world in scale.worlds
            for packing in ("one long", "long-tailed")
            for num_tokens in scale.lengths
            for scheme, num_bytes in sent.items()
        ],
        "memory": [
            {"world": world, "num_local": num_local, "scheme": scheme, "peak_bytes": peak}
            | (slopes | {"beyond_all": 3072.0, "beyond_own": 3072.0 if world <= 2 else 3073.0} if num_local == long else {})
            for world in (1, 2, 4)
            for num_local, scheme, peak in memory
        ],
        "blocks": [
            {
                "world": world, "num_tokens": num_tokens, "packing": packing, "scheme": scheme, "is_as_computed": True,
                "bytes": num_bytes if (num_tokens, packing) == (16384, "one long") else 0 if world == 2 else 400,
            }
            for world in (2, 4)
            for num_tokens in scale.block_lengths
            for packing in ("long-tailed", "one long")
            for scheme, num_bytes in (("keys", 400), ("queries", 100))
        ],
        "time": [
            {"world": world, "scheme": scheme, "cpu_s_total": 8.0 if world == 1 else 10.0}
            for world in scale.worlds
            for scheme in sent
        ],
        "plans": [
            {"packing": "long-tailed", "plan": "balanced", "work": 1.1},
            {"packing": "long-tailed", "plan": "zigzag", "work": 2.0},
            {"packing": "one long", "plan": "balanced", "work": 2.0},
        ],
        "errors": [{"gradient_error": 1e-5}, {"gradient_error": 0.0}],
    }  # fmt: skip


def row_of(rows: list[dict], **wanted) -> dict:
    return next(row for row in reversed(rows) if wanted.items() <= row.items())


SPOILED = [  # by aim: which row, which figure
    ("traffic", {"world": 4, "scheme": "kept"}, {"bytes": 101}),
    ("memory", {"world": 4, "scheme": "tiled", "num_local": 8192}, {"peak_bytes": 126.0}),
    ("memory", {"world": 4, "scheme": "tiled", "num_local": 8192}, {"beyond_all": 3073.0}),
    ("memory", {"world": 2, "scheme": "tiled", "num_local": 8192}, {"beyond_own": 3073.0}),
    ("blocks", {"world": 4, "scheme": "queries"}, {"bytes": 101}),
    ("plans", {"packing": "long-tailed", "plan": "balanced"}, {"work": 1.11}),
    ("time", {"world": 4, "scheme": "tiled"}, {"cpu_s_total": 10.1}),
    ("time", {"world": 4, "scheme": "kept"}, {"cpu_s_total": 10.1}),
    ("blocks", {"world": 2, "scheme": "keys"}, {"is_as_computed": False}),
    ("errors", {}, {"gradient_error": 1.1e-5}),
]


def test_each_aim_is_missed_by_its_own_figure(benchmark):
    results = made_up(benchmark.FULL)
    assert [aim["is_met"] for aim in benchmark.check_aims(results, benchmark.FULL)] == [True] * len(SPOILED)
    for position, (part, wanted, figures) in enumerate(SPOILED):
        spoiled = copy.deepcopy(results)
        row_of(spoiled[part], **wanted).update(figures)
        verdicts = [aim["is_met"] for aim in benchmark.check_aims(spoiled, benchmark.FULL)]
        assert verdicts == [number != position for number in range(len(SPOILED))], wanted
    for scheme in (
        "tiled",
        "ring",
    ):  # a figure that is no number meets no aim, and a wrong count is found wherever it is
        spoiled = copy.deepcopy(results)
        row_of(spoiled["traffic"], scheme=scheme)["is_as_computed"] = False
        assert not benchmark.check_aims(spoiled, benchmark.FULL)[8]["is_met"]
    for position in (0, 1):
        spoiled = copy.deepcopy(results)
        spoiled["errors"][position]["gradient_error"] = float("nan")
        assert not benchmark.check_aims(spoiled, benchmark.FULL)[9]["is_met"]


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_a_missed_aim_ends_a_check_with_1(benchmark, monkeypatch, capsys, tmp_path, is_spoiled):
    results = made_up(benchmark.FULL)
    if is_spoiled:
        row_of(results["plans"], packing="long-tailed", plan="balanced")["work"] = 1.2
    monkeypatch.setattr(benchmark, "measure", lambda scale: results)
    monkeypatch.setattr(benchmark, "print_tables", lambda results, scale: None)
    monkeypatch.setattr(benchmark.torch, "set_num_threads", lambda number: None)
    assert benchmark.main(["--json", str(tmp_path / "r.json")]) == 0  # judged, but not asked to fail
    assert capsys.readouterr().out == ""
    assert benchmark.main(["--check", "--json", str(tmp_path / "r.json")]) == is_spoiled
    printed = capsys.readouterr().out.splitlines()
    lines, info = printed[:10], printed[10:]
    assert len(info) == 9 and all(line.startswith("info   ") for line in info)  # 3 slopes, 6 of block drafts
    assert "at N = 4: " in info[2] and "other ranks' 12.000;" in info[2]
    assert info[2].endswith(
        "left beyond hidden states 3136 (ABOVE 3072), and beyond own K, V, dK, dV 3073 (ABOVE 3072), and beyond "
        "other ranks' 3072 (within 3072)"
    )
    assert info[3].endswith(", 4096 tokens, long-tailed, N = 2: nothing travels") and info[8].endswith(
        ", 16384 tokens, long-tailed, N = 4: 1.000"
    )
    assert sum(line.startswith("MISSED") for line in lines) == is_spoiled
    assert lines[5] == (
        "MISSED work max/mean, long-tailed, balanced plan: 1.200 (at most 1.100)"
        if is_spoiled
        else "met    work max/mean, long-tailed, balanced plan: 1.100 (at most 1.100)"
    )
    assert [aim["is_met"] for aim in json.loads((tmp_path / "r.json").read_text())["aims"]].count(False) == is_spoiled


def test_every_scheme_sends_what_is_computed_and_equals_the_dense_oracle(benchmark):
    """On three ranks; the all-gather is the benchmark's own."""
    scale, world = benchmark.QUICK, 3
    sizes = benchmark.error_sizes(scale)
    lengths = benchmark.packings(scale.error_length)["long and short"]
    layouts = {scheme: benchmark.plan(scheme, lengths, world) for scheme in benchmark.SCHEMES}

    def rank(transport):
        layer = benchmark.DraftLayer(sizes)
        sent = {
            scheme: benchmark.step(layer, lengths, scheme, transport, num_passes=sizes.num_passes, layout=layout)
            for scheme, layout in layouts.items()
        }
        return {"sent": sent, "errors": benchmark.rank_errors(transport, scale)}

    ranks = benchmark.run_local_ranks(rank, world)
    for scheme, layout in layouts.items():
        costs = benchmark.computed(scheme, layout, sizes)
        assert benchmark._is_equal([rank["sent"][scheme] for rank in ranks], costs, scheme), scheme
    rows = benchmark.summarize_errors(ranks, scale)
    assert {row["scheme"] for row in rows} == {*benchmark.SCHEMES, "block, keys", "block, queries"}
    assert max(row["gradient_error"] for row in rows) < 1e-6 and max(row["loss_error"] for row in rows) < 1e-6


def gpu_row(scheme: str, num_tokens: int, seconds: float) -> dict:
    return {
        "scheme": scheme, "num_tokens": num_tokens, "world": 1, "seconds": seconds, "tflops": 1.0, "sent_bytes": 0,
        "peak_bytes": 2**30,
    }  # fmt: skip


def test_gpu_aims_are_missed_by_their_own_figure(gpu_benchmark):
    seconds = {"one rank": 4.0, "ring": 9.0, "kept": 5.0, "tiled": 5.0, "block keys": 9.0, "block queries": 9.0}
    cases = [("kept", 96), ("tiled", 96), ("kept", 160), ("tiled", 160)]
    for missed in (None, *cases):
        rows = [gpu_row(s, n, 5.1 if (s, n) == missed else seconds[s]) for n in (96, 160) for s in seconds]
        assert [aim["is_met"] for aim in gpu_benchmark.check_aims(rows)] == [case != missed for case in cases]


def run_gpu(gpu_benchmark, monkeypatch, *args: str, step_s: float, kept_s: float = 1.0):
    """`main` with a clock that `step_s` passes on for every measurement; returns its exit code and what it measured."""
    now, measured = [0.0], []

    def measure(scale, scheme, num_tokens, device):
        now[0] += step_s
        measured.append((num_tokens, scheme))
        return gpu_row(scheme, num_tokens, kept_s if scheme == "kept" else 1.0)

    monkeypatch.setattr(gpu_benchmark, "measure", measure)
    monkeypatch.setattr(gpu_benchmark.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_benchmark.time, "monotonic", lambda: now[0])
    return gpu_benchmark.main(list(args)), measured


def test_without_a_gpu_nothing_is_measured_and_the_exit_code_says_so(gpu_benchmark, monkeypatch, capsys):
    assert run_gpu(gpu_benchmark, monkeypatch, "--check", step_s=1.0) == (2, [])
    assert "No GPU is to be had here. --quick runs" in capsys.readouterr().err


@pytest.mark.parametrize(("kept_s", "code"), [(1.25, 0), (1.3, 1)])
def test_a_missed_aim_ends_a_gpu_check_with_1(gpu_benchmark, monkeypatch, capsys, kept_s, code):
    found, measured = run_gpu(gpu_benchmark, monkeypatch, "--quick", "--check", step_s=1.0, kept_s=kept_s)
    assert found == code and len(measured) == 12
    assert capsys.readouterr().out.count("MISSED") == 2 * code  # at both lengths
    assert run_gpu(gpu_benchmark, monkeypatch, "--quick", step_s=1.0, kept_s=kept_s)[0] == 0


def test_what_the_time_does_not_suffice_for_is_left_out_and_fails_the_check(
    gpu_benchmark, monkeypatch, capsys, tmp_path
):
    limit_s, report = gpu_benchmark.QUICK.limit_s, tmp_path / "r.json"
    options = ("--quick", "--check", "--json", str(report))
    code, measured = run_gpu(gpu_benchmark, monkeypatch, *options, step_s=limit_s / 4)
    assert code == 1 and len(measured) == 5  # the fifth starts at the limit and not after it
    left_out = json.loads(report.read_text())["left_out"]
    assert left_out[0] == "block queries at 96 tokens" and len(left_out) == 7
    assert f"Left out for want of time: {left_out[0]}, one rank at 160" in capsys.readouterr().out
    code, measured = run_gpu(gpu_benchmark, monkeypatch, *options, step_s=2 * limit_s)
    assert code == 1 and measured == [(96, "one rank")] and json.loads(report.read_text())["aims"] == []
