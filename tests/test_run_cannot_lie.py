"""The ways of being green while nothing was checked, each tried and seen to fail."""

import json
import os

import numpy as np
import pytest
from conftest import FAULTY, ROOT

from conformance.backend import Support
from conformance.cases import all_cases
from conformance.compare import compare_exactly, compare_to_expected
from conformance.data import linear_problem
from conformance.goals import LinearGoal
from conformance.judge import Judge
from conformance.ledger import Ledger
from conformance.subject import Subject
from conformance.verdict import Outcome, Verdict
from reference.bounds import Contract, Expected, Hypothesis
from reference.rounding import FLOAT_FORMATS, round_to

SMALL = "linear/w4-g128-sym/a16/bf16/m1-n64-k128/*"
EXTRA_SUITE = """
from conformance.plugin import judges

@judges("packing")
def test_extra(case, subject, judge):
    {body}
"""


@pytest.fixture
def extra_suite(tmp_path):
    def write(body):
        path = tmp_path / "test_extra_suite.py"
        path.write_text(EXTRA_SUITE.format(body=body))
        return path

    return write


def test_an_early_return_is_a_gap_in_the_account(quantcts, extra_suite):
    run = quantcts("run", "--backend", "numpy", "--cases", "packing/w4/*", extra_suite("return"))
    assert run.code == 1
    assert any("planned but never judged" in p for p in run.problems)


def test_an_error_while_data_are_made_is_no_pass(quantcts, extra_suite):
    run = quantcts("run", "--backend", "numpy", "--cases", "packing/w4/*", extra_suite("1 / 0"))
    assert run.code == 1
    assert "crashes" in run.outcomes.values() or run.problems


def test_a_skip_in_a_suite_is_no_pass(quantcts, extra_suite):
    body = "import pytest; pytest.skip('not today')"
    run = quantcts("run", "--backend", "numpy", "--cases", "packing/w4/*", extra_suite(body))
    assert run.code == 1
    assert any("skipped" in p for p in run.problems)


def test_a_suite_that_does_not_import_fails_the_run(quantcts, tmp_path):
    path = tmp_path / "test_broken_suite.py"
    path.write_text("import nothing_of_this_name\n")
    run = quantcts("run", "--backend", "numpy", "--cases", "packing/w4/*", path)
    assert run.code != 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cases", "nothing/*"),
        ("--cases", "linear/*", "--cases", "nothing/*"),
        ("--quick", "-k", "no_such_word"),
        ("--quick", "--full"),
        ("--backend", "unknown"),
        ("--bogus",),
        ("no_such_file.py",),
    ],
)
def test_a_selection_of_nothing_ends_with_3(quantcts, arguments):
    backend = () if "--backend" in arguments else ("--backend", "numpy")
    assert quantcts("run", *backend, *arguments).code == 3


@pytest.mark.parametrize(
    "option",
    [
        ("--deselect", "conformance/suites/test_packing.py"),
        ("--ignore-glob=*test_packing*",),
        ("-o", "python_files=test_deq*.py"),
    ],
)
def test_a_pytest_option_cannot_take_selected_cases_away(quantcts, option):
    cases = ("--cases", "packing/w4/dim1/n1-k1/*", "--cases", "dequantize/w4-g128-sym/bf16")
    assert quantcts("run", "--backend", "numpy", *cases).code == 0
    run = quantcts("run", "--backend", "numpy", *cases, *option)
    assert run.code == 1
    assert any("selected, but pytest was told to leave them out" in p for p in run.problems)


def test_a_backend_file_that_exits_is_one_line(quantcts, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit(0)\n")
    run = quantcts("run", "--backend", f"{path}:backend")
    assert run.code == 3
    assert len(run.output.strip().splitlines()) == 1


def test_declining_everything_judges_nothing(quantcts):
    run = quantcts("run", "--backend", f"{FAULTY}:declines_everything", "--cases", "linear/w4-*/bf16/m1-*")
    assert run.code == 3
    assert "nothing was judged" in run.output
    assert set(run.outcomes.values()) == {"declines"}


def test_an_old_report_does_not_pass_for_a_run_that_broke_off(quantcts, tmp_path):
    report = tmp_path / "report.json"
    report.write_text('{"exit_code": 0}')
    run = quantcts("run", "--backend", "numpy", "--cases", SMALL, "--report", report, "-k", "no_such_word")
    assert run.code == 3
    assert json.loads(report.read_text())["exit_code"] == 3


def test_what_was_judged_is_on_disk_when_the_run_is_killed(quantcts, tmp_path):
    report = tmp_path / "report.json"
    run = quantcts(
        "run", "--backend", f"{FAULTY}:kills_its_process", "--cases", "dequantize/w4-g128-sym/*",
        "--cases", SMALL, "--report", report,
    )  # fmt: skip
    assert run.code == 0  # the process ended itself with 0: only what it left behind tells
    assert not report.exists()
    assert len((tmp_path / "report.json.part").read_text().splitlines()) > 0


def test_nan_in_the_expectation_passes_nothing():
    nan = np.full((2, 2), np.nan)
    expected = Expected(nan, {"nan": Hypothesis(nan, np.zeros((2, 2)))}, FLOAT_FORMATS["fp16"])
    assert not compare_to_expected(expected, nan.astype(np.float16)).passes
    assert not compare_exactly(nan, nan).passes
    wide = Expected(nan, {"nan": Hypothesis(nan, np.ones((2, 2)))}, FLOAT_FORMATS["fp16"])
    assert not compare_to_expected(wide, nan.astype(np.float16)).passes


def test_an_answer_of_no_elements_is_only_right_for_a_case_of_no_rows():
    none = np.zeros((0, 4))
    expected = Expected(none, {"e": Hypothesis(none, none)}, FLOAT_FORMATS["fp16"])
    assert compare_to_expected(expected, np.zeros((0, 4), np.float16)).passes
    assert [c.m for c in all_cases().values() if c.operation == "linear" and c.recipe != "empty"].count(
        0
    ) == 0


@pytest.mark.parametrize(
    "case_id", [i for i in all_cases() if i.startswith("linear/") and i.endswith("random-0")][::40]
)
def test_no_bound_is_wider_than_a_few_roundings(case_id):
    case = all_cases()[case_id]
    expected = linear_problem(case).expected(Contract(weights="rounded"))
    low, high = expected.interval(next(iter(expected.hypotheses.values())))
    signal = np.sqrt((expected.value**2).mean())
    steps = (high - low) / np.maximum(np.abs(expected.value), signal)
    assert steps.max() < 4 * FLOAT_FORMATS[case.dtype].eps


def test_the_oracle_is_asked_after_the_backend(monkeypatch):
    order = []
    case = all_cases()["linear/w4-g128-sym/a16/bf16/m1-n64-k128/random-0"]
    problem = linear_problem(case)

    class Watch:
        name, arrays = "watch", "numpy"

        def supports(self, case):
            return Support.yes()

        def load_linear(self, checkpoint):
            order.append("backend")
            right = round_to(problem.expected(Contract()).value, FLOAT_FORMATS["bf16"])
            rows = iter(np.split(right.astype(FLOAT_FORMATS["bf16"].dtype), 2))
            return lambda x: next(rows)

    def goal():
        order.append("oracle")
        return LinearGoal(problem, Contract())

    subject = Subject(Watch(), case)
    judge = Judge(subject, on_failure=lambda verdict: None)
    judge(subject.linear(problem.checkpoint, problem.batches), goal)
    assert order == ["backend", "oracle"]
    assert judge.verdict.outcome is Outcome.CONFORMS


def test_the_backend_cannot_write_into_the_judges_arrays():
    case = all_cases()["linear/w4-g128-sym/a16/bf16/m1-n64-k128/random-0"]
    problem = linear_problem(case)
    before = problem.expected(Contract()).value.copy()

    class Vandal:
        name, arrays = "vandal", "numpy"

        def supports(self, case):
            return Support.yes()

        def load_linear(self, checkpoint):
            for tensor in checkpoint.tensors.values():
                tensor[...] = 0
            return lambda x: x.fill(0)

    Subject(Vandal(), case).linear(problem.checkpoint, problem.batches)
    assert np.array_equal(problem.expected(Contract()).value, before)


def verdict(case, outcome):
    return Verdict(case, "b", outcome)


def test_a_ledger_balances_or_fails():
    ledger = Ledger()
    assert ledger.exit_code == 3
    ledger.plan(["a", "b"])
    assert ledger.exit_code == 1, "planned and never judged"
    ledger.enter("a", verdict("a", Outcome.CONFORMS))
    assert ledger.exit_code == 1
    ledger.enter("b", verdict("b", Outcome.DECLINES))
    assert ledger.exit_code == 0
    ledger.enter("c", verdict("c", Outcome.CONFORMS))
    assert ledger.exit_code == 1, "judged and never planned"


def test_a_case_is_not_judged_twice():
    ledger = Ledger()
    ledger.plan(["a"])
    ledger.enter("a", verdict("a", Outcome.DIVERGES))
    ledger.enter("a", verdict("a", Outcome.CONFORMS))
    assert ledger.exit_code == 1
    assert "judged twice" in ledger.problems[0]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_failing_outcome_fails_the_run(outcome):
    ledger = Ledger()
    ledger.plan(["a", "b"])
    ledger.enter("a", verdict("a", Outcome.CONFORMS))
    ledger.enter("b", verdict("b", outcome))
    assert ledger.exit_code == (1 if outcome in ("diverges", "dishonest", "crashes") else 0)


# ---- waivers are strict

WAIVER = """
[[waiver]]
backend = "{backend}"
query = "{query}"
reason = "known"
link = "https://example.org/1"
expires = {expires}
"""


@pytest.mark.parametrize(
    ("backend", "query", "expires", "code", "words"),
    [
        ("bias_dropped", "linear/w4-g128-sym/a16/bf16/m1-n64-k128-bias/*", "2999-01-01", 0, "waived"),
        ("bias_dropped", SMALL, "2999-01-01", 1, "expects a failure; remove it"),
        ("bias_dropped", "linear/w9-*", "2999-01-01", 3, "matches no case"),
        ("bias_dropped", SMALL, "2020-01-01", 3, "expired on 2020-01-01"),
        ("bias_dropped", "!" + SMALL, "2999-01-01", 3, "names the rest"),
        ("bias_dropped", SMALL, "2999-01-01T00:00:00", 3, "expires: missing, or no date"),
        ("bias_dropped", SMALL, '"soon"', 3, "expires: missing, or no date"),
        ("bias_dropped", SMALL, "2999-01-01\ncolour = 1", 3, "colour: unknown field"),
        ("bias_dropped", SMALL, "", 3, "not TOML"),
    ],
)
def test_waivers_are_strict(quantcts, tmp_path, backend, query, expires, code, words):
    path = tmp_path / "waivers.toml"
    path.write_text(WAIVER.format(backend=backend, query=query, expires=expires))
    run = quantcts("run", "--backend", f"{FAULTY}:{backend}", "--waivers", path,
                   "--cases", "linear/w4-g128-sym/a16/bf16/m1-n64-k128*")  # fmt: skip
    assert run.code == code, run.output
    assert words in run.output + json.dumps(run.report)


def test_a_missing_waiver_file_is_one_line(quantcts, tmp_path):
    run = quantcts("run", "--backend", "numpy", "--waivers", tmp_path / "none.toml")
    assert run.code == 3
    assert "none.toml: No such file" in run.output


# ---- the packages are ours


@pytest.mark.parametrize("name", ["reference", "conformance"])
@pytest.mark.parametrize("arguments", [("list",), ("run", "--quick")])
def test_a_stranger_of_our_name_is_one_clear_error(quantcts, tmp_path, name, arguments):
    (tmp_path / f"{name}.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = quantcts(*arguments, cwd=tmp_path, env={"PYTHONPATH": path})
    assert run.code == 4
    assert f"the package '{name}' is not QuantCTS's own" in run.output
    assert len(run.output.strip().splitlines()) == 1
