"""TRL's GRPO with speculative rollouts, whose draft is trained together with the policy."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_codraft.config import CoDraftGRPOConfig as CoDraftGRPOConfig
    from hf_codraft.drafts.eagle3 import Eagle3Draft as Eagle3Draft
    from hf_codraft.drafts.eagle3 import Eagle3DraftConfig as Eagle3DraftConfig
    from hf_codraft.hub.checkpoint import load_draft as load_draft
    from hf_codraft.hub.checkpoint import save_draft as save_draft
    from hf_codraft.trainer import CoDraftGRPOTrainer as CoDraftGRPOTrainer

__version__ = "0.1.0"

# Loaded on first use: importing the package loads neither torch nor trl nor vllm.
_PUBLIC = {
    "CoDraftGRPOConfig": "hf_codraft.config",
    "CoDraftGRPOTrainer": "hf_codraft.trainer",
    "Eagle3Draft": "hf_codraft.drafts.eagle3",
    "Eagle3DraftConfig": "hf_codraft.drafts.eagle3",
    "load_draft": "hf_codraft.hub.checkpoint",
    "save_draft": "hf_codraft.hub.checkpoint",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
