"""torchao's quantized tensors: subbyte codes kept in int8 (`torchao`), and its int8 tensors (`torchao_int8`).

Both are weights of torch.nn.functional.linear. The first dequantizes to the dtype of the activations and calls torch's
product; the second multiplies codes. Both run on CUDA and on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from conformance.backend import Checkpoint, Support
from conformance.backends.cuda import require
from conformance.backends.torch_baseline import as_cublas
from conformance.backends.torch_weights import TorchWeight, weight_of
from conformance.cases import Case
from conformance.errors import EnvironmentMissing
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]

# What cuBLAS calls its products
CUBLAS = "nvjet|gemm|gemv|cutlass|xmma"
_INT8 = ".quantize_.workflows.int8.int8_tensor"
_NO_ACT_ORDER = "torchao's blocks are contiguous: it has no group activation ordering"


class IntxBackend:
    """IntxUnpackedToInt8Tensor, 1 to 8 bits.

    Its own int8 activations are asymmetric: they are offered as a quantizer, no case multiplies them.
    """

    libraries = ("torchao", "torch")
    # What multiplies is torch's product of 16 bits.
    kernels: ClassVar = {"linear": CUBLAS}
    # weights: (q - z) * s in the dtype of the layer; q - z is exact there. quantizer: (max - min) / 255 with zero among
    # the values, in the dtype of x.
    contract = Contract(weights="rounded", quantizer="compressed-tensors")

    def __init__(self, library: Any, name: str, device: str) -> None:
        self._library, self.name, self.device = library, name, device

    def contract_for(self, case: Case) -> Contract:
        return as_cublas(self.contract, case) if self.device == "cuda" else self.contract

    def supports(self, case: Case) -> Support:
        if case.operation == "activation_quantization":
            asymmetric = case.activation.kind == "int8" and not case.activation.symmetric
            return Support.yes() if asymmetric else Support.no(_OWN_ACTIVATIONS)
        if case.operation == "validation":
            return Support.no("torchao does not check this")
        if case.activation.kind != "a16":
            return Support.no(_OWN_ACTIVATIONS)
        return Support.no(_NO_ACT_ORDER) if case.act_order else Support.yes()

    def dequantize(self, checkpoint: Checkpoint) -> torch.Tensor:
        weight = weight_of(checkpoint)
        matrix: torch.Tensor = self._tensor(weight, weight.scale.dtype).dequantize()
        return matrix

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        if checkpoint.input_activations is not None:
            raise NotImplementedError(f"input_activations: {_OWN_ACTIVATIONS}")
        weight = weight_of(checkpoint)
        return _linear(self._tensor(weight, weight.scale.dtype), weight.bias)

    def quantize_activation(
        self, x: torch.Tensor, args: Mapping[str, Any], input_scale: float | None
    ) -> list[torch.Tensor]:
        """By the functions that its linear calls for INT8_ASYM_PER_TOKEN."""
        if args["symmetric"] or args["type"] != "int" or args["num_bits"] != 8:
            raise NotImplementedError(
                f"{args['num_bits']} bits, symmetric {args['symmetric']}: {_OWN_ACTIVATIONS}"
            )
        own = self._library.quant_primitives
        block = (1, x.shape[1])
        scale, zero_point = own.choose_qparams_affine(
            x, own.MappingType.ASYMMETRIC, block, target_dtype=torch.int8, quant_min=-128, quant_max=127,
            zero_point_dtype=torch.int8,
        )  # fmt: skip
        codes = own.quantize_affine(x, block, scale, zero_point, torch.int8, -128, 127)
        per = (len(x), 1)
        return [codes, scale.reshape(per).float(), zero_point.reshape(per).to(torch.int32)]

    def _tensor(self, weight: TorchWeight, dtype: torch.dtype) -> Any:
        zero_point = weight.zero_point
        if zero_point is None:
            zero_point = torch.zeros_like(weight.scale, dtype=torch.int8)
        return self._library.IntxUnpackedToInt8Tensor(
            weight.codes, weight.scale, zero_point, getattr(torch, f"int{weight.bits}"),
            (1, weight.group_size), dtype, None,
        )  # fmt: skip


class Int8Backend:
    """Int8Tensor: 8 bits, symmetric; activations of 16 bits, or int8 per token for channels."""

    libraries = ("torchao", "torch")
    kernels: ClassVar = {"linear": CUBLAS}
    # epilogue: the product of codes has 16 bits when it meets the scale of the channel, and again the bias. quantizer:
    # amax / 127.5 in the dtype of x, x times its reciprocal in float32. integers: sums in int32. weights: of groups,
    # dequantized to 16 bits.
    contract = Contract(
        weights="rounded", integers="int32", quantizer="compressed-tensors", epilogue="16-bit"
    )

    def __init__(self, library: Any, name: str, device: str) -> None:
        self._library, self.name, self.device = library, name, device

    def contract_for(self, case: Case) -> Contract:
        cublas = self.device == "cuda" and case.activation.kind == "a16"
        return as_cublas(self.contract, case) if cublas else self.contract

    def supports(self, case: Case) -> Support:
        if case.operation == "validation":
            return Support.no("torchao does not check this")
        if case.operation == "activation_quantization":
            return _first(_activation_reason(case.activation.to_quantization_args() or {}))
        weight, activation = case.weight, case.activation.to_quantization_args()
        return _first(
            _NO_ACT_ORDER if case.act_order else "",
            _weight_reason(weight.bits, weight.symmetric),
            *(self._reasons(activation, weight.group_size, case.n, case.k) if activation is not None else ()),
        )

    def dequantize(self, checkpoint: Checkpoint) -> torch.Tensor:
        weight = weight_of(checkpoint)
        matrix: torch.Tensor = self._tensor(weight, None).dequantize()
        return matrix

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        weight, args = weight_of(checkpoint), checkpoint.input_activations
        if args is not None:
            n, k = weight.codes.shape
            _refuse(*self._reasons(args, weight.group_size, n, k))
        return _linear(self._tensor(weight, args), weight.bias)

    def quantize_activation(
        self, x: torch.Tensor, args: Mapping[str, Any], input_scale: float | None
    ) -> list[torch.Tensor]:
        _refuse(_activation_reason(args))
        found = self._library.Int8Tensor.from_hp(x, self._library.PerRow())
        return [found.qdata, found.scale.reshape(len(x), 1).float()]

    def _reasons(self, args: Mapping[str, Any], group_size: int, n: int, k: int) -> tuple[str, ...]:
        """Why activations are declined; empty ones do not hold."""
        odd = self.device == "cuda" and (n % 8 or k % 8)
        shape = f"torchao multiplies int8 codes on the CPU where 8 does not divide N={n} and K={k}"
        return _activation_reason(args), _group_reason(group_size, k), shape if odd else ""

    def _tensor(self, weight: TorchWeight, args: Mapping[str, Any] | None) -> Any:
        _refuse(_weight_reason(weight.bits, weight.zero_point is None))
        own = self._library
        dynamic = None if args is None else own.QuantizeTensorToInt8Kwargs(granularity=own.PerRow())
        return own.Int8Tensor(
            weight.codes, weight.scale, [1, weight.group_size], weight.scale.dtype, act_quant_kwargs=dynamic
        )


_OWN_ACTIVATIONS = "IntxUnpackedToInt8Tensor quantizes activations to asymmetric int8 per token alone"


def _weight_reason(bits: int, symmetric: bool) -> str:
    if bits != 8:
        return f"Int8Tensor holds weights of 8 bits, not of {bits}"
    return "" if symmetric else "the linear of Int8Tensor has no zero points of weights"


def _activation_reason(args: Mapping[str, Any]) -> str:
    if args["type"] != "int" or args["num_bits"] != 8 or not args["symmetric"]:
        return "Int8Tensor quantizes activations to symmetric int8 alone"
    return (
        ""
        if args["strategy"] == "token" and args["dynamic"]
        else "no static or grouped int8 activations here"
    )


def _group_reason(group_size: int, k: int) -> str:
    """group_size: -1 for a channel."""
    if 0 < group_size < k:
        return f"int8 activations need one scale a channel, not groups of {group_size}"
    return ""


def _first(*reasons: str) -> Support:
    """Yes, where no reason says otherwise."""
    found = [reason for reason in reasons if reason]
    return Support.no(found[0]) if found else Support.yes()


def _refuse(*reasons: str) -> None:
    for reason in reasons:
        if reason:
            raise NotImplementedError(reason)


def _linear(weight: Any, bias: torch.Tensor | None) -> Linear:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _import(module: str, device: str) -> Any:
    """A module of torchao. Raises EnvironmentMissing."""
    if device == "cuda":
        require("torchao", "torchao")
    try:
        return importlib.import_module(f"torchao.quantization{module}")
    except ImportError as error:
        raise EnvironmentMissing(f"torchao cannot be imported ({error}): pip install torchao") from error


def backend() -> IntxBackend:
    return IntxBackend(_import("", "cuda"), "torchao", "cuda")


def cpu_backend() -> IntxBackend:
    return IntxBackend(_import("", "cpu"), "torchao_cpu", "cpu")


def int8_backend() -> Int8Backend:
    return Int8Backend(_import(_INT8, "cuda"), "torchao_int8", "cuda")


def int8_cpu_backend() -> Int8Backend:
    return Int8Backend(_import(_INT8, "cpu"), "torchao_int8_cpu", "cpu")
