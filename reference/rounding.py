"""Rounding of float64 values to the 8-, 16- and 32-bit floating-point formats (C5, C61).

Values stay float64 arrays holding numbers of the named format: the oracle never computes in 16 bits.
NumPy's and ml_dtypes' own casts are not used here, because float64 to bfloat16 goes through float32 in
ml_dtypes and rounds twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from reference.errors import FormatError

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FloatFormat:
    """precision: significand bits with the hidden one. emin: exponent of the smallest normal number.
    saturates: what is larger than the largest number becomes that number instead of infinity."""

    name: str
    precision: int
    emin: int
    largest: float
    dtype: np.dtype[Any]
    saturates: bool = False

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.precision

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number: torch.finfo(dtype).eps."""
        return 2.0 ** (1 - self.precision)


FLOAT_FORMATS = {
    f.name: f
    for f in (
        FloatFormat("bf16", 8, -126, float.fromhex("0x1.fep127"), np.dtype(ml_dtypes.bfloat16)),
        FloatFormat("fp16", 11, -14, 65504.0, np.dtype(np.float16)),
        FloatFormat("fp32", 24, -126, float.fromhex("0x1.fffffep127"), np.dtype(np.float32)),
    )
}
# OCP's E4M3: no infinity, and conversions to it saturate.
E4M3 = FloatFormat("fp8", 4, -6, 448.0, np.dtype(ml_dtypes.float8_e4m3fn), saturates=True)
_BY_DTYPE = {f.dtype: f for f in FLOAT_FORMATS.values()}


def float_format(dtype: str | np.dtype[Any]) -> FloatFormat:
    """The format named bf16, fp16 or fp32, or that of a NumPy dtype. Raises FormatError."""
    found = FLOAT_FORMATS.get(dtype) if isinstance(dtype, str) else _BY_DTYPE.get(np.dtype(dtype))
    if found is None:
        raise FormatError(f"dtype: {dtype} is none of bf16, fp16, fp32")
    return found


def round_to(x: npt.ArrayLike, target: FloatFormat) -> Float64Array:
    """Round to nearest, ties to even, with subnormals; beyond the largest number: infinity, or that number
    in a format that saturates (C5).

    x: float64 array of any shape. Returns float64 of the same shape, never the same memory.
    """
    values = np.ascontiguousarray(x, np.float64)
    bits = values.view(np.int64)
    drop = np.int64(53 - target.precision)
    # Half a unit less one, plus the last kept bit: carries exactly when the dropped part rounds up.
    kept = bits >> drop
    kept &= 1
    kept += np.int64((1 << int(drop - 1)) - 1)
    kept += bits
    kept >>= drop
    kept <<= drop
    rounded: Float64Array = kept.view(np.float64)
    magnitude = np.abs(values)
    small = magnitude < 2.0**target.emin
    if small.any():
        small &= magnitude > 0  # zeros are right, and where there are small numbers they are most of them
        quantum = 2.0 ** (target.emin - target.precision + 1)
        rounded[small] = np.rint(values[small] / quantum) * quantum
    if not magnitude.max(initial=0.0) <= target.largest:  # NaN included
        beyond = np.abs(rounded) > target.largest
        rounded[beyond] = np.copysign(target.largest if target.saturates else np.inf, values[beyond])
        rounded[np.isnan(values)] = np.nan
    return rounded.reshape(np.shape(x))


def half_ulps(y: Float64Array, target: FloatFormat) -> tuple[Float64Array, Float64Array]:
    """Half the distance from numbers of a format to their lower and upper neighbours.

    Together with y they bound the preimage of y under `round_to`. Infinite y get the half step beyond the
    largest number, so that its preimage is [largest + half ulp, infinity).
    """
    finite = np.clip(np.nan_to_num(y, nan=0.0), -target.largest, target.largest)
    mantissa, exponent = np.frexp(np.abs(finite))
    exponent = np.maximum(np.where(mantissa == 0, target.emin, exponent - 1), target.emin)
    half = np.ldexp(0.5, exponent - target.precision + 1)
    # Below a power of two the spacing halves, except at the bottom of the normal range.
    inner = np.where((mantissa == 0.5) & (exponent > target.emin), half / 2, half)
    return np.where(finite > 0, inner, half), np.where(finite < 0, inner, half)
