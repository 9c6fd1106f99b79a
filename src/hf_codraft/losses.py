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

from hf_codraft.attention.merge import stat_dtype, stat_zeros

LOSS_TYPES = ("kl", "tv", "lk", "ce")
LK_ETA = 3.0  # arXiv 2602.23881, the paper's best hybrid setting
VOCAB_BLOCK = 8192  # ids of the head that are cast, multiplied and summed at a time


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
        logits = _project(hidden_CH, self.weight_VH, self.bias_V)
        if self.scale != 1.0:
            logits = logits * self.scale
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


def _project(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None = None) -> torch.Tensor:
    """Logits in fp32 or wider, without a graph; where autocast casts the weight, it casts one block of ids at a time."""
    out_CV = torch.empty(len(hidden_CH), len(weight_VH), dtype=stat_dtype(hidden_CH.dtype), device=hidden_CH.device)
    with torch.no_grad():
        for start in range(0, len(weight_VH), VOCAB_BLOCK):
            block = slice(start, start + VOCAB_BLOCK)
            out_CV[:, block] = F.linear(hidden_CH, weight_VH[block], None if bias_V is None else bias_V[block])
    return out_CV


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


def _softmax_(logits_CV: torch.Tensor) -> torch.Tensor:
    """Turns logits into log-probabilities in place."""
    for rows in logits_CV.split(32):  # logsumexp makes a copy of what it reads
        rows.sub_(torch.logsumexp(rows, -1, keepdim=True))
    return logits_CV


def _row_dot(a_CV: torch.Tensor, b_CV: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a_CV[:, None], b_CV[:, :, None])[:, 0, 0]


def _loss_and_gradient_(
    log_q_CV: torch.Tensor, p_CV: torch.Tensor, neg_entropy_C: torch.Tensor, token_ids_C: torch.Tensor, loss_type: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What [`per_token_loss`] gives, and the loss's gradient by the draft's logits; overwrites `log_q` and `p`.

    KL: q - p;  CE: q - 1[sampled];  TV: q (s - sum_v q_v s_v) / 2 with s = sign(q - p)
    """
    if loss_type == "ce":
        loss_C = -log_q_CV.gather(-1, token_ids_C[:, None])[:, 0]
    elif loss_type != "tv":
        loss_C = neg_entropy_C - _row_dot(p_CV, log_q_CV)
    q_CV = log_q_CV.exp_()
    difference_CV = p_CV.neg_().add_(q_CV)
    tv_C = torch.linalg.vector_norm(difference_CV, 1, dim=-1) / 2
    accept_C = 1 - tv_C
    if loss_type == "kl":
        return loss_C, accept_C, difference_CV
    if loss_type == "ce":
        q_CV.scatter_add_(-1, token_ids_C[:, None], q_CV.new_full((len(q_CV), 1), -1.0))
        return loss_C, accept_C, q_CV
    kl_CV, share_C = None, torch.ones_like(tv_C)[:, None]
    if loss_type == "lk":
        weight_C = torch.exp(-LK_ETA * accept_C)
        loss_C = weight_C * loss_C + (1 - weight_C) * tv_C
        kl_CV, share_C = difference_CV * weight_C[:, None], (1 - weight_C)[:, None]
    else:
        loss_C = tv_C
    sign_CV = difference_CV.sign_()
    mean_C = _row_dot(q_CV, sign_CV)
    gradient_CV = sign_CV.sub_(mean_C[:, None]).mul_(q_CV).mul_(share_C / 2)
    return loss_C, accept_C, gradient_CV if kl_CV is None else gradient_CV.add_(kl_CV)


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
        into_VH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_hidden = torch.zeros_like(hidden_KAH)
        learns_head = into_VH is not None or ctx.needs_input_grad[1]
        grad_head = stat_zeros(head_VH) if into_VH is None and learns_head else into_VH
        loss_sum = torch.zeros_like(weights_K)
        accept_sum = torch.zeros_like(loss_sum)
        for start in range(0, hidden_KAH.shape[1], chunk):
            part = slice(start, start + chunk)
            p_RV, neg_entropy_R, inverse_KC = _teacher_rows(teacher, index_KA[:, part], mask_KA[:, part])
            for k, inverse_C in enumerate(inverse_KC):
                mask_C = mask_KA[k, part]
                hidden_CH = torch.where(mask_C[:, None], hidden_KAH[k, part], 0.0)
                logits_CV = _project(hidden_CH, head_VH)
                if teacher.temperature != 1.0:
                    logits_CV.div_(teacher.temperature)
                log_q_CV = _softmax_(logits_CV)
                loss_C, accept_C, gradient_CV = _loss_and_gradient_(
                    log_q_CV, p_RV[inverse_C], neg_entropy_R[inverse_C], token_ids_KA[k, part], loss_type
                )
                del log_q_CV, logits_CV
                loss_sum[k] += torch.where(mask_C, loss_C, 0.0).sum()
                accept_sum[k] += torch.where(mask_C, accept_C, 0.0).sum()
                gradient_CV.mul_((mask_C * weights_K[k] / teacher.temperature)[:, None])
                grad_hidden[k, part] = _add_products_(grad_head, gradient_CV, hidden_CH, head_VH)
                del gradient_CV
        ctx.save_for_backward(
            grad_hidden, *([] if grad_head is None or into_VH is not None else [grad_head.to(head_VH.dtype)])
        )
        ctx.mark_non_differentiable(loss_sum, accept_sum)
        return (loss_sum * weights_K).sum(), loss_sum, accept_sum

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, *heads = ctx.saved_tensors
        return grad_hidden * grad, heads[0] * grad if heads else None, *[None] * 8


def _teacher_rows(
    teacher: Teacher, index_KC: torch.Tensor, mask_KC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities and negative entropy of the rows that one chunk's passes share, and which row each position reads."""
    # Masked positions share one row of zeros: they may hold inf or NaN, and 0 * NaN is NaN in a backward too.
    rows, inverse_KC = torch.unique(index_KC.masked_fill(~mask_KC, -1), return_inverse=True)
    hidden_RH = teacher.hidden_TH[rows.clamp(min=0)].masked_fill((rows < 0)[:, None], 0.0)
    logits_RV = teacher.logits(hidden_RH)
    if teacher.temperature != 1.0:
        logits_RV = logits_RV.div_(teacher.temperature)
    p_RV = torch.softmax(logits_RV, -1)
    neg_entropy_R = _row_dot(p_RV, _softmax_(logits_RV))
    return p_RV, neg_entropy_R, inverse_KC


def _add_products_(
    grad_head_VH: torch.Tensor | None, gradient_CV: torch.Tensor, hidden_CH: torch.Tensor, head_VH: torch.Tensor
) -> torch.Tensor:
    """Adds the head's gradient in place, a block of ids at a time, and returns the hidden states'."""
    grad_hidden_CH = stat_zeros(hidden_CH)
    device_type = hidden_CH.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_CH.dtype
    if hidden_CH.dtype == torch.float64:  # which autocast leaves alone
        dtype = torch.float64
    hidden_CH = hidden_CH.to(dtype)
    with torch.autocast(device_type, enabled=False):
        for start in range(0, len(head_VH), VOCAB_BLOCK):
            block = slice(start, start + VOCAB_BLOCK)
            part_CV = gradient_CV[:, block].to(dtype)
            grad_hidden_CH += part_CV @ head_VH[block].to(dtype)
            if grad_head_VH is not None and grad_head_VH.dtype == dtype:
                grad_head_VH[block].addmm_(part_CV.T, hidden_CH)
            elif grad_head_VH is not None:
                grad_head_VH[block] += part_CV.T @ hidden_CH
    return grad_hidden_CH


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
    into_VH: torch.Tensor | None = None,
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
        into_VH (`torch.Tensor` of shape `(draft_vocab, hidden)`, *optional*): the head's gradient is added here at once, and
            a backward (of the loss itself, with gradient 1) finds only the hidden states'. Needs a `chunk_size`.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {loss_type!r}.")
    num_passes, num_anchors = mask_KA.shape
    dtype = torch.float64 if hidden_KAH.dtype == torch.float64 else torch.float32
    weights_K = torch.tensor(pass_weights or (1.0,) * num_passes, dtype=dtype, device=hidden_KAH.device)
    count_K = mask_KA.sum(1)
    if num_anchors == 0:
        loss = hidden_KAH.sum() * 0.0 + head_VH[:1].sum() * 0.0  # keeps the graph, so that every rank runs a backward
        zeros = torch.zeros_like(weights_K)
        return DraftLoss(loss, zeros, zeros, count_K)
    if chunk_size is None:
        sums = _pass_sums(hidden_KAH, head_VH, teacher, index_KA, token_ids_KA, mask_KA, loss_type)
        sums_K, accepts_K = (torch.stack(column) for column in zip(*sums, strict=True))
        return DraftLoss((sums_K * weights_K).sum(), sums_K.detach(), accepts_K.detach(), count_K)
    loss, loss_sum_K, accept_sum_K = _ChunkedLoss.apply(
        hidden_KAH, head_VH, teacher, index_KA, token_ids_KA, mask_KA, loss_type, weights_K, chunk_size, into_VH
    )
    return DraftLoss(loss, loss_sum_K, accept_sum_K, count_K)
