"""conch: Triton kernels for packed weights, for operands of 8 bits, static fp8, and two gated activations.

It has no dynamic quantizer: the activations of its 8-bit product are quantized by plain torch, as a server has to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from conformance.backend import Checkpoint, Support
from conformance.backends.cuda import require
from conformance.backends.torch_quantizers import quantized
from conformance.backends.torch_weights import TorchWeight, packed, weight_of
from conformance.backends.warm import compiled
from conformance.cases import Case
from reference.bounds import Contract
from reference.swiglu import GatedActivation

Linear = Callable[[torch.Tensor], torch.Tensor]

_BITS = (1, 2, 4, 8)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# e4m3 holds each integer up to here.
_E4M3_INTEGERS = 16


class ConchBackend:
    name = "conch"
    device = "cuda"
    libraries: tuple[str, ...] = ("conch-triton-kernels", "triton", "torch")
    kernels: ClassVar = {
        "linear": "_gemm_kernel",
        "swiglu": "_silu_and_mul_kernel|_gelu_tanh_and_mul_kernel",
        "activation_quantization": "_static_scaled_fp8_quant_kernel",
    }
    # integers: sums in int32. accumulator: one tl.dot after the other into the same sum, which Triton does not promote
    # on Hopper. Sums in float32 are rounded once, where there is no bias.
    contract = Contract(integers="int32", accumulator="e8m13")

    def __init__(self) -> None:
        self._gemm = importlib.import_module("conch.ops.quantization.gemm")
        self._fp8 = importlib.import_module("conch.ops.quantization.fp8")
        self._silu = importlib.import_module("conch.ops.activation.silu_and_mul")
        self._gelu = importlib.import_module("conch.ops.activation.gelu_tanh_and_mul")

    def supports(self, case: Case) -> Support:
        args = case.activation.to_quantization_args()
        if case.operation == "validation":
            return Support.no("conch is not asked about bad data")
        if case.operation == "activation_quantization":
            return _support(_quantizer_reason(args or {}))
        if case.operation == "swiglu":
            return _support(_gated_reason(case.gated))
        if case.act_order:
            return Support.no("conch has no group activation ordering")
        channel = case.weight.strategy != "group" or case.weight.group_size >= case.k
        return _support(_reason(case.weight.bits, case.weight.symmetric, channel, args))

    def contract_for(self, case: Case) -> Contract:
        # Packed weights are dequantized in the dtype of x, codes of 8 bits multiplied as they are; the bias is added to
        # outputs of 16 bits.
        own = replace(self.contract, weights="rounded" if case.activation.kind == "a16" else "exact")
        return replace(own, epilogue="16-bit") if case.bias else own

    def prepare(self, cases: list[Case], workers: int) -> Iterator[str]:
        yield from compiled(self, backend, cases, workers)

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        return self.linear(weight_of(checkpoint), checkpoint.input_activations, _DTYPES[checkpoint.dtype])

    def linear(self, weight: TorchWeight, args: Mapping[str, Any] | None, dtype: torch.dtype) -> Linear:
        channel = weight.group_size >= weight.codes.shape[1]
        _refuse(_reason(weight.bits, weight.zero_point is None, channel, args))
        return self._packed(weight) if args is None else self._of_8_bits(weight, args, dtype)

    def quantize_activation(
        self, x: torch.Tensor, args: Mapping[str, Any], input_scale: float | None
    ) -> list[torch.Tensor]:
        if args["type"] != "float" or not args["symmetric"]:
            raise NotImplementedError(_quantizer_reason(args))
        scale = None if input_scale is None else torch.tensor([input_scale], device=x.device)
        codes, scale = self._fp8.scaled_fp8_quant(x, scale)  # refuses what is not static
        return [codes, scale.reshape(1, 1)]

    def swiglu(self, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
        if reason := _gated_reason(activation):
            raise NotImplementedError(f"{activation}: {reason}")
        own = self._silu.silu_and_mul if activation.kind == "silu" else self._gelu.gelu_tanh_and_mul
        h: torch.Tensor = own(x)
        return h

    def _packed(self, weight: TorchWeight) -> Linear:
        """16-bit activations: (u - bias - z) * s, K-packed words of stored codes."""
        words, scales = packed(weight.unsigned, weight.bits, 1).T.contiguous(), weight.scale.T.contiguous()
        zeros, offset = None, 2 ** (weight.bits - 1)
        if weight.zero_point is not None:
            zeros, offset = weight.unsigned_zero_point.T.contiguous(), 0

        def linear(x: torch.Tensor) -> torch.Tensor:
            sizes = weight.bits, offset, weight.group_size
            y: torch.Tensor = self._gemm.mixed_precision_gemm(x, words, scales, zeros, *sizes, strict=True)
            return y if weight.bias is None else y.add_(weight.bias)

        return linear

    def _of_8_bits(self, weight: TorchWeight, args: Mapping[str, Any], dtype: torch.dtype) -> Linear:
        kind = torch.int8 if args["type"] == "int" else torch.float8_e4m3fn
        codes, scales = weight.centred.to(kind).t(), weight.scale.float()

        def linear(x: torch.Tensor) -> torch.Tensor:
            own, per_token = quantized(x, args)
            y: torch.Tensor = self._gemm.scaled_gemm(
                own, codes, per_token, scales, dtype, weight.bias, strict=True
            )
            return y

        return linear


def _reason(bits: int, symmetric: bool, channel: bool, args: Mapping[str, Any] | None) -> str:
    """Why a dense layer is declined, or nothing."""
    if args is None:
        return "" if bits in _BITS else f"conch packs weights of 1, 2, 4 and 8 bits, not of {bits}"
    if not channel:
        return "conch's product of 8-bit operands has one scale a channel: no groups"
    largest = 2 ** (bits - 1) if symmetric else 2**bits - 1
    kind, most = ("int8", 128) if args["type"] == "int" else ("e4m3", _E4M3_INTEGERS)
    return "" if largest <= most else f"codes less their zero points reach {largest} and do not fit {kind}"


def _quantizer_reason(args: Mapping[str, Any]) -> str:
    if args["type"] != "float":
        return f"conch quantizes to int8 with a static scale alone, not to {args['num_bits']} bits by dynamic ones"
    return "conch has no dynamic fp8 quantizer" if args["dynamic"] else ""


def _gated_reason(activation: GatedActivation) -> str:
    if activation in (GatedActivation(), GatedActivation("gelu-tanh")):
        return ""
    return "conch has silu and gelu-tanh, the gate first, without alpha, beta and limit"


def _support(reason: str) -> Support:
    return Support.no(reason) if reason else Support.yes()


def _refuse(reason: str) -> None:
    if reason:
        raise NotImplementedError(reason)


def backend() -> ConchBackend:
    require("conch", "conch-triton-kernels")
    require("triton", "triton")
    return ConchBackend()
