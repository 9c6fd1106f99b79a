"""The dtype that a colocated engine is asked for, up to where it would start."""

import os

import pytest
import tiny
import trl.generation.vllm_generation as trl_engine

from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer

CASES = [
    ({}, "float32"),
    ({"model_init_kwargs": {"dtype": "bfloat16"}}, "bfloat16"),
    ({"model_init_kwargs": {"dtype": "float16"}}, "float16"),
    ({"model_init_kwargs": {"dtype": "bfloat16"}, "rollout_dtype": "float32"}, "float32"),
    ({"bf16": True}, "bfloat16"),
]


class _Asked(Exception):
    """Instead of an engine."""


@pytest.mark.parametrize(("changes", "expected"), CASES, ids=str)
@pytest.mark.parametrize("draft", [None, "eagle3"])
def test_engine_has_the_dtype_that_is_set_or_the_policys(tmp_path, monkeypatch, draft, changes, expected):
    def ask(**kwargs):
        raise _Asked(kwargs["dtype"])

    monkeypatch.setattr(trl_engine, "LLM", ask)
    monkeypatch.setattr("hf_codraft.serving.engine.repair_sampling", lambda: None)
    environment = dict(os.environ)
    args = CoDraftGRPOConfig(
        output_dir=str(tmp_path / "out"), use_vllm=True, vllm_mode="colocate", report_to="none", use_cpu=True,
        per_device_train_batch_size=4, num_generations=4, **{"bf16": False} | changes,
    )  # fmt: skip
    path = tiny.save(tiny.policy("qwen3", num_hidden_layers=4), tmp_path / "policy")
    try:
        with pytest.raises(_Asked, match=rf"^{expected}$"):
            CoDraftGRPOTrainer(path, tiny.reward, args, train_dataset=tiny.prompts(), draft=draft)
    finally:
        os.environ.clear()
        os.environ.update(environment)
