"""The benchmark: what is wrong gets no number, what is impossible is no record, noise is no win."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import FAULTY, ROOT

pytest.importorskip("pytest_benchmark")

from conformance.bench import stand as stands
from conformance.bench.ahead import Ahead
from conformance.bench.clocks import Clock, spread
from conformance.bench.layers import JOINED
from conformance.bench.limits import Limits
from conformance.bench.peers import compare
from conformance.bench.plugin import STATES
from conformance.bench.rotation import Rotation, copies, kept_by_the_cache
from conformance.bench.stand import Stand, Untimed
from conformance.bench.subjects import ExpertsSubject, LinearSubject, QuantizerSubject
from conformance.bench.verify import (
    PROJECTED_TOKENS,
    _projected,
    some,
    wrong_codes,
    wrong_experts,
    wrong_linear,
)
from conformance.bench.verify import TOKENS as TOKENS_OF_THE_ORACLE
from conformance.bench.workloads import LINEAR, MOE, TOKENS, Workload, workloads
from conformance.cases import Case
from conformance.data import linear_problem
from conformance.gate.changes import Kind
from conformance.gate.timings import compare_timings, read_timings
from reference.activations import quantize, quantizers
from reference.bounds import Contract
from reference.formats import ActivationFormat, WeightFormat
from reference.linear import linear
from reference.moe import MoeLayer, moe
from reference.rounding import float_format, round_to
from reference.weights import dequantize_exact

BF16 = float_format("bf16")
CONTRACT = Contract()
W4 = WeightFormat.of(4, 128, True)


def of_linear(m=300, weight=W4, activation="a16"):
    case = Case("linear", weight, "random", 320, 256, m, activation=ActivationFormat(kind=activation))
    return LinearSubject(Workload(f"tiny-{weight.name}-{activation}", case, True))


def right_linear(subject, x):
    case = subject.case
    weight = subject.layer.rows(slice(None))
    expected = linear(x, weight, None, BF16, CONTRACT, case.activation)
    return round_to(next(iter(expected.hypotheses.values())).centre, BF16).astype(BF16.dtype)


def of_experts(m=40, activation="a16"):
    case = Case(
        "moe", W4, "random", 128, 256, m, activation=ActivationFormat(kind=activation), experts=16, top_k=2
    )
    return ExpertsSubject(Workload(f"tiny-{activation}", case, True))


# ---- workloads


def test_workloads_are_layers_of_models_for_each_number_of_tokens():
    for operation, names in (("linear", LINEAR), ("moe", MOE)):
        found = workloads(operation)
        assert {w.name for w in found} == set(names)
        assert {w.case.m for w in found} == set(TOKENS)
        assert len({w.id for w in found}) == len(found)
        assert any(w.quick for w in found)


def test_words_of_a_layer_are_whole():
    """Random words are random codes where no bit of a word lies beyond the last code."""
    for operation in ("linear", "moe"):
        for workload in workloads(operation):
            case = workload.case
            for k in (case.k,) if operation == "linear" else (case.k, case.n):
                assert k % 32 == 0
                assert case.weight.group_size < 0 or k % case.weight.group_size == 0


# ---- verification


@pytest.mark.parametrize("activation", ["a16", "int8", "fp8"])
@pytest.mark.parametrize("weight", [W4, WeightFormat.of(3, 128, False), WeightFormat.of(8, -1, True)])
def test_a_right_linear_passes(weight, activation):
    subject = of_linear(weight=weight, activation=activation)
    x = subject.inputs(0)[0]
    assert wrong_linear(subject.layer, subject.case, x, right_linear(subject, x), CONTRACT) == ""


def a_tile(y, places):
    y[64:128, 64:128] = y[64:128, 128:192]


def a_tail(y, places):
    y[-1, -1] = 0


def a_group_of_one_output(y, places):
    y[:, 100] *= 1.5


def one_output_at_all_tokens_but_the_sampled(y, places):
    y[1:-1, 200:216] += 0.5


def not_a_number(y, places):
    y[150, 150] = np.nan


@pytest.mark.parametrize(
    "spoil",
    [a_tile, a_tail, a_group_of_one_output, one_output_at_all_tokens_but_the_sampled, not_a_number],
)
def test_a_wrong_linear_is_seen(spoil):
    subject = of_linear(m=200)
    x = subject.inputs(0)[0]
    y = right_linear(subject, x).copy()
    spoil(y, subject.case)
    assert wrong_linear(subject.layer, subject.case, x, y, CONTRACT)


@pytest.mark.parametrize("activation", ["a16", "int8", "fp8"])
def test_of_many_tokens_none_is_left_out(activation):
    subject = of_linear(m=2100, activation=activation)
    x = subject.inputs(0)[0]
    y = right_linear(subject, x)
    assert wrong_linear(subject.layer, subject.case, x, y, CONTRACT) == ""
    sampled = {*some(2100, PROJECTED_TOKENS).tolist(), *some(2100, TOKENS_OF_THE_ORACLE).tolist()}
    for first, outputs, value, said in (
        (1024, slice(None), 0, "10 of 165 tiles of 64 tokens and 64 outputs is off, first from token 1024"),
        (
            1024,
            slice(64, 128),
            1e30,
            "of 165 tiles of 64 tokens and 64 outputs is off, first from token 1024",
        ),
        (2048, slice(256, 320), np.nan, "outputs are not finite"),
        (2048, slice(319, 320), np.inf, "outputs are not finite"),
    ):
        rows = [t for t in range(first, min(first + 128, 2100)) if t not in sampled]
        wrong = y.copy()
        wrong[rows, outputs] = value
        assert said in wrong_linear(subject.layer, subject.case, x, wrong, CONTRACT)


def test_skipped_quantization_of_activations_is_seen():
    subject = of_linear(activation="int8")
    x = subject.inputs(0)[0]
    y = right_linear(of_linear_as(subject, "a16"), x)
    assert "sampled" in wrong_linear(subject.layer, subject.case, x, y, CONTRACT)


def of_linear_as(subject, activation):
    """The same layer, called without quantization."""
    other = LinearSubject(subject.workload)
    other.case = replace(subject.case, activation=ActivationFormat(kind=activation))
    other.layer = subject.layer
    return other


def right_experts(subject, call):
    case = subject.case
    experts = tuple(subject.layer.expert(e) for e in range(case.experts))
    layer = MoeLayer(experts, case.gated, case.activation, case.top_k)
    expected = moe([(call.x, call.weights, call.ids)], layer, BF16, CONTRACT)
    return round_to(next(iter(expected.hypotheses.values())).centre, BF16).astype(BF16.dtype)


def another_token(y, call):
    y[70] = y[3]


def slightly_off(y, call):
    y[:] = y * np.float32(1.02)


def one_expert_is_missing(y, call):
    tokens = np.nonzero((call.ids == call.ids[5, 0]).any(axis=1))[0]
    y[tokens] = y[tokens] * np.float32(0.7)


def not_finite(y, call):
    y[9, 9] = np.inf


@pytest.mark.parametrize(
    "activation", ["a16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8"))]
)
def test_right_experts_pass(activation):
    subject = of_experts(m=100, activation=activation)
    call = subject.call(0)
    assert len(set(call.kind.tolist())) == 64
    assert wrong_experts(subject.layer, call, 0, right_experts(subject, call), CONTRACT) == ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (another_token, "are equal"),
        (slightly_off, "the first token"),
        (one_expert_is_missing, "of its norm"),
        (not_finite, "not finite"),
    ],
)
def test_wrong_experts_are_seen(spoil, said):
    subject = of_experts(m=100)
    call = subject.call(0)
    assert call.ids[5, 0] not in call.ids[0], "the first token does not meet the expert that will be missing"
    y = right_experts(subject, call)
    spoil(y, call)
    assert said in wrong_experts(subject.layer, call, 0, y, CONTRACT)


def test_no_token_of_experts_is_left_out():
    subject = of_experts(m=16)
    call = subject.call(0)
    y = right_experts(subject, call)
    assert wrong_experts(subject.layer, call, 0, y, CONTRACT) == ""
    for token in range(16):
        wrong = y.copy()
        wrong[token] = 0
        assert wrong_experts(subject.layer, call, 0, wrong, CONTRACT)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_no_token_of_a_quantizer_is_left_out(kind):
    fmt = ActivationFormat(kind=kind)
    case = Case(
        "activation_quantization", WeightFormat.of(8, -1, True), "random", k=96, m=3000, activation=fmt
    )
    x = QuantizerSubject(Workload("tiny", case, True)).inputs(0)[0]
    codes, scales = quantize(x, fmt, next(quantizers(fmt, "kernel", BF16))).stored(fmt)
    assert wrong_codes(case, x, codes, scales, CONTRACT) == ""
    rows = [t for t in range(700, 900) if t not in some(3000, TOKENS_OF_THE_ORACLE)]
    for wrong, given in ((0, codes), (0, scales), (np.nan, scales)):
        spoilt = given.copy()
        spoilt[rows] = wrong
        answer = (spoilt, scales) if given is codes else (codes, spoilt)
        said = wrong_codes(case, x, *answer, CONTRACT)
        assert said == f"{len(rows)} of 3000 tokens are far from x, first token 700"


def test_joined_rows_are_sums_of_rows_with_signs():
    subject = of_linear()
    rows = subject.layer.rows(slice(0, JOINED))
    weight = rows.codes.astype(np.float64) * np.repeat(rows.scale.astype(np.float64), 128, axis=1)
    np.testing.assert_allclose(
        subject.layer.joined[0], subject.layer.signs[:JOINED] @ weight, rtol=0, atol=1e-12
    )


def test_values_between_two_codes_may_all_go_either_way():
    """A row whose largest is 3.0625: by amax * (1 / 448) its scale is an ulp off amax / 448, and values of 16 bits that
    lie between two codes of the one have their codes in the other."""
    subject = of_linear(4, activation="fp8")
    case, orders = subject.case, list(quantizers(ActivationFormat(kind="fp8"), CONTRACT.quantizer, BF16))
    every = np.arange(0x3E00, 0x4045, dtype=np.uint16).view(BF16.dtype)[None]
    codes = [quantize(every, case.activation, order).codes for order in orders[:4]]
    between = every[codes[3] != codes[0]]
    x = np.resize(between, (4, 256))
    x[:, 0] = every.max()
    values = quantize(x, case.activation, orders[3]).dequantized()
    y = round_to(values @ dequantize_exact(subject.layer.rows(slice(None))).T, BF16).astype(BF16.dtype)
    assert not _projected(subject.layer, case, x, y, CONTRACT)
    assert _projected(subject.layer, case, x, y, replace(CONTRACT, quantizer="compressed-tensors"))
    y[:, 64:128] = y[:, 128:192]
    assert _projected(subject.layer, case, x, y, CONTRACT)


def by_torchaos_arithmetic(subject, x, rounded=np.rint):
    """Codes are x times the reciprocal of a scale of 16 bits, sums meet the scales one after the other."""
    weight = subject.layer.rows(slice(None))
    scale = (np.abs(x).max(axis=1, keepdims=True) / BF16.dtype.type(127.5)).astype(np.float32)
    codes = np.clip(rounded(x.astype(np.float32) * (np.float32(1) / scale)), -128, 127)
    sums = (codes.astype(np.float64) @ weight.codes.astype(np.float64).T).astype(np.float32)
    return (sums * scale).astype(BF16.dtype) * weight.scale[:, 0]


def test_codes_may_be_products_with_the_reciprocal_of_a_scale_of_16_bits():
    """In a row whose largest is 3.484375, 0.177734375 and 0.396484375 are 6.5 and 14.5 of its scale: x / s has codes 6
    and 14, x * (1 / s) has 7 and 15."""
    subject = of_linear(8, WeightFormat.of(8, -1, True), "int8")
    case = subject.case
    contract = Contract(
        weights="rounded", integers="int32", quantizer="compressed-tensors", epilogue="16-bit"
    )
    x = np.clip(subject.inputs(0)[0].astype(np.float32), -3, 3).astype(BF16.dtype)
    x[3, 0], x[3, 1:60] = 3.484375, np.resize([0.177734375, -0.396484375], 59)
    how = list(quantizers(case.activation, contract.quantizer, BF16))[1]
    assert quantize(x, case.activation, how).codes[3, 1:3].tolist() == [6, -14]
    assert wrong_linear(subject.layer, case, x, by_torchaos_arithmetic(subject, x), contract) == ""
    assert "sampled" in wrong_linear(
        subject.layer, case, x, by_torchaos_arithmetic(subject, x, np.trunc), contract
    )


# ---- the stand


class Benchmark:
    """The part of pytest-benchmark's fixture that the stand uses, over the real clock."""

    def __init__(self, clock):
        self.clock, self.extra_info, self.has_error = clock, {}, False

    def pedantic(self, target, setup, rounds, warmup_rounds):
        setup()
        self.data = self.clock.rounds(target, rounds)

    @property
    def stats(self):
        class Of:
            pass

        found = Of()
        found.stats = Of()
        found.stats.data = self.data
        return found


class Layer:
    """A linear that is right, and counts its calls; wrong: what it does from which call on."""

    name, device, arrays, contract = "tiny", "cpu", "numpy", CONTRACT

    def __init__(self, subject, wrong=None):
        self.subject, self.wrong, self.calls, self.first = subject, wrong, 0, None

    def load_linear(self, checkpoint):
        def call(x):
            self.calls += 1
            y = right_linear(self.subject, x)
            self.first = y if self.first is None else self.first
            return self.wrong(self, y) if self.wrong else y

        return call


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(stands, "LONG", 0.0)
    monkeypatch.setattr(stands, "LEAST", 4)
    monkeypatch.setattr(stands, "copies", lambda *_: 2)


def timed(wrong=None, limits=None, nondeterministic=""):
    subject, stand, clock = of_linear(m=4), Stand(), Clock("cpu")
    stand.limits["cpu"] = limits or Limits("cpu", 1e12, {"a16": 1e15})
    benchmark, layer = Benchmark(clock), Layer(subject, wrong)
    layer.nondeterministic = nondeterministic
    stand.time(subject, layer, benchmark, clock)
    return benchmark


@pytest.mark.usefixtures("short")
def test_a_right_layer_is_timed_and_its_figures_say_what_they_mean():
    info = timed().extra_info
    assert info["copies"] == 2
    assert info["median_seconds"] > info["floor_seconds"] > 0
    assert info["fraction_of_floor"] == info["floor_seconds"] / info["median_seconds"]
    assert info["operations"] == 2 * 4 * 320 * 256
    assert info["bytes"] == 320 * 256 // 2 + 320 * 2 * 2 + 16 + 2 * 4 * (320 + 256)


@pytest.mark.usefixtures("short")
def test_a_wrong_layer_gets_no_number():
    with pytest.raises(Untimed, match="wrong: before it is timed"):
        timed(lambda layer, y: y * np.asarray(1.5, y.dtype))


@pytest.mark.usefixtures("short")
def test_a_layer_that_remembers_its_answer_gets_no_number():
    with pytest.raises(Untimed, match="wrong: on other inputs"):
        timed(lambda layer, y: layer.first)


@pytest.mark.usefixtures("short")
def test_one_of_several_equal_calls_that_differs_is_seen():
    with pytest.raises(Untimed, match="call 1 of 2"):
        timed(lambda layer, y: y * np.asarray(2.0, y.dtype) if layer.calls % 2 else y)


@pytest.mark.usefixtures("short")
def test_sums_in_any_order_may_lie_further_apart_where_that_is_declared():
    def off(by):
        return lambda layer, y: y * np.asarray(by, y.dtype) if layer.calls % 2 else y

    with pytest.raises(Untimed, match="call 1 of 2"):
        timed(off(1.08))
    timed(off(1.08), nondeterministic="atomics")
    with pytest.raises(Untimed, match="call 1 of 2"):
        timed(off(1.5), nondeterministic="atomics")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("call", [1, 3, 7, 12])
def test_a_layer_that_raises_is_a_crash(call):
    def broken(layer, y):
        if layer.calls >= call:
            raise ValueError("no")
        return y

    with pytest.raises(Untimed, match="crashes: ValueError: no"):
        timed(broken)


@pytest.mark.usefixtures("short")
def test_what_takes_minutes_is_not_timed(monkeypatch):
    monkeypatch.setattr(stands, "SLOW", 0.0)
    layers = []

    def counted(layer, y):
        layers.append(layer)
        return y

    with pytest.raises(Untimed, match="slow: a call takes"):
        timed(counted)
    assert len(layers) == 1


@pytest.mark.usefixtures("short")
def test_faster_than_the_device_is_no_record():
    with pytest.raises(Untimed, match=r"invalid: .* is less than"):
        timed(limits=Limits("cpu", 1.0, {"a16": 1.0}))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "subject", [of_experts(m=3), QuantizerSubject(workloads("activation_quantization")[0])]
)
def test_experts_and_quantizers_are_timed(subject):
    from conformance.backends.numpy import backend

    stand, clock = Stand(), Clock("cpu")
    stand.limits["cpu"] = Limits("cpu", 1e12, {"a16": 1e15})
    benchmark = Benchmark(clock)
    stand.time(subject, backend(), benchmark, clock)
    assert benchmark.extra_info["bytes"] == subject.moved > 0


def test_a_round_is_divided_by_its_calls():
    clock = Clock("cpu")
    clock.calls = 4
    seconds = min(clock.rounds(lambda: time.sleep(0.02), 3))
    assert 0.005 <= seconds < 0.02


def test_refreshed_inputs_lie_where_the_old_ones_lay():
    class Backend:
        name, device, arrays = "same", "cpu", "numpy"

    seen = []
    rotation = Rotation(Backend(), [lambda x: seen.append(x) or x.copy()] * 2, [np.zeros(3)])
    rotation.refresh([np.ones(3)])
    rotation.run()
    assert [x.tolist() for x in rotation.outputs] == [[1, 1, 1]] * 2
    assert len({id(x) for x in seen}) == 2


# ---- comparisons


def record(name, seconds, noise=0.01, graph=True):
    info = {"backend": name, "median_seconds": seconds, "noise": noise, "graph": graph, "device": "cuda"}
    return {"group": "g", "extra_info": info}


def test_what_is_within_noise_is_no_win():
    records = [record("a", 1.0), record("b", 1.05, 0.001), record("c", 1.5)]
    compare(records)
    assert [r["extra_info"]["standing"] for r in records] == ["ambiguous", "ambiguous", "slower"]
    assert records[2]["extra_info"]["times_fastest"] == 1.5
    records = [record("a", 1.0), record("c", 1.5)]
    compare(records)
    assert [r["extra_info"]["standing"] for r in records] == ["fastest", "slower"]
    records = [record("a", 1.0), record("c", 1.5, graph=False)]
    compare(records)
    assert [r["extra_info"]["standing"] for r in records] == ["ambiguous", "ambiguous"]


def test_noise_is_what_the_same_thing_timed_twice_differs_by():
    assert spread([1.0, 1.0, 1.0, 1.1, 1.1, 1.1]) == pytest.approx(0.1)
    assert spread([1.0, 1.1] * 10) == pytest.approx(0)


def test_a_round_has_several_places_as_far_as_memory_goes(monkeypatch):
    torch = pytest.importorskip("torch")
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert copies(60 << 20, 60 << 20, 2e-5, "cuda") == 8
    assert copies(60 << 20, 60 << 20, 0.14, "cuda") == 3  # slow: as many as a cold cache needs
    assert copies(330 << 20, 11 << 30, 2e-5, "cuda") == 1  # experts of few tokens, a layer of 11 GiB
    assert copies(20 << 20, 300 << 20, 2e-5, "cuda") == 8
    assert copies(1 << 10, 0, 2e-6, "cuda") == 48
    assert copies(1 << 30, 1 << 30, 0.1, "cpu") == 2


def test_what_a_cache_could_keep_from_round_to_round_is_overwritten(monkeypatch):
    torch = pytest.importorskip("torch")
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kept_by_the_cache(48 << 10, "cuda") == 150 << 20
    assert kept_by_the_cache(160 << 20, "cuda") == 0
    assert kept_by_the_cache(48 << 10, "cpu") == 0

    class Backend:
        name, device, arrays = "torch", "cpu", "torch"

    small = Rotation(Backend(), [torch.square], [np.ones(3)], 100)
    small._overwritten.fill_(7)
    small.clear()
    assert small._overwritten.tolist() == [0] * 100
    Rotation(Backend(), [torch.square], [np.ones(3)]).clear()


def test_what_could_not_be_computed_ahead_is_left_to_the_subject():
    subject, ahead = of_experts(m=1), Ahead()
    ahead.begin([(subject.workload, CONTRACT)])
    ahead.end()
    ahead.hand(subject, CONTRACT)
    assert subject.layer.once(("oracle", CONTRACT), lambda: None) is not None
    other, broken = of_experts(m=2, activation="int8"), Future()
    broken.set_exception(BrokenExecutor())
    ahead._expected[other.workload.layer, CONTRACT] = broken
    ahead.hand(other, CONTRACT)
    assert other.layer.once(("oracle", CONTRACT), lambda: "asked") == "asked"


# ---- the command

FEW = ("--quick", "--cases", "activation_quantization/*/m1")


def test_the_command_times_and_writes_what_pytest_benchmark_reads(quantcts, tmp_path):
    place = tmp_path / "bench.json"
    run = quantcts("bench", "--backend", "numpy", "--backend", "torch_cpu", *FEW, "--benchmark-json", place)
    assert run.code == 0, run.output
    document = json.loads(place.read_text())
    assert document["quantcts"]["states"]["timed"] == len(document["benchmarks"]) == 4
    assert document["quantcts"]["seconds"]["timing"] > 0
    assert {b["extra_info"]["backend"] for b in document["benchmarks"]} == {"numpy", "torch_cpu"}
    assert all(b["options"]["timer"].endswith("wall_clock") for b in document["benchmarks"])
    assert all(b["extra_info"]["standing"] for b in document["benchmarks"])


@pytest.mark.parametrize(
    "text", ["", "[]", '{"benchmarks": []}', '{"benchmarks": [{}]}', '{"benchmarks": 1}']
)
def test_a_file_of_no_figures_ends_with_one_line(quantcts, tmp_path, text):
    figures = tmp_path / "bench.json"
    figures.write_text(text)
    run = quantcts("plot", figures, "--to", tmp_path / "plots")
    assert run.code == 3, run.output
    assert str(figures) in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--backend", "numpy", "--cases", "nothing/*"), 3, "nothing/*"),
        (("--quick",), 3, "--backend is missing"),
        (("--backend", "cuda", "--quick"), 4, "none of the CUDA backends"),
        (("--backend", "numpy", "--cases", "linear/*", "--quick", "--unknown"), 3, "unknown"),
        (
            ("--backend", "numpy", "--quick", "--benchmark-json", "/dev/null/x"),
            3,
            "--benchmark-json /dev/null/x",
        ),
        (("--backend", "numpy", "--quick", "--benchmark-disable"), 3, "nothing is timed"),
    ],
)
def test_what_cannot_be_timed_ends_with_one_line(quantcts, words, code, said):
    run = quantcts("bench", *words)
    assert run.code == code, run.output
    assert said in run.output
    assert "Traceback" not in run.output


def test_an_older_pytest_benchmark_is_named_and_no_file_is_emptied(quantcts, tmp_path):
    of = tmp_path / "older" / "pytest_benchmark-5.2.3.dist-info"
    of.mkdir(parents=True)
    (of / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-benchmark\nVersion: 5.2.3\n")
    kept = tmp_path / "bench.json"
    kept.write_text("kept")
    words = ("--backend", "numpy", "--cases", "nothing/*", "--benchmark-json", str(kept))
    run = quantcts("bench", *words, env={"PYTHONPATH": str(of.parent)})
    assert run.code == 4, run.output
    said = "quantcts: pytest-benchmark 5.2.3 is older than 5.3: pip install --upgrade 'quantcts[bench]'\n"
    assert run.output == said
    assert kept.read_text() == "kept"


def test_a_backend_with_a_fault_ends_with_1(quantcts, tmp_path):
    layer = "linear/llama-3.1-8b.o/w4-g128-sym/a16/bf16/m1"
    spec = ("--backend", f"{FAULTY}:scale_of_group_0")
    place = tmp_path / "bench.json"
    place.write_text("an earlier run's")
    run = quantcts("bench", *spec, "--cases", layer, "--benchmark-json", place)
    assert run.code == 1, run.output
    assert "wrong: before it is timed" in run.output
    document = json.loads(place.read_text())
    assert document["benchmarks"] == []
    (untimed,) = document["quantcts"]["untimed"]
    assert (untimed["workload"], untimed["state"]) == (layer, "wrong")
    assert untimed["reason"].startswith("before it is timed")
    # For the gate it is what is no longer timed.
    before = {
        "extra_info": {"workload": layer, "backend": untimed["backend"], "device": "cpu", "noise": 0.01}
    }
    before |= {"fullname": "", "stats": {"median": 1e-3, "iqr": 0.0}}
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"benchmarks": [before]}))
    (change,) = compare_timings(read_timings(old), read_timings(place))
    assert change.kind is Kind.UNTIMED
    assert change.detail.startswith("wrong: before it is timed")


STALE = """
from conformance.backends.numpy import NumpyBackend

class Stale(NumpyBackend):
    name = "stale"

    def quantize_activation(self, x, args, scale):
        if not hasattr(self, "first"):
            self.first = super().quantize_activation(x, args, scale)
        return self.first
"""


def test_what_is_found_wrong_after_it_was_timed_has_no_record(quantcts, tmp_path):
    (tmp_path / "stale.py").write_text(STALE)
    words = ("--backend", f"{tmp_path}/stale.py:Stale", "--backend", "numpy", "--quick")
    place = tmp_path / "bench.json"
    cases = ("--cases", "activation_quantization/*/a-int8/*/m1", "--benchmark-json", place)
    run = quantcts("bench", *words, *cases)
    assert run.code == 1, run.output
    assert "wrong: on other inputs, after it was timed" in run.output
    document = json.loads(place.read_text())
    assert [b["extra_info"]["backend"] for b in document["benchmarks"]] == ["numpy"]
    assert document["quantcts"]["states"] == dict.fromkeys(STATES, 0) | {"timed": 1, "wrong": 1}
    assert [r["backend"] for r in document["quantcts"]["untimed"]] == ["stale"]


SLOWED = """
import time

from conformance.backends.numpy import NumpyBackend


class Sound(NumpyBackend):
    name = "kernel"
    seconds = 0.0

    def quantize_activation(self, *asked):
        time.sleep(self.seconds)
        return super().quantize_activation(*asked)


class Slowed(Sound):
    seconds = 0.02


class Wrong(Sound):
    name = "wrong"

    def quantize_activation(self, *asked):
        codes, *more = super().quantize_activation(*asked)
        return [0 * codes, *more]
"""


ENDED = """
import os

from conformance.backends.numpy import NumpyBackend


class Ended(NumpyBackend):
    name = "ended"

    def quantize_activation(self, x, *asked):
        if len(x) == 2:
            os.kill(os.getpid(), {number})
        return super().quantize_activation(x, *asked)
"""


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    """Benchmarks of backends that are sound, slowed or wrong, with a saved one to compare with."""
    from conftest import quantcts as fixture

    folder = tmp_path_factory.mktemp("slowed")
    (folder / "slowed.py").write_text(SLOWED)
    call = fixture.__wrapped__(folder)

    def bench(names, *options):
        backends = [word for name in names for word in ("--backend", f"{folder}/slowed.py:{name}")]
        cases = ("--quick", "--cases", "activation_quantization/*/a-int8/*/m1")
        place = folder / f"{'-'.join(names)}.json"
        storage = ("--benchmark-storage", folder / "saved", "--benchmark-json", place)
        return call("bench", *backends, *cases, *storage, *options), place

    run, _ = bench(["Sound"], "--benchmark-save=before")
    assert run.code == 0, run.output
    return folder, bench, call


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_ended_is_no_success(slowed, number):
    """In its second workload of some: what was timed before stands in the file."""
    folder, _, _ = slowed
    (folder / "ended.py").write_text(ENDED.format(number=int(number)))
    command = [sys.executable, "-m", "quantcts", "bench", "--backend", f"{folder}/ended.py:Ended"]
    command += ["--cases", "activation_quantization/k4096/*/a-int8/*/m{1,2,4}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout


def test_a_slowed_backend_closes_the_gate(slowed):
    folder, bench, call = slowed
    run, now = bench(["Slowed"])
    assert run.code == 0, run.output
    report = folder / "report.json"
    assert call("run", "--backend", "numpy", "--cases", "packing/w4", "--report", report).code == 0
    reports = ("--baseline", report, "--current", report, "--current-bench", now)
    gate = call("gate", *reports, "--baseline-bench", folder / "Sound.json")
    assert gate.code == 2
    assert (
        "newly slow: 1\n  kernel activation_quantization/k4096/w8-channel-sym/a-int8/bf16/m1" in gate.output
    )
    assert call("gate", *reports, "--baseline-bench", now).code == 0


@pytest.mark.parametrize(
    ("names", "options", "code"),
    [
        (["Slowed"], ("--benchmark-compare=0001", "--benchmark-compare-fail=median:50%"), 2),
        (["Slowed", "Wrong"], ("--benchmark-compare=0001", "--benchmark-compare-fail=median:50%"), 1),
        (["Sound"], ("--benchmark-compare=9999", "--benchmark-compare-fail=median:50%"), 3),
        (["Sound"], ("--benchmark-compare-fail=median:50%",), 3),
    ],
)
def test_comparisons_by_pytest_benchmark_end_with_our_codes(slowed, names, options, code):
    run, _ = slowed[1](names, *options)
    assert run.code == code, run.output


def test_small_problems_of_the_matrix_agree_with_the_layers_of_the_benchmark():
    """Both say of the same words the same codes: `some_rows` and the suites' own encoder."""
    from conformance.bench.layers import some_rows

    case = Case("linear", WeightFormat.of(5, 32, False), "random", 40, 96, 2)
    problem = linear_problem(case)
    found = some_rows(problem.checkpoint.tensors, case.weight, case.k, np.array([0, 7, 39]))
    np.testing.assert_array_equal(found.codes, problem.weight.codes[[0, 7, 39]])
    np.testing.assert_array_equal(found.zero_point, problem.weight.zero_point[[0, 7, 39]])
