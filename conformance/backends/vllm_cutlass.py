"""CUTLASS in vLLM, on Hopper: int8 and fp8 weights times int8 and fp8 activations, and 4 bits times fp8, dense.

Symmetric codes with one scale a row are the weights of `cutlass_scaled_mm` wherever the operand's type holds them:
int8 any of them, e4m3 those of up to 5 bits. `cutlass_w4a8_mm` multiplies 4 bits with a group scale of e4m3 into a
table of e4m3 products: right for scales that are, within a row, powers of two apart, which a loader cannot promise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from conformance.backend import Checkpoint, Support
from conformance.backends.torch_weights import TorchWeight, packed, weight_of
from conformance.backends.vllm_ops import (
    DTYPES,
    Layer,
    Operators,
    first_reason,
    launched,
    load,
    padded,
    quantized_fp8,
    quantized_int8,
)
from conformance.cases import EXACT_RECIPES, Case
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]

# e4m3 has 4 significant bits: whole numbers to 16.
_E4M3_BITS = 5
# vLLM pads fp8 operands to this, and takes a kernel of Triton for int8 ones that it does not divide.
_ALIGNED = 16
# The largest group scale of a row in e4m3: times codes of -8..7 it is at most 256, below the largest number, 448.
_LARGEST_SCALE = 32.0
_INEXACT = (
    "cutlass_w4a8_mm rounds group scales and their products with codes to e4m3: only powers of two are exact"
)


class VllmCutlass(Operators):
    name = "vllm_cutlass"
    kernels = "cutlass_3x_gemm|MixedInput"
    # Codes meet codes; scales and bias are applied in float32. fp8 products are summed without promotion.
    contract = Contract(weights="exact", integers="int32", accumulator="e8m13")

    def supports(self, case: Case) -> Support:
        if (
            case.activation.kind == "fp8"
            and case.weight.strategy == "group"
            and case.recipe not in EXACT_RECIPES
        ):
            return Support.no(_INEXACT)
        return super().supports(case)

    def declined(self, layer: Layer) -> str:
        bits, grouped = layer.weight.bits, layer.group_size > 0
        fp8 = layer.activation == "a-fp8"
        return first_reason(
            (
                layer.activation not in ("a-int8", "a-fp8"),
                f"CUTLASS takes int8 and fp8 activations, not {layer.activation}",
            ),
            (not layer.weight.symmetric, "CUTLASS takes no zero points of weights"),
            (layer.act_order, "CUTLASS has no group activation ordering"),
            (
                grouped and not (fp8 and bits == 4 and layer.group_size == 128),
                "groups: of 128, 4 bits times fp8 only",
            ),
            (grouped and layer.dtype != "bf16", f"cutlass_w4a8_mm writes bf16, not {layer.dtype}"),
            (grouped and not layer.divides(128, 128), "cutlass_w4a8_mm needs N and K to be multiples of 128"),
            (grouped and layer.bias, "cutlass_w4a8_mm takes no bias; vLLM adds it to the rounded output"),
            (fp8 and bits > _E4M3_BITS, f"codes of {bits} bits are no e4m3 numbers: they would be rounded"),
            (
                not fp8 and not layer.divides(_ALIGNED, _ALIGNED),
                "cutlass_scaled_mm needs N and K to be multiples of 16",
            ),
        )

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        layer = self.refuse(checkpoint)
        weight, dtype = weight_of(checkpoint), DTYPES[checkpoint.dtype]
        if layer.group_size > 0:
            return _w4a8(weight)
        return _fp8(weight, dtype) if layer.activation == "a-fp8" else _int8(weight, dtype)


def _int8(weight: TorchWeight, dtype: torch.dtype) -> Linear:
    codes, scale = weight.codes, weight.scale.float().contiguous()

    def linear(x: torch.Tensor) -> torch.Tensor:
        a, a_scale = quantized_int8(x)
        y = torch.empty((len(x), len(codes)), dtype=dtype, device=x.device)
        torch.ops._C.cutlass_scaled_mm(y, a, codes.T, a_scale, scale, weight.bias)
        return launched(y, x.device)

    return linear


def _fp8(weight: TorchWeight, dtype: torch.dtype) -> Linear:
    n, k = weight.codes.shape
    wide, deep = n + -n % _ALIGNED, k + -k % _ALIGNED
    codes = padded(weight.codes, wide, deep).to(torch.float8_e4m3fn)
    scale = torch.nn.functional.pad(weight.scale.float().reshape(-1), (0, wide - n), value=1.0)
    bias = None if weight.bias is None else torch.nn.functional.pad(weight.bias, (0, wide - n))

    def linear(x: torch.Tensor) -> torch.Tensor:
        a, a_scale = quantized_fp8(padded(x, len(x), deep) if deep > k else x)
        y = torch.empty((len(x), wide), dtype=dtype, device=x.device)
        torch.ops._C.cutlass_scaled_mm(y, a, codes.T, a_scale, scale, bias)
        return launched(y[:, :n].contiguous(), x.device)

    return linear


def _w4a8(weight: TorchWeight) -> Linear:
    """Raises NotImplementedError where scales cannot be split into a number a row and powers of two."""
    largest = weight.scale.float().amax(dim=1, keepdim=True)
    by_row = torch.where(largest > 0, largest / _LARGEST_SCALE, 1.0)
    by_group = weight.scale.float() / by_row
    powers = torch.frexp(by_group)[0]
    # Below 2^-9 a code of one would be below the least e4m3 number.
    if not ((by_group == 0) | ((powers == 0.5) & (by_group >= 2.0**-9))).all():
        raise NotImplementedError(_INEXACT)
    group_scale = torch.ops._C.cutlass_pack_scale_fp8(by_group.T.contiguous().to(torch.float8_e4m3fn))
    signed = packed((weight.codes & 15).T, 4, 0).T.contiguous().T
    words = torch.ops._C.cutlass_encode_and_reorder_int4b(signed)

    def linear(x: torch.Tensor) -> torch.Tensor:
        a, a_scale = quantized_fp8(x)
        y = torch.ops._C.cutlass_w4a8_mm(
            a, words, group_scale, weight.group_size, by_row, a_scale, None, None
        )
        return launched(y, x.device)

    return linear


def backend() -> VllmCutlass:
    needed = ("_C.cutlass_scaled_mm", "_C.cutlass_w4a8_mm", "_C.dynamic_scaled_int8_quant")
    return VllmCutlass(load(needed, (9, 0), 9))
