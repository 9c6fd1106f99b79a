"""The CUDA attention kernels against the CPU's. Not run on a GPU yet: `pytest -m gpu` on a machine that has one."""

import pytest
import torch

from hf_codraft.attention.block_draft import DraftBlocks, block_attention
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.plans import zigzag_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.tiled import TiledPasses, tiled_loss
from hf_codraft.attention.transport import run_local_ranks
from hf_codraft.attention.trunk import Trunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _run(device: str, dtype: torch.dtype, window: int | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.tensor([*range(20, 60), 70, *range(80, 112)])

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    q, k, v = draw(len(anchors), 6, 64), draw(112, 2, 64), draw(112, 2, 64)
    branch_k, branch_v = [draw(len(anchors), 2, 64) for _ in range(2)], [draw(len(anchors), 2, 64) for _ in range(2)]
    trunk = Trunk(k, v, shard=Shard(PackedLayout.from_lengths([70, 1, 41])), scale=0.125, window=window)
    out = trunk.attend(q, trunk.queries(anchors.to(device)), branch_k=branch_k, branch_v=branch_v)
    out.backward(torch.randn(out.shape, generator=generator).to(device, dtype))
    return [x.detach().cpu().double() for x in (out, *(x.grad for x in (q, k, v, *branch_k, *branch_v)))]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_cuda_attention_matches_cpu_in_values_and_gradients(dtype, tolerance, window):
    for ours, truth in zip(_run("cuda", dtype, window), _run("cpu", torch.float64, window), strict=True):
        assert (ours - truth).norm() <= tolerance * truth.norm()


LAYOUT = zigzag_plan((0, 70, 71, 112), 2)


def _draw(seed: int, *shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """The same values on every device; each rank has a generator of its own, since threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def _run_blocks(device: str, dtype: torch.dtype, route: str, window: int | None) -> list[torch.Tensor]:
    """Output and gradients of two ranks of this process, one after the other."""
    blocks = DraftBlocks(LAYOUT, tuple(range(3, 112, 6)), 4, window=window)

    def rank(transport):
        num_own, index = len(blocks.owned(transport.rank)), transport.rank

        def part(kind: int, *shape: int) -> torch.Tensor:
            return _draw(10 * index + kind, *shape, device=device, dtype=dtype).requires_grad_()

        q, k, v = part(0, num_own, 4, 6, 64), *(part(n, LAYOUT.num_local(index), 2, 64) for n in (1, 2))
        block_k, block_v = (part(n, num_own, 4, 2, 64) for n in (3, 4))
        shard = Shard(LAYOUT, index, transport)
        out = block_attention(
            q, k, v, block_k_ASMD=block_k, block_v_ASMD=block_v, blocks=blocks, shard=shard, scale=0.125, route=route
        )
        out.backward(_draw(10 * index + 5, *out.shape, device=device, dtype=dtype))
        return [x.detach().cpu().double() for x in (out, *(x.grad for x in (q, k, v, block_k, block_v)))]

    return [x for found in run_local_ranks(rank, 2, timeout_s=60) for x in found]


def _run_tiles(device: str, dtype: torch.dtype, window: int | None) -> list[torch.Tensor]:
    """Loss and weight gradients of two passes of two ranks, 16 queries at a time."""

    def rank(transport):
        shard = Shard(LAYOUT, transport.rank, transport)
        hidden = _draw(transport.rank, shard.num_tokens, 64, device=device, dtype=dtype)
        shapes = [(64, 6 * 64), (64, 2 * 64), (64, 2 * 64)]
        weights = [
            torch.nn.Parameter(_draw(90 + n, *shape, device=device, dtype=dtype) / 8) for n, shape in enumerate(shapes)
        ]

        def project(rows):
            return tuple((hidden[rows] @ weight).unflatten(-1, (2, 64)) for weight in weights[1:])

        def tile_loss(trunk, queries, tile):
            q = (hidden[tile] @ weights[0]).unflatten(-1, (6, 64))
            k, v = project(tile)
            outs = trunk.attend(q, queries), trunk.attend(q, queries, branch_k=[k], branch_v=[v])
            return sum(out.float().square().sum() for out in outs), torch.zeros(1, device=device)

        rows = torch.arange(shard.num_tokens, device=device)
        passes = TiledPasses(project, tile_loss, shard, rows, 16, 0.125, window=window)
        loss, _ = tiled_loss(passes, weights)
        loss.backward()
        return [x.detach().cpu().double() for x in (loss, *(weight.grad for weight in weights))]

    return [x for found in run_local_ranks(rank, 2, timeout_s=60) for x in found]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("route", ["keys", "queries"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_cuda_block_drafts_match_cpu_in_values_and_gradients(dtype, tolerance, route, window):
    found, wanted = _run_blocks("cuda", dtype, route, window), _run_blocks("cpu", torch.float64, route, window)
    for ours, truth in zip(found, wanted, strict=True):
        assert (ours - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_cuda_tiles_match_cpu_in_losses_and_gradients(dtype, tolerance, window):
    for ours, truth in zip(_run_tiles("cuda", dtype, window), _run_tiles("cpu", torch.float64, window), strict=True):
        assert (ours - truth).norm() <= tolerance * truth.norm()
