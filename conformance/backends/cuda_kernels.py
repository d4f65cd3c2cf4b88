"""The kernels of `cuda_kernels`: on a GPU, and those whose threads do not cooperate on the CPU as well.

Codes and scales meet the activations unrounded, integer codes are summed in int32, everything else in float32, and an
output is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from conformance.backend import Checkpoint, Support
from conformance.backends.cuda import require
from conformance.backends.cuda_experts import CudaExperts, target_of
from conformance.cases import Case
from conformance.errors import EnvironmentMissing
from cuda_kernels.build import ToolMissing
from cuda_kernels.linear import DTYPES, Activations, PackedWeight, packed_words, project, quantize, quantized
from cuda_kernels.runtime import THREADS, CudaRuntime, HostRuntime, Runtime, blocks_for
from reference.bounds import Contract
from reference.formats import ActivationFormat


class CudaKernelsBackend(CudaExperts):
    """macros of the runtime select compile-time mutants (`cuda_kernels.mutants`)."""

    contract = Contract(weights="exact", integers="int32", intermediates="16-bit")
    libraries = ("cuda-core", "cuda-bindings", "torch")

    # What each operation launches, among what torch may launch around it.
    kernels: ClassVar[dict[str, str]] = {
        "packing": "pack_codes|unpack_codes",
        "dequantize": "dequantize",
        "activation_quantization": "quantize_plain|quantize_block",
        "linear": "project_(plain|tiled|gemv|mma4)",
        "routing": "route",
        "moe_align": "align_",
        "swiglu": "swiglu",
        "moe": "project_(plain|tiled)",
    }

    def __init__(self, runtime: Runtime, name: str = "cuda_kernels") -> None:
        self.runtime = runtime
        self.name = name
        self.device = runtime.device.type

    def prepare(self, cases: Sequence[Case], workers: int) -> Iterator[str]:
        """Compile all kernels: any case may need any of them."""
        yield from self.runtime.prepare(workers)

    def supports(self, case: Case) -> Support:
        return Support.yes()

    def pack(self, codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
        along_first = axis % codes.ndim == codes.ndim - 2
        lines, length = codes.shape[-1 if along_first else -2], codes.shape[axis]
        shape = list(codes.shape)
        shape[axis] = packed_words(length, bits)
        words = torch.empty(shape, dtype=torch.int32, device=codes.device)
        outside = torch.zeros(1, dtype=torch.int32, device=codes.device)
        self.runtime.launch(
            "pack_codes", blocks_for(words.numel()), THREADS, codes.contiguous(), words, outside, _stack(codes),
            lines, length, bits, int(along_first),
        )  # fmt: skip
        if outside.item():
            raise ValueError(f"codes: one lies outside the range of {bits} bits")
        return words

    def unpack(self, words: torch.Tensor, bits: int, size: int, axis: int) -> torch.Tensor:
        along_first = axis % words.ndim == words.ndim - 2
        lines = words.shape[-1 if along_first else -2]
        shape = list(words.shape)
        if shape[axis] != packed_words(size, bits):
            raise ValueError(
                f"words: {shape[axis]} a line; {size} codes of {bits} bits take {packed_words(size, bits)}"
            )
        shape[axis] = size
        codes = torch.empty(shape, dtype=torch.int8, device=words.device)
        self.runtime.launch(
            "unpack_codes", blocks_for(codes.numel()), THREADS, words.contiguous(), codes, _stack(words), lines, size,
            bits, int(along_first),
        )  # fmt: skip
        return codes

    def dequantize(self, checkpoint: Checkpoint) -> torch.Tensor:
        w = self._weight(checkpoint)
        out = torch.empty((w.n, w.k), dtype=w.dtype, device=w.words.device)
        self.runtime.launch(
            "dequantize", blocks_for(out.numel()), THREADS, w.words, w.scale, w.zero_point, w.g_idx, out,
            DTYPES[w.dtype], w.bits, w.n, w.k, w.group_size, w.groups,
        )  # fmt: skip
        return out

    def quantize_activation(
        self, x: torch.Tensor, args: Mapping[str, Any], input_scale: float | None
    ) -> Sequence[torch.Tensor]:
        fmt = ActivationFormat.from_quantization_args(args)
        rows, columns = x.shape
        if fmt.strategy == "group" and columns % fmt.group_size:
            raise ValueError(f"x: groups of {fmt.group_size} do not divide K={columns}")
        if not fmt.dynamic and not 0.0 < (input_scale or 0.0) < math.inf:
            raise ValueError(
                f"input_scale: {input_scale}; a static format needs one that is positive and finite"
            )
        given = float(input_scale or 0.0) if not fmt.dynamic else 0.0
        whole = fmt.strategy == "tensor" and fmt.dynamic
        if whole and not x.numel():
            raise ValueError("x: no numbers have no scale of their own")
        length = fmt.group_size if fmt.strategy == "group" else x.numel() if whole else columns
        codes, scales, zero_points = quantized(self.runtime, x, fmt.kind, length, not fmt.symmetric, given)
        shape = (1, 1) if fmt.strategy == "tensor" else (rows, columns // length)
        found = [codes, scales.reshape(shape)]
        return found if zero_points is None else [*found, zero_points.reshape(shape)]

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        return Linear(self.runtime, self._weight(checkpoint), target_of(checkpoint.input_activations))

    def _weight(self, checkpoint: Checkpoint) -> PackedWeight:
        n, k = checkpoint.tensors["weight_shape"].tolist()
        return PackedWeight.load(checkpoint.tensors, checkpoint.weights, n, k)


class Linear:
    """y (M, N) of x (M, K) in 16 bits."""

    def __init__(self, runtime: Runtime, weight: PackedWeight, target: str | None) -> None:
        self.runtime, self.weight, self.target = runtime, weight, target

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = Activations(x) if self.target is None else quantize(self.runtime, x, self.target)
        return project(self.runtime, self.weight, rows)


def _stack(matrices: torch.Tensor) -> int:
    """How many matrices a tensor of two or more dimensions holds."""
    return int(matrices[..., 0, 0].numel())


def backend() -> CudaKernelsBackend:
    """On the current GPU."""
    require("cuda.core", "cuda-core")
    return _made(CudaRuntime, "cuda_kernels")


def host_backend() -> CudaKernelsBackend:
    """On the CPU: the kernels whose threads do not cooperate."""
    return _made(HostRuntime, "cuda_kernels_host")


def _made(
    runtime: type[CudaRuntime] | type[HostRuntime], name: str, macros: Sequence[str] = ()
) -> CudaKernelsBackend:
    try:
        return CudaKernelsBackend(runtime(macros), name)
    except ToolMissing as error:
        raise EnvironmentMissing(str(error)) from error
