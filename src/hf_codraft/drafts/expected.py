"""What a draft would bring on completions that the policy has sampled, without an engine.

Legend: T packed tokens, K passes of the draft, S spans of sampled tokens, N tokens of the longest span.

Speculative sampling (arXiv 2211.17192) says a token x with the policy's probability p(x) whatever the draft q guesses, and
the share min(p(x), q(x)) of it as an accepted guess. So a token that was said is a guess that was accepted with probability
`min(1, q(x) / p(x))`, and on a given completion the verification steps are a Markov chain over its tokens: a step that
begins behind token i ends behind token i + 1 + j with the probability that exactly j guesses are accepted. Its expected
number of steps is exact for any draft on any completion of the policy, whoever drafted it: drafts can be compared row by
row, on rows that none of them has seen.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hf_codraft.losses import Teacher
from hf_codraft.taps.packed import PackedBatch, PolicyWeights


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Verification steps that a draft would take; made by [`expected_acceptance`], read by learners, logs and benchmarks.

    Args:
        steps_S (`torch.Tensor` of shape `(spans,)`, fp64): expected steps of every span. A span is a run of sampled tokens;
            a row has several where a tool wrote between them.
        tokens_S (`torch.Tensor` of shape `(spans,)`, fp64): tokens that those steps say: all but the first, which comes with
            the prompt.
        reached_K (`torch.Tensor` of shape `(passes,)`, fp64): expected steps in which the guess of each pass is accepted.
            Guesses past the end of a span count as rejected (vLLM's own counters may count them).
    """

    steps_S: torch.Tensor
    tokens_S: torch.Tensor
    reached_K: torch.Tensor

    @property
    def accept_length(self) -> float:
        """Mean tokens a verification step yields, the policy's own included; NaN where there is no step."""
        return (self.tokens_S.sum() / self.steps_S.sum()).item()

    @property
    def accept_rates(self) -> tuple[float, ...]:
        """Share of the steps in which the guess of each position is accepted."""
        return tuple((self.reached_K / self.steps_S.sum()).tolist())


@torch.no_grad()
def sampled_log_probs(
    batch: PackedBatch, policy: PolicyWeights, *, temperature: float = 1.0, chunk_size: int = 512
) -> torch.Tensor:
    """Log-probability with which the policy said each sampled token, among all of its ids: `(tokens,)`, 0 elsewhere.

    Costs the policy's head once for each sampled token.

    Args:
        batch ([`PackedBatch`]): text and hidden states of whole rows (not sharded).
        policy ([`PolicyWeights`]): its head.
        temperature (`float`): of the rollouts.
        chunk_size (`int`): positions whose logits are made at a time.
    """
    if batch.layout.world != 1:
        raise ValueError(f"log-probs of a row that is sharded over {batch.layout.world} ranks are not computed here.")
    teacher = Teacher(
        batch.hidden_TH, policy.head_VH, policy.head_bias_V, scale=policy.logit_scale, softcap=policy.logit_softcap
    )
    has_context_T = batch.supervised_T.clone()
    has_context_T[list(batch.layout.cu_seqlens[:-1])] = False
    log_p_T = torch.zeros(len(has_context_T), dtype=torch.float32, device=has_context_T.device)
    for rows_C in has_context_T.nonzero()[:, 0].split(chunk_size):
        logits_CV = teacher.logits(batch.hidden_TH[rows_C - 1].to(policy.head_VH.dtype)).float() / temperature
        said_C = logits_CV.gather(1, batch.token_ids_T[rows_C][:, None])[:, 0]
        log_p_T[rows_C] = said_C - logits_CV.logsumexp(-1)
    return log_p_T


def expected_acceptance(accept_KT: torch.Tensor, supervised_T: torch.Tensor, starts: list[int]) -> ExpectedAcceptance:
    """The chain's expectation on every span of sampled tokens of a packed row.

    Args:
        accept_KT (`torch.Tensor` of shape `(passes, tokens)`): probability that the guess of pass k at trunk position i, which
            is token i + k + 1 (k from 1), is accepted; 0 where that token was not sampled.
        supervised_T (`torch.Tensor` of shape `(tokens,)`, bool): the sampled tokens.
        starts (`list[int]`): where segments begin; no span crosses one.
    """
    num_passes = len(accept_KT)
    firsts, lengths = _spans(supervised_T.cpu().numpy(), starts)
    longest = int(lengths.max(initial=0))
    # A step that begins behind token t hangs from trunk position t - 1: token t is the first that pass 1 reads.
    rows_SN = np.minimum(firsts[:, None] - 1 + np.arange(longest)[None], len(supervised_T) - 1)
    accept_KNS = accept_KT.detach().cpu().double().numpy()[:, rows_SN].transpose(0, 2, 1)
    # probability that a step begins behind token i of a span
    begins_NS = np.zeros((longest + num_passes + 1, len(firsts)))
    begins_NS[0] = 1.0
    reached_K = np.zeros(num_passes)
    for i in range(longest - 1):
        begins_NS[i] *= i < lengths - 1
        alive_S = begins_NS[i]
        for k in range(num_passes):
            accepted_S = alive_S * accept_KNS[k, i]
            begins_NS[i + k + 1] += alive_S - accepted_S
            reached_K[k] += accepted_S.sum()
            alive_S = accepted_S
        begins_NS[i + num_passes + 1] += alive_S
    steps_S = begins_NS[: max(longest - 1, 0)].sum(0)
    return ExpectedAcceptance(
        torch.from_numpy(steps_S), torch.from_numpy(np.maximum(lengths - 1.0, 0.0)), torch.from_numpy(reached_K)
    )


def _spans(supervised_T: np.ndarray, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """First token and length of every run of sampled tokens that has a token before it in its segment."""
    is_start_T = np.zeros(len(supervised_T), dtype=bool)
    is_start_T[starts] = True
    goes_on_T = np.concatenate([[False], supervised_T[:-1]]) & ~is_start_T
    firsts = np.nonzero(supervised_T & ~goes_on_T & ~is_start_T)[0]
    is_last_T = supervised_T & ~np.concatenate([goes_on_T[1:] & supervised_T[1:], [False]])
    ends = np.nonzero(is_last_T)[0]
    lasts = ends[np.searchsorted(ends, firsts)] if len(firsts) else firsts
    return firsts, lasts - firsts + 1
