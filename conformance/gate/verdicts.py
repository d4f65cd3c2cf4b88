"""From the verdicts of two reports to changes.

| before              | now                       | it is                                                              |
| ------------------- | ------------------------- | ------------------------------------------------------------------ |
| conforms, declines, waived | fails              | newly failing, or newly nondeterministic where equal calls differ  |
| conforms            | declines                  | newly declined                                                     |
| fails, waived       | conforms or declines      | better                                                             |
| declines            | conforms                  | better                                                             |
| fails               | fails                     | told, with its kind where that is another                          |
| anything but declines | no verdict, in scope    | vanished                                                           |
| no verdict          | anything                  | a new case: told, and no regression                                |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from conformance.cases import all_cases
from conformance.gate.changes import Change, Kind
from conformance.gate.comparable import Key, in_scope
from conformance.verdict import FAILING, Outcome, Verdict
from conformance.waivers import Waiver

_FAILS = {outcome.value for outcome in FAILING}
_CONFORMS, _DECLINES, _WAIVED = (o.value for o in (Outcome.CONFORMS, Outcome.DECLINES, Outcome.WAIVED))
_LONGEST = 240


def compare(
    baseline: Mapping[str, Any], current: Mapping[str, Any], waivers: Sequence[Waiver] = ()
) -> tuple[list[Change], list[str]]:
    """The changes, and notes on what was left out. waivers apply to what fails now."""
    before, now = _records(baseline), _records(current)
    scope = in_scope(baseline, current)
    changes = [Change(Kind.ACCOUNT, "", "", detail=problem) for problem in current["ledger"]["problems"]]
    changes += _declarations(baseline, current)
    for key, record in now.items():
        verdict = _waived(record, waivers)
        if isinstance(verdict, Change):
            changes.append(verdict)
        else:
            changes += _changed(key, before.get(key), verdict)
    missing = [key for key in before if key in scope and key not in now]
    dropped = _dropped(baseline, current, missing)
    changes += _vanished(before, current, (key for key in missing if key not in dropped))
    notes = []
    if dropped:
        notes.append(f"{len(dropped)} verdicts of the baseline are of cases that this suite no longer has")
    if len(before) > len(scope):
        notes.append(f"{len(before) - len(scope)} verdicts of the baseline are of what was not selected now")
    return changes, notes


def _records(document: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    return {(record["backend"], record["case"]): record for record in document["cases"]}


def _waived(record: dict[str, Any], waivers: Sequence[Waiver]) -> dict[str, Any] | Change:
    """The record as the waivers leave it, or a change where one of them has outlived its fault. What the run itself
    has waived stays waived."""
    verdict = Verdict(record["case"], record["backend"], Outcome(record["outcome"]), record.get("detail", ""))
    waiver = next((w for w in waivers if w.covers(verdict)), None)
    if waiver is None or verdict.outcome is Outcome.WAIVED:
        return record
    if verdict.fails:
        return {**record, "outcome": _WAIVED, "detail": waiver.waive(verdict).detail}
    detail = waiver.outlived_by(verdict)
    return Change(Kind.WAIVER, verdict.backend, verdict.case, now=record["outcome"], detail=detail)


def _changed(key: Key, old: dict[str, Any] | None, new: dict[str, Any]) -> Iterator[Change]:
    now = new["outcome"]

    def change(kind: Kind) -> Change:
        return Change(kind, *key, old["outcome"] if old else "", now, _short(new))

    if old is None:
        yield change(Kind.NEW_FAILING if now in _FAILS else Kind.NEW)
        return
    was = old["outcome"]
    if now in _FAILS and was in _FAILS:
        yield change(Kind.STILL if now == was and _fault(old) == _fault(new) else Kind.OTHERWISE)
    elif now in _FAILS:
        yield change(Kind.NONDETERMINISTIC if _differs(new) else Kind.FAILS)
    elif now == _WAIVED != was:
        yield change(Kind.WAIVED)
    elif now != _WAIVED and (was in _FAILS or was == _WAIVED):
        yield change(Kind.DETERMINISTIC if _differs(old) else Kind.FIXED)
    elif (was, now) == (_CONFORMS, _DECLINES):
        yield change(Kind.DECLINES)
    elif (was, now) == (_DECLINES, _CONFORMS):
        yield change(Kind.CLAIMED)
    elif was == now == _CONFORMS and _varies(old) != _varies(new):
        yield Change(
            Kind.NONDETERMINISTIC if _varies(new) else Kind.DETERMINISTIC, *key, was, now, new.get("note", "")
        )


def _differs(record: Mapping[str, Any]) -> bool:
    """Whether a case fails because equal calls gave other bits (C110)."""
    repeated = record["case"].startswith("conduct/") and "/repeat-" in record["case"]
    return (
        repeated and record["outcome"] == Outcome.DIVERGES.value and "equal calls differs" in _short(record)
    )


def _varies(record: Mapping[str, Any]) -> bool:
    """Whether equal calls were seen to differ, of a backend that says so."""
    return str(record.get("note", "")).startswith("declared nondeterministic")


def _declarations(baseline: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Change]:
    """Backends that have begun to declare themselves nondeterministic, or ceased to."""
    said = [
        {backend["name"]: backend.get("nondeterministic", "") for backend in d["environment"]["backends"]}
        for d in (baseline, current)
    ]
    for name in said[0].keys() & said[1].keys():
        old, new = said[0][name], said[1][name]
        if bool(old) != bool(new):
            kind = Kind.NONDETERMINISTIC if new else Kind.DETERMINISTIC
            yield Change(kind, name, "", "", "", f"it declares itself nondeterministic: {new}" if new else "")


def _dropped(baseline: Mapping[str, Any], current: Mapping[str, Any], missing: Iterable[Key]) -> set[Key]:
    """What vanished because another version of the suite has no such case. In one version no case may vanish."""
    versions = [d["environment"]["packages"].get("quantcts") for d in (baseline, current)]
    if versions[0] == versions[1] or current["selection"]["set"] == "checkpoint":
        return set()
    return {key for key in missing if key[1] not in all_cases()}


def _vanished(
    before: Mapping[Key, Mapping[str, Any]], current: Mapping[str, Any], missing: Iterable[Key]
) -> Iterator[Change]:
    absent = current["environment"].get("absent", {})
    for key in missing:
        was = before[key]["outcome"]
        if was != _DECLINES:
            reason = f"the backend is absent: {absent[key[0]]}" if key[0] in absent else ""
            yield Change(Kind.VANISHED, *key, was, "", reason)


def _fault(record: Mapping[str, Any]) -> str:
    return str((record.get("diagnosis") or {}).get("fault", ""))


def _short(record: Mapping[str, Any]) -> str:
    detail = str(record.get("detail", ""))
    return detail if len(detail) <= _LONGEST else f"{detail[:_LONGEST]}..."
