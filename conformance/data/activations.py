"""Activations: of linear cases, and of the quantizer's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import GOLDEN, Case
from conformance.data.seeds import generator
from reference.activations import code_range, legal_codes, open_tokens, quantize, quantizers
from reference.formats import ActivationFormat
from reference.rounding import E4M3, float_format, half_ulps, round_to
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

# What the largest magnitude of a token is divided by in each convention, for the two batches of a case.
DIVISORS = {"int8": (127.0, 127.5), "int4": (7.0, 7.5), "fp8": (448.0, 448.0)}


def linear_activations(
    case: Case, weight: QuantizedWeight, rng: np.random.Generator, anchor: int | None
) -> list[Float64Array]:
    """The two batches of a linear case, numbers of the case's dtype. anchor: the column of zero weights."""
    target = float_format(case.dtype)
    if case.recipe == "empty":
        return [np.zeros((case.m, case.k))] * 2
    if case.recipe == GOLDEN:
        return [_settled(case, rng, number) for number in (0, 1)]
    if case.recipe in ("random", "trained", "zero-scale"):
        return [round_to(x, target) for x in _drawn(case, rng)]
    codes = _exact_values(case, weight, rng, anchor)
    if case.activation.kind == "a16":
        if case.recipe == "magnitudes":
            codes = [c * e for c, e in zip(codes, _token_powers(case, rng), strict=True)]
        return codes
    powers = _token_powers(case, rng)
    batches = [beside_codes(c, case.activation, rng) for c in codes]
    if case.recipe == "integers":
        batches = [add_ties(b, case.activation, rng, 0.25) for b in batches]
    for batch, divisor in zip(batches, DIVISORS[case.activation.kind], strict=True):
        if anchor is not None:
            batch[:, anchor] = divisor * rng.choice([-1.0, 1.0], case.m)
        if case.m >= 4 and case.recipe == "integers":
            batch[case.m // 2] = 0  # a token of zeros
    return [round_to(b * p, target) for b, p in zip(batches, powers, strict=True)]


def _drawn(case: Case, rng: np.random.Generator) -> Float64Array:
    drawn = rng.normal(0, 1, (2, case.m, case.k))
    if case.recipe == "trained":
        drawn[:, :, rng.integers(0, case.k, max(1, case.k // 64))] *= 30
    if case.activation.kind != "a16":  # tokens differ in size, and so do the batches
        token, batch = np.arange(case.m)[:, None], np.arange(2)[:, None, None]
        drawn *= np.exp2((token + 3 * batch) % 4 - 1.0)
    return drawn


def _settled(case: Case, rng: np.random.Generator, number: int) -> Float64Array:
    """Tokens of different sizes, drawn until no code of theirs is within reach of a boundary, in either convention:
    what is right is then a few whole outputs, which vectors can list."""
    target, fmt = float_format(case.dtype), case.activation
    x = np.zeros((case.m, case.k))
    left = np.arange(case.m)
    for _ in range(200):
        size = np.exp2((left[:, None] + 3 * number) % 4 - 1.0)
        x[left] = round_to(rng.normal(0, 1, (len(left), case.k)) * size, target)
        if fmt.kind == "a16":
            return x
        drawn = x[left].astype(target.dtype)
        plain = quantize(drawn, fmt, next(quantizers(fmt, "kernel", target)))
        near = open_tokens(drawn, fmt, "kernel", plain)
        stepped = quantize(drawn, fmt, next(quantizers(fmt, "compressed-tensors", target)))
        low, high = legal_codes(drawn, fmt, stepped.scale)
        left = left[near | (low != high).any(axis=1)]
        if len(left) == 0:
            return x
    raise AssertionError(f"{case.id}: tokens with open codes after 200 draws")


def _exact_values(
    case: Case, weight: QuantizedWeight, rng: np.random.Generator, anchor: int | None
) -> list[Float64Array]:
    """Integers (M, K), which are the codes where activations are quantized."""
    m, k = case.m, case.k
    if case.recipe in ("identity", "scales"):
        values = (1.0, -2.0 if case.recipe == "identity" else -1.0)
        return [_one_hot(m, case, rng, anchor) * value for value in values]
    signs = rng.choice([-1.0, 1.0], (2, m, k))
    if case.recipe == "magnitudes":
        return [*signs]
    return [signs[0], signs[1] * rng.integers(1, _widest_integer(case, weight) + 1, (m, k))]


def _token_powers(case: Case, rng: np.random.Generator) -> list[Float64Array]:
    """A power of two for each token and batch, (M, 1) each; neighbours and batches never share one."""
    token = np.arange(case.m)[:, None] + rng.integers(4)
    if case.recipe != "magnitudes" and case.activation.kind == "fp8":
        # Floating-point codes look alike under scales 2^e apart, until they are too small: 2^13 and more.
        return [np.exp2(np.where(token % 2 == side, 3.0 + side, side - 10.0)) for side in (0, 1)]
    if case.recipe != "magnitudes":
        return [np.exp2(token % 4 - 4.0), np.exp2(token % 4.0)]
    if case.activation.kind == "fp8":  # scales below 2^-17 are legally floored (C65)
        low, high = -7, 7 if case.dtype == "fp16" else 40
    elif case.activation.kind == "a16":
        low, high = (-14, 10) if case.dtype == "fp16" else (-90, 90)
    else:
        low, high = (-14, 8) if case.dtype == "fp16" else (-20, 60)
    return [np.exp2(np.where(token % 2 == side, low + token % 3, high - token % 3)) for side in (0, 1)]


def beside_codes(codes: Float64Array, fmt: ActivationFormat, rng: np.random.Generator) -> Float64Array:
    """Values a quarter of a step off their codes: what does not quantize computes something else."""
    if fmt.kind == "fp8":
        codes = round_to(codes, E4M3)
        _, above = half_ulps(np.abs(codes), E4M3)
        return codes + np.sign(codes) * 0.75 * above
    side = rng.choice([-0.25, 0.25], codes.shape)
    return np.where(codes == 0, 0.0, codes + side)


def add_ties(
    batch: Float64Array, fmt: ActivationFormat, rng: np.random.Generator, share: float
) -> Float64Array:
    """Some of the values moved onto the middle between two codes: to the even one, all quantizers agree."""
    low, high = code_range(fmt)
    if fmt.kind == "fp8":
        base = round_to(np.abs(batch), E4M3)
        _, above = half_ulps(base, E4M3)
        tie = np.copysign(base + above, batch)
    else:
        tie = np.clip(np.floor(batch) + 0.5, low + 0.5, high - 0.5)
    chosen = (rng.random(batch.shape) < share) & (batch != 0)
    return np.where(chosen, tie, batch)


def _one_hot(m: int, case: Case, rng: np.random.Generator, anchor: int | None) -> Float64Array:
    """Tokens with a single 1: every column in turn when M >= K, else the edges of K and groups first, and
    never the anchor."""
    k = case.k
    if m >= k:
        columns = np.arange(m) % k
    else:
        size = case.weight.group_size if case.weight.strategy == "group" else k
        edges = rng.permutation(np.unique(np.clip([0, 1, k - 1, k - 2, size - 1, size, k // 2], 0, k - 1)))
        others = rng.permutation(np.setdiff1d(np.arange(k), edges))
        columns = np.concatenate([edges, others])
        columns = columns[columns != anchor][:m] if anchor is not None else columns[:m]
        columns = np.resize(columns, m)
    x = np.zeros((m, k))
    x[np.arange(m), columns] = 1.0
    return x


def _widest_integer(case: Case, weight: QuantizedWeight) -> int:
    """The largest integer activation that keeps every sum exact in float32 and inside float16."""
    levels = 2.0 ** (weight.format.bits + 1)
    scale_spread = 4.0
    widest = 2.0**23 / (case.k * levels * scale_spread)
    if case.dtype == "fp16":
        widest = min(widest, 60000 / (6 * np.sqrt(case.k) * levels))
        if case.activation.kind != "a16":
            widest /= 16  # the tokens' own powers of two
    largest = {"a16": 2.0 ** float_format(case.dtype).precision - 1, "int8": 60.0, "int4": 6.0, "fp8": 15.0}
    return int(np.clip(widest, 1, largest[case.activation.kind]))


# ---- the quantizer alone


@dataclass(frozen=True)
class QuantizationProblem:
    """Activations (M, K) to quantize, and the scale of a static format."""

    case: Case
    x: Array
    input_scale: float | None


@lru_cache(maxsize=4)
def quantization_problem(case: Case) -> QuantizationProblem:
    """The problem of an activation_quantization case: see its recipes in cases.py."""
    rng = generator(case.id)
    fmt, target = case.activation, float_format(case.dtype)
    _, high = code_range(fmt)
    shape = (case.m, case.k)
    token = np.arange(case.m)[:, None]
    input_scale = None if fmt.dynamic else 2.0**-3
    if case.recipe in ("codes", "ties"):
        values = _every_code(fmt, shape, rng)
        values = add_ties(values, fmt, rng, 0.5) if case.recipe == "ties" else beside_codes(values, fmt, rng)
        _set_largest(values, fmt, rng)
        values = values * (np.exp2(token % 5 - 3.0) if input_scale is None else input_scale)
    elif case.recipe == "saturation":  # far beyond the largest code, and just beyond
        values = (
            rng.normal(0, 1, shape)
            * high
            * np.array([1.0, 1.2, 40.0])[np.arange(case.k) % 3]
            * (input_scale or 1)
        )
    elif case.recipe == "zero-tokens":
        values = rng.normal(0, 1, shape)
        values[token[:, 0] % 2 == 0] = 0
    elif case.recipe == "magnitudes":
        span = (-14, 12) if case.dtype == "fp16" else (-30, 60)
        if fmt.kind == "fp8":
            span = (-7, 7) if case.dtype == "fp16" else (-7, 60)
        values = rng.normal(0, 1, shape) * np.exp2(np.where(token % 2 == 0, span[0], span[1] - token % 3))
    elif case.recipe == "one-sided":
        values = np.abs(rng.normal(0, 1, shape)) + 0.5
        values[token[:, 0] % 2 == 0] *= -1
    else:
        values = rng.normal(0, 1, shape) * np.exp2(token % 4 - 1.0)
        if case.recipe == "outliers":
            values[:, rng.integers(0, case.k, max(1, case.k // 64))] *= 30
    if not fmt.dynamic and case.recipe not in ("codes", "ties", "saturation"):
        input_scale = float(np.float32(np.abs(values).max(initial=1.0) / high))
    return QuantizationProblem(case, round_to(values, target).astype(target.dtype), input_scale)


def _every_code(fmt: ActivationFormat, shape: tuple[int, int], rng: np.random.Generator) -> Float64Array:
    """Numbers of the code type, all of them in turn, in a random order along K."""
    if fmt.kind == "fp8":
        grid = np.arange(1, 0x7F).astype(np.uint8).view(E4M3.dtype).astype(np.float64)
        grid = grid[grid >= 0.25]
    else:
        grid = np.arange(1, code_range(fmt)[1])
    found: Float64Array = np.resize(rng.permutation(grid), shape) * rng.choice([-1.0, 1.0], shape)
    return found


def _set_largest(values: Float64Array, fmt: ActivationFormat, rng: np.random.Generator) -> None:
    """The largest magnitude of each token or group on one of its columns: 127 and 127.5 steps in turn."""
    m, k = values.shape
    size = fmt.group_size if fmt.strategy == "group" else k
    for start in range(0, k, size):
        column = start + rng.integers(0, size, m)
        largest = np.array(DIVISORS[fmt.kind])[(np.arange(m) + start // size) % 2]
        values[np.arange(m), column] = largest * rng.choice([-1.0, 1.0], m)
