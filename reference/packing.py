"""Dense little-endian bit packing: the format that compressed-tensors calls `pack-quantized` (C10-C15).

Element i of a row occupies bits [i*b, (i+1)*b) of the row's stream; bit j of the stream is bit j % 32 of
word j // 32. Elements straddle words where 32 is no multiple of b; a row takes ceil(n*b/32) words and
starts at a word of its own; unused high bits of the last word are zero.

How it is computed. The fewest codes that fill whole bytes are a unit: 8, 4 or 2 codes of b bits make
8b/8, 4b/8 or 2b/8 bytes. A unit sits in one 64-, 32- or 16-bit lane, one code a byte. Each step joins
neighbouring fields of twice the width (shift, or, mask), so log2(codes) steps leave the unit's bytes at
the bottom of the lane, in stream order; unpacking takes the same steps back. Work goes in blocks that
stay in cache.
"""

from __future__ import annotations

import math
import sys
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from reference.errors import FormatError, TensorError

Int8Array = npt.NDArray[np.int8]
UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
_Code = TypeVar("_Code", bound=np.generic)
_Moved = tuple[int, tuple[int, ...]]  # the packed axis, the shape of the others

_BLOCK = 1 << 18  # codes worked on at a time: lanes and words of a block stay in the second-level cache

if sys.byteorder != "little":  # the lane trick reads bytes in memory order
    raise ImportError("reference.packing needs a little-endian machine")


def packed_size(n: int, bits: int) -> int:
    """Number of 32-bit words that hold n codes: ceil(n * bits / 32), in exact integers (C12).

    Raises FormatError for bits outside 1..8 and TensorError for a negative n.
    """
    _check_bits(bits)
    if n < 0:
        raise TensorError(f"size: {n} codes cannot be packed; give a count of 0 or more")
    return -(-n * bits // 32)


def pack(codes: Int8Array | UInt8Array, bits: int, axis: int = -1) -> Int32Array:
    """Pack codes along one axis (C10-C14).

    codes: int8 codes in [-2^(b-1), 2^(b-1)), stored as code + 2^(b-1); or uint8 codes in [0, 2^b), stored
    as they are. Any shape of one or more dimensions; leading dimensions (stacked experts) are packed one
    by one, which is what packing along an axis does.
    Returns int32 of the same shape with `axis` reduced to packed_size(n, bits).
    Raises FormatError (bits), TensorError (dtype, axis, a code outside its width: C15).
    """
    _check_bits(bits)
    if not isinstance(codes, np.ndarray) or codes.dtype not in (np.int8, np.uint8):
        raise TensorError(f"codes: expected an int8 or uint8 array, found {_kind(codes)}")
    rows, moved = _as_rows(codes, axis, "codes")
    offset = (1 << (bits - 1)) if codes.dtype == np.int8 else 0
    _check_codes(codes, bits, offset)
    n = rows.shape[1]
    out = np.empty((rows.shape[0], packed_size(n, bits)), np.int32)
    padded = -(-n // 32) * 32  # whole words a row; the surplus is cut off below
    step = max(1, _BLOCK // max(padded, 1))
    buffer = np.zeros((min(step, max(rows.shape[0], 1)), padded), np.uint8)
    unit = _Unit(bits, *buffer.shape)
    words = np.empty((buffer.shape[0], padded * bits // 32), np.int32)
    for start in range(0, rows.shape[0] if n else 0, step):
        block = rows[start : start + step]
        count = block.shape[0]
        np.add(block.view(np.uint8), np.uint8(offset), out=buffer[:count, :n])
        unit.join(buffer[:count], words[:count])
        out[start : start + count] = words[:count, : out.shape[1]]
    return _from_rows(out, moved)


def unpack(words: Int32Array, bits: int, size: int, axis: int = -1, signed: bool = True) -> Any:
    """Unpack `size` codes along one axis: the inverse of `pack` (C10-C14).

    words: int32 (or uint32) with packed_size(size, bits) words along `axis`. The size must be given: the
    number of words does not tell it (C13). Unused high bits of the last word are not read.
    Returns int8 codes in [-2^(b-1), 2^(b-1)) when signed, else uint8 codes in [0, 2^b).
    Raises FormatError (bits), TensorError (dtype, axis, word count).
    """
    _check_bits(bits)
    if not isinstance(words, np.ndarray) or words.dtype not in (np.int32, np.uint32):
        raise TensorError(f"words: expected an int32 array, found {_kind(words)}")
    rows, moved = _as_rows(words, axis, "words")
    expected = packed_size(size, bits)
    if rows.shape[1] != expected:
        raise TensorError(
            f"words: {size} codes of {bits} bits take ceil({size}*{bits}/32) = {expected} words "
            f"along axis {axis}, found {rows.shape[1]}"
        )
    out = np.empty((rows.shape[0], size), np.uint8)
    padded = -(-size // 32) * 32
    step = max(1, _BLOCK // max(padded, 1))
    buffer = np.empty((min(step, max(rows.shape[0], 1)), padded), np.uint8)
    unit = _Unit(bits, *buffer.shape)
    block_words = np.zeros((buffer.shape[0], padded * bits // 32), np.int32)
    offset = np.uint8((1 << (bits - 1)) if signed else 0)
    for start in range(0, rows.shape[0] if size else 0, step):
        count = min(step, rows.shape[0] - start)
        source = rows[start : start + count]
        if expected < block_words.shape[1]:
            block_words[:count, :expected] = source
            source = block_words[:count]
        target = out[start : start + count]
        codes = target if padded == size else buffer[:count]
        unit.split(source, codes)
        # modulo 256: exactly the two's complement byte of the signed code
        np.subtract(codes[:, :size], offset, out=target)
    return _from_rows(out.view(np.int8) if signed else out, moved)


def tail_bits(words: Int32Array, bits: int, size: int, axis: int = -1) -> Int32Array:
    """The unused high bits of the last word of each row, which the format wants zero (C14).

    Returns an int32 array shaped like `words` without `axis`; nonzero where a writer left garbage.
    """
    rows = np.moveaxis(words, axis, -1)
    used = size * bits % 32
    if used == 0:
        return np.zeros(rows.shape[:-1], np.int32)
    return np.asarray(np.ascontiguousarray(rows[..., -1]).view(np.uint32) >> np.uint32(used)).astype(np.int32)


class _Unit:
    """The fewest codes of b bits that fill whole bytes, joined in and split from one lane each.

    rows, columns: the largest block of codes that will be joined or split; its working memory is kept.
    """

    def __init__(self, bits: int, rows: int, columns: int) -> None:
        self.codes = 8 // math.gcd(bits, 8)
        self.bytes = self.codes * bits // 8
        self.lane = np.dtype(f"u{self.codes}")
        # A lane read as its low bytes only: copies `bytes` of every `codes` bytes.
        self.low = np.dtype({"names": ["x"], "formats": [f"V{self.bytes}"], "itemsize": self.codes})
        self.upper = np.empty((rows, columns // self.codes), self.lane)
        # From single codes up to half a unit: pairs of fields of `width` codes, each pair in 2*width bytes.
        self.steps: list[tuple[int, int, int]] = []
        width = 1
        while width < self.codes:
            field = (1 << (width * bits)) - 1
            lower = sum(field << (16 * width * i) for i in range(self.codes // (2 * width)))
            self.steps.append((width * (8 - bits), lower, lower << (8 * width)))
            width *= 2

    def join(self, codes: UInt8Array, words: Int32Array) -> None:
        """codes (rows, 32*j) bytes of one code each -> words (rows, b*j). Overwrites codes."""
        lanes = codes.view(self.lane)
        upper = self.upper[: len(lanes)]
        for shift, low, high in self.steps:
            np.bitwise_and(lanes, self.lane.type(high), out=upper)
            np.right_shift(upper, self.lane.type(shift), out=upper)
            np.bitwise_and(lanes, self.lane.type(low), out=lanes)
            np.bitwise_or(lanes, upper, out=lanes)
        _as_units(words, self.bytes)[...] = lanes.view(self.low)["x"]

    def split(self, words: Int32Array, codes: UInt8Array) -> None:
        """words (rows, b*j) -> codes (rows, 32*j) bytes of one code each."""
        lanes = codes.view(self.lane)
        if self.bytes == 1:
            np.copyto(lanes, words.view(np.uint8), casting="unsafe")
        else:
            lanes.fill(0)
            lanes.view(self.low)["x"] = _as_units(words, self.bytes)
        upper = self.upper[: len(lanes)]
        for shift, _, high in reversed(self.steps):
            # x + upper * (2^shift - 1) takes the upper field from its place and puts it `shift` bits higher.
            np.bitwise_and(lanes, self.lane.type(high >> shift), out=upper)
            np.multiply(upper, self.lane.type((1 << shift) - 1), out=upper)
            np.add(lanes, upper, out=lanes)


def _as_units(words: Int32Array, size: int) -> npt.NDArray[np.void]:
    return words.view(np.uint8).view(f"V{size}")


def _check_bits(bits: int) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or not 1 <= bits <= 8:
        raise FormatError(f"num_bits: {bits!r} is not an integer from 1 to 8")


def _check_codes(codes: npt.NDArray[Any], bits: int, offset: int) -> None:
    if codes.size == 0 or bits == 8:
        return
    low, high = -offset, (1 << bits) - 1 - offset
    if codes.min() < low or codes.max() > high:
        index = tuple(int(i) for i in np.argwhere((codes < low) | (codes > high))[0])
        raise TensorError(
            f"codes: {int(codes[index])} at {list(index)} is outside {low}..{high}, the codes of "
            f"{bits} bits; packing it would spill into its neighbour"
        )


def _as_rows(array: npt.NDArray[Any], axis: int, name: str) -> tuple[npt.NDArray[Any], _Moved]:
    if not -array.ndim <= axis < array.ndim:
        raise TensorError(f"{name}: axis {axis} does not exist in a tensor of shape {list(array.shape)}")
    moved = np.moveaxis(array, axis, -1)
    rows = np.ascontiguousarray(moved).reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    return rows, (axis, moved.shape[:-1])


def _from_rows(rows: npt.NDArray[_Code], moved: _Moved) -> npt.NDArray[_Code]:
    axis, lead = moved
    return np.ascontiguousarray(np.moveaxis(rows.reshape(*lead, rows.shape[1]), -1, axis))


def _kind(value: object) -> str:
    return f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
