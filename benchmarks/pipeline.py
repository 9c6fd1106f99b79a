"""What a draft costs beside a pipeline: taps alone, and each place where the draft may run.

    python benchmarks/pipeline.py --check                       # 1F1B on 2 and 4 ranks, Interleaved1F1B on 4
    python benchmarks/pipeline.py --quick                       # shows that it runs, in few rounds
    python benchmarks/pipeline.py --tables docs/pipeline.md     # writes the simulator's table and drawing; measures nothing

Ranks are processes joined by gloo. Two cores can't compute for four ranks at once, so **sleeping stages stand for
accelerators**: a tiny model computes for real, and each forward, backward and draft then sleeps for as long as a device
would be busy. Schedule, transfers, tap transports and every wait are real. All variants take turns step by step in one run,
so that a slow minute of the machine hits all of them alike; a second series without taps (A/A) shows the noise.

- ratio: step time over that of the same round without taps; median, with a 95 % bootstrap interval.
- taps: a transport alone, without a draft to train. Placement `last_deferred`: the last rank borrows embeddings before the
  schedule, the stages with taps publish in it, and the last rank collects and packs the taps after it.
- `spread` is the default: more microbatches to ranks that are idle first (`simulator.nominal_sinks`). `spread, m mod P` deals
  them out in turn.
- placements: taps through shared memory; the step includes the draft's own optimizer step (sum of gradients, AdamW).
- taps, kB: what all ranks send. weights + gradients, kB: embeddings and head, over all ranks that receive them; the draft's
  flat gradient, over all ranks that sum it up (a ring of P sends 2 (P - 1) / P times as much). All of one step.
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
HIDDEN_SIZE, NUM_TOKENS = 256, 128  # of a microbatch: taps of 128 KiB
SIMULATOR_TOLERANCE = 0.10
SPREAD_AIM = 1 / 3
ALONE, AGAIN = "no taps", "no taps (A/A)"
TAPS = ("taps, shm", "taps, gloo", "taps, relay")
IN_TURN = "spread, m mod P"
PLACED = ("last_inside", "last_deferred", "spread", IN_TURN)
VARIANTS = (ALONE, AGAIN, *TAPS, *PLACED)


@dataclass(frozen=True)
class Layout:
    """The pipeline of one run."""

    schedule: str
    num_ranks: int
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @property
    def num_layers(self) -> int:
        return 4 * self.stages_per_rank

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Of the embeddings, of an early stage and of the last one."""
        return 0, 2, self.num_layers


@dataclass(frozen=True)
class Scale:
    """Size of a run; made by [`parse`], read by ranks.

    Args:
        forward_s, backward_s (`float`): seconds that a rank sleeps for a microbatch, all its stages together, beside its real
            computation.
        draft_share (`float`): time of the draft's microbatch over that of a rank's forward and backward.
        rounds (`int`): measured rounds; in each, every variant makes one step.
        warmup (`int`): unmeasured rounds before.
    """

    forward_s: float = 0.020
    backward_s: float = 0.040
    draft_share: float = 0.4
    num_microbatches: int = 8
    rounds: int = 12
    warmup: int = 1
    layouts: tuple[Layout, ...] = (Layout("1F1B", 2), Layout("1F1B", 4), Layout("Interleaved1F1B", 4, 2))

    @property
    def draft_s(self) -> float:
        return self.draft_share * (self.forward_s + self.backward_s)


QUICK = {
    "forward_s": 0.010,
    "backward_s": 0.020,
    "rounds": 2,
    "layouts": (Layout("1F1B", 2), Layout("Interleaved1F1B", 4, 2)),
}


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
        "--tables", type=Path, metavar="FILE", help="only write the simulator's table (Markdown) and drawing"
    )
    parser.add_argument("--draft-share", type=float, default=0.4, help="draft's time over a rank's (0.05 to 0.4)")
    args = parser.parse_args(argv)
    if not 0 < args.draft_share <= 1:
        parser.error("--draft-share must lie in (0, 1].")
    args.scale = Scale(draft_share=args.draft_share, **(QUICK if args.quick else {}))
    return args


# One rank


class Rank:
    """A pipeline's rank with sleeping stages, and a draft for each variant.

    Args:
        rank (`int`): of the pipeline.
        layout ([`Layout`]): the pipeline.
        scale ([`Scale`]): sizes and times.
    """

    def __init__(self, rank: int, layout: Layout, scale: Scale):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from hf_codraft.parallel.pipeline import PolicyPipeline
        from hf_codraft.parallel.stages import build_stage, plan_stages

        self.layout, self.scale = layout, scale
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=HIDDEN_SIZE, intermediate_size=64, num_hidden_layers=layout.num_layers,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=NUM_TOKENS,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        plan = plan_stages(layout.num_layers, layout.num_stages)
        stages = [build_stage(self.model, plan, s) for s in range(rank, layout.num_stages, layout.num_ranks)]
        self.pipeline = PolicyPipeline(stages, scale.num_microbatches, schedule=layout.schedule)
        self.batch = {"input_ids": torch.randint(3, 64, (scale.num_microbatches, NUM_TOKENS))}
        self.busy: list[tuple[str, int, float]] = []  # kind, stage and seconds of every action of a step
        self.num_weight_bytes = 0
        self._time_stages()
        self.drafts = {name: self._draft(name) for name in VARIANTS if name not in (ALONE, AGAIN)}

    def _time_stages(self) -> None:
        """Lets every forward and backward of this rank's stages sleep, and notes how long they took with it."""
        from hf_codraft.parallel import schedule

        kind, busy = schedule._Stage, self.busy
        forward, backward = kind.forward_one_chunk, kind.backward_one_chunk
        forward_s, backward_s = (
            s / self.layout.stages_per_rank for s in (self.scale.forward_s, self.scale.backward_s)
        )

        def timed_forward(stage, *args, **kwargs):
            start, num_before = time.perf_counter(), len(busy)
            output = forward(stage, *args, **kwargs)
            inside = sum(seconds for *_, seconds in busy[num_before:])  # of a draft that runs inside this call
            busy.append(("F", stage.stage_index, time.perf_counter() - start - inside))
            return output

        def timed_backward(stage, *args, **kwargs):
            start = time.perf_counter()
            result = backward(stage, *args, **kwargs)
            time.sleep(backward_s)
            busy.append(("B", stage.stage_index, time.perf_counter() - start))
            return result

        kind.forward_one_chunk, kind.backward_one_chunk = timed_forward, timed_backward
        for stage in self.pipeline.stages:
            stage.register_forward_hook(lambda module, args, output: time.sleep(forward_s))

    def _draft(self, variant: str):
        from types import SimpleNamespace

        from hf_codraft.drafts.learner import DraftLearner
        from hf_codraft.hub.resolve import fresh_eagle3
        from hf_codraft.parallel.placement import PipelineDraft
        from hf_codraft.policy.anatomy import PolicyAnatomy

        layout = self.layout
        in_turn = [m % layout.num_ranks for m in range(self.scale.num_microbatches)]
        options = SimpleNamespace(draft_vocab_size=None, draft_tap_layers=layout.tap_ids, draft_warmup_rollouts=1)
        learner = DraftLearner(fresh_eagle3(PolicyAnatomy.of(self.model), options), num_passes=1)
        accumulate = learner.accumulate

        def timed(batch, policy) -> None:
            start = time.perf_counter()
            accumulate(batch, policy)
            time.sleep(max(self.scale.draft_s - (time.perf_counter() - start), 0.0))
            self.busy.append(("D", layout.num_stages - 1, time.perf_counter() - start))

        learner.accumulate = timed if variant in PLACED else lambda batch, policy: None
        draft = PipelineDraft(
            self.pipeline, learner, tap_ids=layout.tap_ids,
            placement=placement_of(variant) if variant in PLACED else "last_deferred",
            sink_of_microbatch=in_turn if variant == IN_TURN else None,
            transport=variant.removeprefix("taps, ") if variant in TAPS else "shm",
        )  # fmt: skip
        carried = draft._carried

        def counted(tensor, form, source):
            borrowed = carried(tensor, form, source)
            if borrowed is not None and self.pipeline.pipeline_rank != source:
                self.num_weight_bytes += borrowed.nbytes
            return borrowed

        draft._carried = counted
        return draft

    def step(self, variant: str) -> dict:
        """One step of a variant: seconds, this rank's busy time, and what passed its end of the channel."""
        from torch import distributed as dist

        from hf_codraft.parallel.pipeline import next_token_loss

        self.busy.clear()
        self.num_weight_bytes = 0
        draft = self.drafts.get(variant)
        before = draft.channel.totals if draft is not None and draft.channel is not None else None
        dist.barrier()
        start = time.perf_counter()
        (self.pipeline if draft is None else draft).train_step(self.batch, next_token_loss)
        trained = time.perf_counter()
        if variant in PLACED:
            draft.step()
        end = time.perf_counter()
        report = {"variant": variant, "step_s": end - start, "draft_step_s": end - trained, "busy": list(self.busy)}
        report["bytes_weights"] = self.num_weight_bytes
        if variant in PLACED:
            report["sinks"] = draft.sinks
            is_summed = draft.placement == "spread"
            report["bytes_gradients"] = sum(p.nbytes for p in draft.learner.parameters) if is_summed else 0
        if before is not None:
            after = draft.channel.totals
            names = ("bytes_published", "publish_s", "collect_s")
            report |= {name: getattr(after, name) - getattr(before, name) for name in names}
        return report


def rank_main(rank: int, layout: Layout, scale: Scale, folder: str) -> None:
    import torch
    from torch import distributed as dist
    from tqdm import tqdm

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=120), layout.num_ranks, rank)
    own, reports = Rank(rank, layout, scale), []
    description = f"{layout.schedule}, {layout.num_ranks} ranks"
    rounds = tqdm(range(scale.warmup + scale.rounds), desc=description, unit="round", disable=rank > 0)
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


def run_pipeline(layout: Layout, scale: Scale) -> list[list[dict]]:
    """The reports of all ranks."""
    num_ranks = layout.num_ranks
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank_main, args=(r, layout, scale, folder)) for r in range(num_ranks)]
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


def fit(function: Callable[[float], float], value: float, *, largest: float = 0.1) -> float:
    """The argument in 0..`largest` at which a rising function reaches `value`."""
    low, high = 0.0, largest
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > value else (middle, high)
    return low


def summarize(layout: Layout, scale: Scale, ranks: list[list[dict]]) -> list[dict]:
    """One row a variant."""
    from hf_codraft.parallel.schedule import schedule_order
    from hf_codraft.parallel.simulator import StepCosts, simulate

    def of(variant: str) -> list[list[dict]]:
        return [[each for each in rank if each["variant"] == variant] for rank in ranks]

    def step_s(variant: str) -> list[float]:
        """By round: until the last rank was done."""
        return [max(rank[i]["step_s"] for rank in of(variant)) for i in range(scale.rounds)]

    def median_of(variant: str, kind: str, stage: int) -> float:
        actions = [action for rank in of(variant) for each in rank for action in each["busy"]]
        return statistics.median(seconds for *which, seconds in actions if which == [kind, stage])

    alone, rows, stages = step_s(ALONE), [], range(layout.num_stages)
    forward_s, backward_s = ([median_of(ALONE, kind, stage) for stage in stages] for kind in "FB")
    draft_s = median_of("last_deferred", "D", layout.num_stages - 1)
    order = schedule_order(layout.schedule, layout.num_ranks, layout.num_stages, scale.num_microbatches)

    def simulated_s(placement: str, transfer_s: float, sinks: list[int] | None = None) -> float:
        costs = StepCosts(forward_s, backward_s, draft_s, transfer_s)
        return simulate(order, costs, placement=placement, sink_of_microbatch=sinks).step_s

    transfer_s = fit(lambda seconds: simulated_s("none", seconds), statistics.median(alone))
    for variant in VARIANTS:
        reports, seconds = of(variant), step_s(variant)
        median = statistics.median(seconds)
        draft_step_s = statistics.median(max(rank[i]["draft_step_s"] for rank in reports) for i in range(scale.rounds))
        busy = [statistics.median(sum(s for *_, s in each["busy"]) for each in rank) for rank in reports]
        row = {
            "schedule": layout.schedule,
            "num_ranks": layout.num_ranks,
            "variant": variant,
            "step_s": median,
            "ratio": asdict(bootstrap([a / b for a, b in zip(seconds, alone)])),
            "idle_s": [median - each for each in busy],
            "draft_step_s": draft_step_s if variant in PLACED else 0.0,
            "fitted_transfer_s": transfer_s,
        }
        for name in ("bytes_published", "bytes_weights", "bytes_gradients", "publish_s", "collect_s"):
            row[name] = sum(statistics.median(each.get(name, 0) for each in rank) for rank in reports)
        if variant in PLACED:
            # Ranks wait for one another in the draft's step, so the time of the last to enter it counts.
            shortest = [min(rank[i]["draft_step_s"] for rank in reports) for i in range(scale.rounds)]
            row["sinks"] = reports[0][0]["sinks"]
            simulated = simulated_s(placement_of(variant), transfer_s, row["sinks"])
            row["simulated_s"] = simulated + statistics.median(shortest)
        rows.append(row)
    return rows


def spread_aim(found: dict[str, dict]) -> dict:
    """The aim of the default placement, with that of m mod P beside it."""
    inside, spread, in_turn = (found[name]["ratio"]["median"] - 1 for name in ("last_inside", "spread", IN_TURN))
    side = "above" if in_turn > SPREAD_AIM * inside else "within"
    return {
        "aim": "overhead of spread, as it is by default, over last_inside, at most 1/3",
        "figure": f"{spread / inside:.3f} (m mod P: {in_turn / inside:.3f}, {side} 1/3)",
        "is_met": spread <= SPREAD_AIM * inside,
    }


def check_aims(rows: list[dict]) -> list[dict]:
    """Every aim with its figure."""
    aims = []
    for schedule, num_ranks in dict.fromkeys((row["schedule"], row["num_ranks"]) for row in rows):
        found = {row["variant"]: row for row in rows if (row["schedule"], row["num_ranks"]) == (schedule, num_ranks)}
        control, own = Interval(**found[AGAIN]["ratio"]), []
        for variant in TAPS:
            ratio = Interval(**found[variant]["ratio"])
            is_met = is_within_noise(ratio, control)
            own.append({"aim": f"{variant} within A/A {control}", "figure": str(ratio), "is_met": is_met})
        if num_ranks == 4:
            own.append(spread_aim(found))
        errors = {name: found[name]["simulated_s"] / found[name]["step_s"] - 1 for name in PLACED}
        worst = max(errors, key=lambda name: abs(errors[name]))
        own.append(
            {
                "aim": f"simulated step within {SIMULATOR_TOLERANCE:.0%} of the measured one",
                "figure": f"{errors[worst]:+.1%} ({worst})",
                "is_met": abs(errors[worst]) <= SIMULATOR_TOLERANCE,
            }
        )
        aims += [each | {"aim": f"{schedule}, P = {num_ranks}: {each['aim']}"} for each in own]
    return aims


def print_rows(rows: list[dict], scale: Scale) -> None:
    """The table of one run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{rows[0]['schedule']}, {rows[0]['num_ranks']} ranks, {scale.num_microbatches} microbatches; stages that sleep "
        f"{1e3 * scale.forward_s:.0f} + {1e3 * scale.backward_s:.0f} ms a rank stand for accelerators, a draft of "
        f"{1e3 * scale.draft_s:.0f} ms; {scale.rounds} rounds"
    )
    for name in (
        "variant",
        "step, ms",
        "ratio",
        "simulated, ms",
        "idle by rank, ms",
        "taps, kB",
        "weights + gradients, kB",
        "publish, ms",
        "collect, ms",
    ):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for row in rows:
        simulated = f"{1e3 * row['simulated_s']:.0f}" if "simulated_s" in row else ""
        idle = " ".join(f"{1e3 * each:.0f}" for each in row["idle_s"])
        cells = [row["variant"], f"{1e3 * row['step_s']:.0f}", str(Interval(**row["ratio"])), simulated, idle]
        cells += [f"{row['bytes_published'] / 1e3:.0f}"]
        cells += [" + ".join(f"{row[name] / 1e3:.0f}" for name in ("bytes_weights", "bytes_gradients"))]
        table.add_row(*cells, *(f"{1e3 * row[name]:.1f}" for name in ("publish_s", "collect_s")))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def write_tables(file: Path) -> None:
    """The simulator's table, and its drawing of a step beside it."""
    from hf_codraft.parallel import simulator
    from hf_codraft.parallel.schedule import schedule_order

    columns = {
        "none": "no draft", "last_inside": "last_inside", "last_deferred": "last_deferred", "spread": IN_TURN,
        "spread_balanced": "spread, balanced",
    }  # fmt: skip
    lines = [
        "# What a draft adds to a pipeline's step (simulated)",
        "",
        "Simulated, not measured: `hf_codraft.parallel.simulator` for equal stages whose backward takes twice their forward, "
        "4 microbatches a rank (two stages a rank where they interleave), free transfers. `benchmarks/pipeline.py` compares "
        "the simulator with runs of 2 and 4 ranks, and wrote this file (`--tables`).",
        "",
        "A row's draft cost is its time on a microbatch over a rank's forward and backward of it. A cell says what the draft "
        "adds to the step, and for what share of their time the ranks then compute nothing.",
        "",
        f"`{IN_TURN}` gives microbatch m to rank m mod P. `spread, balanced` gives more to the ranks that are idle first, "
        "knowing the row's costs. `PipelineDraft` by default (placement `spread` without `sink_of_microbatch`) balances too, "
        f"but knows no costs: it supposes a draft of {simulator.NOMINAL_DRAFT_SHARE:.0%} of a rank's work, so what it adds lies "
        "between these two columns.",
        "",
        "| schedule | P | draft | " + " | ".join(columns.values()) + " |",
        "|---|---|---|" + "---|" * len(columns),
    ]
    rows = {
        (r.schedule, r.num_ranks, r.draft_share, r.placement): r
        for r in simulator.overhead_table(placements=tuple(columns))
    }
    for schedule, num_ranks, share in dict.fromkeys(key[:3] for key in rows):
        found = [rows[schedule, num_ranks, share, place] for place in columns]
        cells = [f"{'' if r.placement == 'none' else f'{r.overhead:.1%} '}(idle {r.idle_share:.0%})" for r in found]
        lines.append(f"| {schedule} | {num_ranks} | {share:.0%} | {' | '.join(cells)} |")
    picture = file.with_name("pipeline_timeline.png")
    costs = simulator.StepCosts([1.0] * 4, [2.0] * 4, draft_s=1.2)
    step = simulator.simulate(schedule_order("1F1B", 4, 4, 8), costs, placement="spread_balanced")
    simulator.draw_timeline(step, str(picture))
    lines += ["", f"![A step of four ranks, spread with balanced sinks (simulated)]({picture.name})", ""]
    file.write_text("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.tables:
        write_tables(args.tables)
        return 0
    scale, rows = args.scale, []
    for layout in scale.layouts:
        found = summarize(layout, scale, run_pipeline(layout, scale))
        print_rows(found, scale)
        rows += found
    aims = check_aims(rows)
    if args.check:
        for aim in aims:
            print(f"{'met   ' if aim['is_met'] else 'MISSED'} {aim['aim']}: {aim['figure']}")
        if args.quick:
            print("(Few rounds: the intervals say little.)")
    if args.json:
        machine = {"kind": platform.machine(), "cpus": os.cpu_count()}
        report = {"scale": asdict(scale), "machine": machine, "rows": rows, "aims": aims}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and not all(aim["is_met"] for aim in aims) else 0


if __name__ == "__main__":
    sys.exit(main())
