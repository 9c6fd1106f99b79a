"""The CUDA attention kernels against the CPU's. Not run on a GPU yet: `pytest -m gpu` on a machine that has one."""

import pytest
import torch

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
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
