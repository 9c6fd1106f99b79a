"""From TRL's padded rows to a draft's packed row.

Legend: B rows, S padded length, T packed tokens, P left padding included prompt length, C completion length.
"""

import torch

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
from hf_codraft.taps.packed import PackedBatch
from hf_codraft.taps.recorder import Taps


def pack_rows(
    token_ids_BS: torch.Tensor, attention_mask_BS: torch.Tensor, supervised_BS: torch.Tensor, taps: Taps
) -> PackedBatch:
    """Drops every pad and lays the rows one after another; a row without tokens is left out.

    Args:
        token_ids_BS (`torch.Tensor` of shape `(rows, length)`, int64): padded on either side or both.
        attention_mask_BS (`torch.Tensor` of shape `(rows, length)`): nonzero where a token is.
        supervised_BS (`torch.Tensor` of shape `(rows, length)`): nonzero where the policy sampled the token.
        taps ([`Taps`]): hidden states of the same rows.
    """
    if taps.final_BSH.shape[:2] != token_ids_BS.shape:
        raise ValueError(
            f"the policy's hidden states are of shape {tuple(taps.final_BSH.shape[:2])} for token ids of shape "
            f"{tuple(token_ids_BS.shape)}: the model adds or drops positions, and a draft would learn from misplaced ones."
        )
    present_BS = attention_mask_BS.bool()
    lengths = [n for n in present_BS.sum(1).tolist() if n > 0]
    index_T = present_BS.flatten().nonzero()[:, 0]  # once: on a GPU the host waits for it

    def packed(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1).index_select(0, index_T)

    return PackedBatch(
        Shard(PackedLayout.from_lengths(lengths)),
        packed(token_ids_BS),
        packed(supervised_BS).bool(),
        torch.cat([packed(x) for x in taps.hidden_states], -1),
        packed(taps.final_BSH),
    )


def pack_completions(inputs: dict[str, torch.Tensor], taps: Taps) -> PackedBatch:
    """The packed row of one of TRL's GRPO batches: supervised are the tokens of `completion_mask * tool_mask`.

    Args:
        inputs (`dict[str, torch.Tensor]`): TRL's own batch, with `prompt_ids`, `prompt_mask` of shape `(rows, prompt)`
            and `completion_ids`, `completion_mask`, optionally `tool_mask` of shape `(rows, completion)`.
        taps ([`Taps`]): hidden states of the training forward over both, side by side.
    """
    token_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    sampled = inputs["completion_mask"]
    if "tool_mask" in inputs:
        sampled = sampled * inputs["tool_mask"]
    supervised = torch.cat([torch.zeros_like(inputs["prompt_mask"]), sampled], 1)
    return pack_rows(token_ids, attention_mask, supervised, taps)
