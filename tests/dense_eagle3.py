"""EAGLE-3's training-time test by dense masks and explicit softmax, and a draft's loss on ranks that are threads.

The oracle is plain functions on weights by name; it shares no code with the draft. Used by `unit/drafts/test_eagle3.py`
and `distributed/test_context_attention.py`.
"""

import math
import threading
from dataclasses import dataclass

import torch
from attention_cases import PLANS, recorded
from ranks import HIDDEN

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import Transport, run_local_ranks
from hf_codraft.taps.packed import PackedBatch


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x_TND, position_T, theta=10000.0):
    dim = x_TND.shape[-1]
    frequency = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    angle = position_T.float()[:, None] * frequency  # fp32 as in transformers
    cos, sin = (x.to(x_TND.dtype)[:, None].repeat(1, 1, 2) for x in (angle.cos(), angle.sin()))
    first, second = x_TND.chunk(2, -1)
    return x_TND * cos + torch.cat([-second, first], -1) * sin


def reference_hidden(draft, batch, policy, num_passes) -> list[torch.Tensor]:
    """The states after the final norm at every trunk position, pass by pass, each with a `[T x d T]` mask."""
    weights, config = dict(draft.named_parameters()), draft.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    tokens = batch.layout.num_tokens
    segment = torch.tensor([number for number, (s, e) in enumerate(batch.layout.segments) for _ in range(e - s)])
    position = torch.tensor([i for s, e in batch.layout.segments for i in range(e - s)])
    index = torch.arange(tokens)
    trunk_mask = (segment[:, None] == segment) & (index[:, None] >= index)
    own_mask = torch.eye(tokens, dtype=torch.bool)

    state = batch.taps_TX
    if config.norm_before_fc:
        state = rms(state, weights["input_norm.weight"])
    if config.fc_norm:
        parts = state.split(HIDDEN, -1)
        state = torch.cat([rms(x, weights[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], -1)
    state = state @ weights["fc.weight"].T
    keys, values, masks, outputs = [], [], [], []
    for d in range(1, num_passes + 1):
        ends = [end for start, end in batch.layout.segments for _ in range(start, end)]
        read_ids = torch.tensor([batch.token_ids_T[i + d if i + d < ends[i] else 0] for i in range(tokens)])
        embedded = rms(policy.embedding_VH[read_ids], weights["midlayer.input_layernorm.weight"])
        normed = rms(state, weights["midlayer.hidden_norm.weight"])
        residual = normed if config.norm_before_residual else state
        read = torch.cat([embedded, normed], -1)
        q, k, v = (
            (read @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(tokens, count, dim)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q, position + d - 1), rotate(k, position + d - 1)
        keys.append(k.repeat_interleave(heads // kv_heads, 1))
        values.append(v.repeat_interleave(heads // kv_heads, 1))
        masks.append(trunk_mask if d == 1 else own_mask)
        scores = torch.einsum("qnd,knd->nqk", q, torch.cat(keys)) / math.sqrt(dim)
        weight = scores.masked_fill(~torch.cat(masks, 1), -torch.inf).exp()
        weight = weight / weight.sum(-1, keepdim=True)
        attended = torch.einsum("nqk,knd->qnd", weight, torch.cat(values)).reshape(tokens, heads * dim)
        residual = residual + attended @ weights["midlayer.self_attn.o_proj.weight"].T
        x = rms(residual, weights["midlayer.post_attention_layernorm.weight"])
        gate, up = (x @ weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        prenorm = residual + (gate * torch.sigmoid(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T
        outputs.append(rms(prenorm, weights["norm.weight"]))
        state = outputs[-1] if config.norm_output else prenorm
    return outputs


def is_supervised(batch, i, d) -> bool:
    """Tokens i + 1 .. i + d + 1 all lie in the segment of i and were all sampled by the policy."""
    end = next(end for start, end in batch.layout.segments if start <= i < end)
    return i + d + 1 < end and all(batch.supervised_T[i + step] for step in range(1, d + 2))


def reference_loss(draft, batch, policy, *, num_passes, loss_type, temperature, pass_weights):
    """Weighted loss and, by pass, loss sum, acceptance sum and count."""
    kept = draft.kept_ids
    total, sums, accepts, counts = 0.0, [], [], []
    hidden = reference_hidden(draft, batch, policy, num_passes)
    for d in range(1, num_passes + 1):
        loss_sum, accept_sum, count = torch.zeros(2, dtype=torch.float64).sum(), 0.0, 0
        for i in range(batch.layout.num_tokens):
            if not is_supervised(batch, i, d):
                continue
            target = int(batch.token_ids_T[i + d + 1])
            if loss_type == "ce" and target not in kept.tolist():
                continue
            p = torch.softmax(batch.hidden_TH[i + d] @ policy.head_VH[kept].T / temperature, -1)
            q = torch.softmax(hidden[d - 1][i] @ draft.lm_head.weight.T / temperature, -1)
            kl, tv = (p * (p / q).log()).sum(), (p - q).abs().sum() / 2
            mix = torch.exp(-3 * (1 - tv)).detach()
            loss = {"kl": kl, "tv": tv, "lk": mix * kl + (1 - mix) * tv}.get(loss_type)
            loss_sum = loss_sum + (-q[kept.tolist().index(target)].log() if loss is None else loss)
            accept_sum += torch.minimum(p, q).sum().item()
            count += 1
        total = total + (pass_weights[d - 1] if pass_weights else 1.0) * loss_sum
        sums.append(loss_sum.item())
        accepts.append(accept_sum)
        counts.append(count)
    return total, sums, accepts, counts


# A draft on a sharded row


def shard_batch(batch: PackedBatch, layout: PackedLayout, transport: Transport) -> PackedBatch:
    """One rank's part of a batch."""
    fields = (batch.token_ids_T, batch.supervised_T, batch.taps_TX, batch.hidden_TH)
    own = [layout.shard(x, transport.rank) for x in fields]
    return PackedBatch(Shard(layout, transport.rank, transport), *own)


@dataclass(frozen=True)
class ShardedLoss:
    """Sums over the ranks, the bytes that all of them sent, and what the first has exchanged, in order.

    Gradients are those of the weights that ask for one.
    """

    loss_sum_K: torch.Tensor
    accept_sum_K: torch.Tensor
    count_K: torch.Tensor
    grads: list[torch.Tensor]
    num_bytes: int
    exchanges: list[str]


def sharded_loss(
    draft, batch, policy, *, world: int, plan: str = "zigzag", is_grad_enabled: bool = True, **options
) -> ShardedLoss:
    """A draft's loss and gradients on `world` threads; `options` are those of `compute_loss`.

    Between the loss and the backward all ranks wait for one another, as they do where a training loop adds up counts; and
    all must make the same exchanges in the same order.
    """
    layout = PLANS[plan](batch.layout.cu_seqlens, world)
    weights, everyone = [p for p in draft.parameters() if p.requires_grad], threading.Barrier(world)

    def one_rank(transport):
        calls = recorded(transport)
        with torch.set_grad_enabled(is_grad_enabled):
            loss = draft.compute_loss(shard_batch(batch, layout, transport), policy, **options)
        everyone.wait(60)
        assert loss.loss.requires_grad == (is_grad_enabled and bool(weights))
        grads = [x.double() for x in torch.autograd.grad(loss.loss, weights)] if loss.loss.requires_grad else []
        return loss.loss_sum_K, loss.accept_sum_K, loss.count_K, grads, transport.traffic.num_bytes, calls

    *sums, grads, num_bytes, calls = zip(*run_local_ranks(one_rank, world, timeout_s=20), strict=True)
    assert all(own == calls[0] for own in calls)
    return ShardedLoss(
        *(sum(column) for column in sums), [sum(column) for column in zip(*grads, strict=True)], sum(num_bytes),
        [what for what, *_ in calls[0]],
    )  # fmt: skip
