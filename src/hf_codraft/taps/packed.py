"""What a draft learns from: a packed row of text with the policy's view of it.

Legend: T packed tokens, X concatenated taps, H hidden width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard


@dataclass(frozen=True)
class PackedBatch:
    """One rank's part of a packed row of text, with what the policy thought of it; made by `policy.packing`, read by drafts.

    Every tensor is detached from the policy: no gradient of a draft's loss can reach it.

    Args:
        shard ([`Shard`]): where each document of the row lies, and which of its tokens these are.
        token_ids_T (`torch.Tensor` of shape `(tokens,)`, int64): the text.
        supervised_T (`torch.Tensor` of shape `(tokens,)`, bool): tokens that the policy itself sampled (and, in a
            warm start, any token that may be learnt from). A draft is never asked to predict another one.
        taps_TX (`torch.Tensor` of shape `(tokens, taps * hidden)`): the policy's tapped hidden states.
        hidden_TH (`torch.Tensor` of shape `(tokens, hidden)`): its hidden states after the final norm.
    """

    shard: Shard
    token_ids_T: torch.Tensor
    supervised_T: torch.Tensor
    taps_TX: torch.Tensor
    hidden_TH: torch.Tensor

    @property
    def layout(self) -> PackedLayout:
        """Of the whole row."""
        return self.shard.layout

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.token_ids_T, self.supervised_T, self.taps_TX, self.hidden_TH))

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch on another device; its shard is a new one, since a shard remembers tensors where it was used."""
        parts = (self.token_ids_T, self.supervised_T, self.taps_TX, self.hidden_TH)
        return PackedBatch(Shard(self.layout), *(x.to(device) for x in parts))

    def segments(self) -> list["PackedBatch"]:
        """Every segment of a row that is not sharded, as a batch of its own (copies, which hold no other's memory)."""
        if self.layout.world != 1:
            raise ValueError(f"a row that is sharded over {self.layout.world} ranks cannot be cut into its segments.")
        segments = []
        for start, end in self.layout.segments:
            shard = Shard(PackedLayout.from_lengths([end - start]))
            parts = (self.token_ids_T, self.supervised_T, self.taps_TX, self.hidden_TH)
            segments.append(PackedBatch(shard, *(x[start:end].clone() for x in parts)))
        return segments

    @classmethod
    def join(cls, batches: Sequence["PackedBatch"]) -> "PackedBatch":
        """One packed row of several, none of them sharded, one after another; at least one."""
        lengths = [end - start for batch in batches for start, end in batch.layout.segments]
        parts = [(b.token_ids_T, b.supervised_T, b.taps_TX, b.hidden_TH) for b in batches]
        return cls(Shard(PackedLayout.from_lengths(lengths)), *(torch.cat(column) for column in zip(*parts)))


@dataclass(frozen=True)
class PolicyWeights:
    """The policy's live tensors that a draft borrows, detached; made by `policy.anatomy`, read by drafts.

    Args:
        embedding_VH (`torch.Tensor` of shape `(vocab, hidden)`): input embeddings, adapters merged.
        head_VH (`torch.Tensor` of shape `(vocab, hidden)`): output head, adapters merged; may be the same tensor.
        head_bias_V (`torch.Tensor` of shape `(vocab,)`, *optional*): bias of the head.
        logit_scale (`float`): factor of the logits.
        logit_softcap (`float`, *optional*): cap of the logits.
    """

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    head_bias_V: torch.Tensor | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def copied(self) -> "PolicyWeights":
        """The same in memory of its own, which later steps of the policy leave alone; tied tensors stay one."""
        embedding = self.embedding_VH.clone()
        is_tied = self.head_VH is self.embedding_VH
        return replace(
            self,
            embedding_VH=embedding,
            head_VH=embedding if is_tied else self.head_VH.clone(),
            head_bias_V=None if self.head_bias_V is None else self.head_bias_V.clone(),
        )
