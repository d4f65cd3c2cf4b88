"""Which distributions are installed."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def installed(distribution: str) -> str | None:
    """Its version, None where it is not there."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def own_version() -> str | None:
    """The version of this suite: of the checkout that runs, installed or not, else of the distribution."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    try:
        return str(tomllib.loads(project.read_text("utf-8"))["project"]["version"])
    except (OSError, ValueError, KeyError):
        return installed("quantcts")
