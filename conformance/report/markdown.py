"""report.md: what fits a comment on a pull request and the summary of a CI job, made from report.json.

Never longer than LIMIT; what is left out is counted.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance.report.account import SIGNS, Account, accounts, headline
from conformance.report.document import specs_of, verdicts_of
from conformance.report.matrix import Cell, alone, enumerated, matrices
from conformance.verdict import FAILING, Outcome, Verdict

LIMIT = 60_000  # characters; GitHub takes 65536 in a comment
_FINDINGS = 10
_LONGEST_NAME, _LONGEST_TEXT = 100, 600
_RESERVE = 400  # for what says that something was left out, and for the end of the page


class _Page:
    """Text that knows how much room is left."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0

    def add(self, text: str) -> bool:
        """Whether it fitted. A newline comes after it."""
        if self._length + len(text) + 1 > LIMIT - _RESERVE:
            return False
        self._put(text)
        return True

    def _put(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text) + 1

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
        """A table of as many rows as fit; returns how many do not."""
        rule = [":--", *("--:" for _ in head[1:])]
        lines = [_row(row) for row in rows]
        if not self.add(f"\n{_row(head)}\n{_row(rule)}"):
            return len(lines)
        for number, line in enumerate(lines):
            if not self.add(line):
                return len(lines) - number
        return 0

    def text(self, left_out: Mapping[str, int]) -> str:
        missing = ", ".join(f"{count} {what}" for what, count in left_out.items() if count)
        if missing:
            self._put(f"\nLeft out: {missing}. report.json and report.html have everything.")
        return "\n".join(self._parts) + "\n"


def report_markdown(document: Mapping[str, Any]) -> str:
    """The page of a report, at most LIMIT characters."""
    verdicts = sorted(verdicts_of(document), key=enumerated)
    rows = accounts(verdicts)
    page = _Page()
    left = {"problems": 0, "backends": 0, "findings": 0, "matrices": 0}
    sign = SIGNS[Outcome.CONFORMS if document["exit_code"] == 0 else Outcome.DIVERGES]
    page.add(f"## QuantCTS: {sign} {_words(headline(document))}\n")
    page.add(_facts(document))
    left["problems"] = _problems(page, document["ledger"]["problems"])
    left["backends"] = _counts(page, rows)
    _operations(page, rows, verdicts)
    left["findings"] = _findings(page, document)
    left["matrices"] = _matrices(page, verdicts)
    return page.text(left)


def _facts(document: Mapping[str, Any]) -> str:
    chosen, found = document["selection"], document["environment"]
    facts = [f"exit code {document['exit_code']}", f"set {chosen['set']}"]
    if chosen.get("shard", "1/1") != "1/1":
        facts.append(f"shard {_words(chosen['shard'])}")
    facts += [f"cases {_code(query)}" for query in chosen["queries"][:3]]
    facts += [f"{len(chosen['queries']) - 3} more queries"] if len(chosen["queries"]) > 3 else []
    facts += [f"keyword {_code(chosen['keyword'])}"] if chosen["keyword"] else []
    facts.append(f"QuantCTS {_words(found['packages'].get('quantcts', 'of a checkout'))}")
    facts += [_words(gpu) for gpu in dict.fromkeys(found.get("gpus", ()))][:4]
    facts.append(_words(document["started"]))
    if "resumed" in document:
        facts.append(f"resumed: {document['resumed']} verdicts stood")
    return ", ".join(facts)


def _problems(page: _Page, problems: Sequence[str]) -> int:
    if problems:
        page.add("\n**Problems of the run itself**\n")
    added = sum(page.add(f"- {_words(problem)}") for problem in problems[:_FINDINGS])
    return len(problems) - added


def _counts(page: _Page, rows: Sequence[Account]) -> int:
    head = ["backend", *(f"{sign} {outcome.value}" for outcome, sign in SIGNS.items()), "largest error"]
    return page.table(head, ([_words(a.name), *_numbers(a)] for a in rows))


def _numbers(account: Account) -> list[str]:
    return [*(str(account.whole.counts.get(o, 0)) for o in SIGNS), account.largest_said]


def _operations(page: _Page, rows: Sequence[Account], verdicts: Sequence[Verdict]) -> None:
    """Conforming cases of those that were not declined, an operation a row."""
    operations = dict.fromkeys(v.case.partition("/")[0] for v in verdicts)
    page.add("\nConforming cases of those that were not declined; the sign is the worst verdict's.")
    left = page.table(
        ["operation", *(_words(a.name) for a in rows)],
        ([_words(o), *(_ratio(a.operations.get(o)) for a in rows)] for o in operations),
    )
    if left:
        page.add(f"\n{left} of {len(operations)} operations do not fit.")


def _ratio(cell: Cell | None) -> str:
    if cell is None:
        return ""
    asked = cell.total - cell.counts.get(Outcome.DECLINES, 0)
    return (
        f"{SIGNS[cell.outcome]} {cell.counts.get(Outcome.CONFORMS, 0)}/{asked}"
        if asked
        else SIGNS[cell.outcome]
    )


def _findings(page: _Page, document: Mapping[str, Any]) -> int:
    found, specs = document["findings"], specs_of(document)
    if not found:
        return 0
    page.add(f"\n### {len(found)} finding{'s' if len(found) > 1 else ''}\n")
    added = 0
    for finding in found[:_FINDINGS]:
        name, cases = finding["backend"], finding["cases"]
        sign = SIGNS[Outcome(finding["outcome"])]
        command = alone(document["selection"], specs.get(name, name), cases[0])
        added += page.add(
            f"<details><summary>{sign} <b>{_words(name)}</b> {finding['outcome']}: {_words(finding['operation'])}, "
            f"{_words(finding['cause'])} ({len(cases)} case{'s' if len(cases) > 1 else ''})</summary>\n\n"
            f"{_words(finding['detail'], _LONGEST_TEXT)}\n\n{_block(command)}\n\n</details>"
        )
    return len(found) - added


def _matrices(page: _Page, verdicts: Sequence[Verdict]) -> int:
    """The matrices in which something fails, those of layers first."""
    failing = {v.backend for v in verdicts if v.fails}
    found = []
    for backend in sorted(failing):
        for matrix in matrices(v for v in verdicts if v.backend == backend):
            if any(v.fails for some in matrix.verdicts.values() for v in some):
                layer = matrix.title.startswith(("linear", "moe "))
                found.append((not layer, f"{backend}: {matrix.title}", matrix))
    if not found:
        return 0
    page.add("\n### Matrices with failures\n\n" + ", ".join(f"{s} {o.value}" for o, s in SIGNS.items()))
    added = 0
    for _, title, matrix in sorted(found, key=lambda item: item[0]):
        trial = _Page()
        rows = (
            [_words(r), *(_sign(matrix.verdicts.get((r, c))) for c in matrix.columns)] for r in matrix.rows
        )
        if trial.table([matrix.corner, *map(_words, matrix.columns)], rows):
            continue
        table = trial.text({})
        added += page.add(f"<details><summary>{_words(title)}</summary>\n{table}\n</details>")
    return len(found) - added


def _sign(verdicts: Sequence[Verdict] | None) -> str:
    if not verdicts:
        return ""
    cell = Cell.of(verdicts)
    return SIGNS[cell.outcome] + (
        f" {cell.counts[cell.outcome]}/{cell.total}" if cell.outcome in FAILING else ""
    )


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ... ({len(text)} characters)"


def _words(text: str, longest: int = _LONGEST_NAME * 2) -> str:
    """Text as text: no markup, table, link or mention comes of it."""
    plain = html.escape(" ".join(_shortened(text, longest).split()), quote=False)
    plain = re.sub(r"([\\`*_{}\[\]()~|])", r"\\\1", plain)
    plain = plain.replace("#", "&#35;").replace("&&#35;", "&#").replace("@", "&#64;")
    return plain.replace("://", "&#58;//").replace("www.", "www&#46;")


def _code(text: str) -> str:
    """A code span, in a table or not."""
    short = " ".join(_shortened(text, _LONGEST_NAME * 2).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", short)), default=0))
    return f"{fence} {short} {fence}".replace("|", "\\|")


def _block(text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{_shortened(text, _LONGEST_TEXT * 2)}\n{fence}"
