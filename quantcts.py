"""Start-up: check that `reference`, `conformance` and `cuda_kernels` are ours, then hand over to them.

The packages carry plain names, so a stranger's file of the same name on the path could stand before them.
This module imports nothing of the project before it has looked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
_SUITES = "conformance.suites"


def shadowed() -> str | None:
    """One line about a package of ours that another one hides, or None."""
    for name in ("reference", "conformance", "cuda_kernels"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != HOME / name / "__init__.py":
            return (
                f"quantcts: the package {name!r} is not QuantCTS's own but {found or 'nowhere to be found'}; "
                f"rename it, or start from a folder that does not contain it (ours is {HOME / name})"
            )
    return None


def main() -> None:
    """The console script."""
    problem = shadowed()
    if problem:
        print(problem, file=sys.stderr)
        raise SystemExit(4)
    from conformance.cli import main as run

    run()


# ---- pytest loads this module in every run of the environment; it acts on runs of our suites alone.


def _plugin(config: Any) -> Any:
    """The module that serves this run: the judge's, or the benchmark's."""
    arguments = [str(arg) for arg in config.invocation_params.args]
    benchmark = any(arg.startswith(f"{_SUITES}.bench_") for arg in arguments)
    return importlib.import_module("conformance.bench.plugin" if benchmark else "conformance.plugin")


def _ours(pluginmanager: Any) -> bool:
    config = pluginmanager.get_plugin("pytestconfig")
    suites = str(HOME / "conformance" / "suites")
    return any(
        _SUITES in str(arg) or str(Path(str(arg).partition("::")[0]).resolve()).startswith(suites)
        for arg in config.invocation_params.args
    )


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    if not _ours(pluginmanager):
        return
    problem = shadowed()
    if problem:
        import pytest

        raise pytest.UsageError(problem)
    _plugin(pluginmanager.get_plugin("pytestconfig")).add_options(parser)


def pytest_configure(config: Any) -> None:
    if _ours(config.pluginmanager):
        _plugin(config).configure(config)


if __name__ == "__main__":
    main()
