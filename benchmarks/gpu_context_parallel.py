"""Sharded attention on one GPU: time, memory and TFLOP/s of each scheme, with ranks emulated in one process.

    python benchmarks/gpu_context_parallel.py --json gpu.json      # 64K and 256K tokens, bf16, under 8 minutes
    python benchmarks/gpu_context_parallel.py --quick              # the same steps on small rows, on a CPU as well

**Has not run on a GPU.** Its steps are tested on the CPU.

The ranks of a row are threads that share the GPU (`run_local_ranks`), so a time is the sum over ranks of the kernels and
of the copies that stand for messages: it compares the work of schemes and says nothing about a network. D passes of
attention with branch keys (EAGLE-3's training-time test) run forward and backward:

- `one rank`: the row on one rank, torch's flash attention a block: what sharding costs more is against this;
- `ring`: whole shards circulate in every pass (arXiv 2609.07108; zigzag plan);
- `kept`: the trunk is exchanged once (zigzag plan, best for one long row);
- `tiled`: kept, and forward and backward of one tile of positions at a time;
- `block keys`, `block queries`: block drafts on evenly spaced anchors, one pass.

TFLOP/s count visible pairs alone: 4 * heads * head_dim a pair forward, 10 in the backward (five products, of which the
scores are computed again). Memory is the peak of torch's allocator over all ranks together; "-" on a CPU.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hf_codraft.attention.block_draft import DraftBlocks, block_attention
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.plans import zigzag_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import Transport, run_local_ranks
from hf_codraft.attention.trunk import Trunk

SCHEMES = ("one rank", "ring", "kept", "tiled", "block keys", "block queries")


@dataclass(frozen=True)
class Scale:
    """Size of one run; made by [`parse`].

    Args:
        lengths (`tuple[int, ...]`): tokens of the row, one segment.
        num_heads, num_kv_heads, head_dim (`int`): of the draft's layer.
        world (`int`): emulated ranks.
        num_passes (`int`): passes of the training-time test.
        tile_size (`int`): queries of a tile.
        num_anchors, num_slots (`int`): of the block drafts.
        repeats (`int`): measured steps after one unmeasured; their median is shown.
        limit_s (`float`): no further measurement starts after so many seconds.
    """

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    world: int
    num_passes: int
    tile_size: int
    num_anchors: int
    num_slots: int
    repeats: int
    limit_s: float


FULL = Scale((65536, 262144), 32, 8, 128, 8, 3, 8192, 512, 16, 2, 420.0)
QUICK = Scale((96, 160), 6, 2, 16, 4, 2, 16, 5, 4, 1, 60.0)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small rows, in seconds")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--check", action="store_true", help="print a line per aim; exit 1 where one is missed")
    args = parser.parse_args(argv)
    args.scale = QUICK if args.quick else FULL
    return args


def draw(seed: int, *shape: int, device: torch.device) -> torch.Tensor:
    """The same values whatever the scheme; a generator of its own, since threads share torch's."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def leaves(scale: Scale, shard: Shard, device: torch.device) -> dict[str, list[torch.Tensor]]:
    """This rank's queries of every pass, trunk keys and values, and branch keys and values."""
    num_tokens, rank = shard.num_tokens, shard.cp_rank

    def part(kind: int, heads: int) -> torch.Tensor:
        return draw(100 * rank + kind, num_tokens, heads, scale.head_dim, device=device).requires_grad_()

    return {
        "q": [part(d, scale.num_heads) for d in range(scale.num_passes)],
        "trunk": [part(20 + n, scale.num_kv_heads) for n in range(2)],
        "branch": [part(30 + n, scale.num_kv_heads) for n in range(2 * (scale.num_passes - 1))],
    }


def ttt_step(scale: Scale, scheme: str, shard: Shard, device: torch.device) -> None:
    """All passes of one rank, forward and backward."""
    tensors = leaves(scale, shard, device)
    num_branch, factor = scale.num_passes - 1, scale.head_dim**-0.5
    branch_k, branch_v = tensors["branch"][:num_branch], tensors["branch"][num_branch:]
    k, v = tensors["trunk"]
    route = "ring" if scheme == "ring" else "direct"
    if scheme == "tiled":
        k, v = k.detach(), v.detach()
    trunk = Trunk(k, v, shard=shard, scale=factor, route=route)
    whole = trunk.queries()
    size = scale.tile_size if scheme == "tiled" else max(shard.num_tokens, 1)
    for start in range(0, max(shard.num_tokens, 1), size):
        rows = slice(start, min(start + size, shard.num_tokens))
        queries = whole if scheme != "tiled" else whole.part(rows.start, rows.stop)
        outputs = [
            trunk.attend(
                tensors["q"][d][rows],
                queries,
                branch_k=[x[rows] for x in branch_k[:d]],
                branch_v=[x[rows] for x in branch_v[:d]],
            )
            for d in range(scale.num_passes)
        ]
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    if scheme == "tiled":
        trunk.take_gradients()


def anchors_of(scale: Scale, num_tokens: int) -> tuple[int, ...]:
    return tuple(num_tokens * (n + 1) // (scale.num_anchors + 1) for n in range(scale.num_anchors))


def block_step(scale: Scale, scheme: str, shard: Shard, device: torch.device) -> None:
    """A block draft's layer on one rank, forward and backward."""
    blocks = DraftBlocks(shard.layout, anchors_of(scale, shard.layout.num_tokens), scale.num_slots)
    num_own, rank = len(blocks.owned(shard.cp_rank)), shard.cp_rank

    def part(kind: int, heads: int, *sizes: int) -> torch.Tensor:
        return draw(100 * rank + kind, *sizes, heads, scale.head_dim, device=device).requires_grad_()

    q = part(0, scale.num_heads, num_own, scale.num_slots)
    own_k, own_v = (part(n, scale.num_kv_heads, num_own, scale.num_slots) for n in (1, 2))
    k, v = (part(n, scale.num_kv_heads, shard.num_tokens) for n in (3, 4))
    out = block_attention(
        q, k, v, block_k_ASMD=own_k, block_v_ASMD=own_v, blocks=blocks, shard=shard, scale=scale.head_dim**-0.5,
        route=scheme.removeprefix("block "),
    )  # fmt: skip
    out.backward(torch.ones_like(out))


def num_pairs(scale: Scale, scheme: str, num_tokens: int) -> int:
    """Visible query/key pairs of one step, of all ranks and passes."""
    if scheme.startswith("block"):
        own = scale.num_anchors * scale.num_slots**2
        return own + scale.num_slots * sum(anchors_of(scale, num_tokens))
    branch = num_tokens * scale.num_passes * (scale.num_passes - 1) // 2
    return scale.num_passes * num_tokens * (num_tokens + 1) // 2 + branch


def timed(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    if device.type != "cuda":
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def measure(scale: Scale, scheme: str, num_tokens: int, device: torch.device) -> dict:
    world = 1 if scheme == "one rank" else scale.world
    layout: PackedLayout = zigzag_plan((0, num_tokens), world)
    step = block_step if scheme.startswith("block") else ttt_step

    def rank_main(transport: Transport) -> int:
        step(scale, scheme, Shard(layout, transport.rank, transport), device)
        return transport.traffic.num_bytes

    sent: list[int] = []

    def run() -> None:
        sent[:] = run_local_ranks(rank_main, world, timeout_s=300.0)

    run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = sorted(timed(device, run) for _ in range(scale.repeats))[scale.repeats // 2]
    flops = 14 * scale.num_heads * scale.head_dim * num_pairs(scale, scheme, num_tokens)
    return {
        "scheme": scheme,
        "num_tokens": num_tokens,
        "world": world,
        "seconds": seconds,
        "tflops": flops / seconds / 1e12,
        "sent_bytes": max(sent),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def check_aims(rows: list[dict]) -> list[dict]:
    """Kept trunks and tiles do the one rank's work: the emulated ranks together take no more than 1.25 times as long."""
    aims = []
    for row in rows:
        if row["scheme"] in ("kept", "tiled"):
            base = next(r for r in rows if r["scheme"] == "one rank" and r["num_tokens"] == row["num_tokens"])
            ratio = row["seconds"] / base["seconds"]
            aims.append(
                {
                    "aim": f"{row['scheme']}, {row['num_tokens']} tokens: time over one rank's",
                    "figure": ratio,
                    "at_most": 1.25,
                }
            )
    for aim in aims:
        aim["is_met"] = aim["figure"] <= aim["at_most"]
    return aims


def print_table(rows: list[dict], device_name: str) -> None:
    table = Table(title=f"Attention forward + backward, ranks emulated on {device_name}")
    for column in ("tokens", "scheme", "ranks", "s", "TFLOP/s", "sent a rank, MiB", "peak, GiB"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for row in rows:
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        table.add_row(
            str(row["num_tokens"]), row["scheme"], str(row["world"]), f"{row['seconds']:.4g}", f"{row['tflops']:.3g}",
            f"{row['sent_bytes'] / 2**20:.3g}", peak,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.quick:
        print("No GPU is to be had here. --quick runs the same steps on small rows on the CPU.", file=sys.stderr)
        return 2
    device = torch.device("cuda" if has_gpu else "cpu")
    device_name = torch.cuda.get_device_name(device) if has_gpu else f"a CPU ({platform.machine()})"
    start, rows, left_out = time.monotonic(), [], []
    for num_tokens in args.scale.lengths:
        for scheme in SCHEMES:
            if time.monotonic() - start > args.scale.limit_s:
                left_out.append(f"{scheme} at {num_tokens} tokens")
                continue
            rows.append(measure(args.scale, scheme, num_tokens, device))
            print(f"{scheme}, {num_tokens} tokens: {rows[-1]['seconds']:.3g} s", file=sys.stderr, flush=True)
    print_table(rows, device_name)
    if left_out:
        print(f"Left out for want of time: {', '.join(left_out)}.")
    aims = check_aims(rows)
    if args.check:
        for aim in aims:
            verdict = "met   " if aim["is_met"] else "MISSED"
            print(f"{verdict} {aim['aim']}: {aim['figure']:.3f} (at most {aim['at_most']})")
    if args.json:
        report = {"scale": asdict(args.scale), "device": device_name, "rows": rows, "aims": aims, "left_out": left_out}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and (left_out or not all(aim["is_met"] for aim in aims)) else 0


if __name__ == "__main__":
    sys.exit(main())
