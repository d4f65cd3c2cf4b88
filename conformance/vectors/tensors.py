"""safetensors files of vectors, read and written byte by byte.

Eight bytes of header length, little-endian; the header, one JSON object padded with spaces; the data. What is written
is the same everywhere: tensors in the order of item size, large first, then of name. What is read is checked in full
before an array is made of it, and nothing of it is ever executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from conformance.errors import RunError
from conformance.strictjson import strict_json

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Beyond these a file is no set of vectors, which are small.
MOST_BYTES = 64 << 20
MOST_HEADER_BYTES = 8 << 20
MOST_DIMENSIONS = 8


class VectorError(RunError):
    """A manifest or a file of vectors that is not what it has to be: file, field, remedy."""


def dtype_name(array: Array) -> str:
    """As safetensors spells it. Raises KeyError for a dtype that no vector has."""
    return _NAMES[array.dtype.newbyteorder("<") if array.dtype.kind in "if" else array.dtype]


def read_json(content: bytes, where: str) -> Any:
    """Strict JSON. Raises VectorError naming the place."""
    try:
        return strict_json(content)
    except ValueError as error:
        raise VectorError(f"{where}: it is not strict JSON: {str(error)[:200]}") from error


def encode(tensors: Mapping[str, Array]) -> bytes:
    """The bytes of a file. Raises KeyError for a dtype that no vector has."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, start = {}, 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": dtype_name(array),
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header, separators=(",", ":"), sort_keys=False, ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(tensors[n], DTYPES[dtype_name(tensors[n])]).tobytes() for n in order)
    return len(text).to_bytes(8, "little") + text + data


def decode(content: bytes, file: str) -> dict[str, Array]:
    """The tensors of a file, read-only. Raises VectorError naming the file and the tensor or field at fault."""
    if len(content) > MOST_BYTES:
        raise VectorError(
            f"{file}: {len(content)} bytes; a file of vectors has at most {MOST_BYTES}: it is none"
        )
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, MOST_HEADER_BYTES):
        raise VectorError(
            f"{file}: header length: {length} bytes do not fit into the file of {len(content)}: it is cut off "
            "or no safetensors file; fetch it again"
        )
    where = f"{file}: header"
    header = read_json(content[8 : 8 + length], where)
    if not isinstance(header, dict):
        raise VectorError(f"{where}: expected an object, found {_kind(header)}")
    data = memoryview(content)[8 + length :]
    found: dict[str, Array] = {}
    place = 0
    for name, entry in sorted(header.items(), key=lambda item: _start(item[1])):
        found[name], place = _tensor(f"{where}: {name[:80]!r}", entry, data, place)
    if place != len(data):
        raise VectorError(
            f"{file}: its tensors end at byte {place} of {len(data)}: it is cut off or has more behind them"
        )
    return found


def _start(entry: Any) -> int:
    try:
        start = entry["data_offsets"][0]
    except (TypeError, KeyError, IndexError):
        return -1
    return start if isinstance(start, int) else -1


def _tensor(where: str, entry: Any, data: memoryview, place: int) -> tuple[Array, int]:
    """One tensor, which has to begin at place, and where it ends."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise VectorError(f"{where}: expected dtype, shape and data_offsets, found {_kind(entry)}")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise VectorError(f"{where}: dtype: {_kind(entry['dtype'])} is none of {', '.join(DTYPES)}")
    shape = sizes(f"{where}: shape", entry["shape"])
    offsets = entry["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(o) for o in offsets)):
        raise VectorError(f"{where}: data_offsets: expected two places, found {_kind(offsets)}")
    start, end = offsets
    if start != place:
        raise VectorError(f"{where}: data_offsets: it begins at {start}, the one before it ends at {place}")
    needed = math.prod(shape) * dtype.itemsize
    if end - start != needed or end > len(data):
        raise VectorError(
            f"{where}: {entry['dtype']} {list(shape)} takes {needed} bytes; data_offsets are {start}..{end} of "
            f"{len(data)}"
        )
    raw = data[start:end]
    if dtype == np.bool_ and any(byte > 1 for byte in raw.tobytes()):
        raise VectorError(f"{where}: BOOL: a byte is neither 0 nor 1")
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array, end


def sizes(where: str, value: Any) -> tuple[int, ...]:
    """A shape. Raises VectorError for what is none."""
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS or not all(_is_size(n) for n in value):
        raise VectorError(f"{where}: expected up to {MOST_DIMENSIONS} sizes, found {_kind(value)}")
    return tuple(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES


def _kind(value: Any) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
