"""The quantized linear: y = x . dequant(W)^T + bias (C40-C43)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reference.bounds import Contract, Expected, accumulation_radius
from reference.errors import TensorError
from reference.rounding import FloatFormat, round_to
from reference.weights import QuantizedWeight, dequantize_exact

Float64Array = npt.NDArray[np.float64]


def linear(
    x: npt.NDArray[Any],
    weight: QuantizedWeight,
    bias: npt.NDArray[Any] | None,
    output: FloatFormat,
    contract: Contract,
    exact: bool = False,
) -> Expected:
    """The expected output of a weight-only quantized linear, in float64, with its bound.

    x: (M, K) of any float dtype, used as it is. bias: (N) or None. output: the format of y (M, N).
    contract: the arithmetic the backend declares; it chooses the hypotheses and the radius.
    exact: the data make every partial sum exact in float32 (the caller has proved it), so the
    radius is zero. Raises TensorError for shapes that do not fit.
    """
    if x.ndim != 2 or x.shape[1] != weight.k:
        raise TensorError(f"x: expected shape [M, {weight.k}], found {list(x.shape)}")
    if bias is not None and bias.shape != (weight.n,):
        raise TensorError(f"bias: expected shape [{weight.n}], found {list(bias.shape)}")
    activations = x.astype(np.float64)
    matrix = dequantize_exact(weight)
    offset = 0.0 if bias is None else bias.astype(np.float64)
    candidates = {"exact weights": matrix}
    if contract.weights != "exact":
        rounded = round_to(matrix, output)
        if contract.weights == "rounded":
            candidates = {f"weights rounded to {output.name}": rounded}
        elif not np.array_equal(rounded, matrix):
            candidates[f"weights rounded to {output.name}"] = rounded
    hypotheses = {name: activations @ w.T + offset for name, w in candidates.items()}
    if exact:
        return Expected(hypotheses, np.zeros((x.shape[0], weight.n)), output)
    codes, zero_points, scales = unsigned_columns(weight)
    radius = accumulation_radius(activations, codes, zero_points, scales, weight.groups())
    return Expected(hypotheses, radius + 2.0**-23 * np.abs(offset), output)


def unsigned_columns(weight: QuantizedWeight) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Stored codes, stored zero points and scales of every column, each float64 (N, K)."""
    groups = weight.groups()
    shape = weight.codes.shape

    def spread(values: npt.NDArray[Any]) -> Float64Array:
        per_row = np.broadcast_to(values, (shape[0], values.shape[-1])).astype(np.float64)
        return (
            np.ascontiguousarray(np.broadcast_to(per_row, shape))
            if per_row.shape[1] == 1
            else per_row[:, groups]
        )

    stored = 0 if weight.zero_point is None else weight.zero_point.astype(np.float64)
    zeros = np.zeros(weight.scale.shape) + stored + weight.format.offset
    return weight.codes.astype(np.float64) + weight.format.offset, spread(zeros), spread(weight.scale)
