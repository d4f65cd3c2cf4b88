"""What the quantized linear computes, as stages that can be replaced one by one.

`RIGHT` is the meaning that docs/specification.md gives to a checkpoint. A mutant (`mutants.py`) is RIGHT with one
stage of the same signature that is wrong; the oracle and its mutants go through the same code in
`linear.py`, so a diagnosis compares like with like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.activations import QuantizedActivations, Quantizer
from reference.activations import quantize as quantize_activations
from reference.formats import ActivationFormat
from reference.packing import pack, unpack
from reference.rounding import FloatFormat, round_to
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """A weight column by column: stored codes u, stored zero points u_z and scales, float64 (N, K) each.

    weight: where they come from. output: the 16-bit format of the call.
    """

    u: Float64Array
    u_z: Float64Array
    scale: Float64Array
    weight: QuantizedWeight
    output: FloatFormat


@dataclass(frozen=True)
class Operands:
    """What the product is taken of: activations (M, K), as they are or dequantized, and the matrix (N, K).

    quantized: codes and scales behind x, None for 16-bit activations. output: the 16-bit format.
    """

    x: Float64Array
    matrix: Float64Array
    columns: Columns
    quantized: QuantizedActivations | None
    output: FloatFormat

    @classmethod
    def of(
        cls, activations: QuantizedActivations | Float64Array, matrix: Float64Array, columns: Columns
    ) -> Operands:
        """Those of one call, whose activations a quantize stage gave."""
        if isinstance(activations, QuantizedActivations):
            return cls(activations.dequantized(), matrix, columns, activations, columns.output)
        return cls(activations, matrix, columns, None, columns.output)


@dataclass(frozen=True)
class Semantics:
    """The stages, each with the signature of the right function below.

    quantize takes all calls made to a layer so far, because what is static or kept from an earlier call is
    a fault of its own; finish takes one call.
    """

    pack: Callable[[Array, int, int], Array]
    unpack: Callable[[Array, int, int, int], Array]
    columns: Callable[[QuantizedWeight, FloatFormat], Columns]
    matrix: Callable[[Columns], Float64Array]
    store: Callable[[Float64Array, FloatFormat], Float64Array]
    quantize: Callable[
        [Sequence[Array], ActivationFormat, Quantizer, float | None],
        list[QuantizedActivations | Float64Array],
    ]
    product: Callable[[Operands], Float64Array]
    finish: Callable[[Float64Array, Float64Array | None, FloatFormat], Float64Array]


def columns_of(weight: QuantizedWeight, output: FloatFormat) -> Columns:
    """Stored codes, zero points and scales of every column of a weight (C3, C4)."""
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
    codes = weight.codes.astype(np.float64) + weight.format.offset
    return Columns(codes, spread(zeros), spread(weight.scale), weight, output)


def matrix_of(columns: Columns) -> Float64Array:
    """(u - u_z) * s, exact in float64 (C2)."""
    product: Float64Array = (columns.u - columns.u_z) * columns.scale
    return product


def store(matrix: Float64Array, output: FloatFormat) -> Float64Array:
    """A matrix materialized in 16 bits: one rounding (C27)."""
    return round_to(matrix, output)


def quantize(
    calls: Sequence[Array], fmt: ActivationFormat, how: Quantizer, input_scale: float | None
) -> list[QuantizedActivations | Float64Array]:
    """Each call by itself (C60)."""
    return [quantize_activations(x, fmt, how, input_scale) for x in calls]


def product(operands: Operands) -> Float64Array:
    """x . matrix^T in float64 (C41)."""
    total: Float64Array = operands.x @ operands.matrix.T
    return total


def finish(total: Float64Array, bias: Float64Array | None, output: FloatFormat) -> Float64Array:
    """The bias added, then one rounding (C41)."""
    return round_to(total if bias is None else total + bias, output)


RIGHT = Semantics(pack, unpack, columns_of, matrix_of, store, quantize, product, finish)


def reload(weight: QuantizedWeight, semantics: Semantics) -> QuantizedWeight:
    """The weight as these semantics read it from its checkpoint: packed rightly, unpacked by them."""
    if semantics.unpack is RIGHT.unpack:
        return weight
    bits = weight.format.bits
    codes = semantics.unpack(pack(weight.codes, bits), bits, weight.k, -1)
    zero_point = weight.zero_point
    if zero_point is not None and weight.format.strategy != "tensor":
        zero_point = semantics.unpack(pack(zero_point, bits, -2), bits, weight.n, -2)
    return replace(weight, codes=codes, zero_point=zero_point)
