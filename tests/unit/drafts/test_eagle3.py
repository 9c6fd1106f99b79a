"""EAGLE-3's training-time test against a dense-mask reference, and the promises of DRAFT_MATH section 2."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from attention_cases import PLANS
from dense_eagle3 import is_supervised, reference_hidden, reference_loss, sharded_loss
from ranks import HIDDEN, NUM_TAPS, VOCAB, exact_norms, tiny_batch, tiny_draft, tiny_weights
from torch.nn import functional as F

from hf_codraft.attention.trunk import num_kept_within
from hf_codraft.drafts.eagle3 import Eagle3DraftConfig, default_tap_ids, supervised_passes
from hf_codraft.drafts.vocabulary import check_mapping, kept_mask, offsets, select_draft_vocab
from hf_codraft.hub.resolve import fresh_eagle3
from hf_codraft.policy.anatomy import PolicyAnatomy
from hf_codraft.policy.packing import pack_completions
from hf_codraft.taps.packed import PackedBatch, PolicyWeights
from hf_codraft.taps.recorder import TapRecorder, Taps, TapSpec

NORM_VARIANTS = {
    **tiny.NORM_FLAGS,
    "all": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
}
norm_variants = pytest.mark.parametrize("flags", NORM_VARIANTS.values(), ids=NORM_VARIANTS)

# (prompt, completion[, hole start, hole end]): left pads, right pads and holes arise from putting them side by side
ROWS = {
    "mixed": [(5, 9), (1, 1), (3, 0), (2, 8, 3, 5), (7, 12), (1, 6)],
    "one-token prompt": [(1, 7)],
    "one-token completion": [(6, 1), (4, 5)],
    "empty completion between others": [(3, 4), (5, 0), (2, 6)],
    "holes": [(2, 12, 4, 7), (3, 9, 0, 2), (2, 6, 5, 6)],
    "completion fills the whole length": [(4, 10), (4, 10)],
    "no prompt": [(0, 5), (0, 1), (0, 7)],  # a warm start may learn from any token: only the border parts these rows
}


def trl_inputs(rows, *, seed=0) -> tuple[dict[str, torch.Tensor], Taps]:
    """TRL's padded batch of these rows (prompts padded left, completions right) with taps; pads are poison."""
    batch = tiny_batch(rows, seed=seed)
    width_p, width_c = (max(row[i] for row in rows) for i in (0, 1))
    length = width_p + width_c
    ids = torch.full((len(rows), length), 0)
    present = torch.zeros(len(rows), length, dtype=torch.long)
    supervised = torch.zeros_like(present)
    taps = torch.full((len(rows), length, NUM_TAPS * HIDDEN), torch.nan, dtype=torch.float64)
    final = torch.full((len(rows), length, HIDDEN), torch.nan, dtype=torch.float64)
    for row, (start, end) in enumerate(batch.layout.segments):
        place = slice(width_p - rows[row][0], width_p - rows[row][0] + end - start)
        ids[row, place], present[row, place] = batch.token_ids_T[start:end], 1
        supervised[row, place] = batch.supervised_T[start:end].long()
        taps[row, place], final[row, place] = batch.taps_TX[start:end], batch.hidden_TH[start:end]
    inputs = {
        "prompt_ids": ids[:, :width_p],
        "prompt_mask": present[:, :width_p],
        "completion_ids": ids[:, width_p:],
        "completion_mask": present[:, width_p:],
        "tool_mask": supervised[:, width_p:] + (1 - present[:, width_p:]),  # TRL leaves ones on pads
    }
    return inputs, Taps(tuple(taps.chunk(NUM_TAPS, -1)), final)


def assert_equals_reference(
    draft, batch, *, num_passes=3, loss_type="kl", temperature=1.0, pass_weights=None, splits=((1, 4),)
) -> None:
    """Sums, counts and gradients within 1e-12 of the reference's norm, for every `(ranks, chunk size)` of `splits`."""
    policy, parameters = tiny_weights(), dict(draft.named_parameters())
    options = dict(num_passes=num_passes, loss_type=loss_type, temperature=temperature, pass_weights=pass_weights)
    want, sums, accepts, counts = reference_loss(draft, batch, policy, **options)
    want_grads = torch.autograd.grad(want, parameters.values(), materialize_grads=True)
    for number, (world, chunk_size) in enumerate(splits):
        plan = list(PLANS)[number % len(PLANS)]
        got = sharded_loss(draft, batch, policy, world=world, plan=plan, chunk_size=chunk_size, **options)
        assert got.count_K.tolist() == counts
        torch.testing.assert_close(got.loss_sum_K.tolist(), sums, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.accept_sum_K.tolist(), accepts, rtol=1e-12, atol=1e-12)
        for name, ours, expected in zip(parameters, got.grads, want_grads, strict=True):
            assert (ours - expected).norm() <= 1e-12 * expected.norm(), (name, world, plan, chunk_size)


@pytest.mark.parametrize("num_passes", [1, 3, 7])
@norm_variants
def test_loss_and_gradients_on_any_ranks_in_any_tiles_equal_a_dense_mask_reference(num_passes, flags):
    inputs, taps = trl_inputs(ROWS["mixed"])
    batch = pack_completions(inputs, taps)
    assert supervised_passes(batch, num_passes)[-1].any()
    splits = [(1, None), (4, 5)] if flags else [(world, size) for size in (None, 5) for world in (1, 2, 4)]
    assert_equals_reference(tiny_draft(**flags), batch, num_passes=num_passes, splits=splits)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_padded_rows_equal_a_dense_mask_reference(rows):
    inputs, taps = trl_inputs(rows, seed=3)
    assert_equals_reference(tiny_draft(), pack_completions(inputs, taps))


@pytest.mark.parametrize("loss_type", ["kl", "tv", "lk", "ce"])
@pytest.mark.parametrize("draft_vocab_size", [VOCAB, 20], ids=["full vocabulary", "reduced"])
def test_losses_temperature_and_pass_weights_equal_a_dense_mask_reference(loss_type, draft_vocab_size):
    draft = tiny_draft(draft_vocab_size=draft_vocab_size)
    assert_equals_reference(
        draft, tiny_batch(ROWS["mixed"]), loss_type=loss_type, temperature=0.7, pass_weights=(1.0, 0.5, 0.0),
        splits=((1, None), (1, 100), (3, 3)),
    )  # fmt: skip


def test_states_equal_the_reference_at_anchors_with_holes():
    draft, batch, policy = tiny_draft(), tiny_batch(ROWS["mixed"]), tiny_weights()
    anchors = torch.tensor([0, 1, 4, 9, 14, 15, 22, 23, 40])
    got = draft(batch, policy, anchors, num_passes=3)
    # past its segment a branch reads a token that is not its own, in the reference as well
    want = torch.stack(reference_hidden(draft, batch, policy, 3))[:, anchors]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


# Causality and holes


def perturbed(batch, *, tokens=(), states=()) -> PackedBatch:
    """Another batch with other token ids and other hidden states at these indices."""
    ids, taps, hidden = batch.token_ids_T.clone(), batch.taps_TX.clone(), batch.hidden_TH.clone()
    ids[list(tokens)] = (ids[list(tokens)] + 7) % VOCAB
    taps[list(states)] += 1.0
    hidden[list(states)] -= 1.0
    return PackedBatch(batch.shard, ids, batch.supervised_T, taps, hidden)


@pytest.mark.parametrize("t", [0, 3, 8])
def test_tokens_in_the_future_of_a_position_leave_its_output_unchanged(t):
    draft, policy, passes = tiny_draft(), tiny_weights(), 3
    batch = tiny_batch([(6, 10), (3, 4)])
    everywhere = torch.arange(batch.layout.num_tokens)
    before = draft(batch, policy, everywhere, num_passes=passes)
    for d in range(1, passes + 1):
        # pass d at t reads the taps up to t and the tokens up to t + d
        tokens, states = range(t + d + 1, batch.layout.num_tokens), range(t + 1, batch.layout.num_tokens)
        after = draft(perturbed(batch, tokens=tokens, states=states), policy, everywhere, num_passes=passes)
        assert torch.equal(after[:d, : t + 1], before[:d, : t + 1])
        nearer = draft(perturbed(batch, tokens=[t + d]), policy, everywhere, num_passes=passes)
        assert not torch.isclose(nearer[d - 1, t], before[d - 1, t]).all()
    assert not torch.isclose(after[:, t + 1], before[:, t + 1]).all()


def test_the_future_leaves_the_loss_of_a_position_unchanged():
    draft, policy, passes, t = tiny_draft(), tiny_weights(), 3, 4
    batch = tiny_batch([(16, 0)])
    batch.supervised_T[t + 1 : t + passes + 2] = (
        True  # t is the first anchor of passes - 1 others, the only one of the last
    )
    options = dict(num_passes=passes, pass_weights=(0.0, 0.0, 1.0))
    before = draft.compute_loss(batch, policy, **options)
    assert before.count_K.tolist() == [3, 2, 1]
    end = batch.layout.num_tokens
    far = perturbed(batch, tokens=range(t + passes + 1, end), states=range(t + passes + 1, end))
    assert torch.equal(draft.compute_loss(far, policy, **options).loss, before.loss)
    for near in (
        perturbed(batch, tokens=[t + passes]),
        perturbed(batch, states=[t + passes]),
        perturbed(batch, states=[t]),
    ):
        assert not torch.isclose(draft.compute_loss(near, policy, **options).loss, before.loss)


def test_segments_of_a_packed_row_do_not_see_one_another():
    draft, policy = tiny_draft(), tiny_weights()
    rows = [(3, 7), (1, 5), (4, 6)]
    batch = tiny_batch(rows)
    whole = draft.compute_loss(batch, policy, num_passes=3)
    sums = torch.zeros(3, dtype=torch.float64)
    grads = [torch.zeros_like(p) for p in draft.parameters()]
    for row, (start, end) in zip(rows, batch.layout.segments, strict=True):
        shard = tiny_batch([row]).shard
        parts = (batch.token_ids_T, batch.supervised_T, batch.taps_TX, batch.hidden_TH)
        loss = draft.compute_loss(PackedBatch(shard, *(x[start:end] for x in parts)), policy, num_passes=3)
        sums += loss.loss_sum_K
        grads = [g + n for g, n in zip(grads, torch.autograd.grad(loss.loss, list(draft.parameters())), strict=True)]
    torch.testing.assert_close(whole.loss_sum_K, sums, rtol=1e-12, atol=1e-12)
    for got, want in zip(torch.autograd.grad(whole.loss, list(draft.parameters())), grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("num_passes", [1, 3, 7])
def test_nothing_is_supervised_in_a_hole_or_across_one(rows, num_passes):
    batch = tiny_batch(rows)
    mask = supervised_passes(batch, num_passes)
    want = [[is_supervised(batch, i, d) for i in range(batch.layout.num_tokens)] for d in range(1, num_passes + 1)]
    assert mask.tolist() == want


def test_tool_output_at_the_end_of_a_row_leaves_the_loss_unchanged():
    draft, policy = tiny_draft(), tiny_weights()
    batch = tiny_batch([(4, 12, 6, 12)])
    assert batch.supervised_T.tolist() == [False] * 4 + [True] * 6 + [False] * 6
    hole = range(10, 16)
    other = perturbed(batch, tokens=hole, states=hole)
    losses = [draft.compute_loss(x, policy, num_passes=5, loss_type="ce") for x in (batch, other)]
    assert torch.equal(losses[0].loss, losses[1].loss)
    assert losses[0].count_K.tolist() == [5, 4, 3, 2, 1]
    grads = [torch.autograd.grad(loss.loss, list(draft.parameters())) for loss in losses]
    for ours, want in zip(*grads, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


def test_coverage_counts_supervised_tokens_that_the_draft_can_propose():
    batch, policy = tiny_batch(ROWS["mixed"]), tiny_weights()
    draft = tiny_draft(draft_vocab_size=20)
    targets = [int(batch.token_ids_T[i + 2]) for i in range(batch.layout.num_tokens) if is_supervised(batch, i, 1)]
    covered = sum(target in draft.kept_ids.tolist() for target in targets)
    assert 0 < covered < len(targets)
    assert int(draft.compute_loss(batch, policy, num_passes=2).num_covered) == covered
    assert int(tiny_draft().compute_loss(batch, policy, num_passes=2).num_covered) == len(targets)


# The policy


def real_batch(model, anatomy, tap_ids, *, rows=3) -> PackedBatch:
    """Taps of a training forward of a real policy."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, tiny.VOCAB, (rows, 14), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 11:] = 0
    recorder = TapRecorder(anatomy.decoder.layers, anatomy.decoder.norm, TapSpec(tap_ids, anatomy.num_layers))
    with recorder.recording():
        model(input_ids=ids, attention_mask=mask)
    inputs = {
        "prompt_ids": ids[:, :5], "prompt_mask": mask[:, :5], "completion_ids": ids[:, 5:], "completion_mask": mask[:, 5:],
    }  # fmt: skip
    return pack_completions(inputs, recorder.take())


def options(**fields) -> SimpleNamespace:
    return SimpleNamespace(
        **({"draft_vocab_size": None, "draft_tap_layers": None, "draft_warmup_rollouts": 0} | fields)
    )


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_no_gradient_reaches_the_policy(tie):
    model = tiny.policy(tie=tie)
    anatomy = PolicyAnatomy.of(model)
    draft = fresh_eagle3(anatomy, options())
    batch = real_batch(model, anatomy, draft.tap_ids)
    assert torch.is_grad_enabled() and not batch.taps_TX.requires_grad and not batch.hidden_TH.requires_grad
    loss = draft.compute_loss(batch, anatomy.weights(), num_passes=3)
    loss.loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set()
    missing = {name for name, p in draft.named_parameters() if p.grad is None or not p.grad.any()}
    assert missing == {"midlayer.input_layernorm.weight"}  # a fresh draft does not read the embedding yet


def test_draft_owns_no_tensor_of_the_policy():
    model = tiny.policy()
    draft = fresh_eagle3(PolicyAnatomy.of(model), options())
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in draft.parameters()}
    torch.testing.assert_close(draft.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)


# Edges of a batch


@pytest.mark.parametrize("rows", [[(5, 0), (2, 0)], [(1, 1)], [(4, 1), (9, 1)], [(3, 4, 1, 4)]], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 4], ids=["dense", "chunked"])
def test_zero_supervised_tokens_give_a_finite_zero_loss_and_zero_gradients(rows, chunk_size):
    draft = tiny_draft()
    loss = draft.compute_loss(tiny_batch(rows), tiny_weights(), num_passes=3, chunk_size=chunk_size)
    loss.loss.backward()
    assert loss.loss.item() == 0.0
    assert loss.loss_sum_K.tolist() == loss.accept_sum_K.tolist() == loss.count_K.tolist() == [0, 0, 0]
    assert int(loss.num_covered) == 0
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


# Precision


@norm_variants
def test_autocast_error_is_at_most_twice_that_of_the_plain_reference(flags):
    options = dict(num_passes=3, loss_type="kl", temperature=1.0, pass_weights=None)
    batch, policy = tiny_batch(ROWS["mixed"]), tiny_weights()
    narrow_batch, narrow_policy = tiny_batch(ROWS["mixed"], dtype=torch.float32), tiny_weights(dtype=torch.float32)
    exact, draft = tiny_draft(**flags), tiny_draft(exact=False, **flags)
    exact_loss, sums, _, _ = reference_loss(exact, batch, policy, **options)
    exact_grads = torch.autograd.grad(exact_loss, list(exact.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        got = draft.compute_loss(narrow_batch, narrow_policy, num_passes=3)
        plain_loss, *_ = reference_loss(draft, narrow_batch, narrow_policy, **options)
    assert got.loss.dtype == torch.float32
    # a sum over positions is one number, in which roundings of bf16 (2^-9 each, about 8 products a pass) cancel
    torch.testing.assert_close(got.loss_sum_K.tolist(), sums, rtol=1e-2, atol=0)
    ours, plain = (torch.autograd.grad(loss, list(draft.parameters())) for loss in (got.loss, plain_loss))
    for name, our, their, want in zip(dict(draft.named_parameters()), ours, plain, exact_grads, strict=True):
        assert our.dtype == torch.float32
        plain_error = (their.double() - want).norm()
        assert plain_error > 0
        assert (our.double() - want).norm() <= 2 * plain_error, name


@pytest.mark.parametrize("flags", [{}, {"norm_output": True}, {"norm_before_residual": True}], ids=str)
def test_a_draft_in_bf16_runs_and_is_close_to_fp32(flags):
    batch, policy = tiny_batch(ROWS["mixed"], dtype=torch.float32), tiny_weights(dtype=torch.float32)
    draft = tiny_draft(exact=False, **flags)
    want = draft.compute_loss(batch, policy, num_passes=3).loss
    got = draft.to(torch.bfloat16).compute_loss(batch, policy, num_passes=3).loss
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0)


@pytest.mark.parametrize("cast", [lambda x: x.to(torch.bfloat16), lambda x: x.bfloat16(), lambda x: x.half()])
def test_inverse_frequencies_stay_fp32(cast):
    draft = tiny_draft(exact=False)
    before = draft.rotary_emb.inv_freq.clone()
    draft = cast(draft)
    assert draft.fc.weight.dtype != torch.float32
    for frequencies in (draft.rotary_emb.inv_freq, draft.rotary_emb.original_inv_freq):
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, before)


# RoPE

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.5] * 16, "long_factor": [2.0 + 0.5 * n for n in range(16)],
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPE.values(), ids=ROPE)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rope_of_a_fresh_draft_is_the_policys(rope, kind):
    model = tiny.policy(kind, rope_parameters=rope, max_position_embeddings=64)
    draft = fresh_eagle3(PolicyAnatomy.of(model), options())
    for length in (20, 100, 30):  # 100 is past the maximum, where dynamic RoPE stretches; 30 is back within it
        x, positions = torch.zeros(1, 1, 1), torch.arange(length)[None]
        for ours, theirs in zip(draft.rotary_emb(x, positions), model.model.rotary_emb(x, positions), strict=True):
            assert torch.equal(ours, theirs)
    assert draft.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling
    assert draft.config.max_position_embeddings == 64


@pytest.mark.parametrize("rope", ROPE.values(), ids=ROPE)
def test_ropes_of_the_test_differ(rope):
    """The test above could not fail if these settings were ignored by policy and draft alike."""
    x, positions = torch.zeros(1, 1, 1), torch.arange(100)[None]
    plain = tiny.policy(num_hidden_layers=3, max_position_embeddings=64).model.rotary_emb(x, positions)
    model = tiny.policy(num_hidden_layers=3, rope_parameters=rope, max_position_embeddings=64)
    assert not torch.allclose(model.model.rotary_emb(x, positions)[0], plain[0])


# A fresh draft


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_fresh_draft_starts_as_the_policys_last_layer_on_the_last_tap(kind):
    model = tiny.policy(kind, tie=False)
    draft = fresh_eagle3(PolicyAnatomy.of(model), options())
    last, own = model.model.layers[-1], draft.midlayer
    assert draft.tap_ids == (2, 4, 5) == default_tap_ids(8)
    for name in ("q_proj", "k_proj", "v_proj"):
        embedding_part, state_part = getattr(own.self_attn, name).weight.chunk(2, 1)
        assert torch.equal(state_part, getattr(last.self_attn, name).weight)
        assert not embedding_part.any()
    assert torch.equal(own.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
    assert torch.equal(own.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(draft.norm.weight, model.model.norm.weight)
    taps = torch.randn(4, 3 * tiny.HIDDEN)
    torch.testing.assert_close(draft.combine_taps(taps), taps[:, -tiny.HIDDEN :], rtol=0, atol=1e-6)
    assert draft.dtype == torch.float32


def test_tap_layers_of_the_user_are_honoured():
    draft = fresh_eagle3(PolicyAnatomy.of(tiny.policy()), options(draft_tap_layers=[0, 8]))
    assert draft.tap_ids == (0, 8)
    assert draft.fc.in_features == 2 * tiny.HIDDEN
    with pytest.raises(ValueError, match=r"draft_tap_layers \(\[2, 9\]\) must lie in 0..8"):
        fresh_eagle3(PolicyAnatomy.of(tiny.policy()), options(draft_tap_layers=[2, 9]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": 0}, r"draft_vocab_size \(0\) must be in 1..256"),
        ({"draft_vocab_size": 257}, r"draft_vocab_size \(257\) must be in 1..256"),
        ({"draft_vocab_size": 100}, r"draft_vocab_size \(100\) is below .* \(256\).* set draft_warmup_rollouts"),
    ],
)
def test_vocabulary_sizes_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        fresh_eagle3(PolicyAnatomy.of(tiny.policy()), options(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers of an EAGLE-3 draft must be 1, got 2"),
        ({"attention_bias": True}, "attention_bias and mlp_bias of an EAGLE-3 draft must be false"),
        ({"sliding_window": 128}, r"sliding_window \(128\) of an EAGLE-3 draft is not supported"),
        ({"target_hidden_size": 96, "hidden_size": 64}, "hidden size 64 cannot use the embeddings .* hidden size 96"),
    ],
)
def test_config_refuses_what_is_not_trained(fields, message):
    with pytest.raises(ValueError, match=message):
        Eagle3DraftConfig(**fields)


def test_a_draft_with_its_own_embeddings_uses_and_does_not_train_them():
    draft, batch, policy = tiny_draft(has_own_embeddings=True), tiny_batch(ROWS["mixed"]), tiny_weights()
    borrowed = tiny_draft()
    borrowed.load_state_dict({name: x for name, x in draft.state_dict().items() if name != "embed_tokens.weight"})
    other = PolicyWeights(draft.embed_tokens.weight.detach(), policy.head_VH)
    got, want = draft.compute_loss(batch, policy, num_passes=2), borrowed.compute_loss(batch, other, num_passes=2)
    assert torch.equal(got.loss, want.loss)
    assert not torch.isclose(got.loss, borrowed.compute_loss(batch, policy, num_passes=2).loss)
    got.loss.backward()
    assert draft.embed_tokens.weight.grad is None


def test_a_draft_of_another_width_than_the_policy_trains():
    draft = exact_norms(tiny_draft(hidden_size=16, target_hidden_size=HIDDEN, has_own_embeddings=True))
    loss = draft.compute_loss(tiny_batch(ROWS["mixed"]), tiny_weights(), num_passes=2)
    loss.loss.backward()
    assert loss.loss > 0 and draft.fc.weight.grad.shape == (16, NUM_TAPS * HIDDEN) and draft.fc.weight.grad.any()


# The reduced vocabulary


def test_set_vocabulary_writes_offsets_mask_and_the_policys_rows():
    draft, policy = tiny_draft(draft_vocab_size=5), tiny_weights()
    draft.d2t.zero_(), draft.t2d.zero_()
    assert draft.is_vocab_open
    kept = torch.tensor([0, 3, 4, 17, 47])
    draft.set_vocabulary(kept, policy)
    assert not draft.is_vocab_open
    assert draft.d2t.tolist() == [0, 2, 2, 14, 43]
    assert draft.kept_ids.tolist() == kept.tolist()
    assert draft.t2d.nonzero()[:, 0].tolist() == kept.tolist()
    assert torch.equal(draft.lm_head.weight, policy.head_VH[kept])
    draft.check_vocabulary()
    with pytest.raises(ValueError, match="kept_ids must hold 5 ids, got 4"):
        draft.set_vocabulary(kept[:4], policy)


def test_full_vocabulary_keeps_every_id_and_no_mapping():
    draft, policy = tiny_draft(), tiny_weights()
    draft.set_vocabulary(draft.kept_ids, policy)
    assert draft.kept_ids.tolist() == list(range(VOCAB))
    assert torch.equal(draft.lm_head.weight, policy.head_VH)
    assert not {"d2t", "t2d"} & set(draft.state_dict())
    assert not draft.is_vocab_open


def test_serving_weights_are_what_vllm_takes():
    names = dict(tiny_draft(draft_vocab_size=5).serving_weights())
    assert "d2t" in names and "t2d" not in names
    assert {name.split(".")[0] for name in names} == {"fc", "midlayer", "norm", "lm_head", "d2t"}


@pytest.mark.parametrize(
    ("counts", "size", "always_keep", "want"),
    [
        ([5, 1, 9, 0, 3], 3, (), [0, 2, 4]),
        ([2, 7, 2, 2, 7], 3, (), [0, 1, 4]),  # a tie goes to the lower id
        ([0, 0, 0, 0], 2, (), [0, 1]),
        ([5, 1, 9, 0, 3], 3, (3,), [0, 2, 3]),
        ([5, 1, 9, 0, 3], 2, (3, 1, 3), [1, 3]),
        ([5, 1, 9], 3, (), [0, 1, 2]),
    ],
)
def test_select_draft_vocab_keeps_the_most_frequent(counts, size, always_keep, want):
    counts = torch.tensor(counts)
    before = counts.clone()
    assert select_draft_vocab(counts, size, always_keep=always_keep).tolist() == want
    assert torch.equal(counts, before)


def test_select_draft_vocab_gives_ties_among_many_to_the_lower_ids():
    counts = torch.zeros(5000)
    counts[4000:4010] = 2
    assert select_draft_vocab(counts, 1000).tolist() == [*range(990), *range(4000, 4010)]


@pytest.mark.parametrize(("size", "always_keep"), [(0, ()), (6, ()), (1, (0, 2)), (-1, ())])
def test_select_draft_vocab_refuses_impossible_sizes(size, always_keep):
    with pytest.raises(ValueError, match=rf"draft_vocab_size \({size}\) must be between"):
        select_draft_vocab(torch.ones(5), size, always_keep=always_keep)


def test_mapping_that_is_offsets_passes_and_any_other_is_refused():
    kept = torch.tensor([2, 3, 9, 11])
    check_mapping(offsets(kept), 12)
    assert kept_mask(kept, 12).nonzero()[:, 0].tolist() == kept.tolist()
    with pytest.raises(ValueError, match=r"target ids 2..11, outside the policy's vocabulary of 11"):
        check_mapping(offsets(kept), 11)
    with pytest.raises(ValueError, match=r"target ids 2..14, outside .* target ids instead of offsets"):
        check_mapping(kept, 12)
    with pytest.raises(ValueError, match="two draft ids to the same target id"):
        check_mapping(torch.tensor([1, 0, 0]), 12)
    with pytest.raises(ValueError, match=r"target ids -1..1"):
        check_mapping(torch.tensor([-1, 0]), 12)


def test_softmax_over_a_reduced_vocabulary_is_the_engines():
    """vLLM scatters a reduced draft's logits into the target's ids and leaves -inf elsewhere."""
    draft = tiny_draft(draft_vocab_size=20)
    logits = torch.randn(4, 20, dtype=torch.float64)
    wide = torch.full((4, VOCAB), -torch.inf, dtype=torch.float64)
    wide[:, torch.arange(20) + draft.d2t] = logits
    torch.testing.assert_close(F.softmax(wide, -1)[:, draft.kept_ids], F.softmax(logits, -1), rtol=1e-12, atol=0)


# Sharded rows


def whole_row(draft, batch, policy, **options):
    """What [`sharded_loss`] gives, on one rank and at once."""
    return sharded_loss(draft, batch, policy, world=1, chunk_size=None, **options)


def assert_same(got, want, *, tolerance=1e-11) -> None:
    """A gradient that is zero but for rounding (one key alone has no softmax) says nothing about its own size."""
    floor = 1e-14 * max((x.norm().item() for x in want.grads), default=0.0)
    assert torch.equal(got.count_K, want.count_K)
    torch.testing.assert_close(got.loss_sum_K, want.loss_sum_K, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.accept_sum_K, want.accept_sum_K, rtol=tolerance, atol=tolerance)
    for ours, expected in zip(got.grads, want.grads, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - expected).norm() <= tolerance * expected.norm() + floor


def test_ranks_of_few_and_of_many_anchors_go_one_way():
    """Between loss and backward `sharded_loss` lets all ranks meet: none may still wait for what another sends later."""
    batch, policy, draft = tiny_batch([(3, 25), (15, 3)]), tiny_weights(), tiny_draft()
    anchors = [part.sum().item() for part in supervised_passes(batch, 1)[0].split(23)]
    assert anchors == [21, 5]  # the last few of the first segment ask the first rank for its keys
    got = sharded_loss(draft, batch, policy, world=2, plan="contiguous", num_passes=3, chunk_size=6)
    assert_same(got, whole_row(draft, batch, policy, num_passes=3))


@pytest.mark.parametrize("chunk_size", [None, 4], ids=["whole", "tiles"])
@pytest.mark.parametrize(
    ("rows", "world", "plan", "flags"),
    [
        ([(23, 0), (3, 20)], 2, "contiguous", {"draft_vocab_size": 20}),  # rank 0 has nothing to learn, rank 1 all
        ([(9, 0), (4, 1), (6, 0)], 3, "zigzag", {}),  # nothing on any rank
        ([(1, 2)], 8, "per segment", {}),  # most ranks have no token
        ([(1, 1)], 4, "balanced", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
    ids=str,
)
def test_ranks_with_nothing_to_learn_take_part(rows, world, plan, flags, chunk_size):
    draft, batch, policy = tiny_draft(**flags), tiny_batch(rows), tiny_weights()
    got = sharded_loss(draft, batch, policy, world=world, plan=plan, num_passes=3, chunk_size=chunk_size)
    assert_same(got, whole_row(draft, batch, policy, num_passes=3))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 5], ids=["whole", "tiles"])
def test_a_memory_budget_changes_what_is_sent_and_nothing_else(chunk_size):
    draft, batch, policy = tiny_draft(), tiny_batch(ROWS["mixed"]), tiny_weights()
    want, sent = whole_row(draft, batch, policy, num_passes=3), []
    layout = PLANS["balanced"](batch.layout.cu_seqlens, 4)
    token = 2 * 2 * 12 * (8 + 8)  # a key and a value of 2 heads of 12 channels in fp64, and their gradients
    some = next(
        budget
        for budget in range(0, 60 * token, token)
        if num_kept_within(layout, bytes_per_token=token, budget_bytes=budget) == 1
    )
    for budget in (None, 10**9, some, 0):
        got = sharded_loss(
            draft, batch, policy, world=4, plan="balanced", num_passes=3, chunk_size=chunk_size, max_kept_bytes=budget
        )
        assert_same(got, want)
        sent.append(got.num_bytes)
    assert sent[0] == sent[1] < sent[2] < sent[3]


@pytest.mark.slow
@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("learning", ["lm_head", "fc", "k_proj", "v_proj", "q_proj", "o_proj", "nothing"])
def test_a_partly_frozen_draft_learns_in_tiles_what_it_learns_at_once(learning, num_passes):
    """Keys that learn have gradients in the first pass, where no query has one."""
    draft, batch, policy = tiny_draft(), tiny_batch(ROWS["mixed"]), tiny_weights()
    want = whole_row(draft, batch, policy, num_passes=num_passes)
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(learning in name)
    kept = [grad for grad, p in zip(want.grads, draft.parameters(), strict=True) if p.requires_grad]
    assert len(kept) == (learning != "nothing")
    for world, chunk_size, budget in ((1, None, None), (1, 4, None), (2, None, None), (2, 4, None), (2, 4, 0)):
        got = sharded_loss(
            draft, batch, policy, world=world, num_passes=num_passes, chunk_size=chunk_size, max_kept_bytes=budget
        )
        assert_same(got, replace(want, grads=kept))
        assert learning != "nothing" or "gradients of keys and values" not in got.exchanges


@pytest.mark.parametrize("budget", [None, 0], ids=["kept", "streamed"])
@pytest.mark.parametrize("world", [1, 2])
def test_without_grad_mode_tiles_run_and_send_nothing_for_a_backward(world, budget):
    draft, batch, policy = tiny_draft(), tiny_batch(ROWS["mixed"]), tiny_weights()
    want = whole_row(draft, batch, policy, num_passes=3)
    options = dict(world=world, num_passes=3, chunk_size=4, max_kept_bytes=budget)
    got = sharded_loss(draft, batch, policy, is_grad_enabled=False, **options)
    assert_same(got, replace(want, grads=[]))
    assert "gradients of keys and values" not in got.exchanges
    learning = sharded_loss(draft, batch, policy, **options)
    assert ("gradients of keys and values" in learning.exchanges) == (world > 1)


def test_the_kernel_is_the_callers():
    draft, batch, policy = tiny_draft(), tiny_batch(ROWS["mixed"]), tiny_weights()
    want = whole_row(draft, batch, policy, num_passes=3)
    anchors = torch.tensor([0, 4, 9])
    for world, chunk_size in ((1, None), (2, 5)):
        options = dict(world=world, num_passes=3, chunk_size=chunk_size)
        assert_same(sharded_loss(draft, batch, policy, kernel="eager", **options), want, tolerance=1e-12)
        with pytest.raises(ValueError, match=r"kernel must be one of .*, got 'triton'"):
            sharded_loss(draft, batch, policy, kernel="triton", **options)
    with pytest.raises(ValueError, match=r"kernel must be one of .*, got 'triton'"):
        draft(batch, policy, anchors, num_passes=1, kernel="triton")


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPE.values(), ids=ROPE)
def test_ropes_turn_alike_on_every_rank_in_every_tile(rope):
    """Rows longer than `max_position_embeddings`, where the dynamic types stretch by the longest row that they see."""
    if rope["rope_type"] == "longrope":  # a factor for every second channel of a head
        rope = rope | {name: rope[name][:6] for name in ("short_factor", "long_factor")}
    draft = tiny_draft(rope_parameters=rope, max_position_embeddings=8)
    batch, policy = tiny_batch([(3, 20), (1, 4), (2, 6)]), tiny_weights()
    want = whole_row(draft, batch, policy, num_passes=6)
    for world, plan, chunk_size in ((1, "zigzag", 4), (3, "contiguous", None), (3, "per segment", 4)):
        got = sharded_loss(draft, batch, policy, world=world, plan=plan, num_passes=6, chunk_size=chunk_size)
        assert_same(got, want)


@pytest.mark.parametrize("chunk_size", [None, 7], ids=["whole", "tiles"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_cost_a_draft_in_bf16_no_precision(world, chunk_size):
    rows = [(3, 29), (1, 14), (5, 22)]
    wanted, narrow = bf16_pair(rows)
    errors = [
        error_of(sharded_loss(*narrow, world=n, num_passes=3, chunk_size=chunk_size).grads, wanted) for n in (1, world)
    ]
    assert 1e-4 < errors[0] < 0.1  # bf16 it was
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.slow
def test_many_tiles_cost_a_draft_in_bf16_no_precision():
    wanted, narrow = bf16_pair([(1, 200)])
    whole, tiled = (
        sharded_loss(*narrow, world=1, num_passes=3, chunk_size=chunk_size).grads for chunk_size in (None, 1)
    )
    assert 1e-4 < error_of(whole, wanted) < 0.1
    for at_once, in_tiles, want in zip(whole, tiled, wanted, strict=True):
        assert (in_tiles - want).norm() <= 1.5 * (at_once - want).norm()


def bf16_pair(rows):
    """Gradients of a draft in fp64 at once, by parameter; and draft, batch and policy of the same weights in bf16."""
    draft = tiny_draft(exact=False).to(torch.bfloat16)
    exact = tiny_draft()
    exact.load_state_dict(draft.state_dict())
    wanted = whole_row(exact, tiny_batch(rows), tiny_weights(), num_passes=3).grads
    return wanted, (draft, tiny_batch(rows, dtype=torch.float32), tiny_weights(dtype=torch.float32))


def error_of(grads, wanted) -> float:
    got, want = (torch.cat([x.flatten() for x in side]) for side in (grads, wanted))
    return ((got - want).norm() / want.norm()).item()
