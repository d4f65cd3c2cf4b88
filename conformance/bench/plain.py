"""A plain computation of a layer of experts in float32: no bounds and no conventions, but of all different tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.bench.layers import ExpertsLayer, Pool
from conformance.cases import Case
from reference.activations import Convention, quantize, quantizers
from reference.rounding import float_format
from reference.swiglu import activate, split
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Values = Callable[[Array], Float64Array]


def plain(layer: ExpertsLayer, pool: Pool) -> Float64Array:
    """y (P, H) of the different tokens."""
    case = layer.case
    values = next(met(case, "kernel"))
    x, y = values(pool.x.astype(np.float64)), np.zeros((len(pool.x), case.k))

    def of_expert(number: int) -> tuple[Array, Float64Array]:
        rows, slots = np.nonzero(pool.ids == number)
        expert = layer.expert(number)
        gated, up = activate(*split(_times(x[rows], expert.w13), case.gated), case.gated)
        return rows, pool.weights[rows, slots, None] * _times(values(gated * up), expert.w2)

    with ThreadPoolExecutor() as threads:  # NumPy computes side by side
        for rows, part in threads.map(of_expert, np.unique(pool.ids).tolist()):
            y[rows] += part
    return y


def met(case: Case, convention: Convention) -> Iterator[Values]:
    """What weights meet of x, for each legal order of the quantizer's operations: a row whose scale is a power of two
    has many values between two codes, and they all go one way or the other."""
    if case.activation.kind == "a16":
        yield lambda x: x.astype(np.float64)
        return
    for how in quantizers(case.activation, convention, float_format(case.dtype)):
        yield lambda x, how=how: quantize(x, case.activation, how).dequantized()  # type: ignore[misc]


def _times(x: Float64Array, weight: QuantizedWeight) -> Float64Array:
    """x W^T."""
    columns = weight.groups()
    codes = weight.codes.astype(np.float32)
    if weight.zero_point is not None:
        codes -= weight.zero_point[:, columns]
    matrix = codes * weight.scale.astype(np.float32)[:, columns]
    return np.asarray(x.astype(np.float32) @ matrix.T, np.float64)
