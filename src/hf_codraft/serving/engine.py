"""TRL's colocated vLLM engine with a drafter, refitted with both weight sets.

Patch points of TRL, each pinned by tests/parity/test_contracts.py: the name `LLM` in `trl.generation.vllm_generation`
(exchanged only inside `_init_vllm`, whose argument list is fixed), and the name `VLLMGeneration` in
`trl.trainer.grpo_trainer` (exchanged only while `GRPOTrainer.__init__` runs, see [`rollout_engine`]).
"""

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
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
from hf_codraft.serving.cpu import PackedLayers, is_cpu, repair_sampling
from hf_codraft.serving.refit import WeightStream, check_digests, check_names, engine_digests

logger = logging.getLogger(__name__)


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
def _exchanged(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def rollout_engine(speculation: Speculation | None, dtype: str) -> Iterator[None]:
    """While open, a `GRPOTrainer` that is constructed builds its vLLM engine with this speculation and dtype."""

    def build(*args: Any, **kwargs: Any) -> "CoDraftVLLMGeneration":
        return CoDraftVLLMGeneration(*args, speculation=speculation, dtype=dtype, **kwargs)

    with _exchanged(grpo_trainer, "VLLMGeneration", build):
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
        dtype (`str`): dtype of the engine's weights, `"bfloat16"`, `"float16"` or `"float32"`.
        args, kwargs: of TRL's `VLLMGeneration`.
    """

    def __init__(self, *args: Any, speculation: Speculation | None, dtype: str, **kwargs: Any):
        self.speculation = speculation
        self.dtype = getattr(torch, dtype)
        self.draft: Eagle3Draft | None = None
        self.version = 0
        self._packed = PackedLayers()
        self._rollouts = Rollouts()
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        original = vllm_generation.LLM
        extra: dict[str, Any] = {"dtype": str(self.dtype).removeprefix("torch.")}
        with tempfile.TemporaryDirectory() as folder:
            if self.speculation is not None:
                repair_sampling()
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
                _exchanged(vllm_generation, "LLM", lambda **kwargs: original(**kwargs, **extra)),
                self._packed.recording(),
            ):
                super()._init_vllm()
        if self.draft is not None:
            check_names(self._engine_draft(), self._engine_policy(), [n for n, _ in self.draft.serving_weights()])
        self._count_outputs()

    def _count_outputs(self) -> None:
        """Keeps what TRL throws away: the acceptance of every finished row."""
        generate = self.llm.generate

        def counted(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            outputs = generate(*args, **kwargs)
            self._rollouts.generate_s += time.perf_counter() - started
            for completion in (c for output in outputs for c in output.outputs):
                self._rollouts.num_tokens += len(completion.token_ids)
                if self.draft is not None:
                    metrics = completion.spec_decode_metrics
                    self._rollouts.rows.append(Acceptance(tuple(metrics.histogram) if metrics else ()))
            return outputs

        self.llm.generate = counted

    def take_rollouts(self) -> Rollouts:
        """What happened since the last call."""
        taken, self._rollouts = self._rollouts, Rollouts()
        return taken

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
        policy = self._engine_policy()
        streams = {"policy": WeightStream(self._iter_named_params(), self.dtype)}
        policy.load_weights(streams["policy"])
        draft = None
        if self.draft is not None:
            draft = self._engine_draft()
            streams["draft"] = WeightStream(self.draft.serving_weights(), self.dtype)
            draft.load_weights(list(streams["draft"]))
        if self.tensor_parallel_size == 1:  # a rank of a tensor-parallel engine holds shards only
            check_digests(streams["policy"].digests, engine_digests(policy), side="policy")
            if draft is not None:
                check_digests(streams["draft"].digests, engine_digests(draft, without=policy), side="draft")
        elif self.version == 0:
            logger.warning("refits are not verified with vllm_tensor_parallel_size > 1.")
        self._packed.repack()
        self.llm.reset_prefix_cache()
        self.version += 1
        self._rollouts.refit_s += time.perf_counter() - started


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
