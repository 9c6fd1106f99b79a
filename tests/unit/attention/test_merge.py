"""Two parts of one softmax become the whole, empty ones included."""

import pytest
import torch

from hf_codraft.attention.merge import empty_part, merge_, stat_dtype


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax_part(scores_QNK: torch.Tensor, v_KD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(scores_QNK, -1) @ v_KD, scores_QNK.logsumexp(-1)


def test_two_parts_are_the_softmax_over_all_keys():
    scores, values = draw(3, 2, 9).mul_(30), draw(9, 4, seed=1)
    out, lse = (x.clone() for x in softmax_part(scores[..., :4], values[:4]))
    merge_(out, lse, *softmax_part(scores[..., 4:], values[4:]))
    want, want_lse = softmax_part(scores, values)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("empty", ["first", "second", "both"])
def test_an_empty_part_leaves_the_other_as_it_is_without_nan(empty):
    full, full_lse = draw(3, 2, 4), draw(3, 2, seed=1)
    none, none_lse = empty_part(full)
    parts = {"first": (none, none_lse, full, full_lse), "second": (full, full_lse, none, none_lse)}
    out, lse, part, part_lse = (x.clone() for x in parts.get(empty, (none, none_lse, none, none_lse)))
    merge_(out, lse, part, part_lse)
    assert torch.equal(out, none if empty == "both" else full)
    assert torch.equal(lse, none_lse if empty == "both" else full_lse)


def test_parts_a_thousand_apart_do_not_overflow():
    out, lse = draw(3, 2, 4), torch.full((3, 2), 1000.0, dtype=torch.float64)
    want = out.clone()
    merge_(out, lse, draw(3, 2, 4, seed=1), torch.full((3, 2), -1000.0, dtype=torch.float64))
    assert torch.equal(out, want) and lse.eq(1000).all()


@pytest.mark.parametrize(
    ("dtype", "want"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_statistics_are_at_least_fp32(dtype, want):
    out, lse = empty_part(torch.zeros(2, 3, 4, dtype=dtype))
    assert out.dtype == lse.dtype == stat_dtype(dtype) == want
    assert not out.any() and lse.eq(-torch.inf).all()
