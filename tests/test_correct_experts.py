"""Correct layers of experts are not refused, nor are gated activations; what lies about its arithmetic is."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from conformance.cases import all_cases
from conformance.diagnosis import Diagnosis
from conformance.goals import MoeGoal, SwigluGoal
from conformance.verdict import Outcome
from reference.bounds import Contract

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import correct_experts
from correct_experts import CorrectExperts
from correct_kernels import judged, run_seed, sample


def a_case(recipe, activation, dtype, **more):
    """The first of few products that is like this."""
    return next(
        case
        for case in all_cases().values()
        if (case.operation, case.recipe, case.activation.name, case.dtype)
        == ("moe", recipe, activation, dtype)
        and all(getattr(case, name) == value for name, value in more.items())
        and 2 < case.m * case.top_k < 140
        and case.k * case.n < 12000
    )


PLAIN = [
    a_case("random", "a16", "bf16", variant="silu"),
    a_case("random", "a16", "fp16", variant="swigluoai"),
    a_case("random", "a-int8", "fp16", variant="gelu-tanh"),
    a_case("random", "a-fp8", "bf16", variant="swiglustep"),
]
# What a seed may draw, made to happen.
SITUATIONS = {
    "the factor in the weights": (a_case("shared", "a16", "bf16"), {"factor": "weights", "stored": "all"}),
    "the factor at the end": (a_case("shared", "a16", "bf16"), {"factor": "end", "stored": "all"}),
    "an input that is rounded to float32, then to 16 bits": (
        all_cases()["moe/w3-channel-asym/a16/fp16/swiglustep/t3-e8-k1-h128-i256-bias/on-input-0"],
        {},
    ),
    "a bound that says nothing": (
        all_cases()["moe/w8-channel-sym/a-fp8/fp16/silu/t3-e8-k2-h32-i160/integers-0"],
        {"hopper": "e8m13", "weights": "exact", "quantizer": "compressed-tensors", "results": "float32"},
    ),
    "a 16-bit epilogue": (PLAIN[0], {"outside": "epilogue", "epilogue": "16-bit"}),
    "partial sums": (PLAIN[2], {"outside": "partial sums", "partial_sums": 3}),
    "compressed-tensors": (PLAIN[2], {"quantizer": "compressed-tensors"}),
    "experts that are absent": (a_case("absent", "a-int8", "bf16"), {}),
    "tokens without expert": (a_case("unrouted", "a16", "bf16"), {"results": "folded", "stored": "all"}),
}
WITHIN = {"outside": "", "hopper": "fp32"}


@pytest.fixture(autouse=True)
def nothing_is_diagnosed(monkeypatch):
    """Whether a kernel is refused is asked here, not why."""
    for goal in (MoeGoal, SwigluGoal):
        monkeypatch.setattr(goal, "diagnose", lambda *_: Diagnosis("refused"))


def refused(kernel, cases):
    """What the judge says of the cases that a kernel claims and that it does not pass."""
    found = [judged(kernel, case) for case in cases if kernel.supports(case).claimed]
    assert found
    return {j.case: j.detail for j in found if j.outcome is not Outcome.CONFORMS}


@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm(seed):
    small = [case for case in sample(seed, 40, "experts") if case.m * case.top_k * case.k * case.n < 5e5]
    assert refused(CorrectExperts(seed, **WITHIN), small[:4]) == {}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_false_alarm_where_something_is_made_to_happen(situation):
    case, how = SITUATIONS[situation]
    assert refused(CorrectExperts(7, **{**WITHIN, **how}), [case]) == {}


@pytest.mark.parametrize("sigmoid", ["exp", "tanh", "tanh.approx"])
@pytest.mark.parametrize("errors", ["up", "down"])
def test_approximations_that_are_off_by_all_they_may_be(sigmoid, errors):
    cases = [
        case
        for case in all_cases().values()
        if case.operation == "swiglu" and case.recipe in ("random", "wide") and 3 <= case.m <= 33
    ]
    how = {"sigmoid": sigmoid, "errors": errors, "exponential": "approximate", "divide": "approximate"}
    assert refused(CorrectExperts(5, **how, stored="nothing", gelu="plain"), cases) == {}


def test_a_seed_draws_one_kernel_and_one_sample():
    assert CorrectExperts(5).how == CorrectExperts(5).how
    assert run_seed(5, 2, "experts") == run_seed(5, 2, "experts")
    ids = [[case.id for case in sample(seed, 6, "experts")] for seed in (5, 6)]
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("lie", "contract"),
    [
        ({"stored": "all"}, {"intermediates": "fp32"}),
        ({"stored": "nothing", "quantizer": "kernel"}, {"intermediates": "16-bit"}),
        (
            {"sigmoid": "tanh.approx", "errors": "up", "stored": "nothing"},
            {"sigmoid": "exp", "intermediates": "fp32"},
        ),
        ({"outside": "partial sums", "partial_sums": 4}, {"partial_sums": 1}),
    ],
    ids=["16-bit intermediates", "float32 intermediates", "tanh.approx", "partial sums"],
)
def test_what_is_not_declared_is_refused(lie, contract):
    kernel = CorrectExperts(3, **{**WITHIN, "quantizer": "kernel", **lie})
    assert refused(kernel, PLAIN) == {}
    kernel.contract = Contract(weights=kernel.contract.weights, **{"intermediates": "any", **contract})
    assert refused(kernel, PLAIN)


def test_a_sigmoid_in_16_bits_is_refused(monkeypatch):
    kernel = CorrectExperts(
        3, **WITHIN, sigmoid="exp", divide="reciprocal", stored="nothing", quantizer="kernel"
    )
    assert refused(kernel, PLAIN) == {}
    exponential = correct_experts.Gated.exponential

    def coarse(self, v, alpha=1.0):
        return exponential(self, v, alpha).astype(np.float16).astype(np.float32)

    monkeypatch.setattr(correct_experts.Gated, "exponential", coarse)
    assert refused(kernel, PLAIN)
