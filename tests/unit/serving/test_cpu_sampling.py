"""The sampling functions that replace vLLM's on CPU, against the distributions they must follow."""

from types import SimpleNamespace

import pytest
import torch

from hf_codraft.serving.cpu import _draw, _expand_batch_to_tokens, _sample_draft, _sample_recovered

DRAWS = 100_000


def z_score(drawn: torch.Tensor, probs_V: torch.Tensor) -> float:
    """Wilson-Hilferty normal score of Pearson's chi-square."""
    expected = probs_V.double() * len(drawn)
    counts = torch.bincount(drawn, minlength=len(probs_V)).double()
    common = expected >= 5
    chi2 = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    freedom = int(common.sum()) - 1
    return ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5


@pytest.mark.parametrize("vocab_size", [5, 256, 300, 1000])
def test_draws_follow_the_weights_and_never_an_index_of_weight_zero(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(vocab_size, generator=generator) ** 4
    weights[::3] = 0.0
    uniform = torch.rand(DRAWS, dtype=torch.float64, generator=generator)
    drawn = torch.cat([_draw(weights.expand(len(u), -1), u) for u in uniform.split(2000)])
    assert torch.bincount(drawn, minlength=vocab_size)[::3].sum() == 0
    assert abs(z_score(drawn, weights / weights.sum())) < 4


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1.0 - 2.0**-53])
def test_ends_of_the_unit_interval_fall_on_weights_that_are_not_zero(uniform):
    weights = torch.zeros(2, 700)
    weights[:, 300], weights[1, 650] = 1.0, 1.0
    drawn = _draw(weights, torch.full((2,), uniform, dtype=torch.float64))
    assert drawn.tolist() == [300, 300 if uniform < 0.5 else 650]


def test_a_row_of_zeros_gives_an_index_inside_the_vocabulary():
    assert 0 <= _draw(torch.zeros(1, 300), torch.tensor([0.7], dtype=torch.float64)).item() < 300


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_an_error(value):
    weights = torch.rand(3, 700, generator=torch.Generator().manual_seed(0))
    weights[1, 300] = value
    with pytest.raises(RuntimeError, match="not finite"):
        _draw(weights, torch.full((3,), 0.5, dtype=torch.float64))


def test_drafted_tokens_follow_the_probabilities_that_are_returned():
    torch.manual_seed(0)
    logits = torch.randn(1, 40).repeat(DRAWS, 1)
    truth = (logits[0] / 0.7).softmax(-1)
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.full((DRAWS,), 0.7))
    drawn, probs = _sample_draft(logits, metadata)
    torch.testing.assert_close(probs[0], truth)
    assert abs(z_score(drawn, truth)) < 4


def test_greedy_rows_among_random_ones_take_the_best_token():
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1)
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.tensor([0.0, 1.0, 0.0, 1.0]))
    drawn, _ = _sample_draft(logits.clone(), metadata)
    assert drawn[::2].equal(best[::2])


@pytest.mark.parametrize("greedy_draft", [False, True])
def test_recovered_tokens_follow_what_the_draft_left_over(greedy_draft):
    torch.manual_seed(1)
    target, draft = torch.randn(30).softmax(-1), torch.randn(30).softmax(-1)
    token = torch.zeros(DRAWS, dtype=torch.int32)
    rest = target.clone() if greedy_draft else (target - draft).clamp(min=0)
    if greedy_draft:
        rest[0] = 0.0
    drawn = _sample_recovered(
        1,
        [1] * DRAWS,
        torch.arange(1, DRAWS + 1),
        token,
        None if greedy_draft else draft.expand(DRAWS, -1),
        target.expand(DRAWS, -1),
        SimpleNamespace(generators={}),
        torch.device("cpu"),
    )
    assert drawn.dtype == token.dtype
    assert abs(z_score(drawn.long(), rest / rest.sum())) < 4


def test_a_seeded_request_draws_the_same_recovered_tokens_whatever_its_neighbours_do():
    target = torch.rand(5, 30, generator=torch.Generator().manual_seed(2)).softmax(-1)

    def recovered(seed_of_neighbours: int) -> torch.Tensor:
        torch.manual_seed(seed_of_neighbours)
        metadata = SimpleNamespace(generators={1: torch.Generator().manual_seed(7)})
        tokens = torch.zeros(5, dtype=torch.int32)
        return _sample_recovered(3, [2, 3], torch.tensor([2, 5]), tokens, None, target, metadata, torch.device("cpu"))

    assert recovered(0)[2:].equal(recovered(1)[2:])


def test_values_of_requests_are_repeated_for_their_tokens():
    values, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5])
    assert _expand_batch_to_tokens(values, ends, 5).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert _expand_batch_to_tokens(values, torch.tensor([1, 2, 3]), 3, 0, 1).tolist() == [0.5, 1.0, 2.0]
