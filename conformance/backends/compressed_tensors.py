"""compressed-tensors unpacks, dequantizes and quantizes activations, torch does the rest: the CPU default.

The library materializes the weight in the scale's dtype. The product is taken in float32, of codes times
scales where activations are quantized, because torch's 16-bit products on CPUs differ from machine to machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.backends import torch_experts, torch_routing
from conformance.cases import Case
from conformance.errors import EnvironmentMissing
from reference.bounds import Contract

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Defects that it meets with an error; the others pass through it without a word.
_VALIDATES = ("scale-shape", "group-remainder")


class CompressedTensorsBackend:
    libraries = ("compressed-tensors", "torch")
    contract = Contract(weights="rounded", quantizer="compressed-tensors", ties="any", intermediates="16-bit")
    # The library has no router: this is torch's own.
    route = staticmethod(torch_routing.route)
    align_block_size = staticmethod(torch_routing.align_block_size)

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
        return self._matrix(dict(checkpoint.tensors), checkpoint.weights)

    def _matrix(self, tensors: dict[str, torch.Tensor], weights: Any) -> torch.Tensor:
        if "weight_g_idx" in tensors:
            raise NotImplementedError("weight_g_idx: compressed-tensors has no group activation ordering")
        if "weight_shape" in tensors:  # the library reads it number by number
            tensors["weight_shape"] = tensors["weight_shape"].cpu()
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
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
        quantize = self._quantizer(checkpoint.input_activations)
        return lambda x: torch.nn.functional.linear(quantize(x), matrix, bias).to(dtype)

    def _quantizer(self, activations: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """From 16-bit activations to the float32 numbers that their codes stand for."""

        def quantize(x: torch.Tensor) -> torch.Tensor:
            if activations is None or len(x) == 0:  # on CUDA the library fails for no rows
                return x.float()
            # A scale a row of x is one a channel: by that name the library knows it on CUDA too.
            by = "channel" if activations["strategy"] == "token" else activations["strategy"]
            codes, scale = self._quantized(x, activations, None, by)
            return codes.float() * scale

        return quantize

    swiglu = staticmethod(torch_experts.swiglu)

    def load_moe(self, checkpoint: MoeCheckpoint) -> torch_experts.TorchExperts:
        w13, w2 = self._matrices(checkpoint, "")
        shared = (
            self._matrices(checkpoint, "shared_")
            if "shared_w13_weight_packed" in checkpoint.tensors
            else None
        )
        quantize = self._quantizer(checkpoint.input_activations)
        return torch_experts.TorchExperts(checkpoint, w13, w2, shared, quantize)

    def _matrices(self, checkpoint: MoeCheckpoint, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 and w2 of all experts. The library knows no stacks: the matrices are one below the other to it, or one
        layer each where their packed zero points do not end with a word."""
        h, i = checkpoint.hidden, checkpoint.intermediate
        found = []
        for which, shape in (("w13", (2 * i, h)), ("w2", (h, i))):
            start = f"{prefix}{which}_weight"
            stacks = {
                n.removeprefix(f"{prefix}{which}_"): t
                for n, t in checkpoint.tensors.items()
                if n.startswith(start)
            }
            experts, bits = len(stacks["weight_packed"]), checkpoint.weights["num_bits"]
            if "weight_zero_point" not in stacks or shape[0] * bits % 32 == 0:
                tall = {n: t.flatten(0, 1) for n, t in stacks.items()}
                tall["weight_shape"] = torch.tensor((experts * shape[0], shape[1]))
                found.append(self._matrix(tall, checkpoint.weights).reshape(experts, *shape))
            else:
                each = ({n: t[e] for n, t in stacks.items()} for e in range(experts))
                one = {"weight_shape": torch.tensor(shape)}
                found.append(torch.stack([self._matrix(m | one, checkpoint.weights) for m in each]))
        return found[0], found[1]


backend = CompressedTensorsBackend


def cuda_backend() -> CompressedTensorsBackend:
    """The same on a CUDA device."""
    if not torch.cuda.is_available():
        raise EnvironmentMissing("torch finds no CUDA device; on the CPU use the backend compressed_tensors")
    return CompressedTensorsBackend("compressed_tensors_cuda", "cuda")
