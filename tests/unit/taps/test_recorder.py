"""Taps against transformers' own hidden states."""

import pytest
import tiny
import torch

from hf_codraft.policy.anatomy import PolicyAnatomy
from hf_codraft.taps.recorder import TapRecorder, TapSpec

LAYERS = 6
kinds = pytest.mark.parametrize("kind", ["llama", "qwen3"])


def recorder_of(model, tap_ids) -> TapRecorder:
    anatomy = PolicyAnatomy.of(model)
    return TapRecorder(anatomy.decoder.layers, anatomy.decoder.norm, TapSpec(tuple(tap_ids), anatomy.num_layers))


def inputs(*, seed=0, rows=3, length=9) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, tiny.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def num_hooks(model) -> int:
    return sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


@kinds
@pytest.mark.parametrize("tap_id", [0, 1, LAYERS // 2, LAYERS - 1])
def test_tap_k_is_hidden_state_k(kind, tap_id):
    model = tiny.policy(kind, num_hidden_layers=LAYERS)
    recorder = recorder_of(model, [tap_id])
    with recorder.recording():
        output = model(**inputs(), output_hidden_states=True)
    assert torch.equal(recorder.take().hidden_states[0], output.hidden_states[tap_id])
    others = [k for k in range(LAYERS) if k != tap_id]
    assert not any(torch.equal(output.hidden_states[k], output.hidden_states[tap_id]) for k in others)


@kinds
def test_the_last_tap_is_taken_before_the_norm_and_final_is_what_the_head_reads(kind):
    model = tiny.policy(kind, num_hidden_layers=LAYERS)
    recorder = recorder_of(model, [LAYERS])
    with recorder.recording():
        output = model(**inputs(), output_hidden_states=True)
    taps = recorder.take()
    after_norm = output.hidden_states[LAYERS]
    assert not torch.allclose(taps.hidden_states[0], after_norm)
    assert torch.equal(model.model.norm(taps.hidden_states[0]), after_norm)
    assert torch.equal(taps.final_BSH, after_norm)
    assert torch.equal(model.lm_head(taps.final_BSH), output.logits)


def test_taps_come_in_the_order_of_their_ids_and_are_detached():
    model = tiny.policy(num_hidden_layers=LAYERS)
    recorder = recorder_of(model, [4, 0, 2, 4])
    with recorder.recording():
        output = model(**inputs(), output_hidden_states=True)
    assert output.logits.requires_grad
    taps = recorder.take()
    for tap, k in zip(taps.hidden_states, [4, 0, 2, 4], strict=True):
        assert torch.equal(tap, output.hidden_states[k])
    assert not any(tensor.requires_grad for tensor in (*taps.hidden_states, taps.final_BSH))


def test_several_forwards_are_joined_along_their_rows():
    model = tiny.policy(num_hidden_layers=LAYERS)
    recorder = recorder_of(model, [2])
    both = inputs(rows=4)
    with recorder.recording():
        for part in (slice(0, 3), slice(3, 4)):
            model(**{name: tensor[part] for name, tensor in both.items()})
    taps = recorder.take()
    with recorder.recording():
        model(**both)
    whole = recorder.take()
    # other row counts take other matrix kernels: fp32 rounding of six layers
    torch.testing.assert_close(taps.hidden_states[0], whole.hidden_states[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(taps.final_BSH, whole.final_BSH, rtol=1e-4, atol=1e-4)


def test_a_closed_recorder_leaves_no_hook_and_hears_nothing():
    model = tiny.policy(num_hidden_layers=LAYERS)
    before = num_hooks(model)
    recorder = recorder_of(model, [0, 1, LAYERS])
    with recorder.recording():
        assert num_hooks(model) == before + 4
        model(**inputs())
    assert num_hooks(model) == before
    model(**inputs(seed=1))
    taps = recorder.take()
    assert taps.final_BSH.shape[0] == 3
    with pytest.raises(RuntimeError, match="were seen"):  # handed over once
        recorder.take()


def test_an_error_inside_closes_the_recorder():
    model = tiny.policy(num_hidden_layers=LAYERS)
    before, recorder = num_hooks(model), recorder_of(model, [1])
    with pytest.raises(ZeroDivisionError), recorder.recording():
        model(**inputs())
        raise ZeroDivisionError
    assert num_hooks(model) == before
    with recorder.recording():  # what was heard before the error is forgotten
        model(**inputs(seed=2))
    taps = recorder.take()
    with recorder.recording():
        model(**inputs(seed=2))
    assert torch.equal(taps.hidden_states[0], recorder.take().hidden_states[0])


def test_a_recording_without_a_forward_or_with_a_skipped_layer_is_an_error():
    model = tiny.policy(num_hidden_layers=LAYERS)
    recorder = recorder_of(model, [1, 3])
    with recorder.recording():
        pass
    with pytest.raises(RuntimeError, match=r"taps \[1, 3\] and the final hidden state were seen \[0, 0, 0\] times"):
        recorder.take()
    with recorder.recording():
        model(**inputs())
        model.model.norm(torch.zeros(1, tiny.HIDDEN))
    with pytest.raises(RuntimeError, match=r"were seen \[1, 1, 2\] times"):
        recorder.take()


@kinds
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_neither_doubles_nor_changes_taps(kind, use_reentrant):
    def train(checkpointing, records):
        model = tiny.policy(kind, num_hidden_layers=LAYERS).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        recorder = recorder_of(model, [0, 2, LAYERS])
        batch = inputs()
        if records:
            with recorder.recording():
                loss = model(**batch, labels=batch["input_ids"]).loss
        else:
            loss = model(**batch, labels=batch["input_ids"]).loss
        calls = []
        model.model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
        loss.backward()
        assert len(calls) == (1 if checkpointing else 0)  # the backward does recompute
        return recorder.take() if records else None, {name: p.grad for name, p in model.named_parameters()}

    plain_taps, _ = train(False, True)
    taps, grads = train(True, True)
    for got, want in zip(
        (*taps.hidden_states, taps.final_BSH), (*plain_taps.hidden_states, plain_taps.final_BSH), strict=True
    ):
        assert torch.equal(got, want)
    _, unheard = train(True, False)
    assert grads.keys() == unheard.keys()
    for name, gradient in grads.items():
        assert torch.equal(gradient, unheard[name]), name


@pytest.mark.parametrize("tap_ids", [(-1,), (2, LAYERS + 1), (LAYERS + 1, 2)])
def test_an_id_out_of_range_is_refused_with_the_range(tap_ids):
    with pytest.raises(ValueError, match=rf"draft_tap_layers \(.*\) must lie in 0..{LAYERS}.*got ({LAYERS + 1}|-1)"):
        TapSpec(tap_ids, LAYERS)


def test_no_id_is_refused():
    with pytest.raises(ValueError, match="draft_tap_layers must name at least one layer"):
        TapSpec((), LAYERS)


def test_first_and_last_ids_are_in_range():
    assert TapSpec((0, LAYERS), LAYERS).tap_ids == (0, LAYERS)
