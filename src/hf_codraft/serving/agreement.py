"""Whether rollouts come from the policy that is trained: the engine's log-probs against the trainer's.

Digests compare weights as they were loaded. This compares what is made of them, on rollouts that were made anyway, so it
sees what digests cannot: weights that the engine changed after loading, kernels, positions, and weights that went stale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

NUM_ROWS, NUM_TOKENS = 4, 256  # of a batch and of a completion: what a check looks at on each rank
# Tiny policies of 2 and 8 layers are about one eps away on average (fp16 0.001, bf16 0.006 to 0.008; fp32 3e-7, the order of
# sums, also under speculation with top-p and top-k); deep ones and those with experts are further.
_ROUNDINGS = 16
_LEAST_MEAN = 1e-3
_OUTLIER = 10  # means
_SHARE_OF_OUTLIERS, _FEW = 0.02, 3


@dataclass(frozen=True)
class Sampling:
    """What happens to the policy's logits before a token is drawn; made by the engine from its settings."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def logps(self, logits_TV: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Log-probs of tokens that were drawn, as vLLM has them: after temperature, min-p, top-k and top-p.

        A token that this side's rounding would not have kept has a finite log-prob all the same.
        """
        logps_TV = (logits_TV.float() / self.temperature).log_softmax(-1)
        drawn_T = logps_TV.gather(1, token_ids_T[:, None])[:, 0]
        least_T1 = torch.full_like(logps_TV[:, :1], -torch.inf)
        if self.min_p > 0:
            least_T1 = logps_TV.amax(-1, keepdim=True) + torch.tensor(self.min_p).log()
        if 0 < self.top_k < logps_TV.shape[1]:
            least_T1 = torch.maximum(least_T1, logps_TV.topk(self.top_k).values[:, -1:])
        if self.top_p < 1:
            sorted_TV = logps_TV.sort(-1, descending=True).values
            sorted_TV = sorted_TV.masked_fill(sorted_TV < least_T1, -torch.inf)
            probs_TV = sorted_TV.softmax(-1)
            is_kept_TV = probs_TV.cumsum(-1) - probs_TV < self.top_p
            least_T1 = sorted_TV.masked_fill(~is_kept_TV, torch.inf).amin(-1, keepdim=True)
        return drawn_T - logps_TV.masked_fill(logps_TV < least_T1, -torch.inf).logsumexp(-1)


@dataclass(frozen=True)
class Bounds:
    """How far two computations of the same log-probs may be apart.

    A rounding to `eps` moves a log-prob by some `eps`, more in deep models and where experts change, so the mean distance
    may be 16 `eps`, and no less than 1e-3; a distance of ten times that is an outlier, of which there may be 2 %.

    Args:
        mean (`float`): largest mean distance, outliers counted as `outlier` only.
        outlier (`float`): distance that is rare.
    """

    mean: float
    outlier: float

    @classmethod
    def of(cls, *dtypes: torch.dtype, device: torch.device) -> "Bounds":
        """For computations in these dtypes; fp32 on a GPU counts as TF32, which kernels may use for it."""
        is_gpu = device.type == "cuda"
        eps = max(2.0**-10 if dtype == torch.float32 and is_gpu else torch.finfo(dtype).eps for dtype in dtypes)
        mean = max(_LEAST_MEAN, _ROUNDINGS * eps)
        return cls(mean, _OUTLIER * mean)


@dataclass(frozen=True)
class Distance:
    """Between two lists of log-probs, as sums that can be added up over ranks."""

    num_tokens: int
    clipped_sum: float
    num_outliers: int

    @property
    def mean(self) -> float:
        return self.clipped_sum / max(self.num_tokens, 1)

    def is_within(self, bounds: Bounds) -> bool:
        few = max(_FEW, _SHARE_OF_OUTLIERS * self.num_tokens)
        return self.mean <= bounds.mean and self.num_outliers <= few


def distance(
    rows: Sequence[tuple[list[int], list[int], list[int], list[float | None]]],
    *,
    logits_of: Callable[[list[int], int], torch.Tensor],
    sampling: Sampling,
    bounds: Bounds,
) -> Distance:
    """Compares the engine's log-probs of sampled tokens with those of the trainer's policy.

    Args:
        rows: prompt, completion, 1 for each of its tokens that the policy sampled (and 0 where a tool wrote), and the engine's
            log-probs. As many on each rank: every one costs a forward.
        logits_of (callable): the policy's logits of the last tokens of a row, which it is given with their number.
        sampling ([`Sampling`]): of the rollouts.
        bounds ([`Bounds`]): what counts as an outlier.
    """
    num_tokens, clipped_sum, num_outliers = 0, 0.0, 0
    for prompt_ids, completion_ids, is_sampled, engine_logps in rows:
        ids = completion_ids[:NUM_TOKENS]
        logits_TV = logits_of(prompt_ids + ids, len(ids) + 1)[:-1]
        device = logits_TV.device
        trainer_T = sampling.logps(logits_TV, torch.tensor(ids, device=device, dtype=torch.long))
        values = [float("nan") if value is None else value for value in engine_logps[: len(ids)]]
        engine_T = torch.tensor(values, device=device)
        is_sampled_T = torch.tensor(is_sampled[: len(ids)], device=device, dtype=torch.bool)
        apart = (engine_T - trainer_T).abs().nan_to_num(torch.inf)[is_sampled_T]
        num_tokens += len(apart)
        clipped_sum += apart.clamp(max=bounds.outlier).sum().item()
        num_outliers += int((apart > bounds.outlier).sum())
    return Distance(num_tokens, clipped_sum, num_outliers)


def complaint(found: Distance, bounds: Bounds, *, version: int, held_at: int | None) -> str:
    """What a user is told: what differs, by how much, since when, and what the reason may be."""
    share = found.num_outliers / max(found.num_tokens, 1)
    since = "at the first check" if held_at is None else f"they agreed at version {held_at}"
    return (
        f"the engine's rollouts do not come from the policy that is trained: over {found.num_tokens} sampled tokens of refit "
        f"version {version} the engine's log-probs are {found.mean:.3g} away from the trainer's on average (at most "
        f"{bounds.mean:.3g} is expected of their dtypes; more than {bounds.outlier:.3g} away: {share:.1%}); {since}. Likely "
        "reasons: weights that changed without a refit; weights that the engine keeps in another form than it loads them in "
        "(experts, quantization); a kernel or position encoding of the engine that differs from the policy's; a rollout_func "
        "whose log-probs are another policy's. rollout_dtype sets the engine's precision; check_rollouts_every=0 turns "
        "this check off."
    )
