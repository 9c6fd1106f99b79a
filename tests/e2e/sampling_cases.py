"""Every sampling option in one real engine, with a draft that equals the policy and one that doesn't.

python tests/e2e/sampling_cases.py CASE FOLDER '{"keyword": value}'
"""

import json
import math
import sys
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny
from engine_cases import build, chi_square_z
from sampling_options import BAD_DRAFT, MAX_TOKENS, POLICY, PROMPT, cases, chances, completions
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

from hf_codraft.serving.acceptance import Acceptance
from hf_codraft.serving.sampling import sent_options

NUM_SAMPLES = 500


def write_head(head: torch.nn.Linear, known: dict[int, float]) -> None:
    """Makes the logits of a state of ones the logarithms of the known chances; other tokens are never said."""
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:, 0] = -100.0
        for token, chance in known.items():
            head.weight[token, 0] = math.log(chance)


def known_policy() -> torch.nn.Module:
    """A policy whose every hidden state is a row of ones."""
    policy = tiny.policy("llama", tie=False, num_hidden_layers=4)
    with torch.no_grad():
        policy.model.embed_tokens.weight.fill_(1.0)
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    write_head(policy.lm_head, POLICY)
    return policy


def write_draft(draft, known: dict[int, float]) -> None:
    """A draft that says the known chances in every pass: it hands on the first tap, a row of ones."""
    with torch.no_grad():
        draft.midlayer.self_attn.o_proj.weight.zero_()
        draft.midlayer.mlp.down_proj.weight.zero_()
        draft.fc.weight.zero_()
        draft.fc.weight[:, : tiny.HIDDEN] = torch.eye(tiny.HIDDEN)
        draft.norm.weight.fill_(1.0)
    write_head(draft.lm_head, known)


def as_vllm_takes(params: dict) -> dict:
    params = dict(params)
    if "repetition_detection" in params:
        params["repetition_detection"] = RepetitionDetectionParams(**params["repetition_detection"])
    if "output_kind" in params:
        params["output_kind"] = RequestOutputKind[params["output_kind"]]
    return params


def judge(params: dict, samples: list[tuple[int, ...]]) -> dict:
    """Normal scores of several views of the samples against the exact chances, and samples that cannot be."""
    exact = dict(completions(params))
    views = {"length": len, "first three": lambda tokens: tokens[:3]}
    for position in range(params.get("max_tokens", MAX_TOKENS)):
        views[f"token {position}"] = lambda tokens, position=position: tokens[position : position + 1]
    possible = [tokens for tokens in samples if tokens in exact]
    scores = {}
    for name, view in views.items():
        expected, counts = defaultdict(float), Counter(view(tokens) for tokens in possible)
        for tokens, chance in exact.items():
            expected[view(tokens)] += chance
        scores[name] = chi_square_z(
            torch.tensor(list(expected.values()), dtype=torch.float64),
            torch.tensor([counts[cell] for cell in expected]),
        )["z"]
    return {"z": scores, "impossible": [tokens for tokens in samples if tokens not in exact]}


def logprob_difference(params: dict, outputs) -> float:
    worst = 0.0
    for output in outputs:
        tokens = tuple(output.token_ids)
        assert len(output.logprobs) == len(tokens), (len(output.logprobs), tokens)
        for position, (token, entry) in enumerate(zip(tokens, output.logprobs)):
            exact = chances(tokens[:position], params).get(token)
            if exact is not None:
                worst = max(worst, abs(entry[token].logprob - math.log(exact)))
    return worst


def options(folder: Path) -> dict:
    generation_kwargs = {"stop": ["x"], "temperature": 0.5}
    trainer = build(
        folder, policy=known_policy(), per_device_train_batch_size=128, draft_warmup_rollouts=0, top_k=4,
        generation_kwargs=generation_kwargs, max_completion_length=MAX_TOKENS,
    )  # fmt: skip
    engine, result = trainer.vllm_generation, {}
    for draft, known in {"equal": POLICY, "other": BAD_DRAFT}.items():
        write_draft(trainer.draft, known)
        engine.sync_weights()
        for name, params in cases().items():
            torch.manual_seed(0)
            engine.take_rollouts()
            sampling = SamplingParams(**dict(max_tokens=MAX_TOKENS, logprobs=0) | as_vllm_takes(params))
            num_samples = 32 if name in params else NUM_SAMPLES  # an option that leaves the tokens alone
            outputs = engine.llm.generate([{"prompt_token_ids": PROMPT}] * num_samples, sampling, use_tqdm=False)
            outputs = [output.outputs[0] for output in outputs]
            result[f"{name}, {draft} draft"] = judge(params, [tuple(output.token_ids) for output in outputs]) | {
                "logprob_difference": 0.0 if params.get("temperature") == 0 else logprob_difference(params, outputs),
                "histogram": Acceptance.total(engine.take_rollouts().rows).histogram,
            }
    return {"options": result, "trl": through_trl(trainer)}


def through_trl(trainer) -> dict:
    """What TRL asks the engine for, and what it reads back."""
    engine, seen = trainer.vllm_generation, []
    generate = engine.llm.generate

    def recorded(prompts, sampling_params, **kwargs):
        seen.append(sampling_params)
        return generate(prompts, sampling_params=sampling_params, **kwargs)

    engine.llm.generate = recorded
    _, ids, logprobs, _ = engine.generate([PROMPT] * 128, images=None, num_generations=4, profiler=nullcontext())
    sent = sent_options(trainer.args)
    return {
        "as told": [repr(params) == repr(SamplingParams(**sent)) for params in seen],
        "draft_temperature": trainer.learner.temperature,
        "lengths": [len(row) == len(scores) for row, scores in zip(ids, logprobs)],
        **judge({"temperature": 0.5, "top_k": 4, "stop": ["x"]}, [tuple(row) for row in ids]),
    }


if __name__ == "__main__":
    case, folder, keywords = sys.argv[1:]
    result = globals()[case](Path(folder), **json.loads(keywords))
    (Path(folder) / "result.json").write_text(json.dumps(result))
