"""Which runs wrote the checkpoints of a folder: a run goes on from one checkpoint and leaves the later ones behind."""

import json
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_codraft.hub.checkpoint import read_training_state
from hf_codraft.hub.folder import complete_folder

DRAFT_FOLDER = "draft"  # of a checkpoint
TRAINER_STATE = "trainer_state.json"  # transformers writes it last
FILE = "_draft_runs.json"  # `Trainer.push_to_hub` leaves names with an underscore out


@dataclass(frozen=True)
class History:
    """A run and those that it goes on from; made by `begin_run`, saved in the run's folder and in its checkpoints.

    Args:
        runs (`list`): `[id, step it began after]` of each, the oldest first.
    """

    runs: list[list[Any]]

    def has(self, runs: list[list[Any]] | None, step: int) -> bool:
        """Whether a checkpoint at `step` with these runs lies on the way of this one."""
        if not runs or runs != self.runs[: len(runs)]:
            return False
        return len(runs) == len(self.runs) or step <= self.runs[len(runs)][1]

    def write(self, output_dir: str | Path) -> None:
        """Makes this the last run of a folder."""
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{FILE}.new"
        fresh.write_text(json.dumps(self.runs) + "\n")
        fresh.replace(folder / FILE)


def read_history(output_dir: str | Path) -> History | None:
    """The last run of a folder; `None` where none was noted."""
    file = Path(output_dir) / FILE
    return History(json.loads(file.read_text())) if file.is_file() else None


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The newest `checkpoint-N` that was written to its end, draft included, by the last run in this folder.

    Checkpoints of runs before it are passed over with a warning; `None` where none is left.
    """
    history = read_history(output_dir)
    for step, folder in reversed(_numbered_checkpoints(output_dir)):
        state = _state_if_complete(folder)
        if state is None:
            warnings.warn(f"{folder} was not written to its end; an older checkpoint is taken.", stacklevel=3)
        elif history is not None and not history.has(state.get("runs"), step):
            warnings.warn(
                f"{folder} is of an earlier run than the last one in {output_dir}; it is passed over. To go on from it, pass "
                "its path to resume_from_checkpoint.",
                stacklevel=3,
            )
        else:
            return str(folder)
    return None


def _numbered_checkpoints(output_dir: str | Path) -> list[tuple[int, Path]]:
    return sorted(
        (int(folder.name.split("-")[-1]), folder)
        for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if folder.name.split("-")[-1].isdigit()
    )


def _state_if_complete(folder: Path) -> dict[str, Any] | None:
    """A checkpoint's training state of the draft, on disk until it is used; `None` if a kill cut the checkpoint short."""
    try:
        json.loads((folder / TRAINER_STATE).read_text())
        return read_training_state(complete_folder(folder / DRAFT_FOLDER), mmap=True)
    except (OSError, ValueError):
        return None


def begin_run(output_dir: str | Path, resumed_from: str | Path | None, *, writes: bool) -> list[list[Any]]:
    """Notes that a run begins in a folder; a later resume takes its checkpoints and those that it goes on from.

    Args:
        output_dir (`str` or `Path`): of the run.
        resumed_from (`str` or `Path`, *optional*): the checkpoint that it goes on from.
        writes (`bool`): whether this process writes files.

    Returns:
        `list`: `[run id, step it began after]` of this run and of those that it goes on from, for `training_state["runs"]`.
    """
    runs, step = [], 0
    if resumed_from:
        state = _state_if_complete(Path(resumed_from)) or {}
        runs, step = list(state.get("runs") or []), _step_of(Path(resumed_from))
        last = read_history(Path(resumed_from).parent)
        if last is not None and not last.has(runs, step):
            warnings.warn(
                f"{resumed_from} is of an earlier run than the last one in its folder; this run goes on from it as you ask, and "
                "leaves the last one's checkpoints behind.",
                stacklevel=3,
            )
    elif older := _numbered_checkpoints(output_dir):
        warnings.warn(
            f"{output_dir} holds checkpoints of an earlier run ({', '.join(folder.name for _, folder in older)}), and this run "
            "does not resume from one. They stay until save_total_limit or a checkpoint of the same step replaces them; "
            "resume_from_checkpoint=True will take none of them. Set resume_from_checkpoint or another output_dir if that is "
            "not meant.",
            stacklevel=3,
        )
    history = History([*runs, [uuid.uuid4().hex, step]])
    if writes:
        history.write(output_dir)
    return history.runs


def _step_of(checkpoint: Path) -> int:
    try:
        return json.loads((checkpoint / TRAINER_STATE).read_text())["global_step"]
    except (OSError, ValueError, KeyError):
        return 0
