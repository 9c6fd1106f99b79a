"""The model card of a draft."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from hf_codraft.drafts.eagle3 import VLLM_METHOD, Eagle3Draft

_BODY = """
# EAGLE-3 draft for {base_model}

A draft for speculative decoding, trained together with its policy by hf-codraft. It does not change what the policy says;
it guesses the next tokens, and the policy verifies them.

| | |
|---|---|
| hidden states read (vLLM's ids) | {tap_ids} |
| draft vocabulary | {draft_vocab_size} of {vocab_size} |
| parameters | {num_parameters:,} |

## Use

```python
from vllm import LLM

llm = LLM(
    model="{base_model}",
    speculative_config={{"method": "{method}", "model": "<this repository>", "num_speculative_tokens": 3}},
)
```

Acceptance is highest for the policy, the task and the sampling temperature it was trained with.
"""


def write_card(folder: Path, draft: Eagle3Draft, base_model: str) -> None:
    """Writes `README.md` beside a saved draft."""
    data = ModelCardData(
        library_name="hf-codraft", tags=["speculative-decoding", "eagle3", "hf-codraft"], base_model=base_model or None
    )
    body = _BODY.format(
        base_model=base_model or "its policy",
        tap_ids=", ".join(map(str, draft.tap_ids)),
        draft_vocab_size=draft.config.draft_vocab_size,
        vocab_size=draft.config.vocab_size,
        num_parameters=sum(p.numel() for p in draft.parameters()),
        method=VLLM_METHOD,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{body}").save(folder / "README.md")
