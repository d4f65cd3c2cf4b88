"""`quantcts report` and `quantcts statement`: everything that is made from report.json after a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance.errors import RunError
from conformance.exitcodes import ExitCode

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Pages, merges and differences of reports."
)

Reports = Annotated[list[Path], typer.Argument(metavar="REPORT...", help="report.json; several are merged")]
_SHOWN = 10


@app.command()
def html(
    reports: Reports,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE")] = Path("report.html"),
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="plots of this JSON of `quantcts bench` too")
    ] = None,
) -> None:
    """Write report.html: one self-contained file that works offline."""
    from conformance.report.page import report_page
    from conformance.report.plots import read_bench

    document = _joined(reports)
    figures = read_bench(bench) if bench is not None else None
    _write(output, report_page(document, figures), f"{len(document['cases'])} verdicts")


@app.command()
def markdown(
    reports: Reports,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE")] = Path("report.md"),
) -> None:
    """Write report.md: what fits a comment on a pull request and the summary of a CI job."""
    from conformance.report.markdown import report_markdown

    document = _joined(reports)
    _write(output, report_markdown(document), f"{len(document['cases'])} verdicts")


@app.command()
def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="shards, or runs of machines")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="compressed where it ends in .gz")
    ],
) -> None:
    """Join shards and machines into one report. The exit code is that of the whole run."""
    from conformance.report.document import write_atomically

    if len(reports) < 2:
        raise RunError("merge: name at least two reports")
    document = _joined(reports)
    write_atomically(output, document)
    print(
        f"{output}: {len(reports)} reports, {len(document['cases'])} verdicts, exit code {document['exit_code']}"
    )
    raise SystemExit(document["exit_code"])


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD")],
    new: Annotated[Path, typer.Argument(metavar="NEW")],
    everything: Annotated[bool, typer.Option("--all", help="every case that changed")] = False,
) -> None:
    """Say what newly fails, declines, conforms from one report to another. Exit code 1 when something newly fails."""
    from conformance.report.difference import difference, lines, regressed
    from conformance.report.document import read

    one, two = read(old), read(new)
    for name, of in (("QuantCTS", _suite), ("the set", lambda d: d["selection"]["set"])):
        if of(one) != of(two):
            print(f"{name} is another: {of(one)} -> {of(two)}")
    changes = difference(one, two)
    print("\n".join(lines(changes, None if everything else _SHOWN)))
    if regressed(changes):
        raise SystemExit(ExitCode.CONFORMANCE)


def _suite(document: dict[str, Any]) -> str:
    return str(document["environment"]["packages"].get("quantcts", "of a checkout"))


def statement(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="report.json of the run")],
    vendor: Annotated[str, typer.Option(help="who makes the statement")] = "",
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="where the report holds several")
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="the golden vectors of the suite (default: the checkout's)"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE")] = Path("statement.json"),
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="a page of it too")] = None,
    check: Annotated[
        Path | None, typer.Option("--verify", metavar="STATEMENT", help="check one instead")
    ] = None,
) -> None:
    """Write a conformance statement on a backend, or check one against its report (exit code 1 where it differs)."""
    from conformance.report import statement as made

    folder = vectors or _own_vectors()
    if check is not None:
        said = made.read_statement(check)
        wrong = made.verify(said, report, folder)
        print("\n".join(wrong) if wrong else f"{check}: it says what {report} gives")
        open_question = made.unchecked(said, folder)
        if open_question:
            print(f"not checked: {open_question}")
        raise SystemExit(ExitCode.CONFORMANCE if wrong else ExitCode.AS_EXPECTED)
    said = made.statement(report, vendor, backend, folder)
    made.write(output, said)
    print(f"{output}: {said['backend']['name']} {said['verdict']}")
    if page is not None:
        _write(page, made.statement_page(said), "the statement")


def _own_vectors() -> Path | None:
    """The golden vectors of the checkout that this file belongs to, if it is one that has them."""
    folder = Path(__file__).resolve().parents[2] / "fixtures"
    return folder if (folder / "manifest.json").is_file() else None


def _joined(reports: list[Path]) -> dict[str, Any]:
    from conformance.report.document import read
    from conformance.report.merge import merge as join

    read_ones = [(path, read(path)) for path in reports]
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return join(read_ones, command) if len(read_ones) > 1 else read_ones[0][1]


def _write(path: Path, text: str, what: str) -> None:
    from conformance.report.document import put

    content = text.encode()
    put(path, content)
    print(f"{path}: {what}, {len(content) / 1000:.0f} kB")
