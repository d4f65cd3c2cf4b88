"""manifest.json: what a folder of vectors holds, checked whole before anything of it is used.

A set is read in full or not at all: every file has the bytes and the SHA-256 that the manifest names, every reference
the tensor, dtype and shape that the file has, every tensor a reference. Errors name file, field and remedy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy.typing as npt

from conformance.vectors.bounded import Alternative
from conformance.vectors.tensors import MOST_BYTES, VectorError, decode, dtype_name, read_json

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

SCHEMA_VERSION = "quantcts-vectors/1"
MANIFEST = "manifest.json"
SCHEMA = "schema.json"
_AGAIN = "fetch the set again, or write it anew with `nox -s fixtures`"


@dataclass(frozen=True)
class Entry:
    """An entry of `expected`. rank, intermediate: of a shard. tensors by role."""

    alternatives: tuple[Alternative, ...]
    tensors: Tensors
    rank: int | None = None
    intermediate: int | None = None


@dataclass(frozen=True)
class Vector:
    """One vector, its tensors by role. reason, control: of an invalid one."""

    id: str
    operation: str
    valid: bool
    format: dict[str, Any]
    clauses: tuple[str, ...]
    flags: tuple[str, ...]
    inputs: Tensors
    expected: tuple[Entry, ...]
    control: Tensors
    reason: str
    place: str


@dataclass(frozen=True)
class VectorSet:
    """version: of the set. digest: SHA-256 of the manifest, which stands for all of it."""

    path: Path
    version: str
    digest: str
    contracts: dict[str, dict[str, Any]]
    flags: dict[str, dict[str, Any]]
    vectors: dict[str, Vector]


def schema() -> dict[str, Any]:
    """The JSON Schema of manifest.json."""
    loaded: dict[str, Any] = json.loads((files("conformance.vectors") / SCHEMA).read_text("utf-8"))
    return loaded


@cache
def _validator() -> Any:
    return jsonschema.Draft202012Validator(schema())


def open_set(path: Path, checked: str = "") -> VectorSet:
    """Read a folder of vectors. Raises VectorError for whatever is not as the manifest says.

    checked: the digest of a manifest whose form has been looked at before, which takes most of the time.
    """
    if not path.is_dir():
        raise VectorError(f"{path}: there is no such folder; --vectors names the one that holds {MANIFEST}")
    content = _read(path / MANIFEST)
    digest = hashlib.sha256(content).hexdigest()
    document = read_json(content, str(path / MANIFEST))
    if digest != checked:
        _check_form(path / MANIFEST, document)
    tensors = {
        name: decode(_whole(path / name, entry), str(path / name))
        for name, entry in document["files"].items()
    }
    stray = sorted(p.name for p in path.glob("*.safetensors") if p.name not in tensors)
    if stray:
        raise VectorError(
            f"{path / stray[0]}: {MANIFEST} does not list it under files; remove it, or {_AGAIN}"
        )
    reader = _Reader(path, document, tensors)
    vectors: dict[str, Vector] = {}
    for number, record in enumerate(document["vectors"]):
        if record["id"] in vectors:
            raise VectorError(
                f"{path / MANIFEST}: vectors/{number}/id: {record['id']} stands there twice; {_AGAIN}"
            )
        vectors[record["id"]] = reader.vector(record)
    reader.check_all_used()
    return VectorSet(path, document["version"], digest, document["contracts"], document["flags"], vectors)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise VectorError(
                f"{path}: {size} bytes; a set of vectors has at most {MOST_BYTES} a file: it is none"
            )
        return path.read_bytes()
    except OSError as error:
        raise VectorError(f"{path}: {error.strerror}; {_AGAIN}") from error


def _check_form(path: Path, document: Any) -> None:
    version = document.get("schema") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise VectorError(
            f"{path}: schema: expected {SCHEMA_VERSION!r}, found {str(version)[:60]!r}; {_AGAIN}"
        )
    try:
        fault = next(iter(_validator().iter_errors(document)), None)
    except RecursionError as error:
        raise VectorError(f"{path}: it is nested too deeply; {_AGAIN}") from error
    if fault is not None:
        place = "/".join(str(p)[:80] for p in fault.absolute_path) or "the document"
        raise VectorError(f"{path}: {place}: {fault.message[:200]}; {_AGAIN}")


def _whole(path: Path, entry: Mapping[str, Any]) -> bytes:
    content = _read(path)
    if len(content) != entry["bytes"]:
        raise VectorError(f"{path}: it has {len(content)} bytes, {MANIFEST} says {entry['bytes']}; {_AGAIN}")
    found = hashlib.sha256(content).hexdigest()
    if found != entry["sha256"]:
        raise VectorError(
            f"{path}: its SHA-256 is {found[:16]}..., {MANIFEST} says {entry['sha256'][:16]}...; {_AGAIN}"
        )
    return content


class _Reader:
    """From records of the manifest to vectors."""

    def __init__(self, path: Path, document: Mapping[str, Any], tensors: Mapping[str, Tensors]) -> None:
        self.path, self.document, self.tensors = path / MANIFEST, document, tensors
        self.used: set[tuple[str, str]] = set()

    def vector(self, record: Mapping[str, Any]) -> Vector:
        place = f"{self.path}: {record['id']}"
        for name, known in (("flags", self.document["flags"]),):
            unknown = [entry for entry in record[name] if entry not in known]
            if unknown:
                raise VectorError(f"{place}: {name}: {unknown[0]!r} is not explained under {name}; {_AGAIN}")
        file = record["file"]
        if file not in self.tensors:
            raise VectorError(f"{place}: file: {file!r} is not listed under files; {_AGAIN}")
        return Vector(
            record["id"],
            record["operation"],
            record["result"] == "valid",
            record["format"],
            tuple(record["clauses"]),
            tuple(record["flags"]),
            self._tensors(f"{place}: inputs", file, record["inputs"]),
            tuple(self._entries(place, file, record.get("expected", ()))),
            self._tensors(f"{place}: control", file, record.get("control", {})),
            record.get("reason", ""),
            place,
        )

    def _entries(self, place: str, file: str, entries: Any) -> Iterator[Entry]:
        for number, entry in enumerate(entries):
            here = f"{place}: expected/{number}"
            found = []
            for alternative in entry["alternatives"]:
                unknown = [c for c in alternative["contracts"] if c not in self.document["contracts"]]
                if unknown:
                    raise VectorError(
                        f"{here}: contracts: {unknown[0]!r} is not listed under contracts; {_AGAIN}"
                    )
                found.append(
                    Alternative(alternative["name"], tuple(alternative["contracts"]), alternative["exact"])
                )
            tensors = self._tensors(f"{here}: tensors", file, entry["tensors"])
            yield Entry(tuple(found), tensors, entry.get("rank"), entry.get("intermediate"))

    def _tensors(self, place: str, file: str, roles: Mapping[str, Mapping[str, Any]]) -> Tensors:
        found = {}
        for role, said in roles.items():
            array = self.tensors[file].get(said["tensor"])
            if array is None:
                raise VectorError(f"{place}/{role}: {file} has no tensor {said['tensor'][:80]!r}; {_AGAIN}")
            there = {"dtype": dtype_name(array), "shape": list(array.shape)}
            for name, value in there.items():
                if said[name] != value:
                    raise VectorError(
                        f"{place}/{role}/{name}: {said[name]} here, {value} in {file}; {_AGAIN}"
                    )
            self.used.add((file, said["tensor"]))
            found[role] = array
        return found

    def check_all_used(self) -> None:
        for file, tensors in self.tensors.items():
            for name in tensors:
                if (file, name) not in self.used:
                    raise VectorError(
                        f"{self.path.parent / file}: {name[:80]!r}: no vector refers to it; {_AGAIN}"
                    )


def text_of(document: Mapping[str, Any]) -> bytes:
    """The manifest as bytes: a vector a line, so that two sets can be compared line by line."""
    head = {name: value for name, value in document.items() if name != "vectors"}
    vectors = ",\n".join(f"  {json.dumps(vector, separators=(',', ':'))}" for vector in document["vectors"])
    start = json.dumps(head, indent=1).removesuffix("}").rstrip()
    return f'{start},\n "vectors": [\n{vectors}\n ]\n}}\n'.encode("ascii")
