"""Activation quantizers in plain torch, of the convention of kernels: scale = amax / Q in float32 (C61-C67).

What a loader does for a library that multiplies codes and does not make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

E4M3_MAX = 448.0


def quantized(
    x: torch.Tensor, args: Mapping[str, Any], input_scale: float | None = None
) -> list[torch.Tensor]:
    """Codes (M, K), int8 or float8_e4m3fn, scales float32 and, where the format is asymmetric, zero points int32.

    x: (M, K) in 16 bits. args: the QuantizationArgs of the activations. input_scale: of a static format. Scales and
    zero points are (M, 1) per token, (1, 1) per tensor, (M, K / group_size) per group.
    """
    values = x.float()
    if not args["symmetric"]:
        return _asymmetric(values)
    if input_scale is not None:
        rows, per = values, (1, 1)
        scale = torch.full((1, 1), input_scale, device=x.device)
    else:
        rows, per = _rows(values, args)
        scale = rows.abs().amax(dim=1, keepdim=True) / largest_code(args)
    quotients = torch.where(scale > 0, rows / scale, 0.0)  # a row of zeros has codes of zero
    return [_codes(quotients, args).reshape(x.shape), scale.reshape(per)]


def dequantized(x: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    """float64 (M, K): the numbers that the codes of a symmetric format per token stand for, exact."""
    codes, scale = quantized(x, args)
    return codes.double() * scale.double()


def largest_code(args: Mapping[str, Any]) -> float:
    return E4M3_MAX if args["type"] == "float" else float(2 ** (args["num_bits"] - 1) - 1)


def _rows(values: torch.Tensor, args: Mapping[str, Any]) -> tuple[torch.Tensor, tuple[int, int]]:
    """What has one scale, a row each, and the shape that the scales go by."""
    m, k = values.shape
    if args["strategy"] == "group":
        groups = k // args["group_size"]
        return values.reshape(m * groups, args["group_size"]), (m, groups)
    return (values, (m, 1)) if args["strategy"] == "token" else (values.reshape(1, m * k), (1, 1))


def _codes(quotients: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    largest = largest_code(args)
    if args["type"] == "float":
        return quotients.clamp(-largest, largest).to(torch.float8_e4m3fn)
    return quotients.round().clamp(-largest - 1, largest).to(torch.int8)  # round: ties to even


def _asymmetric(values: torch.Tensor) -> list[torch.Tensor]:
    """int8 per token: the row's least value means -128, its greatest 127 (C66)."""
    least, greatest = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    scale = (greatest - least) / 255
    zero_point = (-128 - least / scale).round()
    codes = ((values / scale).round() + zero_point).clamp(-128, 127)
    return [codes.to(torch.int8), scale, zero_point.to(torch.int32)]
