"""Plain torch: weights dequantized when a layer is loaded, then a product; the baseline of every cell.

With activations of 16 bits the matrix has 16 bits and cuBLAS multiplies; on the CPU, where torch's 16-bit products
differ from machine to machine, the same matrix is multiplied in float32. Quantized activations are multiplied in
float64, in which products of codes and scales are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.backends import torch_experts, torch_quantizers, torch_routing
from conformance.backends.cuda import require
from conformance.backends.grouped_experts import GroupedExperts, Projection
from conformance.backends.torch_weights import TorchWeight, experts_of, packed, unpacked, weight_of
from conformance.cases import Case
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# The least depth of the tiles that cuBLAS splits a sum into.
_TILE = 64

# integers: exact sums in float64 are tighter than int32 sums joined in float32. intermediates: tensors of 16 bits.
# ties: torch.topk promises no order. The defaults say the rest: cuBLAS sums in float32 and
# rounds once; quantizers take amax / Q in float32.
_CONTRACT = Contract(integers="int32", intermediates="16-bit", ties="any")


def as_cublas(contract: Contract, case: Case) -> Contract:
    """What torch's products of 16 bits leave open with its default settings.

    cuBLAS may split a sum and join the parts in 16 bits; how many parts it does not say, but one has a tile at least.
    For some shapes, a single row among them, the bias is added to a sum that has been rounded.
    """
    longest = max(case.k, case.n) if case.experts else case.k
    own = replace(contract, partial_sums=min(64, max(1, longest // _TILE)))
    return replace(own, epilogue="any") if case.bias else own


class TorchBackend:
    libraries = ("torch",)
    # Every kernel that torch launches is this backend's own: there is nothing behind it to fall back on.
    kernels = ""
    contract = _CONTRACT
    route = staticmethod(torch_routing.route)
    align_block_size = staticmethod(torch_routing.align_block_size)
    swiglu = staticmethod(torch_experts.swiglu)
    quantize_activation = staticmethod(torch_quantizers.quantized)

    def __init__(self, name: str, device: str, reduced: bool = True) -> None:
        """reduced: cuBLAS may join split sums in 16 bits, torch's default."""
        self.name, self.device, self.reduced = name, device, reduced

    def contract_for(self, case: Case) -> Contract:
        if case.activation.kind != "a16":  # weights and products in float64
            return replace(self.contract, weights="exact")
        own = replace(self.contract, weights="rounded")
        return as_cublas(own, case) if self.device == "cuda" and self.reduced else own

    def supports(self, case: Case) -> Support:
        if case.operation == "validation":
            return Support.no("plain torch does not check this")
        return Support.yes()

    def pack(self, codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
        unsigned = codes.to(torch.int16) + 2 ** (bits - 1)
        return _each(unsigned, lambda matrix: packed(matrix, bits, axis % 2))

    def unpack(self, words: torch.Tensor, bits: int, size: int, axis: int) -> torch.Tensor:
        return unpacked(words, bits, size, axis % 2)

    def dequantize(self, checkpoint: Checkpoint) -> torch.Tensor:
        weight = weight_of(checkpoint, act_order=True)
        return weight.matrix(weight.scale.dtype)

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        weight = weight_of(checkpoint, act_order=True)
        return self._linear(weight, checkpoint.input_activations, DTYPES[checkpoint.dtype])

    def load_moe(self, checkpoint: MoeCheckpoint) -> GroupedExperts:
        def projection(which: str) -> Projection:
            weights = experts_of(checkpoint, which, act_order=True)
            dtype, args = DTYPES[checkpoint.dtype], checkpoint.input_activations
            return one_by_one([self._linear(weight, args, dtype) for weight in weights])

        shared = None
        if "shared_w13_weight_packed" in checkpoint.tensors:
            shared = projection("shared_w13"), projection("shared_w2")
        return GroupedExperts(checkpoint, projection("w13"), projection("w2"), shared)

    def _linear(self, weight: TorchWeight, args: Mapping[str, Any] | None, dtype: torch.dtype) -> Linear:
        if args is not None:
            return _quantized(weight, args, dtype)
        matrix, bias = weight.matrix(dtype), weight.bias
        if self.device == "cpu":
            wide, offset = matrix.float(), None if bias is None else bias.float()
            return lambda x: torch.nn.functional.linear(x.float(), wide, offset).to(dtype)

        def linear(x: torch.Tensor) -> torch.Tensor:
            with _reductions(self.reduced):
                return torch.nn.functional.linear(x, matrix, bias)

        return linear


def _quantized(weight: TorchWeight, args: Mapping[str, Any], dtype: torch.dtype) -> Linear:
    matrix = weight.matrix(torch.float64)
    bias = None if weight.bias is None else weight.bias.double()

    def linear(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch_quantizers.dequantized(x, args), matrix, bias).to(dtype)

    return linear


@contextmanager
def _reductions(reduced: bool) -> Iterator[None]:
    """Whether split sums may be joined in 16 bits, for one product; the process keeps its own setting."""
    settings = torch.backends.cuda.matmul
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = [getattr(settings, name) for name in names]
    try:
        for name in names:
            setattr(settings, name, reduced)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)


def one_by_one(linears: Sequence[Linear]) -> Projection:
    """A grouped projection of one linear layer for each expert: torch has no other for quantized experts."""

    def project(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        found = torch_routing.slots_by_expert(places, len(linears))
        parts = [(slots, linears[e](x[slots // places.shape[1]])) for e, slots in found]
        width = parts[0][1].shape[1] if parts else linears[0](x[:0]).shape[1]
        outputs = x.new_zeros((places.numel(), width))
        for slots, part in parts:
            outputs[slots] = part
        return outputs.view(*places.shape, width)

    return project


def _each(stack: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A matrix, or each of a stack of them, changed."""
    return change(stack) if stack.dim() == 2 else torch.stack([change(matrix) for matrix in stack])


def backend() -> TorchBackend:
    """On a CUDA device, with torch's own settings. Raises EnvironmentMissing where there is none."""
    require("torch", "torch")
    return TorchBackend("torch", "cuda")


def float32_sums_backend() -> TorchBackend:
    """The same, but cuBLAS is told to join split sums in float32."""
    require("torch", "torch")
    return TorchBackend("torch_float32_sums", "cuda", reduced=False)


def cpu_backend() -> TorchBackend:
    return TorchBackend("torch_cpu", "cpu", reduced=False)
