"""Comparing an engine's log-probs with the policy's, without an engine: the policy's own stand in for them."""

import pytest
import tiny
import torch

from hf_codraft.serving.agreement import Bounds, Distance, Sampling, complaint, distance

CPU = torch.device("cpu")
FP32 = Bounds.of(torch.float32, torch.float32, device=CPU)


def reference(logits_V: torch.Tensor, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> torch.Tensor:
    """Log-probs of one position in fp64, token by token in the order of vLLM's sampler."""
    probs_V = (logits_V.double() / temperature).softmax(-1)
    if min_p:
        probs_V[probs_V < min_p * probs_V.max()] = 0.0
    order = probs_V.argsort(descending=True)
    if top_k > 0:
        probs_V[order[top_k:]] = 0.0
    probs_V /= probs_V.sum()
    mass = 0.0
    for token in order.tolist():
        if mass >= top_p:
            probs_V[token] = 0.0
        mass += probs_V[token].item()
    return (probs_V / probs_V.sum()).log()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
        {"top_k": 1},
    ],
    ids=str,
)
def test_log_probs_are_those_of_the_distribution_that_tokens_are_drawn_from(options):
    logits_TV = 2 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    expected_TV = torch.stack([reference(logits_V, **options) for logits_V in logits_TV])
    drawn_T = torch.multinomial(expected_TV.exp(), 1, generator=torch.Generator().manual_seed(1))
    found_T = Sampling(**options).logps(logits_TV, drawn_T[:, 0])
    torch.testing.assert_close(found_T.double(), expected_TV.gather(1, drawn_T)[:, 0], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def policy():
    return tiny.policy("qwen3", tie=False, num_hidden_layers=2)


@torch.no_grad()
def logits_of(policy):
    return torch.no_grad()(lambda ids, num: policy(torch.tensor([ids])).logits[0, -num:])


@torch.no_grad()
def rollouts(policy, num_rows: int = 4, length: int = 24) -> list:
    """Rows of different lengths, the second half of the odd ones written by a tool, with log-probs of the policy."""
    rows = []
    for number in range(num_rows):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, tiny.VOCAB, (5 + number + length,), generator=generator)
        logps = policy(ids[None]).logits[0].log_softmax(-1)[4 + number : -1].gather(1, ids[5 + number :, None])[:, 0]
        is_sampled = [1] * length if number % 2 == 0 else [1] * (length // 2) + [0] * (length - length // 2)
        values = [value if own else 0.0 for value, own in zip(logps.tolist(), is_sampled)]  # TRL's for a tool's tokens
        rows.append((ids[: 5 + number].tolist(), ids[5 + number :].tolist(), is_sampled, values))
    return rows


def test_rollouts_of_the_policy_agree_and_tokens_of_tools_are_left_out(policy):
    found = distance(rollouts(policy), logits_of=logits_of(policy), sampling=Sampling(), bounds=FP32)
    assert found.num_tokens == 24 + 12 + 24 + 12
    assert found.mean < 1e-5
    assert found.is_within(FP32)


def test_rollouts_of_weights_a_hundredth_away_do_not_agree(policy):
    rows = rollouts(policy)
    other = tiny.policy("qwen3", tie=False, num_hidden_layers=2)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    found = distance(rows, logits_of=logits_of(other), sampling=Sampling(), bounds=FP32)
    assert not found.is_within(FP32)
    message = complaint(found, FP32, version=7, held_at=5)
    assert "refit version 7" in message and "they agreed at version 5" in message and "72 sampled tokens" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_engine_in_half_precision_agrees_and_another_policy_in_it_does_not(policy, dtype):
    """The engine's side is transformers in that dtype, so its rounding is real."""
    bounds = Bounds.of(dtype, torch.float32, device=CPU)
    half = tiny.policy("qwen3", tie=False, num_hidden_layers=2).to(dtype)
    rows = rollouts(policy, num_rows=8)
    found = distance(rows, logits_of=logits_of(half), sampling=Sampling(), bounds=bounds)
    assert found.is_within(bounds)
    assert found.mean < bounds.mean / 3
    other = tiny.policy("qwen3", tie=False, num_hidden_layers=2, seed=1).to(dtype)
    assert not distance(rows, logits_of=logits_of(other), sampling=Sampling(), bounds=bounds).is_within(bounds)


def test_one_token_far_away_is_no_reason_to_stop_and_many_are():
    bounds = Bounds.of(torch.bfloat16, torch.bfloat16, device=CPU)
    assert Distance(64, bounds.outlier + 63 * bounds.mean / 4, 1).is_within(bounds)
    assert not Distance(1000, 30 * bounds.outlier, 30).is_within(bounds)
    assert not Distance(64, 64 * bounds.outlier, 64).is_within(bounds)


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_log_probs_that_are_no_numbers_count_as_far_away(policy, value):
    rows = [(prompt, ids, own, [value] * len(ids)) for prompt, ids, own, _ in rollouts(policy)]
    found = distance(rows, logits_of=logits_of(policy), sampling=Sampling(), bounds=FP32)
    assert found.num_outliers == found.num_tokens == 72
    assert not found.is_within(FP32)
