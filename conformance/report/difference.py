"""What changed from one report to another, case by case, for each backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from conformance.report.document import verdicts_of
from conformance.report.matrix import enumerated
from conformance.verdict import FAILING, Outcome, Verdict


class Change(StrEnum):
    """In the order in which a person wants to read them."""

    FAILS = "newly fails"
    OTHERWISE = "fails in another way"
    WAIVED = "is newly waived"
    DECLINES = "newly declines"
    GONE = "is not judged any more"
    CONFORMS = "newly conforms"
    ADDED = "is judged for the first time"


@dataclass(frozen=True)
class Step:
    """A case whose verdict is another one. before, after: None where it was not judged."""

    backend: str
    case: str
    before: Verdict | None
    after: Verdict | None

    @property
    def change(self) -> Change | None:
        """None where the outcome is the same."""
        if self.after is None:
            return Change.GONE
        before = None if self.before is None else self.before.outcome
        after = self.after.outcome
        if before is after:
            return None
        if after in FAILING:
            return Change.OTHERWISE if before in FAILING else Change.FAILS
        if before is None:
            return Change.ADDED
        return {
            Outcome.WAIVED: Change.WAIVED, Outcome.DECLINES: Change.DECLINES, Outcome.CONFORMS: Change.CONFORMS
        }[after]  # fmt: skip


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[Change, list[Step]]]:
    """Backend -> change -> cases, in the order of the enumeration; only what changed."""
    before, after = (_by_case(document) for document in (old, new))
    found: dict[str, dict[Change, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted({**before, **after}):
        backend, _, case = key
        step = Step(backend, case, before.get(key), after.get(key))
        if step.change is not None:
            found[backend][step.change].append(step)
    return {backend: {c: own[c] for c in Change if c in own} for backend, own in found.items()}


def _by_case(document: Mapping[str, Any]) -> dict[tuple[str, int, str], Verdict]:
    return {(v.backend, *enumerated(v)): v for v in verdicts_of(document)}


def regressed(changes: Mapping[str, Mapping[Change, list[Step]]]) -> bool:
    """Whether something newly fails."""
    return any(Change.FAILS in own for own in changes.values())


def lines(changes: Mapping[str, Mapping[Change, list[Step]]], shown: int | None) -> list[str]:
    """For a person. shown: how many cases of each change, None for all."""
    said = []
    for backend, own in changes.items():
        for change, steps in own.items():
            said.append(f"{backend}: {len(steps)} case{'s' if len(steps) > 1 else ''}: {change.value}")
            said += [f"  {step.case}{_told(step)}" for step in steps[:shown]]
            left = 0 if shown is None else len(steps) - shown
            said += [f"  and {left} more (--all)"] if left > 0 else []
    return said or ["no verdict changed"]


def _told(step: Step) -> str:
    """From what to what, and why where it fails."""
    names = (v.outcome.value if v is not None else "not judged" for v in (step.before, step.after))
    why = (
        f": {' '.join(step.after.detail.split())[:200]}"
        if step.after is not None and step.after.fails
        else ""
    )
    return f"  ({' -> '.join(names)}){why}"
