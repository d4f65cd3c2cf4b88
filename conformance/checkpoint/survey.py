"""Which layers a checkpoint has, and which of them can be judged: from headers, nothing large is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from conformance.checkpoint.folder import CONFIG, Folder, Note, Problem, TensorInfo
from conformance.checkpoint.schemes import PACKED, Scheme, Schemes
from conformance.checkpoint.wellformed import Layer, check_headers

# A tensor of one of these names makes its module a quantized layer.
_MARKS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_PACKED_LAYER = ("weight_packed", "weight_shape", "weight_g_idx")
_DTYPE_NAMES = {"BF16": "bf16", "F16": "fp16"}


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
    for group, targets in schemes.by_group.items() if layers else ():
        for target in targets.idle(layers):
            folder.notes.append(
                Note(f"config_groups.{group}", f"its target {target!r} matches no layer of the files")
            )


def _split(name: str) -> tuple[str, str]:
    layer, _, part = name.rpartition(".")
    return layer, part
