"""What a policy's modules compute, learnt by feeding them known tensors instead of knowing their families.

Legend: B rows, S positions, H hidden width, V vocabulary, I inputs and O outputs of a projection.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

NUM_TOKENS = 6


@dataclass(frozen=True)
class NormFunction:
    """What a norm multiplies by; made by [`norm_function`], read when a draft is started.

    Args:
        weight_H (`torch.Tensor` of shape `(hidden,)`): factor of the normalised input, fp32.
        eps (`float`): what is added under the root.
        is_rms (`bool`): whether it is `x / sqrt(mean(x^2) + eps) * weight` and nothing else.
    """

    weight_H: torch.Tensor
    eps: float
    is_rms: bool


@torch.no_grad()
def norm_function(norm: nn.Module, hidden_size: int) -> NormFunction:
    """The function of a norm, whatever it calls its weight and whether it adds 1 to it or a bias.

    The input of alternating +1 and -1 has mean 0 and mean square 1: RMSNorm and LayerNorm return it times their weight.
    """
    state = {name: whole(tensor.detach()) for name, tensor in [*norm.named_parameters(), *norm.named_buffers()]}
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    ones = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    device = next(iter(state.values())).device if state else torch.device("cpu")

    def run(x_H: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(norm, state, (x_H[None, None],))[0, 0].float()

    def slope(x_H: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return (run(x_H, state) - run(-x_H, state)) / 2  # without a bias

    sign_H = torch.ones(hidden_size, device=device)
    sign_H[1::2] = -1
    # Everything but the weight is a matter of code: asked with weights of 1, so that all ranks find the same.
    small, factor = 1e-3, slope(sign_H, ones) * sign_H
    ratio = float((slope(sign_H * small, ones) * sign_H / factor).square().mean())
    eps = small**2 * (1 - ratio) / max(ratio - small**2, 1e-12)  # ratio = small^2 (1 + eps) / (small^2 + eps)
    eps = float(f"{eps:.1e}") if 1e-9 < eps < 1e-2 else 1e-6
    root = (1 + eps) ** 0.5
    x_H = torch.linspace(-1.0, 2.0, hidden_size, device=device)
    expected = x_H * torch.rsqrt(x_H.square().mean() + eps) * factor * root
    is_rms = torch.allclose(run(x_H, ones), expected, rtol=1e-3, atol=1e-4)
    return NormFunction(slope(sign_H, state) * sign_H * root, eps, is_rms)


@torch.no_grad()
def dense_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight of a projection, `(outputs, inputs)`: as it is, or what a quantized one multiplies by.

    `None` for a module that has none.
    """
    weight = getattr(module, "weight", None)
    is_tensor = isinstance(weight, torch.Tensor)
    if is_tensor and weight.is_floating_point() and weight.element_size() > 1:
        return whole(weight.detach())
    if not isinstance(getattr(module, "in_features", None), int):
        return None
    # Packed in its library's own way: read column by column from what it computes.
    device = weight.device if is_tensor else next((b.device for b in module.buffers()), torch.device("cpu"))
    width = int(module.in_features)
    bias_O = module(torch.zeros(1, width, device=device))[0].float()
    rows = [module(rows_CI).float() - bias_O for rows_CI in torch.eye(width, device=device).split(1024)]
    return torch.cat(rows).T.contiguous()


@dataclass(frozen=True)
class LogitFunction:
    """How logits follow from the backbone's output h: `cap * tanh(scale * head(h) / cap)`, or without a cap.

    Args:
        scale (`float`): of the head's output, with that of its input.
        softcap (`float`, *optional*): the cap.
    """

    scale: float = 1.0
    softcap: float | None = None


@contextmanager
def _replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    """While open, `module` computes `forward`."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _BackboneOutput(MoeModelOutputWithPast):
    """Hidden states, and nothing of what else a family's backbone returns."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@torch.no_grad()
def logit_function(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> LogitFunction:
    """What `model` does around its head, from its own forward with known numbers in place of backbone and head.

    No weight is read, so the answer is the same for shards, quantized weights and weights that are still to come.

    Raises:
        ValueError: if it is more than a factor and a cap.
    """
    device = head.weight.device if isinstance(getattr(head, "weight", None), torch.Tensor) else torch.device("cpu")
    num_logits = model.config.get_text_config().vocab_size
    states_BSH = torch.linspace(-2, 2, NUM_TOKENS * model.config.get_text_config().hidden_size, device=device)
    states_BSH = states_BSH.view(1, NUM_TOKENS, -1)
    # wide enough to see a cap, fine enough to see the slope at 0
    raw_V = torch.linspace(-3, 3, num_logits, device=device)
    raw_V = raw_V.sign() * raw_V.abs().exp2() * raw_V.abs() ** 3
    raw_BSV = raw_V.expand(1, NUM_TOKENS, -1)
    read: list[torch.Tensor] = []

    def backbone(*args, **kwargs):
        return _BackboneOutput(last_hidden_state=states_BSH)

    def projection(hidden, *args, **kwargs):
        read.append(hidden)
        return raw_BSV.clone()

    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=device)
    try:
        with _replaced(decoder, backbone), _replaced(head, projection):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"model ({type(model).__name__}) makes its logits from more than the output of its backbone and its head "
            f"({type(error).__name__}: {error}), which a draft's teacher cannot follow."
        ) from error
    return _fit_logits(type(model).__name__, states_BSH, read, raw_BSV, logits)


def _fit_logits(
    name: str, states_BSH: torch.Tensor, read: list[torch.Tensor], raw_BSV: torch.Tensor, logits: torch.Tensor
) -> LogitFunction:
    refusal = ValueError(
        f"model ({name}) makes its logits from its hidden states by more than a head, a factor and a cap (tanh), which a "
        "draft's teacher cannot follow. Pass a policy of another family, or draft=None."
    )
    if len(read) != 1 or not isinstance(read[0], torch.Tensor):
        raise refusal
    if read[0].shape != states_BSH.shape or logits.shape != raw_BSV.shape:
        raise refusal
    raw, out = raw_BSV[0, 0].double(), logits[0, 0].double()
    before = float(read[0].double().flatten()[-1] / states_BSH.double().flatten()[-1])
    if not torch.allclose(read[0].double(), states_BSH.double() * before, rtol=1e-5, atol=1e-6) or before == 0:
        raise refusal
    nearest = raw.abs().where(raw.abs() > 1e-2, torch.inf).argmin()  # where any cap is still a straight line
    scale, cap = float(out[-1] / raw[-1]), None
    if not torch.allclose(out, raw * scale, rtol=1e-5, atol=1e-6):
        scale = float(out[nearest] / raw[nearest])
        cap = _fit_cap(raw, out, scale)
        scale = float(torch.atanh(out[nearest] / cap) * cap / raw[nearest])
        if not torch.allclose(out, torch.tanh(raw * scale / cap) * cap, rtol=1e-4, atol=1e-4):
            raise refusal
    if before < 0 or scale <= 0:
        raise refusal
    return LogitFunction(float(f"{before * scale:.6g}") if cap else before * scale, cap)


def _fit_cap(raw: torch.Tensor, out: torch.Tensor, scale: float) -> float:
    """The cap at which the largest input gives the largest output, by bisection: tanh(x / cap) * cap grows with cap."""
    low, high = float(out[-1]), float(out[-1]) * 1e6
    for _ in range(200):
        cap = (low * high) ** 0.5
        value = float(torch.tanh(raw[-1] * scale / cap) * cap)
        low, high = (cap, high) if value < float(out[-1]) else (low, cap)
    return float(f"{high:.5g}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, gathered where it is a shard of FSDP2."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
