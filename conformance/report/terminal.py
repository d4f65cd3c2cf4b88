"""The conformance matrix and the findings, for a person at a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.report.document import ANSWERS, WAITING, Report
from conformance.report.findings import findings
from conformance.report.matrix import Cell, alone, enumerated, matrices
from conformance.verdict import FAILING, Outcome, Verdict
from reference.bounds import Contract, false_alarm_bound

_COLOURS = {
    Outcome.CONFORMS: "green",
    Outcome.DIVERGES: "bold red",
    Outcome.DISHONEST: "bold magenta",
    Outcome.CRASHES: "bold red reverse",
    Outcome.DECLINES: "yellow",
    Outcome.WAIVED: "cyan",
}
_SHOWN_FINDINGS = 10
_SHOWN_CASES = 2
_SHOWN_KERNELS = 5
# Residuals beyond this many standard errors are worth a look.
_NOTABLE = 7.0
_SHOWN_PROBLEMS = 20
_NARROWEST = 100


def print_report(report: Report, file: IO[str]) -> None:
    """Matrix, findings, account. A pipe gets plain text, a terminal colours."""
    console = console_on(file)
    verdicts = sorted(report.ledger.verdicts.values(), key=enumerated)
    judged_cells = report.selection["set"] != "checkpoint"  # layers of a checkpoint have a table of their own
    for backend in sorted({v.backend for v in verdicts if judged_cells}):
        own = [v for v in verdicts if v.backend == backend]
        _print_matrices(console, backend, own)
        _print_kernels(console, backend, own)
    _print_failures(console, report, [v for v in verdicts if v.fails])
    _print_notes(console, verdicts)
    _print_account(console, report)


def console_on(file: IO[str]) -> Console:
    """A console as wide as its terminal, or wide enough for the matrices where there is none."""
    console = Console(file=file, highlight=False)
    if console.is_terminal:
        return console
    return Console(file=file, highlight=False, width=max(_NARROWEST, console.width))


def _print_matrices(console: Console, backend: str, verdicts: list[Verdict]) -> None:
    """Tables, and a line of those that would say "declines" everywhere: of a library most do."""
    declined = []
    for matrix in matrices(verdicts):
        if matrix.declined:
            declined.append(" ".join(matrix.title.split()))
            continue
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column(matrix.corner)
        for column in matrix.columns:
            table.add_column(escape(column))
        for row in matrix.rows:
            table.add_row(row, *(_cell(matrix.verdicts.get((row, column), [])) for column in matrix.columns))
        console.print(f"\n[bold]{escape(backend)}: {escape(matrix.title)}[/]")
        console.print(table, end="")
    if declined:
        console.print(f"\n[bold]{escape(backend)} declines all of:[/] {escape(', '.join(declined))}")


def _print_kernels(console: Console, backend: str, verdicts: list[Verdict]) -> None:
    """Which GPU kernels ran, where they were recorded."""
    counts = kernel_counts(verdicts)
    if not counts:
        return
    console.print(f"\n[bold]{escape(backend)}: {len(counts)} GPU kernels ran[/]")
    for name, count in list(counts.items())[:_SHOWN_KERNELS]:
        console.print(f"  {count} cases: {escape(name)}", soft_wrap=True)
    if len(counts) > _SHOWN_KERNELS:
        console.print(f"  and {len(counts) - _SHOWN_KERNELS} more, by case, in report.json (--report FILE)")


def _cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "[dim]-[/]"
    cell = Cell.of(verdicts)
    text = cell.outcome.value
    if cell.outcome in (*FAILING, Outcome.WAIVED):
        text += f" {cell.counts[cell.outcome]}/{cell.total}"
    elif cell.outcome is Outcome.CONFORMS:
        text += f" {cell.worst:.2f}" if cell.worst else ""
        if cell.counts.get(Outcome.DECLINES):
            text += f" ({cell.counts[Outcome.DECLINES]} declined)"
    return f"[{_COLOURS[cell.outcome]}]{text}[/]"


def _print_failures(console: Console, report: Report, failures: list[Verdict]) -> None:
    if not failures:
        return
    found = findings(failures)
    cases = f"{len(failures)} failing case{'s' if len(failures) > 1 else ''}"
    console.print(f"\n[bold]{cases}, {len(found)} finding{'s' if len(found) > 1 else ''}[/]")
    for finding in found[:_SHOWN_FINDINGS]:
        smallest = finding.smallest
        console.print(
            f"  [{_COLOURS[finding.outcome]}]{finding.outcome.value}[/] {escape(smallest.case)}"
            f"  ({escape(finding.backend)})"
        )
        console.print(f"    {escape(smallest.detail)}", soft_wrap=True)
        if len(finding.verdicts) > 1:
            others = ", ".join(v.case for v in finding.verdicts[1 : 1 + _SHOWN_CASES])
            more = len(finding.verdicts) - 1 - _SHOWN_CASES
            console.print(
                f"    and {len(finding.verdicts) - 1} more cases of it: {escape(others)}"
                + (f" and {more} more" if more > 0 else ""), soft_wrap=True,
            )  # fmt: skip
    if len(found) > _SHOWN_FINDINGS:
        console.print(
            f"  and {len(found) - _SHOWN_FINDINGS} more findings, all of them in report.json (--report FILE)"
        )
    first = found[0].smallest
    command = alone(report.selection, report.specs.get(first.backend, first.backend), first.case)
    console.print(f"  one case alone: {escape(command)}", soft_wrap=True)


def _print_notes(console: Console, verdicts: Sequence[Verdict]) -> None:
    noted = [v for v in verdicts if v.note and v.outcome is Outcome.CONFORMS]
    if noted:
        console.print(
            f"\n{len(noted)} conforming cases with a note, such as {escape(noted[0].case)}: {noted[0].note}"
        )
    odd = [v for v in verdicts if v.outcome is Outcome.CONFORMS and _notable(v)]
    if odd:
        worst = max(odd, key=lambda v: v.statistics["rms"])
        said = ", ".join(f"{name} {value:g}" for name, value in worst.statistics.items())
        console.print(
            f"\nadvice: {len(odd)} conforming cases leave more than rounding does, such as"
            f" {escape(worst.case)}: {said} (docs/specification.md, C46)", soft_wrap=True,
        )  # fmt: skip
    for outcome, heading in ((Outcome.WAIVED, "waived"), (Outcome.DECLINES, "declined")):
        reasons: dict[tuple[str, str], int] = defaultdict(int)
        for verdict in verdicts:
            if verdict.outcome is outcome:
                reasons[verdict.backend, verdict.detail.partition(" [")[0]] += 1
        if reasons:
            console.print(f"\n[bold]{heading}[/]")
        for (backend, reason), count in reasons.items():
            console.print(f"  {escape(backend)}: {count} cases: {escape(reason)}", soft_wrap=True)


def _notable(verdict: Verdict) -> bool:
    """Whether the residual is more than one rounding gives; advice, never pass or fail."""
    if not verdict.statistics or not verdict.elements:
        return False
    rms = 1.03 + _NOTABLE / verdict.elements**0.5
    return abs(verdict.statistics["bias"]) > _NOTABLE or verdict.statistics["rms"] > rms


def _print_account(console: Console, report: Report) -> None:
    ledger = report.ledger
    verdicts = ledger.verdicts.values()
    if any(v.worst for v in verdicts):
        console.print(
            "\nA number is the worst error beyond output rounding as a fraction of what is allowed."
        )
    spent = [sum(getattr(v, f"{who}_seconds") for v in verdicts) for who in ("backend", "oracle")]
    if verdicts:
        console.print("time: backend {:.1f} s, oracle {:.1f} s, over all workers".format(*spent))
        _print_busiest(console, report)
        _print_judging(console, report)
    if report.elements:
        bound = false_alarm_bound(report.elements)
        console.print(
            f"{report.elements} outputs held against a bound: false-alarm probability below {bound:.1g}"
        )
    for backend in report.environment["backends"]:
        usual = asdict(Contract())
        promises = ", ".join(
            f"{name} {value}"
            for name, value in backend["contract"].items()
            if value != usual[name] or name in ("weights", "integers", "quantizer")
        )
        widths = [v.width for v in verdicts if v.backend == backend["name"] and v.elements]
        width = median(widths) if widths else 0.0
        console.print(
            escape(
                f"contract of {backend['name']} on {backend['device']}: {promises}; accepts {width:.2g} ulp"
            )
        )
    for name, reason in report.environment.get("absent", {}).items():
        console.print(f"absent: {escape(name)}: {escape(reason)}", soft_wrap=True)
    for problem in ledger.problems[:_SHOWN_PROBLEMS]:
        console.print(f"[bold red]problem[/] {escape(problem)}", soft_wrap=True)
    hidden = len(ledger.problems) - _SHOWN_PROBLEMS
    if hidden > 0:
        console.print(f"and {hidden} more problems, all of them in report.json (--report FILE)")
    if report.path:
        console.print(f"report: {escape(str(report.path))}", soft_wrap=True)
    style = "bold green" if report.exit_code == 0 else "bold red"
    console.print(f"[{style}]{escape(ledger.explain())}[/]  exit code {int(report.exit_code)}")


def _print_busiest(console: Console, report: Report) -> None:
    """How much of the run's time the backend that computed longest was computing; the rest is waiting for the judge.
    Of backends in processes of their own the judges say more."""
    # The times of a part that was cut off are not known.
    if report.judging or report.resumed or report.wall <= 0:
        return
    busy: dict[str, float] = defaultdict(float)
    for verdict in report.ledger.verdicts.values():
        busy[verdict.backend] += verdict.backend_seconds
    if len(busy) > 1:
        name = max(busy, key=lambda backend: busy[backend])
        share = 100 * busy[name] / report.wall
        console.print(
            f"judged in {report.wall:.1f} s; {name} computed for {busy[name]:.1f} s of them ({share:.0f} %)"
        )


def _print_judging(console: Console, report: Report) -> None:
    """What the judges of isolated backends did meanwhile, and which of the hosts answered longest."""
    spent = dict(report.judging)
    judges = spent.pop("judges", 0)
    if report.resumed or not judges or report.wall <= 0:
        return
    waits, answers = (
        [(k, s) for k, s in spent.items() if k.startswith(f"{what} ")] for what in (WAITING, ANSWERS)
    )
    shares = {
        "oracle and comparison": sum(v.oracle_seconds for v in report.ledger.verdicts.values()),
        "transfers": spent.get("transfers", 0.0),
        "bundles": spent.get("bundles", 0.0),
        "waiting for a turn": sum(s for _, s in waits),
        "answers": sum(s for _, s in answers),
    }
    shares["pytest and the rest"] = max(judges * report.wall - sum(shares.values()), 0.0)
    text = ", ".join(f"{what} {100 * s / judges / report.wall:.0f} %" for what, s in shares.items())
    console.print(f"judged in {report.wall:.1f} s")
    console.print(f"of the time of {judges:.0f} judges: {text}")
    longest = sorted(
        ((k.removeprefix(f"{ANSWERS} "), s) for k, s in answers if s), key=lambda pair: -pair[1]
    )[:5]
    if longest:
        text = ", ".join(f"{name} {s:.1f} s ({100 * s / report.wall:.0f} %)" for name, s in longest)
        console.print(f"hosts that answered longest: {text}")


def kernel_counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Kernel -> in how many cases it ran, most frequent first."""
    found: Counter[str] = Counter(name for v in verdicts for name in v.kernels or ())
    return dict(found.most_common())
