"""What is done in a process with one real vLLM engine; `test_engine.py` starts one a case and asserts on its JSON.

python tests/e2e/engine_cases.py CASE FOLDER '{"keyword": value}'
"""

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams

from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer, Eagle3Draft, load_draft, save_draft
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
from hf_codraft.drafts.eagle3 import VLLM_METHOD, Eagle3DraftConfig
from hf_codraft.policy.anatomy import PolicyAnatomy
from hf_codraft.serving.acceptance import Acceptance
from hf_codraft.serving.refit import check_names
from hf_codraft.taps.packed import PackedBatch

MAX_LENGTH = 64
TOKENS = 3  # num_speculative_tokens


def build(folder: Path, *, policy, peft_config=None, draft="eagle3", **changes) -> CoDraftGRPOTrainer:
    settings = dict(
        output_dir=str(folder / "out"), use_vllm=True, vllm_mode="colocate", per_device_train_batch_size=8,
        num_generations=4, max_completion_length=16, vllm_max_model_length=MAX_LENGTH, max_steps=2, learning_rate=1e-3,
        draft_learning_rate=2e-3, num_speculative_tokens=TOKENS, bf16=False, logging_steps=1, report_to="none",
        save_strategy="no", rollout_dtype="float32", use_cpu=True, disable_tqdm=True, draft_warmup_rollouts=32,
        draft_warmup_epochs=4,
    )  # fmt: skip
    return CoDraftGRPOTrainer(
        tiny.save(policy, folder / "policy"), tiny.reward, CoDraftGRPOConfig(**settings | changes),
        train_dataset=tiny.prompts(), draft=draft, peft_config=peft_config,
    )  # fmt: skip


def prompts(num: int, length: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, tiny.VOCAB, (num, length), generator=generator).tolist()


def generate(llm: LLM, prompts_ids: list[list[int]], **params) -> list:
    params = SamplingParams(**dict(ignore_eos=True, logprobs=0) | params)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts_ids], params, use_tqdm=False)


# The engine against the trainer, tensor by tensor


def fused(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A checkpoint's weights under the engine's names: q, k, v and gate, up on top of one another."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights:
        name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
        name = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)
        parts.setdefault(name, []).append(tensor.detach())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def differences(expected: dict[str, torch.Tensor], engine: torch.nn.Module, *, without=()) -> list[str]:
    """Names of tensors that are missing on either side or not equal, in the engine's dtype; padding rows must be 0."""
    found = {name: p.detach() for name, p in engine.named_parameters() if name not in without}
    wrong = sorted(expected.keys() ^ found.keys())
    for name in expected.keys() & found.keys():
        rows = len(expected[name])
        if not torch.equal(expected[name].to(found[name].dtype), found[name][:rows]) or found[name][rows:].any():
            wrong.append(name)
    return wrong


def policy_differences(trainer) -> list[str]:
    model = trainer.model
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = [(name, tensor) for name, tensor in model.state_dict().items() if name not in tied]
    return differences(fused(state), trainer.vllm_generation._engine_policy())


def draft_differences(trainer) -> list[str]:
    state = {}
    for name, tensor in trainer.draft.state_dict().items():
        name = name.replace("midlayer.", "layers.0.").replace("d2t", "draft_id_to_target_id")
        state[name if name.startswith(("lm_head.", "draft_id")) else f"model.{name}"] = tensor
    state.pop("model.t2d", None)
    borrowed = () if "model.embed_tokens.weight" in state else ("model.embed_tokens.weight",)
    return differences(fused(state.items()), trainer.vllm_generation._engine_draft(), without=borrowed)


def refitted(trainer) -> dict:
    trainer.vllm_generation.sync_weights()
    return {"policy": policy_differences(trainer), "draft": draft_differences(trainer)}


# Proposals


@torch.no_grad()
def reference_proposal(draft: Eagle3Draft, anatomy: PolicyAnatomy, ids: list[int]) -> list[int]:
    """What our draft proposes after `ids`, driven token by token with taps from transformers' hidden states."""
    policy, context = anatomy.weights(), torch.tensor(ids[:-1])
    states = anatomy.model(context[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[j][0] for j in draft.tap_ids], -1)
    anchor, proposal = len(context) - 1, []
    for step in range(1, TOKENS + 1):
        tokens = torch.tensor(ids + proposal)
        padding = torch.zeros(len(tokens) - len(context), taps.shape[1])  # taps past the anchor are not looked at
        batch = PackedBatch(
            Shard(PackedLayout.from_lengths([len(tokens)])), tokens, torch.ones(len(tokens), dtype=torch.bool),
            torch.cat([taps, padding]), torch.zeros(len(tokens), policy.head_VH.shape[1]),
        )  # fmt: skip
        hidden = draft(batch, policy, torch.tensor([anchor]), num_passes=step)[-1, 0]
        proposal.append(draft.kept_ids[draft.lm_head(hidden).argmax()].item())
    return proposal


def compare_proposals(llm: LLM, draft: Eagle3Draft, anatomy: PolicyAnatomy, **params) -> dict:
    """Every proposal of the engine's drafter on the way through four completions, against the reference."""
    drafter = llm.llm_engine.model_executor.driver_worker.model_runner.drafter
    propose, seen = drafter.propose, []

    def recorded(*args, **kwargs):
        seen.append(propose(*args, **kwargs))
        return seen[-1]

    drafter.propose = recorded
    equal, accepted, distinct, wrong = 0, 0, set(), []
    for ids in prompts(4):
        seen.clear()
        (output,) = generate(llm, [ids], max_tokens=20, **params)
        text, length = ids + list(output.outputs[0].token_ids), len(ids) + 1
        for proposal in (row[0].tolist() for row in seen):
            if length > len(text):
                break
            reference = reference_proposal(draft, anatomy, text[:length])
            equal += proposal == reference
            distinct.add(tuple(proposal))
            if proposal != reference:
                wrong.append([text[:length], proposal, reference])
            following, matching = text[length : length + TOKENS], 0
            while matching < len(following) and following[matching] == proposal[matching]:
                matching += 1
            accepted += matching
            length += matching + 1
    drafter.propose = propose
    return {"equal": equal, "wrong": wrong, "accepted": accepted, "distinct": len(distinct)}


# Log-probs and length


@torch.no_grad()
def logprob_difference(trainer, outputs, prompts_ids, temperature: float = 1.0) -> float:
    worst = 0.0
    for ids, output in zip(prompts_ids, outputs, strict=True):
        completion = output.outputs[0]
        tokens = torch.tensor(ids + list(completion.token_ids))
        logits = trainer.anatomy.model(tokens[None]).logits[0, len(ids) - 1 : -1] / temperature
        reference = logits.log_softmax(-1).gather(1, tokens[len(ids) :, None])[:, 0]
        found = torch.tensor([entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids)])
        worst = max(worst, (reference - found).abs().max().item())
    return worst


@torch.no_grad()
def greedy_reference(trainer, ids: list[int], num_tokens: int) -> list[int]:
    text = list(ids)
    for _ in range(num_tokens):
        text.append(trainer.anatomy.model(torch.tensor([text])).logits[0, -1].argmax().item())
    return text[len(ids) :]


def full_length(trainer) -> dict:
    """Completions that end at the engine's last position, from one token of room to more than a proposal."""
    wrong = []
    for room in range(1, TOKENS + 4):
        (ids,) = prompts(1, MAX_LENGTH - room)
        for asked in (room, room + 5):
            (output,) = generate(trainer.vllm_generation.llm, [ids], temperature=0, max_tokens=asked)
            found, reference = list(output.outputs[0].token_ids), greedy_reference(trainer, ids, room)
            if found != reference:
                wrong.append([room, asked, found, reference])
    return {"wrong": wrong}


# Cases


def variant_draft() -> Eagle3Draft:
    """A draft with embeddings of its own and every norm that published ones have."""
    torch.manual_seed(0)
    config = Eagle3DraftConfig(
        vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=96, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, max_position_embeddings=512, eagle_aux_hidden_state_layer_ids=[1, 4, 7], fc_norm=True,
        norm_before_residual=True, norm_output=True, has_own_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return Eagle3Draft(config)


def refit(folder: Path, *, kind="llama", tie=True, vocab=None, lora=False, variant=False, dtype="float32") -> dict:
    peft_config = LoraConfig(r=4, target_modules="all-linear") if lora else None
    trainer = build(
        folder, policy=tiny.policy(kind, tie=tie), draft_vocab_size=vocab, peft_config=peft_config, rollout_dtype=dtype,
        draft_sample_method="greedy", draft=variant_draft() if variant else "eagle3",
    )  # fmt: skip
    engine, result = trainer.vllm_generation, {}
    cold = {"cold": refitted(trainer)}
    trainer.train()
    result["refits"] = cold | {"trained": refitted(trainer)}
    policy = engine._engine_policy()
    shared = {id(p) for p in policy.parameters()}
    result["shared"] = [n for n, p in engine._engine_draft().named_parameters() if id(p) in shared]
    result["dtypes"] = sorted({str(p.dtype) for p in policy.parameters()})
    if dtype == "float32":
        result["proposals"] = compare_proposals(engine.llm, trainer.draft, trainer.anatomy, temperature=0.4)
        texts = prompts(8, 7)
        result["logprob_difference"] = logprob_difference(trainer, generate(engine.llm, texts, max_tokens=20), texts)
        result["full_length"] = full_length(trainer)

    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with torch.no_grad():
        for parameter in trainer.draft.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 * parameter.std().nan_to_num(1.0).item() + 0.1)
    result["refits"]["other draft"] = refitted(trainer)
    result["policy_changed"] = [n for n, p in policy.named_parameters() if not torch.equal(before[n], p)]
    if dtype == "float32":
        result["other_proposals"] = compare_proposals(engine.llm, trainer.draft, trainer.anatomy, temperature=0.4)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.1)
        result["refits"]["other policy"] = refitted(trainer)
        texts = prompts(8, 9)
        result["other_logprob_difference"] = logprob_difference(
            trainer, generate(engine.llm, texts, max_tokens=20), texts
        )
    result["version"] = engine.version
    result["errors"] = faults(trainer)
    return result


def faults(trainer) -> dict[str, str]:
    """The errors of names that do not fit, and of tensors that do not arrive."""
    engine = trainer.vllm_generation
    draft, policy = engine._engine_draft(), engine._engine_policy()
    names = [name for name, _ in trainer.draft.serving_weights()]
    load = draft.load_weights

    def loses_fc(weights):
        load([(name, torch.zeros_like(tensor) if name == "fc.weight" else tensor) for name, tensor in weights])

    def attempt(function, *args) -> str:
        try:
            function(*args)
        except RuntimeError as error:
            return str(error)
        return ""

    draft.load_weights = loses_fc
    errors = {
        "unknown": attempt(check_names, draft, policy, [*names, "confidence.weight"]),
        "missing": attempt(check_names, draft, policy, [name for name in names if name != "norm.weight"]),
        "borrowed": attempt(check_names, draft, policy, [*names, "embed_tokens.weight"]),
        "lost": attempt(engine.sync_weights),
    }
    del draft.load_weights
    return errors


def saved(folder: Path, *, kind="llama", tie=True, vocab=None, layout="plain", rows=tiny.VOCAB) -> dict:
    """A draft written by `save_model` (or in the other layout), in an engine that knows nothing of us.

    More `rows` than tokens are padding of the policy's embeddings and head.
    """
    policy = tiny.policy(kind, tie=tie, vocab_size=rows)
    trainer = build(folder, policy=policy, use_vllm=False, draft_vocab_size=vocab, max_steps=1)
    trainer.train()
    trainer.save_model()
    path = folder / "out" / "draft"
    if layout == "speculators":
        path = folder / "speculators"
        save_draft(trainer.draft, path, base_model=str(folder / "policy"), layout=layout)
    llm = LLM(
        model=str(folder / "out"), dtype="float32", enforce_eager=True, max_model_len=MAX_LENGTH, max_num_seqs=4,
        speculative_config={"method": VLLM_METHOD, "model": str(path), "num_speculative_tokens": TOKENS},
    )  # fmt: skip
    return compare_proposals(llm, load_draft(path), trainer.anatomy, temperature=0)


# Losslessness


def processed(logits: torch.Tensor, *, temperature=1.0, top_p=1.0, top_k=0) -> torch.Tensor:
    """Probabilities after temperature, top-k and top-p, in that order, in fp64."""
    logits = logits.double() / temperature
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        ascending, index = logits.sort(-1)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        removed[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(removed).scatter(-1, index, removed), -torch.inf)
    return logits.softmax(-1)


def chi_square_z(expected: torch.Tensor, counts: torch.Tensor) -> dict:
    """Wilson-Hilferty z of Pearson's statistic; cells that expect fewer than 5 are pooled (all of them: z is 0)."""
    expected, counts = expected.double() * counts.sum(), counts.double()
    large = expected >= 5
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    counts = torch.cat([counts[large], counts[~large].sum()[None]])
    possible = expected > 1e-9
    cells = int(possible.sum()) - 1
    if counts[~possible].sum() > 0:
        return {"z": float("inf"), "cells": cells}
    if cells == 0:
        return {"z": 0.0, "cells": 0}
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    spread = 2 / (9 * cells)
    return {"z": ((statistic / cells) ** (1 / 3) - (1 - spread)) / spread**0.5, "cells": cells}


@torch.no_grad()
def exact_distribution(trainer, prompt: list[int], params: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities of the first token, of the first two, and, where few pairs are possible, of the third: V, VV, V."""
    model = trainer.anatomy.model

    def following(prefixes: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([torch.tensor(prompt).expand(len(prefixes), -1), prefixes], 1)
        return torch.cat([processed(model(piece).logits[:, -1], **params) for piece in rows.split(512)])

    first_V = following(torch.empty(1, 0, dtype=torch.long))[0]
    pair_VV = first_V[:, None] * following(torch.arange(tiny.VOCAB)[:, None])
    likely = pair_VV.nonzero()
    third_V = torch.zeros_like(first_V)
    if len(likely) < 2000:
        third_V = (pair_VV[tuple(likely.T)][:, None] * following(likely)).sum(0)
    return first_V, pair_VV, third_V


def sharp_policy(seed: int = 0) -> torch.nn.Module:
    """A policy of low entropy (about 2 nats), so that few cells hold most of the mass and guesses are accepted."""
    policy = tiny.policy("qwen3", tie=False, seed=seed, num_hidden_layers=4)
    with torch.no_grad():
        policy.lm_head.weight.mul_(2.0)
    return policy


def losslessness(folder: Path, *, method: str, num_samples: int = 4000) -> dict:
    trainer = build(
        folder, policy=sharp_policy(), draft_sample_method=method, per_device_train_batch_size=64, max_steps=1
    )
    trainer.warm_up_draft()
    engine = trainer.vllm_generation
    engine.sync_weights()
    (prompt,) = prompts(1)
    result = {}
    settings = [dict(temperature=1.0), dict(temperature=0.7, top_p=0.9, top_k=20), dict(temperature=2.0)]
    for params in settings:
        engine.take_rollouts()
        outputs = generate(engine.llm, [prompt] * num_samples, max_tokens=5, **params)
        ids = torch.tensor([list(output.outputs[0].token_ids) for output in outputs])
        first_V, pair_VV, third_V = exact_distribution(trainer, prompt, params)
        vocab = len(first_V)
        entry = {
            "first": chi_square_z(first_V, torch.bincount(ids[:, 0], minlength=vocab)),
            "second": chi_square_z(pair_VV.sum(0), torch.bincount(ids[:, 1], minlength=vocab)),
            "pair": chi_square_z(pair_VV.flatten(), torch.bincount(ids[:, 0] * vocab + ids[:, 1], minlength=vocab**2)),
        }
        if third_V.any():
            entry["third"] = chi_square_z(third_V, torch.bincount(ids[:, 2], minlength=vocab))
        entry["accept_length"] = Acceptance.total(engine.take_rollouts().rows).accept_length
        if params.keys() == {"temperature"}:
            texts = [prompt] * 100
            entry["logprob_difference"] = logprob_difference(trainer, outputs[:100], texts, params["temperature"])
        result[str(params["temperature"])] = entry

    result["greedy"] = greedy_among_sampled(trainer)
    return result


@torch.no_grad()
def seen(trainer, ids: list[int], said: list[int]) -> PackedBatch:
    """A row with taps from transformers' hidden states."""
    tokens = torch.tensor(ids + said)
    states = trainer.anatomy.model(tokens[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[j][0] for j in trainer.draft.tap_ids], -1)
    is_sampled = torch.arange(len(tokens)) >= len(ids)
    return PackedBatch(Shard(PackedLayout.from_lengths([len(tokens)])), tokens, is_sampled, taps, states[-1][0])


def acceptance(folder: Path, *, vocab: int | None) -> dict:
    """What the engine accepts of a draft that stands still, and what is expected of it on the same completions.

    Rows stay clear of the engine's last positions: a row near them stops the drafter for its whole batch.
    """
    trainer = build(folder, policy=sharp_policy(), per_device_train_batch_size=16, draft_vocab_size=vocab, max_steps=1)
    trainer.warm_up_draft()
    engine, learner, policy = trainer.vllm_generation, trainer.learner, trainer.anatomy.weights()
    engine.sync_weights()
    engine.take_rollouts()
    texts = prompts(16) * 16
    outputs = generate(engine.llm, texts, max_tokens=30, temperature=1.0)
    rows = [seen(trainer, ids, list(output.outputs[0].token_ids)) for ids, output in zip(texts, outputs)]
    total, batch = Acceptance.total(engine.take_rollouts().rows), PackedBatch.join(rows)
    expected = learner.expected_acceptance(batch, policy, learner.sampled_log_probs(batch, policy))
    loss = trainer.draft.compute_loss(batch, policy, num_passes=TOKENS)

    generate(engine.llm, texts[:3], max_tokens=4)
    generate(engine.llm, texts[:1], max_tokens=4)  # a second turn of one of the rows
    trainer._log_rollouts(3)
    return {
        "accepted": total.accept_rates, "expected": expected.accept_rates, "num_steps": total.num_steps,
        "renormalised": (loss.accept_sum_K / loss.count_K).tolist(),
        "coverage": (loss.num_covered / loss.num_supervised).item(),
        "table_of_turns": [str(value) for value in trainer._pending_extra_logs["accept_length"]],
    }  # fmt: skip


def greedy_among_sampled(trainer) -> dict:
    """Greedy completions, alone and in one batch with sampled ones, against the policy's."""
    engine, texts = trainer.vllm_generation, prompts(6)
    engine.take_rollouts()
    alone = generate(engine.llm, texts, max_tokens=20, temperature=0)
    accept_length = Acceptance.total(engine.take_rollouts().rows).accept_length
    mixed = [SamplingParams(temperature=t, max_tokens=20, ignore_eos=True) for _ in texts for t in (0.0, 1.0)]
    inputs = [{"prompt_token_ids": ids} for ids in texts for _ in range(2)]
    together = engine.llm.generate(inputs, mixed, use_tqdm=False)[::2]
    wrong = [
        ids
        for ids, *outputs in zip(texts, alone, together)
        for output in outputs
        if list(output.outputs[0].token_ids) != greedy_reference(trainer, ids, 20)
    ]
    return {"wrong": wrong, "accept_length": accept_length}


# Rollouts of the policy that is trained


def moe_policy(seed: int = 0) -> torch.nn.Module:
    """Four experts a layer, whose weights vLLM packs in place on CPU."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=128, moe_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    policy = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0 if "embed" in name or "lm_head" in name else 3.0)
    return policy


def agreement(folder: Path) -> dict:
    """An MoE policy whose every batch of rollouts is compared with it: by the trainer, and here at full length."""
    trainer = build(
        folder, policy=moe_policy(), check_rollouts_every=1, max_steps=1, learning_rate=1e-2, draft_warmup_rollouts=0
    )
    engine, texts, result, seen = trainer.vllm_generation, prompts(8, 7), {}, []
    check = engine.check_rollouts

    def spied(*args, **kwargs):
        seen.append(check(*args, **kwargs))
        return seen[-1]

    engine.check_rollouts = spied

    def checked() -> list:
        return [[found.num_tokens, found.mean, found.num_outliers] for found in seen]

    def state() -> dict:
        outputs = generate(engine.llm, texts, max_tokens=20)
        return {
            "checked": checked(), "logprob_difference": logprob_difference(trainer, outputs, texts), "version": engine.version,
        }  # fmt: skip

    def evaluate() -> dict:
        seen.clear()
        trainer.evaluate(tiny.prompts(2))
        return state()

    def error(function) -> str:
        try:
            function()
        except RuntimeError as raised:
            return str(raised)
        return ""

    def change(factor: float) -> None:
        trainer.model.load_state_dict({name: factor * tensor for name, tensor in trainer.model.state_dict().items()})

    engine.sync_weights()
    result["unchanged"] = state()
    for call in ("first", "second"):  # the second one begins at step 0 again
        seen.clear()
        trainer.train()
        result[f"{call} train"] = {"checked": checked()}
    result["evaluated"] = evaluate()
    result["evaluated again"] = evaluate()
    change(1.1)  # as load_best_model_at_end does
    result["loaded"] = evaluate()
    engine.temperature, engine.top_p, engine.top_k = 0.7, 0.8, 12
    seen.clear()
    trainer.evaluate(tiny.prompts(2))
    result["processed"] = {"checked": checked()}
    engine.temperature, engine.top_p, engine.top_k = 1.0, 1.0, 0

    engine.is_stale = lambda: False
    change(0.9)
    result["stale"] = error(evaluate)
    del engine.is_stale
    result["mended"] = evaluate()
    broken = trainer.draft.fc.weight.detach().clone()
    with torch.no_grad():
        trainer.draft.fc.weight[0, 0] = torch.nan
    result["not finite"] = error(engine.sync_weights)
    with torch.no_grad():
        trainer.draft.fc.weight.copy_(broken)
    for number, entry in enumerate(engine._packed._packed):
        if "w13_weight" in entry.plain:  # of the experts' form only the padding is made
            only_padded = entry.pack.args[0]._pad_moe_intermediate
            engine._packed._packed[number] = dataclasses.replace(entry, pack=only_padded)
    result["garbage"] = [error(engine.sync_weights), error(evaluate)]
    return result


# Training


def markov_policy(seed: int) -> torch.nn.Module:
    """A policy that has learnt a language of 24 tokens, each with four successors."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randperm(tiny.VOCAB - 3, generator=generator)[:24] + 3
    successors = words[torch.randint(24, (tiny.VOCAB, 4), generator=generator)]
    probability = torch.tensor([0.6, 0.25, 0.1, 0.05]).expand(tiny.VOCAB, 4)
    policy = tiny.policy("qwen3", tie=False, seed=seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(80):
        text = [torch.randint(3, tiny.VOCAB, (32,), generator=generator)]
        for _ in range(23):
            choice = torch.multinomial(probability[text[-1]], 1, generator=generator)
            text.append(successors[text[-1]].gather(1, choice)[:, 0])
        tokens = torch.stack(text, 1)
        policy(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy


def co_training(folder: Path, *, seed: int, frozen: bool, steps: int) -> dict:
    trainer = build(
        folder, policy=markov_policy(seed), seed=seed, freeze_draft=frozen, max_steps=steps, learning_rate=1e-5,
        draft_learning_rate=3e-3, draft_warmup_rollouts=0, per_device_train_batch_size=16, log_completions=True,
        num_completions_to_print=1, save_strategy="steps", save_steps=steps,
    )  # fmt: skip
    trainer.train()
    return {"log": trainer.state.log_history}


if __name__ == "__main__":
    case, folder, keywords = sys.argv[1:]
    result = globals()[case](Path(folder), **json.loads(keywords))
    (Path(folder) / "result.json").write_text(json.dumps(result))
