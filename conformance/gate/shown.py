"""Changes as text for a terminal and a log, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conformance.gate.changes import BETTER, CONFORMANCE, PERFORMANCE, Change, Kind
from conformance.gate.decision import Decision
from conformance.report.markdown import LIMIT

_TOLD = (Kind.NEW_FAILING, Kind.OTHERWISE, Kind.WAIVED, Kind.AMBIGUOUS, Kind.STILL, Kind.NEW)
# What closes the gate and what got better is listed in full; of the rest there can be thousands.
_MOST_TOLD = 20
# Of a kind: the first of these with which all kinds together fit a comment on a pull request.
_MOST_IN_MARKDOWN = (100, 30, 10, 3)
_LONGEST_CELL = 240


def text_of(decision: Decision) -> str:
    """Every regression a line, then all that got better, then the rest."""
    lines = [f"note: {note}" for note in decision.notes]
    for kind, own in _by_kind(decision.changes):
        shown = own if kind in (*CONFORMANCE, *PERFORMANCE, *BETTER) else own[:_MOST_TOLD]
        if kind in (Kind.STILL, Kind.NEW):
            shown = []
        lines.append(f"{kind.value}: {len(own)}")
        lines += [f"  {_line(change)}" for change in shown]
        if shown and len(own) > len(shown):
            lines.append(f"  and {len(own) - len(shown)} more")
    return "\n".join([*lines, summary(decision)])


def summary(decision: Decision) -> str:
    """The decision in one line."""
    worse = sum(bool(change.exit_code) for change in decision.changes)
    better = sum(change.kind in BETTER for change in decision.changes)
    compared = f"{decision.verdicts} verdicts" + (f" and {decision.times} times" if decision.times else "")
    said = f"gate: {compared} compared, {worse} worse, {better} better"
    return f"{said}  exit code {int(decision.exit_code)}"


def markdown_of(decision: Decision) -> str:
    """The same as a section of a comment; long lists are cut, and say so."""
    made = (_markdown(decision, most) for most in _MOST_IN_MARKDOWN)
    return next((text for text in made if len(text) <= LIMIT), "") or _markdown(decision, 0)


def _markdown(decision: Decision, most: int) -> str:
    """most: changes of a kind that closes the gate; of another, a fifth."""
    passed = "passes" if not decision.exit_code else "is closed"
    lines = [f"## QuantCTS gate {passed}", "", f"`{summary(decision)}`", ""]
    for kind, own in _by_kind(decision.changes):
        closes = kind in (*CONFORMANCE, *PERFORMANCE)
        lines += [f"### {kind.value[0].upper()}{kind.value[1:]}: {len(own)}", ""]
        if kind in (Kind.STILL, Kind.NEW):
            continue
        count = most if closes else most // 5
        lines += ["| backend | case | before | now | detail |", "| --- | --- | --- | --- | --- |"]
        for change in own[:count]:
            fields = (change.backend, f"`{change.case}`" if change.case else "", change.before, change.now)
            lines.append("| " + " | ".join(map(_cell, (*fields, change.detail))) + " |")
        if len(own) > count:
            lines.append(f"| | and {len(own) - count} more | | | |")
        lines.append("")
    if decision.notes:
        lines += ["### Differs, and was compared all the same", "", *(f"- {n}" for n in decision.notes), ""]
    return "\n".join(lines)


def _by_kind(changes: Sequence[Change]) -> Iterable[tuple[Kind, list[Change]]]:
    for kind in (*CONFORMANCE, *PERFORMANCE, *BETTER, *_TOLD):
        own = sorted((c for c in changes if c.kind is kind), key=lambda c: (c.backend, c.case))
        if own:
            yield kind, own


def _line(change: Change) -> str:
    words = [word for word in (change.backend, change.case) if word]
    if change.before or change.now:
        words.append(f"({change.before or 'none'} -> {change.now or 'none'})")
    place = " ".join(words)
    return f"{place}: {change.detail}" if place and change.detail else place or change.detail


def _cell(text: str) -> str:
    words = " ".join(text.split()).replace("|", "\\|")
    return words if len(words) <= _LONGEST_CELL else f"{words[:_LONGEST_CELL]}…"
