"""`quantcts doctor`: what this machine can judge, and what keeps it from judging the rest."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from conformance.backend import cuda_backends, known_backends
from conformance.errors import EnvironmentMissing, RunError
from conformance.installed import installed, own_version
from conformance.isolation.supervisor import Place, Supervisor
from conformance.report.document import gpus
from conformance.report.terminal import console_on
from conformance.roster import NO_GPU, gpu_count

_PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "compressed-tensors",
    "cuda-core",
    "pytest",
    "pytest-xdist",
    "pytest-benchmark",
)
_TOOLS = (("nvcc", r"release ([\d.]+)"), ("g++", r"(\d+\.\d+\.\d+)"))


def examine(file: IO[str]) -> int:
    """Print versions, GPUs, compilers and which backends can be loaded; returns how many can.

    Each backend is loaded in a process of its own, so that one that dies of it is only absent.
    """
    console = console_on(file)
    others = ", ".join(f"{name} {installed(name) or 'absent'}" for name in _PACKAGES)
    versions = f"quantcts {own_version() or 'of unknown version'}, {others}"
    console.print(f"Python {platform.python_version()}; {versions}", soft_wrap=True)
    console.print(f"GPU: {'; '.join(gpus()) or 'none that nvidia-smi knows'}", soft_wrap=True)
    console.print("; ".join(f"{tool}: {_tool(tool, pattern)}" for tool, pattern in _TOOLS), soft_wrap=True)
    if sys.dont_write_bytecode:
        console.print(
            "PYTHONDONTWRITEBYTECODE is set: where a library has no bytecode beside it, each process compiles it anew",
            soft_wrap=True,
        )
    found = _found(list(known_backends()))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("backend", "", "on", "made of, or why not"):
        table.add_column(column)
    ready = 0
    for name, place in found.items():
        if isinstance(place, Place):
            ready += 1
            made_of = ", ".join(f"{n} {v}" for n, v in place.description.libraries.items())
            table.add_row(name, "[green]ready[/]", place.description.device, escape(made_of))
        else:
            table.add_row(name, "[yellow]absent[/]", "", escape(str(place)))
    console.print(table, end="")
    return ready


def _found(names: list[str]) -> dict[str, Place | RunError]:
    """Each backend's place, or why it has none; of those that need a GPU, without one, the same for all."""
    gpus = gpu_count()
    hopeless = [] if gpus else cuda_backends()
    supervisor = Supervisor(profiled=False)
    try:
        started = supervisor.start([n for n in names if n not in hopeless], gpus, every=False)
    finally:
        supervisor.close()
    return {n: started.get(n) or EnvironmentMissing(NO_GPU) for n in names}


def _tool(name: str, pattern: str) -> str:
    """The version of a compiler, or that it is absent."""
    path = shutil.which(name)
    if path is None:
        return "absent"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} does not run: {error}"
    found = re.search(pattern, done.stdout)
    return f"{found[1]} ({path})" if found else path
