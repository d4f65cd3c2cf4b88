"""Compiling the kernels: NVRTC through cuda-core for a GPU, g++ for the host. Neither a GPU nor torch is needed.

What was compiled is kept on disk under a hash of the sources, the macros, the options and the compiler's version.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cuda_kernels.cache import cached
from cuda_kernels.sources import Library, Signature, library


class CompileError(Exception):
    """What the compiler said."""


class ToolMissing(Exception):
    """A compiler or a library that the runtime needs is not there; the message says what to install."""


def cubin(
    source: str, architecture: str, macros: Sequence[str] = (), sources: Library | None = None
) -> bytes:
    """The machine code of one source for an architecture (`sm_90`), from the cache or made by NVRTC; no GPU is needed.

    Raises CompileError with the compiler's log, ToolMissing without cuda-core or NVRTC.
    """
    found = sources or library()
    texts = found.closure(source)
    options = {"std": "c++17", "define_macro": list(macros)}
    key = (source, architecture, str(options), str(nvrtc_version()), *texts.items())

    def compile_it(place: Path) -> None:
        core = cuda_core()
        asked = core.ProgramOptions(
            arch=architecture,
            include_path=str(found.root),
            name=source,
            std="c++17",
            define_macro=list(macros) or None,
        )
        try:
            program = core.Program(texts[source], "c++", asked)
            place.write_bytes(bytes(program.compile("cubin").code))
        except Exception as error:
            raise CompileError(f"{source} for {architecture}: {error}") from error

    return cached(f"{source}-{architecture}", ".cubin", key, compile_it).read_bytes()


def nvrtc_version() -> tuple[int, int]:
    """Of the NVRTC that compiles. Raises ToolMissing."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        raise ToolMissing(f"NVRTC cannot be loaded ({error}): pip install 'cuda-core[cu13]'") from error
    if int(status) != 0:
        raise ToolMissing(f"NVRTC does not tell its version: {status}")
    return int(major), int(minor)


def cuda_core() -> Any:
    """The module of cuda-core, with launches that may begin early. Raises ToolMissing where there is none."""
    try:
        module = importlib.import_module("cuda.core")
    except ImportError:
        raise ToolMissing("cuda-core is not installed: pip install 'cuda-core[cu13]'") from None
    if not hasattr(getattr(module, "LaunchConfig", None), "programmatic_stream_serialization"):
        raise ToolMissing("cuda-core is older than 1.2: pip install --upgrade 'cuda-core[cu13]'")
    return module


def host_object(source: str, macros: Sequence[str] = (), sources: Library | None = None) -> Path:
    """The path of a shared object with a function `host_NAME` for each kernel of a source, from the cache or by g++.

    Raises CompileError with the compiler's message, ToolMissing without g++.
    """
    found = sources or library()
    compiler = shutil.which("g++")
    if compiler is None:
        raise ToolMissing("g++ is not installed: the kernels cannot be compiled for the host")
    options = [
        "-O2",
        "-std=c++17",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
    ]
    program = "\n".join([f'#include "{source}"', *map(_loop, found.signatures([source]).values())])
    key = (source, program, *options, *macros, _version(compiler), *found.closure(source).items())

    def compile_it(place: Path) -> None:
        defines = [f"-D{macro}" for macro in macros]
        command = [compiler, *options, *defines, f"-I{found.root}", "-x", "c++", "-", "-o", str(place), "-lm"]
        done = subprocess.run(command, input=program.encode(), capture_output=True, check=False)
        if done.returncode:
            raise CompileError(f"{source} for the host: {done.stderr.decode(errors='replace')}")

    return cached(f"{source}-host", ".so", key, compile_it)


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout


def _loop(signature: Signature) -> str:
    """C++ that calls a kernel once a thread. Its own names end in `_`, which those of parameters do not."""
    listed = "".join(f", {p.kind}{'*' * p.pointer} {p.name}" for p in signature.parameters)
    passed = ", ".join(p.name for p in signature.parameters)
    return f"""
extern "C" void host_{signature.kernel}(u32 bx_, u32 by_, u32 bz_, u32 tx_, u32 ty_, u32 tz_{listed}) {{
  gridDim = {{bx_, by_, bz_}};
  blockDim = {{tx_, ty_, tz_}};
  for (u32 block_ = 0; block_ < bx_ * by_ * bz_; block_++)
    for (u32 thread_ = 0; thread_ < tx_ * ty_ * tz_; thread_++) {{
      blockIdx = {{block_ % bx_, block_ / bx_ % by_, block_ / (bx_ * by_)}};
      threadIdx = {{thread_ % tx_, thread_ / tx_ % ty_, thread_ / (tx_ * ty_)}};
      {signature.kernel}({passed});
    }}
}}"""
