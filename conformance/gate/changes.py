"""What may be different between a baseline and now."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conformance.exitcodes import ExitCode


class Kind(StrEnum):
    """Each with the words under which it is listed."""

    FAILS = "newly failing"
    NONDETERMINISTIC = "newly nondeterministic"
    DECLINES = "newly declined"
    VANISHED = "vanished: in the baseline, not judged now"
    WAIVER = "waived, and fails no more"
    ACCOUNT = "the account of the run is wrong"
    SLOWER = "newly slow"
    UNTIMED = "no time any more"
    FIXED = "fails no more"
    CLAIMED = "declined before, conforms now"
    DETERMINISTIC = "nondeterministic no more"
    FASTER = "faster"
    AMBIGUOUS = "ambiguous: a difference inside the noise"
    WAIVED = "newly waived"
    STILL = "fails as before"
    OTHERWISE = "fails as before, otherwise"
    NEW_FAILING = "new case, and it fails"
    NEW = "new case"


CONFORMANCE = (Kind.FAILS, Kind.NONDETERMINISTIC, Kind.DECLINES, Kind.VANISHED, Kind.WAIVER, Kind.ACCOUNT)
PERFORMANCE = (Kind.SLOWER, Kind.UNTIMED)
BETTER = (Kind.FIXED, Kind.CLAIMED, Kind.DETERMINISTIC, Kind.FASTER)


@dataclass(frozen=True)
class Change:
    """case: empty where a change is not one of a case. before, now: a verdict or a time, empty where there is none."""

    kind: Kind
    backend: str
    case: str
    before: str = ""
    now: str = ""
    detail: str = ""

    @property
    def exit_code(self) -> ExitCode:
        if self.kind in CONFORMANCE:
            return ExitCode.CONFORMANCE
        return ExitCode.PERFORMANCE if self.kind in PERFORMANCE else ExitCode.AS_EXPECTED
