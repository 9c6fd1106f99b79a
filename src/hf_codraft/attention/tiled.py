"""A draft's passes over one tile of positions at a time, so that memory hardly grows with the row.

Legend: T tokens of this rank, A queries, M key/value heads, D head size.

In a draft of one layer, pass p at position i needs only position i of pass p - 1 and the trunk's keys and values, which
are projections of the layer's input. So: project and exchange the trunk once; then, tile by tile, run all passes, the
vocabulary loss and the backward, and drop the tile; return the trunk's gradients once; and backpropagate them through
the projection, tile by tile again. What remains of every token are its key and value and their gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_codraft.attention.merge import stat_zeros
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.trunk import Queries, Trunk

Project = Callable[[slice], tuple[torch.Tensor, torch.Tensor]]
TileLoss = Callable[[Trunk, Queries, slice], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TiledPasses:
    """What [`tiled_loss`] runs; made by a draft.

    Args:
        project (callable): keys and values `(tokens, kv_heads, head_dim)` of a slice of this rank's tokens.
        tile_loss (callable): from the trunk, a tile's queries and their slice of `rows`: the tile's loss (with a gradient,
            if anything learns) and its statistics (without, of one shape). Both are called with an empty slice too.
        shard ([`Shard`]): this rank's part of the row.
        rows (`torch.Tensor` of shape `(queries,)`, int64): ascending rows of this rank's tokens that query.
        tile_size (`int`): queries, or tokens to project, at a time.
        scale, window, num_kept, max_kept_bytes, kernel: see [`Trunk`].
    """

    project: Project
    tile_loss: TileLoss
    shard: Shard
    rows: torch.Tensor
    tile_size: int
    scale: float
    window: int | None = None
    num_kept: int | None = None
    max_kept_bytes: int | None = None
    kernel: str = "aten"

    def __post_init__(self) -> None:
        if self.tile_size < 1:
            raise ValueError(f"tile_size must be at least 1, got {self.tile_size}.")

    def tiles(self, num_rows: int, num_rounds: int = 0) -> list[slice]:
        """Slices of `tile_size` rows, and empty ones up to `num_rounds`."""
        tiles = [slice(start, min(start + self.tile_size, num_rows)) for start in range(0, num_rows, self.tile_size)]
        return tiles + [slice(num_rows, num_rows)] * max(num_rounds - len(tiles), 0)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Weights that autocast has cast under one tile's graph must not be found by the next, whose graph is another."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _rounds(passes: TiledPasses, trunk: Trunk) -> int:
    """Tiles that every rank must run: where keys are streamed, each pass of a tile is collective."""
    own = len(passes.tiles(len(passes.rows)))
    shard = passes.shard
    if trunk.num_kept == shard.layout.world - 1:
        return own
    count = torch.tensor([float(own)], device=passes.rows.device)
    return int(max(own, *(x.item() for x in shard.gather(count))))


class _TileTrunk(Trunk):
    """A trunk whose passes find its keys' gradients, whether or not their queries have one.

    Its keys and values are outside of the tiles' graphs, so a pass is in a graph by its queries alone. Where only the
    projections of keys and values learn, those of the first pass would be missed.

    Args:
        tie (`torch.Tensor`, scalar, *optional*): a zero that asks for a gradient, where keys or values do.
    """

    tie: torch.Tensor | None = None

    def attend(self, q_AND: torch.Tensor, queries: Queries, **branches: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.tie is not None and not q_AND.requires_grad:
            q_AND = q_AND + self.tie
        return super().attend(q_AND, queries, **branches)


def _open_trunk(passes: TiledPasses, token_tiles: list[slice], *, is_differentiated: bool) -> _TileTrunk:
    parts = [passes.project(tile) for tile in token_tiles]
    k_TMD, v_TMD = (torch.cat(column) for column in zip(*parts))
    del parts
    trunk = _TileTrunk(
        k_TMD, v_TMD, shard=passes.shard, scale=passes.scale, window=passes.window, num_kept=passes.num_kept,
        max_kept_bytes=passes.max_kept_bytes, kernel=passes.kernel,
    )  # fmt: skip
    if is_differentiated:
        with torch.enable_grad():
            asks_gradient = any(x.requires_grad for x in passes.project(slice(0, 0)))
        trunk.tie = torch.zeros((), device=k_TMD.device, requires_grad=True) if asks_gradient else None
    return trunk


def _add_gradients_(
    sums: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
) -> None:
    """Adds the gradients of the first inputs, one for each of the sums; an output of frozen weights alone has none."""
    pairs = [(x, grad) for x, grad in zip(outputs, grad_outputs, strict=True) if x.requires_grad]
    if not pairs:
        return
    with_graph, grads = zip(*pairs)
    gradients = torch.autograd.grad(with_graph, inputs, grads, allow_unused=True)
    for total, gradient in zip(sums, gradients):
        if gradient is not None:
            total.add_(gradient)


def _run(
    passes: TiledPasses, parameters: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and statistics of all tiles, one after another; adds the parameters' gradients to the sums."""
    token_tiles, is_differentiated = passes.tiles(passes.shard.num_tokens) or [slice(0, 0)], bool(parameters)
    with _no_autocast_cache():
        trunk = _open_trunk(passes, token_tiles, is_differentiated=is_differentiated)
        queries, tie, dtype = trunk.queries(passes.rows), trunk.tie, trunk.k_TMD.dtype
        inputs = [*parameters, *([] if tie is None else [tie])]
        loss_sum, statistics = torch.zeros((), dtype=torch.float32, device=trunk.k_TMD.device), None
        for tile in passes.tiles(len(passes.rows), max(_rounds(passes, trunk), 1)):
            with torch.set_grad_enabled(is_differentiated):
                loss, stats = passes.tile_loss(trunk, queries.part(tile.start, tile.stop), tile)
                _add_gradients_(sums, inputs, [loss], [None])
            loss_sum = loss_sum + loss.detach()  # a bf16 loss is summed in fp32, an fp64 one in fp64
            statistics = stats if statistics is None else statistics + stats
            del loss, stats
        if is_differentiated:
            # collective: no rank leaves it out, whatever learns on it
            grad_k, grad_v = (x.to(dtype) for x in trunk.take_gradients())
        del trunk, queries
        for tile in [] if tie is None else token_tiles:
            with torch.enable_grad():
                _add_gradients_(sums, parameters, passes.project(tile), [grad_k[tile], grad_v[tile]])
    assert statistics is not None
    return loss_sum, statistics


class _TiledLoss(torch.autograd.Function):
    """One node of the graph, whose inputs are the parameters: DDP's and FSDP's hooks see an ordinary backward."""

    @staticmethod
    def forward(ctx: Any, passes: TiledPasses, *parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = [stat_zeros(parameter) for parameter in parameters]  # bf16 would lose all but the first few tiles
        loss_sum, statistics = _run(passes, parameters, sums)
        ctx.save_for_backward(*[total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)])
        ctx.mark_non_differentiable(statistics)
        return loss_sum, statistics

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(saved * grad for saved in ctx.saved_tensors)


def tiled_loss(
    passes: TiledPasses, parameters: Sequence[nn.Parameter], *, accumulates: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and statistics summed over all tiles; the gradient of the loss is ready when this returns. Collective.

    Where no parameter asks for a gradient or grad mode is off, only the forward runs, and no gradient travels. Both must
    be alike on all ranks.

    Args:
        passes ([`TiledPasses`]): what to run.
        parameters (`Sequence[nn.Parameter]`): everything that the loss depends on and that asks for a gradient; whole
            tensors; frozen ones are left out. Their gradients are summed over the tiles in fp32 (fp64 for fp64).
        accumulates (`bool`): add the gradients to the parameters' `.grad`, which must be there, tile by tile and without a
            copy of them; the loss then has no graph.

    Raises:
        ValueError: a parameter is sharded (FSDP2 below the module whose forward calls this).
    """
    num_sharded = sum(isinstance(parameter, DTensor) for parameter in parameters)
    if num_sharded:
        # hooks that gather them would run once a tile, and ranks that have different numbers of tiles wait for ever
        raise ValueError(
            f"parameters of tiled_loss must be whole tensors, but {num_sharded} of {len(parameters)} are sharded DTensors; "
            "call fully_shard on the module whose forward computes the loss and on none below it, or use no tiles "
            "(chunk_size=None)."
        )
    learning = [parameter for parameter in parameters if parameter.requires_grad] if torch.is_grad_enabled() else []
    if accumulates:
        with torch.no_grad():
            return _run(passes, learning, [p.grad for p in learning if p.grad is not None])
    return _TiledLoss.apply(passes, *learning)
