"""Which distributions are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(distribution: str) -> str | None:
    """Its version, None where it is not there."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
