"""Known faults, waived for a while: strict, so that a waiver cannot outlive its fault.

A TOML file of tables, all fields required; backend is a glob over names, query one over case ids:

    [[waiver]]
    backend = "compressed_tensors"
    query = "packing/w4/dim0/n7-*"
    reason = "what is wrong, in one sentence"
    link = "https://..."            # where the fault is described
    expires = 2027-05-31

A waiver that is malformed, matches no case or no backend, or has expired ends the run before anything is judged. One
whose case no longer fails makes the run fail, by a problem in its account: the verdict stays what it is.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from conformance.backend import known_backends
from conformance.errors import RunError
from conformance.query import matcher, select
from conformance.verdict import FAILING, Outcome, Verdict

_FIELDS = {"backend": str, "query": str, "reason": str, "link": str, "expires": datetime.date}


@dataclass(frozen=True)
class Waiver:
    backend: str
    query: str
    reason: str
    link: str
    expires: datetime.date

    def covers(self, verdict: Verdict) -> bool:
        return fnmatch(verdict.backend, self.backend) and bool(matcher(self.query).match(verdict.case))

    def waive(self, verdict: Verdict) -> Verdict:
        """A failing verdict as `waived`."""
        detail = f"{self.reason} ({self.link}) [{verdict.outcome.value}: {verdict.detail}]"
        return replace(verdict, outcome=Outcome.WAIVED, detail=detail)

    def outlived_by(self, verdict: Verdict) -> str:
        """What is wrong where a verdict that it covers does not fail."""
        return f"it {verdict.outcome.value} although the waiver {self.query!r} expects a failure; remove it"


def outcome_of(verdict: Verdict) -> Outcome:
    """The outcome, of a waived verdict the one that is waived."""
    if verdict.outcome is not Outcome.WAIVED:
        return verdict.outcome
    found = re.search(rf" \[({'|'.join(outcome.value for outcome in FAILING)}): ", verdict.detail)
    return Outcome(found[1]) if found else verdict.outcome


def read_waivers(
    path: Path, case_ids: Iterable[str], backends: Iterable[str], today: datetime.date | None = None
) -> list[Waiver]:
    """The waivers of a file. backends: names that there are besides those of the known adapters. Raises RunError naming
    the file, the waiver and the field."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: it is not TOML: {error}") from error
    tables = document.get("waiver", [])
    if set(document) - {"waiver"} or not isinstance(tables, list):
        raise RunError(f"{path}: it holds something else than [[waiver]] tables")
    ids, names = list(case_ids), sorted({*known_backends(), *backends})
    found = [
        _read(f"{path}: waiver {i + 1}", table, ids, names, today or datetime.date.today())
        for i, table in enumerate(tables)
    ]
    for number, (waiver, cases) in enumerate(found):
        earlier = (c for before, c in found[:number] if before.backend in ("*", waiver.backend))
        if cases <= set().union(*earlier):
            raise RunError(
                f"{path}: waiver {number + 1}: those before it waive all that it matches; remove it"
            )
    return [waiver for waiver, _ in found]


def _read(
    place: str, table: dict[str, Any], ids: list[str], backends: list[str], today: datetime.date
) -> tuple[Waiver, set[str]]:
    """A waiver and the cases that it matches."""
    if not isinstance(table, dict):
        raise RunError(f"{place}: it is no table")
    for name, kind in _FIELDS.items():
        if type(table.get(name)) is not kind or not str(table[name]).strip():
            raise RunError(f"{place}: {name}: missing, or no {kind.__name__}")
        if " [" in str(table[name]):
            raise RunError(f"{place}: {name}: leave out ` [`; what was waived stands in brackets behind it")
    if set(table) - set(_FIELDS):
        raise RunError(f"{place}: {min(set(table) - set(_FIELDS))}: unknown field")
    waiver = Waiver(**table)
    if waiver.expires < today:
        raise RunError(f"{place}: expires: it expired on {waiver.expires}; fix the fault or renew the waiver")
    if waiver.query.startswith("!"):
        raise RunError(f"{place}: query: a waiver names what it waives; {waiver.query!r} names the rest")
    if not any(fnmatch(name, waiver.backend) for name in backends):
        raise RunError(f"{place}: backend: {waiver.backend!r} matches none of {', '.join(backends)}")
    try:
        return waiver, set(select(ids, [waiver.query]))
    except RunError as error:
        raise RunError(f"{place}: {error}") from error
