"""Which sampling options leave rollouts what they are without a draft; all others are refused before anything is built.

`SERVED` was shown by the real engine against exact probabilities (tests/e2e/test_sampling_options.py); `REFUSED` says why not.
Together they know every field of vLLM's `SamplingParams`, and docs/compatibility.md prints them.
"""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig
from trl import GRPOConfig

from hf_codraft._optional import require

# Option and what a rollout is with it, as shown.
SERVED = {
    "temperature": "tokens and log-probs follow the policy at this temperature; 0 is greedy",
    "top_p": "tokens and log-probs follow the cut distribution",
    "top_k": "tokens and log-probs follow the cut distribution",
    "repetition_penalty": "tokens and log-probs follow the penalised distribution, drafted tokens counted",
    "presence_penalty": "tokens and log-probs follow the penalised distribution, drafted tokens counted",
    "frequency_penalty": "tokens and log-probs follow the penalised distribution, drafted tokens counted",
    "allowed_token_ids": "tokens and log-probs follow the cut distribution",
    "bad_words": "tokens and log-probs follow the cut distribution; words of several tokens too",
    "stop": "ends with the token that completes the first stop string",
    "include_stop_str_in_output": "concerns the text, not the tokens",
    "stop_token_ids": "ends with the first of them",
    "ignore_eos": "goes on after EOS",
    "max_tokens": "ends there",
    "repetition_detection": "ends where the pattern is complete (pass vLLM's `RepetitionDetectionParams`)",
    "prompt_logprobs": "no influence on the tokens",
    "detokenize": "no influence on the tokens",
    "skip_special_tokens": "no influence on the tokens",
    "spaces_between_special_tokens": "no influence on the tokens",
    "output_kind": "no influence on the tokens",
    "stream_interval": "no influence on the tokens",
    "skip_clone": "no influence on the tokens",
    "skip_reading_prefix_cache": "no influence on the tokens",
    "routed_experts_prompt_start": "no influence on the tokens",
    "watermarking": "no influence on the tokens (TRL's engine has no watermark)",
    "extra_args": "no influence on the tokens",
}


@dataclass(frozen=True)
class Refusal:
    """Why an option is refused with a draft; made and read here, printed in docs/compatibility.md.

    Args:
        reason (`str`): what would happen.
        off (`tuple`): values that switch the option off, besides `None`.
        way_out (`str`): what to do instead of training with `draft=None`.
    """

    reason: str
    off: tuple[Any, ...] = ()
    way_out: str = "Remove it"


REFUSED = {
    "min_p": Refusal("vLLM rejects it under speculation", (0.0,), "Remove it, or use top_p or top_k"),
    "logit_bias": Refusal("vLLM rejects it under speculation", ({},)),
    "structured_outputs": Refusal("the draft does not follow the grammar, so tokens are not drawn from the constrained policy"),
    "seed": Refusal(
        "it fixes the policy's draws but not the draft's, so equal seeds give different completions", (-1,),
        "Remove it; the trainer's own `seed` seeds the engine",
    ),
    "min_tokens": Refusal(
        "vLLM bars the end for longer under speculation: also for the token after accepted ones", (0,),
        "Remove it, or let the reward judge the length",
    ),
    "thinking_token_budget": Refusal("vLLM needs a reasoning parser for it, which TRL's engine has not", (-1,)),
    "prompt_logprob_token_ids": Refusal("only another model runner of vLLM's serves it"),
    "prompt_logprob_start": Refusal("only another model runner of vLLM's serves it"),
    "trace_decode_token_ids": Refusal("vLLM rejects it under speculation", ([],)),
    "n": Refusal("TRL reads one completion a prompt", (1,), "Set num_generations"),
    "logprobs": Refusal("TRL asks for the sampled token's log-prob alone, and reads another one where there are more", (0,)),
    "logprob_token_ids": Refusal("TRL reads the sampled token's log-prob alone"),
    "flat_logprobs": Refusal("TRL cannot read log-probs in this form", (False,)),
    "output_text_buffer_length": Refusal("vLLM sets it itself", (0,)),
}  # fmt: skip

# Where TRL has a field of its own for an option.
TRL_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_completion_length",
    "structured_outputs": "vllm_structured_outputs_regex",
}


def sent_options(args: GRPOConfig) -> dict[str, Any]:
    """The options that TRL's colocated engine is asked with: TRL's fields, then `generation_kwargs`, then the regex."""
    sent = {name: getattr(args, field) for name, field in TRL_FIELDS.items() if name != "structured_outputs"}
    sent |= {"n": 1, "logprobs": 0, "min_p": args.min_p or 0.0, **(args.generation_kwargs or {})}
    if args.vllm_structured_outputs_regex is not None:
        sent["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return sent


def check_speculation(args: GRPOConfig) -> None:
    """Refuses what speculative rollouts cannot do, before anything is built.

    Raises:
        ValueError: for a sampling option that was not shown lossless under speculation, for one that vLLM does not know or
            whose value it rejects, and for an engine mode that is not built.
    """
    if args.vllm_mode != "colocate":
        raise ValueError(
            f"vllm_mode={args.vllm_mode!r} cannot serve a co-trained draft yet: a server's draft is not refitted. Use "
            "vllm_mode='colocate', or draft=None."
        )
    sent = sent_options(args)
    for name, value in sent.items():
        if name in SERVED:
            continue
        source = (
            f"generation_kwargs[{name!r}]" if name in (args.generation_kwargs or {}) else TRL_FIELDS.get(name, name)
        )
        if name not in REFUSED:
            raise ValueError(
                f"{source}={value!r} cannot be used with a draft: it is no sampling option of vLLM that was shown to leave "
                "rollouts unchanged under speculation. Remove it, or train with draft=None."
            )
        refusal = REFUSED[name]
        if value is not None and value not in refusal.off:
            raise ValueError(
                f"{source}={value!r} cannot be used with a draft: {refusal.reason}. {refusal.way_out}, or train with "
                "draft=None."
            )
    _check_values({name: value for name, value in sent.items() if name in SERVED})


def _check_values(served: dict[str, Any]) -> None:
    """Lets vLLM judge the values, which it would do at the first rollout."""
    require("vllm", extra="vllm")
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RepetitionDetectionParams

    try:
        SamplingParams(**served)
    except (TypeError, ValueError, AttributeError, VLLMValidationError) as error:
        raise ValueError(f"vLLM rejects the sampling options {served}: {error}") from error
    detection = served.get("repetition_detection")
    if detection is not None and not isinstance(detection, RepetitionDetectionParams):
        raise ValueError(
            f"generation_kwargs['repetition_detection']={detection!r} must be a vllm.sampling_params.RepetitionDetectionParams."
        )


def check_policy(args: GRPOConfig, model: Any) -> None:
    """Refuses a policy whose class in vLLM cannot hand hidden states to a draft, which vLLM says after loading it.

    Args:
        model: as the trainer got it, a model or where one is.

    Raises:
        ValueError: naming vLLM's class.
    """
    require("vllm", extra="vllm")
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    config = AutoConfig.from_pretrained(model, **_loading(args)) if isinstance(model, str) else model.config
    names = config.architectures or [type(model).__name__]
    registered = next((ModelRegistry.models[name] for name in names if name in ModelRegistry.models), None)
    if registered is None:
        reason = f"{names[0]} is unknown to vLLM"
    else:
        try:
            kind = registered.load_model_cls()
        except ImportError:  # vLLM names the missing package itself
            return
        if kind.__name__.startswith("Transformers"):
            reason = f"vLLM has no class of its own for {names[0]}"
        elif not supports_eagle3(kind):
            reason = f"vLLM's {kind.__name__} has no EAGLE-3 interface"
        else:
            return
    raise ValueError(
        f"model ({names[0]}) cannot be served with a draft: {reason}. Train with draft=None, or take a policy that "
        "docs/compatibility.md lists as served."
    )


def _loading(args: GRPOConfig) -> dict[str, Any]:
    """What TRL loads a policy with that concerns its config."""
    asked = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    return {
        name: asked[name]
        for name in ("trust_remote_code", "revision", "subfolder", "token", "cache_dir")
        if name in asked
    }


def repair_stop_strings() -> None:
    """Makes a completion end with the token that completes its first stop string.

    vLLM looks for stop strings after all tokens of a verification step were added, so a completion keeps up to
    `num_speculative_tokens` tokens of what the policy said after its end. Token by token it is as without a draft; the engine
    cuts log-probs to the same length. Serves vLLM 0.31 and 0.32; delete it when tests/e2e/test_sampling_options.py passes
    without.
    """
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    original = BaseIncrementalDetokenizer.update
    if original.__module__ == __name__:
        return

    def update(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not self.stop:
            return original(self, new_token_ids, stop_terminated)
        for number, token in enumerate(new_token_ids, start=1):
            is_last = number == len(new_token_ids)
            if stop_string := original(self, [token], stop_terminated and is_last):
                return stop_string
        return None

    BaseIncrementalDetokenizer.update = update
