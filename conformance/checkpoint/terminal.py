"""What a person reads of a checkpoint besides the common report: the summary and the layers that fail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from conformance.checkpoint.folder import Folder, Note
from conformance.checkpoint.layers import PROBES
from conformance.checkpoint.survey import Survey
from conformance.report.terminal import console_on
from conformance.verdict import Verdict

_SHOWN_LAYERS = 40
_SHOWN_NOTES = 20


def print_summary(folder: Folder, found: Survey, query: str | None, out: IO[str]) -> None:
    """What is in the folder, before anything large is read."""
    console = console_on(out)
    console.print(
        f"{folder.path}: {_count(len(folder.files), 'file')}, {_count(len(folder.tensors), 'tensor')}, "
        f"{_count(found.quantized, 'quantized layer')}{f' ({query})' if query else ''}, "
        f"{len(found.plain)} plain matrices, {len(found.ignored)} of them ignored",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    for name, count in sorted(found.formats.items()):
        console.print(f"  {name}: {_count(count, 'layer')}", markup=False)
    if found.unreadable:
        console.print(f"  in files that cannot be read whole: {_count(len(found.unreadable), 'layer')}")
    problems = len(folder.problems) + sum(map(len, found.malformed.values()))
    if problems:
        console.print(f"  form: {_count(problems, 'problem')} so far, listed below", style="bold red")


def print_layers(found: Survey, verdicts: Iterable[Verdict], out: IO[str]) -> None:
    """A row for each layer that fails, counts for the others."""
    console = console_on(out)
    by_layer: dict[str, dict[str, Verdict]] = defaultdict(dict)
    for verdict in verdicts:
        layer, _, probe = verdict.case.removeprefix("checkpoint/").rpartition("/")
        by_layer[layer][probe] = verdict
    failing = [name for name, own in found.malformed.items() if own]
    failing += [name for name, own in by_layer.items() if any(v.fails for v in own.values())]
    if failing:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in ("layer", "form", *PROBES):
            table.add_column(column, overflow="fold")
        for name in failing[:_SHOWN_LAYERS]:
            count = len(found.malformed.get(name, ()))
            form = f"[bold red]{_count(count, 'problem')}[/]" if count else "[green]well-formed[/]"
            own = by_layer.get(name, {})
            table.add_row(escape(name), form, *(_cell(own.get(probe)) for probe in PROBES))
        console.print(table, end="")
        if len(failing) > _SHOWN_LAYERS:
            console.print(f"and {len(failing) - _SHOWN_LAYERS} more layers that fail")
    others = [own for name, own in by_layer.items() if name not in set(failing)]
    if others:
        counts = []
        for probe in PROBES:
            outcomes = Counter(own[probe].outcome.value for own in others if probe in own)
            counts.append(f"{probe} {', '.join(f'{n} {o}' for o, n in outcomes.items()) or 'none'}")
        word = "other layer" if failing else "layer"
        console.print(f"{_count(len(others), word)}, well-formed: {'; '.join(counts)}", soft_wrap=True)


def print_notes(notes: Iterable[Note], out: IO[str]) -> None:
    """Notes, those of the same text as one."""
    console = console_on(out)
    subjects: dict[str, list[str]] = defaultdict(list)
    for note in notes:
        subjects[note.text].append(note.subject)
    for text, names in list(subjects.items())[:_SHOWN_NOTES]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        console.print(f"note {names[0]}{more}: {text}", markup=False, soft_wrap=True)
    if len(subjects) > _SHOWN_NOTES:
        console.print(f"and {len(subjects) - _SHOWN_NOTES} more notes")


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "[dim]-[/]"
    return f"[bold red]{verdict.outcome.value}[/]" if verdict.fails else verdict.outcome.value


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
