"""What a draft costs beside a pipeline: taps alone, and each place where the draft may run.

    python benchmarks/pipeline.py --check                       # P = 2 and 4
    python benchmarks/pipeline.py --quick                       # shows that it runs, in few rounds
    python benchmarks/pipeline.py --tables docs/pipeline.md     # and writes the simulator's table and drawing

Ranks are processes joined by gloo. Two cores can't compute for four ranks at once, so **sleeping stages stand for
accelerators**: a tiny model computes for real, and each forward, backward and draft then sleeps for as long as a device
would be busy. Schedule, transfers, tap transports and every wait are real. All variants take turns step by step in one run,
so that a slow minute of the machine hits all of them alike; a second series without taps (A/A) shows the noise.

- ratio: step time over that of the same round without taps; median, with a 95 % bootstrap interval.
- taps: published in the schedule and collected after it, as by the default placement; the draft itself does nothing.
- `spread` is the default: more microbatches to ranks that are idle first (`simulator.nominal_sinks`). `spread, m mod P` deals
  them out in turn.
- placements: the step includes the draft's own optimizer step (sum of gradients, AdamW, weights borrowed anew).
- simulated: `parallel.simulator` with the busy times measured in these runs, and the time of a transfer that makes it agree
  with the step without taps; the placements are what it predicts.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

RUN_TIMEOUT_S = 600
SIMULATOR_TOLERANCE = 0.10
SPREAD_AIM = 1 / 3
ALONE, AGAIN = "no taps", "no taps (A/A)"
TAPS = ("taps, shm", "taps, gloo", "taps, relay")
IN_TURN = "spread, m mod P"
PLACED = ("last_inside", "last_deferred", "spread", IN_TURN)
VARIANTS = (ALONE, AGAIN, *TAPS, *PLACED)


@dataclass(frozen=True)
class Scale:
    """Size of one run; made by [`parse`], read by ranks.

    Args:
        forward_s, backward_s (`float`): seconds that a stage sleeps for a microbatch, beside its real computation.
        draft_share (`float`): time of the draft's microbatch over that of a stage's forward and backward.
        rounds (`int`): measured rounds; in each, every variant makes one step.
        warmup (`int`): unmeasured rounds before.
    """

    forward_s: float = 0.020
    backward_s: float = 0.040
    draft_share: float = 0.4
    num_microbatches: int = 8
    rounds: int = 14
    warmup: int = 1
    ranks: tuple[int, ...] = (2, 4)

    @property
    def draft_s(self) -> float:
        return self.draft_share * (self.forward_s + self.backward_s)


QUICK = {"forward_s": 0.010, "backward_s": 0.020, "rounds": 3}


@dataclass(frozen=True)
class Interval:
    """A median and the 95 % bootstrap interval around it; made by [`bootstrap`]."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(values: list[float], *, num_draws: int = 2000, seed: int = 0) -> Interval:
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(num_draws))
    return Interval(statistics.median(values), medians[int(0.025 * num_draws)], medians[int(0.975 * num_draws)])


def placement_of(variant: str) -> str:
    return "spread" if variant == IN_TURN else variant


def is_within_noise(found: Interval, control: Interval) -> bool:
    """Whether two intervals overlap: whether the two could be one and the same."""
    return found.low <= control.high and control.low <= found.high


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds of shorter stages")
    parser.add_argument("--check", action="store_true", help="print a line per aim; exit 1 where one is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument(
        "--tables", type=Path, metavar="FILE", help="write the simulator's table (Markdown) and drawing"
    )
    parser.add_argument("--draft-share", type=float, default=0.4, help="draft's time over a stage's (0.05 to 0.4)")
    args = parser.parse_args(argv)
    if not 0 < args.draft_share <= 1:
        parser.error("--draft-share must lie in (0, 1].")
    args.scale = Scale(draft_share=args.draft_share, **(QUICK if args.quick else {}))
    return args


# One rank


class Rank:
    """A pipeline's rank with sleeping stages, and a draft for each variant.

    Args:
        rank, num_ranks (`int`): of the pipeline.
        scale ([`Scale`]): sizes and times.
    """

    def __init__(self, rank: int, num_ranks: int, scale: Scale):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from hf_codraft.parallel.pipeline import PolicyPipeline
        from hf_codraft.parallel.stages import build_stage, plan_stages

        self.rank, self.num_ranks, self.scale = rank, num_ranks, scale
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        stage = build_stage(self.model, plan_stages(4, num_ranks), rank)
        self.pipeline = PolicyPipeline([stage], scale.num_microbatches)
        self.batch = {"input_ids": torch.randint(3, 64, (scale.num_microbatches, 32))}
        self.seconds: dict[str, list[float]] = {"F": [], "B": [], "D": []}
        self._time_stage()
        self.drafts = {name: self._draft(name) for name in VARIANTS if name not in (ALONE, AGAIN)}

    def _time_stage(self) -> None:
        """Lets every forward and backward of this stage sleep, and notes how long they took with it."""
        from hf_codraft.parallel import schedule

        kind, scale, seconds = schedule._Stage, self.scale, self.seconds
        forward, backward = kind.forward_one_chunk, kind.backward_one_chunk

        def slow_forward(stage, *args, **kwargs):
            start = time.perf_counter()
            output = forward(stage, *args, **kwargs)
            return output, start

        def timed_backward(stage, *args, **kwargs):
            start = time.perf_counter()
            result = backward(stage, *args, **kwargs)
            time.sleep(scale.backward_s)
            seconds["B"].append(time.perf_counter() - start)
            return result

        def sleep(module, args, output):
            time.sleep(scale.forward_s)

        def timed_forward(stage, *args, **kwargs):
            num_drafts = len(seconds["D"])
            output, start = slow_forward(stage, *args, **kwargs)
            inside = sum(seconds["D"][num_drafts:])  # a draft inside the schedule runs inside this call
            seconds["F"].append(time.perf_counter() - start - inside)
            return output

        kind.forward_one_chunk, kind.backward_one_chunk = timed_forward, timed_backward
        self.pipeline.stages[0].register_forward_hook(sleep)

    def _draft(self, variant: str):
        from types import SimpleNamespace

        from hf_codraft.drafts.learner import DraftLearner
        from hf_codraft.hub.resolve import fresh_eagle3
        from hf_codraft.parallel.placement import PipelineDraft
        from hf_codraft.policy.anatomy import PolicyAnatomy

        taps, in_turn = (0, 2, 4), [m % self.num_ranks for m in range(self.scale.num_microbatches)]
        options = SimpleNamespace(draft_vocab_size=None, draft_tap_layers=list(taps), draft_warmup_rollouts=1)
        learner = DraftLearner(fresh_eagle3(PolicyAnatomy.of(self.model), options), num_passes=1)
        accumulate = learner.accumulate

        def timed(batch, policy) -> None:
            start = time.perf_counter()
            accumulate(batch, policy)
            time.sleep(max(self.scale.draft_s - (time.perf_counter() - start), 0.0))
            self.seconds["D"].append(time.perf_counter() - start)

        learner.accumulate = timed if variant in PLACED else lambda batch, policy: None
        return PipelineDraft(
            self.pipeline, learner, tap_ids=taps,
            placement=placement_of(variant) if variant in PLACED else "last_deferred",
            sink_of_microbatch=in_turn if variant == IN_TURN else None,
            transport=variant.removeprefix("taps, ") if variant in TAPS else "shm",
        )  # fmt: skip

    def step(self, variant: str) -> dict:
        """One step of a variant: seconds, this rank's busy time, and what passed its end of the channel."""
        from torch import distributed as dist

        from hf_codraft.parallel.pipeline import next_token_loss

        for each in self.seconds.values():
            each.clear()
        draft = self.drafts.get(variant)
        before = draft.channel.totals if draft is not None and draft.channel is not None else None
        dist.barrier()
        start = time.perf_counter()
        (self.pipeline if draft is None else draft).train_step(self.batch, next_token_loss)
        trained = time.perf_counter()
        if variant in PLACED:
            draft.step()
        end = time.perf_counter()
        report = {"variant": variant, "step_s": end - start, "draft_step_s": end - trained}
        if variant in PLACED:
            report["sinks"] = draft.sinks
        report |= {f"{kind}_s": list(each) for kind, each in self.seconds.items()}
        if before is not None:
            after = draft.channel.totals
            names = ("bytes_published", "publish_s", "collect_s")
            report |= {name: getattr(after, name) - getattr(before, name) for name in names}
        return report


def rank_main(rank: int, num_ranks: int, scale: Scale, folder: str) -> None:
    import torch
    from torch import distributed as dist
    from tqdm import tqdm

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=120), num_ranks, rank)
    own, reports = Rank(rank, num_ranks, scale), []
    rounds = tqdm(range(scale.warmup + scale.rounds), desc=f"{num_ranks} ranks", unit="round", disable=rank > 0)
    for number in rounds:
        # Rotated, so that no variant always follows the same one.
        shift = number % len(VARIANTS)
        found = [own.step(variant) for variant in VARIANTS[shift:] + VARIANTS[:shift]]
        reports += [{"round": number - scale.warmup, **each} for each in found] if number >= scale.warmup else []
    for draft in own.drafts.values():
        draft.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


# All ranks


def run_pipeline(num_ranks: int, scale: Scale) -> list[list[dict]]:
    """The reports of all ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank_main, args=(r, num_ranks, scale, folder)) for r in range(num_ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + RUN_TIMEOUT_S
        try:
            for process in processes:
                process.join(max(deadline - time.monotonic(), 0.0))
            failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
            if failed:
                raise RuntimeError(f"ranks {failed} of {num_ranks} failed or took longer than {RUN_TIMEOUT_S} s.")
        finally:
            for process in processes:
                process.kill()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def order_of(num_ranks: int, scale: Scale):
    from hf_codraft.parallel.schedule import schedule_order

    return schedule_order("1F1B", num_ranks, num_ranks, scale.num_microbatches)


def fit(function: Callable[[float], float], value: float, *, largest: float = 0.1) -> float:
    """The argument in 0..`largest` at which a rising function reaches `value`."""
    low, high = 0.0, largest
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > value else (middle, high)
    return low


def summarize(num_ranks: int, scale: Scale, ranks: list[list[dict]]) -> list[dict]:
    """One row a variant."""
    from hf_codraft.parallel.simulator import StepCosts, simulate

    def of(variant: str) -> list[list[dict]]:
        return [[each for each in rank if each["variant"] == variant] for rank in ranks]

    def step_s(variant: str) -> list[float]:
        """By round: until the last rank was done."""
        return [max(rank[i]["step_s"] for rank in of(variant)) for i in range(scale.rounds)]

    def median_of(variant: str, kind: str, rank: int) -> float:
        return statistics.median(x for each in of(variant)[rank] for x in each[f"{kind}_s"])

    alone, rows = step_s(ALONE), []
    forward_s, backward_s = ([median_of(ALONE, kind, rank) for rank in range(num_ranks)] for kind in "FB")
    draft_s = median_of("last_deferred", "D", num_ranks - 1)
    order = order_of(num_ranks, scale)

    def simulated_s(placement: str, transfer_s: float, sinks: list[int] | None = None) -> float:
        costs = StepCosts(forward_s, backward_s, draft_s, transfer_s)
        return simulate(order, costs, placement=placement, sink_of_microbatch=sinks).step_s

    transfer_s = fit(lambda seconds: simulated_s("none", seconds), statistics.median(alone))
    for variant in VARIANTS:
        reports, seconds = of(variant), step_s(variant)
        median = statistics.median(seconds)
        draft_step_s = statistics.median(max(rank[i]["draft_step_s"] for rank in reports) for i in range(scale.rounds))
        busy = [statistics.median(sum(sum(each[f"{k}_s"]) for k in "FBD") for each in rank) for rank in reports]
        row = {
            "num_ranks": num_ranks,
            "variant": variant,
            "step_s": median,
            "ratio": asdict(bootstrap([a / b for a, b in zip(seconds, alone)])),
            "idle_s": [median - each for each in busy],
            "draft_step_s": draft_step_s if variant in PLACED else 0.0,
        }
        for name in ("bytes_published", "publish_s", "collect_s"):
            row[name] = sum(statistics.median(each.get(name, 0) for each in rank) for rank in reports)
        if variant in PLACED:
            # Ranks wait for one another in the draft's step, so the time of the last to enter it counts.
            shortest = [min(rank[i]["draft_step_s"] for rank in reports) for i in range(scale.rounds)]
            row["sinks"] = reports[0][0]["sinks"]
            simulated = simulated_s(placement_of(variant), transfer_s, row["sinks"])
            row["simulated_s"] = simulated + statistics.median(shortest)
        rows.append(row)
    return rows


def check_aims(rows: list[dict]) -> list[dict]:
    """Every aim with its figure."""
    aims = []
    found = {(row["num_ranks"], row["variant"]): row for row in rows}
    for num_ranks in sorted({row["num_ranks"] for row in rows}):
        control = Interval(**found[num_ranks, AGAIN]["ratio"])
        for variant in TAPS:
            ratio = Interval(**found[num_ranks, variant]["ratio"])
            is_met = is_within_noise(ratio, control)
            aims.append(
                {"aim": f"P = {num_ranks}: {variant} within A/A {control}", "figure": str(ratio), "is_met": is_met}
            )
        if num_ranks == 4:
            inside, spread, in_turn = (
                found[4, name]["ratio"]["median"] - 1 for name in ("last_inside", "spread", IN_TURN)
            )
            figure = f"{spread / inside:.3f} (m mod P: {in_turn / inside:.3f})"
            aim = "P = 4: overhead of spread, as it is by default, over last_inside, at most 1/3"
            aims.append({"aim": aim, "figure": figure, "is_met": spread <= SPREAD_AIM * inside})
        errors = {
            name: found[num_ranks, name]["simulated_s"] / found[num_ranks, name]["step_s"] - 1 for name in PLACED
        }
        worst = max(errors, key=lambda name: abs(errors[name]))
        aims.append(
            {
                "aim": f"P = {num_ranks}: simulated step within {SIMULATOR_TOLERANCE:.0%} of the measured one",
                "figure": f"{errors[worst]:+.1%} ({worst})",
                "is_met": abs(errors[worst]) <= SIMULATOR_TOLERANCE,
            }
        )
    return aims


def print_rows(rows: list[dict], scale: Scale) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"1F1B, {scale.num_microbatches} microbatches; sleeping stages of {1e3 * scale.forward_s:.0f} + "
        f"{1e3 * scale.backward_s:.0f} ms stand for accelerators, a draft of {1e3 * scale.draft_s:.0f} ms; "
        f"{scale.rounds} rounds"
    )
    for name in (
        "P",
        "variant",
        "step, ms",
        "ratio",
        "simulated, ms",
        "idle by stage, ms",
        "kB",
        "publish, ms",
        "collect, ms",
    ):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for row in rows:
        simulated = f"{1e3 * row['simulated_s']:.0f}" if "simulated_s" in row else ""
        idle = " ".join(f"{1e3 * each:.0f}" for each in row["idle_s"])
        cells = [str(row["num_ranks"]), row["variant"], f"{1e3 * row['step_s']:.0f}", str(Interval(**row["ratio"]))]
        cells += [simulated, idle, f"{row['bytes_published'] / 1e3:.0f}"]
        table.add_row(*cells, *(f"{1e3 * row[name]:.1f}" for name in ("publish_s", "collect_s")))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def write_tables(file: Path) -> None:
    """The simulator's table, and its drawing of two placements beside it."""
    from hf_codraft.parallel.schedule import schedule_order
    from hf_codraft.parallel.simulator import PLACEMENTS, StepCosts, draw_timeline, overhead_table, simulate

    places = [name for name in PLACEMENTS if name != "none"]
    lines = [
        "# What a draft adds to a pipeline's step (simulated)",
        "",
        "Simulated, not measured: `hf_codraft.parallel.simulator` for equal stages whose backward takes twice their forward, "
        "4 microbatches a rank, free transfers. `benchmarks/pipeline.py` compares it with runs of 2 and 4 ranks, and wrote "
        "this file (`--tables`). The draft's cost is its time on a microbatch over a rank's forward and backward of it. "
        "`spread` gives microbatch m to rank m mod P, `spread_balanced` to ranks by these very costs; by default, where no costs "
        "are known, `PipelineDraft` does the latter for a draft of half a rank's work.",
        "",
        "| schedule | P | draft | " + " | ".join(places) + " |",
        "|---|---|---|" + "---|" * len(places),
    ]
    overheads = {(r.schedule, r.num_ranks, r.draft_share, r.placement): r.overhead for r in overhead_table()}
    for schedule, num_ranks, share in dict.fromkeys(key[:3] for key in overheads):
        cells = " | ".join(f"{overheads[schedule, num_ranks, share, place]:.1%}" for place in places)
        lines.append(f"| {schedule} | {num_ranks} | {share:.0%} | {cells} |")
    picture = file.with_name("pipeline_timeline.png")
    draw_timeline(
        simulate(
            schedule_order("1F1B", 4, 4, 8), StepCosts([1.0] * 4, [2.0] * 4, draft_s=1.2), placement="spread_balanced"
        ),
        str(picture),
    )
    lines += ["", f"![A step of four ranks, spread with balanced sinks (simulated)]({picture.name})", ""]
    file.write_text("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    scale, rows = args.scale, []
    for num_ranks in scale.ranks:
        rows += summarize(num_ranks, scale, run_pipeline(num_ranks, scale))
    print_rows(rows, scale)
    aims = check_aims(rows)
    if args.check:
        for aim in aims:
            print(f"{'met   ' if aim['is_met'] else 'MISSED'} {aim['aim']}: {aim['figure']}")
        if args.quick:
            print("(Few rounds: the intervals say little.)")
    if args.tables:
        write_tables(args.tables)
    if args.json:
        machine = {"kind": platform.machine(), "cpus": os.cpu_count()}
        report = {"scale": asdict(scale), "machine": machine, "rows": rows, "aims": aims}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and not all(aim["is_met"] for aim in aims) else 0


if __name__ == "__main__":
    sys.exit(main())
