"""Named, versioned layouts of a quantized weight in a checkpoint, to and from codes (C10-C19).

A layout name says which tensors there are, what they are called and where each bit lies. Neither shapes
nor a round trip tell two layouts of 3, 5, 6 or 7 bits apart, so a layout is always named, never guessed.

| name             | tensors                                     | packed along      | zero points           |
| ---------------- | ------------------------------------------- | ----------------- | --------------------- |
| ct-dense-le-v1   | weight_packed, _scale, _zero_point, _shape  | K; zero points: N | offset, like codes    |
| ct-aligned-le-v0 | the same                                    | the same          | the same              |
| gptq-v1          | qweight, qzeros, scales, g_idx              | K; zero points: N | stored minus one      |
| gptq-v2          | qweight, qzeros, scales, g_idx              | K; zero points: N | stored as they are    |
| awq-gemm         | qweight, qzeros, scales                     | N, interleaved    | stored as they are    |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.errors import FormatError, TensorError
from reference.formats import WeightFormat
from reference.packing import pack, packed_size, unpack
from reference.weights import QuantizedWeight, check_group_index, check_range, check_scale, scale_shape

Tensors = dict[str, npt.NDArray[Any]]

# Column held by the nibble at each position of an AWQ word (C18).
_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


@dataclass(frozen=True)
class Layout:
    """bits: the widths it is defined for. encode and decode convert one matrix."""

    name: str
    bits: tuple[int, ...]
    _encode: Callable[[QuantizedWeight], Tensors]
    _decode: Callable[[Mapping[str, npt.NDArray[Any]], WeightFormat], QuantizedWeight]

    def encode(self, weight: QuantizedWeight) -> Tensors:
        """Checkpoint tensors of a weight. Raises FormatError or TensorError where the layout has none."""
        self._check(weight.format)
        return self._encode(weight)

    def decode(self, tensors: Mapping[str, npt.NDArray[Any]], fmt: WeightFormat) -> QuantizedWeight:
        """The weight that checkpoint tensors hold. Raises TensorError naming the tensor at fault."""
        self._check(fmt)
        return self._decode(tensors, fmt)

    def _check(self, fmt: WeightFormat) -> None:
        if fmt.bits not in self.bits:
            raise FormatError(
                f"num_bits: layout {self.name} is defined for {', '.join(map(str, self.bits))} bits, "
                f"not {fmt.bits}"
            )


def layout(name: str) -> Layout:
    """The layout of that name. Raises FormatError listing the known ones."""
    found = LAYOUTS.get(name)
    if found is None:
        raise FormatError(f"layout: unknown name {name!r}; known: {', '.join(LAYOUTS)}")
    return found


# ---- compressed-tensors pack-quantized: the dense stream of today, the aligned words of before


def _ct_encode(weight: QuantizedWeight) -> Tensors:
    return _ct_tensors(weight, pack)


def _ct_decode(tensors: Mapping[str, npt.NDArray[Any]], fmt: WeightFormat) -> QuantizedWeight:
    return _ct_weight(tensors, fmt, packed_size, unpack)


def _aligned_encode(weight: QuantizedWeight) -> Tensors:
    return _ct_tensors(weight, _pack_aligned)


def _aligned_decode(tensors: Mapping[str, npt.NDArray[Any]], fmt: WeightFormat) -> QuantizedWeight:
    return _ct_weight(tensors, fmt, _aligned_size, _unpack_aligned)


def _ct_tensors(weight: QuantizedWeight, packer: Callable[..., Any]) -> Tensors:
    bits = weight.format.bits
    tensors: Tensors = {
        "weight_packed": packer(weight.codes, bits),
        "weight_scale": weight.scale,
        "weight_shape": np.array([weight.n, weight.k], np.int64),
    }
    if weight.zero_point is not None:
        tensor_wise = weight.format.strategy == "tensor"
        tensors["weight_zero_point"] = (
            weight.zero_point if tensor_wise else packer(weight.zero_point, bits, axis=0)
        )
    if weight.group_index is not None:
        tensors["weight_g_idx"] = weight.group_index
    return tensors


def _ct_weight(
    tensors: Mapping[str, npt.NDArray[Any]],
    fmt: WeightFormat,
    size: Callable[[int, int], int],
    unpacker: Callable[..., Any],
) -> QuantizedWeight:
    shape = _tensor(tensors, "weight_shape", np.int64, (2,))
    n, k = int(shape[0]), int(shape[1])
    if n < 0 or k < 0:
        raise TensorError(f"weight_shape: [{n}, {k}] is no shape")
    packed = _tensor(tensors, "weight_packed", np.int32, (n, size(k, fmt.bits)))
    indexed = tensors.get("weight_scale") if "weight_g_idx" in tensors else None
    per_group = scale_shape(fmt, n, k, indexed)
    scale = _scale(tensors, "weight_scale", per_group)
    zero_point = None
    if not fmt.symmetric and fmt.strategy == "tensor":
        zero_point = _tensor(tensors, "weight_zero_point", np.int8, per_group)
        check_range("weight_zero_point", zero_point, fmt)
    elif not fmt.symmetric:
        words = _tensor(tensors, "weight_zero_point", np.int32, (size(n, fmt.bits), per_group[1]))
        zero_point = unpacker(words, fmt.bits, n, axis=0)
    elif "weight_zero_point" in tensors:
        raise TensorError("weight_zero_point: present although the format is symmetric; remove it")
    group_index = tensors.get("weight_g_idx")
    if group_index is not None:
        check_group_index("weight_g_idx", group_index, k, per_group[-1])
    return QuantizedWeight(fmt, unpacker(packed, fmt.bits, k), scale, zero_point, group_index)


def _aligned_size(n: int, bits: int) -> int:
    return -(-n // (32 // bits))


def _pack_aligned(codes: npt.NDArray[np.int8], bits: int, axis: int = -1) -> npt.NDArray[np.int32]:
    """floor(32/b) codes a word, low bits first; the rest of the word is zero (C16)."""
    moved = np.moveaxis(codes, axis, -1)
    factor = 32 // bits
    words = _aligned_size(moved.shape[-1], bits)
    unsigned = np.zeros((*moved.shape[:-1], words * factor), np.uint32)
    unsigned[..., : moved.shape[-1]] = moved.astype(np.int32) + (1 << (bits - 1))
    shifted = unsigned.reshape(*moved.shape[:-1], words, factor) << (
        bits * np.arange(factor, dtype=np.uint32)
    )
    return np.ascontiguousarray(np.moveaxis(np.bitwise_or.reduce(shifted, axis=-1).view(np.int32), -1, axis))


def _unpack_aligned(
    words: npt.NDArray[np.int32], bits: int, size: int, axis: int = -1
) -> npt.NDArray[np.int8]:
    moved = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint32)
    factor = 32 // bits
    fields = moved[..., None] >> (bits * np.arange(factor, dtype=np.uint32)) & np.uint32((1 << bits) - 1)
    unsigned = fields.reshape(*moved.shape[:-1], -1)[..., :size]
    return np.ascontiguousarray(
        np.moveaxis((unsigned.astype(np.int16) - (1 << (bits - 1))).astype(np.int8), -1, axis)
    )


# ---- GPTQ


def _gptq_encode(weight: QuantizedWeight, minus: int) -> Tensors:
    fmt = weight.format
    _whole_words("codes", "K", weight.k, fmt.bits)
    _whole_words("codes", "N", weight.n, fmt.bits)
    zeros = _unsigned_zero_points(weight) - minus
    if (zeros < 0).any():
        raise TensorError(
            "zero_point: gptq-v1 stores the zero point minus one and has no code for "
            f"{-fmt.offset}; use gptq-v2"
        )
    return {
        "qweight": pack(_unsigned(weight.codes, fmt).T, fmt.bits, axis=0),
        "qzeros": pack(np.ascontiguousarray(zeros.T.astype(np.uint8)), fmt.bits),
        "scales": np.ascontiguousarray(_per_row(weight, weight.scale).T),
        "g_idx": weight.groups().astype(np.int32),
    }


def _gptq_decode(tensors: Mapping[str, npt.NDArray[Any]], fmt: WeightFormat, minus: int) -> QuantizedWeight:
    group_index = _tensor(tensors, "g_idx", np.int32, (None,))
    k = int(group_index.shape[0])
    n = int(_tensor(tensors, "scales", None, (None, None)).shape[1])
    _whole_words("g_idx", "K", k, fmt.bits)
    _whole_words("scales", "N", n, fmt.bits)
    groups = fmt.groups(k)
    words = _tensor(tensors, "qweight", np.int32, (packed_size(k, fmt.bits), n))
    scales = _scale(tensors, "scales", (groups, n))
    packed_zeros = _tensor(tensors, "qzeros", np.int32, (groups, packed_size(n, fmt.bits)))
    zeros = unpack(packed_zeros, fmt.bits, n, signed=False).astype(np.int16) + minus
    if (zeros > 2 * fmt.offset - 1).any():
        raise TensorError(
            f"qzeros: the stored value {2 * fmt.offset - 1} of gptq-v1 means {2 * fmt.offset} to some "
            "readers and 0 to others; write the checkpoint as gptq-v2"
        )
    regular = np.array_equal(group_index, np.arange(k) // (fmt.group_size if groups > 1 else max(k, 1)))
    return QuantizedWeight(
        fmt,
        np.ascontiguousarray(_signed(unpack(words, fmt.bits, k, axis=0, signed=False), fmt).T),
        np.ascontiguousarray(scales.T),
        _zero_points(zeros.T, fmt, "qzeros"),
        None if regular else group_index,
    )


# ---- AWQ


def _awq_encode(weight: QuantizedWeight) -> Tensors:
    if weight.format.symmetric or weight.group_index is not None:
        raise FormatError("layout: awq-gemm is asymmetric and has no g_idx; choose a gptq layout")
    _whole_words("codes", "N", weight.n, weight.format.bits)
    return {
        "qweight": pack(_interleave(_unsigned(weight.codes, weight.format).T, _AWQ_ORDER), 4),
        "qzeros": pack(_interleave(_unsigned_zero_points(weight).T.astype(np.uint8), _AWQ_ORDER), 4),
        "scales": np.ascontiguousarray(_per_row(weight, weight.scale).T),
    }


def _awq_decode(tensors: Mapping[str, npt.NDArray[Any]], fmt: WeightFormat) -> QuantizedWeight:
    if fmt.symmetric:
        raise FormatError("symmetric: awq-gemm always stores zero points; set it to false")
    words = _tensor(tensors, "qweight", np.int32, (None, None))
    k, n = int(words.shape[0]), int(words.shape[1]) * 8
    groups = fmt.groups(k)
    scales = _scale(tensors, "scales", (groups, n))
    packed_zeros = _tensor(tensors, "qzeros", np.int32, (groups, n // 8))
    back = np.argsort(_AWQ_ORDER)
    codes = _interleave(unpack(words, 4, n, signed=False), back)
    zeros = _interleave(unpack(packed_zeros, 4, n, signed=False), back)
    return QuantizedWeight(
        fmt,
        np.ascontiguousarray(_signed(codes, fmt).T),
        np.ascontiguousarray(scales.T),
        _zero_points(zeros.T, fmt, "qzeros"),
    )


def _interleave(codes: npt.NDArray[Any], order: npt.NDArray[Any]) -> npt.NDArray[Any]:
    blocks = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    return np.ascontiguousarray(blocks[..., order].reshape(codes.shape))


# ---- shared


def _unsigned(codes: npt.NDArray[np.int8], fmt: WeightFormat) -> npt.NDArray[np.uint8]:
    return (codes.astype(np.int16) + fmt.offset).astype(np.uint8)


def _signed(codes: npt.NDArray[Any], fmt: WeightFormat) -> npt.NDArray[np.int8]:
    return (codes.astype(np.int16) - fmt.offset).astype(np.int8)


def _per_row(weight: QuantizedWeight, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scale or zero point as (N, G); one value for the whole tensor is repeated."""
    return np.broadcast_to(values.reshape(1, 1), (weight.n, 1)) if values.ndim == 1 else values


def _unsigned_zero_points(weight: QuantizedWeight) -> npt.NDArray[np.int16]:
    zeros = np.zeros(weight.scale.shape, np.int8) if weight.zero_point is None else weight.zero_point
    return _per_row(weight, zeros).astype(np.int16) + weight.format.offset


def _zero_points(zeros: npt.NDArray[Any], fmt: WeightFormat, name: str) -> npt.NDArray[np.int8] | None:
    if not fmt.symmetric:
        return np.ascontiguousarray(_signed(zeros, fmt))
    if (zeros != fmt.offset).any():
        raise TensorError(
            f"{name}: a symmetric format of {fmt.bits} bits has the zero point {fmt.offset} everywhere, "
            f"found {int(zeros[zeros != fmt.offset][0])}"
        )
    return None


def _whole_words(name: str, dimension: str, size: int, bits: int) -> None:
    if size * bits % 32:
        raise TensorError(
            f"{name}: {dimension}={size} of {bits} bits does not fill whole 32-bit words, which it has to"
        )


def _tensor(
    tensors: Mapping[str, npt.NDArray[Any]],
    name: str,
    dtype: npt.DTypeLike | None,
    shape: tuple[int | None, ...],
) -> npt.NDArray[Any]:
    """A checkpoint tensor, checked; None stands for any dtype or any length."""
    if name not in tensors:
        raise TensorError(f"{name}: missing; present: {', '.join(sorted(tensors)) or 'nothing'}")
    array = tensors[name]
    if dtype is not None and array.dtype != dtype:
        raise TensorError(f"{name}: expected dtype {np.dtype(dtype)}, found {array.dtype}")
    fits = len(shape) == array.ndim and all(a in (None, b) for a, b in zip(shape, array.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise TensorError(f"{name}: expected shape [{wanted}], found {list(array.shape)}")
    return array


def _scale(tensors: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    scale = _tensor(tensors, name, None, shape)
    check_scale(name, scale, shape)
    return scale


LAYOUTS = {
    entry.name: entry
    for entry in (
        Layout("ct-dense-le-v1", (1, 2, 3, 4, 5, 6, 7, 8), _ct_encode, _ct_decode),
        Layout("ct-aligned-le-v0", (1, 2, 3, 4, 5, 6, 7, 8), _aligned_encode, _aligned_decode),
        Layout(
            "gptq-v1",
            (2, 3, 4, 8),
            lambda weight: _gptq_encode(weight, 1),
            lambda tensors, fmt: _gptq_decode(tensors, fmt, 1),
        ),
        Layout(
            "gptq-v2",
            (2, 3, 4, 8),
            lambda weight: _gptq_encode(weight, 0),
            lambda tensors, fmt: _gptq_decode(tensors, fmt, 0),
        ),
        Layout("awq-gemm", (4,), _awq_encode, _awq_decode),
    )
}
