"""Folders that are replaced as a whole: written beside their place and renamed, so that a kill leaves the old or the new."""

import os
import shutil
from pathlib import Path


def fresh_folder(folder: Path) -> Path:
    """Where the next content of `folder` is written."""
    return folder.with_name(f".{folder.name}.new")


def _old_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def complete_folder(folder: Path) -> Path:
    """Where the last complete content of `folder` lies, also after a kill between the two renames of [`finish_folder`]."""
    old = _old_folder(folder)
    return old if not folder.is_dir() and old.is_dir() else folder


def recover_folder(folder: Path) -> None:
    """Puts the last complete folder back where a kill fell between the two renames of [`finish_folder`].

    Several processes may call it at once, but none while the folder is being written.
    """
    if folder.exists() or not _old_folder(folder).exists():
        return
    try:
        os.rename(_old_folder(folder), folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster
            raise


def begin_folder(folder: Path) -> Path:
    """Makes an empty [`fresh_folder`] and returns it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(folder)
    fresh = fresh_folder(folder)
    for leftover in (fresh, _old_folder(folder)):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    return fresh


def finish_folder(folder: Path) -> None:
    """Puts the complete [`fresh_folder`] in place of `folder`."""
    old = _old_folder(folder)
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh_folder(folder), folder)
    shutil.rmtree(old, ignore_errors=True)
