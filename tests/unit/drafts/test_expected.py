"""Acceptance expected on given completions, against enumeration, rejection sampling itself and dense fp64 logits."""

import random
from functools import cache

import pytest
import torch
from ranks import tiny_batch, tiny_draft, tiny_weights

from hf_codraft.drafts.eagle3 import supervised_passes
from hf_codraft.drafts.expected import expected_acceptance, sampled_log_probs

PASSES = 3


def enumerated(accept_KN: torch.Tensor, length: int) -> tuple[float, list[float]]:
    """Expected steps of a span of `length` tokens, and steps in which each guess is accepted, by recursion."""

    @cache
    def behind(i: int) -> tuple[float, ...]:
        if i >= length - 1:
            return (0.0,) * (PASSES + 1)
        total, alive = [1.0] + [0.0] * PASSES, 1.0
        for k in range(PASSES + 1):
            chance = float(accept_KN[k, i]) if k < PASSES else 0.0
            rest = behind(i + k + 1)
            total = [a + alive * (1 - chance) * b for a, b in zip(total, rest, strict=True)]
            alive *= chance
            if k < PASSES:
                total[k + 1] += alive
        return tuple(total)

    steps, *reached = behind(0)
    return steps, reached


@pytest.mark.parametrize("seed", range(5))
def test_chain_equals_enumeration_over_spans_holes_and_segments(seed):
    draw = random.Random(seed)
    rows = [(draw.randint(1, 4), draw.randint(1, 9)) for _ in range(4)] + [(2, 9, 3, 5), (3, 0), (1, 1)]
    batch = tiny_batch(rows, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask_KT = supervised_passes(batch, PASSES)
    accept_KT = torch.rand(mask_KT.shape, generator=generator, dtype=torch.float64) * mask_KT
    got = expected_acceptance(accept_KT, batch.supervised_T, [start for start, _ in batch.layout.segments])

    steps, reached, tokens = [], torch.zeros(PASSES, dtype=torch.float64), []
    for (start, end), row in zip(batch.layout.segments, rows, strict=True):
        hole = row[2:] or (row[1], row[1])
        for first, length in ((row[0], hole[0]), (row[0] + hole[1], row[1] - hole[1])):
            if length > 0:
                at = start + first - 1
                span_steps, span_reached = enumerated(accept_KT[:, at : at + length], length)
                steps.append(span_steps)
                tokens.append(length - 1.0)
                reached += torch.tensor(span_reached, dtype=torch.float64)
        assert end == start + row[0] + row[1]
    torch.testing.assert_close(got.steps_S, torch.tensor(steps, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.tokens_S, torch.tensor(tokens, dtype=torch.float64), rtol=0, atol=0)
    torch.testing.assert_close(got.reached_K, reached, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_greedy", [False, True])
def test_it_predicts_what_rejection_sampling_accepts(is_greedy):
    """A policy and a draft that see the last token; completions and acceptance by the algorithm of arXiv 2211.17192."""
    vocab, length, num_rows = 5, 12, 3000
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(vocab, vocab, generator=generator).square().double()
    q = (p + 0.3 * torch.rand(vocab, vocab, generator=generator)).double()
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    if is_greedy:
        q = torch.nn.functional.one_hot(q.argmax(1), vocab).double()

    def drawn(weights: torch.Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=generator))

    steps_of, texts = [], []
    for _ in range(num_rows):
        text, steps = [drawn(p[0])], 0
        while len(text) < length:
            steps += 1
            guesses, last = [], text[-1]
            for _ in range(PASSES):
                last = drawn(q[last])
                guesses.append(last)
            for guess in guesses:
                last = text[-1]
                if torch.rand((), generator=generator, dtype=torch.float64) >= p[last, guess] / q[last, guess]:
                    text.append(drawn((p[last] - q[last]).clamp(min=0)))
                    break
                text.append(guess)
            else:
                text.append(drawn(p[text[-1]]))
        steps_of.append(steps)
        texts.append(text[:length])

    ids = torch.tensor(texts)
    accept_TN = (q[ids[:, :-1], ids[:, 1:]] / p[ids[:, :-1], ids[:, 1:]]).clamp(max=1.0)
    # a row of the packed text: one token of prompt, then the completion; position i guesses token i + k + 1
    tokens = length + 1
    accept_KT = torch.zeros(PASSES, num_rows, tokens, dtype=torch.float64)
    for k in range(PASSES):
        accept_KT[k, :, : length - 1 - k] = accept_TN[:, k:]
    supervised = torch.ones(num_rows, tokens, dtype=torch.bool)
    supervised[:, 0] = False
    starts = list(range(0, num_rows * tokens, tokens))
    expected = expected_acceptance(accept_KT.flatten(1), supervised.flatten(), starts)
    difference = torch.tensor(steps_of, dtype=torch.float64) - expected.steps_S
    if is_greedy:  # a greedy guess is accepted where it was said, and nowhere else
        assert not difference.any() and expected.accept_length > 1.2
    else:  # a completion's steps scatter around their expectation; 4 standard errors: 6e-5 of false alarms
        assert abs(difference.mean()) < 4 * difference.std() / num_rows**0.5
        assert difference.std() > 0.1


def dense_accept(draft, batch, weights, temperature, is_greedy) -> torch.Tensor:
    """min(1, q / p) of every guess, from dense fp64 logits of both."""
    mask_KT = supervised_passes(batch, PASSES)
    anchors = mask_KT[0].nonzero()[:, 0]
    hidden_KAH = draft(batch, weights, anchors, num_passes=PASSES)
    log_p = (batch.hidden_TH @ weights.head_VH.T / temperature).log_softmax(-1)
    accept = torch.zeros(mask_KT.shape, dtype=torch.float64)
    for k in range(PASSES):
        log_q = torch.full((len(anchors), len(weights.head_VH)), -torch.inf, dtype=torch.float64)
        log_q[:, draft.kept_ids] = (hidden_KAH[k] @ draft.lm_head.weight.T / temperature).log_softmax(-1)
        for a, anchor in enumerate(anchors.tolist()):
            if mask_KT[k, anchor]:
                token = batch.token_ids_T[anchor + k + 2]
                if is_greedy:
                    accept[k, anchor] = float(log_q[a].argmax() == token)
                else:
                    accept[k, anchor] = (log_q[a, token] - log_p[anchor + k + 1, token]).clamp(max=0).exp()
    return accept


@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("flags", [{}, {"draft_vocab_size": 20}], ids=["full vocabulary", "reduced vocabulary"])
def test_acceptance_of_a_draft_is_that_of_dense_logits(flags, is_greedy):
    draft, weights = tiny_draft(**flags), tiny_weights()
    batch = tiny_batch([(5, 9), (1, 1), (3, 0), (2, 8, 3, 5), *[(3, 20)] * 12])
    settings = dict(temperature=0.7, is_greedy=is_greedy)
    with torch.no_grad():
        accept_KT = dense_accept(draft, batch, weights, **settings)
    expected = expected_acceptance(accept_KT, batch.supervised_T, [start for start, _ in batch.layout.segments])
    log_p_T = sampled_log_probs(batch, weights, temperature=0.7, chunk_size=7)
    got = draft.expected_acceptance(batch, weights, num_passes=PASSES, log_p_T=log_p_T, chunk_size=7, **settings)
    # acceptances are kept in fp32
    torch.testing.assert_close(got.steps_S, expected.steps_S, rtol=1e-6, atol=1e-6)
    assert 1.0 < got.accept_length == pytest.approx(expected.accept_length, rel=1e-6)
