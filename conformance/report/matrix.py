"""The conformance matrix: which table, row and column a case stands in, and what a cell of many verdicts says."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from conformance.cases import all_cases
from conformance.verdict import Outcome, Verdict

# The worst verdict names a cell.
WORST_FIRST = (
    Outcome.CRASHES, Outcome.DISHONEST, Outcome.DIVERGES, Outcome.WAIVED, Outcome.CONFORMS, Outcome.DECLINES
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """The verdicts of one backend that share a place. worst: the largest error of those that conform, as a fraction of
    what is allowed."""

    counts: Mapping[Outcome, int]
    worst: float

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Cell:
        counts = {o: n for o in WORST_FIRST if (n := sum(v.outcome is o for v in verdicts))}
        right = (v.worst for v in verdicts if v.outcome is Outcome.CONFORMS and v.worst is not None)
        return cls(counts, max(right, default=0.0))

    @property
    def outcome(self) -> Outcome:
        return next(iter(self.counts))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Matrix:
    """verdicts: (row, column) -> those of one backend."""

    title: str
    verdicts: Mapping[tuple[str, str], Sequence[Verdict]]

    @property
    def rows(self) -> list[str]:
        return in_order(row for row, _ in self.verdicts)

    @property
    def columns(self) -> list[str]:
        return in_order(column for _, column in self.verdicts)

    @property
    def declined(self) -> bool:
        """Every case of it."""
        return all(v.outcome is Outcome.DECLINES for verdicts in self.verdicts.values() for v in verdicts)

    @property
    def corner(self) -> str:
        return row_name(self.title, self.rows)


def in_order(names: Iterable[str]) -> list[str]:
    """Rows or columns: formats of a weight by group size, symmetric before asymmetric; others as they came."""
    found = list(dict.fromkeys(names))
    formats = [re.fullmatch(r"(?:channel|g(\d+)) (a?)sym", name) for name in found]
    keys = [(int(m[1] or 0), bool(m[2]), m[0]) for m in formats if m]
    return [name for _, _, name in sorted(keys)] if len(keys) == len(found) else found


def row_name(title: str, rows: Iterable[str]) -> str:
    """What the rows of a table are."""
    if all(re.fullmatch(r"w\d", row) for row in rows):
        return "bits"
    return {"conduct": "check", "checkpoint": "layer"}.get(title.split()[0], "format")


def matrices(verdicts: Iterable[Verdict]) -> list[Matrix]:
    """The tables of one backend, in the order of their first verdicts."""
    tables: dict[str, dict[tuple[str, str], list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for verdict in verdicts:
        title, row, column = place(verdict.case)
        tables[title][row, column].append(verdict)
    return [Matrix(title, cells) for title, cells in tables.items()]


def place(case_id: str) -> tuple[str, str, str]:
    """Table, row and column of a case, from its id. An id of another make has a table of its first word."""
    operation, *rest = case_id.split("/")
    if operation == "checkpoint":
        return operation, "/".join(rest[:-1]), rest[-1] if rest else ""
    try:
        return _place(operation, rest[0], rest[1:])
    except IndexError:
        return operation, "/".join(rest[:-1]) or "-", rest[-1] if rest else "-"


def _place(operation: str, fmt: str, rest: list[str]) -> tuple[str, str, str]:
    bits, _, name = fmt.partition("-")
    if operation == "packing":
        return operation, bits, rest[0] + (" experts" if rest[1].startswith("e") else "")
    if operation in ("activation_quantization", "routing", "swiglu"):
        return operation, fmt, rest[0]
    if operation == "conduct":
        return f"{operation}  {rest[2]}", rest[-1].rpartition("-")[0], f"{fmt} {rest[0]}"
    if operation == "moe_align":
        return operation, fmt, rest[-1].rpartition("-")[0]
    if operation == "validation":
        return operation, bits, rest[-1]
    # Variants of a layer, and their dtypes, share a table.
    of = {"linear": rest[:2], "moe_parallel": rest[3:4]}.get(operation, rest[:1])
    title = "  ".join([operation, *of])
    if name.endswith("-gidx"):
        title += "  act-order"
    return title, bits, name.removesuffix("-gidx").replace("-", " ")


def enumerated(verdict: Verdict) -> tuple[int, str]:
    """The place of a case in the enumeration; cases of a checkpoint come after, by id."""
    return _ordinals().get(verdict.case, len(_ordinals())), verdict.case


@cache
def _ordinals() -> dict[str, int]:
    return {case_id: i for i, case_id in enumerate(all_cases())}


def alone(selection: Mapping[str, Any], spec: str, case_id: str) -> str:
    """The command that judges one case again. spec: how the backend was asked for."""
    if selection["set"] == "checkpoint":
        layer = case_id.removeprefix("checkpoint/").rpartition("/")[0]
        return shlex.join(["quantcts", "checkpoint", "DIR", "--backend", spec, "--layers", layer])
    vectors = ["--vectors", "DIR"] if selection.get("vectors") else []
    return shlex.join(["quantcts", "run", "--backend", spec, "--cases", case_id, *vectors])
