"""compressed-tensors unpacks and dequantizes, torch multiplies: the CPU default.

The library materializes the weight in the scale's dtype. The product is taken in float32, because torch's
16-bit products on CPUs differ from machine to machine.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from conformance.backend import Checkpoint, Support
from conformance.cases import Case
from conformance.errors import EnvironmentMissing
from reference.bounds import Contract

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Defects that it meets with an error; the others pass through it without a word.
_VALIDATES = ("scale-shape", "group-remainder")


class CompressedTensorsBackend:
    contract = Contract(weights="rounded")

    def __init__(self, name: str = "compressed_tensors", device: str = "cpu") -> None:
        self.name = name
        self.device = device

    def supports(self, case: Case) -> Support:
        if case.activation.kind != "a16":
            return Support.no("activations are not quantized")
        if case.act_order:
            return Support.no("compressed-tensors removed group activation ordering: it has no g_idx")
        if case.operation == "validation" and case.recipe not in _VALIDATES:
            return Support.no("compressed-tensors does not check this")
        return Support.yes()

    def pack(self, codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
        return pack_to_int32(codes, bits, packed_dim=axis % 2)

    def unpack(self, words: torch.Tensor, bits: int, size: int, axis: int) -> torch.Tensor:
        shape = list(words.shape)
        shape[axis] = size
        return unpack_from_int32(words, bits, torch.Size(shape), packed_dim=axis % 2)

    def dequantize(self, checkpoint: Checkpoint) -> torch.Tensor:
        tensors = dict(checkpoint.tensors)
        if "weight_g_idx" in tensors:
            raise NotImplementedError("weight_g_idx: compressed-tensors has no group activation ordering")
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**checkpoint.weights))
        return PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]

    def load_linear(self, checkpoint: Checkpoint) -> Any:
        if checkpoint.input_activations is not None:
            raise NotImplementedError("input_activations: this adapter does not quantize activations")
        matrix = self.dequantize(checkpoint).float()
        bias = checkpoint.tensors.get("bias")
        bias = None if bias is None else bias.float()
        dtype = _DTYPES[checkpoint.dtype]
        return lambda x: torch.nn.functional.linear(x.float(), matrix, bias).to(dtype)


backend = CompressedTensorsBackend


def cuda_backend() -> CompressedTensorsBackend:
    """The same on a CUDA device."""
    if not torch.cuda.is_available():
        raise EnvironmentMissing("torch finds no CUDA device; on the CPU use the backend compressed_tensors")
    return CompressedTensorsBackend("compressed_tensors_cuda", "cuda")
