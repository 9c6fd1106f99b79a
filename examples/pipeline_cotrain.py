# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-codraft"]
# ///
"""Next-token training of a model that is split over the ranks of a pipeline, with an EAGLE-3 draft that learns beside it.

    torchrun --standalone --nproc_per_node 2 examples/pipeline_cotrain.py                    # a small model from scratch
    torchrun --standalone --nproc_per_node 4 examples/pipeline_cotrain.py --model FOLDER     # a causal LM on your disk
    torchrun --standalone --nproc_per_node 4 examples/pipeline_cotrain.py --resume           # go on, with any number of ranks

Runs on CPU ranks. Each rank reads and holds its own stage alone. `runs/pipeline-cotrain/checkpoint-N` has the policy in
`policy/` (for `from_pretrained`), the draft in `draft/` (for vLLM) and what a resume needs.
"""

import argparse
import json
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from hf_codraft.drafts.eagle3 import Eagle3Draft, Eagle3DraftConfig, default_tap_ids
from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.hub.checkpoint import load_training_state, save_draft
from hf_codraft.hub.history import last_complete_checkpoint
from hf_codraft.parallel.accelerator import PipelineAccelerator
from hf_codraft.parallel.config import CoDraftParallelismConfig
from hf_codraft.parallel.loading import load_stage
from hf_codraft.parallel.pipeline import PolicyPipeline, next_token_loss
from hf_codraft.parallel.placement import PipelineDraft
from hf_codraft.parallel.stages import PolicyStage, plan_stages
from hf_codraft.policy.anatomy import effective_weight


def small_model(folder: Path) -> None:
    """A small model over bytes, the same in every run."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def draft_for(stage: PolicyStage, config: PretrainedConfig, tap_ids: tuple[int, ...]) -> Eagle3Draft:
    """A draft shaped like the policy's layers; on the last stage it starts from the policy's last layer and head."""
    torch.manual_seed(0)
    draft = Eagle3Draft(
        Eagle3DraftConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=config.rope_parameters,
            eagle_aux_hidden_state_layer_ids=list(tap_ids),
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    ).float()
    if stage.is_last:
        anatomy = stage.anatomy
        draft.init_from_policy(anatomy.last_layer_weights(), anatomy.decoder.norm.weight)
        with torch.no_grad():
            draft.lm_head.weight.copy_(effective_weight(anatomy.head))
    return draft


def batches(encode: Callable[[str], list[int]], *, num_rows: int, length: int, max_steps: int) -> list[torch.Tensor]:
    """`max_steps` batches of rows of `length` tokens, out of the text of Python's own library."""
    wanted, token_ids = max_steps * num_rows * length, []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        token_ids += encode(file.read_text(errors="replace"))
        if len(token_ids) >= wanted:
            break
    while len(token_ids) < wanted:
        token_ids += token_ids[: wanted - len(token_ids)]
    return list(torch.tensor(token_ids[:wanted]).view(max_steps, num_rows, length))


def save(
    folder: Path,
    *,
    step: int,
    accelerator: PipelineAccelerator,
    optimizer: torch.optim.Optimizer,
    draft: PipelineDraft,
) -> None:
    done = folder / "trainer_state.json"  # written last: it says that the rest is there
    if accelerator.is_main_process:
        done.unlink(missing_ok=True)  # of an earlier run, which must not vouch for a mixture of both
    accelerator.wait_for_everyone()
    accelerator.save_pretrained(folder / "policy")
    accelerator.save_training_state(folder / "state", optimizer=optimizer, counters={"step": step})
    if accelerator.pipeline_parallel_rank == draft.pipeline.num_ranks - 1:
        assert draft.learner is not None
        state = draft.learner.state_dict()
        save_draft(draft.learner.draft, folder / "draft", base_model=str(folder / "policy"), training_state=state)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        done.write_text(json.dumps({"global_step": step}) + "\n")
    accelerator.wait_for_everyone()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal LM; by default a small one from scratch")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/pipeline-cotrain"))
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint there")
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--save-steps", type=int, default=25)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, help="3e-3 for the small model, 2e-5 for others, by default")
    parser.add_argument("--placement", default="spread", help="last_inside, last_deferred or spread")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.distributed.init_process_group("gloo")
    num_ranks = torch.distributed.get_world_size()
    accelerator = PipelineAccelerator(cpu=True, parallelism_config=CoDraftParallelismConfig(pp_size=num_ranks))

    start = last_complete_checkpoint(options.output_dir) if options.resume else None
    folder = options.model or options.output_dir / "start"
    if options.model is None and start is None and accelerator.is_main_process:
        small_model(folder)
    accelerator.wait_for_everyone()
    encode = AutoTokenizer.from_pretrained(folder).encode if options.model else lambda text: list(text.encode())
    weights = folder if start is None else Path(start) / "policy"

    # The policy: this rank's stage of it
    config = AutoConfig.from_pretrained(weights)
    plan = plan_stages(config.num_hidden_layers, num_ranks)
    stage = load_stage(weights, plan, accelerator.pipeline_parallel_rank, dtype=torch.float32)
    stage = accelerator.prepare_model(stage).train()
    pipeline = PolicyPipeline([stage], options.num_microbatches, group=accelerator.pipeline_group)
    learning_rate = options.learning_rate or (2e-5 if options.model else 3e-3)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=learning_rate)

    # The draft: a replica on each rank
    tap_ids = default_tap_ids(config.num_hidden_layers)
    learner = DraftLearner(draft_for(stage, config, tap_ids), num_passes=2)
    draft = PipelineDraft(pipeline, learner, tap_ids=tap_ids, placement=options.placement)

    step = 0
    if start is not None:
        step = accelerator.load_training_state(Path(start) / "state", optimizer=optimizer)["step"]
        saved = load_training_state(learner.draft, Path(start) / "draft", like=learner.state_dict())
        learner.load_state_dict(saved)
        accelerator.print(f"resumed from {start}")
    rows = batches(encode, num_rows=options.rows, length=options.length, max_steps=options.max_steps)
    loss_function = partial(next_token_loss, num_items=options.rows * (options.length - 1))
    while step < options.max_steps:
        loss = draft.train_step({"input_ids": rows[step]}, loss_function).sum().item()
        report = draft.step()
        accelerator.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accepted = " ".join(f"{share:.3f}" for share in report.accept_passes)
        accelerator.print(f"step {step} loss {loss:.7g} draft loss {report.loss:.7g} accepted {accepted}")
        if step % options.save_steps == 0 or step == options.max_steps:
            checkpoint = options.output_dir / f"checkpoint-{step}"
            save(checkpoint, step=step, accelerator=accelerator, optimizer=optimizer, draft=draft)
    draft.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
