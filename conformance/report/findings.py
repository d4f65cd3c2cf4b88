"""Failing cases by their cause: hundreds of red cases are mostly one fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance.cases import all_cases
from conformance.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Finding:
    """Failing cases of one backend with one cause, the smallest case first."""

    backend: str
    outcome: Outcome
    operation: str
    cause: str
    verdicts: tuple[Verdict, ...]

    @property
    def smallest(self) -> Verdict:
        return self.verdicts[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "outcome": self.outcome.value,
            "operation": self.operation,
            "cause": self.cause,
            "detail": self.smallest.detail,
            "cases": [v.case for v in self.verdicts],
        }


def findings(verdicts: Sequence[Verdict]) -> list[Finding]:
    """The causes of the failing ones, those with most cases first.

    The cause is the fault that the diagnosis names; without one, the words of the detail without their numbers.
    """
    clusters: dict[tuple[str, Outcome, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.fails:
            operation = verdict.case.partition("/")[0]
            key = (verdict.backend, verdict.outcome, operation, cause_of(verdict))
            clusters.setdefault(key, []).append(verdict)
    found = [Finding(*key, tuple(sorted(group, key=_size))) for key, group in clusters.items()]
    return sorted(found, key=lambda finding: (-len(finding.verdicts), finding.smallest.case))


def cause_of(verdict: Verdict) -> str:
    """What failing cases of one finding share."""
    operation, *_, data = verdict.case.split("/")
    check = f"{data.rpartition('-')[0]}: " if operation == "conduct" else ""
    return check + _words(verdict)


def _words(verdict: Verdict) -> str:
    if verdict.diagnosis and verdict.diagnosis["fault"]:
        return str(verdict.diagnosis["fault"])
    if verdict.diagnosis:
        return "no known fault"
    return re.sub(r"-?\d+(\.\d+)?", "#", verdict.detail.partition(";")[0])[:100]


def _size(verdict: Verdict) -> tuple[int, str]:
    case = all_cases().get(verdict.case)
    return (0 if case is None else max(case.m, 1) * max(case.n, 1) * case.k), verdict.case
