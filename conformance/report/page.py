"""report.html: one file that works offline, made from report.json.

What is read first (summary, backends side by side, findings, environment) is plain HTML. The matrices are drawn by the
page's own script from two compressed blocks: the cells, unpacked when the page opens, and the cases, unpacked when the
first cell is clicked. So sixty thousand verdicts stay a file of a megabyte or two. Nothing is fetched, and the page's
content security policy forbids it.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from conformance.exitcodes import ExitCode
from conformance.report.account import SIGNS, accounts, headline
from conformance.report.document import specs_of, verdicts_of
from conformance.report.matrix import WORST_FIRST, Cell, alone, enumerated, in_order, place, row_name
from conformance.report.plots import FLOOR, plots_of, sample
from conformance.verdict import FAILING, Outcome, Verdict

MEANINGS = {
    Outcome.CONFORMS: "the answer is right; shaded by the largest error as a fraction of what is allowed",
    Outcome.DIVERGES: "claimed, and the answer is wrong",
    Outcome.DISHONEST: "claimed and refused, or declined and computed all the same",
    Outcome.CRASHES: "another exception, or a dead process",
    Outcome.WAIVED: "a known fault, waived for a while",
    Outcome.DECLINES: "said beforehand not to be supported",
}
_CODES = {outcome: str(i) for i, outcome in enumerate(WORST_FIRST)}
_SHOWN_FINDINGS = 200
_LONGEST_DETAIL = 2000


def report_page(document: Mapping[str, Any], bench: Mapping[str, Any] | None = None) -> str:
    """The page of a report, with plots of the benchmark's JSON where it is given."""
    verdicts = sorted(verdicts_of(document), key=enumerated)
    rows = accounts(verdicts)
    specs = specs_of(document)
    found = document["findings"]
    return render(
        "report.html",
        document=document,
        accounts=rows,
        operations=list(dict.fromkeys(v.case.partition("/")[0] for v in verdicts)),
        findings=[(f, _first_command(document, specs, f)) for f in found[:_SHOWN_FINDINGS]],
        more_findings=max(len(found) - _SHOWN_FINDINGS, 0),
        headline=headline(document),
        figures=plots_of(bench) if bench is not None else [],
        bench_gpus=bench["quantcts"].get("environment", {}).get("gpus", []) if bench is not None else [],
        sample=sample,
        floor=FLOOR,
        exit_word=ExitCode(document["exit_code"]).name.lower().replace("_", " "),
        script=_source("report.js"),
        blocks=_blocks(document, verdicts, specs),
    )


def _first_command(document: Mapping[str, Any], specs: Mapping[str, str], finding: Mapping[str, Any]) -> str:
    backend = finding["backend"]
    return alone(document["selection"], specs.get(backend, backend), finding["cases"][0])


def render(template: str, **values: Any) -> str:
    """A template of this package with every value escaped; the style stands in it."""
    environment = Environment(
        loader=PackageLoader("conformance.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        style=_source("style.css"), signs=SIGNS, meanings=MEANINGS, outcomes=list(SIGNS), failing=FAILING
    )
    return environment.get_template(template).render(**values)


def _source(name: str) -> Markup:
    """A file of ours that goes into the page as it is."""
    loader = PackageLoader("conformance.report", "templates")
    return Markup(loader.get_source(Environment(autoescape=True), name)[0])


def _blocks(
    document: Mapping[str, Any], verdicts: Sequence[Verdict], specs: Mapping[str, str]
) -> dict[str, str]:
    """Element id -> packed JSON."""
    tables = _Tables(verdicts)
    names = sorted({v.backend for v in verdicts})
    by_backend: dict[str, list[Verdict]] = {name: [] for name in names}
    for verdict in verdicts:
        by_backend[verdict.backend].append(verdict)
    # A place holder that `alone` has no reason to quote; the script puts the case, quoted, where it stands last.
    checkpoint = document["selection"]["set"] == "checkpoint"
    holder = "checkpoint/CASE/probe" if checkpoint else "CASE"
    cells = {
        "outcomes": [outcome.value for outcome in WORST_FIRST],
        "signs": [SIGNS[outcome] for outcome in WORST_FIRST],
        "backends": names,
        "commands": [alone(document["selection"], specs.get(name, name), holder) for name in names],
        "checkpoint": checkpoint,
        "tables": tables.to_json(),
        "cells": [tables.cells(by_backend[name]) for name in names],
    }
    return {"cells": _packed(cells), "cases": _packed(_cases(document, tables, by_backend))}


class _Tables:
    """The tables of all backends: a matrix has the same rows and columns for each of them."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        words = {case_id: place(case_id) for case_id in dict.fromkeys(v.case for v in verdicts)}
        self._tables: dict[str, tuple[list[str], list[str]]] = {}
        for title in dict.fromkeys(title for title, _, _ in words.values()):
            own = [w for w in words.values() if w[0] == title]
            self._tables[title] = in_order(row for _, row, _ in own), in_order(column for _, _, column in own)
        numbers = {title: i for i, title in enumerate(self._tables)}
        self.places = {
            case_id: (
                numbers[title],
                self._tables[title][0].index(row),
                self._tables[title][1].index(column),
            )
            for case_id, (title, row, column) in words.items()
        }

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"title": title, "corner": row_name(title, rows), "rows": rows, "columns": columns}
            for title, (rows, columns) in self._tables.items()
        ]

    def cells(self, verdicts: Sequence[Verdict]) -> list[int]:
        """Ten numbers a cell: table, row, column, the worst error in thousandths of what is allowed, and how many
        verdicts there are of each outcome, in the order of WORST_FIRST."""
        grouped: dict[tuple[int, int, int], list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            grouped[self.places[verdict.case]].append(verdict)
        found: list[int] = []
        for where, some in grouped.items():
            cell = Cell.of(some)
            found += [*where, round(1000 * cell.worst), *(cell.counts.get(o, 0) for o in WORST_FIRST)]
        return found


def _cases(
    document: Mapping[str, Any], tables: _Tables, by_backend: Mapping[str, Sequence[Verdict]]
) -> dict[str, Any]:
    """What the panel shows. Case ids and sentences stand once; a verdict is a number in each of a few lists."""
    ids = {case_id: i for i, case_id in enumerate(tables.places)}
    texts: dict[str, int] = {"": 0}
    clauses = {c["case"]: c["clauses"] for c in document["cases"] if "clauses" in c}
    return {
        "ids": list(ids),
        "places": [tables.places[case_id] for case_id in ids],
        "cited": [clauses.get(case_id, -1) for case_id in ids],
        "clauses": [" ".join(cited) for cited in document.get("clauses", [])],
        "verdicts": [_columns(own, ids, texts) for own in by_backend.values()],
        "texts": list(texts),
    }


def _columns(verdicts: Sequence[Verdict], ids: Mapping[str, int], texts: dict[str, int]) -> dict[str, Any]:
    """A backend's verdicts, a list a field; more: what few verdicts have, by place in the lists."""

    def number(text: str) -> int:
        return texts.setdefault(_shortened(text), len(texts))

    more = {i: extra for i, v in enumerate(verdicts) if (extra := _extra(v, number))}
    return {
        "case": [ids[v.case] for v in verdicts],
        "outcome": "".join(_CODES[v.outcome] for v in verdicts),
        "worst": [None if v.worst is None else float(f"{v.worst:.3g}") for v in verdicts],
        "detail": [number(v.detail) for v in verdicts],
        "explained": [number(v.explained_by) for v in verdicts],
        "more": more,
    }


def _extra(verdict: Verdict, number: Callable[[str], int]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if verdict.note:
        said["note"] = number(verdict.note)
    if verdict.diagnosis and verdict.outcome is not Outcome.CONFORMS:
        said["diagnosis"] = verdict.diagnosis
    if verdict.kernels is not None:
        said["kernels"] = [number(name) for name in verdict.kernels]
    return said


def _shortened(text: str) -> str:
    left = len(text) - _LONGEST_DETAIL
    return text if left <= 0 else f"{text[:_LONGEST_DETAIL]} ... and {left} characters more in report.json"


def _packed(value: Any) -> str:
    """JSON, gzip, base64: no character of it means anything in HTML."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
