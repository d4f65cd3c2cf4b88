"""The account of a run: every planned case ends in exactly one verdict, or the run fails.

planned = conforms + diverges + declines + dishonest + crashes + waived
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from conformance.exitcodes import ExitCode
from conformance.verdict import JUDGED, Outcome, Verdict


@dataclass
class Ledger:
    """planned: keys of the planned cases. verdicts: what became of them. faults: what else went wrong
    (a skip nobody explained, a failing test that is no case)."""

    planned: set[str] = field(default_factory=set)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def plan(self, keys: Iterable[str]) -> None:
        self.planned.update(keys)

    def enter(self, key: str, verdict: Verdict) -> None:
        """A second verdict for the same case is a fault."""
        if key in self.verdicts:
            self.faults.append(f"{key}: judged twice")
        self.verdicts[key] = verdict

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(v.outcome for v in self.verdicts.values())
        return {outcome.value: found[outcome] for outcome in Outcome}

    @property
    def judged(self) -> int:
        return sum(v.outcome in JUDGED for v in self.verdicts.values())

    @property
    def problems(self) -> list[str]:
        """What makes the account itself wrong, a line each."""
        found = list(self.faults)
        missing = sorted(self.planned - set(self.verdicts))
        surplus = sorted(set(self.verdicts) - self.planned)
        for keys, what in ((missing, "planned but never judged"), (surplus, "judged but never planned")):
            if keys:
                more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
                found.append(f"{keys[0]}{more}: {what}")
        return found

    @property
    def exit_code(self) -> ExitCode:
        if not self.planned or not self.judged:
            failing = self.problems and self.planned
            return ExitCode.CONFORMANCE if failing else ExitCode.BAD_ARGUMENT
        if self.problems or any(v.fails for v in self.verdicts.values()):
            return ExitCode.CONFORMANCE
        return ExitCode.AS_EXPECTED

    def explain(self) -> str:
        """The account in one line."""
        counts = " + ".join(f"{name} {count}" for name, count in self.counts.items() if count)
        if not self.planned:
            return "nothing was planned: no case was selected, so nothing was judged"
        if not self.judged:
            return f"nothing was judged: planned {len(self.planned)} = {counts or 'no verdict at all'}"
        return f"planned {len(self.planned)} = {counts}"
