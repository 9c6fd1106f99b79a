"""Checkpoints, resumes and weight streams of pipelines on gloo ranks, against unsplit transformers and PEFT models."""

import functools
import json
import multiprocessing
import os
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import policy
from torch import distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

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
    """A stage, or the whole model, in training, with two parameter groups and a schedule."""

    def __init__(self, stage, group):
        self.stage, self.group = stage, group
        parameters = dict(stage.model.named_parameters())
        decayed = [p for name, p in parameters.items() if p.ndim > 1]
        plain = [p for name, p in parameters.items() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        # eps: where a gradient is all but zero, Adam's step would show the rounding of the sums magnified
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.pipeline = None if group is None else PolicyPipeline([stage], NUM_MICROBATCHES, group=group)

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            if self.pipeline is None:
                for ids in batch_of(step)["input_ids"].chunk(NUM_MICROBATCHES):
                    loss = self.stage.model(input_ids=ids, labels=ids, use_cache=False).loss
                    (loss / NUM_MICROBATCHES).backward()
            else:
                self.pipeline.train_step(batch_of(step), lambda *args: next_token_loss(*args) / NUM_MICROBATCHES)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, folder, steps_done):
        save_pretrained_stages([self.stage], self.group, f"{folder}/model")
        save_training_state(
            f"{folder}/state",
            self.group,
            stages=[self.stage],
            optimizer=self.optimizer,
            schedulers=[self.scheduler],
            counters={"steps": steps_done},
        )

    @classmethod
    def resume(cls, folder, num_stages, group):
        rank = 0 if group is None else dist.get_rank(group)
        run = cls(load_stage(f"{folder}/model", plan_stages(LAYERS, num_stages), rank), group)
        counters = load_training_state(
            f"{folder}/state", group, stages=[run.stage], optimizer=run.optimizer, schedulers=[run.scheduler]
        )
        return run, counters["steps"]

    def weights(self):
        return {name: p.detach().clone() for name, p in self.stage.model.named_parameters()}


def draws():
    return float(torch.rand(())), random.random(), float(np.random.rand())


def resume_cases(rank, root):
    pair = dist.new_group([0, 1])
    return {tie: resume_case(rank, f"{root}/tie-{tie}", tie, pair) for tie in (True, False)}


def resume_case(rank, root, tie, pair):
    """2 stages for two steps, 4 for two, 1 for two; and 2 stages again, to compare bit by bit."""
    report = {}
    if rank < 2:
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        run = Run(build_stage(tiny_model(tie=tie), plan_stages(LAYERS, 2), rank), pair).train(range(2))
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
    report["own state alone"] = read == {id(p) for p in run.stage.model.parameters()}
    run.train(range(2, 4)).save(f"{root}/four", 4)
    if rank == 0:
        run, steps = Run.resume(f"{root}/four", 1, None)
        assert steps == 4
        report["weights"] = run.train(range(4, 6)).weights()
    dist.barrier()
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    report["stranger"] = message_of(
        save_training_state, f"{root}/four/state", dist.group.WORLD, stages=[run.stage], optimizer=stranger
    )
    report["empty"] = message_of(
        load_training_state, f"{root}/none", dist.group.WORLD, stages=[run.stage], optimizer=run.optimizer
    )
    return report


@pytest.mark.slow
def test_training_continues_with_any_number_of_stages(run_ranks, tmp_path):
    by_rank = run_ranks(resume_cases, 4, str(tmp_path))
    for tie in (True, False):
        check_resumed([report[tie] for report in by_rank], tie)


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
    model = tiny_model(tie=tie)
    straight = Run(build_stage(model, plan_stages(LAYERS, 1), 0), None).train(range(6)).weights()
    assert straight.keys() == reports[0]["weights"].keys()
    for name, weight in reports[0]["weights"].items():
        assert not torch.equal(weight, dict(model.named_parameters())[name])
        torch.testing.assert_close(weight, straight[name], rtol=1e-6, atol=1e-6)


# Kills


def save_and_die(folder, where, num_calls):
    """Saves another model over `folder` and ends at a call of `where`, as a kill would."""
    module, name = {"join": (checkpoint, "_join_stages"), "rename": (os, "rename")}[where]
    original, calls = getattr(module, name), []

    def dying(*args, **kwargs):
        calls.append(args)
        if len(calls) == num_calls:
            os._exit(9)
        return original(*args, **kwargs)

    stages = own_stages(tiny_model(seed=7), 1, 0, 1)
    setattr(module, name, dying)
    save_pretrained_stages(stages, None, folder)


@pytest.mark.parametrize(("where", "num_calls"), [("join", 1), ("rename", 1), ("rename", 2), ("rename", 3)])
def test_a_kill_while_saving_leaves_the_last_complete_checkpoint(tmp_path, where, num_calls):
    folder = tmp_path / "model"
    stages = own_stages(tiny_model(), 1, 0, 1)
    save_pretrained_stages(stages, None, folder)
    process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(folder, where, num_calls))
    process.start()
    process.join()
    assert process.exitcode == 9
    # The weights are renamed first, then the old folder away, then the new one into its place. Between the last two
    # nothing is in place; the next call on the folder puts the last complete one back.
    assert folder.exists() == ((where, num_calls) != ("rename", 3))
    recover_folder(folder)
    expected = tiny_model().state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(tensor, expected[name])
    save_pretrained_stages(own_stages(tiny_model(seed=3), 1, 0, 1), None, folder)
    assert [path.name for path in Path(tmp_path).iterdir()] == ["model"]
    assert not torch.equal(
        AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight, expected["model.embed_tokens.weight"]
    )
