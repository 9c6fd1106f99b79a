"""One attention block with its log-sum-exp, on torch's own kernels.

Legend: Q queries, K keys, N query heads, D head size. Every function takes as many key heads as query heads
(`branch.py` expands grouped heads) and returns an output in the input's dtype and a natural-log log-sum-exp in
fp32 (fp64 for fp64 inputs). The CPU kernel is torch's flash attention, used by SDPA itself. The CUDA kernel is torch's
memory-efficient attention and has not run on a GPU yet.
"""

import torch

aten = torch.ops.aten


def _heads_first(x_QND: torch.Tensor) -> torch.Tensor:
    return x_QND.transpose(0, 1)[None]


def _tokens_first(x_1NQD: torch.Tensor) -> torch.Tensor:
    return x_1NQD[0].transpose(0, 1)


def block_forward(
    q_QND: torch.Tensor, k_KND: torch.Tensor, v_KND: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention output `(queries, heads, head_dim)` and its log-sum-exp `(queries, heads)`."""
    q, k, v = _heads_first(q_QND), _heads_first(k_KND), _heads_first(v_KND)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return _tokens_first(out), lse[0].transpose(0, 1)
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return _tokens_first(out), lse[0, :, : q_QND.shape[0]].transpose(0, 1)  # this kernel pads lse to 32 queries


def block_backward(
    grad_QND: torch.Tensor,
    q_QND: torch.Tensor,
    k_KND: torch.Tensor,
    v_KND: torch.Tensor,
    out_QND: torch.Tensor,
    lse_QN: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this block's queries, keys and values, given the *joint* output and log-sum-exp.

    Feeding the output and log-sum-exp of the whole softmax (this block merged with every other) makes the kernel's
    recomputed probabilities the joint ones, so the block's gradients are exact parts of the whole.
    """
    grad, q, k, v, out = (_heads_first(x) for x in (grad_QND, q_QND, k_KND, v_KND, out_QND))
    lse = lse_QN.transpose(0, 1)[None].contiguous()
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
    else:
        padding = -lse.shape[-1] % 32
        lse = torch.nn.functional.pad(lse, (0, padding), value=float("inf"))
        seed = torch.zeros((), dtype=torch.long, device=q.device)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], is_causal, scale=scale
        )
    grad_q, grad_k, grad_v = (_tokens_first(g) for g in grads[:3])
    return grad_q, grad_k, grad_v
