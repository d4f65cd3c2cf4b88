"""Correct kernels are not refused, and what lies about its arithmetic or breaks it is."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from conformance.cases import all_cases
from conformance.diagnosis import Diagnosis
from conformance.goals import LinearGoal
from conformance.verdict import Outcome
from reference.bounds import Contract

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import correct_linears
from correct_kernels import judged, run_seed, sample, upper_bound
from correct_linears import CorrectKernel


def random_case(weight, activation, dtype):
    """The first with a bias, enough columns to go wrong and few outputs to diagnose."""
    return next(
        case
        for case in all_cases().values()
        if (case.operation, case.recipe, case.bias) == ("linear", "random", True)
        and (case.weight.name, case.activation.name, case.dtype) == (weight, activation, dtype)
        and case.k >= 250
        and case.m * case.n < 3000
    )


CASES = [
    random_case("w4-g128-asym", "a16", "bf16"),
    random_case("w4-channel-sym", "a16", "fp16"),
    random_case("w4-channel-asym", "a16", "bf16"),
    random_case("w2-channel-sym", "a-fp8", "bf16"),
    random_case("w4-channel-sym", "a-fp8", "fp16"),
    random_case("w8-g32-asym", "a16", "fp16"),
]


@pytest.fixture(autouse=True)
def nothing_is_diagnosed(monkeypatch):
    """Whether a kernel is refused is asked here, not why."""
    monkeypatch.setattr(LinearGoal, "diagnose", lambda *_: Diagnosis("refused"))


def outcomes(kernel, cases):
    """Of the cases that a kernel claims."""
    return {case.id: judged(kernel, case) for case in cases if kernel.supports(case).claimed}


@pytest.mark.parametrize("seed", range(10))
def test_no_false_alarm(seed):
    kernel = CorrectKernel(seed, hopper="fp32")
    small = [case for case in sample(seed, 50) if case.m * max(case.n, 1) * case.k < 1e6]
    found = outcomes(kernel, small[:25])
    assert len(found) > 15
    assert {name: j.detail for name, j in found.items() if j.outcome is not Outcome.CONFORMS} == {}


@pytest.mark.parametrize("accumulator", ["e8m13", "e8m13/128"])
def test_no_false_alarm_on_fp8_tensor_cores(accumulator):
    kernel = CorrectKernel(3, hopper=accumulator, weights="exact", outside="")
    found = outcomes(kernel, CASES)
    assert accumulator in {j.kind for j in found.values()}
    assert {j.outcome for j in found.values()} == {Outcome.CONFORMS}


def test_an_exact_recipe_without_a_token_exact_in_14_bits():
    case = all_cases()["linear/w4-g32-asym/a-fp8/bf16/m7-n33-k32/magnitudes-0"]
    kernel = CorrectKernel(3, hopper="e8m13", weights="exact", outside="")
    assert judged(kernel, case).outcome is Outcome.CONFORMS


def test_a_late_zero_point_and_an_outlier_on_fp8_tensor_cores():
    case = all_cases()["linear/w4-channel-asym/a-fp8/bf16/m64-n64-k160/trained-0"]
    how = {"late": True, "stored": True, "split": "none", "hopper": "e8m13", "order": "sequential"}
    kernel = CorrectKernel(37, **how, weights="exact", quantizer="compressed-tensors", outside="")
    assert judged(kernel, case).outcome is Outcome.CONFORMS


def test_partial_sums_among_the_subnormal_numbers():
    case = all_cases()["linear/w2-g128-sym/a-int4/fp16/m64-n256-k256/magnitudes-0"]
    kernel = CorrectKernel(38, outside="partial sums", partial_sums=8)
    assert judged(kernel, case).outcome is Outcome.CONFORMS


def test_a_seed_draws_one_kernel_and_one_sample():
    assert CorrectKernel(5).how == CorrectKernel(5).how
    assert run_seed(5, 6) == run_seed(5, 6)
    assert [c.id for c in sample(5, 6)] != [c.id for c in sample(6, 6)]


@pytest.mark.parametrize(
    "lie",
    [
        {"outside": "epilogue", "epilogue": "16-bit"},
        {"outside": "partial sums", "partial_sums": 4},
        {"outside": "zero point"},
        {"outside": "", "hopper": "e8m13", "weights": "exact"},
    ],
    ids=["16-bit epilogue", "partial sums", "scaled zero points", "e8m13"],
)
def test_what_is_not_declared_is_refused(lie):
    kernel = CorrectKernel(3, quantizer="kernel", **lie)
    assert {j.outcome for j in outcomes(kernel, CASES).values()} == {Outcome.CONFORMS}
    kernel.contract = Contract()
    assert any(judged(kernel, case).outcome is Outcome.DIVERGES for case in CASES)


def test_an_accumulation_in_float16_is_refused(monkeypatch):
    def in_float16(x, w, fused):
        total = np.zeros((len(x), len(w)), np.float16)
        for k in range(x.shape[1]):
            total += (x[:, k, None] * w[None, :, k]).astype(np.float16)
        return total.astype(np.float32)

    kernel = CorrectKernel(3, order="sequential", hopper="fp32", split="none", outside="", scale="weight")
    assert {j.outcome for j in outcomes(kernel, CASES).values()} == {Outcome.CONFORMS}
    monkeypatch.setattr(correct_linears, "sequential", in_float16)
    assert judged(kernel, CASES[0]).outcome is Outcome.DIVERGES


def test_the_rule_of_three():
    assert upper_bound(0, 1000) == pytest.approx(3.0 / 1000, rel=0.01)
    assert upper_bound(2, 1000) == pytest.approx(6.3 / 1000, rel=0.01)
