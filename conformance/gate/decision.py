"""The gate: files in, changes and an exit code out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.cases import all_cases
from conformance.errors import RunError
from conformance.exitcodes import ExitCode, worst
from conformance.gate.changes import Change
from conformance.gate.comparable import check_comparable
from conformance.gate.timings import DEFAULT_LIMIT, compare_timings, read_timings
from conformance.gate.verdicts import compare
from conformance.report.document import read
from conformance.waivers import Waiver, read_waivers


@dataclass(frozen=True)
class Decision:
    """compared: how many verdicts, and how many times, stand on both sides. notes: what differs harmlessly."""

    changes: list[Change]
    notes: list[str]
    verdicts: int
    times: int = 0

    @property
    def exit_code(self) -> ExitCode:
        return worst(ExitCode.AS_EXPECTED, *(change.exit_code for change in self.changes))


def decide(
    baseline: Mapping[str, Any],
    current: Mapping[str, Any],
    waivers: Sequence[Waiver] = (),
    subset: bool = False,
) -> Decision:
    """Compare two report documents. Raises RunError where they say nothing about each other."""
    notes = check_comparable(baseline, current, subset)
    changes, more = compare(baseline, current, waivers)
    keys = [{(record["backend"], record["case"]) for record in d["cases"]} for d in (baseline, current)]
    common = len(keys[0] & keys[1])
    if not common:
        raise RunError("the reports have no case of a backend in common; nothing was compared")
    return Decision(changes, notes + more, common)


def gate(
    baseline: Path,
    current: Path,
    waivers: Path | None = None,
    bench: tuple[Path, Path] | None = None,
    limit: float = DEFAULT_LIMIT,
    subset: bool = False,
) -> Decision:
    """Compare two reports on disk, and two benchmark files (baseline, current) where there are any."""
    before, now = read_baseline(baseline), read(current)
    ids = dict.fromkeys([*all_cases(), *(record["case"] for record in now["cases"])])
    names = [backend["name"] for backend in now["environment"]["backends"]]
    decision = decide(before, now, read_waivers(waivers, ids, names) if waivers else (), subset)
    if bench is None:
        return decision
    old, new = (read_timings(path) for path in bench)
    changes = [*decision.changes, *compare_timings(old, new, limit)]
    times = sum(old[key].seconds is not None for key in old.keys() & new.keys())
    return Decision(changes, decision.notes, decision.verdicts, times)


def read_baseline(path: Path) -> dict[str, Any]:
    """A report that something is compared with. Raises RunError naming file, field and remedy."""
    try:
        return read(path)
    except RunError as error:
        raise RunError(f"{error}; a baseline is a report.json that this version wrote") from error
