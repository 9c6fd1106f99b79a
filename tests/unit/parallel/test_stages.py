"""Plans, splitting and loading of stages, in one process; the truth is the whole transformers model."""

import gc
import json
import os

import families
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist

from hf_codraft.parallel import loading
from hf_codraft.parallel.checkpoint import save_pretrained_stages
from hf_codraft.parallel.loading import load_stage
from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.parallel.stages import StagePlan, build_stage, plan_stages
from hf_codraft.taps.slots import Action

FAMILIES = sorted(families.CONFIGS)


# Plans


def test_layers_are_spread_evenly_and_in_order():
    assert plan_stages(10, 4).layer_ranges == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert plan_stages(10, 4, last_stage_layers=1).layer_ranges == ((0, 3), (3, 6), (6, 9), (9, 10))
    assert plan_stages(5, 1).layer_ranges == ((0, 5),)
    assert plan_stages(5, 1, last_stage_layers=5).layer_ranges == ((0, 5),)


def test_layers_and_taps_have_owners():
    plan = plan_stages(4, 2)
    assert [plan.stage_of_layer(layer) for layer in range(4)] == [0, 0, 1, 1]
    # Id 0 is the embeddings' output, 4 the last layer's before the norm, 5 the final state after it.
    assert [plan.owner_of_tap(tap_id) for tap_id in range(6)] == [0, 0, 0, 1, 1, 1]
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=rf"tap_id \({wrong}\)"):
            plan.owner_of_tap(wrong)
    with pytest.raises(ValueError, match=r"layer \(4\)"):
        plan.stage_of_layer(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 5, None), r"num_stages \(5\)"),
        ((4, 0, None), r"num_stages \(0\)"),
        ((4, 2, 0), r"last_stage_layers \(0\)"),
        ((4, 2, 4), r"last_stage_layers \(4\)"),
        ((4, 1, 3), r"last_stage_layers \(3\)"),
    ],
)
def test_plans_that_leave_a_stage_empty_are_refused(arguments, message):
    num_layers, num_stages, last = arguments
    with pytest.raises(ValueError, match=message):
        plan_stages(num_layers, num_stages, last_stage_layers=last)


@pytest.mark.parametrize("ranges", [(), ((1, 2),), ((0, 2), (3, 4)), ((0, 2), (2, 2))])
def test_layer_ranges_with_holes_are_refused(ranges):
    with pytest.raises(ValueError, match="layer_ranges"):
        StagePlan(ranges)


def test_order_of_1f1b_is_the_published_one():
    order = schedule_order("1F1B", 2, 2, 3)
    assert order[0] == [Action(k, 0, m) for k, m in [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]]
    assert order[1] == [Action(k, 1, m) for k, m in [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2)]]


@pytest.mark.parametrize(("name", "num_stages"), [("1F1B", 4), ("GPipe", 4), ("Interleaved1F1B", 8)])
def test_orders_run_every_stage_and_microbatch_once(name, num_stages):
    order = schedule_order(name, 4, num_stages, 8)
    everything = {Action(kind, stage, m) for kind in "FB" for stage in range(num_stages) for m in range(8)}
    assert {action for actions in order.values() for action in actions} == everything
    for rank, actions in order.items():
        assert len(actions) == len(set(actions)) and {action.stage % 4 for action in actions} == {rank}


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV", "LoopedBFS", "1f1b"])
def test_other_schedules_are_refused_with_the_list(name):
    with pytest.raises(ValueError, match=rf"'{name}'.*1F1B, Interleaved1F1B"):
        schedule_order(name, 2, 4, 4)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1F1B", (2, 4, 4), "num_stages.*Interleaved1F1B"),
        ("1F1B", (2, 3, 4), "multiple of the pipeline's ranks"),
        ("1F1B", (4, 4, 3), r"num_microbatches \(3\)"),
        ("Interleaved1F1B", (2, 2, 4), "at least two ranks with two stages"),
        ("Interleaved1F1B", (1, 2, 4), "at least two ranks with two stages"),
        ("Interleaved1F1B", (4, 8, 9), r"num_microbatches \(9\).*8 or 12"),
    ],
)
def test_sizes_that_a_schedule_can_not_run_are_refused(name, numbers, message):
    with pytest.raises(ValueError, match=message):
        schedule_order(name, *numbers)


# Splitting


def run(stages, rows):
    hidden = rows["input_ids"]
    for stage in stages:
        hidden = stage(hidden, attention_mask=rows["attention_mask"])
    return stages[-1].logits(hidden)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_stages_in_turn_equal_the_whole_model(family, tie):
    model, rows = families.policy(family, tie=tie), families.batch(5, 12)
    with torch.no_grad():
        expected = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    for num_stages in (1, 2, 4):
        plan = plan_stages(4, num_stages)
        stages = [build_stage(model, plan, stage) for stage in range(num_stages)]
        with torch.no_grad():
            assert torch.equal(run(stages, rows), expected), num_stages
        held = [dict(stage.model.named_parameters()) for stage in stages]
        union = {name for names in held for name in names}
        whole = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        assert union - {"lm_head.weight"} == whole - {"lm_head.weight"}
        # A tied pair on one stage is one parameter; on two stages there are two copies of it, and nothing else is twice.
        twice = int(tie and num_stages > 1)
        assert sum(map(len, held)) == len(list(model.named_parameters())) + twice
        tied = [stage.tied_parameter for stage in stages]
        assert [parameter is not None for parameter in tied] == [
            bool(twice) and stage.is_first != stage.is_last for stage in stages
        ]


def test_the_split_copies_and_leaves_the_model_alone():
    model = families.policy("llama")
    stage = build_stage(model.eval(), plan_stages(4, 2), 1)
    assert not stage.training and not stage.model.training
    with torch.no_grad():
        stage.model.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().sum() > 0 and len(list(model.parameters())) == 39
    with pytest.raises(RuntimeError, match="embed_tokens lives on pipeline stage 0"):
        stage.model.model.embed_tokens(torch.zeros(1, 2, dtype=torch.long))


def test_adapters_around_the_whole_and_around_a_stage_have_the_same_names():
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    plan = plan_stages(4, 2)
    before = [build_stage(get_peft_model(families.policy("qwen3"), config), plan, stage) for stage in range(2)]
    for stage in range(2):
        after = build_stage(families.policy("qwen3"), plan, stage)
        after.model = get_peft_model(after.model, config)
        names = {name: p.requires_grad for name, p in after.named_parameters()}
        assert names == {name: p.requires_grad for name, p in before[stage].named_parameters()}
        assert sum(names.values()) == 2 * 2 * 2  # layers, targets, A and B


def test_what_can_not_be_split_is_refused():
    plan = plan_stages(4, 2)
    gemma = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match=r"model_type 'gemma2'.*llama, mistral, qwen2, qwen3, qwen3_moe"):
        build_stage(gemma, plan, 0)
    with pytest.raises(ValueError, match="plan covers 4 layers and the model has 6"):
        build_stage(families.policy("llama", num_layers=6), plan, 0)
    with pytest.raises(ValueError, match="output_router_logits = False"):
        build_stage(families.policy("qwen3_moe", output_router_logits=True), plan, 0)
    prompted = get_peft_model(
        families.policy("llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(ValueError, match=r"adapter 'default' \(PROMPT_TUNING\)"):
        build_stage(prompted, plan, 0)
    with pytest.raises(ValueError, match=r"stage \(2\) must lie in 0..1"):
        build_stage(families.policy("llama"), plan, 2)


# Loading


@pytest.mark.parametrize(("family", "tie"), [("llama", False), ("qwen3", True), ("qwen3_moe", False)])
@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_loaded_stages_equal_the_loaded_model(tmp_path, family, tie, shard_size):
    families.policy(family, tie=tie).save_pretrained(tmp_path, max_shard_size=shard_size)
    whole, rows = AutoModelForCausalLM.from_pretrained(tmp_path), families.batch(3, 9)
    for num_stages in (1, 2):
        stages = [load_stage(tmp_path, plan_stages(4, num_stages), stage) for stage in range(num_stages)]
        for stage in stages:
            assert not stage.training
            for name, parameter in stage.model.named_parameters():
                assert torch.equal(parameter, whole.get_parameter(name)) and parameter.requires_grad, name
        with torch.no_grad():
            expected = whole(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
            assert torch.equal(run(stages, rows), expected)
    assert len({id(parameter) for parameter in load_stage(tmp_path, plan_stages(4, 1), 0).parameters()}) == len(
        list(whole.parameters())
    )


@pytest.mark.parametrize("settings", [{"do_sample": True}, {}])  # the latter is refused by transformers' save alone
def test_generation_settings_come_back_from_load_and_save(tmp_path, settings):
    families.policy("qwen3").save_pretrained(tmp_path / "before")
    settings = settings | {"eos_token_id": [5, 7], "pad_token_id": 4, "temperature": 0.6, "top_k": 20}
    (tmp_path / "before" / "generation_config.json").write_text(json.dumps(settings))
    stages = [load_stage(tmp_path / "before", plan_stages(4, 2), stage) for stage in range(2)]
    save_pretrained_stages(stages, None, tmp_path / "after")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("before", "after"))
    found = after.generation_config.to_diff_dict()
    assert found.items() >= settings.items()
    assert found == before.generation_config.to_diff_dict()


def test_rotary_frequencies_are_those_of_the_model_under_bf16(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    families.policy("llama", rope_parameters=scaling).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    stage = load_stage(tmp_path, plan_stages(4, 2), 1, dtype=torch.bfloat16)
    rotary = stage.model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, whole.model.rotary_emb.inv_freq)
    assert {parameter.dtype for parameter in stage.parameters()} == {torch.bfloat16}


class CountingFile:
    """A safetensors file that notes what is read from it."""

    read: set[str] = set()

    def __init__(self, path, **kwargs):
        self.file = loading_safe_open(path, **kwargs)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *args):
        return self.file.__exit__(*args)

    def keys(self):
        return self.file.keys()

    def get_slice(self, key):
        piece = self.file.get_slice(key)

        class Slice:
            def __getitem__(self, index):
                CountingFile.read.add(key)
                return piece[index]

        return Slice()


loading_safe_open = loading.safe_open


def living_storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors that live now, by address; whoever holds it keeps the addresses from being used again."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would wake deprecated objects
            storage = thing.untyped_storage()
            if storage.device.type != "meta":  # fake tensors, which say another device themselves, have none either
                storages[storage.data_ptr()] = storage
    return storages


def new_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of the memory that tensors have taken since."""
    return sum(storage.nbytes() for address, storage in living_storages().items() if address not in before)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tie"), [("llama", False), ("llama", True), ("qwen3_moe", False)])
def test_a_stage_reads_and_holds_its_share_alone(tmp_path, monkeypatch, family, tie):
    families.policy(family, tie=tie).save_pretrained(tmp_path, max_shard_size="100KB")
    monkeypatch.setattr(loading, "safe_open", CountingFile)
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for index in range(2):
        CountingFile.read.clear()
        before = living_storages()
        stage = load_stage(tmp_path, plan_stages(4, 2), index)
        ends = ["model.embed_tokens.weight"] if index == 0 or tie else ["lm_head.weight"]
        ends += ["model.norm.weight"] if index == 1 else []
        layers = ("model.layers.0.", "model.layers.1.") if index == 0 else ("model.layers.2.", "model.layers.3.")
        assert CountingFile.read == {key for key in stored if key in ends or key.startswith(layers)}
        held = sum(p.numel() * p.element_size() for p in stage.parameters())
        buffers = sum(b.numel() * b.element_size() for b in stage.buffers())
        assert new_bytes(before) == held + buffers
        del stage


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_stages", "index"), [("llama", 4, 1), ("qwen3_moe", 2, 0), ("qwen3_moe", 2, 1)]
)
def test_peak_memory_of_loading_is_the_stages_share(tmp_path, monkeypatch, family, num_stages, index):
    """The largest sum of tensors that loading ever had alive, counted at every read and at every step of fusing experts."""
    families.policy(family, mlp_only_layers=[]).save_pretrained(tmp_path)
    peaks, events = [], []

    class PeakFile(CountingFile):
        def get_slice(self, key):
            piece = loading_safe_open(tmp_path / "model.safetensors", framework="pt").get_slice(key)

            class Slice:
                def __getitem__(self, index):
                    tensor = piece[index]
                    peaks.append(new_bytes(before))
                    events.append(key)
                    return tensor

            return Slice()

    def counted(original):
        def convert(self, tensors, *args, **kwargs):
            fused = original(self, tensors, *args, **kwargs)
            peaks.append(new_bytes(before))
            events.append("fused")
            return fused

        return convert

    monkeypatch.setattr(loading, "safe_open", PeakFile)
    for operation in (MergeModulelist, Concatenate):
        monkeypatch.setattr(operation, "convert", counted(operation.convert))
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    before = living_storages()
    stage = load_stage(tmp_path, plan_stages(4, num_stages), index)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    own = sum(p.numel() * p.element_size() for p in stage.parameters())
    fused = [p.numel() * p.element_size() for name, p in stage.named_parameters() if name.endswith("gate_up_proj")]
    assert max(peaks) <= own * 1.05 + sum(fused[:1])
    if fused:  # a layer's experts are fused before those of the next are read
        layers = stage.plan.layers_of(index)
        first_reads = [events.index(f"model.layers.{layer}.mlp.experts.0.gate_proj.weight") for layer in layers]
        assert events.index("fused") < first_reads[1]


def test_missing_and_unfit_tensors_are_listed(tmp_path):
    families.policy("llama").save_pretrained(tmp_path)
    plan, path = plan_stages(4, 2), tmp_path / "model.safetensors"
    tensors = load_file(path)
    lost = "model.layers.2.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, path, metadata={"format": "pt"})
    load_stage(tmp_path, plan, 0)  # whole
    with pytest.raises(ValueError, match=rf"lacks 1 tensors of stage 1: {lost}"):
        load_stage(tmp_path, plan, 1)
    save_file(tensors | {lost: torch.zeros(3, 3)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"don't fit.*{lost}"):
        load_stage(tmp_path, plan, 1)
    path.unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_stage(tmp_path, plan, 0)
    index = {"weight_map": {key: "model-00001-of-00001.safetensors" for key in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks \['model-00001-of-00001.safetensors'\]"):
        load_stage(tmp_path, plan, 0)
