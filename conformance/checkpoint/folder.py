"""What a checkpoint folder holds, from config.json, the index and the headers of its safetensors files.

No weight is read here but the two or three numbers of each `weight_shape`. Files are opened for one layer and
closed again, so that pages of earlier layers do not pile up in memory. What is wrong is noted, not raised:
a folder with ten faults reports ten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy learns bfloat16 from it)
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from conformance.errors import RunError
from conformance.strictjson import strict_json

Array = npt.NDArray[Any]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


class Unreadable(Exception):
    """A file that could be read a moment ago and no longer can."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what the format asks for, what is there, what it may come from."""

    file: str
    tensor: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.file}: {self.tensor}" if self.tensor else self.file
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}: expected {self.expected}, found {self.found}{hint}"


@dataclass(frozen=True)
class Note:
    """Something a reader should know that is no fault. Notes of the same text are shown as one."""

    subject: str
    text: str


@dataclass(frozen=True)
class TensorInfo:
    """A header entry. dtype: as safetensors spells it (I32, BF16). values: those of a small integer
    `weight_shape`, else None."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass
class Folder:
    """path: the folder. config: its `quantization_config`. dtype: `bf16` or `fp16`, what the model computes
    in where scales do not say. tensors: every readable header entry by name. unreadable: names that the
    index promises in a file that cannot be read: nothing can be said of their layers."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    files: list[str] = field(default_factory=list)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Tensors by name, each file opened once and closed. Raises Unreadable when a file has changed."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.tensors[name].file].append(name)
        arrays: dict[str, Array] = {}
        for file, own in by_file.items():
            try:
                with safe_open(self.path / file, framework="np") as handle:
                    arrays |= {name: np.asarray(handle.get_tensor(name)) for name in own}
            except (SafetensorError, OSError) as error:
                raise Unreadable(f"{file}: it changed while it was read: {error}") from error
        return arrays

    def fault(self, file: str, tensor: str, expected: str, found: str, hint: str = "") -> None:
        self.problems.append(Problem(file, tensor, expected, found, hint))


def open_folder(path: Path) -> Folder:
    """Read a folder's configuration and headers. Raises RunError when it is no checkpoint folder at all."""
    if not path.is_dir():
        raise RunError(f"{path}: there is no such folder")
    found = sorted(p.name for p in path.glob("*.safetensors"))
    if not found and not (path / CONFIG).exists():
        raise RunError(
            f"{path}: it holds neither {CONFIG} nor a safetensors file: it is no checkpoint folder"
        )
    folder = Folder(path)
    _read_config(folder)
    promised = _read_index(folder)
    if promised is None:
        _read_files(folder, found)
    else:
        _read_promised(folder, found, promised)
    return folder


# ---- config.json


def _read_config(folder: Folder) -> None:
    document = _json_object(folder, CONFIG)
    if document is None:
        return
    named = document.get("dtype", document.get("torch_dtype"))
    if named in ("float16", "half", "torch.float16"):
        folder.dtype = "fp16"
    config = document.get("quantization_config")
    if not isinstance(config, dict):
        found = "none" if config is None else _kind(config)
        folder.fault(CONFIG, "quantization_config", "an object", found, "it is no quantized checkpoint")
        return
    method = config.get("quant_method")
    if method != "compressed-tensors":
        folder.fault(CONFIG, "quantization_config.quant_method", "'compressed-tensors'", repr(method))
        return
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        folder.fault(CONFIG, "quantization_config.config_groups", "one or more config groups", _kind(groups))
        return
    status = config.get("quantization_status")
    if status not in (None, "compressed"):
        folder.notes.append(
            Note(
                "quantization_config.quantization_status", f"{status!r}; a stored checkpoint is 'compressed'"
            )
        )
    folder.config = config


def _json_object(folder: Folder, name: str) -> dict[str, Any] | None:
    try:
        document = strict_json((folder.path / name).read_bytes())
    except OSError as error:
        folder.fault(name, "", "a file", error.strerror or "an unreadable one")
        return None
    except ValueError as error:
        folder.fault(name, "", "JSON", f"something else: {error}")
        return None
    if not isinstance(document, dict):
        folder.fault(name, "", "a JSON object", _kind(document))
        return None
    return document


def _kind(value: object) -> str:
    if value is None:
        return "none"
    return f"{type(value).__name__} {str(value)[:40]!r}"


# ---- the index and the safetensors files


def _read_index(folder: Folder) -> dict[str, str] | None:
    """Tensor -> file as the index promises, or None where there is no index that can be used."""
    if not (folder.path / INDEX).exists():
        return None
    document = _json_object(folder, INDEX)
    if document is None:
        return None
    entries = document.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        folder.fault(INDEX, "weight_map", "an object: tensor name -> file name", _kind(entries))
        return None
    promised = {}
    for name, file in entries.items():
        if isinstance(file, str) and Path(file).name == file and file:
            promised[name] = file
        else:
            folder.fault(INDEX, f"weight_map[{name!r}]", "the name of a file in this folder", repr(file))
    return promised


def _read_files(folder: Folder, found: list[str]) -> None:
    """No index: every safetensors file of the folder counts."""
    if not found:
        folder.fault("model.safetensors", "", "a safetensors file", "none in the folder")
    if len(found) > 1 and not (folder.path / INDEX).exists():
        folder.fault(INDEX, "", f"an index over the {len(found)} safetensors files", "none in the folder")
    for file in found:
        for name, info in (_header(folder, file) or {}).items():
            if name in folder.tensors:
                folder.fault(file, name, "each tensor once", f"it in {folder.tensors[name].file} as well")
            else:
                folder.tensors[name] = info


def _read_promised(folder: Folder, found: list[str], promised: dict[str, str]) -> None:
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in promised.items():
        by_file[file].append(name)
    for file, names in sorted(by_file.items()):
        header = _header(folder, file, f"the {len(names)} tensors that {INDEX} places there")
        if header is None:
            folder.unreadable.update(names)
            continue
        for name in names:
            if name in header:
                folder.tensors[name] = header[name]
            else:
                folder.unreadable.add(name)
                folder.fault(file, name, f"the tensor that {INDEX} places there", "no such tensor")
        for name in header:
            if promised.get(name) != file:
                there = (
                    f"an index that places it in {promised[name]}" if name in promised else "no such entry"
                )
                folder.fault(file, name, f"an entry in {INDEX}", there)
    for file in sorted(set(found) - set(by_file)):
        folder.notes.append(Note(file, f"not in {INDEX}, so no loader reads it"))


def _header(folder: Folder, file: str, wanted: str = "a safetensors file") -> dict[str, TensorInfo] | None:
    entries = {}
    try:
        with safe_open(folder.path / file, framework="np") as handle:
            for name in handle.keys():  # noqa: SIM118  (the handle is no dict)
                view = handle.get_slice(name)
                dtype, shape = str(view.get_dtype()), tuple(int(n) for n in view.get_shape())
                values = None
                if name.endswith(".weight_shape") and dtype in ("I64", "I32") and shape in ((2,), (3,)):
                    values = tuple(int(n) for n in handle.get_tensor(name))
                entries[name] = TensorInfo(file, dtype, shape, values)
    except FileNotFoundError:
        folder.fault(file, "", wanted, "no such file")
        return None
    except (SafetensorError, OSError) as error:
        folder.fault(file, "", "a whole safetensors file", f"one that cannot be read: {error}")
        return None
    folder.files.append(file)
    return entries
