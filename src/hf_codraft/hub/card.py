"""The model card of a draft."""

import os
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_codraft.drafts.eagle3 import VLLM_METHOD, Eagle3Draft
from hf_codraft.hub.speculators import DEFAULT_TOKENS

_BODY = """
# EAGLE-3 draft{for_policy}

A draft for speculative decoding, trained together with its policy by hf-codraft. It does not change what the policy says;
it guesses the next tokens, and the policy verifies them.

| | |
|---|---|
| hidden states read (vLLM's ids) | {tap_ids} |
| draft vocabulary | {draft_vocab_size} of {vocab_size} |
| tokens drafted in training | {trained_tokens} |
| parameters | {num_parameters:,} |

## Use

Serve it with the policy that was saved beside it, the one that it was trained with{not_the_start}. It fits other
policies of this architecture too, with fewer accepted tokens.

```python
from vllm import LLM

llm = LLM(
    model="<the policy that was trained with this draft>",
    speculative_config={{
        "method": "{method}",
        "model": "<this repository>",
        "num_speculative_tokens": {num_tokens},
    }},
)
```

Acceptance is highest for the policy, the task and the sampling temperature it was trained with.
"""


def is_hub_id(name: str) -> bool:
    """Whether a model's name can be a repository of the Hub; a folder is none."""
    if not name or os.path.isdir(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def write_card(folder: Path, draft: Eagle3Draft, base_model: str) -> None:
    """Writes `README.md` beside a saved draft; a `base_model` that is a folder is left out, which the Hub would refuse."""
    start = base_model if is_hub_id(base_model) else None
    data = ModelCardData(
        library_name="hf-codraft", tags=["speculative-decoding", "eagle3", "hf-codraft"], base_model=start
    )
    trained_tokens = draft.config.num_speculative_tokens
    body = _BODY.format(
        for_policy=f" for {start}" if start else "",
        not_the_start=f", rather than {start} as it was before" if start else "",
        tap_ids=", ".join(map(str, draft.config.eagle_aux_hidden_state_layer_ids or [])) or "the default ones",
        draft_vocab_size=draft.config.draft_vocab_size,
        vocab_size=draft.config.vocab_size,
        trained_tokens=trained_tokens or "not recorded",
        num_tokens=trained_tokens or DEFAULT_TOKENS,
        num_parameters=sum(p.numel() for p in draft.parameters()),
        method=VLLM_METHOD,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{body}").save(folder / "README.md")
