"""The conformance statement: what a vendor can publish of one backend, and anybody who has the report can check.

It is worked out from report.json alone, but for the vendor's name, the day, and the version of the golden vectors.
`verify` works it out again and names each field that says something else.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from conformance.cases import all_cases
from conformance.errors import RunError
from conformance.report.account import errors_of, headline
from conformance.report.document import content_of, machine_of, put, read, read_json, verdicts_of
from conformance.report.matrix import enumerated
from conformance.report.page import render
from conformance.verdict import JUDGED, Outcome, Verdict
from reference.bounds import false_alarm_bound

STATEMENT_VERSION = "quantcts-statement/1"
CONFORMS, WAIVED, FAILS = "conforms", "conforms but for waivers", "fails"


def schema() -> dict[str, Any]:
    """The JSON Schema of a statement."""
    loaded: dict[str, Any] = json.loads(
        (files("conformance.report") / "statement.schema.json").read_text("utf-8")
    )
    return loaded


def statement(
    report: Path, vendor: str, backend: str | None, vectors: Path | None, made: str | None = None
) -> dict[str, Any]:
    """The statement on a backend of a report, or on its only one.

    vectors: the folder of the golden vectors that belong to the suite. A report that was judged from vectors names
    them itself. made: the day, None for today. Raises RunError for a report of a checkpoint, for one in which nothing
    of the backend was judged, and where the backend has to be named.
    """
    if not vendor.strip():
        raise RunError("--vendor: a statement needs the name of who makes it")
    document = read(report)
    if document["selection"]["set"] == "checkpoint":
        raise RunError(f"{report}: it is about a checkpoint; a statement is about cells of the matrix")
    told = _backend(report, document, backend)
    verdicts = sorted((v for v in verdicts_of(document) if v.backend == told["name"]), key=enumerated)
    if not any(v.outcome in JUDGED for v in verdicts):
        raise RunError(f"{report}: nothing of {told['name']} was judged")
    environment = document["environment"]
    elements = sum(v.elements for v in verdicts)
    said = {
        "schema": STATEMENT_VERSION,
        "vendor": vendor,
        "made": made or datetime.date.today().isoformat(),
        "suite": {
            "name": "QuantCTS",
            "version": environment["packages"].get("quantcts", "unknown"),
            "specification": environment.get("specification", "unknown"),
        },
        "vectors": _vectors(document, vectors),
        "report": {
            "schema": document["schema"],
            "sha256": hashlib.sha256(content_of(report)).hexdigest(),
            "started": document["started"],
            "finished": document["finished"],
            "problems": document["ledger"]["problems"],
        },
        "scope": {"whole": _whole(document["selection"]), **document["selection"]},
        "backend": told,
        "environment": machine_of(document, told["name"]),
        "verdict": FAILS if document["ledger"]["problems"] else _verdict(verdicts),
        "counts": {"cases": len(verdicts), **_counts(verdicts)},
        "largest_error": _largest(verdicts),
        "confidence": {"elements": elements, "false_alarm_bound": false_alarm_bound(elements)},
        **_cells(verdicts),
        "waivers": _waivers(verdicts),
    }
    said["digest"] = digest(said)
    return said


def digest(said: Mapping[str, Any]) -> str:
    """SHA-256 of all other fields, in an order and a form that do not depend on how the file was written."""
    rest = {name: value for name, value in said.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _backend(report: Path, document: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    known = {b["name"]: b for b in document["environment"]["backends"]}
    if name is None and len(known) > 1:
        raise RunError(f"{report}: it holds {', '.join(sorted(known))}; name one with --backend")
    if name is not None and name not in known:
        raise RunError(f"--backend {name}: {report} holds {', '.join(sorted(known))}")
    chosen = known[name if name is not None else next(iter(known))]
    fields = {"name": "", "device": "", "contract": {}, "libraries": {}, "nondeterministic": ""}
    return {field: chosen.get(field, usual) for field, usual in fields.items()}


def _vectors(document: Mapping[str, Any], folder: Path | None) -> dict[str, str] | None:
    used = document["selection"].get("vectors")
    if used is not None:
        return {"version": used["version"], "sha256": used["sha256"]}
    if folder is None:
        return None
    path = folder / "manifest.json"
    manifest = read_json(path)
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version is None:
        raise RunError(f"{path}: version: it is missing, or the file is no manifest of golden vectors")
    return {"version": str(version), "sha256": hashlib.sha256(content_of(path)).hexdigest()}


def _whole(selection: Mapping[str, Any]) -> bool:
    """Whether every case of the full set was asked."""
    part = selection["queries"] or selection["keyword"] or selection.get("shard", "1/1") != "1/1"
    return selection["set"] == "full" and not part and "vectors" not in selection


def _counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    return {outcome.value: sum(v.outcome is outcome for v in verdicts) for outcome in Outcome}


def _verdict(verdicts: Sequence[Verdict]) -> str:
    if any(v.fails for v in verdicts):
        return FAILS
    return WAIVED if any(v.outcome is Outcome.WAIVED for v in verdicts) else CONFORMS


def _largest(verdicts: Sequence[Verdict]) -> dict[str, Any] | None:
    """As a fraction of the bound, over what was judged; without a number where an answer that has to be exact is wrong.
    None where every compared answer was exact by nature."""
    errors = [(error, v.case) for v in verdicts for error in errors_of([v])]
    if not errors:
        return None
    error, case = max(errors, key=lambda pair: pair[0])
    return {"fraction_of_bound": _finite(error), "case": case}


def _finite(error: float | None) -> float | None:
    return None if error is None or math.isinf(error) else error


def _cells(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Cells in which at least one case was not declined, with their counts, and the names of the others."""
    grouped: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        case = all_cases().get(verdict.case)
        grouped[case.cell if case is not None else verdict.case.rsplit("/", 2)[0]].append(verdict)
    claimed, declined = [], []
    for cell, own in grouped.items():
        if all(v.outcome is Outcome.DECLINES for v in own):
            declined.append(cell)
            continue
        counts = {name: count for name, count in _counts(own).items() if count}
        worst = _finite(max(errors_of(own), default=None))
        claimed.append({"cell": cell, "verdict": _verdict(own), "counts": counts, "worst": worst})
    return {"claimed": claimed, "declined": declined}


def _waivers(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Reason, with its link, and the cases that it waives."""
    cases: dict[str, list[str]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.outcome is Outcome.WAIVED:
            cases[verdict.detail.partition(" [")[0]].append(verdict.case)
    return [{"reason": reason, "cases": own} for reason, own in cases.items()]


def read_statement(path: Path) -> dict[str, Any]:
    """A statement from disk. Raises RunError naming the file and the field that is wrong."""
    said: dict[str, Any] = read_json(path)
    fault = next(iter(jsonschema.Draft202012Validator(schema()).iter_errors(said)), None)
    if fault is not None:
        place = "/".join(map(str, fault.absolute_path)) or "the document"
        raise RunError(f"{path}: {place}: {fault.message[:200]}")
    return said


def verify(said: Mapping[str, Any], report: Path, vectors: Path | None) -> list[str]:
    """What the statement says and the report does not, a line a field; nothing where they agree.

    vectors: see `unchecked`. The vendor and the day are held by the digest alone.
    """
    made = statement(report, said["vendor"], said["backend"]["name"], vectors, said["made"])
    if unchecked(said, vectors):
        made["vectors"] = said["vectors"]
    made["digest"] = digest(
        said
    )  # of what is said: a change of any field, the vendor's name among them, shows in it
    return [
        f"{place}: the statement says {_short(one)}, the report gives {_short(two)}"
        for place, one, two in _differing(said, made, "")
    ]


def unchecked(said: Mapping[str, Any], vectors: Path | None) -> str:
    """What cannot be checked here, and is taken on trust; nothing: empty. A report that was not judged from vectors
    names none, and who makes a statement or checks it may have no folder of them."""
    if "vectors" in said["scope"] or (vectors is not None and said["vectors"] is not None):
        return ""
    return (
        "vectors: it names none" if said["vectors"] is None else "vectors: give their folder with --vectors"
    )


def _differing(one: Any, two: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for name in {**one, **two}:
            yield from _differing(one.get(name), two.get(name), f"{place}/{name}" if place else name)
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for i, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from _differing(left, right, f"{place}/{i}")
    elif one != two or type(one) is not type(two):
        yield place, one, two


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def write(path: Path, said: Mapping[str, Any]) -> None:
    """Validate, write beside, rename into place."""
    jsonschema.Draft202012Validator(schema()).validate(dict(said))
    put(path, (json.dumps(said, indent=1) + "\n").encode())


def statement_page(said: Mapping[str, Any]) -> str:
    """The statement as a page of HTML."""
    ledger = {**said["counts"], "planned": said["counts"]["cases"], "problems": said["report"]["problems"]}
    ledger["judged"] = sum(said["counts"][o.value] for o in JUDGED)
    return render("statement.html", said=said, headline=headline({"ledger": ledger}))
