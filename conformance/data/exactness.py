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
    """The tokens (M) for which every number any order of summation can form is a float32 (C42).

    All of it is a multiple of D, the product of the largest powers of two that divide the token's
    activations and all scales, or that which divides the bias if it is smaller, and stays below 2^bits D
    (24 for float32), also where a kernel sums u and subtracts the zero points later. One product a token
    needs no such proof: it is exact by itself.
    """
    if x.size == 0:
        return np.ones(len(x), np.bool_)
    offset = np.zeros(1) if bias is None else np.abs(bias.astype(np.float64))
    products = _granule(x) * _granule(columns.weight.scale.astype(np.float64).reshape(1, -1))
    unit = (products if bias is None else np.minimum(products, _granule(offset[None])))[:, None]
    largest = np.abs(x) @ ((columns.u + columns.u_z) * columns.scale).T + offset
    summed = np.all(largest <= 2.0**bits * unit, axis=1)
    if bias is None:
        summed = summed | (np.count_nonzero(x, axis=1) <= 1)
    return np.asarray(summed)


def _granule(values: Float64Array) -> Float64Array:
    """The largest power of two that divides every value of a row, 1 for a row of zeros."""
    mantissa, exponent = np.frexp(values)
    scaled = (mantissa * 2.0**53).astype(np.int64)
    with np.errstate(divide="ignore"):
        last = exponent - 53 + np.log2((scaled & -scaled).astype(np.float64))
    last = np.where(values == 0, np.inf, last).min(axis=1)
    return np.exp2(np.where(np.isinf(last), 0.0, last))
