"""Does co-training a draft beat leaving it alone? Accept length by step of one RL run, for three drafts side by side.

    .venv/bin/python benchmarks/co_training.py                         # both workloads, seeds 0 and 1: about an hour
    .venv/bin/python benchmarks/co_training.py --workload sheets --seeds 0
    .venv/bin/python benchmarks/co_training.py --workload sheets --seeds 0 --recipes   # what the defaults were chosen from
    .venv/bin/python benchmarks/co_training.py --quick

`cotrained` serves the rollouts and learns as the trainer's defaults have it, after a warm start; `frozen` is the same draft as
the warm start left it; `cold` begins with nothing but the vocabulary and learns from the run alone. All three are measured
on all completions of every step before they learn from them, so they meet the same policy on the same rows (the policy's run
does not depend on the draft): the expected accept length of `hf_codraft.drafts.expected`, with bootstrap intervals over rows.
In every `--engine-every`-th step the engine also rolls out that step's prompts with each draft, which shows whether the
expectation is what a real engine accepts.

Workloads, both SmolLM2-135M-Instruct in a real vLLM engine: `sheets`, the demo's, temperature 0.7; and `sums`, in which the
model reasons in words about a longer sum at temperature 1, and RL drives it from prose to small right sums: the policy leaves
what the warm start has seen.
"""

import argparse
import copy
import json
import os
import random
import re
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

DRAFTS = ("cotrained", "frozen", "cold")
WINDOW = 3  # steps over which the co-trained draft may not lose


@dataclass(frozen=True)
class Workload:
    """One kind of RL run; all numbers are the trainer's settings of that name."""

    temperature: float
    max_completion_length: int
    max_model_length: int
    rows: int
    micro: int
    steps: int
    learning_rate: float
    draft_vocab_size: int
    draft_warmup_rollouts: int
    draft_warmup_epochs: int


WORKLOADS = {
    "sheets": Workload(0.7, 40, 256, 32, 16, 14, 5e-5, 1024, 256, 6),
    "sums": Workload(1.0, 160, 256, 16, 8, 24, 1e-4, 2048, 128, 4),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, help="only this one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, help="GRPO steps instead of the workload's own")
    parser.add_argument(
        "--engine-every", type=int, default=4, help="roll out with every draft in each so-many-th step; 0: never"
    )
    parser.add_argument(
        "--recipes", action="store_true", help="also train copies of the draft in other ways, on the same rows"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/co_training"))
    parser.add_argument("--quick", action="store_true", help="a few short steps, to see that everything works")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--draw", type=Path, help="draw accept length by step into this PNG")
    parser.add_argument("--check", action="store_true", help="a line an aim; exit status 1 where one is missed")
    parser.add_argument("--judge", type=Path, nargs="+", help="judge the figures of these files instead of running")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args()


# The workload in which the policy moves far

_SMALL_SUM = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)")


def sums(num: int, *, seed: int) -> Any:
    """Prompts that ask for a sum of six to nine numbers, step by step."""
    from datasets import Dataset

    draw, rows = random.Random(seed), []
    for _ in range(num):
        numbers = [draw.randint(1, 30) for _ in range(draw.randint(6, 9))]
        expression = str(numbers[0]) + "".join(f" {draw.choice('+-')} {number}" for number in numbers[1:])
        question = f"What is {expression}? Work it out step by step, one small sum at a time, then state the answer."
        rows.append({"prompt": [{"role": "user", "content": question}], "num_terms": len(numbers)})
    return Dataset.from_list(rows)


def share_of_sums(completions, **kwargs) -> list[float]:
    """Share of the text that is small sums such as `4 + 9 = 13`."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [sum(len(m.group()) for m in _SMALL_SUM.finditer(text)) / max(len(text), 40) for text in texts]


def right_sums(completions, num_terms, **kwargs) -> list[float]:
    """Different small sums that are right, of as many as the task needs."""
    rewards = []
    for completion, terms in zip(completions, num_terms, strict=True):
        found = {m.groups() for m in _SMALL_SUM.finditer(completion[0]["content"])}
        right = [int(a) + (int(b) if sign == "+" else -int(b)) == int(c) for a, sign, b, c in found]
        rewards.append(min(sum(right), terms - 1) / (terms - 1))
    return rewards


# One run


def recipes(trainer: Any) -> dict[str, Any]:
    """`DraftUpdates` of copies of the warm draft, each in one respect another recipe than the trainer's."""
    from hf_codraft.drafts.learner import WARM_START_RATE, level

    def recipe(num_updates: int | None = None, has_moments: bool = True, **changes: Any) -> Any:
        learner = replace(trainer.learner, draft=copy.deepcopy(trainer.draft), opening=level, **changes)
        if has_moments:
            learner.load_moments(copy.deepcopy(trainer.learner.state_dict()))
        updates = trainer.draft_updates
        return replace(updates, learner=learner, listeners=[], num_updates=num_updates or updates.num_updates)

    rate = trainer.learner.learning_rate
    return {
        "kl": recipe(loss_type="kl"),
        "lk": recipe(loss_type="lk"),
        "ce": recipe(loss_type="ce"),
        "two updates": recipe(2),
        "four updates": recipe(4),
        "eight updates": recipe(8),
        "a third of the rate": recipe(learning_rate=rate / 3),
        "three times the rate": recipe(learning_rate=rate * 3),
        "without moments": recipe(has_moments=False),
        "pass weights 1, 0.7, 0.4": recipe(pass_weights=(1.0, 0.7, 0.4)),
        "one kl update at 1e-3 without moments": recipe(
            1, has_moments=False, loss_type="kl", learning_rate=WARM_START_RATE
        ),
    }


def run_workload(
    name: str, seed: int, workload: Workload, folder: Path, *, engine_every: int, has_recipes: bool
) -> dict[str, Any]:
    """Trains one policy with its draft and returns the figures of every step."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")

    import torch
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer
    from hf_codraft.cli import tasks
    from hf_codraft.cli.control import SideBySide
    from hf_codraft.cli.model import unpack_smollm2
    from hf_codraft.cli.report import StepPrinter
    from hf_codraft.drafts.learner import settling
    from hf_codraft.serving.acceptance import Acceptance

    rewards, data, weights = {
        "sheets": ([tasks.accuracy, tasks.layout], tasks.sheets(2048, seed=seed), [1.0, 0.2]),
        "sums": ([right_sums, share_of_sums], sums(2048, seed=seed), [1.0, 1.0]),
    }[name]
    measured: list[dict[str, Any]] = []

    class Measured(CoDraftGRPOTrainer):
        """Rolls every so-many-th batch of prompts out with the other drafts too."""

        others: dict[str, Any] = {}
        also: dict[str, float] = {}

        def _log_rollouts(self, num_rows):
            rows = list(self.vllm_generation._rollouts.rows)
            super()._log_rollouts(num_rows)
            if self.others:
                engine = {"cotrained": Acceptance.total(rows).accept_length, **self.also}
                measured.append({"step": self.state.global_step + 1, **engine})

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
            output = super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
            self.also = {}
            if self.others and engine_every and self.state.global_step % engine_every == 0:
                kept, generation = self.vllm_generation.take_rollouts(), self.vllm_generation
                with torch.random.fork_rng():
                    for other, draft in self.others.items():
                        own, generation.draft = generation.draft, draft
                        generation.sync_weights()
                        super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
                        generation.draft = own
                        self.also[other] = Acceptance.total(generation.take_rollouts().rows).accept_length
                generation.sync_weights()
                generation.take_rollouts()
                generation._rollouts = kept
            return output

    class Watch(TrainerCallback):
        def on_train_begin(self, *_, **__):  # the warm start lies behind it
            cold = copy.deepcopy(trainer.draft)
            cold.load_state_dict(
                {**first, **{k: v for k, v in trainer.draft.state_dict().items() if k in ("d2t", "t2d")}}
            )
            cold.set_vocabulary(cold.kept_ids, trainer.anatomy.weights())
            frozen = copy.deepcopy(trainer.draft)
            Measured.others = {"frozen": frozen, "cold": cold}
            learner = trainer.make_learner(cold, opening=settling)
            taught = {"cold": replace(trainer.draft_updates, learner=learner, listeners=[])}
            if has_recipes:
                taught |= recipes(trainer)
            others = {"frozen": frozen, **{name: updates.learner.draft for name, updates in taught.items()}}
            sides.append(SideBySide(trainer, others))

            def teach(rows, policy):
                for updates in taught.values():
                    for row in rows:
                        updates.add(row)
                    updates.run(policy)

            trainer.draft_updates.listeners.append(teach)

    sides: list[SideBySide] = []
    config = CoDraftGRPOConfig(
        output_dir=str(folder), seed=seed, use_cpu=not torch.cuda.is_available(), use_vllm=True, vllm_mode="colocate",
        vllm_max_model_length=workload.max_model_length, per_device_train_batch_size=workload.micro,
        gradient_accumulation_steps=workload.rows // workload.micro, num_generations=8,
        max_completion_length=workload.max_completion_length, temperature=workload.temperature, max_steps=workload.steps,
        learning_rate=workload.learning_rate, lr_scheduler_type="constant_with_warmup", warmup_steps=2,
        reward_weights=weights, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, draft_vocab_size=workload.draft_vocab_size,
        draft_warmup_rollouts=workload.draft_warmup_rollouts, draft_warmup_epochs=workload.draft_warmup_epochs,
    )  # fmt: skip
    trainer = Measured(unpack_smollm2(), rewards, config, draft="eagle3", train_dataset=data)
    first = {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepPrinter(workload.steps, trainer.phase_seconds))
    trainer.add_callback(Watch())
    started = time.perf_counter()
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    steps = []
    for number, (entry, side) in enumerate(zip(history, sides[0].steps, strict=True), start=1):
        steps.append(
            {
                "reward": entry["reward"],
                "mean_length": entry["completions/mean_length"],
                "entropy": entry["entropy"],
                "rolled_back": entry["draft/rolled_back"],
                "seconds": {phase: entry[f"time/{phase}"] for phase in ("generate", "logprob", "policy", "draft")},
                "engine": next(
                    ({k: v for k, v in m.items() if k != "step"} for m in measured if m["step"] == number), {}
                ),
                "expected": {
                    name: {"steps": e.steps_S.tolist(), "tokens": e.tokens_S.tolist()} for name, e in side.items()
                },
            }
        )
    return {
        "workload": asdict(workload), "seed": seed, "seconds_in_all": time.perf_counter() - started, "steps": steps,
    }  # fmt: skip


# Figures


def accept_length(side: dict[str, list[float]]) -> float:
    return sum(side["tokens"]) / sum(side["steps"])


def ratio(run: dict[str, Any], ours: str, theirs: str, window: slice) -> tuple[float, float, float]:
    """Accept length of one draft over another's in some steps, on the same rows, with a 95 % interval over rows."""
    from hf_codraft.cli.control import expected_from, ratio_interval

    sides = ([expected_from(step["expected"][name]) for step in run["steps"][window]] for name in (ours, theirs))
    return ratio_interval(*sides)


def draft_share(run: dict[str, Any]) -> float:
    """The draft's seconds over those of the policy's training: forward, backward, optimizer and old log-probs."""
    seconds = [step["seconds"] for step in run["steps"]]
    return sum(s["draft"] for s in seconds) / sum(s["policy"] + s["logprob"] for s in seconds)


def aims(runs: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    """What the runs must show: a line for each aim, and whether it is met."""
    lines = []
    for label, run in runs.items():
        steps, third = len(run["steps"]), slice(-(len(run["steps"]) // 3), None)
        windows = [ratio(run, "cotrained", "frozen", slice(i, i + WINDOW)) for i in range(1, steps - WINDOW + 1)]
        worst = min(windows, key=lambda window: window[2])
        lines.append((
            f"{label}: in no {WINDOW} steps is the co-trained draft below the frozen one beyond noise (worst window: "
            f"{worst[0]:.3f} [{worst[1]:.3f}, {worst[2]:.3f}])",
            worst[2] >= 1.0,
        ))  # fmt: skip
        whole = ratio(run, "cotrained", "frozen", slice(0, None))
        lines.append((
            f"{label}: the co-trained draft's accept length is above the frozen one's ({whole[0]:.3f} [{whole[1]:.3f}, "
            f"{whole[2]:.3f}])",
            whole[1] > 1.0,
        ))  # fmt: skip
        if label.startswith("sums"):
            last = ratio(run, "cotrained", "frozen", third)
            lines.append((
                f"{label}: under drift it is at least 10 % above over the last third ({last[0]:.3f} [{last[1]:.3f}, "
                f"{last[2]:.3f}])",
                last[0] >= 1.1,
            ))  # fmt: skip
        cold = ratio(run, "cold", "cotrained", slice(-WINDOW, None))
        lines.append((
            f"{label}: from a cold start the draft reaches 95 % of the warm-started one within the run (last {WINDOW} steps: "
            f"{cold[0]:.3f} [{cold[1]:.3f}, {cold[2]:.3f}])",
            cold[0] >= 0.95,
        ))  # fmt: skip
        share = draft_share(run)
        lines.append(
            (f"{label}: the draft's time is at most 10 % of the policy's training ({share:.1%})", share <= 0.1)
        )
        errors = [
            step["engine"][name] / accept_length(step["expected"][name]) - 1
            for step in run["steps"]
            for name in step["engine"]
        ]
        if errors:
            error = sum(errors) / len(errors)
            lines.append((
                f"{label}: the engine accepts what is expected (mean of {len(errors)}: {error:+.1%}, where it counts guesses "
                "past a row's end too; within 5 %)",
                abs(error) <= 0.05,
            ))  # fmt: skip
    return lines


def print_tables(runs: dict[str, dict[str, Any]]) -> None:
    for label, run in runs.items():
        first, last = run["steps"][0], run["steps"][-1]
        print(
            f"\n{label}: reward {first['reward']:.2f} -> {last['reward']:.2f}, tokens a completion "
            f"{first['mean_length']:.0f} -> {last['mean_length']:.0f}, draft's time {draft_share(run):.1%} of the policy's, "
            f"rolled back {last['rolled_back']:.0f}"
        )
        for name in run["steps"][0]["expected"]:
            values = [accept_length(step["expected"][name]) for step in run["steps"]]
            print(
                f"  {name:10s} "
                + " ".join(f"{value:.2f}" for value in values)
                + f"   mean {sum(values) / len(values):.2f}"
            )
            engine = [step["engine"].get(name) for step in run["steps"]]
            if any(engine):
                print(
                    f"  {'in the engine':38s} "
                    + " ".join("  . " if value is None else f"{value:.2f}" for value in engine)
                )
        thirds = [slice(i * len(run["steps"]) // 3, (i + 1) * len(run["steps"]) // 3) for i in range(3)]
        pairs = [("cotrained", "frozen"), ("cold", "cotrained")]
        pairs += [(name, "cotrained") for name in run["steps"][0]["expected"] if name not in DRAFTS]
        for ours, theirs in pairs:
            cells = ("{:.3f} [{:.3f}, {:.3f}]".format(*ratio(run, ours, theirs, third)) for third in thirds)
            print(f"  {ours} / {theirs} by thirds: " + "   ".join(cells))


def draw(runs: dict[str, dict[str, Any]], file: Path) -> None:
    """Accept length by step: lines as expected on the run's completions, dots as the engine counted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"cotrained": "#2563eb", "frozen": "#9ca3af", "cold": "#f97316"}
    names = {"cotrained": "co-trained", "frozen": "the same draft, frozen", "cold": "co-trained without warm start"}
    figure, axes = plt.subplots(1, len(runs), figsize=(5.6 * len(runs), 3.6), constrained_layout=True, squeeze=False)
    for axis, (label, run) in zip(axes[0], runs.items(), strict=True):
        numbers = range(1, len(run["steps"]) + 1)
        for name in DRAFTS:
            values = [accept_length(step["expected"][name]) for step in run["steps"]]
            axis.plot(numbers, values, color=colors[name], label=names[name])
            engine = [(n, step["engine"][name]) for n, step in zip(numbers, run["steps"]) if name in step["engine"]]
            axis.plot(*zip(*engine, strict=True), ".", color=colors[name], markersize=5)
        axis.set(title=label, xlabel="step of GRPO", ylabel="tokens a verification")
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> int:
    args = parse()
    if args.worker:
        name, seed = args.worker[0], int(args.worker[1])
        workload = WORKLOADS[name]
        if args.quick:
            workload = replace(workload, steps=5, rows=8, micro=8, max_completion_length=24)
            workload = replace(workload, draft_warmup_rollouts=16, draft_warmup_epochs=2)
        if args.steps:
            workload = replace(workload, steps=args.steps)
        folder = args.output_dir / f"{name}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        every = 2 if args.quick else args.engine_every
        figures = run_workload(name, seed, workload, folder, engine_every=every, has_recipes=args.recipes)
        (folder / "figures.json").write_text(json.dumps(figures) + "\n")
        return 0
    if args.judge:
        runs = {label: run for file in args.judge for label, run in json.loads(file.read_text()).items()}
    else:
        runs = {}
        for name in [args.workload] if args.workload else WORKLOADS:
            for seed in args.seeds[:1] if args.quick else args.seeds:
                command = [sys.executable, __file__, *sys.argv[1:], "--worker", name, str(seed)]
                if subprocess.run(command).returncode != 0:
                    print(f"The run of {name} with seed {seed} failed; its messages are above.", file=sys.stderr)
                    return 1
                runs[f"{name}, seed {seed}"] = json.loads(
                    (args.output_dir / f"{name}-{seed}" / "figures.json").read_text()
                )
    print_tables(runs)
    if args.draw:
        draw(runs, args.draw)
    if args.json:
        args.json.write_text(json.dumps(runs) + "\n")
    judged = aims(runs)
    print()
    for line, is_met in judged:
        print(f"{'met   ' if is_met else 'MISSED'} {line}")
    return int(args.check and not all(is_met for _, is_met in judged))


if __name__ == "__main__":
    sys.exit(main())
