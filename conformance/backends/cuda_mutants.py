"""Our own kernels with a fault: what the suites must refuse, and what isolation must contain.

    conformance.backends.cuda_mutants:gpu.zero_point_plus_one     a compile-time mutant on the GPU
    conformance.backends.cuda_mutants:host.zero_point_plus_one    the same on the CPU
    conformance.backends.cuda_mutants:crash.illegal_address       a kernel that misbehaves in layers of 96 outputs

Mutants that need no cooperation are compiled into the plain kernels alone, which are then used throughout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from conformance.backend import Checkpoint
from conformance.backends.cuda import require
from conformance.backends.cuda_kernels import CudaKernelsBackend, Linear
from conformance.errors import EnvironmentMissing
from cuda_kernels.build import ToolMissing
from cuda_kernels.mutants import MUTANTS, Mutant
from cuda_kernels.runtime import CudaRuntime, HostRuntime

# By a kernel of crashes.cu, and by the process itself
CRASHES = ("illegal_address", "misaligned_address", "assert", "trap", "endless")
HOST_CRASHES = ("out_of_memory", "segmentation_fault")
# A layer of so many outputs crashes; all others are computed.
CRASHING_OUTPUTS = 96
_ENDLESS_STEPS = 2**34

Factory = Callable[[], CudaKernelsBackend]


class _OnGpu:
    """Factories by a mutant's name."""

    def __getattr__(self, name: str) -> Factory:
        mutant = _known(name)

        def made() -> CudaKernelsBackend:
            require("cuda.core", "cuda-core")
            try:
                runtime = CudaRuntime([mutant.macro], cooperative=not mutant.host)
            except ToolMissing as error:
                raise EnvironmentMissing(str(error)) from error
            return CudaKernelsBackend(runtime, f"cuda_kernels.{name}")

        return made


class _OnHost:
    def __getattr__(self, name: str) -> Factory:
        mutant = _known(name)
        if not mutant.host:
            raise AttributeError(f"{name} shows only where threads cooperate")
        return lambda: CudaKernelsBackend(HostRuntime([mutant.macro]), f"cuda_kernels_host.{name}")


class _Crashing:
    def __getattr__(self, name: str) -> Factory:
        if name not in (*CRASHES, *HOST_CRASHES):
            raise AttributeError(name)

        def made() -> CudaKernelsBackend:
            require("cuda.core", "cuda-core")
            try:
                return CrashingBackend(name)
            except ToolMissing as error:
                raise EnvironmentMissing(str(error)) from error

        return made


def _known(name: str) -> Mutant:
    if name not in MUTANTS:
        raise AttributeError(f"there is no mutant {name!r}")
    return MUTANTS[name]


class CrashingBackend(CudaKernelsBackend):
    """Our kernels, but a linear with CRASHING_OUTPUTS outputs crashes first."""

    def __init__(self, crash: str) -> None:
        super().__init__(CudaRuntime(), f"cuda_kernels.crash.{crash}")
        self._crash = crash
        self._crashing = CudaRuntime(names=["crashes.cu"])

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        layer = super().load_linear(checkpoint)
        return _Crash(layer, self._crashing, self._crash) if layer.weight.n == CRASHING_OUTPUTS else layer


class _Crash(Linear):
    def __init__(self, layer: Linear, runtime: CudaRuntime, crash: str) -> None:
        super().__init__(layer.runtime, layer.weight, layer.target)
        self._crashing, self._crash = runtime, crash

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._crash == "out_of_memory":
            torch.empty(2**50, dtype=torch.uint8, device=x.device)
        if self._crash == "segmentation_fault":
            ctypes.string_at(0)
        out = torch.zeros(64, dtype=torch.int32, device=x.device)
        steps = [_ENDLESS_STEPS] if self._crash == "endless" else []
        self._crashing.launch(f"crash_{self._crash}", 1, 1, out, *steps)
        return super().__call__(x)


gpu, host, crash = _OnGpu(), _OnHost(), _Crashing()
