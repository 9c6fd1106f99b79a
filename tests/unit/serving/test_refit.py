"""Digests, names and counts of a refit, without an engine."""

from collections import Counter

import pytest
import torch
from torch import nn

from hf_codraft.serving.acceptance import Acceptance
from hf_codraft.serving.refit import WeightStream, check_digests, check_names, digest, engine_digests, group_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digest_of_a_fused_tensor_is_the_sum_of_its_parts(dtype):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 5, generator=generator).to(dtype) for n in (3, 4, 2)]
    padded = torch.cat([*parts, torch.zeros(7, 5, dtype=dtype)])
    assert digest(padded) == sum(map(digest, parts))
    assert digest(padded[torch.randperm(len(padded), generator=generator)]) == digest(padded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_sees_the_smallest_change(dtype):
    tensor = torch.randn(50, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = tensor.clone()
    other[7, 9] = torch.nextafter(other[7, 9], torch.tensor(torch.inf, dtype=dtype))
    assert digest(tensor) != digest(other)
    assert digest(torch.tensor([1.0, -1.0], dtype=dtype)) != digest(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize(
    ("checkpoint", "engine"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.qkv_proj.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.gate_up_proj.weight"),
        ("model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"),
        ("model.layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("midlayer.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("d2t", "draft_id_to_target_id"),
        ("fc.weight", "model.fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_checkpoint_and_engine_names_meet_in_one_group(checkpoint, engine):
    assert group_name(checkpoint) == group_name(engine)


def test_stream_casts_and_counts_what_passes():
    weights = {"fc.weight": torch.tensor([[1.0 + 1e-5]]), "d2t": torch.tensor([2])}
    stream = WeightStream(weights.items(), torch.bfloat16)
    sent = dict(stream)
    assert (sent["fc.weight"].dtype, sent["d2t"].dtype) == (torch.bfloat16, torch.int64)
    assert stream.digests == Counter({"fc.weight": digest(sent["fc.weight"]), "draft_id_to_target_id": 2})


class Drafter(nn.Module):
    """`fc` of its own and the embeddings of a policy."""

    def __init__(self, policy):
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.embed_tokens = policy.embed_tokens


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)


def test_digests_leave_out_what_is_shared():
    policy = Policy()
    drafter = Drafter(policy)
    assert engine_digests(drafter).keys() == {"fc.weight", "embed_tokens.weight"}
    assert engine_digests(drafter, without=policy) == {"fc.weight": digest(drafter.fc.weight)}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([], r"the drafter expects \['fc.weight'\]"),
        (["fc.weight", "norm.weight"], r"the trainer sends \['norm.weight'\] that the engine's drafter does not own"),
        (
            ["fc.weight", "embed_tokens.weight"],
            r"\['embed_tokens.weight'\].*shares \['embed_tokens.weight'\] with the policy",
        ),
    ],
)
def test_names_that_do_not_fit_are_listed(sent, message):
    policy = Policy()
    check_names(Drafter(policy), policy, ["fc.weight"])
    with pytest.raises(RuntimeError, match=message):
        check_names(Drafter(policy), policy, sent)


def test_tensor_that_differs_is_named():
    check_digests(Counter(a=1, b=2), Counter(a=1, b=2), side="draft")
    with pytest.raises(RuntimeError, match=r"engine's draft differs .* in 1 tensors: \['b'\]"):
        check_digests(Counter(a=1, b=2), Counter(a=1, b=3), side="draft")


def test_fused_groups_of_unknown_names_are_compared_by_their_sum():
    check_digests(Counter({"experts.0.w": 1, "experts.1.w": 2}), Counter({"experts.w": 3}), side="policy")
    with pytest.raises(RuntimeError, match=r"experts\.0\.w"):
        check_digests(Counter({"experts.0.w": 1, "experts.1.w": 2}), Counter({"experts.w": 4}), side="policy")


def test_accept_length_and_rates_of_a_histogram():
    total = Acceptance.total([Acceptance((3, 1, 0, 0)), Acceptance(()), Acceptance((0, 1, 1, 2))])
    assert total.histogram == (3, 2, 1, 2)
    assert total.num_steps == 8
    assert total.accept_length == 1 + (2 * 1 + 1 * 2 + 2 * 3) / 8
    assert total.accept_rates == (5 / 8, 3 / 8, 2 / 8)
    assert total.accept_length == pytest.approx(1 + sum(total.accept_rates))


def test_nothing_drafted_is_an_accept_length_of_one():
    assert Acceptance.total([]).accept_length == 1.0
    assert Acceptance(()).accept_rates == ()
