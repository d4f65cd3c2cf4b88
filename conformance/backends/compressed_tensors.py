"""compressed-tensors unpacks, dequantizes and quantizes activations, torch multiplies: the CPU default.

The library materializes the weight in the scale's dtype. The product is taken in float32, of codes times
scales where activations are quantized, because torch's 16-bit products on CPUs differ from machine to machine.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from conformance.backend import Checkpoint, Support
from conformance.cases import Case
from conformance.errors import EnvironmentMissing
from reference.bounds import Contract

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Defects that it meets with an error; the others pass through it without a word.
_VALIDATES = ("scale-shape", "group-remainder")


class CompressedTensorsBackend:
    contract = Contract(weights="rounded", quantizer="compressed-tensors")

    def __init__(self, name: str = "compressed_tensors", device: str = "cpu") -> None:
        self.name = name
        self.device = device

    def supports(self, case: Case) -> Support:
        quantizer = case.operation == "activation_quantization"
        if quantizer and self.device == "cuda" and case.activation.strategy == "token":
            return Support.no("quantize() of compressed-tensors has no strategy token on CUDA")
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

    def quantize_activation(
        self, x: torch.Tensor, args: Any, input_scale: float | None
    ) -> list[torch.Tensor]:
        return self._quantized(x, args, input_scale, args["strategy"])

    def _quantized(
        self, x: torch.Tensor, args: Any, input_scale: float | None, strategy: str
    ) -> list[torch.Tensor]:
        """strategy: by which the library is told to apply the scales."""
        arguments = QuantizationArgs(**args)
        if input_scale is not None:
            scale = torch.tensor([input_scale], device=x.device)
            zero_point = torch.zeros(1, dtype=torch.int8, device=x.device)
        else:
            # A token is the last dimension of three: of two, the library takes one scale for both (C60).
            batch = x if args["strategy"] == "group" else x[None]
            scale, zero_point = compute_dynamic_scales_and_zp(batch, arguments, None)
            if args["strategy"] == "token":
                scale, zero_point = scale[0], zero_point[0]
        dtype = torch.float8_e4m3fn if args["type"] == "float" else torch.int8
        applied = arguments.model_copy(update={"strategy": QuantizationStrategy(strategy)})
        codes = quantize(x, scale, zero_point, applied, dtype=dtype)
        per = (1, 1) if args["strategy"] == "tensor" else tuple(scale.shape)
        answer = [codes, scale.reshape(per).float()]
        return answer if args["symmetric"] else [*answer, zero_point.reshape(per).to(torch.int32)]

    def load_linear(self, checkpoint: Checkpoint) -> Any:
        matrix = self.dequantize(checkpoint).float()
        bias = checkpoint.tensors.get("bias")
        bias = None if bias is None else bias.float()
        dtype = _DTYPES[checkpoint.dtype]
        activations = checkpoint.input_activations

        def linear(x: torch.Tensor) -> torch.Tensor:
            values = x.float()
            if activations is not None and len(x):  # on CUDA the library fails for no rows
                # A scale a row of x is one a channel: by that name the library knows it on CUDA too.
                by = "channel" if activations["strategy"] == "token" else activations["strategy"]
                codes, scale = self._quantized(x, activations, None, by)
                values = codes.float() * scale
            return torch.nn.functional.linear(values, matrix, bias).to(dtype)

        return linear


backend = CompressedTensorsBackend


def cuda_backend() -> CompressedTensorsBackend:
    """The same on a CUDA device."""
    if not torch.cuda.is_available():
        raise EnvironmentMissing("torch finds no CUDA device; on the CPU use the backend compressed_tensors")
    return CompressedTensorsBackend("compressed_tensors_cuda", "cuda")
