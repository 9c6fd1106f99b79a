"""How far a draft's distribution is from the policy's, chunk by chunk.

Legend: A anchors (trunk positions a draft hangs from), K passes of the draft, T trunk tokens, H hidden width,
V draft vocabulary (a subset of the policy's when it is reduced), C one chunk of positions.

Everything is returned as sums and counts, so that splitting a batch over ranks or accumulation pieces is exact.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

LOSS_TYPES = ("kl", "tv", "lk", "ce")
LK_ETA = 3.0  # arXiv 2602.23881, the paper's best hybrid setting


@dataclass(frozen=True)
class Teacher:
    """The distribution the engine verifies against, from detached tensors; made by the learner, read here.

    Args:
        hidden_TH (`torch.Tensor` of shape `(tokens, hidden)`): the policy's hidden states after its final norm.
        weight_VH (`torch.Tensor` of shape `(draft_vocab, hidden)`): rows of the policy's live head that the draft keeps.
        bias_V (`torch.Tensor` of shape `(draft_vocab,)`, *optional*): the head's bias at those rows.
        temperature (`float`): divides the logits of both teacher and draft.
        scale (`float`): factor of the policy's logits (Cohere, Granite).
        softcap (`float`, *optional*): cap of the policy's logits, `cap * tanh(logits / cap)` (Gemma).
    """

    hidden_TH: torch.Tensor
    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """The policy's logits over the kept ids, before the temperature, in fp32 or wider: `(chunk, draft_vocab)`."""
        logits = _at_least_fp32(F.linear(hidden_CH, self.weight_VH, self.bias_V)) * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True)
class DraftLoss:
    """Sums over the supervised positions of one piece of a batch; made here, read by the learner.

    Args:
        loss (`torch.Tensor`, scalar): sum over passes of `pass_weight * loss_sum`; the one that has a gradient.
        loss_sum_K (`torch.Tensor` of shape `(passes,)`): unweighted loss sum of every pass, detached.
        accept_sum_K (`torch.Tensor` of shape `(passes,)`): sum of `1 - TV(teacher, draft)`, detached.
        count_K (`torch.Tensor` of shape `(passes,)`): positions of every pass that have a loss.
        num_covered, num_supervised (`torch.Tensor`, scalars, *optional*): positions of the first pass whose sampled token
            the draft can propose, and all of them; their ratio is an unbiased estimate of the teacher's mass on the
            draft's vocabulary.
    """

    loss: torch.Tensor
    loss_sum_K: torch.Tensor
    accept_sum_K: torch.Tensor
    count_K: torch.Tensor
    num_covered: torch.Tensor | None = None
    num_supervised: torch.Tensor | None = None


def _at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def per_token_loss(
    draft_logits_CV: torch.Tensor, teacher_logits_CV: torch.Tensor, token_ids_C: torch.Tensor, *, loss_type: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and acceptance of every position, from logits already divided by the temperature.

    | name | value, with teacher p and draft q |
    |------|-----------------------------------|
    | `kl` | `sum_v p_v (log p_v - log q_v)` |
    | `tv` | `1/2 sum_v abs(p_v - q_v)` |
    | `lk` | `w KL + (1 - w) TV`, `w = exp(-3 (1 - TV))` without gradient (arXiv 2602.23881) |
    | `ce` | `-log q` of the sampled token |

    Args:
        draft_logits_CV, teacher_logits_CV (`torch.Tensor` of shape `(chunk, draft_vocab)`): fp32 or wider.
        token_ids_C (`torch.Tensor` of shape `(chunk,)`): sampled token as a draft id; only `ce` reads it.
        loss_type (`str`): one of `LOSS_TYPES`.

    Returns:
        Two `torch.Tensor` of shape `(chunk,)`: the loss, and the acceptance `1 - TV(p, q)` without gradient.
    """
    log_p, log_q = F.log_softmax(teacher_logits_CV, -1), F.log_softmax(draft_logits_CV, -1)
    p = log_p.exp()
    tv = (p - log_q.exp()).abs().sum(-1) / 2
    accept = 1 - tv.detach()
    if loss_type == "tv":
        return tv, accept
    if loss_type == "ce":
        return -log_q.gather(-1, token_ids_C[:, None])[:, 0], accept
    kl = (p * (log_p - log_q)).sum(-1)
    if loss_type == "kl":
        return kl, accept
    if loss_type == "lk":
        weight = torch.exp(-LK_ETA * accept)
        return weight * kl + (1 - weight) * tv, accept
    raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {loss_type!r}.")


def _pass_sums(
    hidden_KCH: Iterable[torch.Tensor],
    head_VH: torch.Tensor,
    teacher: Teacher,
    index_KC: torch.Tensor,
    token_ids_KC: torch.Tensor,
    mask_KC: torch.Tensor,
    loss_type: str,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Sums of loss and acceptance over one chunk of anchors, pass by pass; all share the teacher's logits."""
    with torch.no_grad():
        # Masked positions share one row of zeros: they may hold inf or NaN, and 0 * NaN is NaN in a backward too.
        rows, inverse_KC = torch.unique(index_KC.masked_fill(~mask_KC, -1), return_inverse=True)
        teacher_hidden = teacher.hidden_TH[rows.clamp(min=0)].masked_fill((rows < 0)[:, None], 0.0)
        teacher_logits = teacher.logits(teacher_hidden) / teacher.temperature
    for hidden_CH, inverse_C, token_ids_C, mask_C in zip(hidden_KCH, inverse_KC, token_ids_KC, mask_KC, strict=True):
        hidden_CH = torch.where(mask_C[:, None], hidden_CH, 0.0)
        draft_logits = _at_least_fp32(F.linear(hidden_CH, head_VH)) / teacher.temperature
        loss_C, accept_C = per_token_loss(draft_logits, teacher_logits[inverse_C], token_ids_C, loss_type=loss_type)
        yield torch.where(mask_C, loss_C, 0.0).sum(), torch.where(mask_C, accept_C, 0.0).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Projects, compares and differentiates one pass of one chunk at a time, so that no logits outlive their pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KAH: torch.Tensor,
        head_VH: torch.Tensor,
        teacher: Teacher,
        index_KA: torch.Tensor,
        token_ids_KA: torch.Tensor,
        mask_KA: torch.Tensor,
        loss_type: str,
        weights_K: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_hidden = torch.zeros_like(hidden_KAH)
        grad_head = torch.zeros(head_VH.shape, dtype=_at_least_fp32(head_VH[:0]).dtype, device=head_VH.device)
        loss_sum = grad_head.new_zeros(len(hidden_KAH))
        accept_sum = torch.zeros_like(loss_sum)
        head = head_VH.detach().requires_grad_()
        for start in range(0, hidden_KAH.shape[1], chunk):
            part = slice(start, start + chunk)
            leaves = [hidden_AH[part].detach().requires_grad_() for hidden_AH in hidden_KAH]
            with torch.enable_grad():
                sums = _pass_sums(
                    leaves, head, teacher, index_KA[:, part], token_ids_KA[:, part], mask_KA[:, part], loss_type
                )
                for k, (loss, accept) in enumerate(sums):
                    grad_hidden[k, part], pass_head = torch.autograd.grad(loss * weights_K[k], (leaves[k], head))
                    grad_head += pass_head
                    loss_sum[k] += loss.detach()
                    accept_sum[k] += accept
        ctx.save_for_backward(grad_hidden, grad_head.to(head_VH.dtype))
        ctx.mark_non_differentiable(loss_sum, accept_sum)
        return (loss_sum * weights_K).sum(), loss_sum, accept_sum

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, *[None] * 7


def draft_loss(
    hidden_KAH: torch.Tensor,
    head_VH: torch.Tensor,
    *,
    teacher: Teacher,
    index_KA: torch.Tensor,
    token_ids_KA: torch.Tensor,
    mask_KA: torch.Tensor,
    loss_type: str = "kl",
    pass_weights: tuple[float, ...] | None = None,
    chunk_size: int | None = 512,
) -> DraftLoss:
    """Compares the draft with the policy at every supervised position of every pass.

    With a `chunk_size` the peak of extra memory is `O(chunk_size * draft_vocab)`, whatever the number of positions and
    passes; the head's gradient is accumulated during the forward. Without one it is the plain dense loss, kept as the
    oracle of the chunked one.

    Args:
        hidden_KAH (`torch.Tensor` of shape `(passes, anchors, hidden)`): the draft's states after its final norm.
        head_VH (`torch.Tensor` of shape `(draft_vocab, hidden)`): the draft's head.
        teacher ([`Teacher`]): the policy's side.
        index_KA (`torch.Tensor` of shape `(passes, anchors)`): row of `teacher.hidden_TH` to compare with.
        token_ids_KA (`torch.Tensor` of shape `(passes, anchors)`): the token sampled there, as a draft id.
        mask_KA (`torch.Tensor` of shape `(passes, anchors)`, bool): which positions are supervised.
        loss_type (`str`): see [`per_token_loss`].
        pass_weights (`tuple[float, ...]`, *optional*): weight of every pass, 1 by default.
        chunk_size (`int`, *optional*): anchors per chunk; `None` for the dense loss.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {loss_type!r}.")
    num_passes, num_anchors = mask_KA.shape
    dtype = torch.float64 if hidden_KAH.dtype == torch.float64 else torch.float32
    weights_K = torch.tensor(pass_weights or (1.0,) * num_passes, dtype=dtype, device=hidden_KAH.device)
    count_K = mask_KA.sum(1)
    if num_anchors == 0:
        loss = hidden_KAH.sum() * 0.0 + head_VH.sum() * 0.0  # keeps the graph, so that every rank runs a backward
        zeros = torch.zeros_like(weights_K)
        return DraftLoss(loss, zeros, zeros, count_K)
    if chunk_size is None:
        sums = _pass_sums(hidden_KAH, head_VH, teacher, index_KA, token_ids_KA, mask_KA, loss_type)
        sums_K, accepts_K = (torch.stack(column) for column in zip(*sums, strict=True))
        return DraftLoss((sums_K * weights_K).sum(), sums_K.detach(), accepts_K.detach(), count_K)
    loss, loss_sum_K, accept_sum_K = _ChunkedLoss.apply(
        hidden_KAH, head_VH, teacher, index_KA, token_ids_KA, mask_KA, loss_type, weights_K, chunk_size
    )
    return DraftLoss(loss, loss_sum_K, accept_sum_K, count_K)
