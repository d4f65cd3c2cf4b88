"""What the verdict says of a wrong answer: the fault by name, or where it is wrong; and one finding a cause."""

import json
import re

import numpy as np
import pytest
from conftest import FAULTY, ROOT

from conformance import diagnosis
from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.compare import UNEXPLAINED, compare_exactly, compare_quantizations, compare_to_expected
from conformance.data import linear_problem, quantization_problem
from conformance.goals import LinearGoal
from conformance.report.findings import findings
from conformance.subject import Subject
from conformance.verdict import Outcome, Verdict, decide
from reference.activations import QuantizedActivations, legal_codes, legal_quantizations, open_tokens
from reference.bounds import Contract, Expected, Hypothesis, false_alarm_bound
from reference.mutants import MUTANTS
from reference.rounding import FLOAT_FORMATS

MUTATED = ROOT / "tests" / "backends" / "mutated.py"
BF16 = FLOAT_FORMATS["bf16"]

# mutant -> the cases, and what the verdict says
NAMED = {
    "quantization_skipped": ("linear/w4-g128-sym/a-int8/bf16/*", "W4A16: activation quantization was skipped"),
    "int8_instead_of_fp8": ("linear/w4-g128-sym/a-fp8/bf16/*", "it computes int8 activations instead of fp8"),
    "static_instead_of_dynamic": ("linear/w4-g32-sym/a-int4/fp16/*", "it computes static scales instead of dynamic"),
    "per_tensor_instead_of_per_token": ("linear/w8-channel-asym/a-int8/fp16/*", "one scale a call instead of one a"),
    "zero_point_plus_one": ("linear/w3-g32-asym/a16/bf16/*", "zero points one too large"),
    "straddling_bits_dropped": ("dequantize/w3-g32-sym/bf16/*", "without the high bits that lie in the next word"),
    "scale_of_next_group": ("dequantize/w4-g32-asym/fp16/*", "the scales of the next group"),
    "packed_without_offset": ("packing/w4/*", "words without the offset"),
    "codes_half_away": ("activation_quantization/a-int8/bf16/*ties*", "codes rounded half away from zero"),
    "output_truncated": ("linear/w4-channel-sym/a16/bf16/*/random-0", "outputs truncated toward zero"),
    "zero_token_divided_by_zero": ("linear/w4-g{32,128}-*/a-int8/fp16/*integers*", "tokens that are zero"),
    "alpha_dropped": ("moe/w{3,4}-*/swigluoai/*", "it computes without alpha"),
    "expert_map_ignored": ("moe/*/absent-0", "with the expert map ignored: ids taken for places"),
    "weights_applied_twice": ("moe/w4-*/a16/*", "with the router's weights applied twice"),
    "intermediate_not_quantized": ("moe/w4-*/a-int8/*", "with an intermediate that is not quantized"),
    "limit_dropped": ("swiglu/*/bf16/*limits*", "it computes without the limit"),
    "bias_in_the_weights": ("routing/sigmoid*bias*/*random*", "weights with the correction bias"),
    "bias_of_next_column": ("linear/w4-g128-sym/a16/bf16/*bias*", "the bias of the next column"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_a_known_fault_is_named_with_its_distance(name, quantcts):
    query, words = NAMED[name]
    run = quantcts("run", "--backend", f"{MUTATED}:{name}", "--cases", query, "--quick")
    assert run.code == 1, run.output
    failing = [c for c in run.report["cases"] if c["outcome"] == "diverges"]
    named = [c for c in failing if c["diagnosis"]["fault"] == name]
    assert named, run.output
    assert len(named) >= 0.8 * len(failing)
    for case in named:
        assert words in case["detail"]
        assert re.search(
            r"\([\d.]+ bounds away; the right answer is [\d.e+]+ away\)|infinitely", case["detail"]
        )
        assert case["diagnosis"]["distance"] <= 2
    assert {f["cause"] for f in run.report["findings"]} >= {name}
    assert " ".join(words.split()) in " ".join(run.output.split())


def test_without_a_known_fault_the_pattern_is_given(quantcts):
    run = quantcts(
        "run", "--backend", f"{FAULTY}:one_nan", "--cases", "linear/w4-g128-sym/a16/bf16/m64-n256-k256/*"
    )
    for case in run.report["cases"]:
        assert case["detail"].startswith(
            "2 of 32768 elements are wrong; rows 63 to 127 in steps of 64; column 255; 2 NaN, 0 Inf"
        )
    assert run.report["findings"][0]["cause"] == "no known fault"


def test_computing_what_was_declined_is_diagnosed(quantcts, tmp_path):
    path = tmp_path / "careless.py"
    path.write_text(
        "from conformance.backend import Support\n"
        "from conformance.backends.numpy import NumpyBackend\n"
        "from reference.mutants import MUTANTS\n"
        "class Careless(NumpyBackend):\n"
        "    semantics = MUTANTS['zero_point_ignored'].semantics\n"
        "    def supports(self, case):\n"
        "        if not case.weight.symmetric and case.weight.bits == 5:\n"
        "            return Support.no('no asymmetric 5 bits')\n"
        "        return Support.yes()\n"
    )
    run = quantcts(
        "run", "--backend", f"{path}:Careless", "--cases", "linear/w5-g128-asym/a-int8/bf16/*", "--quick"
    )
    assert run.code == 1
    assert set(run.outcomes.values()) == {"dishonest"}
    said = next(c["detail"] for c in run.report["cases"])
    assert said.startswith(
        "it declines the case (no asymmetric 5 bits) and computes it all the same; the answer is wrong"
    )
    assert "it computes weights without their zero points" in said


# ---- where an answer is wrong


def weight_pattern(hit, bits, groups):
    wrong = np.zeros((4, len(hit)), np.bool_)
    wrong[1] = hit
    right = np.ones(wrong.shape)
    comparison = compare_exactly(right, np.where(wrong, 3.0, right))
    return diagnosis.pattern(comparison, np.where(wrong, 3.0, right), groups, bits)


def test_a_pattern_names_row_group_and_place_in_the_word():
    columns = np.arange(128)
    text = weight_pattern((columns // 32 == 2) & (columns % 8 == 3), 4, columns // 32)
    assert (
        "4 of 512 elements are wrong; row 1; columns 67 to 91 in steps of 8; group 2; only at bit 12 of a word"
        in text
    )
    assert "worst at [1, 67]: got 3.0, expected 1.0" in text
    straddling = columns * 3 % 32 + 3 > 32
    assert "only codes that lie in two words" in weight_pattern(straddling, 3, columns // 32)
    assert "of a word" not in weight_pattern(np.ones(128, np.bool_), 4, columns // 32)


def test_a_pattern_tells_a_bias():
    right = np.linspace(-2, 2, 40).reshape(4, 10)
    for actual, words in (
        (right + 1, "100 % too large"),
        (right - 1, "100 % too small"),
        (right * 1.1, "100 % too far from zero"),
        (right * 0.9, "100 % too near zero"),
    ):
        assert words in diagnosis.pattern(compare_exactly(right, actual), actual)
    scattered = right + np.resize([1.0, -1.0], right.shape)
    assert "100 %" not in diagnosis.pattern(compare_exactly(right, scattered), scattered)


def test_a_fault_explains_what_chance_does_not():
    assert diagnosis.explains(0.0, 1.0, 100)
    assert diagnosis.explains(0.01, 0.4, 1000)
    assert not diagnosis.explains(0.0, 0.01, 1000)  # ten elements are no evidence
    assert not diagnosis.explains(0.2, 0.9, 1000)  # it differs too often itself


def test_what_nothing_explains_costs_a_bounded_time(monkeypatch):
    monkeypatch.setattr(diagnosis, "_spent", 1e9)
    monkeypatch.setattr(diagnosis, "_fitted", {})
    asked = []
    suspects = diagnosis.Suspects(
        MUTANTS.values(), lambda m: asked.append(m) or 0.5, lambda m: None,  # type: ignore[arg-type,func-returns-value]
        diagnosis.Match(False, 1.0, 9.0), "all rows",
    )  # fmt: skip
    assert diagnosis.diagnose(suspects).text == "all rows"
    assert not asked


def test_distances_are_in_bounds():
    centre = np.array([[1.0, 2.0]])
    expected = Expected(centre, {"h": Hypothesis(centre, np.array([[0.0, 2.0**-10]]))}, BF16)
    half = 2.0**-9  # half an ulp of bf16 below 1: the smaller side counts
    assert diagnosis.distance_in_bounds(expected, centre) == 0
    off = centre + np.array([[half, 0.0]])
    assert diagnosis.distance_in_bounds(expected, off) == pytest.approx(1.0)
    off = centre + np.array([[0.0, 2.0**-10 + 2.0**-8]])  # at 2 the radius comes on top
    assert diagnosis.distance_in_bounds(expected, off) == pytest.approx(1.0)
    assert diagnosis.distance_in_bounds(expected, np.full((1, 2), np.nan)) == np.inf


# ---- the hull, and what may flip


CASE = "linear/w4-g128-sym/a-int8/bf16/m17-n160-k640-bias/random-0"


def flipped(how_many):
    """The right answer but for codes that may legally flip, in an order that no single hypothesis gives."""
    problem = linear_problem(all_cases()[CASE])
    expected = problem.expected(Contract(weights="exact"))
    fmt, weight = problem.case.activation, problem.weight
    from reference.weights import dequantize_exact

    parts, left = [], how_many
    for x in problem.batches:
        plain = next(iter(legal_quantizations(x, fmt, "kernel").values()))
        low, high = legal_codes(x, fmt, plain.scale)
        codes = plain.codes.copy()
        places = np.argwhere(low != high)
        for m, k in places[:left]:
            codes[m, k] = low[m, k] + high[m, k] - codes[m, k]
        left -= min(left, len(places))
        parts.append(QuantizedActivations(codes, plain.scale).dequantized() @ dequantize_exact(weight).T)
    assert left == 0, "the case has too few codes near a boundary"
    total = np.concatenate(parts) + problem.bias.astype(np.float64)
    return expected, BF16, total


def test_codes_that_may_flip_pass_with_a_note():
    from reference.rounding import round_to

    expected, output, total = flipped(2)
    found = compare_to_expected(expected, round_to(total, output))
    assert found.passes
    assert found.note in ("", UNEXPLAINED)


def test_a_code_that_may_not_flip_is_seen():
    case = all_cases()["activation_quantization/a-int8/bf16/m17-k640/random-0"]
    problem = quantization_problem(case)
    plain = next(iter(legal_quantizations(problem.x, case.activation, "kernel").values()))
    low, high = legal_codes(problem.x, case.activation, plain.scale)
    firm = np.argwhere((low == high) & (np.abs(plain.codes) < 100))[0]
    codes = plain.codes.copy()
    codes[tuple(firm)] += 1
    found = compare_quantizations(
        problem.x, case.activation, "kernel", QuantizedActivations(codes, plain.scale)
    )
    assert not found.passes
    assert found.wrong.sum() == 1
    scale = plain.scale * (1 + 2.0**-20)
    found = compare_quantizations(
        problem.x, case.activation, "kernel", QuantizedActivations(plain.codes, scale)
    )
    assert not found.passes
    assert "17 of 17 scales are wrong" in found.detail


def test_what_is_expected_of_a_wrong_code_is_allowed():
    """Under the scale and zero point that were given, which may be others than ours where several are legal."""
    case = all_cases()["activation_quantization/a-int8-asym/bf16/m64-k384/random-0"]
    problem = quantization_problem(case)
    legal = list(legal_quantizations(problem.x, case.activation, "kernel").values())
    seen = 0
    for given_ in legal:
        found = compare_quantizations(
            problem.x,
            case.activation,
            "kernel",
            QuantizedActivations(given_.codes + 2, given_.scale, given_.zero_point),
        )
        assert not found.passes
        low, high = found.allowed
        assert ((low <= found.right) & (found.right <= high))[found.wrong].all()
        seen += int((found.right != legal[0].codes).sum())
    assert seen, "no code of ours is another under their scales: the case shows nothing"


def test_ties_under_a_power_of_two_are_firm():
    case = all_cases()["activation_quantization/a-int8/bf16/m17-k640/ties-0"]
    problem = quantization_problem(case)
    plain = next(iter(legal_quantizations(problem.x, case.activation, "kernel").values()))
    settled = ~open_tokens(problem.x, case.activation, "kernel", plain)
    assert settled.sum() >= 8
    values = problem.x.astype(np.float64) / plain.scale
    tie = np.abs(values - np.trunc(values)) == 0.5
    assert tie[settled].any()
    away = np.where(tie, np.trunc(values) + np.sign(values), plain.codes)
    found = compare_quantizations(
        problem.x, case.activation, "kernel", QuantizedActivations(away, plain.scale)
    )
    assert not found.passes


# ---- findings, confidence, width


def verdict(case, fault, outcome=Outcome.DIVERGES, detail="1 of 4 elements are wrong"):
    record = diagnosis.Diagnosis(fault=fault, computes="x", pattern=detail).to_json()
    return Verdict(case, "mine", outcome, detail, diagnosis=record)


def test_failures_with_one_cause_are_one_finding_smallest_first():
    ids = [i for i in all_cases() if i.startswith("linear/w4-g128-sym/a16/bf16/")][:30]
    verdicts = [verdict(i, "scale_of_next_row") for i in ids] + [verdict(ids[0].replace("bf16", "fp16"), "")]
    found = findings(verdicts)
    assert [len(f.verdicts) for f in found] == [30, 1]
    sizes = [max(c.m, 1) * c.n * c.k for c in (all_cases()[v.case] for v in found[0].verdicts)]
    assert sizes == sorted(sizes)
    assert [f.cause for f in found] == ["scale_of_next_row", "no known fault"]
    crashes = [Verdict(i, "mine", Outcome.CRASHES, f"KeyError: {n}") for n, i in enumerate(ids)]
    assert len(findings(crashes)) == 1


def test_the_report_states_its_confidence(quantcts):
    run = quantcts("run", "--backend", "numpy", "--cases", "linear/w4-g128-sym/a-int8/bf16/*", "--quick")
    confidence = run.report["confidence"]
    assert confidence["elements"] == sum(c.get("elements", 0) for c in run.report["cases"]) > 1000
    assert confidence["false_alarm_bound"] == false_alarm_bound(confidence["elements"]) < 1e-6
    assert "false-alarm probability below" in run.output
    assert false_alarm_bound(10**30) == 1
    json.dumps(run.report)


WIDTHS = {
    "default": (Contract(), 0.5),
    "16-bit epilogue": (Contract(epilogue="16-bit"), 1.5),
    "8 partial sums": (Contract(partial_sums=8), 4.0),
}


def test_a_wider_contract_costs_width():
    case = all_cases()["linear/w4-channel-sym/a16/bf16/m17-n160-k640/random-0"]
    problem = linear_problem(case)
    widths = {}
    for name, (contract, _) in WIDTHS.items():
        backend = NumpyBackend.of("mine", NumpyBackend.semantics, contract)
        right = problem.expected(contract)
        first = next(iter(right.hypotheses.values()))
        y = right.finish(first, first.centre).astype(BF16.dtype)
        widths[name] = LinearGoal(problem, contract).compare((y,)).width
        subject = Subject(backend, case)
        assert decide(case, "mine", subject.support(), None, lambda: None).width == 0  # type: ignore[arg-type,return-value]
    assert widths["default"] <= WIDTHS["default"][1]
    assert widths["16-bit epilogue"] <= WIDTHS["16-bit epilogue"][1]
    assert widths["8 partial sums"] >= WIDTHS["8 partial sums"][1]
