"""The proof that a probe is exact: which tokens leave no float32 path anything to round (C42)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reference.semantics import Columns

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def exact_in_float32(x: Float64Array, columns: Columns, bias: Array | None, bits: int = 24) -> Mask:
    """The tokens (M) whose every output is exact: see exact_outputs."""
    return np.asarray(exact_outputs(x, columns, bias, bits).all(axis=1))


def exact_outputs(x: Float64Array, columns: Columns, bias: Array | None, bits: int = 24) -> Mask:
    """The outputs (M, N) for which every number any order of summation can form is a float32 (C42).

    All of it is a multiple of D, the product of the largest powers of two that divide the token's
    activations and the row's scales, or that which divides the bias if it is smaller, and stays below 2^bits D
    (24 for float32), also where a kernel sums u and subtracts the zero points later. One product a token
    needs no such proof: it is exact by itself.
    """
    m, n = len(x), len(columns.scale)
    if x.size == 0 or n == 0:
        return np.ones((m, n), np.bool_)
    scale = columns.weight.scale.astype(np.float64)
    rows = granule(scale if scale.ndim == 2 else scale[None])
    offset = np.zeros(n) if bias is None else np.abs(bias.astype(np.float64))
    unit = granule(x)[:, None] * rows
    if bias is not None:
        unit = np.where(offset == 0, unit, np.minimum(unit, granule(offset[:, None])))
    largest = np.abs(x) @ ((columns.u + columns.u_z) * columns.scale).T + offset
    summed = largest <= 2.0**bits * unit
    if bias is None:
        summed = summed | (np.count_nonzero(x, axis=1) <= 1)[:, None]
    return np.asarray(summed)


def granule(values: Float64Array) -> Float64Array:
    """The largest power of two that divides every value of a row, 1 for a row of zeros."""
    mantissa, exponent = np.frexp(values)
    scaled = (mantissa * 2.0**53).astype(np.int64)
    with np.errstate(divide="ignore"):
        last = exponent - 53 + np.log2((scaled & -scaled).astype(np.float64))
    last = np.where(values == 0, np.inf, last).min(axis=1)
    return np.exp2(np.where(np.isinf(last), 0.0, last))
