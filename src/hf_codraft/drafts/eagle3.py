"""EAGLE-3: one decoder layer that reads the next token's embedding beside three of the policy's hidden states.

Legend: T packed tokens, A anchors, K passes, X concatenated taps, H the draft's hidden width, N query heads,
M key/value heads, D head size, V the draft's vocabulary.

The maths, weight names and config are those of vLLM's `Eagle3LlamaForCausalLM` (0.31, 0.32), which serves the draft;
the training-time test follows EAGLE-3 (arXiv 2503.01840) with the attention pattern of vLLM's cache. Pass d at trunk
position i reads the embedding of token i + d and the state g (the taps in pass 1, its own output afterwards), at RoPE
position i + d - 1, and predicts token i + d + 1:

    token      ... i-1    i     i+1     i+2     i+3
    pass 1                taps  embed   predicts
    pass 2                g^1           embed   predicts
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from hf_codraft.attention.tiled import TiledPasses, tiled_loss
from hf_codraft.attention.trunk import Queries, Trunk
from hf_codraft.drafts.expected import ExpectedAcceptance, expected_acceptance
from hf_codraft.drafts.vocabulary import check_mapping, kept_mask, offsets
from hf_codraft.losses import DraftLoss, Teacher, draft_loss
from hf_codraft.taps.packed import PackedBatch, PolicyWeights

VLLM_METHOD = "eagle3"
ARCHITECTURE = "LlamaForCausalLMEagle3"


def default_tap_ids(num_layers: int) -> tuple[int, ...]:
    """vLLM's default taps `(2, N // 2, N - 3)`: id j is the residual stream after j layers, id 0 the embeddings.

    Below 7 layers those would repeat: the three ids before the last instead.
    """
    if num_layers < 7:
        return tuple(range(max(num_layers - 3, 0), num_layers))
    return (2, num_layers // 2, num_layers - 3)


class Eagle3DraftConfig(LlamaConfig):
    """Config of an EAGLE-3 draft in the plain form that vLLM and SGLang load.

    It is a Llama config (`model_type` stays `llama`, `architectures` is `["LlamaForCausalLMEagle3"]`) with the fields
    below.

    Args:
        draft_vocab_size (`int`, *optional*): ids the draft can propose; `vocab_size` (the policy's) by default.
        eagle_aux_hidden_state_layer_ids (`list[int]`): tapped ids in vLLM's convention (id j = after j layers).
        num_aux_hidden_states (`int`): their number; vLLM sizes `fc` by it.
        target_hidden_size (`int`, *optional*): the policy's hidden size, where it differs from the draft's.
        norm_before_residual (`bool`): take the residual after `hidden_norm` (speculators' default) or before it.
        norm_before_fc (`bool`): one RMSNorm over the concatenated taps before `fc`.
        fc_norm (`bool`): one RMSNorm per tap before `fc`.
        norm_output (`bool`): feed back the state after the final norm (EAGLE-3.1) instead of before it.
        has_own_embeddings (`bool`): the checkpoint carries `embed_tokens` instead of using the policy's.
        base_model_name_or_path (`str`, *optional*): the policy it was trained with, a Hub id or a folder.
        num_speculative_tokens (`int`, *optional*): how many tokens it was trained to draft.
    """

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    num_aux_hidden_states: int = 3
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_own_embeddings: bool = False
    base_model_name_or_path: str | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.architectures = [ARCHITECTURE]
        self.tie_word_embeddings = False
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        if self.eagle_aux_hidden_state_layer_ids is not None:
            self.num_aux_hidden_states = len(self.eagle_aux_hidden_state_layer_ids)
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers of an EAGLE-3 draft must be 1, got {self.num_hidden_layers}; deeper drafts are not "
                "trained by hf-codraft."
            )
        if self.attention_bias or self.mlp_bias:
            raise ValueError("attention_bias and mlp_bias of an EAGLE-3 draft must be false; it has no bias weights.")
        if getattr(self, "use_sliding_window", None) is False:
            self.sliding_window = None  # Qwen's way of writing full attention
        if getattr(self, "sliding_window", None) is not None:
            raise ValueError(
                f"sliding_window ({self.sliding_window}) of an EAGLE-3 draft is not supported; its attention is trained full."
            )
        self._check_rotary_width()
        if not self.has_own_embeddings and self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"a draft of hidden size {self.hidden_size} cannot use the embeddings of a policy of hidden size "
                f"{self.target_hidden_size}; give it its own (has_own_embeddings) or make the sizes equal."
            )

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of every head that RoPE turns; the others pass unturned (`partial_rotary_factor`)."""
        return int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0))

    def _check_rotary_width(self) -> None:
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor ({self.rope_parameters.get('partial_rotary_factor', 1.0)}) of head_dim ({self.head_dim}) "
                f"must give an even number of 2..{self.head_dim} dimensions, not {self.rotary_dim}."
            )
        for name in ("short_factor", "long_factor"):
            factors = self.rope_parameters.get(name)
            if factors is not None and len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"rope_parameters[{name!r}] must hold half as many numbers as RoPE turns dimensions ({self.rotary_dim} of "
                    f"head_dim {self.head_dim}), got {len(factors)}; set partial_rotary_factor or correct the list."
                )


class _RotaryEmbedding(LlamaRotaryEmbedding):
    """transformers' rotary embedding whose inverse frequencies stay fp32 when the draft is cast to bf16.

    Its type "default" knows `partial_rotary_factor` too, as all others do and as vLLM reads it.

    `from_pretrained` finds by the name "RotaryEmbedding" what it must compute anew; no checkpoint holds these buffers.
    """

    @staticmethod
    def compute_default_rope_parameters(
        config: Eagle3DraftConfig, device=None, **kwargs
    ) -> tuple[torch.Tensor, float]:
        dim, theta = config.rotary_dim, config.rope_parameters["rope_theta"]
        return (1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)).to(device), 1.0

    def _apply(self, fn, recurse=True):
        inv_freq, original = self.inv_freq, self.original_inv_freq
        super()._apply(fn, recurse)
        if not inv_freq.is_meta:
            self.inv_freq = inv_freq.to(self.inv_freq.device)
            self.original_inv_freq = original.to(self.inv_freq.device)
        return self


class _Attention(nn.Module):
    def __init__(self, config: Eagle3DraftConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width = 2 * config.hidden_size  # embedding and state side by side
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def query(self, x_AC: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._turn(self._heads(self.q_proj(x_AC)), rotary)

    def key_value(
        self, x_TC: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._heads(self.k_proj(x_TC)), self._heads(self.v_proj(x_TC))
        return self._turn(k, rotary), v

    def _turn(self, x_TND: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        width = rotary[0].shape[-1]
        turned = apply_rotary_pos_emb(x_TND[..., :width], x_TND[:, :1, :width], *rotary)[0]
        # under autocast the rotary factors have the state's dtype, which may differ from pass to pass
        return (
            torch.cat([turned.to(x_TND.dtype), x_TND[..., width:]], -1)
            if width < self.head_dim
            else turned.to(x_TND.dtype)
        )


class _Layer(nn.Module):
    def __init__(self, config: Eagle3DraftConfig):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def read(self, embedding: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads (`2 * hidden` wide) and the residual it is added to."""
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        return torch.cat([self.input_layernorm(embedding), normed], -1), residual

    def finish(self, residual: torch.Tensor, attended_AND: torch.Tensor) -> torch.Tensor:
        residual = residual + self.self_attn.o_proj(attended_AND.flatten(1))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Draft(PreTrainedModel):
    """An EAGLE-3 draft that trains here and is served by vLLM under the same weight names.

    It owns `fc`, one layer, the final norm and the head (with `d2t` and `t2d` when its vocabulary is reduced); it
    borrows the policy's input embeddings.
    """

    config_class = Eagle3DraftConfig
    base_model_prefix = ""

    def __init__(self, config: Eagle3DraftConfig):
        super().__init__(config)
        taps_width = config.num_aux_hidden_states * config.target_hidden_size
        self.fc = nn.Linear(taps_width, config.hidden_size, bias=False)
        self.input_norm = LlamaRMSNorm(taps_width, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(
                LlamaRMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_aux_hidden_states)
            )
            if config.fc_norm
            else None
        )
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = None
        if config.has_own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False)
        if self.has_reduced_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary_emb = _RotaryEmbedding(config)
        self.post_init()

    @property
    def has_reduced_vocab(self) -> bool:
        return self.config.draft_vocab_size != self.config.vocab_size

    @property
    def is_vocab_open(self) -> bool:
        """Whether the ids of a reduced vocabulary are still to be chosen (see [`set_vocabulary`])."""
        return self.has_reduced_vocab and not bool(self.t2d.any() or self.d2t.any())

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return tuple(self.config.eagle_aux_hidden_state_layer_ids)

    @property
    def kept_ids(self) -> torch.Tensor:
        """Target ids of the draft's ids, `(draft_vocab,)`."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids + self.d2t if self.has_reduced_vocab else ids

    @torch.no_grad()
    def set_vocabulary(self, kept_ids: torch.Tensor, policy: PolicyWeights) -> None:
        """Chooses the ids the draft proposes and starts its head from the policy's rows of them.

        Args:
            kept_ids (`torch.Tensor` of shape `(draft_vocab,)`, int64): ascending target ids.
            policy ([`PolicyWeights`]): the policy whose head rows are copied.
        """
        if len(kept_ids) != self.config.draft_vocab_size:
            raise ValueError(f"kept_ids must hold {self.config.draft_vocab_size} ids, got {len(kept_ids)}.")
        kept_ids = kept_ids.to(self.lm_head.weight.device)
        if self.has_reduced_vocab:
            self.d2t.copy_(offsets(kept_ids))
            self.t2d.copy_(kept_mask(kept_ids, self.config.vocab_size))
        rows = policy.head_VH[kept_ids.to(policy.head_VH.device)]
        if rows.shape[1] == self.config.hidden_size:
            self.lm_head.weight.copy_(rows)

    @torch.no_grad()
    def init_from_policy(self, layer: dict[str, torch.Tensor], norm_weight: torch.Tensor) -> list[str]:
        """Starts the layer as the policy's last one and `fc` as the identity on the last tap.

        Args:
            layer (`dict[str, torch.Tensor]`): weights of the policy's last decoder layer by their Llama names;
                a weight whose shape does not fit is left as it is.
            norm_weight (`torch.Tensor` of shape `(hidden,)`): weight of the policy's final norm.

        Returns:
            `list[str]`: names of the weights that were left as they are.
        """
        hidden = self.config.hidden_size
        own = dict(self.midlayer.named_parameters())
        left = {name for name in own if name not in ("hidden_norm.weight", "input_layernorm.weight")}
        for name, weight in layer.items():
            if name.startswith("self_attn.") and name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                if name in own and weight.shape == (own[name].shape[0], hidden):
                    own[name].zero_()
                    own[name][:, hidden:] = weight  # reads the state, not yet the embedding
                    left.discard(name)
            elif name in own and own[name].shape == weight.shape:
                own[name].copy_(weight)
                left.discard(name)
        left = {f"midlayer.{name}" for name in left}
        if norm_weight.shape == self.norm.weight.shape:
            self.norm.weight.copy_(norm_weight)
        else:
            left.add("norm.weight")
        if "input_layernorm.weight" in layer and layer["input_layernorm.weight"].shape == (hidden,):
            self.midlayer.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
            self.midlayer.input_layernorm.weight.fill_(1.0)
        else:
            left.add("midlayer.hidden_norm.weight")
        if self.config.target_hidden_size == hidden:
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:] = torch.eye(hidden)
        return sorted(left)

    def combine_taps(self, taps_TX: torch.Tensor) -> torch.Tensor:
        """The state of pass 1 from the policy's taps: `(tokens, hidden)`."""
        if self.input_norm is not None:
            taps_TX = self.input_norm(taps_TX)
        if self.fc_norm is not None:
            chunks = taps_TX.chunk(len(self.fc_norm), -1)
            taps_TX = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(taps_TX)

    def embed(self, token_ids: torch.Tensor, policy: PolicyWeights) -> torch.Tensor:
        weight = policy.embedding_VH if self.embed_tokens is None else self.embed_tokens.weight
        return F.embedding(token_ids, weight).to(self.fc.weight.dtype)

    def _start(
        self, batch: PackedBatch, policy: PolicyWeights, ahead: "_Ahead", rows: torch.Tensor | slice
    ) -> "_PassInput":
        """What pass 1 reads at some of this rank's tokens."""
        state = self.combine_taps(batch.taps_TX[rows].to(self.fc.weight.dtype))
        read, residual = self.midlayer.read(self.embed(ahead.token_ids(1, rows), policy), state)
        rotary = self._rotary(state, ahead, rows, 1)
        return _PassInput(state, read, residual, rotary)

    def _rotary(
        self, state: torch.Tensor, ahead: "_Ahead", rows: torch.Tensor | slice, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary factors of pass `step` at some of this rank's tokens.

        Types "dynamic" and "longrope" choose their frequencies by the largest position that they are given, so they are
        always given the row's: every rank, tile and pass must turn keys and queries alike.
        """
        positions = torch.cat([ahead.position_ids_T[rows] + step - 1, ahead.last_position])
        cos, sin = self.rotary_emb(state, positions[None])
        return cos[0, :-1], sin[0, :-1]

    def _run_passes(
        self,
        trunk: Trunk,
        queries: Queries,
        first: "_PassInput",
        policy: PolicyWeights,
        ahead: "_Ahead",
        rows_A: torch.Tensor,
        num_passes: int,
    ) -> torch.Tensor:
        """The states after the final norm of all passes at some anchors: `(passes, anchors, hidden)`."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        state, read, residual, rotary = first.state, first.read, first.residual, first.rotary
        branch_k: list[torch.Tensor] = []
        branch_v: list[torch.Tensor] = []
        outputs = []
        for step in range(1, num_passes + 1):
            if step > 1:
                read, residual = layer.read(self.embed(ahead.token_ids(step, rows_A), policy), state)
                rotary = self._rotary(state, ahead, rows_A, step)
                k, v = attention.key_value(read, rotary)
                branch_k.append(k)
                branch_v.append(v)
            q = attention.query(read, rotary)
            attended = trunk.attend(q, queries, branch_k=branch_k, branch_v=branch_v)
            prenorm = layer.finish(residual, attended)
            hidden = self.norm(prenorm)
            outputs.append(hidden)
            state = hidden if self.config.norm_output else prenorm
        return torch.stack(outputs)

    def forward(
        self,
        batch: PackedBatch,
        policy: PolicyWeights,
        anchors_A: torch.Tensor,
        *,
        num_passes: int,
        kernel: str = "aten",
    ) -> torch.Tensor:
        """The draft's states after its final norm, pass by pass: `(passes, anchors, hidden)`.

        Args:
            batch ([`PackedBatch`]): text and taps.
            policy ([`PolicyWeights`]): lends the embeddings.
            anchors_A (`torch.Tensor` of shape `(anchors,)`, int64): ascending rows of the batch that draft.
            num_passes (`int`): passes of the training-time test; the number of tokens drafted in serving.
            kernel (`str`): of the attention, see `attention.kernels`.
        """
        ahead = _Ahead.of(batch, num_passes)
        return self._forward(batch, policy, ahead, anchors_A, num_passes, max_kept_bytes=None, kernel=kernel)

    def _forward(
        self,
        batch: PackedBatch,
        policy: PolicyWeights,
        ahead: "_Ahead",
        anchors_A: torch.Tensor,
        num_passes: int,
        *,
        max_kept_bytes: int | None,
        kernel: str,
    ) -> torch.Tensor:
        attention = self.midlayer.self_attn
        start = self._start(batch, policy, ahead, slice(None))
        k_TMD, v_TMD = attention.key_value(start.read, start.rotary)
        trunk = Trunk(
            k_TMD,
            v_TMD,
            shard=batch.shard,
            scale=attention.head_dim**-0.5,
            max_kept_bytes=max_kept_bytes,
            kernel=kernel,
        )
        return self._run_passes(
            trunk, trunk.queries(anchors_A), start.at(anchors_A), policy, ahead, anchors_A, num_passes
        )

    def compute_loss(
        self,
        batch: PackedBatch,
        policy: PolicyWeights,
        *,
        num_passes: int,
        temperature: float = 1.0,
        loss_type: str = "kl",
        pass_weights: tuple[float, ...] | None = None,
        chunk_size: int | None = 512,
        max_kept_bytes: int | None = None,
        kernel: str = "aten",
        accumulates: bool = False,
    ) -> DraftLoss:
        """Loss of the training-time test over every supervised position of a batch (see [`losses.draft_loss`]).

        Anchor i is supervised in pass d where tokens i + 1 .. i + d + 1 all are (so no branch crosses a hole or a
        segment border); the teacher is the policy's distribution at position i + d.

        With more anchors than `chunk_size`, tiles of so many run through all passes, the loss and the backward, one
        after another (`attention.tiled`): the same gradient, in memory that hardly grows with the row. On a sharded row
        the sums are this rank's, every rank must call this and the backward, and with a `chunk_size` all ranks run in
        tiles, however few anchors one has: tiles exchange gradients here, the whole row does in the backward.

        Args:
            batch ([`PackedBatch`]): text and taps.
            policy ([`PolicyWeights`]): lends the embeddings and is the teacher.
            num_passes (`int`): passes of the training-time test.
            temperature, loss_type, pass_weights: see [`losses.draft_loss`].
            chunk_size (`int`, *optional*): anchors at a time; `None` for all at once.
            max_kept_bytes (`int`, *optional*): bytes that a rank may spend on other ranks' keys and their gradients; what
                does not fit comes anew in every pass (see [`Trunk`]). All is kept by default.
            kernel (`str`): of the attention, see `attention.kernels`.
            accumulates (`bool`): add the gradient to the parameters' `.grad`, which must be there, in place and without
                copies of it; the loss that is returned has no graph.
        """
        head = self.lm_head.weight
        into_VH = head.grad if accumulates and chunk_size is not None and head.requires_grad else None
        ahead = _Ahead.of(batch, num_passes)
        mask_KT = ahead.mask_KT
        anchors_A = mask_KT[0].nonzero()[:, 0]
        kept_ids = self.kept_ids
        teacher = Teacher(
            ahead.hidden_EH.to(policy.head_VH.dtype),
            policy.head_VH[kept_ids] if self.has_reduced_vocab else policy.head_VH,
            None if policy.head_bias_V is None else policy.head_bias_V[kept_ids],
            temperature=temperature,
            scale=policy.logit_scale,
            softcap=policy.logit_softcap,
        )
        steps = range(1, num_passes + 1)
        num_covered = num_supervised = mask_KT[0].sum()
        if self.has_reduced_vocab:
            num_covered = (mask_KT[0] & self.t2d[ahead.token_ids(2)]).sum()
            if loss_type == "ce":  # a token outside the draft's vocabulary has no cross-entropy
                mask_KT = mask_KT & torch.stack([self.t2d[ahead.token_ids(step + 1)] for step in steps])

        def loss_at(rows_A: torch.Tensor, hidden_KAH: torch.Tensor) -> DraftLoss:
            token_ids_KA = torch.stack([ahead.token_ids(step + 1, rows_A) for step in steps])
            if self.has_reduced_vocab:
                token_ids_KA = torch.searchsorted(kept_ids, token_ids_KA).clamp(max=len(kept_ids) - 1)
            return draft_loss(
                hidden_KAH,
                head if into_VH is None else head.detach(),
                teacher=teacher,
                index_KA=ahead.rows_KT[1 : num_passes + 1, rows_A].clamp(min=0),
                token_ids_KA=token_ids_KA,
                mask_KA=mask_KT[:, rows_A],
                loss_type=loss_type,
                pass_weights=pass_weights,
                chunk_size=chunk_size,
                into_VH=into_VH,
            )

        # a rank's own number of anchors may decide only where no other rank waits for this one's gradients
        if chunk_size is None or (batch.layout.world == 1 and len(anchors_A) <= chunk_size):
            hidden_KAH = self._forward(
                batch, policy, ahead, anchors_A, num_passes, max_kept_bytes=max_kept_bytes, kernel=kernel
            )
            loss = loss_at(anchors_A, hidden_KAH)
            total, loss_sum_K, accept_sum_K = loss.loss, loss.loss_sum_K, loss.accept_sum_K
            if accumulates:
                total.backward()
                total = total.detach()
        else:
            attention = self.midlayer.self_attn

            def project(tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
                start = self._start(batch, policy, ahead, tile)
                return attention.key_value(start.read, start.rotary)

            def tile_loss(trunk: Trunk, queries: Queries, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
                rows_A = anchors_A[tile]
                first = self._start(batch, policy, ahead, rows_A)
                hidden_KAH = self._run_passes(trunk, queries, first, policy, ahead, rows_A, num_passes)
                loss = loss_at(rows_A, hidden_KAH)
                return loss.loss, torch.stack([loss.loss_sum_K, loss.accept_sum_K])

            passes = TiledPasses(
                project, tile_loss, batch.shard, anchors_A, tile_size=chunk_size, scale=attention.head_dim**-0.5,
                max_kept_bytes=max_kept_bytes, kernel=kernel,
            )  # fmt: skip
            total, (loss_sum_K, accept_sum_K) = tiled_loss(passes, list(self.parameters()), accumulates=accumulates)
        return DraftLoss(
            total, loss_sum_K, accept_sum_K, mask_KT.sum(1), num_covered=num_covered, num_supervised=num_supervised
        )

    @torch.no_grad()
    def expected_acceptance(
        self,
        batch: PackedBatch,
        policy: PolicyWeights,
        *,
        num_passes: int,
        log_p_T: torch.Tensor,
        temperature: float = 1.0,
        is_greedy: bool = False,
        chunk_size: int = 512,
    ) -> ExpectedAcceptance:
        """What the engine would accept of this draft on the batch's completions (see [`drafts.expected`]).

        It costs a forward of the draft without its backward.

        Args:
            batch ([`PackedBatch`]): text and taps of whole rows (not sharded).
            policy ([`PolicyWeights`]): lends the embeddings.
            num_passes (`int`): tokens drafted before a verification.
            log_p_T (`torch.Tensor` of shape `(tokens,)`): the policy's, see [`sampled_log_probs`]; the same for all drafts.
            temperature (`float`): of the rollouts.
            is_greedy (`bool`): the draft guesses its most probable token instead of drawing one.
            chunk_size (`int`): positions whose logits are made at a time.
        """
        ahead = _Ahead.of(batch, num_passes)
        mask_KT, steps = ahead.mask_KT, range(1, num_passes + 1)
        accept_KT = torch.zeros(mask_KT.shape, dtype=torch.float32, device=mask_KT.device)
        anchors_A = mask_KT[0].nonzero()[:, 0]
        if len(anchors_A):
            hidden_KAH = self.forward(batch, policy, anchors_A, num_passes=num_passes)
            token_ids_KA = torch.stack([ahead.token_ids(step + 1, anchors_A) for step in steps])
            rows_KA = ahead.rows_KT[2 : num_passes + 2, anchors_A].clamp(min=0)
            for k, (hidden_AH, token_ids_A, rows_A) in enumerate(zip(hidden_KAH, token_ids_KA, rows_KA, strict=True)):
                parts = zip(hidden_AH.split(chunk_size), token_ids_A.split(chunk_size), strict=True)
                log_q_A = torch.cat([self._log_q_sampled(*part, temperature, is_greedy=is_greedy) for part in parts])
                log_ratio_A = log_q_A if is_greedy else log_q_A - log_p_T[rows_A]
                accept_KT[k, anchors_A] = log_ratio_A.clamp(max=0.0).exp() * mask_KT[k, anchors_A]
        starts = [start for start, end in batch.layout.segments if start < end]
        return expected_acceptance(accept_KT, batch.supervised_T, starts)

    def _log_q_sampled(
        self, hidden_CH: torch.Tensor, token_ids_C: torch.Tensor, temperature: float, *, is_greedy: bool
    ) -> torch.Tensor:
        """Log-probability with which the draft guesses these tokens; -inf for what it cannot propose."""
        logits_CV = F.linear(hidden_CH, self.lm_head.weight).float() / temperature
        kept_ids = self.kept_ids
        index_C = torch.searchsorted(kept_ids, token_ids_C).clamp(max=len(kept_ids) - 1)
        if is_greedy:
            is_guessed_C = kept_ids[logits_CV.argmax(-1)] == token_ids_C
            return torch.where(is_guessed_C, 0.0, -torch.inf)
        log_q_C = logits_CV.gather(1, index_C[:, None])[:, 0] - logits_CV.logsumexp(-1)
        return log_q_C.masked_fill(kept_ids[index_C] != token_ids_C, -torch.inf)

    def serving_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that vLLM's drafter takes, by checkpoint name."""
        for name, tensor in self.state_dict().items():
            if name != "t2d":
                yield name, tensor

    def check_vocabulary(self) -> None:
        """Raises a `ValueError` where `d2t` does not map into the policy's vocabulary; `t2d` is made to follow it."""
        if not self.has_reduced_vocab or self.is_vocab_open:
            return
        check_mapping(self.d2t, self.config.vocab_size)
        self.d2t = self.d2t.long()
        mask = kept_mask(self.kept_ids, self.config.vocab_size)
        if not self.d2t.any() and not torch.equal(self.t2d.bool(), mask):
            raise ValueError(
                f"d2t is all zeros, which would mean the ids 0..{self.config.draft_vocab_size - 1}, but t2d keeps others: the "
                "mapping of the draft's ids was lost. Convert or train the draft again."
            )
        self.t2d = mask


@dataclass(frozen=True)
class _PassInput:
    """What a pass reads at some tokens: the state, what attention reads, its residual, the rotary factors."""

    state: torch.Tensor
    read: torch.Tensor
    residual: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]

    def at(self, rows: torch.Tensor) -> "_PassInput":
        return _PassInput(
            self.state[rows], self.read[rows], self.residual[rows], (self.rotary[0][rows], self.rotary[1][rows])
        )


@dataclass(frozen=True)
class _Ahead:
    """What lies a few tokens after each of this rank's, on whatever rank it is.

    Args:
        rows_KT (`torch.Tensor` of shape `(passes + 2, tokens)`, int64): row of the token 0, 1, ... after each in the
            tensors below, -1 past the end of its segment.
        token_ids_E, supervised_E, hidden_EH: the batch's own rows and, behind them, those borrowed of other ranks.
        position_ids_T (`torch.Tensor` of shape `(tokens,)`, int64): positions inside the segments.
        last_position (`torch.Tensor` of shape `(1,)`, int64): the largest that any pass can stand at, on any rank.
    """

    rows_KT: torch.Tensor
    token_ids_E: torch.Tensor
    supervised_E: torch.Tensor
    hidden_EH: torch.Tensor
    position_ids_T: torch.Tensor
    last_position: torch.Tensor

    @classmethod
    def of(cls, batch: PackedBatch, num_passes: int) -> "_Ahead":
        """Collective on a sharded row."""
        device = batch.token_ids_T.device
        tensors = (batch.token_ids_T, batch.supervised_T, batch.hidden_TH)
        token_ids_E, supervised_E, hidden_EH = batch.shard.extend(tensors, num_passes + 1)
        rows_KT = batch.shard.ahead(num_passes + 1, device)
        longest = max((end - start for start, end in batch.layout.segments), default=1)
        last_position = torch.tensor([longest + num_passes - 2], device=device)
        return cls(rows_KT, token_ids_E, supervised_E, hidden_EH, batch.shard.position_ids(device), last_position)

    def token_ids(self, step: int, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The token `step` after each of some rows; any id past the end of a segment, where nothing is supervised."""
        return self.token_ids_E[self.rows_KT[step, rows].clamp(min=0)]

    @property
    def mask_KT(self) -> torch.Tensor:
        """Which tokens are supervised in which pass: `(passes, tokens)`, bool."""
        rows = []
        alive_T = torch.ones_like(self.rows_KT[0], dtype=torch.bool)
        for rows_T in self.rows_KT[1:]:
            alive_T = alive_T & (rows_T >= 0) & self.supervised_E[rows_T.clamp(min=0)]
            rows.append(alive_T)
        return torch.stack(rows[1:])  # the token after an anchor is an input, not a prediction


def supervised_passes(batch: PackedBatch, num_passes: int) -> torch.Tensor:
    """Which of a batch's tokens are supervised in which pass: `(passes, tokens)`, bool. Collective on a sharded row."""
    return _Ahead.of(batch, num_passes).mask_KT
