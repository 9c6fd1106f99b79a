"""Checkpoints, resumes and weight streams of pipelines on gloo ranks, against unsplit transformers and PEFT models."""

import functools
import json
import multiprocessing
import os
import random
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import policy
from torch import distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_codraft.hub import folder as folder_module
from hf_codraft.hub.folder import recover_folder
from hf_codraft.parallel import checkpoint
from hf_codraft.parallel.checkpoint import load_training_state, save_pretrained_stages, save_training_state
from hf_codraft.parallel.loading import load_stage
from hf_codraft.parallel.pipeline import PolicyPipeline, next_token_loss
from hf_codraft.parallel.stages import build_stage, plan_stages
from hf_codraft.parallel.weights import agree_manifest, iterate_full_weights

LAYERS, NUM_MICROBATCHES = 4, 4


def tiny_model(kind="qwen3", *, tie=True, seed=0):
    if kind == "moe":
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config)
    if kind.startswith("lora"):
        return lora_model(kind, seed=seed)
    return policy(kind, tie=tie, num_hidden_layers=LAYERS, seed=seed)


def lora_model(kind, *, seed=0):
    """A PEFT model with every adapter weight away from zero."""
    base = tiny_model("llama", tie=False, seed=seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    if kind == "lora_everywhere":  # embeddings, head, and DoRA, which rescales the sum
        targets = ["q_proj", "down_proj", "embed_tokens"]
        config = LoraConfig(r=4, target_modules=targets, modules_to_save=["lm_head"], use_dora=True)
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model):
    model.eval()
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def own_stages(model, num_stages, rank, num_ranks):
    plan = plan_stages(LAYERS, num_stages)
    return [build_stage(model, plan, stage) for stage in range(rank, num_stages, num_ranks)]


def message_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# Saving and streaming

KINDS = {
    "tied": functools.partial(tiny_model, "qwen3"),
    "untied": functools.partial(tiny_model, "llama", tie=False),
    "moe": functools.partial(tiny_model, "moe"),
    "lora": functools.partial(tiny_model, "lora"),
    "lora_everywhere": functools.partial(tiny_model, "lora_everywhere"),
}


def fail_to_write(*args, **kwargs):
    raise OSError("no space left on device")


def save_cases(rank, root):
    group, report = dist.group.WORLD, {}
    for kind, make in KINDS.items():
        # one stage a rank, and two a rank for one of them
        stages = own_stages(make(), 4 if kind == "untied" else 2, rank, 2)
        save_pretrained_stages(stages, group, f"{root}/{kind}", max_shard_bytes=60_000)
        if kind.startswith("lora"):
            save_pretrained_stages(stages, group, f"{root}/{kind}-merged", merge_adapters=True)
        streamed = {}
        for receiver in (0, 1):
            previous, freed = None, []
            for name, tensor in iterate_full_weights(stages, group, receiver=receiver):
                freed.append(previous is None or previous() is None)
                streamed[name] = tensor.clone()
                previous = weakref.ref(tensor) if name.endswith("mlp.up_proj.weight") and rank == receiver else None
                del tensor
            report[kind, receiver] = (list(streamed), all(freed))
        report[kind] = streamed
    stages = own_stages(tiny_model(), 2, rank, 2)
    manifest = agree_manifest(stages, group)
    assert dict(iterate_full_weights(stages, group, manifest=manifest)).keys() == (
        report["tied"].keys() if rank == 0 else set()
    )
    report["refusals"] = refusals(rank, root, group, manifest)
    return report


def refusals(rank, root, group, manifest):
    found = {}
    stages = own_stages(tiny_model(), 2, rank, 2)
    if rank == 1:
        stages[0].model.half()
    found["changed"] = message_of(lambda: list(iterate_full_weights(stages, group, manifest=manifest)))
    found["twice"] = message_of(agree_manifest, own_stages(tiny_model(), 2, 0, 2), group)
    tied = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    found["tied"] = message_of(lambda: list(iterate_full_weights(own_stages(tied, 2, rank, 2), group)))
    found["receiver"] = message_of(lambda: list(iterate_full_weights(stages, group, receiver=2)))
    stages = own_stages(tiny_model(seed=5), 2, rank, 2)
    if rank == 1:
        checkpoint.save_file = fail_to_write
    found["disk"] = message_of(save_pretrained_stages, stages, group, f"{root}/tied")
    return found


@pytest.fixture(scope="module")
def saved(run_ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    return root, run_ranks(save_cases, 2, str(root))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_a_checkpoint_of_stages_is_that_of_the_whole_model(saved, tmp_path, kind):
    root, _ = saved
    model = KINDS[kind]()
    loaded, info = AutoModelForCausalLM.from_pretrained(root / kind, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    index, whole = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (root / kind, tmp_path)
    )
    assert index["weight_map"].keys() == whole["weight_map"].keys()
    assert index["metadata"] == whole["metadata"]
    files = {file.name for file in (root / kind).iterdir()}
    assert files == {
        *index["weight_map"].values(),
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    for name in ("config.json", "generation_config.json"):
        assert (root / kind / name).read_text() == (tmp_path / name).read_text()
    assert not list(root.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "lora_everywhere"])
def test_an_adapter_of_stages_is_that_of_the_whole_model(saved, tmp_path, kind):
    root, _ = saved
    model = KINDS[kind]()
    expected = logits(model)
    assert not torch.allclose(expected, logits(tiny_model("llama", tie=False)), atol=1e-2)
    loaded = PeftModel.from_pretrained(tiny_model("llama", tie=False), root / kind)
    assert torch.equal(logits(loaded), expected)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    ours, theirs = (json.loads((folder / "adapter_config.json").read_text()) for folder in (root / kind, tmp_path))
    theirs["target_modules"].sort()
    assert ours == theirs
    merged = AutoModelForCausalLM.from_pretrained(root / f"{kind}-merged")
    # fp32: (W + BA)x rounds otherwise than Wx + B(Ax)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_stage_takes_its_part_of_an_adapter(saved):
    root, _ = saved
    whole = dict(KINDS["lora"]().named_parameters())
    stage = own_stages(tiny_model("llama", tie=False), 2, 1, 2)[0]
    stage.model = PeftModel.from_pretrained(stage.model, root / "lora")
    assert all(torch.equal(parameter, whole[name]) for name, parameter in stage.model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_arrive_once_on_the_receiver(saved, tmp_path, kind):
    _, reports = saved
    model = KINDS[kind]()
    if kind.startswith("lora"):
        model = model.merge_and_unload()
    # the names and tensors of a checkpoint
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for rank, report in enumerate(reports):
        assert report[kind, 1 - rank][0] == ([] if rank == 1 else list(report[kind]))
        names, is_freed = report[kind, rank]
        assert is_freed, "a received tensor was kept while the next one came"
        assert sorted(names) == sorted(expected)
        for name, tensor in report[kind].items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6 if "lora" in kind else 0)


@pytest.mark.slow
def test_what_one_rank_cannot_do_every_rank_refuses(saved):
    root, reports = saved
    for rank, report in enumerate(reports):
        found = report["refusals"]
        assert "don't match the manifest: rank 1 differs in" in found["changed"]
        assert "is held by rank 0 and by rank 1" in found["twice"]
        assert "tie_word_embeddings" in found["tied"]
        assert "receiver (2)" in found["receiver"]
        assert found["disk"].startswith("OSError" if rank == 1 else "RuntimeError: could not write")
        assert "no space left" in found["disk"]
    for name, tensor in AutoModelForCausalLM.from_pretrained(root / "tied").state_dict().items():
        assert torch.equal(tensor, tiny_model().state_dict()[name])  # the one that was there before


# Resuming


def batch_of(step):
    generator = torch.Generator().manual_seed(100 + step)
    return {"input_ids": torch.randint(3, 256, (8, 10), generator=generator)}


class Run:
    """A rank's stages, or the whole model, in training, with two parameter groups and a schedule."""

    def __init__(self, stages, group):
        self.stages, self.group = stages, group
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decayed = [p for name, p in parameters.items() if p.ndim > 1]
        plain = [p for name, p in parameters.items() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        # eps: where a gradient is all but zero, Adam's step would show the rounding of the sums magnified
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        schedule = "1F1B" if len(stages) == 1 else "Interleaved1F1B"
        self.pipeline = None
        if group is not None:
            self.pipeline = PolicyPipeline(stages, NUM_MICROBATCHES, group=group, schedule=schedule)

    def named_parameters(self):
        return [item for stage in self.stages for item in stage.model.named_parameters()]

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            if self.pipeline is None:
                for ids in batch_of(step)["input_ids"].chunk(NUM_MICROBATCHES):
                    loss = self.stages[0].model(input_ids=ids, labels=ids, use_cache=False).loss
                    (loss / NUM_MICROBATCHES).backward()
            else:
                self.pipeline.train_step(batch_of(step), lambda *args: next_token_loss(*args) / NUM_MICROBATCHES)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, folder, steps_done):
        save_pretrained_stages(self.stages, self.group, f"{folder}/model")
        save_training_state(
            f"{folder}/state",
            self.group,
            stages=self.stages,
            optimizer=self.optimizer,
            schedulers=[self.scheduler],
            counters={"steps": steps_done},
        )

    @classmethod
    def resume(cls, folder, num_stages, group):
        rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), group.size())
        plan, own = plan_stages(LAYERS, num_stages), range(rank, num_stages, num_ranks)
        if os.path.exists(f"{folder}/model/{checkpoint.ADAPTER_CONFIG}"):
            stages = [build_stage(tiny_model("llama", tie=False), plan, stage) for stage in own]
            for stage in stages:
                stage.model = PeftModel.from_pretrained(stage.model, f"{folder}/model", is_trainable=True)
        else:
            stages = [load_stage(f"{folder}/model", plan, stage) for stage in own]
        run = cls(stages, group)
        counters = load_training_state(
            f"{folder}/state", group, stages=stages, optimizer=run.optimizer, schedulers=[run.scheduler]
        )
        return run, counters["steps"]

    def weights(self):
        return {name: p.detach().clone() for name, p in self.named_parameters()}


def draws():
    return float(torch.rand(())), random.random(), float(np.random.rand())


def resume_cases(rank, root):
    pair = dist.new_group([0, 1])
    report = {tie: resume_case(rank, f"{root}/tie-{tie}", tie, pair) for tie in (True, False)}
    report["interleaved"] = resume_two_stages_a_rank(rank, f"{root}/interleaved", pair)
    if rank < 2:
        Run(own_stages(tiny_model("lora"), 2, rank, 2), pair).train(range(2)).save(f"{root}/lora/two", 2)
    dist.barrier()
    run, steps = Run.resume(f"{root}/lora/two", 4, dist.group.WORLD)
    report["lora"] = run.train(range(steps, 6)).weights()
    return report


def resume_two_stages_a_rank(rank, root, pair):
    """4 stages on 2 ranks, 1 stage, 4 stages on 2 ranks."""
    if rank < 2:
        Run(own_stages(tiny_model(), 4, rank, 2), pair).train(range(2)).save(f"{root}/four", 2)
    if rank == 0:
        run, steps = Run.resume(f"{root}/four", 1, None)
        run.train(range(steps, 4)).save(f"{root}/one", 4)
    dist.barrier()
    if rank >= 2:
        return {}
    run, steps = Run.resume(f"{root}/one", 4, pair)
    return run.train(range(steps, 6)).weights()


def resume_case(rank, root, tie, pair):
    """2 stages for two steps, 4 for two, 1 for two; and 2 stages again, to compare bit by bit."""
    report = {}
    if rank < 2:
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        run = Run(own_stages(tiny_model(tie=tie), 2, rank, 2), pair).train(range(2))
        run.save(f"{root}/two", 2)
        report["drawn"] = draws()
        straight = run.train(range(2, 4)).weights()
        again, report["steps"] = Run.resume(f"{root}/two", 2, pair)
        report["drawn again"] = draws()
        resumed = again.train(range(2, 4)).weights()
        report["bitwise"] = all(torch.equal(straight[name], resumed[name]) for name in straight)
        report["lr"] = again.scheduler.get_last_lr()
    dist.barrier()
    run, steps = Run.resume(f"{root}/two", 4, dist.group.WORLD)
    report["fallback"] = draws()
    assert steps == 2
    read = {id(p) for p in run.optimizer.state}
    report["own state alone"] = read == {id(p) for _, p in run.named_parameters()}
    run.train(range(2, 4)).save(f"{root}/four", 4)
    if rank == 0:
        run, steps = Run.resume(f"{root}/four", 1, None)
        assert steps == 4
        report["weights"] = run.train(range(4, 6)).weights()
    dist.barrier()
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    report["stranger"] = message_of(
        save_training_state, f"{root}/four/state", dist.group.WORLD, stages=run.stages, optimizer=stranger
    )
    report["empty"] = message_of(
        load_training_state, f"{root}/none", dist.group.WORLD, stages=run.stages, optimizer=run.optimizer
    )
    return report


@pytest.mark.slow
def test_training_continues_with_any_number_of_stages(run_ranks, tmp_path):
    by_rank = run_ranks(resume_cases, 4, str(tmp_path))
    for tie in (True, False):
        check_resumed([report[tie] for report in by_rank], tie)
    for kind, model in (("interleaved", tiny_model()), ("lora", tiny_model("lora"))):
        straight, found = trained_weights(model), {}
        for report in by_rank:
            found |= report[kind]
        assert found.keys() == straight.keys() | ({"lm_head.weight"} if kind == "interleaved" else set())
        for name, weight in found.items():
            whole = straight["model.embed_tokens.weight" if name == "lm_head.weight" else name]
            torch.testing.assert_close(weight, whole, rtol=1e-6, atol=1e-6)


def trained_weights(model):
    """What an uninterrupted run of the whole model ends with."""
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    weights = Run([build_stage(model, plan_stages(LAYERS, 1), 0)], None).train(range(6)).weights()
    assert not any(torch.equal(weights[name], weight) for name, weight in before.items())
    return weights


def check_resumed(reports, tie):
    for rank, report in enumerate(reports):
        if rank < 2:
            assert report["drawn"] == report["drawn again"], "random state"
            assert report["bitwise"] and report["steps"] == 2
            assert report["lr"] == [1e-2 / 5] * 2
        assert report["fallback"] == reports[rank if rank < 2 else 0]["drawn"]
        assert report["own state alone"]
        assert "belong to none of the stages" in report["stranger"]
        assert "holds no training state" in report["empty"]
    straight = trained_weights(tiny_model(tie=tie))
    assert straight.keys() == reports[0]["weights"].keys()
    for name, weight in reports[0]["weights"].items():
        torch.testing.assert_close(weight, straight[name], rtol=1e-6, atol=1e-6)


# Kills

PLACES = {
    "write": (checkpoint, "save_file"),
    "join": (checkpoint, "_join_stages"),
    "dump": (torch, "save"),
    "rename": (os, "rename"),
}


def stepped(stages, step):
    """An optimizer whose state is `step` everywhere."""
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float(step))
    optimizer.step()
    return optimizer


def save_generation(folder, what, stages, group, *, generation):
    if what == "model":
        save_pretrained_stages(stages, group, folder)
    else:
        optimizer, counters = stepped(stages, generation), {"generation": generation}
        save_training_state(folder, group, stages=stages, optimizer=optimizer, counters=counters)


def save_and_die(rank, store, folder, what, victim, where, num_calls):
    """Two ranks save another generation over `folder`; one ends at a call of `where`, as a kill would."""
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=30), 2, rank)
    stages = own_stages(tiny_model(seed=7), 2, rank, 2)
    module, name = PLACES[where]
    original, calls = getattr(module, name), []

    def dying(*args, **kwargs):
        calls.append(args)
        if len(calls) == num_calls:
            os._exit(9)
        return original(*args, **kwargs)

    if rank == victim:
        setattr(module, name, dying)
    try:
        save_generation(folder, what, stages, dist.group.WORLD, generation=2)
    except RuntimeError:
        os._exit(3)


def check_generation(folder, what, *, generation):
    plan = plan_stages(LAYERS, 2)
    if what == "model":
        expected = tiny_model(seed={1: 0, 2: 7}[generation])
        for stage in (load_stage(folder, plan, stage) for stage in range(2)):
            for name, parameter in stage.model.named_parameters():
                assert torch.equal(parameter, expected.get_parameter(name)), name
        return
    stages = own_stages(tiny_model(), 1, 0, 1)
    optimizer = torch.optim.SGD(stages[0].parameters(), lr=0.0, momentum=0.9)
    assert load_training_state(folder, None, stages=stages, optimizer=optimizer) == {"generation": generation}
    for parameter in stages[0].parameters():
        assert (optimizer.state[parameter]["momentum_buffer"] == generation).all()


@pytest.mark.parametrize(
    ("what", "victim", "where", "num_calls"),
    [
        ("model", 1, "write", 1),
        ("model", 0, "join", 1),
        # Two files are renamed, then the old folder away, then the new one into its place. Between the last two nothing is
        # in place; whoever loads or saves next puts the last complete one back.
        ("model", 0, "rename", 3),
        ("model", 0, "rename", 4),
        # Random state and optimizer on both ranks, then what is common.
        ("state", 1, "dump", 2),
        ("state", 0, "dump", 3),
        ("state", 0, "rename", 2),
    ],
)
def test_a_rank_killed_while_saving_leaves_the_last_complete_checkpoint(tmp_path, what, victim, where, num_calls):
    folder, context = tmp_path / "saves" / "one", multiprocessing.get_context("fork")
    save_generation(folder, what, own_stages(tiny_model(), 1, 0, 1), None, generation=1)
    arguments = (tmp_path / "store", folder, what, victim, where, num_calls)
    processes = [context.Process(target=save_and_die, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == ([3, 9] if victim == 1 else [9, 3])
    is_last_rename = where == "rename" and num_calls == (4 if what == "model" else 2)
    assert folder.exists() != is_last_rename
    check_generation(folder, what, generation=1)
    save_generation(folder, what, own_stages(tiny_model(seed=7), 1, 0, 1), None, generation=2)
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
    check_generation(folder, what, generation=2)


def test_ranks_that_put_a_folder_back_at_once_do_not_fail(tmp_path, monkeypatch):
    folder, rename = tmp_path / "one", os.rename
    (tmp_path / ".one.old").mkdir()

    def denied(*paths):
        raise PermissionError

    def after_another(*paths):
        rename(*paths)
        rename(*paths)

    monkeypatch.setattr(folder_module.os, "rename", denied)
    with pytest.raises(PermissionError):
        recover_folder(folder)
    monkeypatch.setattr(folder_module.os, "rename", after_another)
    recover_folder(folder)
    assert folder.exists()
