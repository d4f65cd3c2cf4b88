"""What the pages say of a whole run and of each backend in a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isinf
from statistics import median
from typing import Any

from conformance.report.matrix import Cell
from conformance.verdict import FAILING, Outcome, Verdict
from conformance.waivers import outcome_of

# Each verdict has a sign and a word, so that no colour is needed to read it.
SIGNS = {
    Outcome.CONFORMS: "✓",
    Outcome.DIVERGES: "✗",
    Outcome.DISHONEST: "≠",
    Outcome.CRASHES: "!",
    Outcome.WAIVED: "~",
    Outcome.DECLINES: "–",
}


@dataclass(frozen=True)
class Account:
    """What one backend did. operations: operation -> its cell. width: median of the accepted widths, in ulp."""

    name: str
    whole: Cell
    operations: Mapping[str, Cell]
    largest: float | None
    width: float
    elements: int
    seconds: float

    @property
    def largest_said(self) -> str:
        if self.largest is None:
            return "–"
        return "∞" if isinf(self.largest) else f"{self.largest:.3g}"

    @property
    def failing(self) -> int:
        return sum(self.whole.counts.get(o, 0) for o in FAILING)


def accounts(verdicts: Iterable[Verdict]) -> list[Account]:
    """One for each backend, by name. largest: the largest error of a judged case as a fraction of what is allowed,
    infinite where a wrong answer has nothing that would be allowed."""
    by_backend: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_backend[verdict.backend].append(verdict)
    return [_account(name, own) for name, own in sorted(by_backend.items())]


def _account(name: str, own: list[Verdict]) -> Account:
    by_operation: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in own:
        by_operation[verdict.case.partition("/")[0]].append(verdict)
    widths = [v.width for v in own if v.elements]
    return Account(
        name,
        Cell.of(own),
        {operation: Cell.of(some) for operation, some in by_operation.items()},
        max(errors_of(own), default=None),
        median(widths) if widths else 0.0,
        sum(v.elements for v in own),
        sum(v.backend_seconds for v in own),
    )


def errors_of(verdicts: Iterable[Verdict]) -> list[float]:
    """Of what was compared, as fractions of what is allowed; infinite of a wrong answer that has to be exact, waived or
    not."""
    worst = (inf if outcome_of(v) is Outcome.DIVERGES and v.worst is None else v.worst for v in verdicts)
    return [error for error in worst if error is not None]


def headline(document: Mapping[str, Any]) -> str:
    """The verdict on a run in one line."""
    ledger = document["ledger"]
    failing = sum(ledger[o.value] for o in FAILING)
    if failing:
        return f"{failing} of {ledger['planned']} cases fail"
    if ledger["problems"]:
        return f"the account of the run is wrong: {len(ledger['problems'])} problems"
    if not ledger["judged"]:
        return "nothing was judged"
    waived = f", {ledger['waived']} known faults are waived" if ledger["waived"] else ""
    return f"all {ledger['judged'] - ledger['waived']} judged cases conform{waived}"
