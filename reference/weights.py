"""Quantized weights: scales and zero points, quantize, dequantize (C20-C29).

A weight matrix is (N, K) = (output features, input features). Codes q and zero points z are signed, as
compressed-tensors computes with them; w = (q - z) * s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.errors import TensorError
from reference.formats import WeightFormat
from reference.rounding import FLOAT_FORMATS, FloatFormat, float_format

Int8Array = npt.NDArray[np.int8]
Float64Array = npt.NDArray[np.float64]

_BLOCK = 1 << 17  # elements dequantized at a time: the float32 block stays in the second-level cache


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized matrix, checked when it is made.

    codes: int8 (N, K). scale: float of 16 or 32 bits, (N, G) for groups, (N, 1) for channel, (1,) for
    tensor. zero_point: int8 shaped like scale, None when symmetric. group_index: int32 (K), the group of
    each column (act-order), None for column k in group k // group_size; a shard's scale has the groups of the
    whole (C102).
    Raises TensorError naming the tensor: shapes and dtypes, codes and zero points outside the width,
    scales that are not finite (C25), group indices outside 0..G-1.
    """

    format: WeightFormat
    codes: Int8Array
    scale: npt.NDArray[Any]
    zero_point: Int8Array | None = None
    group_index: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        fmt = self.format
        _check_array("codes", self.codes, np.int8, None)
        if self.codes.ndim != 2:
            raise TensorError(f"codes: expected a matrix (N, K), found shape {list(self.codes.shape)}")
        check_range("codes", self.codes, fmt)
        shape = scale_shape(fmt, self.n, self.k, None if self.group_index is None else self.scale)
        check_scale("scale", self.scale, shape)
        if (self.zero_point is None) != fmt.symmetric:
            raise TensorError(
                f"zero_point: {'missing from' if self.zero_point is None else 'present in'} the weight of "
                f"{'a symmetric' if fmt.symmetric else 'an asymmetric'} format"
            )
        if self.zero_point is not None:
            _check_array("zero_point", self.zero_point, np.int8, shape)
            check_range("zero_point", self.zero_point, fmt)
        if self.group_index is not None:
            if fmt.strategy != "group":
                raise TensorError(f"g_idx: a format of strategy {fmt.strategy!r} has no groups to index")
            check_group_index("g_idx", self.group_index, self.k, shape[1])

    @property
    def n(self) -> int:
        return int(self.codes.shape[0])

    @property
    def k(self) -> int:
        return int(self.codes.shape[1])

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """The output rows [start, stop), sharing memory."""
        cut = slice(start, stop)
        per_row = self.format.strategy != "tensor"
        zero_point = self.zero_point
        return QuantizedWeight(
            self.format,
            self.codes[cut],
            self.scale[cut] if per_row else self.scale,
            zero_point[cut] if per_row and zero_point is not None else zero_point,
            self.group_index,
        )

    def groups(self) -> npt.NDArray[np.int64]:
        """The group of each column, int64 (K)."""
        if self.group_index is not None:
            return self.group_index.astype(np.int64)
        if self.format.strategy != "group":
            return np.zeros(self.k, np.int64)
        return np.arange(self.k, dtype=np.int64) // self.format.group_size


def scale_shape(
    fmt: WeightFormat, n: int, k: int, indexed: npt.NDArray[Any] | None = None
) -> tuple[int, ...]:
    """Shape of scale and unpacked zero point (C21): (1,), (N, 1) or (N, G).

    indexed: the scale that a g_idx points into. Its groups may be those of a matrix that these K columns are one
    of several equal shards of (C102).
    """
    if indexed is not None and fmt.strategy == "group" and indexed.ndim == 2:
        whole = indexed.shape[1] * fmt.group_size
        if whole > k and k > 0 and whole % k == 0:
            return (n, indexed.shape[1])
    return (1,) if fmt.strategy == "tensor" else (n, fmt.groups(k))


def compute_qparams(
    weight: npt.NDArray[Any], fmt: WeightFormat, group_index: npt.NDArray[np.int32] | None = None
) -> tuple[npt.NDArray[Any], Int8Array | None]:
    """Scale and zero point of a float matrix from its minima and maxima (C22-C24).

    weight: bf16, fp16 or fp32 (N, K). Symmetric: s = max|w| / ((2^b - 1) / 2). Asymmetric, with zero
    forced into the range: s = (max - min) / (2^b - 1), z = rint(clamp(qmin - min/s, qmin, qmax)). Each
    operation rounds to the weight's dtype, in which the scale is stored. A scale of 0 becomes the
    dtype's eps, and a group of zeros gets z = 0 (its quotient min/s is 0/0 and has no other meaning).
    Returns scale and int8 zero point (None when symmetric), shaped as scale_shape says.
    Source: compressed-tensors 0.20.1, calculate_qparams. Raises TensorError for NaN or Inf.
    """
    dtype = _check_float_matrix(weight)
    low, high = _group_extrema(weight, fmt, group_index)
    zero = dtype.type(0)
    low, high = np.minimum(low, zero), np.maximum(high, zero)
    eps = dtype.type(float_format(dtype).eps)
    span = (1 << fmt.bits) - 1
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if fmt.symmetric:
            scale = np.maximum(np.abs(low), np.abs(high)) / dtype.type(span / 2)
            return _no_zero(scale, eps), None
        scale = (high - low) / dtype.type(span)
        qmin, qmax = fmt.code_range
        exact = (dtype.type(qmin) - low / scale).astype(np.float32)
    clamped = np.where(np.isnan(exact), 0, np.clip(exact, qmin, qmax))
    return _no_zero(scale, eps), np.rint(clamped).astype(np.int8)


def quantize(
    weight: npt.NDArray[Any],
    fmt: WeightFormat,
    scale: npt.NDArray[Any],
    zero_point: Int8Array | None = None,
    group_index: npt.NDArray[np.int32] | None = None,
) -> QuantizedWeight:
    """Codes of a float matrix: q = rint(clamp(w / s + z, qmin, qmax)), each step in w's dtype (C26).

    weight: bf16, fp16 or fp32 (N, K), finite. scale and zero_point as in QuantizedWeight, scale nonzero;
    a scale of another dtype than w's makes the steps float32.
    The division is a true one; the clamp comes before the rounding, which is to even.
    Source: compressed-tensors 0.20.1, _quantize. Raises TensorError.
    """
    dtype = _check_float_matrix(weight)
    if scale.dtype != dtype:
        dtype = np.dtype(np.float32)
    codes = np.zeros(weight.shape, np.int8)
    result = QuantizedWeight(fmt, codes, scale, zero_point, group_index)
    if not scale.astype(np.float32).all():
        index = tuple(int(i) for i in np.argwhere(scale.astype(np.float32) == 0)[0])
        raise TensorError(f"scale: 0 at {list(index)} cannot quantize; zeros take the dtype's eps")
    qmin, qmax = fmt.code_range
    groups = result.groups()
    with np.errstate(over="ignore"):
        quotient = weight.astype(dtype, copy=False) / _columns(scale, groups).astype(dtype, copy=False)
        if zero_point is not None:
            quotient = quotient + _columns(zero_point, groups).astype(dtype)
    np.rint(np.clip(quotient.astype(np.float32), qmin, qmax), out=codes, casting="unsafe")
    return result


def dequantize(weight: QuantizedWeight) -> npt.NDArray[Any]:
    """w = (q - z) * s rounded once to the scale's dtype: the materialized matrix (N, K) (C27).

    q - z has at most 9 bits and a 16-bit scale at most 11, so the float32 product is exact and the cast
    rounds once; with a float32 scale the product itself is that rounding.
    Source: compressed-tensors 0.20.1, _dequantize.
    """
    target = float_format(weight.scale.dtype)
    out = np.empty(weight.codes.shape, target.dtype)
    largest = float(np.abs(weight.scale.astype(np.float64)).max(initial=0.0)) * (1 << weight.format.bits)
    overflows = largest >= target.largest
    half = target.name == "fp16" and not overflows
    for rows, product in _products(weight, np.float32(2.0**-112 if half else 1.0)):
        if half:
            _round_scaled_to_half(product, out[rows])
        else:
            with np.errstate(over="ignore"):
                np.copyto(out[rows], product, casting="unsafe")
    return out


def dequantize_exact(weight: QuantizedWeight) -> Float64Array:
    """w = (q - z) * s in float64, exact (C27)."""
    groups = weight.groups()
    codes = weight.codes.astype(np.float64)
    if weight.zero_point is not None:
        codes -= _columns(weight.zero_point, groups)
    codes *= _columns(weight.scale.astype(np.float64), groups)
    return codes


def _products(weight: QuantizedWeight, factor: np.float32) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
    """Blocks of rows and their (q - z) * s * factor in float32; factor is a power of two."""
    n, k = weight.codes.shape
    scale = weight.scale.astype(np.float32) * factor
    zero_point = None if weight.zero_point is None else weight.zero_point.astype(np.float32)
    if weight.format.strategy == "tensor":
        scale = np.broadcast_to(scale, (n, 1))
        zero_point = None if zero_point is None else np.broadcast_to(zero_point, (n, 1))
    groups = weight.groups()
    size = weight.format.group_size if weight.format.strategy == "group" else k
    regular = weight.group_index is None and k > 0 and k % size == 0
    step = max(1, _BLOCK // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        block = weight.codes[rows].astype(np.float32)
        with np.errstate(over="ignore"):  # what overflows float32 overflows the result as well
            if regular:  # a group is a run of columns: broadcast over a third axis instead of indexing
                view = block.reshape(block.shape[0], k // size, size)
                if zero_point is not None:
                    view -= zero_point[rows, :, None]
                view *= scale[rows, :, None]
            else:
                if zero_point is not None:
                    block -= zero_point[rows][:, groups]
                block *= scale[rows][:, groups]
        yield rows, block


def _round_scaled_to_half(product: npt.NDArray[np.float32], out: npt.NDArray[np.float16]) -> None:
    """Round float32 values times 2^-112 to float16, nearest even, without overflow.

    The factor moves float16's exponent range to the bottom of float32's, subnormals onto subnormals, so
    the half's bits are the float's upper bits and rounding is integer arithmetic. NumPy's own cast is
    several times slower.
    """
    bits = product.view(np.uint32)
    up = bits >> np.uint32(13)
    up &= np.uint32(1)
    up += np.uint32(0x0FFF)
    up += bits & np.uint32(0x7FFFFFFF)
    up >>= np.uint32(13)
    bits >>= np.uint32(16)
    bits &= np.uint32(0x8000)
    up |= bits
    np.copyto(out.view(np.uint16), up, casting="unsafe")


def _columns(values: npt.NDArray[Any], groups: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Per-group values for every column: (N, K), or a shape that broadcasts to it."""
    if values.ndim == 1:
        return values.reshape(1, 1)
    return values if values.shape[1] == 1 else values[:, groups]


def _group_extrema(
    weight: npt.NDArray[Any], fmt: WeightFormat, group_index: npt.NDArray[np.int32] | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    k = weight.shape[1]
    if fmt.strategy == "tensor":
        return weight.min(keepdims=True).reshape(1), weight.max(keepdims=True).reshape(1)
    count = fmt.groups(k)
    if fmt.strategy == "channel":
        return weight.min(axis=1, keepdims=True), weight.max(axis=1, keepdims=True)
    groups = np.arange(k) // fmt.group_size if group_index is None else group_index
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(count))
    if len(np.unique(groups)) != count:
        raise TensorError(f"g_idx: some of the {count} groups have no column")
    sorted_columns = weight[:, order]
    return (
        np.minimum.reduceat(sorted_columns, starts, axis=1),
        np.maximum.reduceat(sorted_columns, starts, axis=1),
    )


def _no_zero(scale: npt.NDArray[Any], eps: Any) -> npt.NDArray[Any]:
    return np.where(scale == 0, eps, scale)


def _check_float_matrix(weight: npt.NDArray[Any]) -> np.dtype[Any]:
    form: FloatFormat = float_format(weight.dtype)
    if weight.ndim != 2 or weight.size == 0:
        raise TensorError(f"weight: expected a matrix (N, K) with elements, found shape {list(weight.shape)}")
    if not np.isfinite(weight.astype(np.float32)).all():
        raise TensorError("weight: it holds NaN or Inf, which no code stands for")
    return form.dtype


def _check_array(
    name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, shape: tuple[int, ...] | None
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TensorError(f"{name}: expected dtype {np.dtype(dtype)}, found {found}")
    if shape is not None and array.shape != shape:
        raise TensorError(f"{name}: expected shape {list(shape)}, found {list(array.shape)}")


def check_scale(name: str, scale: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raise TensorError unless scale is of a float type of 16 or 32 bits, of that shape, and finite (C25)."""
    dtypes = [form.dtype for form in FLOAT_FORMATS.values()]
    if not isinstance(scale, np.ndarray) or scale.dtype not in dtypes:
        found = scale.dtype if isinstance(scale, np.ndarray) else type(scale).__name__
        raise TensorError(f"{name}: expected dtype {', '.join(map(str, dtypes))}, found {found}")
    _check_array(name, scale, scale.dtype, shape)
    finite = np.isfinite(scale.astype(np.float32))
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise TensorError(f"{name}: {scale[index]} at {list(index)} is not a finite number")


def check_group_index(name: str, index: npt.NDArray[np.int32], k: int, groups: int) -> None:
    """Raise TensorError unless index is int32 (K) and holds groups only."""
    _check_array(name, index, np.int32, (k,))
    bad = (index < 0) | (index >= groups)
    if bad.any():
        where = int(np.argmax(bad))
        raise TensorError(f"{name}: {int(index[where])} at [{where}] is outside 0..{groups - 1}")


def check_range(name: str, values: Int8Array, fmt: WeightFormat) -> None:
    """Raise TensorError at the first signed code outside the width of the format (C15)."""
    low, high = fmt.code_range
    if values.size and (values.min() < low or values.max() > high):
        index = tuple(int(i) for i in np.argwhere((values < low) | (values > high))[0])
        raise TensorError(
            f"{name}: {int(values[index])} at {list(index)} is outside {low}..{high}, "
            f"the codes of {fmt.bits} bits"
        )
