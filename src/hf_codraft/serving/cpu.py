"""Two repairs of sampling in vLLM's CPU backend. Each stands alone and does nothing on other platforms.

Both serve vLLM 0.31 and 0.32. Delete the first (expansion) when the tests of losslessness pass without it, the second
(inverse CDF) when benchmarks/rollout.py is no slower without it.
"""

from typing import Any

import torch
from torch.nn import functional as F

_BLOCK = 256
GREEDY_BELOW = 1e-5  # vLLM's own border between a temperature and none


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """One value a request, repeated for its tokens: `[a, b]` with `cu_num_tokens` `[2, 3]` gives `[a, a, b]`."""
    repeats = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(repeats, output_size=num_tokens)


def _draw(weights_TV: torch.Tensor, uniform_T: torch.Tensor) -> torch.Tensor:
    """One index a row, with probability proportional to its weight, by inverting the cumulative sum in fp64.

    Two steps, a block of the vocabulary and an index inside it, spare most of the cumulative sum. An index of weight 0 is
    never drawn, unless its whole row is 0.

    Raises:
        RuntimeError: if a weight is not finite: every comparison with NaN is false, so a token would be drawn all the same.
    """
    padding = -weights_TV.shape[1] % _BLOCK
    blocks_TBI = F.pad(weights_TV, (0, padding)).unflatten(1, (-1, _BLOCK))
    sums_TB = blocks_TBI.sum(-1, dtype=torch.float64)
    if not sums_TB.sum().isfinite():
        raise RuntimeError(
            "a distribution that tokens are drawn from is not finite: weights or activations of the policy or its draft are NaN "
            "or infinite. Look at the losses and gradient norms of the last steps."
        )
    block_T, uniform_T = _invert(sums_TB, uniform_T)
    index_T, _ = _invert(blocks_TBI[torch.arange(len(block_T)), block_T].double(), uniform_T)
    return (block_T * _BLOCK + index_T).clamp(max=weights_TV.shape[1] - 1)


def _invert(weights_TN: torch.Tensor, uniform_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index a row that a uniform number falls on, and how far into it, again uniform in `[0, 1)`."""
    cumulative_TN = weights_TN.cumsum(-1)
    point_T1 = uniform_T[:, None] * cumulative_TN[:, -1:]
    index_T1 = torch.searchsorted(cumulative_TN, point_T1, right=True).clamp(max=weights_TN.shape[1] - 1)
    weight_T1 = weights_TN.gather(1, index_T1)
    into_T1 = (point_T1 - cumulative_TN.gather(1, index_T1) + weight_T1) / weight_T1
    return index_T1[:, 0], into_T1[:, 0].nan_to_num(0.0).clamp(0.0, 1.0 - 2.0**-53)


def _sample_draft(
    logits_TV: torch.Tensor, sampling_metadata: Any, use_fp64_gumbel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `compute_probs_and_sample_next_token`: drafted ids and the distributions they came from."""
    if sampling_metadata.all_greedy:
        return logits_TV.argmax(-1), logits_TV
    temperature_T = sampling_metadata.temperature
    is_greedy_T = temperature_T < GREEDY_BELOW
    logits_TV.div_(torch.where(is_greedy_T, 1.0, temperature_T).view(-1, 1))
    probs_TV = logits_TV.softmax(-1, dtype=torch.float32)
    drawn_T = _draw(probs_TV, torch.rand(len(probs_TV), dtype=torch.float64))
    return torch.where(is_greedy_T, probs_TV.argmax(-1), drawn_T), probs_TV


def _sample_recovered(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata: Any,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """vLLM's `sample_recovered_tokens`: what is said instead of a rejected token, from `max(target - draft, 0)`."""
    uniform_T = torch.rand(len(draft_token_ids), dtype=torch.float64)
    start = 0
    for request, length in enumerate(num_draft_tokens):
        generator = sampling_metadata.generators.get(request)
        if generator is not None and length > 0:
            uniform_T[start : start + length].uniform_(generator=generator)
        start += length
    if draft_probs is None:  # a greedy draft is all on its token
        rest_TV = target_probs.scatter(1, draft_token_ids.long()[:, None], 0.0)
    else:
        rest_TV = (target_probs - draft_probs).clamp_(min=0.0)
    return _draw(rest_TV, uniform_T).to(draft_token_ids.dtype)


def repair_sampling() -> None:
    """Makes speculation at a temperature above 0 right and quick on CPU.

    Right: vLLM's CPU kernel behind `expand_batch_to_tokens` writes temperature, top_p and top_k of a request into a copy,
    so tokens are drawn from garbage (NaN log-probs, token id = vocabulary size). The plain torch function replaces it.

    Quick: vLLM draws a token by exponential noise over the whole vocabulary, four times a step with three drafted tokens. It
    was a quarter of the rollout's time at 4 sequences and 49152 ids. One uniform number a token does the same.
    """
    if not is_cpu():
        return
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import llm_base_proposer

    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    rejection_sampler.sample_recovered_tokens = _sample_recovered
    llm_base_proposer.compute_probs_and_sample_next_token = _sample_draft
