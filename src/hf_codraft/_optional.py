"""Optional packages, imported where they are needed and missed with a useful message."""

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Imports an optional package.

    Raises:
        ImportError: if it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ImportError(
            f"{module.split('.')[0]} is not installed; it comes with `pip install 'hf-codraft[{extra}]'`."
        ) from error
