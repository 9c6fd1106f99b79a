"""What co-training costs: the time of the draft's step, and peak memory, against GRPO alone.

    python benchmarks/co_training_cost.py               # SmolLM2-135M, 2 rows of 1024 tokens
    python benchmarks/co_training_cost.py --quick       # a tiny policy: shows that it runs, says nothing about cost

Rollouts are made up, so nothing is generated: TRL trains on fixed random tokens. Three variants take turns, each in a
process of its own (peak memory is that of a process): GRPO alone, with a draft over the policy's whole vocabulary
(the default), and with one over 1024 ids (the demo's). Times of draft and policy come from the same steps of one run.

- time of the draft's step: `time/draft / (time/policy + time/logprob)`, all logged by the trainer. The forward for the
  log-probs is one that vLLM's rollouts need; the share without it is printed beside.
- peak memory: resident memory at its highest (VmHWM), less that of GRPO alone; allowed are the draft's weights, their
  gradients, AdamW's two moments and the taps of one batch.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

TIME_AIM = 0.10
STEPS_PER_GENERATION = 2  # more than one, so that TRL computes old log-probs, as it does for vLLM's rollouts
WORKER_TIMEOUT_S = 3600
TAPS = 3


@dataclass(frozen=True)
class Scale:
    """Size of one run; made by [`parse`], read by workers.

    Args:
        prompt, completion (`int`): tokens of a row.
        draft_vocab_size (`int`): of the reduced variant.
        steps (`int`): measured optimizer steps, after one unmeasured generation batch.
        rounds (`int`): how often the variants take turns.
    """

    prompt: int
    completion: int
    draft_vocab_size: int
    steps: int
    rounds: int
    rows: int = 2


FULL = Scale(prompt=256, completion=768, draft_vocab_size=1024, steps=2, rounds=1)
QUICK = Scale(prompt=32, completion=96, draft_vocab_size=64, steps=2, rounds=1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny policy made from a config, in seconds")
    parser.add_argument("--check", action="store_true", help="print a line per aim; exit 1 where one is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--model", help="folder or Hub id of another policy than SmolLM2-135M")
    parser.add_argument("--steps", type=int, help="measured optimizer steps of a run")
    parser.add_argument("--rounds", type=int, help="how often the variants take turns")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="as TRL does unless told otherwise")
    parser.add_argument("--worker", choices=("alone", "full", "reduced"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    base = QUICK if args.quick else FULL
    changes = {name: getattr(args, name) for name in ("steps", "rounds") if getattr(args, name) is not None}
    if any(value < 1 for value in changes.values()):
        parser.error("--steps and --rounds must be at least 1.")
    if changes.get("steps", 0) % STEPS_PER_GENERATION:
        parser.error(
            f"--steps must be a multiple of {STEPS_PER_GENERATION}, the steps that share one generation batch."
        )
    args.scale = Scale(**{**asdict(base), **changes})
    return args


# One run, in its own process


def load_policy(args: argparse.Namespace):
    """The policy in fp32 (TRL's default) and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if args.quick and not args.model:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config), tiny_tokenizer(config.vocab_size)
    from hf_codraft.cli.model import unpack_smollm2

    folder = args.model or unpack_smollm2()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def tiny_tokenizer(vocab_size: int):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, vocab_size)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<eos>")), eos_token="<eos>", pad_token="<eos>"
    )


def make_draft(policy, scale: Scale, kept_ids: list[int] | None):
    """A fresh draft over the whole vocabulary, or over `kept_ids`."""
    import torch

    from hf_codraft.hub.resolve import fresh_eagle3
    from hf_codraft.policy.anatomy import PolicyAnatomy

    anatomy = PolicyAnatomy.of(policy)
    size = None if kept_ids is None else len(kept_ids)
    options = SimpleNamespace(draft_vocab_size=size, draft_tap_layers=None, draft_warmup_rollouts=1)
    draft = fresh_eagle3(anatomy, options)
    if kept_ids is not None:
        draft.set_vocabulary(torch.tensor(kept_ids), anatomy.weights())
    return draft


def make_trainer(args: argparse.Namespace, output_dir: str):
    """A trainer whose rollouts are random tokens of a fixed set of ids."""
    import torch
    from datasets import Dataset

    from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer

    scale = args.scale
    policy, tokenizer = load_policy(args)
    special = {*tokenizer.all_special_ids}
    ids = [i for i in range(policy.config.vocab_size) if i not in special][: scale.draft_vocab_size]
    draw = random.Random(0)

    class FixedRollouts(CoDraftGRPOTrainer):
        def _tokenize_prompts(self, prompts):
            return [draw.choices(ids, k=scale.prompt) for _ in prompts], None, {}

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            return [draw.choices(ids, k=scale.completion) for _ in prompt_ids], None

    config = CoDraftGRPOConfig(
        output_dir=output_dir,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=scale.rows,
        num_generations=scale.rows,
        steps_per_generation=STEPS_PER_GENERATION,
        max_completion_length=scale.completion,
        max_steps=STEPS_PER_GENERATION + scale.steps,
        learning_rate=1e-6,
        gradient_checkpointing=args.gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    kept_ids = {"alone": None, "full": None, "reduced": ids}[args.worker]
    return FixedRollouts(
        policy,
        lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
        config,
        draft=None if args.worker == "alone" else make_draft(policy, scale, kept_ids),
        train_dataset=Dataset.from_dict({"prompt": ["made up"] * 64}),
        processing_class=tokenizer,
    )


def step_timer(seconds: list[float]):
    """A callback that appends the wall time of every optimizer step."""
    from transformers import TrainerCallback

    class StepTimer(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            seconds.append(time.perf_counter() - self.started)

    return StepTimer()


def peak_memory_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def work(args: argparse.Namespace) -> dict:
    """Trains one variant and returns what it took; times are seconds an optimizer step."""
    import warnings

    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, folder)
        wall_s: list[float] = []
        trainer.add_callback(step_timer(wall_s))
        trainer.train()
    report = {
        "variant": args.worker,
        "step_s": statistics.mean(wall_s[STEPS_PER_GENERATION:]),
        "peak_bytes": peak_memory_bytes(),
    }
    if trainer.draft is None:
        return report
    logs = [entry for entry in trainer.state.log_history if "time/draft" in entry][STEPS_PER_GENERATION:]
    report |= {
        f"{name}_s": statistics.mean(entry[f"time/{name}"] for entry in logs)
        for name in ("policy", "logprob", "draft")
    }
    report["share"] = report["draft_s"] / (report["policy_s"] + report["logprob_s"])
    report["share_without_logprob"] = report["draft_s"] / report["policy_s"]
    num_parameters = sum(p.numel() for p in trainer.learner.parameters)
    tokens = args.scale.rows * (args.scale.prompt + args.scale.completion)
    return report | {
        "draft_vocab_size": trainer.draft.config.draft_vocab_size,
        "num_parameters": num_parameters,
        "draft_bytes": 4 * num_parameters,  # the draft is trained in fp32
        "gradient_bytes": 4 * num_parameters,
        "optimizer_bytes": 2 * 4 * num_parameters,
        "taps_bytes": 4 * tokens * (TAPS + 1) * trainer.anatomy.model.config.hidden_size,  # and the final hidden state
    }


# All runs


def run_worker(variant: str, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", variant, "--json", str(result)]
        command += ["--steps", str(args.scale.steps)] + ["--quick"] * args.quick
        command += ["--model", args.model] if args.model else []
        command += ["--gradient-checkpointing"] * args.gradient_checkpointing
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_TIMEOUT_S)
        if ended.returncode != 0:
            raise RuntimeError(f"the run {variant!r} ended with status {ended.returncode}:\n{ended.stderr[-3000:]}")
        report = json.loads(result.read_text())
    print(f"{variant}: {report['step_s']:.2f} s a step", file=sys.stderr, flush=True)
    return report


def summarize(runs: list[dict]) -> list[dict]:
    """One row a variant: medians over the rounds."""
    alone = _medians([run for run in runs if run["variant"] == "alone"])
    rows = []
    for variant in ("full", "reduced"):
        row = _medians([run for run in runs if run["variant"] == variant])
        row["step_s_alone"], row["peak_bytes_alone"] = alone["step_s"], alone["peak_bytes"]
        row["excess_bytes"] = row["peak_bytes"] - alone["peak_bytes"]
        row["allowed_bytes"] = sum(row[f"{part}_bytes"] for part in ("draft", "gradient", "optimizer", "taps"))
        rows.append(row)
    return rows


def _medians(runs: list[dict]) -> dict:
    return {
        name: value if isinstance(value, str) else statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
    }


def print_table(rows: list[dict], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    scale = args.scale
    policy = "a tiny policy" if args.quick and not args.model else args.model or "SmolLM2-135M"
    table = Table(
        title=f"Co-training on {policy}, {scale.rows} rows of {scale.prompt} + {scale.completion} tokens a step"
    )
    for column in ("", "GRPO alone", *(f"draft of {row['draft_vocab_size']:.0f} ids" for row in rows)):
        table.add_column(column, justify="left" if not column else "right")

    def line(name: str, alone: str, show) -> None:
        table.add_row(name, alone, *(show(row) for row in rows))

    first = rows[0]
    line("trained parameters of the draft, M", "", lambda r: f"{r['num_parameters'] / 1e6:.2f}")
    line("step, s", f"{first['step_s_alone']:.3f}", lambda r: f"{r['step_s']:.3f}")
    line("  policy: forward, backward, optimizer, s", "", lambda r: f"{r['policy_s']:.3f}")
    line("  policy: old log-probs, s", "", lambda r: f"{r['logprob_s']:.3f}")
    line("  draft, s", "", lambda r: f"{r['draft_s']:.3f}")
    line("draft / policy with log-probs", "", lambda r: f"{r['share']:.1%}")
    line("draft / policy without", "", lambda r: f"{r['share_without_logprob']:.1%}")
    line("peak memory, MiB", f"{first['peak_bytes_alone'] / 2**20:.0f}", lambda r: f"{r['peak_bytes'] / 2**20:.0f}")
    line("  more than GRPO alone, MiB", "", lambda r: f"{r['excess_bytes'] / 2**20:.0f}")
    line("  weights, gradients, optimizer, taps, MiB", "", lambda r: f"{r['allowed_bytes'] / 2**20:.0f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def check_aims(rows: list[dict]) -> list[dict]:
    """Every aim with its figure.

    The time's aim is for the reduced vocabulary, the setting for a policy as small as this one, whose head is a fifth of
    its work: over all 49152 ids three passes of the draft's head cost about half of the policy's step (the table says it).
    """
    reduced = min(row["draft_vocab_size"] for row in rows)
    aims = []
    for row in rows:
        ids = f"{row['draft_vocab_size']:.0f} ids"
        if row["draft_vocab_size"] == reduced:
            aims.append(
                {"aim": f"draft's step over policy training, {ids}", "figure": row["share"], "at_most": TIME_AIM}
            )
        aims.append(
            {"aim": f"bytes above GRPO alone, {ids}", "figure": row["excess_bytes"], "at_most": row["allowed_bytes"]}
        )
    for aim in aims:
        aim["is_met"] = aim["figure"] <= aim["at_most"]
    return aims


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.worker:
        args.json.write_text(json.dumps(work(args)))
        return 0
    runs = [run_worker(variant, args) for _ in range(args.scale.rounds) for variant in ("alone", "full", "reduced")]
    rows = summarize(runs)
    print_table(rows, args)
    aims = check_aims(rows)
    if args.check:
        for aim in aims:
            number = "{:.3f}" if aim["at_most"] < 1 else "{:.0f}"
            verdict = "met   " if aim["is_met"] else "MISSED"
            print(f"{verdict} {aim['aim']}: {number.format(aim['figure'])} (at most {number.format(aim['at_most'])})")
        if args.quick:
            print("(Figures of a tiny policy say nothing about a real one.)")
    if args.json:
        machine = {"kind": platform.machine(), "cpus": os.cpu_count()}
        report = {"scale": asdict(args.scale), "machine": machine, "rows": rows, "aims": aims, "runs": runs}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and not all(aim["is_met"] for aim in aims) else 0


if __name__ == "__main__":
    sys.exit(main())
