"""torch's own quantized operators: 4 bits in groups, 8 bits a channel, 8-bit products, grouped products for experts.

Operands of 8 bits hold every code less its zero point that fits: a narrower weight is widened when it is loaded, the
numbers stay the same. torch has no quantizer of its own for them: activations are quantized by plain torch. Where an
operator takes no bias it is added to the operator's output, as torch's callers do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.backends.cuda import require
from conformance.backends.grouped_experts import GroupedExperts, Projection
from conformance.backends.torch_quantizers import quantized
from conformance.backends.torch_weights import TorchWeight, experts_of, weight_of
from conformance.cases import Case
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TINYGEMM_GROUPS = (32, 64, 128, 256)
# e4m3 holds each integer up to here.
_E4M3_INTEGERS = 16


@dataclass(frozen=True)
class Limits:
    """What the operators of a device ask for. rows: least M of _int_mm. integers, fp8: what N and K of _int_mm and of
    _scaled_mm are multiples of. tinygemm: what its packed N is a multiple of."""

    rows: int
    integers: int
    fp8: int
    tinygemm: int


_LIMITS = {"cuda": Limits(17, 8, 16, 8), "cpu": Limits(0, 1, 1, 16)}


@dataclass(frozen=True)
class Format:
    """What decides which operator a layer takes. group_size: -1 for a channel. args: of the activations."""

    bits: int
    symmetric: bool
    group_size: int
    args: Mapping[str, Any] | None
    dtype: str

    @classmethod
    def of(cls, layer: Checkpoint | MoeCheckpoint) -> Format:
        weights = layer.weights
        size = weights["group_size"] if weights["strategy"] == "group" else -1
        return cls(weights["num_bits"], weights["symmetric"], size, layer.input_activations, layer.dtype)

    @classmethod
    def of_case(cls, case: Case) -> Format:
        size = case.weight.group_size if case.weight.strategy == "group" else -1
        args = case.activation.to_quantization_args()
        return cls(case.weight.bits, case.weight.symmetric, size, args, case.dtype)

    @property
    def integer(self) -> bool:
        return self.args is not None and self.args["type"] == "int"

    @property
    def largest(self) -> int:
        """The magnitude that a code less its zero point can reach."""
        return int(2 ** (self.bits - 1)) if self.symmetric else int(2**self.bits - 1)


class TorchNativeBackend:
    libraries = ("torch",)
    kernels: ClassVar = {
        "linear": "tinygemm|weight_int8pack|gemm|cutlass|nvjet|xmma",
        "moe": "grouped_gemm|GroupProblemShape",
    }
    # integers: sums of _int_mm in int32. accumulator: _scaled_mm without fast accumulation moves Hopper's sums to
    # float32 every 128 columns. Scales meet float32 sums, which are rounded once. intermediates: tensors of 16 bits.
    contract = Contract(integers="int32", accumulator="e8m13/128", intermediates="16-bit")

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device, self.limits = name, device, _LIMITS[device]

    def contract_for(self, case: Case) -> Contract:
        fmt, experts = Format.of_case(case), case.operation != "linear"
        own = replace(self.contract, weights="exact")  # codes meet the activations, scales the sums
        if fmt.args is None and experts:
            own = replace(own, weights="rounded")  # _grouped_mm takes dequantized weights
        elif fmt.args is None and fmt.group_size > 0 and self.device == "cuda":
            # tinygemm: (u - 8) * s + zero, one fused operation in bf16, where zero = -z * s has been rounded to bf16
            own = replace(own, weights="rounded", zero_point="integer" if fmt.symmetric else "scaled")
        outside = case.bias and (fmt.args is None or experts)
        return replace(own, epilogue="16-bit") if outside else own

    def supports(self, case: Case) -> Support:
        if case.operation == "validation":
            return Support.no("torch's operators do not check this")
        if case.act_order:
            return Support.no("torch's operators have no group activation ordering")
        fmt = Format.of_case(case)
        if case.operation in ("moe", "moe_parallel"):
            reason = self._experts_reason(fmt, case.n, case.k)
        else:
            reason = self._reason(fmt, case.n, case.k)
            if not reason and fmt.integer and case.m < self.limits.rows:
                reason = f"_int_mm takes {self.limits.rows} rows or more, not {case.m}"
        return Support.no(reason) if reason else Support.yes()

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        weight, fmt = weight_of(checkpoint), Format.of(checkpoint)
        _refuse(self._reason(fmt, *weight.codes.shape))
        if fmt.args is not None:
            make = _int_mm if fmt.integer else _scaled_mm
            return make(weight, fmt.args, _DTYPES[fmt.dtype])
        multiply = self._tinygemm(weight) if fmt.group_size > 0 else _int8pack(weight)
        bias = weight.bias
        return multiply if bias is None else lambda x: multiply(x) + bias

    def load_moe(self, checkpoint: MoeCheckpoint) -> GroupedExperts:
        fmt = Format.of(checkpoint)
        _refuse(self._experts_reason(fmt, checkpoint.intermediate, checkpoint.hidden))

        def projection(which: str) -> Projection:
            experts = experts_of(checkpoint, which)
            product = _grouped_mm(experts, fmt) if fmt.args is None else _scaled_grouped_mm(experts, fmt)
            return _sorted(len(experts), product, checkpoint.tensors.get(f"{which}_bias"))

        shared = None
        if "shared_w13_weight_packed" in checkpoint.tensors:
            shared = projection("shared_w13"), projection("shared_w2")
        return GroupedExperts(checkpoint, projection("w13"), projection("w2"), shared)

    def _reason(self, fmt: Format, n: int, k: int) -> str:
        """Why a dense layer is declined, or nothing."""
        if fmt.args is None and fmt.group_size > 0:
            return self._tinygemm_reason(fmt)
        if fmt.group_size > 0:
            return f"torch's 8-bit products have one scale a channel, no groups of {fmt.group_size}"
        fp8 = fmt.args is not None and not fmt.integer
        kind, most = ("e4m3", _E4M3_INTEGERS) if fp8 else ("int8", 128)
        if fmt.largest > most:
            return f"codes less their zero points reach {fmt.largest} and do not fit {kind}"
        if fmt.args is None:
            return ""
        operator, multiple = ("_scaled_mm", self.limits.fp8) if fp8 else ("_int_mm", self.limits.integers)
        if n % multiple or k % multiple:
            return f"{operator} needs N and K of a multiple of {multiple}, not N={n}, K={k}"
        return ""

    def _tinygemm_reason(self, fmt: Format) -> str:
        if fmt.bits != 4 or fmt.group_size not in _TINYGEMM_GROUPS:
            return f"tinygemm has 4 bits in groups of 32, 64, 128 and 256, not {fmt.bits} bits in {fmt.group_size}"
        if fmt.dtype != "bf16":
            return f"tinygemm takes activations in bf16, not in {fmt.dtype}"
        if self.device == "cpu" and not fmt.symmetric:
            return "on the CPU tinygemm rounds zero points and not weights: no contract of asymmetric ones says so"
        return ""

    def _experts_reason(self, fmt: Format, i: int, h: int) -> str:
        """Why a layer of experts is declined, or nothing."""
        if fmt.args is None and fmt.dtype != "bf16" and self.device == "cuda":
            return f"_grouped_mm has no grouped kernel of {fmt.dtype}: it multiplies expert by expert"
        if fmt.args is None:  # rows of 16 bytes
            return (
                "" if i % 8 == h % 8 == 0 else f"_grouped_mm needs sizes of a multiple of 8, not I={i}, H={h}"
            )
        if fmt.integer:
            return f"torch has no grouped product of int{fmt.args['num_bits']}"
        if fmt.dtype != "bf16":
            return f"_scaled_grouped_mm gives bf16, not {fmt.dtype}"
        if self.device == "cpu":
            return "_scaled_grouped_mm of fp8 runs on CUDA alone"
        if i % 16 or h % 16:
            return f"_scaled_grouped_mm needs sizes of a multiple of 16, not I={i}, H={h}"
        return self._reason(fmt, 16, 16)

    def _tinygemm(self, weight: TorchWeight) -> Linear:
        n, k = weight.codes.shape
        padding = -n % self.limits.tinygemm
        codes = torch.nn.functional.pad(weight.unsigned, (0, 0, 0, padding), value=8)
        parameters = torch.nn.functional.pad(_scales_and_zeros(weight), (0, 0, 0, padding))
        if self.device == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        else:
            tiles = max(inner for inner in (2, 4, 8) if k % (16 * inner) == 0)
            pairs = codes[:, 0::2] << 4 | codes[:, 1::2]  # the even column in the high half
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)
            multiply = torch.ops.aten._weight_int4pack_mm
        return lambda x: multiply(x, packed, weight.group_size, parameters)[:, :n].contiguous()


def _refuse(reason: str) -> None:
    if reason:
        raise NotImplementedError(reason)


def _scales_and_zeros(weight: TorchWeight) -> torch.Tensor:
    """bf16 (G, N, 2): the scale, and -z * s rounded to bf16."""
    zero = torch.zeros_like(weight.scale)
    if weight.zero_point is not None:
        zero = (-weight.zero_point.float() * weight.scale.float()).to(weight.scale.dtype)
    return torch.stack([weight.scale, zero], dim=-1).transpose(0, 1).contiguous()


# ---- the products


def _int8pack(weight: TorchWeight) -> Linear:
    codes, scale = weight.centred.to(torch.int8), weight.scale[:, 0].contiguous()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scale)


def _int_mm(weight: TorchWeight, args: Mapping[str, Any], dtype: torch.dtype) -> Linear:
    codes, scale = weight.centred.to(torch.int8).t(), weight.scale[:, 0].float()
    bias = 0.0 if weight.bias is None else weight.bias.float()

    def linear(x: torch.Tensor) -> torch.Tensor:
        own, per_token = quantized(x, args)
        return (torch._int_mm(own, codes).float() * per_token * scale + bias).to(dtype)

    return linear


def _scaled_mm(weight: TorchWeight, args: Mapping[str, Any], dtype: torch.dtype) -> Linear:
    codes = weight.centred.to(torch.float8_e4m3fn).t()
    scale, bias = weight.scale[:, 0].float()[None].contiguous(), weight.bias

    def linear(x: torch.Tensor) -> torch.Tensor:
        own, per_token = quantized(x, args)
        return torch._scaled_mm(own, codes, scale_a=per_token, scale_b=scale, bias=bias, out_dtype=dtype)

    return linear


def _grouped_mm(experts: Sequence[TorchWeight], fmt: Format) -> Product:
    dtype = _DTYPES[fmt.dtype]
    matrices = torch.stack([expert.matrix(dtype) for expert in experts]).transpose(-2, -1)
    return lambda x, ends: torch._grouped_mm(x, matrices, offs=ends)


def _scaled_grouped_mm(experts: Sequence[TorchWeight], fmt: Format) -> Product:
    codes = torch.stack([e.centred for e in experts]).to(torch.float8_e4m3fn).transpose(-2, -1)
    scale = torch.stack([e.scale[:, 0].float() for e in experts])
    args, dtype = fmt.args or {}, _DTYPES[fmt.dtype]

    def multiply(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        own, per_token = quantized(x, args)
        found: torch.Tensor = torch._scaled_grouped_mm(
            own, codes, per_token[:, 0].contiguous(), scale, offs=ends, out_dtype=dtype
        )
        return found

    return multiply


def _sorted(experts: int, multiply: Product, bias: torch.Tensor | None) -> Projection:
    """A projection by one product of rows sorted by expert. multiply: x (S, K), ends int32 (E) of the experts' rows.

    This reads nothing back from the device: slots of no expert go to the first one, and their answers are not used.
    """

    def project(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        held, order = torch.sort(places.flatten().clamp(min=0), stable=True)
        behind = torch.arange(1, experts + 1, dtype=held.dtype, device=x.device)
        ends = torch.searchsorted(held, behind).to(torch.int32)
        found = multiply(x[order // places.shape[1]], ends)
        if bias is not None:
            found = found + bias[held]
        outputs = torch.empty_like(found)
        outputs[order] = found
        return outputs.reshape(*places.shape, found.shape[1])

    return project


def backend() -> TorchNativeBackend:
    """On a CUDA device that has grouped products. Raises EnvironmentMissing where there is none."""
    require("torch", "torch", capability=(9, 0))
    return TorchNativeBackend("torch_native", "cuda")


def cpu_backend() -> TorchNativeBackend:
    return TorchNativeBackend("torch_native_cpu", "cpu")
