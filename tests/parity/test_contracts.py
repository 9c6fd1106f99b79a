"""The private points of TRL, transformers and vLLM that we extend. A failure here names the one that moved."""

import dataclasses
import inspect
import re

import pytest
import torch
import trl.generation.vllm_generation as trl_engine
import trl.trainer.grpo_trainer as trl_trainer
from torch import nn
from transformers import Trainer
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.extras import profiling
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import pad

from hf_codraft.serving.sampling import REFUSED, SERVED, TRL_FIELDS


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing) -> str:
    """Source without comments and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"#.*", "", inspect.getsource(thing)))


# TRL's engine


def test_trl_names_the_engine_classes_where_we_exchange_them():
    assert trl_trainer.VLLMGeneration is VLLMGeneration
    assert inspect.isclass(trl_engine.LLM)
    assert source(GRPOTrainer.__init__).count("VLLMGeneration(") == 1
    assert source(VLLMGeneration).count(" LLM(") == 1
    assert callable(trl_engine.empty_cache)


def test_trl_builds_the_engine_without_the_keywords_we_add():
    assert parameters(VLLMGeneration._init_vllm) == ["self"]
    (call,) = re.findall(r" LLM\((.*?)\) if self", source(VLLMGeneration._init_vllm))
    keywords = re.findall(r"(\w+)=", call)
    assert "**" not in call
    assert not {"dtype", "speculative_config", "per_request_spec_decode_metrics", "enforce_eager"} & set(keywords)
    assert 'logprobs_mode="processed_logprobs"' in call  # what makes log-probs under speculation those of the policy
    assert 'distributed_executor_backend="external_launcher"' in call  # `driver_worker` is in this process


def test_trl_gives_the_engine_what_we_read():
    assigned = set(re.findall(r"self\.(\w+) = ", source(VLLMGeneration)))
    assert {"mode", "llm", "model", "enable_sleep_mode", "tensor_parallel_size", "_llm_weights_sleeping"} <= assigned
    assert parameters(VLLMGeneration.sync_weights) == ["self"]
    assert parameters(VLLMGeneration._iter_named_params) == ["self"]
    assert "self.llm.generate(" in source(VLLMGeneration.generate)


# TRL's trainer


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "_generate": ["prompts"],
        "_tokenize_prompts": ["prompts"],
        "_prepare_inputs": ["generation_batch"],
        "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
        "training_step": ["model", "inputs", "num_items_in_batch"],
        "_save_checkpoint": ["model", "trial"],
        "_load_optimizer_and_scheduler": ["checkpoint"],
        "_log_completion_extra": ["column", "values"],
        "save_model": ["output_dir", "_internal_call"],
    }.items(),
)
def test_trainer_method_has_the_signature_we_override_or_call(name, expected):
    assert parameters(getattr(GRPOTrainer, name)) == ["self", *expected]


def test_first_arguments_of_the_longer_methods():
    turn = parameters(GRPOTrainer._generate_single_turn)
    assert turn[:5] == ["self", "prompt_ids", "images", "multimodal_fields", "num_generations"]
    logps = parameters(GRPOTrainer._get_per_token_logps_and_entropies)
    assert logps[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    init = inspect.signature(GRPOTrainer.__init__).parameters
    assert list(init)[1:4] == ["model", "reward_funcs", "args"]
    assert {"train_dataset", "processing_class", "peft_config"} <= init.keys()
    assert "resume_from_checkpoint" in parameters(Trainer.train)


def test_trainer_calls_the_methods_we_override():
    assert "= self._generate(prompts)" in source(GRPOTrainer._generate_and_score_completions)
    assert "self._generate_single_turn( prompt_ids, images" in source(GRPOTrainer._generate)
    assert "self._get_per_token_logps_and_entropies(" in source(GRPOTrainer._compute_loss)
    assert "self._compute_loss(model, inputs)" in source(GRPOTrainer.compute_loss)
    assert "self.vllm_generation.sync_weights()" in source(GRPOTrainer._generate_single_turn)
    assert "self.state.global_step != self._last_loaded_step" in source(GRPOTrainer._generate_single_turn)


def test_trainer_computes_the_policys_loss_in_one_forward():
    """Taps are read once after it; several forwards would have to be joined in the order of the rows."""
    assert source(GRPOTrainer._compute_loss).count("self._get_per_token_logps_and_entropies(") == 1


def test_generated_rows_keep_their_order_until_extra_columns_are_logged():
    """`accept_length` is written by row before TRL scores them."""
    text = source(GRPOTrainer._generate_and_score_completions)
    assert 'self._logs["extra"]' in text
    assert text.index("self._generate(") < text.index("_pending_extra_logs")


def test_batch_has_the_keys_that_are_packed():
    text = source(GRPOTrainer._generate_and_score_completions)
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        assert f'"{key}": {key}' in text
    assert 'output["tool_mask"]' in text


def test_trainer_has_the_attributes_we_read():
    text = source(GRPOTrainer) + source(Trainer)
    for name in ("_metrics", "_tokenizer", "eos_token_ids", "use_vllm", "vllm_mode", "_dist", "vllm_generation"):
        assert f"self.{name} = " in text or f"self.{name}: " in text
    assert callable(DistributedBackend.gather_params)
    assert parameters(pad)[:2] == ["tensors", "padding_value"]
    assert callable(profiling.profiling_context)
    assert callable(profiling.profiling_decorator)


# transformers' checkpoints


def test_trainer_state_is_the_last_file_of_a_checkpoint():
    """`last_complete_checkpoint` takes it for the mark of a whole one, and older ones are deleted only after it."""
    text = source(Trainer._save_checkpoint)
    last = text.index("self.state.save_to_json(")
    for earlier in ("self.save_model(", "self._save_optimizer_and_scheduler(", "self._save_rng_state("):
        assert 0 < text.index(earlier) < last
    assert text.index("rotate_checkpoints(") > last


def test_training_loop_loads_optimizer_state_of_a_resume_in_one_call():
    assert parameters(Trainer._load_optimizer_and_scheduler) == ["self", "checkpoint"]
    assert source(Trainer).count("self._load_optimizer_and_scheduler(") == 1
    assert "_internal_call" in parameters(Trainer.save_model)


# vLLM


def test_cpu_layers_are_packed_by_the_function_we_wrap():
    """Imported where it is called, so that exchanging it in its module is enough."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    assert parameters(utils.dispatch_cpu_unquantized_gemm) == ["layer", "remove_weight"]
    for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        text = source(method.process_weights_after_loading)
        assert "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm" in text
        assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=" in text


def test_weights_change_after_loading_where_we_watch_them():
    """What is redone after a refit: CPU experts are packed once by a method of their class, other ones again by their layer's."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.models.utils import WeightsMapper

    assert parameters(base_loader.process_weights_after_loading) == ["model", "model_config", "target_device"]
    assert "process_weights_after_loading(model, model_config, target_device)" in source(base_loader.BaseModelLoader)
    packing = cpu_moe.CPUUnquantizedExperts.process_weights_after_loading
    assert parameters(packing) == ["self", "layer"]
    for name in ("X86CPUUnquantizedExperts", "ArmCPUUnquantizedExperts", "PowerCPUUnquantizedExperts"):
        assert getattr(cpu_moe, name).process_weights_after_loading is packing
    assert parameters(UnquantizedFusedMoEMethod.process_weights_after_loading) == ["self", "layer"]
    assert "is_weight_update = self.moe_kernel is not None" in source(UnquantizedFusedMoEMethod)
    assert parameters(MLAAttention.process_weights_after_loading) == ["self", "act_dtype"]
    assert parameters(WeightsMapper.map_name) == ["self", "key"]


def test_vllm_takes_over_a_class_in_a_way_that_is_noticed():
    """As it does to the classes of transformers where it has no implementation of its own."""
    from vllm.compilation.decorators import support_torch_compile

    from hf_codraft.serving.engine import CoDraftVLLMGeneration

    class Decoder(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    generation = object.__new__(CoDraftVLLMGeneration)
    generation.model = nn.Sequential(Decoder())
    generation._check_own_classes()
    support_torch_compile(dynamic_arg_dims={"input_ids": 0})(Decoder)
    with pytest.raises(ValueError, match=r"it changes \['Decoder'\] in place"):
        generation._check_own_classes()


def test_engines_log_probs_are_those_of_the_processed_distribution():
    assert 'logprobs_mode="processed_logprobs"' in source(trl_engine.VLLMGeneration._init_vllm)
    text = source(GRPOTrainer._generate_and_score_completions)
    names = [
        "prompt_ids_list,",
        "completion_ids_list,",
        "tool_mask_list,",
        "completions,",
        "sampling_per_token_logps_list,",
    ]
    assert f"( {' '.join(names)}" in text


def test_rejection_sampler_uses_the_function_we_replace():
    from vllm.v1.sample import rejection_sampler

    replaced = rejection_sampler.expand_batch_to_tokens
    assert parameters(replaced) == ["x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"]
    defaults = inspect.signature(replaced).parameters
    assert (defaults["replace_from"].default, defaults["replace_to"].default) == (0, 0)
    assert source(rejection_sampler.apply_sampling_constraints).count("expand_batch_to_tokens(") == 3


def test_sampling_functions_that_are_replaced_keep_their_arguments():
    """In place of vLLM's, so with its names, order and defaults, and called by the name that is exchanged."""
    from vllm.v1.sample import rejection_sampler, sampler
    from vllm.v1.spec_decode import llm_base_proposer

    from hf_codraft.serving import cpu

    pairs = [
        (rejection_sampler.sample_recovered_tokens, cpu._sample_recovered),
        (llm_base_proposer.compute_probs_and_sample_next_token, cpu._sample_draft),
    ]
    for theirs, ours in pairs:
        wanted, given = (list(inspect.signature(function).parameters.values()) for function in (theirs, ours))
        assert [p.default for p in given] == [p.default for p in wanted]
        assert [p.name.removesuffix("_TV") for p in given] == [p.name for p in wanted]
    assert "recovered_token_ids = sample_recovered_tokens(" in source(rejection_sampler.rejection_sample)
    assert "return compute_probs_and_sample_next_token(" in source(llm_base_proposer)
    assert sampler._SAMPLING_EPS == cpu.GREEDY_BELOW


def test_engine_offers_what_refits_and_counts_need():
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import CompletionOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "spec_decode_metrics" in {field.name for field in dataclasses.fields(CompletionOutput)}
    assert parameters(GPUModelRunner.get_draft_model) == ["self"]
    assert parameters(GPUModelRunner.get_model) == ["self"]
    assert callable(LLM.reset_prefix_cache)
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"dtype", "speculative_config", "per_request_spec_decode_metrics", "enforce_eager"} <= names


def test_speculative_config_takes_what_we_send():
    from vllm.config import SpeculativeConfig

    names = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert {"method", "model", "num_speculative_tokens", "draft_sample_method"} <= names


def test_every_sampling_option_of_the_engine_was_judged():
    """An option that appears in vLLM is shown lossless in tests/e2e/test_sampling_options.py or refused."""
    from vllm import SamplingParams

    options = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert SERVED.keys() | REFUSED.keys() == options
    assert not SERVED.keys() & REFUSED.keys()


def test_every_option_that_trl_asks_the_engine_for_was_judged():
    colocate = source(VLLMGeneration.generate).split('self.mode == "colocate"')[-1]
    asked = re.findall(r'"(\w+)": ', colocate.partition("generation_kwargs.update")[0])
    assert set(asked) == {*TRL_FIELDS, "n", "logprobs"} - {"structured_outputs"}
    assert re.findall(r'generation_kwargs\["(\w+)"\] =', colocate) == ["structured_outputs"] * 2


def test_engine_rejects_the_sampling_options_that_we_refuse():
    from vllm import SamplingParams

    text = source(SamplingParams._validate_spec_decode)
    assert "self.min_p" in text
    assert "self.logit_bias" in text
    assert re.findall(r"self\.(\w+)", text) == ["min_p", "logit_bias"]
