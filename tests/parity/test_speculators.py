"""Our draft against `speculators`' EAGLE-3 model on the same weights.

The two train on the same attention pattern, so nothing is converted here: the first pass is causal inside a document, and
pass d sees the keys of pass 1 up to its own position and, of each later pass, its own position alone (`speculators` writes
it as a mask that grows by one diagonal a pass). It is also the pattern of vLLM's cache. What differs is how it is fed:

- `input_ids` is shifted by its data loader: its entry i is token i + 1 of the text.
- `position_ids` count from 1 and over the whole packed row, ours (and vLLM's) from 0 in each document. RoPE is relative,
  so both give the same logits.
- past the end of the row it reads token 0, we read the last token again; neither is ever supervised.
"""

import pytest
import tiny
import torch
from ranks import HIDDEN, VOCAB, exact_norms, tiny_batch, tiny_draft, tiny_weights
from transformers import LlamaConfig

from hf_codraft.hub.checkpoint import load_draft, save_draft

pytest.importorskip("speculators")

from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig

PASSES = 3
DOCUMENTS = {"one document": [(4, 15)], "several documents": [(3, 9), (1, 1), (2, 0), (1, 0), (5, 8)]}
documents = pytest.mark.parametrize("rows", DOCUMENTS.values(), ids=DOCUMENTS)
VARIANTS = {
    **tiny.NORM_FLAGS,
    "three at once": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "reduced vocabulary": {"draft_vocab_size": 20},
}


def oracle_of(draft, policy, *, attention="sdpa") -> Eagle3DraftModel:
    """`speculators`' model with our weights, in fp64 from end to end."""
    ours = draft.config
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps rope_parameters"
    )
    layer = LlamaConfig(**{name: getattr(ours, name) for name in names.split()})
    layer._attn_implementation = attention
    flags = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=ours.eagle_aux_hidden_state_layer_ids,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=PASSES)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{name: getattr(ours, name) for name in flags},
    )
    oracle = exact_norms(Eagle3DraftModel(config).double())
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in draft.state_dict().items()}
    missing, unexpected = oracle.load_state_dict(weights | {"embed_tokens.weight": policy.embedding_VH}, strict=False)
    assert set(missing) == {"verifier_norm.weight", "verifier_lm_head.weight"} and not unexpected
    oracle.lm_head.weight.requires_grad_()
    return oracle


def oracle_logits(oracle, batch, *, position_ids=None) -> torch.Tensor:
    """Logits of every pass: `(passes, tokens, vocab)`."""
    logits = []
    hook = oracle.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    document = torch.tensor(
        [number for number, (start, end) in enumerate(batch.layout.segments) for _ in range(start, end)]
    )
    oracle(
        batch.taps_TX[None],
        torch.cat([batch.token_ids_T[1:], torch.zeros(1, dtype=torch.long)])[None],
        document[None],
        position_ids=position_ids,
        ttt_steps=PASSES,
    )
    hook.remove()
    return torch.stack(logits)


def our_logits(draft, batch, policy) -> torch.Tensor:
    everywhere = torch.arange(batch.layout.num_tokens)
    return draft.lm_head(draft(batch, policy, everywhere, num_passes=PASSES))


def inside(batch) -> torch.Tensor:
    """Passes and positions whose input token exists in their own document: `(passes, tokens)`."""
    return batch.layout.ahead(torch.arange(batch.layout.num_tokens), PASSES)[1:] >= 0


@documents
@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_of_every_pass_equal_speculators(rows, flags):
    draft, policy, batch = tiny_draft(**flags), tiny_weights(), tiny_batch(rows)
    oracle = oracle_of(draft, policy)
    got = our_logits(draft, batch, policy)
    want = oracle_logits(oracle, batch, position_ids=batch.layout.position_ids_T[None])
    mask = inside(batch)
    torch.testing.assert_close(got[mask], want[mask], rtol=1e-10, atol=1e-10)

    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * mask[..., None]
    theirs = dict(oracle.named_parameters())
    ours = dict(draft.named_parameters())
    want_grads = torch.autograd.grad(
        (want * weight).sum(), [theirs[n.replace("midlayer.", "layers.0.")] for n in ours]
    )
    got_grads = torch.autograd.grad((got * weight).sum(), list(ours.values()))
    for name, our, their in zip(ours, got_grads, want_grads, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@documents
def test_positions_from_1_over_the_packed_row_give_the_same_logits(rows):
    draft, policy, batch = tiny_draft(), tiny_weights(), tiny_batch(rows)
    got, want = our_logits(draft, batch, policy), oracle_logits(oracle_of(draft, policy), batch)
    mask = inside(batch)
    # cos and sin of other angles are rounded to fp32 in another way: 2^-24 of angles of about 30
    torch.testing.assert_close(got[mask], want[mask], rtol=1e-4, atol=1e-4)


def test_the_eager_attention_of_speculators_agrees():
    draft, policy, batch = tiny_draft(), tiny_weights(), tiny_batch(DOCUMENTS["several documents"])
    positions = batch.layout.position_ids_T[None]
    mask = inside(batch)
    got = our_logits(draft, batch, policy)[mask]
    want = oracle_logits(oracle_of(draft, policy, attention="eager"), batch, position_ids=positions)[mask]
    # its softmax is rounded to fp32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["norm_before_residual", "norm_output"])
def test_a_variant_is_not_the_plain_form(name):
    """The comparisons above could not fail if both sides ignored these flags."""
    batch, policy = tiny_batch(DOCUMENTS["one document"]), tiny_weights()
    plain, other = (our_logits(tiny_draft(**flags), batch, policy) for flags in ({}, {name: True}))
    assert not torch.allclose(plain[1:], other[1:], atol=1e-3)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "draft_vocab_size": 20}], ids=["plain", "variant"])
def test_speculators_reads_what_we_save(tmp_path, flags):
    model = tiny.policy(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
    )
    model.save_pretrained(tmp_path / "policy")
    draft = tiny_draft(exact=False, **flags)
    batch = tiny_batch([(3, 57), (8, 60)], dtype=torch.float32)  # flex attention, its default, takes multiples of 128
    save_draft(draft, tmp_path / "draft", base_model=str(tmp_path / "policy"), layout="speculators")
    oracle = Eagle3DraftModel.from_pretrained(tmp_path / "draft")
    # speculators 0.9 looks for NaN to find embeddings that a checkpoint left to the policy; transformers 5 leaves them empty
    oracle._load_verifier_weights(overwrite_embed_tokens=True)
    assert oracle.config.eagle_aux_hidden_state_layer_ids == list(draft.tap_ids)
    policy = tiny_weights(dtype=torch.float32)
    policy = type(policy)(model.model.embed_tokens.weight.detach(), policy.head_VH)
    with torch.no_grad():
        got = our_logits(draft, batch, policy)
        want = oracle_logits(oracle, batch, position_ids=batch.layout.position_ids_T[None])
    mask = inside(batch)
    # fp32 through three passes on both sides
    torch.testing.assert_close(got[mask], want[mask], rtol=1e-4, atol=1e-4)


def test_we_read_what_speculators_saves(tmp_path):
    draft, policy = tiny_draft(draft_vocab_size=20, norm_before_residual=True), tiny_weights()
    oracle_of(draft, policy).float().save_pretrained(tmp_path / "draft")
    back = load_draft(tmp_path / "draft")
    assert back.config.norm_before_residual and back.tap_ids == draft.tap_ids
    assert torch.equal(back.embed_tokens.weight, policy.embedding_VH.float())  # it saves the policy's embeddings too
    for name, tensor in draft.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.float() if tensor.is_floating_point() else tensor), name
