"""Packed, sharded rows through a Hugging Face causal LM: one `attn_implementation`, with the layout as an argument.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=register_attention())
    loss = model(**packed_inputs(token_ids_T, shard)).loss  # this rank's part: the ranks' sum is the mean over targets

transformers hands keyword arguments that it does not know from the model call down to the attention function, through
PEFT, DDP, FSDP2 and gradient checkpointing, so `shard` reaches every layer without any state in between. Its own masks,
which would take the jumps between a shard's pieces for borders of documents, are replaced by none at all.

Legend: T packed tokens of the row, L tokens of this rank, N query heads, M key/value heads, D head size.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.trunk import trunk_attention

ATTENTION_NAME = "hf_codraft"
LAYER_TYPES = ("full_attention", "sliding_attention")
LAYER_TYPE_FIELDS = ("layer_types", "layers_block_type", "block_types")  # where configs say what their layers are
IGNORED_LABEL = -100  # transformers' and torch's


def register_attention() -> str:
    """Makes the implementation known to transformers and returns its name, for `attn_implementation`.

    Calling it again changes nothing.
    """
    AttentionInterface.register(ATTENTION_NAME, sharded_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, refuse_masks)
    return ATTENTION_NAME


def packed_inputs(
    token_ids_T: torch.Tensor,
    shard: Shard,
    *,
    supervised_T: torch.Tensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
) -> dict[str, Any]:
    """A rank's arguments for a causal LM: its tokens, their positions, and labels shifted over the whole row.

    A token's label is the next one of its segment, whichever rank holds that, and -100 at the end of a segment. The
    labels are `shift_labels`, which transformers' loss takes as they are (it looks for them where `labels` are given).

    A rank that holds no token runs one that nobody sees and that has no label, since transformers' models can't run none
    and every parameter needs a gradient under DDP.

    Args:
        token_ids_T (`torch.Tensor` of shape `(tokens,)`, int64): the whole row, the same on all ranks of the layout, on the
            model's device.
        shard ([`Shard`]): which part is this rank's.
        supervised_T (`torch.Tensor` of shape `(tokens,)`, *optional*): nonzero where a token is a target; by default all.
        num_items_in_batch (`int` or `torch.Tensor` of shape `()`, *optional*): what the sum over this rank's targets is
            divided by; by default the targets of the whole row, or 1 where it has none. Several rows to an optimizer step
            need the targets of all of them, or 1 for the plain sum.

    Returns:
        `dict`: `input_ids`, `position_ids`, `labels` and `shift_labels` of shape `(1, local tokens)`, `shard`,
        `use_cache=False` and `num_items_in_batch`.

        The model's loss is this rank's part: the sum of the ranks' losses (and of their gradients) is the mean over the
        row's targets, and a rank without any has 0. DDP and FSDP average gradients over their ranks, so multiply the loss
        by their number, or give `num_items_in_batch=1` and take `ContextParallelAccelerator.mean_loss`.

    Raises:
        ValueError: if a tensor does not cover the row.
    """
    num_tokens, device = shard.layout.num_tokens, token_ids_T.device
    for name, x_T in (("token_ids_T", token_ids_T), ("supervised_T", supervised_T)):
        if x_T is not None and x_T.shape != (num_tokens,):
            raise ValueError(
                f"{name} has shape {tuple(x_T.shape)}, but the layout has {num_tokens} tokens: pass the whole row, "
                "not this rank's part."
            )
    target_T = token_ids_T
    if supervised_T is not None:
        target_T = token_ids_T.masked_fill(~supervised_T.bool(), IGNORED_LABEL)
    index_L, next_T = shard.index.to(device), shard.layout.ahead(torch.arange(num_tokens), 1)[1].to(device)
    label_T = target_T[next_T].masked_fill(next_T < 0, IGNORED_LABEL)
    if num_items_in_batch is None:
        # Never None: transformers would take each rank's own mean, which is NaN without a target.
        num_items_in_batch = (label_T != IGNORED_LABEL).sum().clamp(min=1)
    token_L, position_L, label_L = token_ids_T[index_L], shard.position_ids(device), label_T[index_L]
    if shard.num_tokens == 0:
        token_L, position_L = token_L.new_zeros(1), position_L.new_zeros(1)
        label_L = label_L.new_full((1,), IGNORED_LABEL)
    return {
        "input_ids": token_L[None],
        "position_ids": position_L[None],
        "labels": label_L[None],
        "shift_labels": label_L[None],
        "shard": shard,
        "use_cache": False,
        "num_items_in_batch": num_items_in_batch,
    }


def refuse_masks(
    *, config: PretrainedConfig, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **kwargs: Any
) -> None:
    """The implementation's mask function: there is no mask, and whoever asks for one is told.

    Raises:
        ValueError: for padding, masks of a model's own, and kinds of layers whose tokens meet outside causal attention.
    """
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} can't be used with {ATTENTION_NAME!r}: packed rows have "
            "no padding. Drop the pads, list the lengths in the PackedLayout and leave attention_mask out."
        )
    if use_vmap or not getattr(config, "is_causal", True):
        raise ValueError(
            f"{config.model_type} asks for a mask beyond causal and sliding-window ones (bidirectional, image blocks or a "
            f"function of its own), which {ATTENTION_NAME!r} does not have; use another attn_implementation."
        )
    for field in LAYER_TYPE_FIELDS:
        others = sorted(set(getattr(config, field, None) or ()) - set(LAYER_TYPES))
        if others:
            raise ValueError(
                f"{field} of {config.model_type} has {others}, but {ATTENTION_NAME!r} shards {list(LAYER_TYPES)} only: in "
                "other layers tokens would meet across segments, or miss what other ranks hold."
            )


def check_isolation(model: nn.Module) -> None:
    """Runs two short segments in one row and raises if one changes the other's logits. Worth a call before any training.

    It asks what the model does and not what its config says, so it finds whatever else lets tokens meet: recurrent and
    convolutional layers, and attention other than this one (transformers drops a `shard` that nobody reads; on one rank its
    own attention tells segments apart by their positions, on several it would not). Under FSDP all ranks call it; no
    gradient is left.

    Args:
        model (`nn.Module`): a causal LM, wrapped or not.

    Raises:
        ValueError: if the logits of the second segment depend on the tokens of the first, or no layer read the shard.
    """
    num_tokens, device, was_training = 3, next(model.parameters()).device, model.training
    shard = Shard(PackedLayout.from_lengths([num_tokens, num_tokens]))
    seconds_LV: list[torch.Tensor] = []
    attended: list[str] = []
    model.eval()
    try:
        with torch.no_grad():
            for first in (0, num_tokens):
                token_ids_T = torch.tensor([*range(first, first + num_tokens), *range(num_tokens)], device=device)
                inputs = packed_inputs(token_ids_T, shard)
                seconds_LV.append(model(**inputs, attended=attended).logits[0, num_tokens:])
    finally:
        model.train(was_training)
    if not attended:
        raise ValueError(
            f"no layer of {type(model).__name__} calls the attention {ATTENTION_NAME!r}, so nothing reads the shard; build "
            "it with attn_implementation=register_attention()."
        )
    change = (seconds_LV[1] - seconds_LV[0]).abs().max().item()
    # Experts round anew where others share their batch; a segment that is seen changes more.
    if not change <= torch.finfo(seconds_LV[0].dtype).eps ** 0.5 * seconds_LV[0].abs().max().item():
        raise ValueError(
            f"{type(model).__name__} lets the segments of a packed row see each other: other tokens in the first changed "
            f"the second's logits by {change:.2g}. Some of its layers mix tokens outside of the attention "
            f"{ATTENTION_NAME!r}; they can't be trained on packed rows."
        )


def sharded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    shard: Shard | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    route: str = "direct",
    keep_remote: bool = False,
    kernel: str = "aten",
    attended: list[str] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Exact causal attention of a packed row that is spread over ranks, as transformers calls it.

    Under `torch.autocast` in its dtype, like torch's own attention.

    Args:
        module (`nn.Module`): the attention layer.
        query (`torch.Tensor` of shape `(1, heads, local tokens, head_dim)`): after RoPE.
        key, value (`torch.Tensor` of shape `(1, kv heads, local tokens, head_dim)`): not expanded.
        attention_mask (`None`): there is none.
        shard ([`Shard`]): the model call's `shard`.
        scaling (`float`, *optional*): of the scores; `head_dim ** -0.5` by default.
        dropout (`float`): 0.
        route, keep_remote, kernel: as in `trunk_attention`; may be given to the model call, `model(..., kernel="eager")`.
        attended (`list[str]`, *optional*): gets the layer's kind; given to the model call by [`check_isolation`].
        kwargs: of these `sliding_window`, `position_ids` and what must be refused are read.

    Returns:
        The output of shape `(1, local tokens, heads, head_dim)`, and no attention weights.

    Raises:
        ValueError: if the layer wants something else than causal or sliding-window attention of the shard's tokens.
    """
    if shard is None:
        raise ValueError(
            f"{type(module).__name__} got no shard: with attn_implementation={ATTENTION_NAME!r} call "
            "model(input_ids, position_ids=..., shard=shard), see packed_inputs. If you did, this model's layers do not "
            "pass keyword arguments on to their attention; use another attn_implementation with it."
        )
    _check_kind(module, attention_mask, dropout=dropout, num_ranks=shard.layout.world, kwargs=kwargs)
    query, key, value = _in_one_dtype(module, query, key, value)
    _check_tokens(module, query, key, value, shard=shard, position_ids=kwargs.get("position_ids"))
    _check_rope(module.config, shard.layout)
    if attended is not None:
        attended.append(type(module).__name__)
    q_LND, k_LMD, v_LMD = (x[0].transpose(0, 1) for x in (query, key, value))
    num_tokens = shard.num_tokens  # without the one that stands in where a rank holds none
    with torch.autocast(query.device.type, enabled=False):  # kernels and merges choose their own widths
        out_LND = trunk_attention(
            q_LND[:num_tokens],
            k_LMD[:num_tokens],
            v_LMD[:num_tokens],
            shard=shard,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=_window(module, kwargs),
            route=route,
            keep_remote=keep_remote,
            kernel=kernel,
        )
    if num_tokens == 0:
        # Joined and not replaced, so that the backward reaches this rank too and its peers do not wait for it.
        out_LND = torch.cat([out_LND, torch.zeros_like(q_LND)])
    return out_LND[None], None


def _in_one_dtype(module: nn.Module, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as a kernel takes them: under autocast in its dtype, else as they are.

    RoPE's cos and sin have the dtype of the residual stream, so under autocast queries and keys come in fp32.
    """
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        tensors = tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in tensors)  # autocast leaves fp64 alone
    if len({x.dtype for x in tensors}) > 1:
        given = ", ".join(f"{name} {x.dtype}" for name, x in zip(("query", "key", "value"), tensors))
        raise ValueError(
            f"{type(module).__name__} has {given}, which must have one dtype: load the whole model in one dtype, or run it "
            "under torch.autocast (accelerate's mixed_precision)."
        )
    return tensors


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Tokens that a query of this layer sees, itself included; `None` for all before it."""
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    else:  # layers that leave the window to the mask alone
        config = module.config
        layer_types = getattr(config, "layer_types", None)
        is_sliding = layer_types is None or layer_types[module.layer_idx] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if is_sliding else None
    return window or None  # Qwen2-MoE writes 0 for none


def _check_kind(
    module: nn.Module, attention_mask: Any, *, dropout: float, num_ranks: int, kwargs: dict[str, Any]
) -> None:
    """What the layer asks for must be plain causal attention."""
    layer = type(module).__name__
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask given to {layer} must be None with {ATTENTION_NAME!r}: packed rows have no padding, and the "
            "layout says who sees whom."
        )
    if dropout:
        raise ValueError(
            f"dropout ({dropout}) of {layer} must be 0 with {ATTENTION_NAME!r}; set config.attention_dropout = 0."
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} of {layer} changes the softmax (soft-capped scores, sinks or biases), which {ATTENTION_NAME!r} "
                "does not compute; use another attn_implementation with this model."
            )
    if kwargs.get("output_attentions"):
        raise ValueError(f"output_attentions must be False: {ATTENTION_NAME!r} never holds attention weights.")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(f"{layer} is not causal, but {ATTENTION_NAME!r} is for causal attention only.")
    if kwargs.get("output_router_logits") and num_ranks > 1:
        raise ValueError(
            f"output_router_logits must be False on {num_ranks} context-parallel ranks: the load-balancing loss would be "
            "each rank's own and not the row's."
        )


def _check_rope(config: PretrainedConfig, layout: PackedLayout) -> None:
    """Frequencies that follow the longest position must be the same on every rank and in every segment.

    transformers takes that position from the tokens of one model call: on a shard it is the rank's own, and in a packed
    row that of the longest segment. Up to the length that the model was made for there is one set of frequencies.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else ropes.values():  # one a kind of layer, in some models
        rope_type = rope.get("rope_type", "default")
        if rope_type == "longrope":
            name, limit = "original_max_position_embeddings", rope["original_max_position_embeddings"]
        elif "dynamic" in rope_type:
            name, limit = "max_position_embeddings", config.max_position_embeddings
        else:
            continue
        longest = max((end - start for start, end in layout.segments), default=0)
        is_alone = layout.world == 1 and len(layout.segments) == 1
        if longest > limit and not is_alone:
            raise ValueError(
                f"rope_type {rope_type!r} of {config.model_type} changes its frequencies beyond {name} ({limit}), and the "
                f"longest of the row's {len(layout.segments)} segments has {longest} tokens: its {layout.world} ranks and "
                "the other segments would get different ones. Leave longer rows out, run each of them alone on one rank, "
                "or use a rope_type that does not depend on the length (yarn, llama3, linear)."
            )


def _check_tokens(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    shard: Shard,
    position_ids: torch.Tensor | None,
) -> None:
    """The tensors must be the shard's tokens, all of them and no others."""
    if query.shape[0] != 1:
        raise ValueError(
            f"batch size ({query.shape[0]}) must be 1 with {ATTENTION_NAME!r}: pack the rows into one (see PackedLayout)."
        )
    num_queries, num_keys, expected = query.shape[2], key.shape[2], max(shard.num_tokens, 1)
    if num_queries != expected:
        raise ValueError(
            f"the model call has {num_queries} tokens, but rank {shard.cp_rank} of the shard holds {shard.num_tokens}; make "
            "its inputs with packed_inputs(token_ids_T, shard)."
        )
    if num_keys != num_queries:
        raise ValueError(
            f"{num_keys} keys came with {num_queries} queries: past_key_values must be empty, since {ATTENTION_NAME!r} is "
            "for training. Generate with another attn_implementation."
        )
    if query.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"{type(module).__name__} has values of {value.shape[-1]} and queries of {query.shape[-1]} numbers a head; "
            f"{ATTENTION_NAME!r} needs them equal."
        )
    # Once a forward: on a GPU the comparison waits for the device.
    if position_ids is not None and shard.num_tokens and module.layer_idx == 0:
        position_L = shard.position_ids(position_ids.device)
        if position_ids.shape != (1, expected) or not torch.equal(position_ids[0], position_L):
            raise ValueError(
                "position_ids are not those of the shard's tokens inside their segments; pass "
                "position_ids=shard.position_ids(device)[None], as packed_inputs does."
            )
