"""What the demo shows: a line a step, a table and a picture."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from hf_codraft._optional import require
from hf_codraft.cli.control import expected_from, ratio_interval
from hf_codraft.phases import PHASES

_ENDS = 3  # "first" and "last" are means over so many steps


class StepPrinter(TrainerCallback):
    """One line a step, with what the step did and how long it took."""

    def __init__(self, num_steps: int, phase_seconds: list[dict[str, float]]):
        self.num_steps = num_steps
        self.phase_seconds = phase_seconds
        self.console = Console()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "reward" not in logs:
            return
        seconds = self.phase_seconds[-1]
        line = f"step {state.global_step:3d}/{self.num_steps}  reward {logs['reward']:.2f}"
        line += f"  tokens a completion {logs['completions/mean_length']:.0f}"
        if "draft/accept_length" in logs:
            line += f"  accept length {logs['draft/accept_length']:.2f}"
        parts = ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items())
        self.console.print(f"{line}  {sum(seconds.values()):.0f} s ({parts})", highlight=False, soft_wrap=True)


def load_history(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "history.json").read_text())


def _column(steps: list[dict[str, float]], name: str) -> list[float]:
    return [step[name] for step in steps if name in step]


def _ends(values: list[float]) -> dict[str, float]:
    count = min(_ENDS, len(values))
    return {"first": round(sum(values[:count]) / count, 3), "last": round(sum(values[-count:]) / count, 3)}


def _tokens_per_second(steps: list[dict[str, float]], rows: int) -> float:
    tokens = sum(step["completions/mean_length"] * rows for step in steps)
    return round(tokens / sum(step["time/generate"] for step in steps), 1)


def _over_frozen(steps: list[dict[str, Any]]) -> tuple[float, float, float]:
    sides = ([expected_from(step["expected"][draft]) for step in steps[-_ENDS:]] for draft in ("cotrained", "frozen"))
    return ratio_interval(*sides)


def _expected(steps: list[dict[str, Any]], draft: str) -> list[float]:
    """Accept length that a draft is expected to have, by step, on the completions of the run."""
    return [sum(step["expected"][draft]["tokens"]) / sum(step["expected"][draft]["steps"]) for step in steps]


def summarize(folders: dict[str, Path], scale: dict[str, int]) -> dict[str, Any]:
    """The figures of a demo, from the histories of its runs; controls that did not run are left out."""
    histories = {name: load_history(folder) for name, folder in folders.items()}
    main = histories["cotrained"]["steps"]
    accept = _column(main, "draft/accept_length")
    positions = sum(name.startswith("draft/accept_rate/pos_") for name in main[-1])
    summary: dict[str, Any] = {
        "scale": scale,
        "accept_length": _ends(accept),
        "accept_rate": {f"pos_{i}": _ends(_column(main, f"draft/accept_rate/pos_{i}")) for i in range(positions)},
        "reward": _ends(_column(main, "reward")),
        "accuracy": _ends(_column(main, "rewards/accuracy/mean")),
        "rollout_tokens_per_second": {"speculative": _tokens_per_second(main, scale["rows"])},
        "seconds": {phase: round(sum(_column(main, f"time/{phase}")), 1) for phase in PHASES}
        | {"warmup": round(histories["cotrained"]["warmup_s"], 1)},
        "vocab_coverage": _ends(_column(main, "draft/vocab_coverage")),
    }
    summary["expected_accept_length"] = {name: _ends(_expected(main, name)) for name in ("cotrained", "frozen")}
    summary["over_frozen"] = dict(zip(("ratio", "low", "high"), _over_frozen(main), strict=True))
    if "plain" in histories:
        plain = histories["plain"]["steps"]
        summary["rollout_tokens_per_second"]["plain"] = _tokens_per_second(plain, scale["rows"])
        summary["reward"]["plain"] = _ends(_column(plain, "reward"))["last"]
    return summary


def print_table(summary: dict[str, Any], console: Console) -> None:
    table = Table(title="SmolLM2-135M-Instruct, GRPO with a co-trained EAGLE-3 draft")
    for title in ("", f"first {_ENDS} steps", f"last {_ENDS} steps"):
        table.add_column(title, justify="left" if not title else "right")
    for name in ("reward", "accuracy", "accept_length"):
        table.add_row(name.replace("_", " "), f"{summary[name]['first']:.2f}", f"{summary[name]['last']:.2f}")
    for name, ends in summary["expected_accept_length"].items():
        table.add_row(f"expected of the {name} draft", f"{ends['first']:.2f}", f"{ends['last']:.2f}")
    for position, ends in summary["accept_rate"].items():
        table.add_row(f"accepted at {position}", f"{ends['first']:.0%}", f"{ends['last']:.0%}")
    console.print(table)
    seconds = summary["seconds"]
    phases = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
    console.print("Seconds: " + phases, highlight=False, soft_wrap=True)
    for line in verdicts(summary):
        console.print(line, highlight=False, soft_wrap=True)


def verdicts(summary: dict[str, Any]) -> list[str]:
    """Who won, in words."""
    speeds, over = summary["rollout_tokens_per_second"], summary["over_frozen"]
    won = "won" if over["low"] > 1 else "lost" if over["high"] < 1 else "drew"
    lines = [
        f"Co-training {won} against the same draft frozen after its warm start: {over['ratio']:.3f} times its accept length "
        f"in the last {_ENDS} steps (95 % interval over rows: {over['low']:.3f} to {over['high']:.3f}), on the same completions."
    ]
    if "plain" in speeds:
        ratio = speeds["speculative"] / speeds["plain"]
        won = "won" if ratio > 1 else "lost"
        lines.append(
            f"Speculation {won} against plain rollouts: {speeds['speculative']:.0f} against {speeds['plain']:.0f} tokens a "
            f"second ({ratio:.2f}x) at {summary['scale']['rows']} sequences at once."
        )
    return lines


def draw(folders: dict[str, Path], file: Path) -> None:
    """Accept length and reward by step, acceptance by position, and where the seconds of a step went."""
    require("matplotlib", extra="demo")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    histories = {name: load_history(folder)["steps"] for name, folder in folders.items()}
    main = histories["cotrained"]
    colors = {"cotrained": "#2563eb", "plain": "#111827"}
    figure, axes = plt.subplots(1, 4, figsize=(17, 3.8), constrained_layout=True)
    for name, steps in histories.items():
        numbers = range(1, len(steps) + 1)
        if "draft/accept_length" in steps[0]:
            axes[0].plot(numbers, _column(steps, "draft/accept_length"), color=colors[name], label=name)
        axes[1].plot(numbers, _column(steps, "reward"), color=colors[name], label=name)
    for name, color in (("cotrained", "#93c5fd"), ("frozen", "#9ca3af")):
        axes[0].plot(range(1, len(main) + 1), _expected(main, name), color=color, ls="--", label=f"{name}, expected")
    axes[0].set(title="Accept length in rollouts", xlabel="step", ylabel="tokens a verification")
    axes[1].set(title="Mean reward", xlabel="step")
    for axis in axes[:2]:
        axis.legend(frameon=False)
    positions = [name for name in sorted(main[-1]) if name.startswith("draft/accept_rate/pos_")]
    for shift, end, shade in ((-0.2, "first", "#93c5fd"), (0.2, "last", "#2563eb")):
        rates = [_ends(_column(main, name))[end] for name in positions]
        axes[2].bar([i + 1 + shift for i in range(len(rates))], rates, 0.4, color=shade, label=f"{end} {_ENDS} steps")
    axes[2].set(
        title="Drafted tokens accepted",
        xlabel="position in the draft",
        ylim=(0, 1),
        xticks=range(1, len(positions) + 1),
    )
    axes[2].legend(frameon=False)
    bottom = [0.0] * len(main)
    shades = ("#2563eb", "#a3a3a3", "#16a34a", "#93c5fd", "#111827", "#f97316", "#e5e7eb")
    for phase, shade in zip(PHASES, shades, strict=True):
        heights = [step[f"time/{phase}"] for step in main]
        axes[3].bar(range(1, len(main) + 1), heights, bottom=bottom, color=shade, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes[3].set(title="Seconds a step", xlabel="step")
    axes[3].legend(
        frameon=False, ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), columnspacing=0.8
    )
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
