"""What is wrong with the tensors of a layer: from its headers alone, and from its contents.

Headers tell missing and surplus tensors, dtypes, shapes and packed widths. Only the numbers tell scales that
are no numbers, and bits where there should be none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from conformance.checkpoint.folder import Array, Note, Problem, TensorInfo
from conformance.checkpoint.schemes import Scheme
from reference.errors import FormatError
from reference.formats import WeightFormat
from reference.packing import packed_size, tail_bits
from reference.weights import scale_shape

_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Layer:
    """A layer whose headers are well-formed. parts: its tensors by local name (`weight_packed`).
    dtype: of activations and output."""

    name: str
    parts: Mapping[str, TensorInfo]
    scheme: Scheme
    format: WeightFormat
    dtype: str

    @property
    def n(self) -> int:
        return (self.parts["weight_shape"].values or (0, 0))[0]

    @property
    def k(self) -> int:
        return (self.parts["weight_shape"].values or (0, 0))[1]


# ---- headers of one layer


def check_headers(layer: str, parts: Mapping[str, TensorInfo], scheme: Scheme) -> list[Problem]:
    """Missing and surplus tensors, dtypes, shapes and packed widths of a pack-quantized layer."""
    fmt = scheme.weight
    assert fmt is not None
    file = next(iter(parts.values())).file
    problems = []
    needed = ["weight_packed", "weight_scale", "weight_shape"]
    if not fmt.symmetric:
        needed.append("weight_zero_point")
    for part in needed:
        if part not in parts:
            problems.append(Problem(file, f"{layer}.{part}", "the tensor", "none", f"{fmt.name}"))
    optional = {"bias", "weight_g_idx"}
    if scheme.activation is not None and not scheme.activation.dynamic:
        optional |= {"input_scale", "input_zero_point"}
    for part in parts:
        if part not in needed and part not in optional:
            what = f"no such tensor in a layer of {fmt.name}"
            problems.append(Problem(parts[part].file, f"{layer}.{part}", what, str(parts[part])))
    if not problems:
        problems = _check_shapes(layer, parts, fmt)
    return problems


def _check_shapes(layer: str, parts: Mapping[str, TensorInfo], fmt: WeightFormat) -> list[Problem]:
    info = parts["weight_shape"]
    if info.dtype != "I64" or info.shape not in ((2,), (3,)) or info.values is None:
        return [Problem(info.file, f"{layer}.weight_shape", "I64 [2], or [3] for stacked experts", str(info))]
    if min(info.values) < 1:
        return [Problem(info.file, f"{layer}.weight_shape", "positive sizes", str(list(info.values)))]
    *lead, n, k = info.values
    try:
        per_group = scale_shape(fmt, n, k)
        groups = fmt.groups(k)
    except FormatError as error:
        return [Problem(info.file, f"{layer}.weight_shape", f"a K that {fmt.name} can hold", str(error))]
    words = packed_size(k, fmt.bits)
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "weight_packed": (("I32",), (*lead, n, words)),
        "weight_scale": (_FLOATS, (*lead, *per_group)),
        "bias": (_FLOATS, (*lead, n)),
        "weight_g_idx": (("I32",), (*lead, k)),
        "weight_zero_point": (("I32",), (*lead, packed_size(n, fmt.bits), groups)),
    }
    if fmt.strategy == "tensor":
        wanted["weight_zero_point"] = (("I8",), (*lead, *per_group))
    problems = []
    for part, (dtypes, shape) in wanted.items():
        found = parts.get(part)
        if found is None or (found.dtype in dtypes and found.shape == shape):
            continue
        expected = f"{' or '.join(dtypes)} {list(shape)}"
        hint = ""
        if part == "weight_packed":
            hint = _width(found, n, k, words, fmt.bits)
        elif part == "weight_zero_point" and fmt.strategy != "tensor":
            hint = _zero_point(found, n, groups, fmt.bits)
        problems.append(Problem(found.file, f"{layer}.{part}", expected, str(found), hint))
    if "weight_g_idx" in parts and fmt.strategy != "group":
        info = parts["weight_g_idx"]
        problems.append(
            Problem(info.file, f"{layer}.weight_g_idx", f"none: {fmt.name} has no groups", str(info))
        )
    return problems


def _width(found: TensorInfo, n: int, k: int, words: int, bits: int) -> str:
    """What a wrong packed shape may come from."""
    rule = f"ceil({k} * {bits} / 32) = {words} words a row"
    if found.shape[-1:] == (words,) or len(found.shape) < 2:
        return rule
    if found.shape == (k, packed_size(n, bits)) or found.shape == (packed_size(k, bits), n):
        return f"{rule}; it looks transposed, as GPTQ and AWQ store it"
    return "; ".join([rule, *_causes(found.shape[-1], k, bits)])


def _zero_point(found: TensorInfo, n: int, groups: int, bits: int) -> str:
    rule = f"packed along N: ceil({n} * {bits} / 32) = {packed_size(n, bits)} words a group"
    if found.shape[-2:] == (n, groups):
        return f"{rule}; these are not packed"
    if len(found.shape) < 2:
        return rule
    return "; ".join([rule, *_causes(found.shape[-2], n, bits)])


def _causes(words: int, size: int, bits: int) -> list[str]:
    causes = []
    if words == size * bits // 32 < packed_size(size, bits):
        causes.append("found is the floor of it: the last codes of each row are cut off")
    if words == -(-size // (32 // bits)):
        causes.append("found is the width of layout ct-aligned-le-v0, whose codes do not cross words")
    return causes


# ---- contents of one layer


def check_contents(layer: Layer, arrays: Mapping[str, Array]) -> tuple[list[Problem], list[Note]]:
    """What only the numbers tell. arrays: the layer's tensors by local name."""
    fmt, problems, notes = layer.format, [], []

    def fault(part: str, expected: str, found: str) -> None:
        problems.append(Problem(layer.parts[part].file, f"{layer.name}.{part}", expected, found))

    packed = [("weight_packed", layer.k, -1, "row")]
    if not fmt.symmetric and fmt.strategy != "tensor":
        packed.append(("weight_zero_point", layer.n, 0, "group"))
    for part, size, axis, line in packed:
        tails = tail_bits(arrays[part], fmt.bits, size, axis)
        if tails.any():
            used = size * fmt.bits % 32
            first = int(np.argmax(tails != 0))
            fault(
                part,
                f"zeros in bits {used}..31 of the last word of each {line}",
                f"others in {np.count_nonzero(tails)} of {tails.size} {line}s, first {line} {first}",
            )
    for part in ("weight_scale", "bias"):
        if part in arrays:
            finite = np.isfinite(arrays[part].astype(np.float32))
            if not finite.all():
                index = [int(i) for i in np.argwhere(~finite)[0]]
                value = arrays[part][tuple(index)]
                fault(
                    part,
                    "finite numbers",
                    f"{np.count_nonzero(~finite)} that are not, first {value} at {index}",
                )
    scale = arrays["weight_scale"].astype(np.float32)
    if (scale == 0).any():
        notes.append(Note(layer.name, "some scales are zero: their weights are all zero"))
    if (scale < 0).any():
        notes.append(Note(layer.name, "some scales are negative"))
    if "weight_g_idx" in arrays:
        index_of, groups = arrays["weight_g_idx"], fmt.groups(layer.k)
        bad = (index_of < 0) | (index_of >= groups)
        if bad.any():
            where = int(np.argmax(bad))
            fault("weight_g_idx", f"groups 0..{groups - 1}", f"{int(index_of[where])} at [{where}]")
    return problems, notes
