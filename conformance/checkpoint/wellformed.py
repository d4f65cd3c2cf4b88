"""What is wrong with the layers of a checkpoint: from headers alone, and from the contents of one layer.

`survey` sorts every layer of a folder by its header entries; nothing large is read. `check_contents` looks at
what only the numbers tell: scales that are no number, bits where there should be none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from conformance.checkpoint.folder import CONFIG, Array, Folder, Note, Problem, TensorInfo
from conformance.checkpoint.schemes import PACKED, Scheme, Schemes
from reference.errors import FormatError
from reference.formats import WeightFormat
from reference.packing import packed_size, tail_bits
from reference.weights import scale_shape

# A tensor of one of these names makes its module a quantized layer.
_MARKS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_PACKED_LAYER = ("weight_packed", "weight_shape", "weight_g_idx")
_FLOATS = ("BF16", "F16", "F32")
_DTYPE_NAMES = {"BF16": "bf16", "F16": "fp16"}


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


@dataclass
class Survey:
    """sound: layers to read and to judge. malformed: problems by layer; other problems are the folder's.
    unjudged: layers that are stated and left alone. plain: matrices that are not quantized. ignored: those
    that the ignore list covers."""

    sound: list[Layer] = field(default_factory=list)
    malformed: dict[str, list[Problem]] = field(default_factory=lambda: defaultdict(list))
    unjudged: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    formats: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def quantized(self) -> int:
        return len(self.sound) + len(self.malformed) + len(self.unjudged) + len(self.unreadable)


def layer_names(folder: Folder) -> list[str]:
    """Modules that own a tensor of a quantized layer, readable or not, in the order of the files."""
    owners = (_split(name) for name in (*folder.tensors, *sorted(folder.unreadable)))
    return list(dict.fromkeys(layer for layer, part in owners if part in _MARKS))


def survey(folder: Folder, schemes: Schemes, chosen: Callable[[str], bool]) -> Survey:
    """Sort the layers by their headers. chosen: whether a quantized layer is asked for."""
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in folder.tensors.items():
        layer, part = _split(name)
        parts[layer][part] = info
    lost = {_split(name)[0] for name in folder.unreadable}
    found = Survey()
    quantized = layer_names(folder)
    for layer in filter(chosen, quantized):
        if layer in lost:
            found.unreadable.append(layer)
        else:
            _sort(folder, schemes, found, layer, parts[layer])
    known = set(quantized)
    found.plain = [
        layer
        for layer, own in parts.items()
        if "weight" in own and len(own["weight"].shape) >= 2 and layer not in known
    ]
    for layer in found.plain:
        if schemes.ignore.named(layer) is not None:
            found.ignored.append(layer)
        elif chosen(layer):
            _check_plain(folder, schemes, layer, parts[layer]["weight"])
    _note_idle(folder, schemes, [*quantized, *found.plain])
    return found


def _sort(
    folder: Folder, schemes: Schemes, found: Survey, layer: str, parts: Mapping[str, TensorInfo]
) -> None:
    """Put one quantized layer in its place."""
    anchor = next(p for p in _MARKS if p in parts)
    file = parts[anchor].file
    scheme = schemes.targets.of(layer)
    packed = any(p in parts for p in _PACKED_LAYER)
    ignoring = schemes.ignore.of(layer)
    problems = found.malformed[layer] = []
    if ignoring is not None:
        what = f"no quantized tensors: {CONFIG} ignores {ignoring!r}"
        problems.append(Problem(file, f"{layer}.{anchor}", what, str(parts[anchor])))
    if scheme is None:
        what = "a config group with weights that targets the layer"
        problems.append(Problem(file, f"{layer}.{anchor}", what, f"none in {CONFIG}"))
        found.formats["no format"] += 1
        return
    if not scheme.packed and not packed:
        found.formats[scheme.storage] += 1
        folder.notes.append(Note(layer, f"format {scheme.storage} ({scheme.group}): stated, not judged"))
        del found.malformed[layer]
        found.unjudged.append(layer)
        return
    if not scheme.packed:
        what = f"the tensors of format {scheme.storage} ({scheme.group})"
        problems.append(Problem(file, f"{layer}.{anchor}", what, f"those of {PACKED}"))
        found.formats[scheme.storage] += 1
        return
    if scheme.weight is None or scheme.activation is None:
        what = f"a config group {scheme.group} that can be read"
        problems.append(Problem(file, f"{layer}.{anchor}", what, f"a faulty one in {CONFIG}"))
        found.formats["no format"] += 1
        return
    found.formats[scheme.weight.name + _inputs(scheme)] += 1
    problems += check_headers(layer, parts, scheme)
    if problems:
        return
    del found.malformed[layer]
    if len(parts["weight_packed"].shape) == 3:
        folder.notes.append(Note(layer, "stacked experts: well-formed by their headers, not judged yet"))
        found.unjudged.append(layer)
        return
    dtype = _DTYPE_NAMES.get(parts["weight_scale"].dtype, folder.dtype)
    found.sound.append(Layer(layer, parts, scheme, scheme.weight, dtype))


def _inputs(scheme: Scheme) -> str:
    quantized = scheme.activation is not None and scheme.activation.kind != "a16"
    return f" {scheme.activation.name}" if quantized and scheme.activation else ""


def _check_plain(folder: Folder, schemes: Schemes, layer: str, info: TensorInfo) -> None:
    """A plain matrix that a group targets by name. Classes say nothing here: an embedding has one too."""
    scheme = schemes.targets.named(layer)
    if scheme is not None and scheme.packed:
        what = f"{layer}.weight_packed, as config group {scheme.group} targets the layer"
        hint = "quantize it, or list it under ignore"
        folder.fault(info.file, f"{layer}.weight", what, f"a plain {info}", hint)


def _note_idle(folder: Folder, schemes: Schemes, layers: list[str]) -> None:
    for group, targets in schemes.by_group.items():
        for target in targets.idle(layers):
            folder.notes.append(
                Note(f"config_groups.{group}", f"its target {target!r} matches no layer of the files")
            )


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


def _split(name: str) -> tuple[str, str]:
    layer, _, part = name.rpartition(".")
    return layer, part
