"""Activation quantization: int8, int4 and fp8 (e4m3), and what may legally differ (C60-C67).

A quantizer reads activations x (M, K) of 16 bits and gives codes (M, K), scales and, where the format is
asymmetric, zero points; (code - zero point) * scale is what the product is taken of. Two conventions exist and
a backend declares its own: `kernel` (float32 arithmetic, scale = amax / 127, as vLLM's and Humming's kernels)
and `compressed-tensors` (scale = amax / 127.5 in the dtype of x). Inside a convention the order
of the float32 operations is open; each order is a `Quantizer`, and they differ in codes only where
x / scale lies within `CODE_SLACK` of a rounding boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from reference.errors import FormatError, TensorError
from reference.formats import ActivationFormat
from reference.rounding import E4M3, FLOAT_FORMATS, FloatFormat, float_format, round_to

Float64Array = npt.NDArray[np.float64]
Convention = Literal["kernel", "compressed-tensors"]

# Three float32 roundings (scale, its reciprocal, the product) of half an ulp each stay below 2^-22 relative;
# one more bit covers an inverse of the scale taken from amax.
CODE_SLACK = 2.0**-21
# vLLM's per-token fp8 kernel keeps the scale at or above this (C65).
FP8_TOKEN_FLOOR = 1 / (448.0 * 512.0)

_FP32 = FLOAT_FORMATS["fp32"]


@dataclass(frozen=True)
class QuantizedActivations:
    """codes: float64 (M, K), numbers of the code type. scale: float64, (M, 1) per token, (1, 1) per tensor,
    (M, G) per group of group_size columns. zero_point: like scale, or None."""

    codes: Float64Array
    scale: Float64Array
    zero_point: Float64Array | None = None
    group_size: int = -1

    def dequantized(self) -> Float64Array:
        """(codes - zero_point) * scale as float64 (M, K), exact: a code has 8 bits, a scale 24."""
        codes = self.codes if self.zero_point is None else self.codes - self.spread(self.zero_point)
        product: Float64Array = codes * self.spread(self.scale)
        return product

    def stored(self, fmt: ActivationFormat) -> list[npt.NDArray[Any]]:
        """As a kernel stores them: codes int8 or e4m3, scales float32, and zero points int32 where there are any."""
        arrays = [
            self.codes.astype(E4M3.dtype if fmt.kind == "fp8" else np.int8),
            self.scale.astype(np.float32),
        ]
        return arrays if self.zero_point is None else [*arrays, self.zero_point.astype(np.int32)]

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Values shaped like scale, as (M, K)."""
        return np.broadcast_to(spread_groups(values, self.group_size, self.codes.shape[1]), self.codes.shape)


@dataclass(frozen=True)
class Quantizer:
    """One legal order of operations.

    levels: what amax is divided by: `code` the largest code (127, 7, 448), `half-range` half of the width
    of the range (127.5, 7.5, 448). arithmetic: the format of every intermediate result. scale_by: `divide`
    amax / Q, `reciprocal` amax * (1 / Q). code_by: `divide` x / s, `reciprocal` x * (1 / s), `inverse`
    x * (Q / amax), or in an asymmetric format the zero point by division and the codes by reciprocal.
    floor: the least scale. zero_scale: the scale of a row of zeros.
    """

    levels: Literal["code", "half-range"] = "code"
    arithmetic: FloatFormat = _FP32
    quotient: FloatFormat = _FP32
    scale_by: Literal["divide", "reciprocal"] = "divide"
    code_by: Literal["divide", "reciprocal", "inverse"] = "divide"
    floor: float = 0.0
    zero_scale: float = 0.0

    @property
    def name(self) -> str:
        parts = {"divide": "amax / Q", "reciprocal": "amax * (1/Q)"}[self.scale_by]
        codes = {"divide": "x / s", "reciprocal": "x * (1/s)", "inverse": "x * (Q/amax)"}[self.code_by]
        floor = ", floored scale" if self.floor else ""
        return f"{parts} in {self.arithmetic.name}, {codes} in {self.quotient.name}{floor}"


def code_range(fmt: ActivationFormat) -> tuple[float, float]:
    """Lowest and highest code: -128..127, -8..7, -448..448 (C61). Raises FormatError for 16-bit activations."""
    if fmt.kind == "a16":
        raise FormatError("activation format a16: 16-bit activations have no codes")
    return {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0), "fp8": (-448.0, 448.0)}[fmt.kind]


def quantizers(fmt: ActivationFormat, convention: Convention, dtype: FloatFormat) -> Iterator[Quantizer]:
    """Every legal order of operations of a convention, the plainest first (C62, C63)."""
    if convention == "compressed-tensors":
        # Its CPU path divides in the dtype of x, its CUDA path in float32, as both do by a float32 scale.
        for quotient in (dtype, _FP32):
            yield Quantizer("half-range", dtype, quotient, zero_scale=dtype.eps)
        if fmt.kind == "int8" and fmt.symmetric:  # torchao's Int8Tensor
            yield Quantizer("half-range", dtype, _FP32, code_by="reciprocal", zero_scale=dtype.eps)
        return
    if convention != "kernel":
        raise FormatError(f"quantizer: {convention!r} is neither 'kernel' nor 'compressed-tensors'")
    floors = (0.0, FP8_TOKEN_FLOOR) if fmt.kind == "fp8" and fmt.strategy == "token" else (0.0,)
    for floor in floors:
        if not fmt.dynamic:
            yield from (Quantizer(code_by=by) for by in ("divide", "reciprocal"))
            continue
        for scale_by in ("divide", "reciprocal"):
            for code_by in ("divide", "reciprocal", "inverse"):
                yield Quantizer(scale_by=scale_by, code_by=code_by, floor=floor)


def quantize(
    x: npt.NDArray[Any], fmt: ActivationFormat, how: Quantizer, input_scale: float | None = None
) -> QuantizedActivations:
    """Codes, scales and zero points of x (M, K) by one order of operations.

    input_scale: the scale of a static format. Raises TensorError for a shape that groups do not divide, a
    static format without its scale, and a scale that is not positive and finite.
    """
    values = x.astype(np.float64)
    if values.ndim != 2:
        raise TensorError(f"x: expected a matrix [M, K], found shape {list(x.shape)}")
    if not fmt.symmetric:
        return _quantize_asymmetric(values, fmt, how)
    largest = amax(values, fmt)
    scale = scale_of(largest, fmt, how, input_scale)
    scales, largests = (spread_groups(v, fmt.group_size, values.shape[1]) for v in (scale, largest))
    return QuantizedActivations(codes_of(values, scales, largests, fmt, how), scale, None, fmt.group_size)


def legal_quantizations(
    x: npt.NDArray[Any], fmt: ActivationFormat, convention: Convention, input_scale: float | None = None
) -> dict[str, QuantizedActivations]:
    """What each legal order of operations gives, by its name; equal results once (C63)."""
    found: dict[str, QuantizedActivations] = {}
    for how in quantizers(fmt, convention, float_format(x.dtype)):
        candidate = quantize(x, fmt, how, input_scale)
        if not any(_same(candidate, other) for other in found.values()):
            found[how.name] = candidate
    return found


def legal_codes(
    x: npt.NDArray[Any], fmt: ActivationFormat, scale: Float64Array, zero_point: Float64Array | None = None
) -> tuple[Float64Array, Float64Array]:
    """Lowest and highest code that a legal order of operations can give x (M, K) under a given scale (C63).

    They differ only where x / scale is within CODE_SLACK, relative, of a boundary between two codes.
    """
    k = x.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = x.astype(np.float64) / spread_groups(scale, fmt.group_size, k)
    t = np.clip(np.nan_to_num(t, nan=0.0), -1e6, 1e6)  # far outside any range of codes
    offset = 0.0 if zero_point is None else spread_groups(zero_point, fmt.group_size, k)
    ends = [
        _to_code(np.clip(t + side * CODE_SLACK * np.abs(t) + offset, *code_range(fmt)), fmt)
        for side in (-1, 1)
    ]
    return ends[0], ends[1]


def open_tokens(
    x: npt.NDArray[Any],
    fmt: ActivationFormat,
    convention: Convention,
    plain: QuantizedActivations,
) -> npt.NDArray[np.bool_]:
    """The tokens (M) of x (M, K) that legal orders of operations may quantize differently (C63): a code near
    a boundary, or a scale that differs by more than its last bits. plain: what the first order gives."""
    if not fmt.symmetric or not fmt.dynamic:
        return np.ones(len(x), np.bool_)
    ways = list(quantizers(fmt, convention, float_format(x.dtype)))
    largest = amax(x.astype(np.float64), fmt)
    scales = [scale_of(largest, fmt, how) for how in {(w.scale_by, w.floor): w for w in ways}.values()]
    # Under a scale of 2^e that every order gives exactly, quotients are exact, ties included.
    settled = (largest == divisor(fmt, ways[0]) * plain.scale) & (np.frexp(plain.scale)[0] == 0.5) | (
        largest == 0
    )
    for scale in scales:
        settled &= (scale == plain.scale) | (largest == 0)
    if settled.all():
        return np.zeros(len(x), np.bool_)
    if convention == "compressed-tensors":  # quotients of 16 bits are further apart than the slack
        return np.broadcast_to(~settled.all(axis=1), (len(x),))
    low, high = legal_codes(x, fmt, plain.scale)
    apart = np.any([np.abs(scale - plain.scale) > 2.0**-22 * plain.scale for scale in scales], axis=0)
    free = ~settled.all(axis=1) & ((low != high).any(axis=1) | apart.any(axis=1))
    return np.broadcast_to(free, (len(x),))


# ---- the steps of a symmetric quantizer


def amax(values: Float64Array, fmt: ActivationFormat) -> Float64Array:
    """The largest magnitude: (M, 1) per token, (1, 1) per tensor, (M, G) per group. Exact in any dtype of x."""
    magnitude = np.abs(values)
    if fmt.strategy == "tensor":
        return np.array([[magnitude.max(initial=0.0)]])
    if fmt.strategy == "group":
        return np.asarray(split_groups(magnitude, fmt.group_size).max(axis=2, initial=0.0))
    return np.asarray(magnitude.max(axis=1, keepdims=True, initial=0.0))


def divisor(fmt: ActivationFormat, how: Quantizer) -> float:
    low, high = code_range(fmt)
    return high if how.levels == "code" else (high - low) / 2


def scale_of(
    largest: Float64Array, fmt: ActivationFormat, how: Quantizer, input_scale: float | None = None
) -> Float64Array:
    """The scale from the largest magnitude, shaped like it; a static format's given scale, (1, 1)."""
    if not fmt.dynamic:
        if input_scale is None or not (np.isfinite(input_scale) and input_scale > 0):
            raise TensorError(f"input_scale: {input_scale!r} is no positive scale; a static format needs one")
        return np.array([[float(input_scale)]])
    q = divisor(fmt, how)
    if how.scale_by == "divide":
        scale = round_to(largest / q, how.arithmetic)
    else:
        scale = round_to(largest * float(round_to(1 / q, how.arithmetic)), how.arithmetic)
    if how.floor:
        scale = np.maximum(scale, float(round_to(how.floor, how.arithmetic)))
    return np.where(scale == 0, how.zero_scale, scale)


def codes_of(
    values: Float64Array, scale: Float64Array, largest: Float64Array, fmt: ActivationFormat, how: Quantizer
) -> Float64Array:
    """Codes of values (M, K); scale and largest broadcast to it. Zeros have code zero under any scale."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if how.code_by == "divide":
            t = values / scale
        elif how.code_by == "reciprocal":
            t = values * round_to(1 / scale, how.quotient)
        else:
            inverse = round_to(divisor(fmt, how) / largest, how.quotient)
            t = values * (np.minimum(inverse, 1 / how.floor) if how.floor else inverse)
    t = round_to(np.where(values == 0, 0.0, t), how.quotient)
    return _to_code(np.clip(t, *code_range(fmt)), fmt)


def _to_code(t: Float64Array, fmt: ActivationFormat) -> Float64Array:
    """Ties to even, in integers or in e4m3 (C61)."""
    return round_to(t, E4M3) if fmt.kind == "fp8" else np.rint(t)


def _quantize_asymmetric(values: Float64Array, fmt: ActivationFormat, how: Quantizer) -> QuantizedActivations:
    """C66. `kernel`: the row's own least and greatest value; `compressed-tensors`: with zero among them."""
    if fmt.kind != "int8" or fmt.strategy != "token":
        raise FormatError(f"activation format {fmt.name}: only int8 per token is asymmetric")
    low, high = code_range(fmt)
    least = values.min(axis=1, keepdims=True)
    greatest = values.max(axis=1, keepdims=True)
    if how.levels == "half-range":
        least, greatest = np.minimum(least, 0.0), np.maximum(greatest, 0.0)

    def rounded(v: Float64Array, target: FloatFormat = how.arithmetic) -> Float64Array:
        return round_to(v, target)

    span = rounded(greatest - least)
    steps = high - low
    scale = (
        rounded(span / steps)
        if how.scale_by == "divide"
        else rounded(span * float(round_to(1 / steps, how.arithmetic)))
    )
    before = scale  # compressed-tensors takes the zero point before it replaces a scale of zero
    scale = np.where(scale == 0, how.zero_scale, scale)
    flat = scale == 0
    divided = np.where(flat, 1.0, scale)
    inverse = rounded(1 / divided)
    below = rounded(least * inverse) if how.code_by == "reciprocal" else rounded(least / divided)
    by_division = how.code_by == "divide"
    t = rounded(values / divided if by_division else values * inverse, how.quotient)
    if how.levels == "half-range":  # compressed-tensors adds the zero point before it rounds
        with np.errstate(divide="ignore", invalid="ignore"):
            below = np.where(least == 0, 0.0, rounded(least / before))
        zero_point = np.rint(np.clip(rounded(low - below), low, high))
        codes = np.rint(np.clip(rounded(t + zero_point, how.quotient), low, high))
    else:
        zero_point = np.rint(rounded(low - below))
        codes = np.clip(np.rint(t) + zero_point, low, high)
    codes = np.where(flat, np.clip(zero_point, low, high), codes)
    return QuantizedActivations(codes, scale, zero_point)


# ---- groups along K


def split_groups(values: Float64Array, group_size: int) -> Float64Array:
    """(M, K) as (M, G, group_size). Raises TensorError where the groups do not divide K."""
    m, k = values.shape
    if k % group_size:
        raise TensorError(f"x: groups of {group_size} do not divide K={k}")
    return values.reshape(m, k // group_size, group_size)


def spread_groups(values: npt.NDArray[Any], group_size: int, k: int) -> npt.NDArray[Any]:
    """One value a group, (M, G), as one a column, (M, K); what is per token or per tensor stays as it is."""
    return (
        np.repeat(values, group_size, axis=1)
        if group_size > 0 and values.shape[1] * group_size == k
        else values
    )


def _same(a: QuantizedActivations, b: QuantizedActivations) -> bool:
    if (
        a.zero_point is not None
        and b.zero_point is not None
        and not np.array_equal(a.zero_point, b.zero_point)
    ):
        return False
    return np.array_equal(a.scale, b.scale) and np.array_equal(a.codes, b.codes)
