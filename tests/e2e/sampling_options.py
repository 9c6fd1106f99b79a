"""A policy that says every token with known chances, and what a completion is under every sampling option.

The truth is the meaning of each option as vLLM documents it, computed here in plain Python from the known chances.
"""

import math
from collections import Counter
from collections.abc import Iterator

A, B, C, X, EOS = 67, 68, 69, 90, 1  # ids of tiny.tokenizer()
TEXT = {A: "a", B: "b", C: "c", X: "x", EOS: ""}
POLICY = {A: 0.30, B: 0.25, C: 0.15, X: 0.20, EOS: 0.10}
BAD_DRAFT = {A: 0.10, B: 0.15, C: 0.45, X: 0.05, EOS: 0.25}
PROMPT = [A, C, C]
MAX_TOKENS = 6  # one of the prompt's step, four of a whole verification step, one more

# By the option that each is about; all others are off.
CUTTING = {
    "temperature": [{"temperature": 0.5}, {"temperature": 2.0}, {"temperature": 0.0}],
    "top_p": [{"top_p": 0.5}],
    "top_k": [{"top_k": 3}],
    "repetition_penalty": [{"repetition_penalty": 1.5}, {"repetition_penalty": 0.7}],
    "presence_penalty": [{"presence_penalty": 1.0}],
    "frequency_penalty": [{"frequency_penalty": 0.8}],
    "allowed_token_ids": [{"allowed_token_ids": [A, X, EOS]}],
    "bad_words": [{"bad_words": ["b"]}, {"bad_words": ["ab"]}],
    "stop": [{"stop": ["x"]}, {"stop": ["ab", "ca"]}],
    "include_stop_str_in_output": [{"stop": ["bx"], "include_stop_str_in_output": True}],
    "stop_token_ids": [{"stop_token_ids": [X]}],
    "ignore_eos": [{"ignore_eos": True}],
    "max_tokens": [{"max_tokens": 3}],
    "repetition_detection": [{"repetition_detection": {"max_pattern_size": 1, "min_count": 3}}],
    "all together": [
        {"temperature": 0.8, "top_p": 0.95, "top_k": 4, "repetition_penalty": 1.2, "presence_penalty": 0.3,
         "frequency_penalty": 0.2, "bad_words": ["ca"], "stop": ["ab"], "stop_token_ids": [X]}
    ],
}  # fmt: skip
NEUTRAL = {
    "prompt_logprobs": 1,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "output_kind": "DELTA",
    "stream_interval": 2,
    "skip_clone": True,
    "skip_reading_prefix_cache": True,
    "routed_experts_prompt_start": 1,
    "watermarking": False,
    "extra_args": {"nobody": "reads this"},
}


def cases() -> dict[str, dict]:
    found = {f"{name} {number}": params for name, several in CUTTING.items() for number, params in enumerate(several)}
    found |= {name: {name: value} for name, value in NEUTRAL.items()}
    return found


def chances(prefix: tuple[int, ...], params: dict) -> dict[int, float]:
    """The exact distribution of the next token."""
    logits = {token: math.log(chance) for token, chance in POLICY.items()}
    count = Counter(prefix)
    for token in logits:
        if token in count or token in PROMPT:
            penalty = params.get("repetition_penalty", 1.0)
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        logits[token] -= params.get("frequency_penalty", 0.0) * count[token]
        logits[token] -= params.get("presence_penalty", 0.0) * (token in count)
    text = "".join(TEXT[token] for token in prefix)
    bad = [word[-1] for word in params.get("bad_words", []) if text.endswith(word[:-1])]
    allowed = params.get("allowed_token_ids", logits.keys())
    logits = {token: logit for token, logit in logits.items() if token in allowed and TEXT[token] not in bad}
    temperature = params.get("temperature", 1.0)
    if temperature == 0:
        return {max(logits, key=logits.get): 1.0}
    ranked = sorted(logits, key=logits.get, reverse=True)[: params.get("top_k") or None]
    weights = {token: math.exp(logits[token] / temperature) for token in ranked}
    total, kept, mass = sum(weights.values()), [], 0.0
    for token in ranked:
        if mass < params.get("top_p", 1.0) * total:
            kept.append(token)
        mass += weights[token]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def has_ended(tokens: tuple[int, ...], params: dict) -> bool:
    if len(tokens) == params.get("max_tokens", MAX_TOKENS):
        return True
    if tokens[-1] in params.get("stop_token_ids", []) or (tokens[-1] == EOS and not params.get("ignore_eos")):
        return True
    text = "".join(TEXT[token] for token in tokens)
    if any(word in text for word in params.get("stop", [])):
        return True
    detection = params.get("repetition_detection")
    return (
        detection is not None
        and len(tokens) >= detection["min_count"]
        and len({*tokens[-detection["min_count"] :]}) == 1
    )


def completions(
    params: dict, prefix: tuple[int, ...] = (), chance: float = 1.0
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every possible completion with its exact chance."""
    for token, share in chances(prefix, params).items():
        tokens = (*prefix, token)
        if has_ended(tokens, params):
            yield tokens, chance * share
        else:
            yield from completions(params, tokens, chance * share)
