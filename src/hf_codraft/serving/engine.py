"""TRL's colocated vLLM engine with a drafter, refitted with both weight sets.

Patch points of TRL, each pinned by tests/parity/test_contracts.py: the name `LLM` in `trl.generation.vllm_generation`
(exchanged only inside `_init_vllm`, whose argument list is fixed), and the name `VLLMGeneration` in
`trl.trainer.grpo_trainer` (exchanged only while `GRPOTrainer.__init__` runs, see [`rollout_engine`]).
"""

import functools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from hf_codraft.drafts.eagle3 import VLLM_METHOD, Eagle3Draft
from hf_codraft.hub.checkpoint import plain_config
from hf_codraft.serving.acceptance import Acceptance
from hf_codraft.serving.agreement import NUM_ROWS, Bounds, Distance, Sampling, complaint, distance
from hf_codraft.serving.cpu import is_cpu, repair_sampling
from hf_codraft.serving.packed import PackedLayers, exchanged
from hf_codraft.serving.refit import WeightStream, check_finite, check_names, fingerprint
from hf_codraft.serving.sampling import repair_stop_strings

logger = logging.getLogger(__name__)

# Options of vLLM's SamplingParams that leave the log-probs of what is drawn alone.
_KEEPS_DISTRIBUTION = {
    "max_tokens", "stop", "stop_token_ids", "seed", "n", "ignore_eos", "include_stop_str_in_output", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "logprobs", "prompt_logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class Speculation:
    """How rollouts are drafted; made by the trainer, read by [`CoDraftVLLMGeneration`].

    Args:
        build_draft (callable): makes the draft for the policy it is given, before the engine starts.
        num_speculative_tokens (`int`): tokens guessed before each verification.
        draft_sample_method (`str`): `"probabilistic"` or `"greedy"`; both are lossless.
    """

    build_draft: Callable[[nn.Module], Eagle3Draft]
    num_speculative_tokens: int
    draft_sample_method: str = "probabilistic"


@contextmanager
def rollout_engine(speculation: Speculation | None, dtype: str, *, check_every: int) -> Iterator[None]:
    """While open, a `GRPOTrainer` that is constructed builds its vLLM engine with these settings."""

    def build(*args: Any, **kwargs: Any) -> "CoDraftVLLMGeneration":
        return CoDraftVLLMGeneration(*args, speculation=speculation, dtype=dtype, check_every=check_every, **kwargs)

    with exchanged(grpo_trainer, "VLLMGeneration", build):
        yield


@dataclass
class Rollouts:
    """What the engine did since it was last asked; made by [`CoDraftVLLMGeneration`], read by the trainer.

    Args:
        rows (`list[Acceptance]`): acceptance of each generated row, in order; empty without speculation.
        generate_s, refit_s (`float`): seconds spent.
        num_tokens (`int`): completion tokens generated.
    """

    rows: list[Acceptance] = field(default_factory=list)
    generate_s: float = 0.0
    refit_s: float = 0.0
    num_tokens: int = 0


class CoDraftVLLMGeneration(VLLMGeneration):
    """`VLLMGeneration` whose engine may draft, and whose `sync_weights` refits policy and draft, verified.

    Args:
        speculation ([`Speculation`], *optional*): how to draft; `None` for plain sampling.
        dtype (`str`): dtype of the engine's weights, `"bfloat16"`, `"float16"`, `"float32"`, or `"auto"` for the policy's.
        check_every (`int`): batches of rollouts from one look at their log-probs to the next; 0 for none.
        args, kwargs: of TRL's `VLLMGeneration`.
    """

    def __init__(self, *args: Any, speculation: Speculation | None, dtype: str, check_every: int, **kwargs: Any):
        self.speculation = speculation
        self.dtype = None if dtype == "auto" else getattr(torch, dtype)
        self.check_every = check_every
        self._num_unchecked = 0  # batches since the last look at their log-probs
        self._checked_at: int | None = None  # version
        self.draft: Eagle3Draft | None = None
        self.version = 0
        self._packed = PackedLayers()
        self._loaded: int | None = None  # fingerprint of the weights that the engine has
        self._rollouts = Rollouts()
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        original = vllm_generation.LLM
        if self.dtype is None:
            self.dtype = self.model.dtype
        extra: dict[str, Any] = {"dtype": str(self.dtype).removeprefix("torch.")}
        with tempfile.TemporaryDirectory() as folder:
            if self.speculation is not None:
                repair_sampling()
                repair_stop_strings()
                self.draft = self.speculation.build_draft(self.model)
                write_initial_draft(self.draft, Path(folder), self.dtype)
                extra["speculative_config"] = {
                    "method": VLLM_METHOD,
                    "model": folder,
                    "num_speculative_tokens": self.speculation.num_speculative_tokens,
                    "draft_sample_method": self.speculation.draft_sample_method,
                }
                extra["per_request_spec_decode_metrics"] = "summary"
            if is_cpu():
                extra["enforce_eager"] = True
            with (
                exchanged(vllm_generation, "LLM", lambda **kwargs: original(**kwargs, **extra)),
                self._packed.recording(),
            ):
                super()._init_vllm()
        self._check_own_classes()
        self._check_packed()
        if self.draft is not None:
            check_names(self._engine_draft(), self._engine_policy(), [n for n, _ in self.draft.serving_weights()])
        self._count_outputs()

    def _check_own_classes(self) -> None:
        """Refuses an engine that was built of the trainer's own classes, which its compiler then takes over."""
        from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

        taken = sorted(
            {type(m).__name__ for m in self.model.modules() if isinstance(m, TorchCompileWithNoGuardsWrapper)}
        )
        if taken:
            raise ValueError(
                f"vLLM has no implementation of this policy and runs that of transformers, for which it changes {taken} in "
                "place: the trainer's own forward would fail. Use vllm_mode='server' (without a draft), use_vllm=False, or "
                "another policy."
            )

    def _check_packed(self) -> None:
        """Asks whether everything that vLLM made of the loaded weights can be made again after a refit."""
        if not self._packed.unknown:
            return
        message = (
            f"vLLM changed {len(self._packed.unknown)} parameters after loading them ({self._packed.unknown[:4]}), in a way "
            "that hf-codraft cannot redo, so after the first refit rollouts would come from wrong weights."
        )
        if self.draft is not None:
            raise ValueError(
                f"{message} Train a policy that is not quantized, choose another kernel for these layers, or pass draft=None."
            )
        _warn_once(message)

    def _count_outputs(self) -> None:
        """Keeps what TRL throws away: the acceptance of every finished row."""
        generate = self.llm.generate

        def counted(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            outputs = generate(*args, **kwargs)
            self._rollouts.generate_s += time.perf_counter() - started
            longest = 0
            for row, completion in ((output, c) for output in outputs for c in output.outputs):
                longest = max(longest, len(row.prompt_token_ids) + len(completion.token_ids))
                if completion.logprobs is not None:  # a stop string cuts tokens only
                    completion.logprobs = completion.logprobs[: len(completion.token_ids)]
                self._rollouts.num_tokens += len(completion.token_ids)
                if self.draft is not None:
                    metrics = completion.spec_decode_metrics
                    self._rollouts.rows.append(Acceptance(tuple(metrics.histogram) if metrics else ()))
            if self.speculation is not None:
                warn_near_limit(longest, self._runner().max_model_len, self.speculation.num_speculative_tokens)
            return outputs

        self.llm.generate = counted

    def take_rollouts(self) -> Rollouts:
        """What happened since the last call."""
        taken, self._rollouts = self._rollouts, Rollouts()
        return taken

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are drawn; `None` where that depends on more than the policy's logits (penalties, bans)."""
        changed = self.generation_kwargs.keys() - _KEEPS_DISTRIBUTION - Sampling.__annotations__.keys()
        own = {name: getattr(self, name) or getattr(Sampling, name) for name in Sampling.__annotations__}
        sampling = Sampling(**own | {n: v for n, v in self.generation_kwargs.items() if n in own})
        if changed or self.repetition_penalty != 1 or self.structured_outputs_regex or not sampling.temperature > 0:
            return None
        return sampling

    def check_rollouts(
        self,
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        is_sampled: list[list[int]] | None,
        logps: list[list[float | None]] | None,
        *,
        logits_of: Callable[[list[int], int], torch.Tensor],
        dtype: torch.dtype,
        is_strict: bool,
    ) -> Distance | None:
        """Compares a batch of rollouts with the policy where that is due: the first one, then one of `check_every`.

        Args:
            prompt_ids, completion_ids, is_sampled, logps: of the rollouts; `is_sampled` is 0 where a tool wrote.
            logits_of (callable): see [`distance`].
            dtype (`torch.dtype`): that the policy is computed in.
            is_strict (`bool`): whether a difference is an error; else a warning.

        Raises:
            RuntimeError: if the log-probs are further apart than rounding explains, on all ranks alike.
        """
        self._num_unchecked += 1
        is_due = self._checked_at is None or self._num_unchecked >= self.check_every
        if not self.check_every or not is_due or logps is None:
            return None
        if self.sampling is None:
            _warn_once(
                "check_rollouts_every has no effect: penalties or constraints change log-probs beside the policy."
            )
            return None
        rows = list(zip(prompt_ids, completion_ids, is_sampled or [[1] * len(ids) for ids in completion_ids], logps))
        rows = rows[:: -(-len(rows) // NUM_ROWS)]
        bounds = Bounds.of(self.dtype, dtype, device=self.accelerator.device)
        found = distance(rows, logits_of=logits_of, sampling=self.sampling, bounds=bounds)
        sums = torch.tensor(astuple(found), dtype=torch.float64)
        num_tokens, clipped_sum, num_outliers = self.accelerator.reduce(sums.to(self.accelerator.device)).tolist()
        found = Distance(int(num_tokens), clipped_sum, int(num_outliers))
        if found.num_tokens == 0:
            return None
        if not found.is_within(bounds):
            message = complaint(found, bounds, version=self.version, held_at=self._checked_at)
            if is_strict and self.draft is not None:
                raise RuntimeError(message)
            _warn_once(message)
        self._checked_at, self._num_unchecked = self.version, 0
        return found

    def _runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.model_runner

    def _engine_policy(self) -> nn.Module:
        return self._runner().get_model()

    def _engine_draft(self) -> nn.Module:
        draft = self._runner().get_draft_model()
        if draft is None:
            raise RuntimeError("the engine has no drafter, although speculation was asked for.")
        return draft

    def sync_weights(self) -> None:
        """Loads policy and draft into the engine, one call each, and checks both by digest.

        Raises:
            RuntimeError: if the engine's tensors are not the trainer's afterwards.
        """
        if self.mode != "colocate":
            super().sync_weights()
            return
        started = time.perf_counter()
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        with self._packed.unpacked():
            policy = self._engine_policy()
            stream = WeightStream(self._iter_named_params(), policy)
            policy.load_weights(stream)
            self._verify(stream, "policy")
            if self.draft is not None:
                draft = self._engine_draft()
                stream = WeightStream(self.draft.serving_weights(), draft)
                weights = list(stream)
                check_finite(weights)
                draft.load_weights(weights)
                self._verify(stream, "draft")
        self.llm.reset_prefix_cache()
        self.version += 1
        self._loaded = self._weights()
        self._rollouts.refit_s += time.perf_counter() - started

    def _verify(self, stream: WeightStream, side: str) -> None:
        """Compares what was sent with what arrived; an error with a draft, a warning where plain TRL would go on."""
        if self.tensor_parallel_size > 1:  # a rank holds shards only
            _warn_once("refits are not verified by digest with vllm_tensor_parallel_size > 1.")
            return
        wrong = stream.differing()
        if stream.unverified:
            _warn_once(
                f"{len(stream.unverified)} tensors of the {side} have another name or shape in the engine, so refits of them are "
                f"not verified by digest: {stream.unverified[:8]}."
            )
        if not wrong:
            return
        message = (
            f"after the refit the engine's {side} differs from the trainer's in {len(wrong)} tensors: {wrong[:8]}. Rollouts "
            "would come from other weights; this is a fault of the refit, please report it with your versions."
        )
        if self.draft is not None:
            raise RuntimeError(message)
        _warn_once(message)

    def _weights(self) -> int:
        modules = [self.model] if self.draft is None else [self.model, self.draft]
        return fingerprint(p for module in modules for p in module.parameters())

    def is_stale(self) -> bool:
        """Whether policy or draft changed on any rank since the last refit; all ranks must ask."""
        is_stale = torch.tensor(float(self._loaded != self._weights()), device=self.accelerator.device)
        return bool(self.accelerator.reduce(is_stale) > 0)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def warn_near_limit(longest: int, limit: int, num_speculative_tokens: int) -> None:
    """Warns once where a row came so near to the engine's limit that vLLM stopped drafting, for all rows of its batch.

    Args:
        longest (`int`): tokens of the longest row, prompt included.
        limit (`int`): the engine's `max_model_len`.
        num_speculative_tokens (`int`): tokens guessed before each verification.
    """
    if longest + num_speculative_tokens > limit:
        _warn_once(
            f"a row came within num_speculative_tokens ({num_speculative_tokens}) of vllm_max_model_length ({limit}): vLLM "
            "0.31 then drafts for no row of its batch, and counts guesses as rejected. Set vllm_max_model_length to at least "
            f"the longest prompt + max_completion_length + {num_speculative_tokens}."
        )


def write_initial_draft(draft: Eagle3Draft, folder: Path, dtype: torch.dtype) -> None:
    """Writes the checkpoint that the engine starts its drafter from.

    Its head (and embeddings) are zeros: vLLM replaces a head that equals the policy's by the policy's own module, and
    the next refit of the draft would overwrite the policy. The real ones arrive with the first refit, before any token.
    """
    weights = {}
    for name, tensor in draft.serving_weights():
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        borrowed_when_equal = name in ("lm_head.weight", "embed_tokens.weight")
        weights[name] = torch.zeros_like(tensor) if borrowed_when_equal else tensor.contiguous()
    (folder / "config.json").write_text(json.dumps(plain_config(draft.config)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
