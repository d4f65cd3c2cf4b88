"""Compiled kernels on disk, named after everything that went into them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path


def cache_directory() -> Path:
    """QUANTCTS_CACHE_DIR, or `quantcts` in the user's cache directory."""
    given = os.environ.get("QUANTCTS_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantcts"


def cached(name: str, suffix: str, key: tuple[Hashable, ...], make: Callable[[Path], None]) -> Path:
    """The file that `make` writes for a key, made if it is not there.

    It is written beside its place and renamed: no reader meets half a file, and of two that make it at once one wins.
    """
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    directory = cache_directory() / "kernels"
    path = directory / f"{name}-{digest}{suffix}"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    handle, name_beside = tempfile.mkstemp(dir=directory, prefix=f"{name}-", suffix=".part")
    os.close(handle)
    beside = Path(name_beside)
    try:
        make(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path
