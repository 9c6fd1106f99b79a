"""Two parts of one softmax become one, by their log-sum-exp.

Legend: Q queries, N query heads, D head size.
"""

import torch


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over keys are kept in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stat_zeros(x: torch.Tensor) -> torch.Tensor:
    """Zeros like `x` in the dtype that sums are kept in."""
    return torch.zeros(x.shape, dtype=stat_dtype(x.dtype), device=x.device)


def empty_part(q_QND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part that attends to nothing: an output of zeros and a log-sum-exp of -inf."""
    out = stat_zeros(q_QND)
    return out, torch.full(q_QND.shape[:2], -torch.inf, dtype=out.dtype, device=q_QND.device)


def merge_(out_QND: torch.Tensor, lse_QN: torch.Tensor, part_QND: torch.Tensor, part_lse_QN: torch.Tensor) -> None:
    """Merges another part of the same softmax into `out` and `lse` in place.

        l = logaddexp(l_1, l_2);  o = e^{l_1 - l} o_1 + e^{l_2 - l} o_2

    A part with log-sum-exp -inf leaves the other as it is; two of them give zeros and -inf, without NaN.
    """
    joint = torch.logaddexp(lse_QN, part_lse_QN)
    finite = joint.masked_fill(joint == -torch.inf, 0.0)
    out_QND.mul_(torch.exp(lse_QN - finite)[..., None]).add_(part_QND * torch.exp(part_lse_QN - finite)[..., None])
    lse_QN.copy_(joint)
