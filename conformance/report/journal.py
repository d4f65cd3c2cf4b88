"""What was judged, on disk while a run goes on: `<report>.part`.

The first line says what the run was asked for and where it runs, each other one is a verdict as it was judged, before
waivers. A run that is cut off leaves the file; `--resume` goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from conformance.errors import RunError
from conformance.verdict import Verdict

VERSION = "quantcts-journal/1"
# Of the environment, what a verdict can depend on
_SAME = ("python", "processor", "specification", "packages", "backends", "gpus")


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

    def check(self, selection: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Raises RunError where another run was begun than the one that is to go on."""
        was = self.head["selection"] | {name: self.head["environment"].get(name) for name in _SAME}
        now = json.loads(json.dumps({**selection, **{name: environment.get(name) for name in _SAME}}))
        for name in sorted(was.keys() | now.keys()):
            if was.get(name) != now.get(name):
                raise RunError(
                    f"{self.path}: {name}: {_told(was.get(name))} when the run began, {_told(now.get(name))} now; "
                    "start anew without --resume"
                )


def _told(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def part_of(report: Path) -> Path:
    """Where the journal of a report lies."""
    return report.with_name(report.name + ".part")


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
    head: dict[str, Any] = {}
    verdicts = []
    for number, line in enumerate(content[:length].splitlines(), 1):
        try:
            record = json.loads(line)
            if number > 1:
                verdicts.append(Verdict.from_json(record))
            elif record["journal"] == VERSION:
                head = record
            else:
                raise ValueError(f"it is of {record['journal']}, this is {VERSION}")
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"--resume: {path}: line {number}: {error}; remove the file and start anew"
            ) from error
    if not head:
        raise RunError(f"--resume: {path}: it is empty; remove the file and start anew")
    return Begun(path, head, tuple(verdicts), length)


class Journal:
    """head: what the run was asked for. begun: the run that goes on."""

    def __init__(self, path: Path, head: Mapping[str, Any], begun: Begun | None = None) -> None:
        self.path = path
        if begun is not None:
            with path.open("rb+") as file:
                file.truncate(begun.length)
        self._file: TextIO = path.open("a" if begun else "w", encoding="utf-8")
        if begun is None:
            self._line({"journal": VERSION, **head})

    def write(self, verdict: Verdict) -> None:
        self._line(verdict.to_json())

    def _line(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self, *, served: bool = True) -> None:
        """served: the report is whole, and the journal not needed any more."""
        self._file.close()
        if served:
            self.path.unlink(missing_ok=True)
