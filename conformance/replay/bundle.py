"""A bundle: a folder with a failing case, what it was asked, what was right, what came back.

    bundle.json             the case, the backend and its promise, the verdict, from what it is judged, and the
                            SHA-256 of each of the tensor files
    environment.json        versions, device, libraries
    inputs.safetensors      what the backend was given, by the roles of docs/vectors.md
    control.safetensors     of bad data: the same without the defect
    expected.safetensors    what is right and its bound: y, low, high; several entries as `0.y`, `1.y`
    actual.safetensors      what came back, where anything did
    repeat.py               the same call with the backend alone
    shrunken/               the same of the smallest case that still fails

Nothing of it is executed when it is read, and everything is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from conformance.cases import Case
from conformance.errors import RunError
from conformance.replay.named import case_of, to_json
from conformance.strictjson import strict_json
from conformance.vectors.bounded import Alternative
from conformance.vectors.contracts import CONTRACTS
from conformance.vectors.document import Entry
from conformance.vectors.tensors import MOST_BYTES, VectorError, decode, encode
from conformance.verdict import FAILING
from reference.bounds import Contract
from reference.errors import FormatError

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

SCHEMA_VERSION = "quantcts-bundle/1"
DOCUMENT, ENVIRONMENT, SCRIPT, SHRUNKEN = "bundle.json", "environment.json", "repeat.py", "shrunken"
_AGAIN = "write it anew with `quantcts run --bundles DIR`"
_MOST_JSON_BYTES = 4 << 20


class BundleError(RunError):
    """A bundle that is not what it has to be: file, field, remedy."""


@dataclass(frozen=True)
class Bundle:
    """contract: of the backend for the case. outcome, detail: of the verdict. format: beyond what the case says.

    complete: whether expected says all that is right, so that the oracle is not needed. Where it is not, the case's
    recipe makes the expectation again: of checks of conduct, of ranks, and where single codes or selections are open.
    step: of a case of several steps that which failed.
    """

    case: Case
    backend: str
    spec: str
    contract: Contract
    outcome: str
    detail: str
    complete: bool
    format: dict[str, Any]
    inputs: Tensors
    control: Tensors = field(default_factory=dict)
    expected: tuple[Entry, ...] = ()
    actual: Tensors = field(default_factory=dict)
    fault: str = ""
    step: str = ""
    reason: str = ""
    path: Path = Path()

    @property
    def shrunken(self) -> Path | None:
        place = self.path / SHRUNKEN
        return place if (place / DOCUMENT).is_file() else None


def write_bundle(folder: Path, bundle: Bundle, environment: Mapping[str, Any], script: str) -> None:
    """Write beside, then rename: a bundle is whole or absent. One that is there already is replaced."""
    parts = {
        "inputs": bundle.inputs,
        "control": bundle.control,
        "expected": _joined(bundle.expected),
        "actual": bundle.actual,
    }
    tensors = {f"{name}.safetensors": encode(arrays) for name, arrays in parts.items() if arrays}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in tensors.items()}
    files = {
        DOCUMENT: _text({**_document(bundle), "sha256": digests}),
        ENVIRONMENT: _text(environment),
        SCRIPT: script.encode(),
        **tensors,
    }
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        for name, content in files.items():
            (beside / name).write_bytes(content)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _document(bundle: Bundle) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "case": to_json(bundle.case),
        "backend": {"name": bundle.backend, "spec": bundle.spec, "contract": asdict(bundle.contract)},
        "verdict": {
            "outcome": bundle.outcome, "detail": bundle.detail, "fault": bundle.fault, "step": bundle.step
        },
        "complete": bundle.complete,
        "format": bundle.format,
        "reason": bundle.reason,
        "expected": [
            {
                "alternatives": [{"name": a.name, "exact": a.exact} for a in entry.alternatives],
                "rank": entry.rank,
                "intermediate": entry.intermediate,
            }
            for entry in bundle.expected
        ],
    }  # fmt: skip


def _joined(entries: Sequence[Entry]) -> Tensors:
    several = len(entries) > 1
    return {
        f"{number}.{role}" if several else role: array
        for number, entry in enumerate(entries)
        for role, array in entry.tensors.items()
    }


def is_bundle(folder: Path) -> bool:
    return (folder / DOCUMENT).is_file()


def open_bundle(folder: Path) -> Bundle:
    """Raises BundleError naming file, field and remedy."""
    if not is_bundle(folder):
        raise BundleError(f"{folder}: no bundle is there; name a folder that holds {DOCUMENT}")
    place = folder / DOCUMENT
    document = _object(place, "the document", _json(place))
    if document.get("schema") != SCHEMA_VERSION:
        found = str(document.get("schema"))[:60]
        raise BundleError(f"{place}: schema: expected {SCHEMA_VERSION!r}, found {found!r}; {_AGAIN}")
    try:
        case = case_of(_object(place, "case", document.get("case")))
    except ValueError as error:
        raise BundleError(f"{place}: case/{error}; {_AGAIN}") from error
    backend = _object(place, "backend", document.get("backend"))
    verdict = _object(place, "verdict", document.get("verdict"))
    outcome = _string(place, "verdict/outcome", verdict.get("outcome"))
    if outcome not in [known.value for known in FAILING]:
        raise BundleError(f"{place}: verdict/outcome: {outcome[:40]!r} is no failure; {_AGAIN}")
    if not isinstance(document.get("complete"), bool):
        raise BundleError(f"{place}: complete: it is missing, or no true or false; {_AGAIN}")
    entries = document.get("expected")
    if not isinstance(entries, list):
        raise BundleError(f"{place}: expected: it is missing, or no list; {_AGAIN}")
    digests = _object(place, "sha256", document.get("sha256"))
    parts = {
        name: _tensors(folder / f"{name}.safetensors", digests.get(f"{name}.safetensors"))
        for name in ("inputs", "control", "expected", "actual")
    }
    return Bundle(
        case,
        _string(place, "backend/name", backend.get("name")),
        _string(place, "backend/spec", backend.get("spec")),
        _contract(place, backend.get("contract")),
        outcome,
        _string(place, "verdict/detail", verdict.get("detail")),
        document["complete"],
        _object(place, "format", document.get("format")),
        parts["inputs"],
        parts["control"],
        tuple(_entries(place, entries, parts["expected"])),
        parts["actual"],
        _string(place, "verdict/fault", verdict.get("fault")),
        _string(place, "verdict/step", verdict.get("step")),
        _string(place, "reason", document.get("reason")),
        folder,
    )


def _json(place: Path) -> Any:
    try:
        if place.stat().st_size > _MOST_JSON_BYTES:
            raise BundleError(f"{place}: more than {_MOST_JSON_BYTES} bytes: it is no bundle's; {_AGAIN}")
        return strict_json(place.read_bytes())
    except OSError as error:
        raise BundleError(f"{place}: {error.strerror}; {_AGAIN}") from error
    except ValueError as error:
        raise BundleError(f"{place}: it is not strict JSON: {str(error)[:200]}; {_AGAIN}") from error


def _tensors(path: Path, digest: Any) -> Tensors:
    """None at all where there is no file, and there need be none. digest: what bundle.json says of it."""
    try:
        if not path.exists() and digest is None:
            return {}
        if path.stat().st_size > MOST_BYTES:
            raise BundleError(f"{path}: more than {MOST_BYTES} bytes: it is no bundle's; {_AGAIN}")
        content = path.read_bytes()
        found = decode(content, str(path))
        if hashlib.sha256(content).hexdigest() != digest:
            raise BundleError(f"{path}: it is not what the bundle was written with (sha256); {_AGAIN}")
        return found
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; {_AGAIN}") from error
    except VectorError as error:
        raise BundleError(f"{error}; {_AGAIN}") from error


def _entries(place: Path, records: list[Any], tensors: Tensors) -> list[Entry]:
    """The alternatives were made under the backend's promise: under whichever name, it is the same one."""
    found = []
    for number, record in enumerate(records):
        where = f"expected/{number}"
        record = _object(place, where, record)
        alternatives = record.get("alternatives")
        if not isinstance(alternatives, list) or not alternatives:
            raise BundleError(f"{place}: {where}/alternatives: it is missing, or no list; {_AGAIN}")
        own = []
        for alternative in alternatives:
            alternative = _object(place, f"{where}/alternatives", alternative)
            name = _string(place, f"{where}/alternatives/name", alternative.get("name"))
            own.append(Alternative(name, tuple(CONTRACTS), alternative.get("exact") is True))
        numbers = [record.get(name) for name in ("rank", "intermediate")]
        if any(n is not None and (type(n) is not int or n < 0) for n in numbers):
            raise BundleError(f"{place}: {where}: rank or intermediate is no number from 0; {_AGAIN}")
        prefix = f"{number}." if len(records) > 1 else ""
        roles = {name.removeprefix(prefix): a for name, a in tensors.items() if name.startswith(prefix)}
        found.append(Entry(tuple(own), roles, *numbers))
    return found


def _contract(place: Path, record: Any) -> Contract:
    try:
        return Contract(**_object(place, "backend/contract", record))
    except (TypeError, FormatError) as error:
        raise BundleError(f"{place}: backend/contract: {error}; {_AGAIN}") from error


def _object(place: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BundleError(f"{place}: {name}: it is missing, or no object; {_AGAIN}")
    return value


def _string(place: Path, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BundleError(f"{place}: {name}: it is missing, or no text; {_AGAIN}")
    return value
