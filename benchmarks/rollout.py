"""Rollout speed with and without speculation, on the demo's tasks, with prompts that no training has seen.

    make demo && .venv/bin/python benchmarks/rollout.py                 # (a) the draft as the demo leaves it
    .venv/bin/python benchmarks/rollout.py --long                       # (b) also a draft warmed up longer, kept in the cache

Engines live in processes of their own and take turns on the same prompts, so each ratio is of neighbours in one run:
`stock` (vLLM as shipped), `plain` (with the CPU repairs, refitted), and speculative ones for every draft with 2 and with 3
drafted tokens; aims take the better of the two at each concurrency, as a user would. stock over plain is
the price of the repairs. At concurrency c, c prompts start together and the next c when all have ended, as a trainer waits
for its batch. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONCURRENCIES = (1, 4, 16)
LONG_ROLLOUTS, LONG_EPOCHS = 1024, 6
UNSEEN_SEED = 777_000  # the demo trains on sheets of its --seed
TOKENS = (2, 3)  # drafted tokens: the draft is trained for 3 and can serve fewer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="a finished demo")
    parser.add_argument("--long", action="store_true", help="also a draft warmed up longer on the demo's policy")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that everything works")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="a line an aim; exit status 1 where one is missed")
    parser.add_argument("--worker", nargs=4, metavar=("KIND", "POLICY", "DRAFT", "TOKENS"), help=argparse.SUPPRESS)
    return parser.parse_args()


# One engine in a process of its own: reads a JSON line (what to generate), answers with one (tokens, seconds, histogram).


def serve(kind: str, policy: str, draft: str, num_tokens: int) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    from hf_codraft.serving.acceptance import Acceptance
    from hf_codraft.serving.cpu import repair_sampling
    from hf_codraft.serving.packed import PackedLayers

    packed, extra = PackedLayers(), {}
    if draft:
        repair_sampling()
        extra = {
            "speculative_config": {
                "method": "eagle3",
                "model": draft,
                "num_speculative_tokens": num_tokens,
                "draft_sample_method": "probabilistic",
            },
            "per_request_spec_decode_metrics": "summary",
        }
    settings = dict(model=policy, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=16, seed=0)
    if kind == "stock":
        llm = LLM(**settings)
    else:
        with packed.recording():
            llm = LLM(**settings, **extra)
        model = llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
        with packed.unpacked():
            model.load_weights(load_file(Path(policy) / "model.safetensors").items())
    tokenizer = llm.get_tokenizer()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [
            {"prompt_token_ids": tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False)}
            for p in order["prompts"]
        ]
        sampling = SamplingParams(temperature=order["temperature"], max_tokens=order["max_tokens"], seed=None)
        llm.reset_prefix_cache()
        started, outputs, size = time.perf_counter(), [], order["concurrency"]
        for first in range(0, len(prompts), size):
            outputs += llm.generate(prompts[first : first + size], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        completions = [output.outputs[0] for output in outputs]
        rows = [Acceptance(tuple(c.spec_decode_metrics.histogram)) for c in completions if c.spec_decode_metrics]
        answer = {
            "tokens": sum(len(c.token_ids) for c in completions),
            "seconds": seconds,
            "histogram": Acceptance.total(rows).histogram,
        }
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    def __init__(self, kind: str, policy: Path, draft: Path | None = None, num_tokens: int = 0):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", kind, str(policy), str(draft or ""), str(num_tokens)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the {kind} engine did not start; its messages are above.")

    def generate(self, prompts: list, concurrency: int, max_tokens: int) -> dict:
        from hf_codraft.cli.tasks import TEMPERATURE

        order = {"prompts": prompts, "concurrency": concurrency, "max_tokens": max_tokens, "temperature": TEMPERATURE}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def long_draft(policy: Path) -> tuple[Path, dict]:
    """The demo's draft, warmed up further on many rollouts of this policy; made once, kept in the cache with its price."""
    from hf_codraft.cli.model import cache_folder

    folder = cache_folder() / "long-draft"
    note = folder / "price.json"
    fingerprint = f"{policy.resolve()} {(policy / 'model.safetensors').stat().st_mtime_ns}"
    if note.is_file() and json.loads(note.read_text())["policy"] == fingerprint:
        return folder / "draft", json.loads(note.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    subprocess.run([sys.executable, __file__, "--worker", "warm", str(policy), str(folder), "0"], check=True)
    tokens = json.loads((folder / "tokens.json").read_text())
    price = {"policy": fingerprint, "minutes": (time.perf_counter() - started) / 60, "completion_tokens": tokens}
    note.write_text(json.dumps(price))
    return folder / "draft", price


def warm_long(policy: str, folder: str) -> None:
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")
    import torch

    from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer, save_draft
    from hf_codraft.cli.tasks import MAX_COMPLETION_LENGTH, TEMPERATURE, accuracy, sheets

    config = CoDraftGRPOConfig(
        output_dir=folder, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256, num_generations=8,
        use_cpu=not torch.cuda.is_available(), per_device_train_batch_size=32, max_completion_length=MAX_COMPLETION_LENGTH,
        draft_warmup_rollouts=LONG_ROLLOUTS, draft_warmup_epochs=LONG_EPOCHS,
        temperature=TEMPERATURE, report_to="none",
    )  # fmt: skip
    trainer = CoDraftGRPOTrainer(
        policy, accuracy, config, draft=f"{policy}/draft", train_dataset=sheets(LONG_ROLLOUTS, seed=1)
    )
    trainer.warm_up_draft()
    save_draft(trainer.draft, Path(folder) / "draft", base_model=policy)
    (Path(folder) / "tokens.json").write_text(json.dumps(trainer.num_warmup_tokens))


def measure(engines: dict[str, Engine], rounds: int, quick: bool) -> dict:
    from hf_codraft.cli.tasks import MAX_COMPLETION_LENGTH, sheets
    from hf_codraft.serving.acceptance import Acceptance

    results: dict = {name: {} for name in engines}
    for concurrency in CONCURRENCIES:
        num_prompts = concurrency * (1 if quick else {1: 6, 4: 4, 16: 2}[concurrency])
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        histograms: dict[str, list[Acceptance]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            prompts = sheets(num_prompts, seed=UNSEEN_SEED + concurrency * 100 + number)["prompt"][:]
            names = list(engines) if number % 2 else list(reversed(engines))
            for name in names:
                answer = engines[name].generate(prompts, concurrency, MAX_COMPLETION_LENGTH)
                if number > 0:  # the first round warms caches
                    speeds[name].append(answer["tokens"] / answer["seconds"])
                    histograms[name].append(Acceptance(tuple(answer["histogram"])))
        for name in engines:
            ratios = [a / b for a, b in zip(speeds[name], speeds["plain"], strict=True)]
            results[name][concurrency] = {
                "tokens_per_second": statistics.median(speeds[name]),
                "over_plain": statistics.median(ratios),
                "over_plain_range": [min(ratios), max(ratios)],
                "accept_length": Acceptance.total(histograms[name]).accept_length,
            }
    return results


def print_results(results: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Completion tokens a second, 2-core CPU, SmolLM2-135M, bf16, unseen prompts")
    table.add_column("engine")
    for concurrency in CONCURRENCIES:
        table.add_column(f"concurrency {concurrency}", justify="right")
    for name, rows in results.items():
        cells = []
        for row in rows.values():
            low, high = row["over_plain_range"]
            cell = f"{row['tokens_per_second']:.0f}  {row['over_plain']:.2f}x [{low:.2f}, {high:.2f}]"
            cells.append(cell + (f"  accept {row['accept_length']:.2f}" if row["accept_length"] > 1 else ""))
        table.add_row(name, *cells)
    Console(width=160).print(table)


def best(results: dict, draft: str, concurrency: int) -> dict:
    """The row of this draft with the number of tokens that is faster at this concurrency."""
    rows = [results[f"{draft}, {number} tokens"][concurrency] for number in TOKENS]
    return max(rows, key=lambda row: row["over_plain"])


def aims(results: dict) -> list[tuple[str, float, float]]:
    """(what, figure, least) of every aim."""
    lines = [
        ("repaired engine over stock at concurrency 4", 1 / results["stock"][4]["over_plain"], 0.95),
        ("demo draft: accept length on unseen prompts", best(results, "demo draft", 4)["accept_length"], 1.8),
        ("demo draft: speed over plain at concurrency 1", best(results, "demo draft", 1)["over_plain"], 1.0),
        ("demo draft: speed over plain at concurrency 4", best(results, "demo draft", 4)["over_plain"], 1.0),
    ]
    if f"long draft, {TOKENS[0]} tokens" in results:
        lines += [
            ("long draft: speed over plain at concurrency 1", best(results, "long draft", 1)["over_plain"], 1.8),
            ("long draft: speed over plain at concurrency 4", best(results, "long draft", 4)["over_plain"], 1.4),
        ]
    return lines


def main() -> int:
    args = parse()
    if args.worker:
        kind, policy, draft, num_tokens = args.worker
        warm_long(policy, draft) if kind == "warm" else serve(kind, policy, draft, int(num_tokens))
        return 0
    policy = args.run_dir / "cotrained"
    if not (policy / "model.safetensors").is_file():
        print(f"{policy} has no policy; run `make demo` first, or pass --run-dir.", file=sys.stderr)
        return 2
    drafts, price = {"demo draft": policy / "draft"}, None
    if args.long:
        drafts["long draft"], price = long_draft(policy)
    engines = {"stock": Engine("stock", policy), "plain": Engine("plain", policy)}
    for name, folder in drafts.items():
        for number in TOKENS:
            engines[f"{name}, {number} tokens"] = Engine("speculative", policy, folder, number)
    results = measure(engines, 1 if args.quick else args.rounds, args.quick)
    for engine in engines.values():
        engine.close()
    print_results(results)
    if price:
        print(
            f"long draft: {price['completion_tokens']} completion tokens, {price['minutes']:.1f} minutes, kept in the cache"
        )
    if args.json:
        args.json.write_text(json.dumps({"results": results, "long_draft": price}, indent=2) + "\n")
    if not args.check:
        return 0
    missed = 0
    for what, figure, least in aims(results):
        missed += figure < least
        print(f"{'ok    ' if figure >= least else 'MISSED'} {what}: {figure:.2f} (aim {least})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
