"""The command `quantcts`: run, bench, plot, list, checkpoint, doctor, report, statement, gate, replay. Exit codes: see
exitcodes."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance.errors import EnvironmentMissing, RunError
from conformance.exitcodes import ExitCode, worst
from conformance.report import commands

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="QuantCTS: the conformance test suite of quantized LLM kernels.",
)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def run(context: typer.Context) -> None:
    """Judge backends: [--backend NAME]... [--quick | --full] [--cases QUERY]... [--shard I/N] [--waivers FILE]
    [--report FILE [--resume]] [--report-html FILE] [--report-markdown FILE] [--vectors DIR] [--isolate]
    [--limit SECONDS] [--no-kernels] [--gate FILE [--subset]] [--bundles DIR] [--bundle-limit N] [--shrink SECONDS].
    The backend `cuda` stands for all on a GPU.

    What else is given goes to pytest (-k, -n 2, -x, --junitxml FILE, ...).
    """
    from conformance.plugin import EXIT_CODE

    words = []
    if any(a.startswith(("-n", "--numprocesses")) for a in context.args):
        words.append("--dist=worksteal")  # one that was given comes later and counts
    _pytest(context, "pytest.ini", ["conformance.suites"], words, EXIT_CODE)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(context: typer.Context) -> None:
    """Time backends: --backend NAME... [--quick] [--cases QUERY]... on layers of models, each verified at full size
    before and after.

    What else is given goes to pytest and pytest-benchmark (-k, --benchmark-json FILE, --benchmark-compare, ...).
    """
    from packaging.version import Version

    from conformance.installed import installed

    found = installed("pytest-benchmark")
    if found is None:
        raise EnvironmentMissing("pytest-benchmark is not installed: pip install 'quantcts[bench]'")
    if Version(found) < Version("5.3"):
        # Those before empty FILE of --benchmark-json while they read the command line, whatever becomes of the run.
        raise EnvironmentMissing(
            f"pytest-benchmark {found} is older than 5.3: pip install --upgrade 'quantcts[bench]'"
        )
    from conformance.bench.plugin import EXIT_CODE

    suites = [f"conformance.suites.bench_{name}" for name in ("linear", "moe", "activation_quantization")]
    os.environ.pop(
        "PYTEST_XDIST_WORKER", None
    )  # of a run that started this one: pytest-benchmark would not time
    _pytest(context, "bench.ini", suites, ["-p", "no:xdist"], EXIT_CODE)


def _pytest(context: typer.Context, ini: str, suites: list[str], words: list[str], code: Any) -> None:
    """Have pytest run suites, with what else was given. code: the key under which a plugin leaves how it ended."""
    import pytest

    from conformance.interrupts import Heed

    class Ending:
        """What our own plugin ended the run with; pytest's numbers mean other things."""

        config: pytest.Config | None = None

        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config: pytest.Config) -> None:
            self.config = config

        @property
        def code(self) -> ExitCode:
            """BAD_ARGUMENT where pytest stopped before it asked us: a word it does not know."""
            left = self.config.stash.get(code, None) if self.config else None
            return ExitCode.BAD_ARGUMENT if left is None else ExitCode(left)

    if {"-h", "--help"} & set(context.args):
        print(context.command.help)
        return
    place = Path(__file__).parent / "suites" / ini
    arguments = ["-c", str(place), "--rootdir", os.getcwd(), "-p", "quantcts", "--pyargs", *suites]
    ending, heed = Ending(), Heed()
    try:
        with heed.signals():
            said = pytest.main([*arguments, *words, *context.args], plugins=[ending, heed])
    except Exception as error:
        if type(error).__name__ != "PerformanceRegression":  # of pytest-benchmark's --benchmark-compare-fail
            raise
        print(f"quantcts: {error}", file=sys.stderr)
        raise SystemExit(worst(ending.code, ExitCode.PERFORMANCE)) from None
    # What another plugin refuses when all is done, a comparison without a baseline, is no success.
    refused = said == pytest.ExitCode.USAGE_ERROR
    raise SystemExit(worst(ending.code, ExitCode.BAD_ARGUMENT) if refused else ending.code)


@app.command()
def plot(
    figures: Annotated[Path, typer.Argument(metavar="JSON", help="what --benchmark-json of `bench` wrote")],
    folder: Annotated[Path, typer.Option("--to", metavar="DIR", help="where the pictures go")] = Path(
        "plots"
    ),
) -> None:
    """Draw time and fraction of the floor against tokens, an SVG for each layer."""
    from conformance.report.pictures import draw
    from conformance.report.plots import read_bench

    print("\n".join(map(str, draw(read_bench(figures), folder))))


@app.command("list")
def list_cases(
    queries: Annotated[list[str] | None, typer.Argument(help="globs over case ids; !glob excludes")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="only the quick set")] = False,
    full: Annotated[bool, typer.Option("--full", help="every case (the default)")] = False,
    count: Annotated[bool, typer.Option("--count", help="print how many, a line per operation")] = False,
) -> None:
    """Print the ids of the cases that the queries select, one a line."""
    from conformance.cases import all_cases
    from conformance.query import select

    if quick and full:
        raise RunError("--quick and --full exclude each other")
    cases = {i: c for i, c in all_cases().items() if c.quick or not quick}
    chosen = select(cases, queries or [])
    if not chosen:
        raise RunError("the queries together leave no case")
    if not count:
        print("\n".join(chosen))
        return
    for operation in dict.fromkeys(cases[i].operation for i in chosen):
        own = [cases[i] for i in chosen if cases[i].operation == operation]
        print(f"{operation}: {len(own)} cases in {len({c.cell for c in own})} cells")
    print(f"all: {len(chosen)} cases")


@app.command()
def checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="folder with config.json and safetensors")],
    layers: Annotated[str | None, typer.Option(metavar="GLOB", help="only the layers it matches")] = None,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="name, module:attribute or file.py:attribute")
    ] = "compressed_tensors",
    report: Annotated[str | None, typer.Option(metavar="FILE", help="write report.json there")] = None,
) -> None:
    """Check a compressed-tensors checkpoint folder and judge a backend on its layers."""
    from conformance.checkpoint.check import check_checkpoint

    raise SystemExit(check_checkpoint(directory, layers, backend, report, sys.argv, sys.stdout))


@app.command()
def gate(
    baseline: Annotated[Path, typer.Option(metavar="FILE", help="report.json of what was there before")],
    current: Annotated[Path, typer.Option(metavar="FILE", help="report.json of now")],
    waivers: Annotated[Path | None, typer.Option(metavar="FILE", help="known faults (TOML)")] = None,
    baseline_bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="times of before, as pytest-benchmark writes them")
    ] = None,
    current_bench: Annotated[Path | None, typer.Option(metavar="FILE", help="times of now")] = None,
    max_slowdown: Annotated[
        float | None,
        typer.Option(metavar="RATIO", help="how many times as long is still no slowdown (default: 1.10)"),
    ] = None,
    subset: Annotated[
        bool, typer.Option("--subset", help="fewer cases or backends were judged now, on purpose")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the result as Markdown")
    ] = None,
) -> None:
    """Compare a report with a baseline: exit code 1 where anything conforms less, 2 where it is slower."""
    from conformance.gate.decision import gate as decide
    from conformance.gate.shown import markdown_of, text_of
    from conformance.gate.timings import DEFAULT_LIMIT
    from conformance.report.document import put

    if (baseline_bench is None) != (current_bench is None):
        raise RunError("--baseline-bench and --current-bench go together; give both or none")
    if max_slowdown is not None and not 1 <= max_slowdown < float("inf"):
        raise RunError(f"--max-slowdown {max_slowdown}: give a ratio of 1 or more, such as 1.10")
    bench = (baseline_bench, current_bench) if baseline_bench and current_bench else None
    decision = decide(baseline, current, waivers, bench, max_slowdown or DEFAULT_LIMIT, subset)
    if max_slowdown is not None and bench is None:
        print("note: no times were compared; give --baseline-bench and --current-bench as well")
    print(text_of(decision))
    if markdown is not None:
        put(markdown, markdown_of(decision).encode())
    raise SystemExit(decision.exit_code)


@app.command()
def replay(
    bundles: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE...", help="folders that failures left behind")
    ],
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="another backend than the one that failed")
    ] = None,
) -> None:
    """Judge what failing cases left behind, from its own tensors; the shrunken cases as well."""
    from conformance.replay.again import replay as again

    code, lines = again(bundles, backend)
    print("\n".join(lines))
    raise SystemExit(code)


@app.command()
def doctor() -> None:
    """Say what this machine can judge: versions, GPUs, compilers, and which backends are there."""
    from conformance.doctor import examine

    if not examine(sys.stdout):
        raise SystemExit(ExitCode.ENVIRONMENT)


app.add_typer(commands.app, name="report")
app.command()(commands.statement)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a problem is one line on stderr and an exit code of the contract."""
    try:
        code = app(args=arguments, prog_name="quantcts", standalone_mode=False)
        if code:  # typer answers an interrupt with a number
            raise SystemExit(ExitCode.ENVIRONMENT)
    except RunError as error:
        print(f"quantcts: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:  # `quantcts list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(ExitCode.AS_EXPECTED) from None
    except Exception as error:
        # click's usage errors, whether typer brings its own click or uses the installed one
        if not hasattr(error, "format_message"):
            traceback.print_exc()  # a fault of ours, or of a plugin of pytest: nothing is said about conformance
            raise SystemExit(ExitCode.ENVIRONMENT) from None
        print(f"quantcts: {error.format_message()}", file=sys.stderr)
        raise SystemExit(ExitCode.BAD_ARGUMENT) from None
