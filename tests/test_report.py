"""report.json, the terminal's matrix, `list`."""

import json
import os
import re
from io import StringIO
from pathlib import Path

import jsonschema
import pytest

from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.cli import main
from conformance.errors import RunError
from conformance.exitcodes import ExitCode
from conformance.ledger import Ledger
from conformance.report import document
from conformance.report.document import Report, environment, place_to_write, put, read, schema
from conformance.report.terminal import print_report
from conformance.verdict import Outcome, Verdict

QUERY = "{packing,dequantize,linear,validation}/w4*"


@pytest.fixture(scope="module")
def report(tmp_path_factory, request):
    from conftest import quantcts as fixture

    call = fixture.__wrapped__(tmp_path_factory.mktemp("report"))
    return call("run", "--backend", "numpy", "--quick", "--cases", QUERY, "-n", "2")


def test_it_obeys_its_schema_and_accounts_for_every_case(report):
    jsonschema.Draft202012Validator(schema()).validate(report.report)
    ledger = report.report["ledger"]
    outcomes = ("conforms", "diverges", "declines", "dishonest", "crashes", "waived")
    assert ledger["planned"] == sum(ledger[o] for o in outcomes) == len(report.report["cases"])
    assert ledger["planned"] == sum(
        c.quick and c.weight.bits == 4 and c.operation in ("packing", "dequantize", "linear", "validation")
        for c in all_cases().values()
    )


def test_it_names_versions_contract_and_selection(report):
    assert report.report["selection"] == {"set": "quick", "shard": "1/1", "queries": [QUERY], "keyword": ""}
    backend = report.report["environment"]["backends"][0]
    assert backend["name"] == "numpy"
    assert backend["contract"]["weights"] == "rounded"
    assert "numpy" in report.report["environment"]["packages"]


def test_cases_cite_their_clauses(report):
    for record in report.report["cases"]:
        assert tuple(report.report["clauses"][record["clauses"]]) == all_cases()[record["case"]].clauses


def test_kernels_stand_once_and_none_at_all_is_said(tmp_path):
    ids = list(all_cases())[:4]
    ledger = Ledger()
    for case, kernels in zip(ids, (("a", "b"), ("b",), (), None), strict=True):
        ledger.plan([case])
        ledger.enter(case, Verdict(case, "numpy", Outcome.CONFORMS, "", kernels=kernels))
    chosen = {"set": "quick", "shard": "1/1", "queries": [], "keyword": ""}
    report = Report(environment([NumpyBackend()]), chosen, ["quantcts"], path=tmp_path / "report.json")
    report.finish(ledger, ExitCode.AS_EXPECTED)
    written = read(tmp_path / "report.json")
    report.path = tmp_path / "report.json.gz"
    report.finish(ledger, ExitCode.AS_EXPECTED)
    assert read(report.path)["cases"] == written["cases"]
    report.path.write_bytes(report.path.read_bytes()[:-40])
    with pytest.raises(RunError, match="it is not gzip, or half of it"):
        read(report.path)
    assert written["kernels"] == ["a", "b"]
    assert [case.get("kernels") for case in written["cases"]] == [[0, 1], [1], [], None]


def test_the_matrix_has_a_word_for_every_cell(report):
    for words in ("numpy: packing", "numpy: linear  a16  bf16", "numpy: linear  a16  fp16  act-order",
                  "channel sym", "g128 asym", "conforms", "exit code 0", "planned"):  # fmt: skip
        assert words in report.output
    assert max(map(len, report.output.splitlines())) <= 110


def test_what_is_declined_everywhere_is_a_line_and_no_table():
    ledger = Ledger()
    outcomes = {
        "packing/w4/": Outcome.DECLINES, "linear/w4-g128-sym/a16/bf16/": Outcome.DECLINES,
        "linear/w3-g128-sym/a16/bf16/": Outcome.CONFORMS, "linear/w3-g128-sym/a16/fp16/": Outcome.DECLINES,
    }  # fmt: skip
    for start, outcome in outcomes.items():
        case = next(i for i in all_cases() if i.startswith(start))
        ledger.plan([case])
        ledger.enter(case, Verdict(case, "numpy", outcome, "", worst=0.5))
    report = Report(environment([NumpyBackend()]), {"set": "quick", "shard": "1/1"}, ["quantcts"])
    report.finish(ledger, ExitCode.AS_EXPECTED)
    written = StringIO()
    print_report(report, written)
    table, _, line = written.getvalue().partition("numpy declines all of: ")
    assert "numpy: linear  a16  bf16" in table
    assert re.search(r"w3 +conforms 0\.50.*\n *w4 +declines", table)
    assert line.splitlines()[0] == "packing, linear a16 fp16"
    assert "packing" not in table
    assert "fp16" not in table


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "it is not JSON, or half of it"),
        (lambda text: text.replace('"conforms",', '"fine",', 1), "outcome"),
        (lambda text: json.dumps({**json.loads(text), "schema": "quantcts-report/0"}), "schema"),
        (lambda text: json.dumps({**json.loads(text), "exit_code": 9}), "exit_code"),
        (lambda text: "[]", "the document"),
        (lambda text: "[" * 200_000, "it is nested too deeply"),
        (
            lambda text: text.replace('"backend_seconds": ', '"worst": NaN, "backend_seconds": ', 1),
            "NaN is no number",
        ),
    ],
)
def test_a_damaged_report_is_one_clear_error(report, tmp_path, change, words):
    path = tmp_path / "r.json"
    path.write_text(change(json.dumps(report.report)))
    with pytest.raises(RunError, match=words):
        read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worst", -0.5), ("worst", "0.5"), ("outcome", "fine"), ("outcome", None), ("elements", 1.5),
        ("elements", True), ("detail", 3), ("kernels", [0, -1]), ("kernels", ["a"]), ("statistics", {"rms": "1"}),
        ("invented", ""), ("diagnosis", {"fault": ""}), ("case", 1), ("case", ""),
    ],
)  # fmt: skip
def test_one_wrong_field_among_thousands_is_found_and_its_case_named(report, tmp_path, field, value):
    """The schema is asked about one case of each kind, and whatever it can tell apart is a kind."""
    document = json.loads(json.dumps(report.report))
    record = document["cases"][-3]
    record[field] = value
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RunError) as error:
        read(path)
    assert f"cases/{record['case']}" in str(error.value)
    assert field in str(error.value)


def test_a_report_whose_account_is_not_that_of_its_cases_is_refused(report, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**report.report, "cases": report.report["cases"][:-1]}))
    with pytest.raises(RunError, match=r"ledger/\w+: it says \d+, of the cases it is \d+"):
        read(path)


def twice(document):
    document["cases"][0] = dict(document["cases"][1])


def of_nobody(document):
    document["cases"][0]["backend"] = "nobody"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["ledger"].update(judged=1), r"ledger/judged: it says 1, of the cases it is \d+"),
        (lambda d: d["ledger"].update(planned=1), r"ledger/planned: it says 1, there are \d+ cases"),
        (lambda d: d["ledger"].update(problems=["one"], planned=1), "exit_code: it says 0"),
        (twice, "of numpy it is there 2 times"),
        (of_nobody, "environment/backends: nothing is said of nobody"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(report, tmp_path, change, said):
    document = json.loads(json.dumps(report.report))
    change(document)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RunError, match=said):
        read(path)


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read_end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert place_to_write("--report-html", str(pipe)) == pipe
    put(pipe, b"a page")
    assert os.read(read_end, 100) == b"a page"
    assert pipe.is_fifo()
    with pytest.raises(RunError, match="it is a folder; name a file"):
        put(Path(""), b"a page")
    with pytest.raises(RunError, match="it cannot be written there"):
        put(tmp_path / "a\0b", b"a page")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gate", ""), "--gate: the name is empty"),
        (("--waivers", ""), "--waivers: the name is empty"),
        (("--report-html", ""), "--report-html: the name is empty"),
        (("--report", "r.json", "--report-markdown", "./r.json"), "./r.json: --report is written there"),
        (("--report", "/dev/stdout"), "--report /dev/stdout: a report is written beside its journal; name a file"),
        (("--limit", "nan"), "--limit nan: give a number of seconds above 0"),
        (("--limit", "0"), "--limit 0.0: give a number of seconds above 0"),
    ],
)  # fmt: skip
def test_options_that_name_nothing_end_a_run_before_it_starts(quantcts, tmp_path, options, said):
    run = quantcts("run", "--backend", "numpy", "--cases", "packing/w4", *options)
    assert run.code == 3
    assert said in run.output
    assert run.report is None


def test_a_fault_of_the_tool_is_no_verdict_on_conformance(monkeypatch, capsys):
    def broken(*arguments):
        raise KeyError("a fault")

    monkeypatch.setattr(document, "read", broken)
    with pytest.raises(SystemExit) as ended:
        main(["report", "html", "x.json"])
    assert ended.value.code == 4
    assert "KeyError: 'a fault'" in capsys.readouterr().err


def test_a_whole_report_reads_back(report, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(report.report))
    assert read(path) == report.report
    with pytest.raises(RunError, match="No such file"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("place", ["/proc/nowhere/report.json", "."])
def test_a_report_that_cannot_be_written_ends_the_run_before_it_starts(quantcts, place):
    run = quantcts("run", "--backend", "numpy", "--quick", "--report", place)
    assert run.code == 3
    assert "--report" in run.output
    assert len(run.output.strip().splitlines()) == 1


def test_list_prints_filters_and_counts(quantcts):
    everything = quantcts("list").output.split()
    assert everything == list(all_cases())
    assert quantcts("list", "--quick").output.split() == [i for i, c in all_cases().items() if c.quick]
    some = quantcts("list", "linear/w{2,3}-*/bf16/*", "!*/random-*").output.split()
    assert some
    assert all(i.startswith(("linear/w2", "linear/w3")) and "random" not in i for i in some)
    assert "all: " in quantcts("list", "--count").output


@pytest.mark.parametrize(
    "arguments", [("list", "nothing/*"), ("list", "--bogus"), ("bogus",), ("list", "--quick", "--full")]
)
def test_bad_arguments_are_one_line_and_3(quantcts, arguments):
    run = quantcts(*arguments)
    assert run.code == 3
    assert len(run.output.strip().splitlines()) == 1
