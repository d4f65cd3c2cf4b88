"""The quantized linear and its bound: right kernels pass, wrong ones are seen (C40-C46)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from conformance.cases import Case
from conformance.compare import compare_to_expected
from conformance.data import linear_problem
from reference.bounds import Contract
from reference.errors import FormatError, TensorError
from reference.formats import WeightFormat
from reference.linear import linear
from reference.rounding import FLOAT_FORMATS, round_to
from reference.semantics import columns_of
from reference.weights import QuantizedWeight, dequantize, dequantize_exact, scale_shape

BF16, FP16 = FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp16"]
EXACT, ROUNDED, ANY = Contract("exact"), Contract("rounded"), Contract("any")


def weight_of(rng, fmt, n, k, dtype, index=None):
    low, high = fmt.code_range
    shape = scale_shape(fmt, n, k)
    scale = np.exp2(rng.normal(0, 1, shape)) / (np.sqrt(k) * 0.29 * 2.0**fmt.bits)
    zeros = None if fmt.symmetric else rng.integers(low, high + 1, shape).astype(np.int8)
    codes = rng.integers(low, high + 1, (n, k)).astype(np.int8)
    return QuantizedWeight(fmt, codes, scale.astype(dtype), zeros, index)


def problem_of(seed, fmt, m, n, k, form, index=None):
    rng = np.random.default_rng(seed)
    weight = weight_of(rng, fmt, n, k, form.dtype, index)
    x = rng.normal(0, 1, (m, k))
    x = (np.abs(x) if seed % 3 == 0 else x).astype(form.dtype)
    bias = rng.normal(0, 1, n).astype(form.dtype) if seed % 2 else None
    return x, weight, bias


# ---- the value and its hypotheses


@pytest.mark.parametrize(
    "fmt", [WeightFormat.of(3, -1, True), WeightFormat.of(4, 4, False)], ids=lambda f: f.name
)
@pytest.mark.parametrize("form", [BF16, FP16], ids=lambda f: f.name)
def test_hypotheses_against_exact_sums(fmt, form):
    x, weight, bias = problem_of(1, fmt, 3, 5, 8, form)
    expected = linear(x, weight, bias, form, ANY)
    matrices = {
        "exact weights": dequantize_exact(weight),
        f"weights rounded to {form.name}": dequantize(weight).astype(np.float64),
    }
    assert list(expected.hypotheses) == list(matrices)
    assert np.array_equal(expected.value, expected.hypotheses["exact weights"].centre)
    for name, matrix in matrices.items():
        for m, n in np.ndindex(3, 5):
            terms = [Fraction(float(x[m, k])) * Fraction(float(matrix[n, k])) for k in range(8)]
            total = sum(terms) + Fraction(float(bias[n]))
            error = abs(Fraction(float(expected.hypotheses[name].centre[m, n])) - total)
            assert error <= Fraction(2) ** -50 * (sum(map(abs, terms)) + 1)


def test_the_contract_chooses_the_hypotheses():
    x, weight, _ = problem_of(2, WeightFormat.of(4, 4, False), 3, 5, 8, BF16)
    names = {c: list(linear(x, weight, None, BF16, c).hypotheses) for c in (EXACT, ROUNDED, ANY)}
    assert names == {
        EXACT: ["exact weights"],
        ROUNDED: ["weights rounded to bf16"],
        ANY: ["exact weights", "weights rounded to bf16"],
    }
    powers = replace(weight, scale=np.ones_like(weight.scale))
    assert list(linear(x, powers, None, BF16, ANY).hypotheses) == ["exact weights"]


@pytest.mark.parametrize("fields", [{"weights": "float"}, {"accumulator": "fp16"}])
def test_contracts_without_meaning_are_refused(fields):
    with pytest.raises(FormatError, match=r"^contract: "):
        Contract(**fields)


def test_shapes_that_do_not_fit_are_refused():
    x, weight, _ = problem_of(2, WeightFormat.of(4, 4, False), 3, 5, 8, BF16)
    for wrong in (x[:, :-1], x[0], x[None]):
        with pytest.raises(TensorError, match=r"^x: expected shape \[M, 8\]"):
            linear(wrong, weight, None, BF16, ANY)
    with pytest.raises(TensorError, match=r"^bias: expected shape \[5\], found \[4\]"):
        linear(x, weight, np.zeros(4), BF16, ANY)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_stored_columns_are_the_weight(strategy):
    fmt = WeightFormat(4, False, 4 if strategy == "group" else -1, strategy)
    index = (
        np.random.default_rng(0).permutation(np.arange(8) // 4).astype(np.int32)
        if strategy == "group"
        else None
    )
    weight = weight_of(np.random.default_rng(0), fmt, 5, 8, np.float32, index)
    columns = columns_of(weight, FP16)
    codes, zeros, scales = columns.u, columns.u_z, columns.scale
    assert codes.shape == zeros.shape == scales.shape == (5, 8)
    assert codes.min() >= 0
    assert zeros.min() >= 0
    assert np.array_equal((codes - zeros) * scales, dequantize_exact(weight))


# ---- the radius


def test_the_radius_of_one_group_by_hand():
    """x = (1, 2), codes 9 and 6, zero point 8, scale 1/2: products 0.5 and -2, halves 10.5 and 12."""
    weight = QuantizedWeight(WeightFormat(4), np.array([[1, -2]], np.int8), np.array([[0.5]], np.float16))
    nz, pre, halves = np.sqrt(0.25 + 4), 1.5, 10.5 + 12
    reach = halves
    by_hand = 2.0**-23 * (
        (2 / 8) * (reach / 2 + nz)
        + 4 * np.sqrt(2) * (reach + nz)
        + 4 * halves
        + 5 * (pre + nz)
        + (2 / 4) * (reach - 6 * nz)
    )
    x = np.array([[1, 2]], np.float16)
    assert linear(x, weight, None, FP16, EXACT).radius.item() == pytest.approx(by_hand, rel=1e-14)
    bias = np.array([-3], np.float16)
    assert linear(x, weight, bias, FP16, EXACT).radius.item() == pytest.approx(
        by_hand + 3 * 2.0**-23, rel=1e-14
    )


@pytest.mark.parametrize("size", [-1, 32])
def test_the_radius_scales_with_the_problem(size):
    x, weight, _ = problem_of(4, WeightFormat.of(4, size, False), 4, 6, 256, BF16)
    radius = linear(x, weight, None, BF16, EXACT).radius
    assert (radius > 0).all()
    doubled = replace(weight, scale=weight.scale * np.array(2, weight.scale.dtype))
    assert np.array_equal(linear(x, doubled, None, BF16, EXACT).radius, 2 * radius)
    assert np.array_equal(linear(-x, weight, None, BF16, EXACT).radius, radius)
    assert np.allclose(
        linear(x[::-1], weight.rows(2, 4), None, BF16, EXACT).radius, radius[::-1, 2:4], rtol=1e-12
    )


def test_a_group_index_moves_columns_and_not_the_radius():
    rng = np.random.default_rng(5)
    fmt = WeightFormat.of(4, 32, False)
    x, weight, _ = problem_of(4, fmt, 4, 6, 128, BF16)
    order = rng.permutation(128)
    moved = replace(weight, codes=weight.codes[:, order], group_index=(order // 32).astype(np.int32))
    a, b = linear(x, weight, None, BF16, EXACT), linear(x[:, order], moved, None, BF16, EXACT)
    assert np.allclose(a.value, b.value, rtol=1e-12, atol=1e-12)
    assert np.allclose(a.radius, b.radius, rtol=0.2)


def test_the_interval_of_an_expectation():
    x, weight, bias = problem_of(1, WeightFormat.of(4, 4, False), 3, 5, 8, BF16)
    bounded = linear(x, weight, bias, BF16, EXACT)
    low, high = bounded.interval(bounded.hypotheses["exact weights"])
    assert (low <= round_to(bounded.value, BF16)).all()
    assert (round_to(bounded.value, BF16) <= high).all()
    assert np.array_equal(low, round_to(bounded.value - bounded.radius, BF16))
    assert np.array_equal(high, round_to(bounded.value + bounded.radius, BF16))
    assert not bounded.exact
    exact = linear(x, weight, bias, BF16, EXACT, exact=True)
    assert exact.exact
    low, high = exact.interval(exact.hypotheses["exact weights"])
    assert np.array_equal(low, high)
    assert np.array_equal(low, round_to(exact.value, BF16))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
@pytest.mark.parametrize("size", [-1, 4])
def test_empty_problems(m, n, k, size):
    x, weight, bias = problem_of(1, WeightFormat.of(4, size, False), m, n, max(k, 1) * 4 if k else 4, BF16)
    if k == 0:
        x, weight = x[:, :0], weight_of(np.random.default_rng(0), WeightFormat(4, False), n, 1, BF16.dtype)
        weight = replace(weight, codes=weight.codes[:, :0])
    expected = linear(x, weight, bias, BF16, ANY)
    assert expected.value.shape == expected.radius.shape == (m, n)
    if k == 0:
        assert np.array_equal(expected.value, np.broadcast_to(bias.astype(np.float64), (m, n)))


# ---- right kernels in float32, each in an order of its own


def sequential(terms):
    """One float32 accumulator along the last axis."""
    return np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]


def pairwise(terms):
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = np.concatenate([terms, np.zeros_like(terms[..., :1])], axis=-1)
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms[..., 0]


def split(terms, parts):
    return sequential(np.stack([sequential(part) for part in np.array_split(terms, parts, axis=-1)], axis=-1))


def truncating(terms):
    """A tensor core: eight exact products and the accumulator, cut to 24 bits toward zero."""
    total = np.zeros(terms.shape[:-1])
    for start in range(0, terms.shape[-1], 8):
        total += terms[..., start : start + 8].sum(axis=-1)
        total = (total.view(np.int64) >> 29 << 29).view(np.float64)
    return total.astype(np.float32)


def by_group(values, weight, scaled):
    """Sums of each group, times its scale, then one sum over the groups."""
    groups, scale = weight.groups(), np.broadcast_to(weight.scale, (weight.n, weight.scale.shape[-1]))
    sums = [scaled(values, groups == g, g) * scale[:, g].astype(np.float32) for g in range(scale.shape[1])]
    return sequential(np.stack(sums, axis=-1))


def right_kernels(rng, x, weight, matrix):
    """Correct answers in float32 before the bias: name -> (M, N). matrix: the weight, rounded or not."""
    x32, w32 = x.astype(np.float32), matrix.astype(np.float32)
    terms = x32[:, None, :] * w32[None, :, :]
    shuffled = terms[..., rng.permutation(weight.k)]
    exact_terms = x.astype(np.float64)[:, None, :] * matrix[None, :, :]
    return {
        "sequential": sequential(terms),
        "random order": sequential(shuffled),
        "backwards": sequential(terms[..., ::-1]),
        "pairwise": pairwise(terms),
        "split-K": split(shuffled, int(rng.integers(2, 17))),
        "stream-K": sequential(pairwise(terms[..., : weight.k // 32 * 32].reshape(*terms.shape[:2], -1, 32)))
        + sequential(np.concatenate([terms[..., weight.k // 32 * 32 :], terms[..., :1] * 0], axis=-1)),
        "library": x32 @ w32.T,
        "truncating": truncating(exact_terms),
    }


def scale_late_kernels(x, weight):
    """Kernels that never form a rounded weight: the scale, or the zero point too, comes after the sums."""
    x32 = x.astype(np.float32)
    columns = columns_of(weight, FP16)
    codes, zeros, scales = (part.astype(np.float32) for part in (columns.u, columns.u_z, columns.scale))
    differences = x32[:, None, :] * (codes - zeros)[None]
    products = x32[:, None, :] * codes[None]

    def corrected(values, chosen, _):
        total = sequential(values[..., chosen])
        return total - zeros[:, chosen][:, 0] * sequential(x32[:, chosen])[:, None]

    def scaled_then_corrected():
        total = sequential(products * scales[None])
        for g in np.unique(weight.groups()):
            chosen = weight.groups() == g
            correction = (zeros * scales)[:, chosen][:, 0]
            total = total - correction * sequential(x32[:, chosen])[:, None]
        return total

    return {
        "scale after the group": by_group(
            differences, weight, lambda v, chosen, _: sequential(v[..., chosen])
        ),
        "scale after a truncating group": by_group(
            differences.astype(np.float64), weight, lambda v, chosen, _: truncating(v[..., chosen])
        ),
        "zero point after the group": by_group(products, weight, corrected),
        "zero point after everything": scaled_then_corrected(),
    }


def finish(total, bias, form):
    """The epilogue: bias in float32, one rounding."""
    with np.errstate(over="ignore"):
        return (total if bias is None else total + bias.astype(np.float32)).astype(form.dtype)


PROBLEMS = [
    (WeightFormat.of(4, 128, False), 3, 8, 512, BF16),
    (WeightFormat.of(4, 128, True), 3, 8, 512, FP16),
    (WeightFormat.of(8, 32, False), 4, 6, 128, BF16),
    (WeightFormat.of(8, -1, False), 2, 6, 544, FP16),
    (WeightFormat.of(3, -1, True), 7, 5, 250, BF16),
    (WeightFormat.of(2, 32, False), 4, 6, 160, FP16),
    (WeightFormat.of(5, -1, False), 2, 8, 1056, BF16),
    (WeightFormat(6, False, -1, "tensor"), 3, 6, 33, FP16),
]
SEEDS = 30


@pytest.mark.parametrize(
    ("fmt", "m", "n", "k", "form"), PROBLEMS, ids=[f"{p[0].name}-{p[4].name}-k{p[3]}" for p in PROBLEMS]
)
def test_right_kernels_raise_no_alarm(fmt, m, n, k, form):
    worst, judged = {}, 0
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, k])
        x, weight, bias = problem_of(seed, fmt, m, n, k, form)
        expected = linear(x, weight, bias, form, ANY)
        rounded = dequantize(weight).astype(np.float64)
        answers = {
            **{("exact", k): y for k, y in right_kernels(rng, x, weight, dequantize_exact(weight)).items()},
            **{("rounded", k): y for k, y in right_kernels(rng, x, weight, rounded).items()},
            **{("late", k): y for k, y in scale_late_kernels(x, weight).items()},
        }
        for name, total in answers.items():
            found = compare_to_expected(expected, finish(total, bias, form))
            assert found.passes, (seed, name, found.detail)
            assert not found.note, (seed, name, found.note)
            worst[name] = max(worst.get(name, 0), found.worst)
            judged += 1
    assert judged == SEEDS * 20
    assert max(worst.values()) < 1, worst


def test_the_bound_holds_before_the_output_is_rounded():
    """Judged in float32, where rounding hides nothing; the radius is neither broken nor far away."""
    worst = 0.0
    for seed in range(40):
        fmt, m, n, k, form = PROBLEMS[seed % len(PROBLEMS)]
        x, weight, bias = problem_of(seed, fmt, m, n, k, form)
        expected = linear(x, weight, bias, form, EXACT)
        rng = np.random.default_rng(seed)
        answers = right_kernels(rng, x, weight, dequantize_exact(weight)) | scale_late_kernels(x, weight)
        for total in answers.values():
            y = (total if bias is None else total + bias.astype(np.float32)).astype(np.float64)
            worst = max(worst, float((np.abs(y - expected.value) / expected.radius).max()))
    assert 0.02 < worst < 1


# ---- wrong kernels

RECIPES = ("identity", "scales", "integers", "random")
CELLS = [
    (WeightFormat.of(4, 128, False), "bf16"),
    (WeightFormat.of(4, 128, True), "fp16"),
    (WeightFormat.of(3, -1, True), "bf16"),
    (WeightFormat.of(8, 32, False), "fp16"),
    (WeightFormat.of(8, -1, True), "bf16"),
]


def layers(fmt, dtype):
    """A layer of each recipe at K = 512; the identity reads the whole matrix."""
    for recipe in RECIPES:
        m = 512 if recipe == "identity" else 17
        yield recipe, linear_problem(Case("linear", fmt, recipe, 16, 512, m, dtype))


def answer(problem, weight, to_output=None):
    form = FLOAT_FORMATS[problem.case.dtype]
    x = np.concatenate(problem.batches).astype(np.float32)
    total = x @ dequantize_exact(weight).astype(np.float32).T
    return finish(total, problem.bias, form) if to_output is None else to_output(total, form)


def caught_by(fmt, dtype, wrong_weight=lambda weight: weight, to_output=None):
    """The recipes that see a wrong kernel."""
    caught = []
    for recipe, problem in layers(fmt, dtype):
        found = compare_to_expected(
            problem.expected(ANY), answer(problem, wrong_weight(problem.weight), to_output)
        )
        caught += [] if found.passes else [recipe]
    return caught


cells = pytest.mark.parametrize(("fmt", "dtype"), CELLS, ids=[f"{f.name}-{d}" for f, d in CELLS])


@cells
def test_a_right_kernel_passes_every_recipe(fmt, dtype):
    assert caught_by(fmt, dtype) == []


@cells
def test_one_code_wrong_by_one_is_seen_wherever_it_is(fmt, dtype):
    for n, k in ((0, 0), (15, 511), (3, 128), (7, 255), (9, 300)):

        def off_by_one(weight, n=n, k=k):
            codes = weight.codes.copy()
            codes[n, k] += 1 if codes[n, k] < fmt.code_range[1] else -1
            return replace(weight, codes=codes)

        assert "identity" in caught_by(fmt, dtype, off_by_one), (n, k)


@pytest.mark.parametrize(("fmt", "dtype"), [cell for cell in CELLS if not cell[0].symmetric])
def test_one_zero_point_wrong_by_one_is_seen(fmt, dtype):
    def off_by_one(weight):
        zeros = weight.zero_point.copy()
        zeros[5, -1] += 1 if zeros[5, -1] < fmt.code_range[1] else -1
        return replace(weight, zero_point=zeros)

    caught = caught_by(fmt, dtype, off_by_one)
    assert {"identity", "integers", "random"} <= set(caught)


def truncated(values, form):
    """Toward zero instead of to nearest."""
    nearest = round_to(values.astype(np.float64), form)
    toward = np.where(
        np.abs(nearest) > np.abs(values), np.nextafter(nearest.astype(form.dtype), form.dtype.type(0)), 0
    )
    return np.where(np.abs(nearest) > np.abs(values), toward, nearest).astype(form.dtype)


@cells
def test_an_output_truncated_instead_of_rounded_is_seen(fmt, dtype):
    caught = caught_by(fmt, dtype, to_output=truncated)
    assert {"scales", "random"} <= set(caught)


@pytest.mark.parametrize("fmt", [fmt for fmt, dtype in CELLS if dtype == "fp16"], ids=lambda f: f.name)
def test_a_scale_truncated_to_bfloat16_in_a_float16_layer_is_seen(fmt):
    def truncate(weight):
        wide = weight.scale.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return replace(weight, scale=wide.view(np.float32).astype(ml_dtypes.bfloat16).astype(np.float16))

    assert {"scales", "random"} <= set(caught_by(fmt, "fp16", truncate))


@cells
def test_a_dropped_column_is_seen(fmt, dtype):
    def drop_last(weight):
        codes = weight.codes.copy()
        last = weight.groups()[-1] if fmt.strategy == "group" else 0
        codes[:, -1] = 0 if weight.zero_point is None else weight.zero_point[:, last]
        return replace(weight, codes=codes)

    assert {"identity", "integers", "random"} <= set(caught_by(fmt, dtype, drop_last))
