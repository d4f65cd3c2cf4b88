"""Codes, zero points and scales of packing, dequantize and linear cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import EXACT_RECIPES, Case
from conformance.data.seeds import generator
from reference.formats import WeightFormat
from reference.rounding import FloatFormat, float_format, round_to
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]


# ---- packing


def packing_codes(case: Case) -> npt.NDArray[np.int8]:
    """Signed codes (N, K), or (E, N, K) for a stack of experts; packed along case.dim of each matrix."""
    rng = generator(case.id)
    shape = (case.n, case.k) if not case.experts else (case.experts, case.n, case.k)
    low, high = case.weight.code_range
    if case.recipe == "ramp":
        codes = np.arange(np.prod(shape)).reshape(shape) % (high - low + 1) + low
    elif case.recipe == "onehot":  # one code of all ones among zeros: a bit that strays is seen
        codes = np.full(shape, low)
        rows, columns = np.arange(case.n), np.arange(case.k)
        hot = (rows[:, None] + columns[None, :]) % max(case.n, case.k) == 0
        codes[..., hot] = high
    elif case.recipe == "extremes":
        codes = np.where(np.indices(shape).sum(axis=0) % 2, low, high)
    else:
        codes = rng.integers(low, high + 1, shape)
    return codes.astype(np.int8)


def packing_axis(case: Case) -> int:
    return case.dim - 2


# ---- weights


def quantized_weight(case: Case, rng: np.random.Generator) -> QuantizedWeight:
    """The weight of a dequantize or linear case, its scales in the case's dtype."""
    fmt, n, k = case.weight, case.n, case.k
    low, high = fmt.code_range
    groups = fmt.groups(k)
    peaked = case.recipe == "trained"
    codes = _peaked(rng, (n, k), fmt) if peaked else rng.integers(low, high + 1, (n, k)).astype(np.int8)
    ends = rng.choice(n * k, size=min(2, n * k), replace=False)
    codes.flat[ends] = np.array([low, high], np.int8)[: len(ends)]
    index = None
    if case.act_order:
        index = rng.permutation(np.arange(k) // fmt.group_size).astype(np.int32)
    zero_point = None
    if not fmt.symmetric:
        zero_point = _peaked(rng, (n, groups), fmt) if peaked else zero_points(rng, n, groups, fmt)
    scale = _scales(case, rng, n, groups).astype(float_format(case.dtype).dtype)
    return QuantizedWeight(fmt, codes, scale, zero_point, index)


def without_column(weight: QuantizedWeight, column: int) -> QuantizedWeight:
    """The same weight with zeros in one column: its codes are the zero points."""
    codes = weight.codes.copy()
    if weight.zero_point is None:
        codes[:, column] = 0
    else:
        codes[:, column] = weight.zero_point[:, weight.groups()[column]]
    return replace(weight, codes=codes)


def _peaked(rng: np.random.Generator, shape: tuple[int, int], fmt: WeightFormat) -> npt.NDArray[np.int8]:
    """Near zero with heavy tails: Student's t with 3 degrees of freedom, a tenth of the width wide."""
    low, high = fmt.code_range
    drawn = rng.standard_t(3, shape) * (high - low) / 10
    return np.clip(np.rint(drawn), low, high).astype(np.int8)


def zero_points(rng: np.random.Generator, n: int, groups: int, fmt: WeightFormat) -> npt.NDArray[np.int8]:
    """Uniform, then moved so that neighbours along N and along the groups differ."""
    levels = 1 << fmt.bits
    step = max(1, levels // 3)
    rows, columns = np.arange(n)[:, None], np.arange(groups)[None, :]
    start = rng.integers(0, levels)
    jitter = rng.integers(0, max(1, step // 2), (n, groups)) if levels > 8 else 0
    unsigned = (start + rows * step + columns * (step + (levels > 4)) + jitter) % levels
    return (unsigned - fmt.offset).astype(np.int8)


def _scales(case: Case, rng: np.random.Generator, n: int, groups: int) -> Float64Array:
    rows, columns = np.arange(n)[:, None], np.arange(groups)[None, :]
    if case.recipe in EXACT_RECIPES:
        base = -8 if case.recipe == "magnitudes" else rng.choice([0, -3, -8])
        powers: Float64Array = np.exp2(base - (rows + 2 * columns + rng.integers(3)) % 3)
        return powers
    target = float_format(case.dtype)
    typical = 1 / (np.sqrt(max(case.k, 1)) * 0.29 * 2.0**case.weight.bits)
    octaves = 1.5 if case.recipe == "trained" else 1.0
    scales = np.exp2(rng.normal(0, octaves, (n, groups))) * typical
    scales = _odd(scales, target)
    if case.recipe == "zero-scale":
        scales[(rows + columns) % 3 == 0] = 0
    return scales


def _odd(values: Float64Array, target: FloatFormat) -> Float64Array:
    """Rounded to the format with the last mantissa bit set: a truncated scale is a different one."""
    rounded = round_to(values, target)
    last = np.int64(1) << np.int64(53 - target.precision)
    odd: Float64Array = (rounded.view(np.int64) | last).view(np.float64)
    return odd
