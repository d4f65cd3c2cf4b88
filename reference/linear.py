"""The quantized linear: y = quantize(x) . dequant(W)^T + bias (C40-C43, C50-C54, C60).

`linear` gives the right answer with its bound; `hypotheses` gives the centres of any semantics, right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference import bounds
from reference.activations import (
    QuantizedActivations,
    Quantizer,
    legal_codes,
    open_tokens,
    quantizers,
)
from reference.bounds import Contract, Expected, Hypothesis, Magnitudes
from reference.errors import TensorError
from reference.formats import ActivationFormat
from reference.rounding import FloatFormat, float_format, round_to
from reference.semantics import RIGHT, Columns, Operands, Semantics, columns_of, reload
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Quantized = QuantizedActivations | Float64Array

A16 = ActivationFormat()


def linear(
    x: Array | Sequence[Array],
    weight: QuantizedWeight,
    bias: Array | None,
    output: FloatFormat,
    contract: Contract,
    activation: ActivationFormat = A16,
    exact: bool | npt.NDArray[np.bool_] = False,
    input_scale: float | None = None,
) -> Expected:
    """The expected output of a quantized linear, in float64, with its bound.

    x: (M, K) in 16 bits, or several such, one a call; the outputs stand one below the other. bias: (N) or
    None. output: the format of y (M, N). contract: the arithmetic the backend declares; it chooses the
    hypotheses and the radius. activation: how x is quantized. exact: the rows (M), or all, whose every
    partial sum is exact in float32 (the caller has proved it), so that their radius is zero.
    input_scale: of a static activation format. Raises TensorError for shapes that do not fit.
    """
    calls = _calls(x, weight, bias)
    columns = columns_of(weight, output)
    quantized = quantize_calls(calls, activation, contract, input_scale, RIGHT)
    weights = matrices(columns, contract, RIGHT)
    first = next(iter(quantized.values()))
    values = np.concatenate([_plain(q) for q in first])
    of = bounds.magnitudes(
        values, columns.u, columns.u_z, columns.scale, weight.groups(), weight.format.offset
    )
    offset = None if bias is None else bias.astype(np.float64)
    plain = values @ RIGHT.matrix(columns).T
    ideal = plain if offset is None else plain + offset
    radius = radius_of_sums(of, plain, offset, output, contract, activation)
    inexact = ~np.broadcast_to(np.asarray(exact), (len(values),))[:, None]
    if contract.partial_sums == 1:  # nobody knows where 16-bit partial sums begin and end
        radius = radius * inexact
    flips = [] if activation.kind == "a16" else _flips(calls, first, activation, contract)
    found = _hypotheses(calls, quantized, weights, columns, offset, contract, RIGHT, radius, flips)
    return Expected(ideal, found, output)


def hypotheses(
    expected: Expected,
    x: Array | Sequence[Array],
    weight: QuantizedWeight,
    bias: Array | None,
    contract: Contract,
    activation: ActivationFormat,
    semantics: Semantics,
    input_scale: float | None = None,
) -> Expected:
    """What other semantics compute of the same call, under the same contract and the radius of the right answer."""
    calls = _calls(x, weight, bias)
    columns = semantics.columns(reload(weight, semantics), expected.output)
    offset = None if bias is None else bias.astype(np.float64)
    quantized = quantize_calls(calls, activation, contract, input_scale, semantics)
    weights = matrices(columns, contract, semantics)
    radius = expected.radius
    if contract.epilogue != "once" and columns.weight.format.strategy != "group":
        radius = radius * _channel_scale(columns_of(weight, expected.output))
    found = _hypotheses(calls, quantized, weights, columns, offset, contract, semantics, radius, [])
    return Expected(next(iter(found.values())).centre, found, expected.output)


def _calls(x: Array | Sequence[Array], weight: QuantizedWeight, bias: Array | None) -> list[Array]:
    calls = [x] if isinstance(x, np.ndarray) else list(x)
    for batch in calls:
        if batch.ndim != 2 or batch.shape[1] != weight.k:
            raise TensorError(f"x: expected shape [M, {weight.k}], found {list(batch.shape)}")
    if bias is not None and bias.shape != (weight.n,):
        raise TensorError(f"bias: expected shape [{weight.n}], found {list(bias.shape)}")
    return calls


# ---- what a contract leaves open


def matrices(columns: Columns, contract: Contract, semantics: Semantics) -> dict[str, Float64Array]:
    """The weight in each way that the contract allows, by name; equal matrices once."""
    output = columns.output
    if contract.zero_point == "scaled":
        return _late_zero_points(columns)
    exact = semantics.matrix(columns)
    stored = f"weights rounded to {output.name}"
    if contract.weights == "exact":
        return {"exact weights": exact}
    rounded = semantics.store(exact, output)
    if contract.weights == "rounded":
        return {stored: rounded}
    return (
        {"exact weights": exact}
        if np.array_equal(exact, rounded)
        else {"exact weights": exact, stored: rounded}
    )


def _late_zero_points(columns: Columns) -> dict[str, Float64Array]:
    """q * s - z * s with z * s rounded to 16 bits, for stored and for signed codes, the first product rounded
    or fused (C51)."""
    found = {}
    offset = columns.weight.format.offset
    for form, shift in (("stored", 0), ("signed", offset)):
        late = round_to((columns.u_z - shift) * columns.scale, columns.output)
        early = (columns.u - shift) * columns.scale
        found[f"{form} zero points scaled, fused"] = round_to(early - late, columns.output)
        found[f"{form} zero points scaled"] = round_to(round_to(early, columns.output) - late, columns.output)
    return found


def quantize_calls(
    calls: list[Array],
    fmt: ActivationFormat,
    contract: Contract,
    input_scale: float | None,
    semantics: Semantics,
) -> dict[str, list[Quantized]]:
    """The activations in each legal order of a quantizer's operations; those with equal codes once, for
    the last bit of a float32 scale is inside the radius."""
    if fmt.kind == "a16":
        if semantics.quantize is RIGHT.quantize:
            return {"": [x.astype(np.float64) for x in calls]}
        return {"": semantics.quantize(calls, fmt, Quantizer(), input_scale)}
    ways = list(quantizers(fmt, contract.quantizer, float_format(calls[0].dtype)))
    plain = semantics.quantize(calls, fmt, ways[0], input_scale)
    found = {ways[0].name: plain}
    if semantics is not RIGHT:
        return found  # a fault need not be told from itself with a code flipped
    tokens = None
    if fmt.strategy == "token":
        tokens = [
            open_tokens(x, fmt, contract.quantizer, q)  # type: ignore[arg-type]
            for x, q in zip(calls, plain, strict=True)
        ]
        if not any(t.any() for t in tokens):
            return found
    for how in ways[1:]:
        candidate = (
            semantics.quantize(calls, fmt, how, input_scale)
            if tokens is None
            else _patched(calls, tokens, plain, fmt, how)
        )
        if not any(_same_codes(candidate, other) for other in found.values()):
            found[how.name] = candidate
    return found


def _patched(
    calls: list[Array],
    tokens: list[npt.NDArray[np.bool_]],
    plain: list[Quantized],
    fmt: ActivationFormat,
    how: Quantizer,
) -> list[Quantized]:
    """The plain result with the tokens that are open quantized in another order: each token is by itself."""
    found: list[Quantized] = []
    for x, chosen, before in zip(calls, tokens, plain, strict=True):
        assert isinstance(before, QuantizedActivations)
        if not chosen.any():
            found.append(before)
            continue
        (part,) = RIGHT.quantize([x[chosen]], fmt, how, None)
        assert isinstance(part, QuantizedActivations)
        codes, scale = before.codes.copy(), before.scale.copy()
        codes[chosen], scale[chosen] = part.codes, part.scale
        zero_point = None
        if before.zero_point is not None and part.zero_point is not None:
            zero_point = before.zero_point.copy()
            zero_point[chosen] = part.zero_point
        found.append(QuantizedActivations(codes, scale, zero_point, before.group_size))
    return found


def _same_codes(a: list[Quantized], b: list[Quantized]) -> bool:
    for one, other in zip(a, b, strict=True):
        if not isinstance(one, QuantizedActivations) or not isinstance(other, QuantizedActivations):
            return type(one) is type(other) and np.array_equal(one, other)  # type: ignore[arg-type]
        if one.scale.shape != other.scale.shape or not np.array_equal(one.codes, other.codes):
            return False
        if (np.abs(one.scale - other.scale) > 2.0**-22 * np.abs(one.scale)).any():
            return False
    return True


def _hypotheses(
    calls: list[Array],
    quantized: dict[str, list[Quantized]],
    matrices: dict[str, Float64Array],
    columns: Columns,
    bias: Float64Array | None,
    contract: Contract,
    semantics: Semantics,
    radius: Float64Array,
    flips: list[Flip],
) -> dict[str, Hypothesis]:
    output = columns.output
    found: dict[str, Hypothesis] = {}
    for i, (how, activations) in enumerate(quantized.items()):
        own = flips if i == 0 else []  # they are flips of the plainest order
        for form, matrix in matrices.items():
            total = _product(activations, matrix, columns, semantics)
            name = ", ".join(part for part in (form, how) if part)
            if contract.epilogue != "16-bit":
                if semantics.finish is RIGHT.finish:
                    centre = total if bias is None else total + bias
                    found[name] = Hypothesis(centre, radius, None, _added(own, matrix))
                else:
                    found[name] = Hypothesis(total, radius, _by_call(calls, semantics, bias, output))
            if contract.epilogue != "once":
                found |= _in_16_bits(name, activations, total, matrix, columns, bias, semantics, radius, own)
    return found


def _product(
    activations: list[Quantized], matrix: Float64Array, columns: Columns, semantics: Semantics
) -> Float64Array:
    return np.concatenate([semantics.product(Operands.of(a, matrix, columns)) for a in activations])


def _plain(activations: Quantized) -> Float64Array:
    return activations.dequantized() if isinstance(activations, QuantizedActivations) else activations


def _by_call(calls: list[Array], semantics: Semantics, bias: Float64Array | None, output: FloatFormat) -> Any:
    cuts = np.cumsum([len(x) for x in calls])[:-1]

    def finish(total: Float64Array) -> Float64Array:
        return np.concatenate([semantics.finish(part, bias, output) for part in np.split(total, cuts)])

    return finish


def _in_16_bits(
    name: str,
    activations: list[Quantized],
    total: Float64Array,
    matrix: Float64Array,
    columns: Columns,
    bias: Float64Array | None,
    semantics: Semantics,
    radius: Float64Array,
    flips: list[Flip],
) -> dict[str, Hypothesis]:
    """The sum rounded to 16 bits before the one scale of a row, with and without a fused multiplication and addition,
    or after the scales and before the bias (C50). What overflows there is not excused."""
    output = columns.output

    def half(values: Float64Array) -> Float64Array:
        rounded = round_to(values, output)
        return np.where(np.isinf(rounded), values, rounded)

    found: dict[str, Hypothesis] = {}
    channel = columns.weight.format.strategy != "group"
    if channel or columns.weight.scale.shape[1] == 1:
        scale = _channel_scale(columns)

        def fused(values: Float64Array) -> Float64Array:
            return round_to(half(values) * scale + (0.0 if bias is None else bias), output)

        def apart(values: Float64Array) -> Float64Array:
            return round_to(half(half(values) * scale) + bias, output)  # type: ignore[operator]

        unscaled = np.ones_like(columns.scale)
        codes = semantics.matrix(Columns(columns.u, columns.u_z, unscaled, columns.weight, output))
        sums = _product(activations, codes, columns, semantics)
        narrowed = radius / np.where(scale == 0, np.inf, np.abs(scale))
        added = _added(flips, codes)
        found[f"{name}, 16-bit epilogue"] = Hypothesis(sums, narrowed, fused, added)
        if bias is not None:
            found[f"{name}, 16-bit epilogue, bias apart"] = Hypothesis(sums, narrowed, apart, added)
    if not channel or bias is not None:  # a channel's without a bias is the plain rounding

        def after(values: Float64Array) -> Float64Array:
            return round_to(half(values) + (0.0 if bias is None else bias), output)

        scaled = f"{name}, 16-bit epilogue after the scales"
        found[scaled] = Hypothesis(total, radius, after, _added(flips, matrix))
    return found


def _channel_scale(columns: Columns) -> Float64Array:
    """The one scale of each row of the weight, (N); 1 for a weight without columns."""
    return columns.scale[:, 0] if columns.scale.shape[1] else np.ones(len(columns.scale))


# ---- what is bounded


def radius_of_sums(
    of: Magnitudes,
    plain: Float64Array,
    bias: Float64Array | None,
    output: FloatFormat,
    contract: Contract,
    activation: ActivationFormat,
) -> Float64Array:
    """What an accumulation may be off by under a contract, the bias included (C44, C52, C53). plain: the sums."""
    if activation.kind in ("int8", "int4") and contract.integers == "int32":
        radius = bounds.int32_radius(of)
    else:
        radius = bounds.float32_radius(of)
    if activation.kind == "fp8" and contract.accumulator != "fp32":
        radius = radius + bounds.e8m13_radius(of, 128 if contract.accumulator == "e8m13/128" else of.k)
    if activation.kind != "a16":  # the activation scale's own last bit, and its multiplication
        radius = radius + 2.0**-22 * np.abs(plain)
    size = 0.0 if bias is None else np.abs(bias)
    if contract.partial_sums > 1:
        radius = radius + bounds.partial_sums_radius(of, plain, size, output, contract.partial_sums)
    return np.asarray(radius + 2.0**-23 * size)


@dataclass(frozen=True)
class Flip:
    """One activation code that may legally be its neighbour: the token and column, and what that adds to x."""

    token: int
    column: int
    change: float


def _flips(
    calls: list[Array], first: list[Quantized], fmt: ActivationFormat, contract: Contract
) -> list[Flip]:
    """The codes within CODE_SLACK of a boundary, of tokens that legal orders may quantize differently (C63)."""
    found, start = [], 0
    for x, quantized in zip(calls, first, strict=True):
        assert isinstance(quantized, QuantizedActivations)
        low, high = legal_codes(x, fmt, quantized.scale, quantized.zero_point)
        free = open_tokens(x, fmt, contract.quantizer, quantized)[:, None]
        change = (low + high - 2 * quantized.codes) * quantized.spread(quantized.scale)
        places = np.argwhere(free & (low != high))
        found += [Flip(start + int(m), int(k), float(change[m, k])) for m, k in places]
        start += len(x)
    return found


def _added(flips: list[Flip], matrix: Float64Array) -> dict[int, Float64Array]:
    """What each flip adds to the sums of its token, (A, N) a token."""
    found: dict[int, list[Float64Array]] = {}
    for flip in flips:
        found.setdefault(flip.token, []).append(flip.change * matrix[:, flip.column])
    return {token: np.stack(rows) for token, rows in found.items()}
