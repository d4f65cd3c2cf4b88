"""What was judged, on disk while a run goes on: `<report>.part`.

The first line says what the run was asked for, of what code and where it runs, each other one is a verdict as it was
judged, before waivers. A run that is cut off leaves the file; `--resume` goes on from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.backend import known_backends
from conformance.errors import RunError
from conformance.verdict import Verdict

VERSION = "quantcts-journal/1"
# Of the environment, what a verdict can depend on
_SAME = ("python", "processor", "specification", "packages", "backends", "gpus")
_OURS = ("conformance", "reference", "cuda_kernels")
_SOURCES = (".py", ".cu", ".cuh", ".json", ".ini")


@dataclass(frozen=True)
class Begun:
    """What a run that was cut off has left. verdicts: as they were judged. length: bytes of the file that are whole."""

    path: Path
    head: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]
    length: int

    @property
    def done(self) -> set[tuple[str, str]]:
        """Case and backend of each verdict."""
        return {(v.case, v.backend) for v in self.verdicts}

    def check(self, head: Mapping[str, Any]) -> None:
        """head: of the run that is to go on. Raises RunError where it is another one."""
        was, now = _compared(self.head), _compared(json.loads(json.dumps(head)))
        for name in sorted(was.keys() | now.keys()):
            if was.get(name) != now.get(name):
                raise RunError(
                    f"{self.path}: {name}: {_told(was.get(name))} when the run began, {_told(now.get(name))} now; "
                    "start anew without --resume"
                )


def _compared(head: Mapping[str, Any]) -> dict[str, Any]:
    environment = head["environment"]
    return {**head["selection"], **head["asked"], **{name: environment.get(name) for name in _SAME}}


def _told(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def code_of(specs: Mapping[str, str]) -> dict[str, str]:
    """Digests of what judges and of what is judged, as far as that is a file: `quantcts`, and backend -> its module.

    specs: backend -> how it was asked for.
    """
    home = Path(__file__).resolve().parents[2]
    ours = (p for folder in _OURS for p in sorted((home / folder).rglob("*")) if p.suffix in _SOURCES)
    found = {"quantcts": _digest(ours)}
    for name, spec in specs.items():
        place = known_backends().get(spec, spec).rpartition(":")[0]
        if place.endswith(".py"):
            file: str | None = place
        else:
            module = importlib.util.find_spec(place)
            file = module.origin if module is not None else None
        found[name] = _digest([Path(file)]) if file and Path(file).is_file() else "unknown"
    return found


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def part_of(report: Path) -> Path:
    """Where the journal of a report lies."""
    return Path(f"{report}.part")


def read_journal(path: Path, length: int | None = None) -> Begun:
    """length: bytes to read, all where it is not given. A last line that is not whole was being written when the run
    ended, and does not count. Raises RunError naming the file and the line."""
    try:
        content = path.read_bytes()[:length]
    except FileNotFoundError:
        raise RunError(f"--resume: {path} is not there: no run with this --report was cut off") from None
    except OSError as error:
        raise RunError(f"--resume: {path}: {error.strerror}") from error
    length = content.rfind(b"\n") + 1
    if not length:
        raise RunError(f"--resume: {path}: its first line is not whole; remove the file and start anew")
    head: dict[str, Any] = {}
    verdicts = []
    for number, line in enumerate(content[:length].splitlines(), 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("it is no object")
            if number == 1:
                head = _head(record)
            else:
                verdicts.append(Verdict.from_json(record))
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"--resume: {path}: line {number}: {error}; remove the file and start anew"
            ) from error
    return Begun(path, head, tuple(verdicts), length)


def _head(record: dict[str, Any]) -> dict[str, Any]:
    if record.get("journal") != VERSION:
        raise ValueError(f"it is of {record.get('journal', 'no journal')}, this is {VERSION}")
    for name, kind in (("started", str), ("selection", dict), ("asked", dict), ("environment", dict)):
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{name}: missing, or no {kind.__name__}")
    return record


class Journal:
    """head: what the run was asked for. begun: the run that goes on. Raises RunError for a place that cannot be written
    to, and for one to which another run writes."""

    def __init__(self, path: Path, head: Mapping[str, Any], begun: Begun | None = None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"--report: {path}: another run writes there; wait for it, or end it") from error
        except OSError as error:
            raise RunError(f"--report: {path}: it cannot be written there: {error.strerror}") from error
        os.truncate(path, begun.length if begun is not None else 0)
        if begun is None:
            self._line({"journal": VERSION, **head})

    def write(self, verdict: Verdict) -> None:
        self._line(verdict.to_json())

    def _line(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self, *, served: bool = True) -> None:
        """served: the report is whole, and the journal not needed any more."""
        if served:
            self.path.unlink(missing_ok=True)
        self._file.close()
