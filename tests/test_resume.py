"""A run that is cut off goes on with --resume: nothing is judged twice, nothing is lost, nothing else is continued."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT

from conformance.errors import RunError
from conformance.report.journal import read_journal

CUT_OFF = """
import os
from pathlib import Path

from conformance.backends.numpy import NumpyBackend

FOLDER = Path(__file__).parent


class CutOff(NumpyBackend):
    name = "cut_off"

    def dequantize(self, checkpoint):
        with open(FOLDER / "calls", "a") as calls:
            calls.write(".")
        if not (FOLDER / "whole").exists() and (FOLDER / "calls").stat().st_size >= 5:
            os._exit(9)
        return super().dequantize(checkpoint)
"""
CASES = ("--cases", "dequantize/w4-{g128,g32}-sym/*", "--cases", "packing/w4/dim1/*")


@pytest.fixture
def cut_off(quantcts, tmp_path):
    """A run that ended in its fifth call; what asks the same again."""
    (tmp_path / "cut_off.py").write_text(CUT_OFF)
    words = ("run", "--backend", f"{tmp_path}/cut_off.py:CutOff", *CASES, "--bundle-limit", "0")
    assert quantcts(*words).code == 9
    assert not (tmp_path / "report.json").exists()
    (tmp_path / "whole").touch()
    return words


def calls(tmp_path):
    return (tmp_path / "calls").stat().st_size


@pytest.mark.parametrize("workers", [pytest.param((), marks=pytest.mark.slow), ("-n", "2")])
def test_what_was_judged_stands_and_the_rest_is_judged(quantcts, cut_off, tmp_path, workers):
    part = tmp_path / "report.json.part"
    judged = [json.loads(line)["case"] for line in part.read_text().splitlines()[1:]]
    assert len(judged) >= 4
    run = quantcts(*cut_off, "--resume", *workers)
    assert run.code == 0, run.output
    assert f"{len(judged)} verdicts of {part} stand" in run.output
    assert not part.exists()
    whole = quantcts(*cut_off)
    assert run.outcomes == whole.outcomes
    assert run.report["resumed"] == len(judged)
    assert "resumed" not in whole.report
    assert run.report["ledger"] == whole.report["ledger"]
    dequantized = [c for c in whole.outcomes if c.startswith("dequantize")]
    # The case that ended the first run was asked once more; then all of them by the whole run.
    assert calls(tmp_path) == 2 * len(dequantized) + 1


def test_a_line_that_was_being_written_does_not_count(quantcts, cut_off, tmp_path):
    part = tmp_path / "report.json.part"
    part.write_bytes(part.read_bytes() + b'{"case": "dequan')
    (tmp_path / "whole").unlink()
    assert quantcts(*cut_off, "--resume").code == 9  # cut off once more, in its first call
    assert all(json.loads(line) for line in part.read_text().splitlines())
    (tmp_path / "whole").touch()
    run = quantcts(*cut_off, "--resume")
    assert run.code == 0, run.output


def test_another_run_is_not_continued(quantcts, cut_off, tmp_path):
    part = tmp_path / "report.json.part"
    before = part.read_bytes()
    run = quantcts(*cut_off, "--resume", "--cases", "linear/*")
    assert run.code == 3
    assert f"{part}: queries: " in run.output
    assert "start anew without --resume" in run.output
    lines = before.splitlines(keepends=True)
    head = json.loads(lines[0])
    head["environment"]["packages"]["numpy"] = "1.0"
    part.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(lines[1:]))
    run = quantcts(*cut_off, "--resume")
    assert run.code == 3
    assert f"{part}: packages: " in run.output
    assert part.read_bytes().splitlines()[1:] == before.splitlines()[1:]


HEAD = '{"journal": "quantcts-journal/1", "started": "", "selection": {}, "asked": {}, "environment": {}}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "its first line is not whole"),
        ('{"journal": "quantcts', "its first line is not whole"),
        ('{"journal": "quantcts-journal/0"}\n', "line 1: it is of quantcts-journal/0"),
        ("{}\n", "line 1: it is of no journal"),
        ('{"journal": "quantcts-journal/1"}\n', "line 1: started: missing"),
        (f"{HEAD}nothing\n", "line 2: "),
        (f"{HEAD}[]\n", "line 2: it is no object"),
        (f'{HEAD}{{"case": 1}}\n', "line 2: "),
    ],
)
def test_what_is_no_journal_is_one_error(tmp_path, content, said):
    part = tmp_path / "report.json.part"
    part.write_text(content)
    with pytest.raises(RunError, match=re.escape(said)) as error:
        read_journal(part)
    assert str(part) in str(error.value)


def test_where_no_run_was_cut_off_there_is_one_line(quantcts):
    run = quantcts("run", "--backend", "numpy", *CASES, "--resume")
    assert run.code == 3
    assert "is not there: no run with this --report was cut off" in run.output
    assert len(run.output.strip().splitlines()) == 1


def test_another_backend_of_the_same_name_is_not_continued(quantcts, cut_off, tmp_path):
    source = (tmp_path / "cut_off.py").read_text()
    other = tmp_path / "other.py"
    other.write_text(source)
    words = ["run", "--backend", f"{other}:CutOff", *cut_off[3:]]
    run = quantcts(*words, "--resume")
    assert run.code == 3
    assert f"{tmp_path}/report.json.part: code: " in run.output
    (tmp_path / "cut_off.py").write_text(source + "# changed\n")
    assert quantcts(*cut_off, "--resume").code == 3
    (tmp_path / "cut_off.py").write_text(source)
    run = quantcts(*cut_off, "--resume", "--limit", "5")
    assert run.code == 3
    assert "limit: 60.0 when the run began, 5.0 now" in run.output


def test_what_judges_nothing_leaves_the_journal(quantcts, cut_off, tmp_path):
    part = tmp_path / "report.json.part"
    before = part.read_bytes()
    quantcts(*cut_off, "--resume", "--collect-only")
    assert part.read_bytes() == before
    assert quantcts(*cut_off, "--resume").code == 0


def test_two_runs_do_not_write_one_journal(quantcts, cut_off, tmp_path):
    part = tmp_path / "report.json.part"
    before = part.read_bytes()
    with part.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for words in (("--resume",), ()):
            run = quantcts(*cut_off, *words)
            assert run.code == 3
            assert "another run writes there" in run.output
    assert part.read_bytes() == before


def test_a_journal_that_cannot_be_written_costs_no_report(quantcts, tmp_path):
    (tmp_path / "report.json").write_text("old")
    (tmp_path / "report.json.part").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "quantcts", "run", "--backend", "numpy", *CASES, "--report", tmp_path / "report.json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "report.json.part: it cannot be written there" in done.stdout + done.stderr
    assert (tmp_path / "report.json").read_text() == "old"


def test_the_baseline_that_a_run_has_replaced_is_none(quantcts, cut_off, tmp_path):
    run = quantcts(*cut_off, "--resume", "--gate", tmp_path / "report.json")
    assert run.code == 3
    assert "name another file" in run.output


def test_without_a_report_there_is_nothing_to_go_on_with(tmp_path):
    words = ("run", "--backend", "numpy", *CASES, "--resume")
    done = subprocess.run(
        [sys.executable, "-m", "quantcts", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "name the --report" in done.stdout + done.stderr


@pytest.fixture
def short_path():
    """A folder for temporary files: sockets have no room in pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGTERM, ("--isolate",))]
)
def test_an_interrupted_run_says_how_it_goes_on(tmp_path, short_path, number, options):
    place = tmp_path / "report.json"
    words = (
        "run",
        "--backend",
        "numpy",
        "--quick",
        "--cases",
        "moe/*",
        "--report",
        place,
        "--bundle-limit",
        "0",
        *options,
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "quantcts", *map(str, words)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTEST_ADDOPTS": "", "TMPDIR": str(short_path)},
    )  # fmt: skip
    part = tmp_path / "report.json.part"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (part.exists() and part.read_text().count("\n") > 2):
        time.sleep(0.1)
    output = interrupted(run, number)
    assert run.returncode == 4, output
    assert "with --resume it goes on" in output
    assert json.loads(place.read_text())["ledger"]["judged"] >= 1
    assert part.exists()
    assert not list(short_path.glob("quantcts-*"))


LOST = """
import os
import signal

from conformance.backends.numpy import NumpyBackend


class Destructor:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass  # the exception comes up here, and Python drops it


class Lost(NumpyBackend):
    name = "lost"

    def dequantize(self, checkpoint):
        Destructor()
        return super().dequantize(checkpoint)
"""


def test_an_interrupt_that_python_drops_is_not_lost(quantcts, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    run = quantcts("run", "--backend", f"{tmp_path}/lost.py:Lost", *CASES)
    assert run.code == 4, run.output
    assert "the run was interrupted or broke down; with --resume it goes on" in run.output
    assert run.report["ledger"]["judged"] <= 1


BETWEEN_LINES = """
from conformance.backends.numpy import NumpyBackend


def interrupt():
    raise KeyboardInterrupt


interrupt.__code__ = interrupt.__code__.replace(co_linetable=b"")


class BetweenLines(NumpyBackend):
    name = "between_lines"

    def dequantize(self, checkpoint):
        interrupt()
"""


def test_an_interrupt_that_falls_between_two_lines_is_one_too(quantcts, tmp_path):
    (tmp_path / "between.py").write_text(BETWEEN_LINES)
    run = quantcts("run", "--backend", f"{tmp_path}/between.py:BetweenLines", *CASES)
    assert run.code == 4, run.output
    assert "the run was interrupted or broke down; with --resume it goes on" in run.output


def interrupted(run, number):
    """What it said."""
    run.send_signal(number)
    try:
        return run.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        run.kill()
        return run.communicate()[0]
