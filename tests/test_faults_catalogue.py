"""docs/faults.md says what is: its cases and mutants exist, and each case refuses what it is named for."""

import builtins
import re
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
from conftest import ROOT

from conformance.backends.numpy import NumpyBackend
from conformance.cases import DEFECTS, all_cases
from conformance.data import (
    codes_in_range,
    codes_out_of_range,
    defective_layer,
    linear_problem,
    moe_problem,
    packing_axis,
    packing_codes,
)
from conformance.discrimination import bench, concerns
from conformance.judge import Judge
from conformance.subject import Subject
from reference.mutants import MUTANTS
from reference.packing import packed_size

TEXT = (ROOT / "docs" / "faults.md").read_text()
CASES = all_cases()
COLUMNS = ["fault", "source", "case"]
MUTANT, ERROR, VERDICT = "mutant", "error and verdict", "verdict"


@dataclass(frozen=True)
class Row:
    """last: what stands in the fourth column, whose heading is kind."""

    fault: str
    sources: list[str]
    cases: list[str]
    kind: str
    last: list[str]


def rows():
    kind = ""
    for line in TEXT.splitlines():
        if not line.startswith("|"):
            kind = ""
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4, line
        if not kind:
            assert cells[:3] == COLUMNS, line
            kind = cells[3]
        elif set(line) != set("|- "):
            fault, source, case, last = cells
            yield Row(
                fault,
                re.findall(r"\[([^]]+)\]", source),
                re.findall(r"`([^`]+)`", case),
                kind,
                re.findall(r"`([^`]+)`", last),
            )


ROWS = list(rows())


def of(kind):
    return [row for row in ROWS if row.kind == kind]


def test_every_row_is_whole_and_of_a_known_kind():
    assert {row.kind for row in ROWS} == {MUTANT, ERROR, VERDICT}
    assert len(of(MUTANT)) >= 60
    for row in ROWS:
        assert all((row.fault, row.sources, row.cases, row.last)), row
    faults = [row.fault for row in ROWS]
    assert len(set(faults)) == len(faults)


def test_every_case_and_every_mutant_exists():
    assert not {case for row in ROWS for case in row.cases} - set(CASES)
    assert not {name for row in of(MUTANT) for name in row.last} - set(MUTANTS)


def test_every_source_is_linked_and_every_link_is_used():
    used = set(re.findall(r"\[([\w.-]+#\d+)\](?!:)", TEXT))
    linked = dict(re.findall(r"^\[([\w.-]+#\d+)\]: (\S+)$", TEXT, re.M))
    assert used == set(linked)
    for name, url in linked.items():
        repository, number = name.split("#")
        assert re.fullmatch(rf"https://github\.com/[\w.-]+/{repository}/(pull|issues)/{number}", url), url


def test_prose_has_lines_of_at_most_120_columns():
    long = [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long


PAIRS = {}  # case -> the mutants that it is named for
for _row in of(MUTANT):
    for _case in _row.cases:
        PAIRS.setdefault(_case, set()).update(_row.last)


@pytest.mark.parametrize("case", sorted(PAIRS))
def test_a_case_refuses_every_mutant_it_is_named_for(case):
    asked = bench(CASES[case])
    with warnings.catch_warnings(), np.errstate(all="ignore"):  # some mutants overflow
        warnings.simplefilter("ignore", RuntimeWarning)
        for name in sorted(PAIRS[case]):
            assert concerns(CASES[case], MUTANTS[name]), f"{name} is not wrong in {case}"
            assert asked.judge(MUTANTS[name])[0] is True, f"{case} does not refuse {name}"


# ---- what computes nothing


class Raising(NumpyBackend):
    """Claims every case, and its loaders raise."""

    error = Exception

    def load_linear(self, checkpoint):
        raise self.error("no such thing")

    load_moe = load_linear

    def pack(self, codes, bits, axis):
        raise self.error("no such thing")


def answer(subject, case):
    if case.operation == "packing":
        codes, axis = packing_codes(case), packing_axis(case)
        words = list(codes.shape)
        words[axis] = packed_size(codes.shape[axis], case.weight.bits)
        return subject.pack(codes, axis, tuple(words))
    if case.operation == "moe":
        problem = moe_problem(case)
        return subject.moe(problem.checkpoint, problem.calls)
    problem = linear_problem(case)
    return subject.linear(problem.checkpoint, problem.batches)


@pytest.mark.parametrize(
    ("name", "error", "verdict"), [(case, *row.last) for row in of(ERROR) for case in row.cases]
)
def test_a_loader_that_raises_gets_the_verdict(name, error, verdict):
    case, backend, failures = CASES[name], Raising(), []
    backend.error = getattr(builtins, error)
    judge = Judge(Subject(backend, case), failures.append)
    judge(answer(judge.subject, case), lambda: pytest.fail("there is nothing to compare"))
    assert judge.verdict.outcome == verdict
    assert failures == [judge.verdict]
    assert error in judge.verdict.detail


class Credulous(NumpyBackend):
    """Claims to validate, looks at nothing and answers zeros."""

    def load_linear(self, checkpoint):
        n = int(checkpoint.tensors["weight_shape"][0])
        return lambda x: np.zeros((len(x), n), x.dtype)

    def pack(self, codes, bits, axis):
        shape = list(codes.shape)
        shape[axis] = packed_size(shape[axis], bits)
        return np.zeros(shape, np.int32)


@pytest.mark.parametrize(
    ("name", "verdict"), [(case, *row.last) for row in of(VERDICT) for case in row.cases]
)
def test_computing_with_bad_data_gets_the_verdict(name, verdict):
    case, failures = CASES[name], []
    assert case.recipe in DEFECTS
    judge = Judge(Subject(Credulous(), case), failures.append)
    subject = judge.subject
    if case.recipe == "code-range":
        good, bad, axis = codes_in_range(case), codes_out_of_range(case), packing_axis(case)
        words = Credulous().pack(good, case.weight.bits, axis).shape
        judge.refusal(lambda: subject.pack(bad, axis, words), control=lambda: subject.pack(good, axis, words))
    else:
        good, bad, x = defective_layer(case)
        judge.refusal(lambda: subject.linear(bad, [x]), control=lambda: subject.linear(good, [x]))
    assert judge.verdict.outcome == verdict
    assert failures == [judge.verdict]
    assert case.recipe in judge.verdict.detail
