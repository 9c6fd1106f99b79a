# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-codraft"]
# ///
"""Next-token training on long packed rows, each spread over the ranks of a context-parallel group.

    python examples/long_context_sft.py                      # one process; a small model from scratch, no network needed
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \\
        --use_parallelism_config --parallelism_config_cp_size 2 examples/long_context_sft.py      # the same losses
    PARALLELISM_CONFIG_CP_SIZE=2 torchrun --nproc_per_node 2 examples/long_context_sft.py         # the same, with DDP

    ... examples/long_context_sft.py --model HuggingFaceTB/SmolLM2-135M --row-tokens 8192 --checkpointing

The text is Python's own standard library, or the files of --text. accelerate's launcher takes the cp flags only together
with FSDP2's, which have no effect on CPU ranks. With --parallelism_config_dp_replicate_size (or ..._DP_REPLICATE_SIZE)
above 1, every group trains on rows of its own.
"""

import argparse
import sysconfig
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_codraft.attention.plans import balanced_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import GroupTransport
from hf_codraft.parallel.accelerator import ContextParallelAccelerator
from hf_codraft.policy.attention import check_isolation, packed_inputs, register_attention


def load(name: str | None) -> tuple[PreTrainedModel, Callable[[str], list[int]]]:
    """A model and what turns text into its tokens; by default a small one over bytes, the same in every run."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(
            name, attn_implementation=register_attention(), dtype=torch.float32
        )
        return model, AutoTokenizer.from_pretrained(name).encode
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2**20, attn_implementation=register_attention(),
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda text: list(text.encode())


def packed_rows(documents: Iterable[list[int]], row_tokens: int, *, num_rows: int, min_rows: int) -> list[dict]:
    """Documents one after another in up to `num_rows` rows of `row_tokens` tokens; what does not fit is cut off.

    Raises:
        ValueError: if they fill fewer than `min_rows`.
    """
    rows: list[dict] = []
    token_ids: list[int] = []
    lengths: list[int] = []
    for document in documents:
        document = document[: row_tokens - len(token_ids)]
        if not document:
            continue
        token_ids += document
        lengths.append(len(document))
        if len(token_ids) == row_tokens:
            rows.append({"token_ids": torch.tensor(token_ids), "lengths": lengths})
            token_ids, lengths = [], []
        if len(rows) == num_rows:
            break
    if len(rows) < min_rows:
        raise ValueError(
            f"the text fills {len(rows) * row_tokens + len(token_ids)} tokens of rows, but one step needs "
            f"{min_rows * row_tokens} (a row of {row_tokens} for each of {min_rows} data-parallel groups); give more --text "
            "or fewer --row-tokens."
        )
    return rows


def own_shard(lengths: list[int], accelerator: ContextParallelAccelerator) -> Shard:
    """This rank's part of a row: as much work as any other's, with few documents cut."""
    world = accelerator.axis_size("cp")
    layout = balanced_plan(list(accumulate(lengths, initial=0)), world)
    if world == 1:
        return Shard(layout)
    return Shard(layout, accelerator.context_parallel_rank, GroupTransport(accelerator.axis_group("cp")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hub id or folder of a causal LM; by default a small one from scratch")
    parser.add_argument("--text", nargs="*", type=Path, help="text files, one document each")
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, help="3e-3 for the small model, 2e-5 for others, by default")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward")
    parser.add_argument("--output-dir", help="where to save the model; not saved by default")
    options = parser.parse_args()
    if min(options.row_tokens, options.max_steps) < 1:
        parser.error(f"--row-tokens ({options.row_tokens}) and --max-steps ({options.max_steps}) must be 1 or more")

    accelerator = ContextParallelAccelerator(cpu=not torch.cuda.is_available())
    model, encode = load(options.model)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    files = options.text or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    documents = (encode(file.read_text(errors="replace")) for file in files)
    num_groups = accelerator.axis_size("dp")
    rows = packed_rows(documents, options.row_tokens, num_rows=options.max_steps * num_groups, min_rows=num_groups)
    check_isolation(model)  # whatever its architecture: no segment of a packed row may see another
    loader = DataLoader(rows, batch_size=1, collate_fn=lambda batch: batch[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate or (2e-5 if options.model else 3e-3))
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)

    for step, row in enumerate(loader, start=1):
        # divided by 1, so the loss is a sum
        inputs = packed_inputs(row["token_ids"], own_shard(row["lengths"], accelerator), num_items_in_batch=1)
        num_targets = accelerator.global_sum((inputs["shift_labels"] != -100).sum())
        local_sum = model(**inputs).loss
        accelerator.backward(accelerator.mean_loss(local_sum, num_targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # a row of one-token documents has no target
        loss = accelerator.global_sum(local_sum) / num_targets.clamp(min=1)
        accelerator.print(f"step {step} loss {loss.item():.7g}")
    if options.output_dir is not None:
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(options.output_dir, state_dict=state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
