"""Scales and zero points, quantize, dequantize, by hand and by exact arithmetic (C20-C29)."""

from __future__ import annotations

import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rounding import exactly

from reference.errors import FormatError, TensorError
from reference.formats import WeightFormat
from reference.rounding import FLOAT_FORMATS
from reference.weights import (
    QuantizedWeight,
    compute_qparams,
    dequantize,
    dequantize_exact,
    quantize,
    scale_shape,
)

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def row(*values, dtype=np.float32):
    return np.array([values], dtype)


# ---- scales and zero points

SYM4, ASYM4 = WeightFormat(4), WeightFormat(4, symmetric=False)


@pytest.mark.parametrize(
    ("weight", "fmt", "scale", "zero_point"),
    [
        (row(-1, 1), SYM4, np.float32(1 / 7.5), None),
        (row(-1, 1), WeightFormat(8), np.float32(1 / 127.5), None),
        (row(-1, 1), WeightFormat(3), np.float32(1 / 3.5), None),
        (row(-1, 1), WeightFormat(2), np.float32(1 / 1.5), None),
        (row(-1, 1), WeightFormat(1), np.float32(2), None),
        (row(-0.5, 2), SYM4, np.float32(2 / 7.5), None),
        (row(-0.5, 2), ASYM4, np.float32(2.5 / 15), -5),
        (row(0.5, 2), ASYM4, np.float32(2 / 15), -8),
        (row(-2, -0.5), ASYM4, np.float32(2 / 15), 7),
        (row(-0.5, 2), WeightFormat(3, False), np.float32(2.5 / 7), -3),
        (row(-1, 1), WeightFormat(8, False), np.float32(2 / 255), -1),
        (row(-1, 1, dtype=ml_dtypes.bfloat16), SYM4, 0.1337890625, None),
    ],
)
def test_scales_and_zero_points_by_hand(weight, fmt, scale, zero_point):
    found, zeros = compute_qparams(weight, fmt)
    assert found.dtype == weight.dtype
    assert float(found.item()) == float(scale)
    assert (None if zeros is None else zeros.item()) == zero_point


@pytest.mark.parametrize(("dtype", "eps"), [("bf16", 2.0**-7), ("fp16", 2.0**-10), ("fp32", 2.0**-23)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_has_the_scale_eps_and_the_zero_point_zero(symmetric, dtype, eps):
    weight = np.zeros((2, 4), DTYPES[dtype])
    weight[0, 0] = 3
    fmt = WeightFormat.of(4, 2, symmetric)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale, zero_point = compute_qparams(weight, fmt)
        quantized = quantize(weight, fmt, scale, zero_point)
    assert (scale[weight.reshape(2, 2, 2).max(axis=2) == 0] == eps).all()
    if zero_point is not None:
        assert zero_point.tolist() == [[-8, 0], [0, 0]]
    assert not dequantize(quantized)[weight == 0].any()


def test_shapes_of_scales():
    assert scale_shape(WeightFormat(4, strategy="tensor"), 10, 96) == (1,)
    assert scale_shape(WeightFormat(4), 10, 96) == (10, 1)
    assert scale_shape(WeightFormat.of(4, 32, True), 10, 96) == (10, 3)
    assert scale_shape(WeightFormat(4, True, 32, "group", short_last_group=True), 10, 97) == (10, 4)
    with pytest.raises(FormatError, match=r"^group_size: 32 does not divide K=97"):
        scale_shape(WeightFormat.of(4, 32, True), 10, 97)


@pytest.mark.parametrize("symmetric", [True, False])
def test_each_strategy_looks_at_its_own_span(symmetric):
    weight = np.random.default_rng(1).normal(0, 1, (6, 64)).astype(np.float32)
    spans = {"tensor": (weight.reshape(1, -1), (1,)), "channel": (weight, (6, 1))}
    for strategy, (flat, shape) in spans.items():
        fmt = WeightFormat(4, symmetric, -1, strategy)
        scale, _ = compute_qparams(weight, fmt)
        reach = np.abs(flat).max(axis=1) / np.float32(7.5)
        spread = (np.maximum(flat.max(axis=1), 0) - np.minimum(flat.min(axis=1), 0)) / np.float32(15)
        assert scale.shape == shape
        assert np.array_equal(scale.ravel(), reach if symmetric else spread)


def test_a_short_last_group_has_a_scale_of_its_own():
    fmt = WeightFormat(4, True, 4, "group", short_last_group=True)
    weight = row(1, 2, 3, 4, 5, 6, 7, 8, 60)
    scale, _ = compute_qparams(weight, fmt)
    assert np.array_equal(scale, row(4, 8, 60) / np.float32(7.5))
    quantized = quantize(weight, fmt, scale)
    assert quantized.groups().tolist() == [0] * 4 + [1] * 4 + [2]
    assert dequantize(quantized)[0, 8] == np.float32(7) * scale[0, 2]


# ---- quantize


def test_codes_clamp_and_round_half_to_even():
    values = [-9, -8.5, -7.5, -6.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 6.5, 7.49, 7.5, 8]
    expected = [-8, -8, -8, -6, -2, -2, 0, 0, 2, 2, 6, 7, 7, 7]
    for dtype in DTYPES.values():
        codes = quantize(row(*values, dtype=dtype), SYM4, row(1, dtype=dtype)).codes
        assert codes.tolist() == [expected]


def test_the_zero_point_is_added_before_rounding():
    codes = quantize(row(-2.5, -1.5, 0.5), ASYM4, row(1), np.array([[3]], np.int8)).codes
    assert codes.tolist() == [[0, 2, 4]]


@pytest.mark.parametrize(("dtype", "scale", "tie"), [("fp32", 7, 6.5), ("fp16", 11, 3.5), ("bf16", 15, 2.5)])
def test_the_quotient_is_a_true_division(dtype, scale, tie):
    """A product with the rounded reciprocal misses these ties and rounds them to the odd neighbour."""
    weight, scale = row(scale * tie, dtype=DTYPES[dtype]), row(scale, dtype=DTYPES[dtype])
    assert quantize(weight, WeightFormat(8), scale).codes.item() == round(tie)


def test_the_quotient_is_rounded_to_the_type_of_the_weight():
    """304/3 = 101.33 is 101.5 in bfloat16, a tie that goes to 102; a float32 scale makes it a float32."""
    narrow, wide = ml_dtypes.bfloat16, np.float32
    for weight, scale, code in ((narrow, narrow, 102), (wide, wide, 101), (narrow, wide, 101)):
        codes = quantize(row(304, dtype=weight), WeightFormat(8), row(3, dtype=scale)).codes
        assert codes.item() == code


def test_quotients_that_overflow_saturate():
    scale = row(2.0**-24, dtype=np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes = quantize(row(65504, -65504, dtype=np.float16), SYM4, scale).codes
    assert codes.tolist() == [[7, -8]]


@settings(deadline=None, database=None, max_examples=60)
@given(
    bits=st.integers(1, 8),
    symmetric=st.booleans(),
    name=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**32),
)
def test_codes_against_exact_arithmetic(bits, symmetric, name, seed):
    """round(clamp(w/s + z)) with one rounding to the weight's type after each operation."""
    rng = np.random.default_rng(seed)
    fmt, form = WeightFormat.of(bits, 4, symmetric), FLOAT_FORMATS[name]
    weight = rng.normal(0, 1, (3, 8)).astype(form.dtype)
    scale, zero_point = compute_qparams(weight, fmt)
    codes = quantize(weight, fmt, scale, zero_point).codes
    for i, k in np.ndindex(3, 8):
        quotient = exactly(Fraction(float(weight[i, k])) / Fraction(float(scale[i, k // 4])), form)
        if zero_point is not None:
            quotient = exactly(Fraction(quotient) + int(zero_point[i, k // 4]), form)
        low, high = fmt.code_range
        assert codes[i, k] == round(min(max(quotient, low), high))


# ---- dequantize


def random_weight(rng, fmt, n, k, scale, group_index=None):
    low, high = fmt.code_range
    shape = scale_shape(fmt, n, k)
    codes = rng.integers(low, high + 1, (n, k)).astype(np.int8)
    zeros = None if fmt.symmetric else rng.integers(low, high + 1, shape).astype(np.int8)
    return QuantizedWeight(fmt, codes, np.broadcast_to(scale, shape).copy(), zeros, group_index)


REACHES = ("ordinary", "subnormal", "least", "overflow", "any bits", "negative", "zero")


def scales_of(reach, form, rng, shape):
    raw = rng.integers(0, 256, (*shape, form.dtype.itemsize)).astype(np.uint8).view(form.dtype)[..., 0]
    with np.errstate(invalid="ignore"):
        drawn = np.where(np.isfinite(raw), raw, form.dtype.type(1)).astype(np.float64)
    values = {
        "ordinary": np.exp2(rng.normal(-6, 1, shape)),
        "subnormal": np.exp2(rng.uniform(form.emin - form.precision, form.emin, shape)),
        "least": np.full(shape, 2.0 ** (form.emin - form.precision + 1)),
        "overflow": form.largest / np.exp2(rng.uniform(0, 9, shape)),
        "any bits": drawn,
        "negative": -np.exp2(rng.normal(-6, 1, shape)),
        "zero": np.where(rng.random(shape) < 0.5, 0.0, 1.5),
    }[reach]
    return values.astype(form.dtype)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("form", FLOAT_FORMATS.values(), ids=FLOAT_FORMATS)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_dequantize_rounds_the_exact_product_once(bits, form, reach):
    for turn, (strategy, size) in enumerate((("tensor", -1), ("channel", -1), ("group", 4), ("group", 3))):
        rng = np.random.default_rng([bits, turn])
        fmt = WeightFormat(bits, turn % 2 == 1, size, strategy, short_last_group=True)
        scale = scales_of(reach, form, rng, scale_shape(fmt, 6, 16))
        weight = random_weight(rng, fmt, 6, 16, scale)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result, exact = dequantize(weight), dequantize_exact(weight)
        assert result.dtype == form.dtype
        groups = weight.groups()
        for i, k in np.ndindex(6, 16):
            at = (0,) if strategy == "tensor" else (i, groups[k])
            zero = 0 if weight.zero_point is None else int(weight.zero_point[at])
            product = (int(weight.codes[i, k]) - zero) * Fraction(float(scale[at]))
            assert Fraction(exact[i, k]) == product
            assert float(result[i, k]) == exactly(product, form), (i, k)


@pytest.mark.parametrize("form", FLOAT_FORMATS.values(), ids=FLOAT_FORMATS)
def test_zeros_keep_the_sign_of_their_scale(form):
    weight = QuantizedWeight(
        WeightFormat(4), np.zeros((2, 1), np.int8), np.array([[2.0], [-2.0]]).astype(form.dtype)
    )
    assert np.signbit(dequantize(weight).astype(np.float32)).ravel().tolist() == [False, True]


@pytest.mark.parametrize("form", FLOAT_FORMATS.values(), ids=FLOAT_FORMATS)
@pytest.mark.parametrize(("strategy", "size"), [("tensor", -1), ("channel", -1), ("group", 64)])
def test_large_matrices_are_dequantized_block_by_block(strategy, size, form):
    """More elements than one block of work, and a last block that is not full."""
    rng = np.random.default_rng(7)
    fmt = WeightFormat(5, False, size, strategy)
    scale = scales_of("ordinary", form, rng, scale_shape(fmt, 301, 1024))
    weight = random_weight(rng, fmt, 301, 1024, scale)
    expected = dequantize_exact(weight).astype(np.float32).astype(form.dtype)
    assert np.array_equal(dequantize(weight), expected)


@pytest.mark.parametrize("form", FLOAT_FORMATS.values(), ids=FLOAT_FORMATS)
def test_empty_matrices(form):
    for n, k in ((0, 8), (3, 0), (0, 0)):
        for strategy in ("tensor", "channel", "group"):
            fmt = WeightFormat(4, False, 4 if strategy == "group" else -1, strategy)
            weight = random_weight(np.random.default_rng(0), fmt, n, k, form.dtype.type(1))
            assert dequantize(weight).shape == dequantize_exact(weight).shape == (n, k)


@pytest.mark.parametrize("symmetric", [True, False])
def test_act_order_is_a_permutation_of_the_columns(symmetric):
    rng = np.random.default_rng(3)
    fmt = WeightFormat.of(4, 8, symmetric)
    weight = rng.normal(0, 1, (5, 32)).astype(np.float32)
    order = rng.permutation(32)
    index = np.empty(32, np.int32)
    index[order] = np.arange(32) // 8
    scale, zeros = compute_qparams(weight, fmt, index)
    sorted_scale, sorted_zeros = compute_qparams(np.ascontiguousarray(weight[:, order]), fmt)
    assert np.array_equal(scale, sorted_scale)
    assert symmetric or np.array_equal(zeros, sorted_zeros)
    quantized = quantize(weight, fmt, scale, zeros, index)
    in_order = quantize(np.ascontiguousarray(weight[:, order]), fmt, scale, zeros)
    assert np.array_equal(quantized.codes[:, order], in_order.codes)
    assert np.array_equal(dequantize(quantized)[:, order], dequantize(in_order))
    assert np.array_equal(dequantize_exact(quantized)[:, order], dequantize_exact(in_order))
    assert quantized.groups().tolist() == index.tolist()


def test_rows_share_memory_and_keep_their_scales():
    rng = np.random.default_rng(4)
    for strategy, size in (("tensor", -1), ("channel", -1), ("group", 4)):
        fmt = WeightFormat(4, False, size, strategy)
        scale = rng.random(scale_shape(fmt, 9, 8)).astype(np.float16)
        weight = random_weight(rng, fmt, 9, 8, scale)
        part = weight.rows(2, 5)
        assert np.shares_memory(part.codes, weight.codes)
        assert np.array_equal(dequantize(part), dequantize(weight)[2:5])


# ---- refusals

GROUPED = WeightFormat.of(4, 4, False)


def parts(**changes):
    good = {
        "format": GROUPED,
        "codes": np.zeros((3, 8), np.int8),
        "scale": np.ones((3, 2), np.float16),
        "zero_point": np.zeros((3, 2), np.int8),
    }
    return {**good, **changes}


def at(array, index, value):
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": np.zeros((3, 8), np.int16)}, r"codes: expected dtype int8, found int16"),
        ({"codes": [[0] * 8] * 3}, r"codes: expected dtype int8, found list"),
        ({"codes": np.zeros(8, np.int8)}, r"codes: expected a matrix \(N, K\), found shape \[8\]"),
        ({"codes": at(np.zeros((3, 8), np.int8), (1, 5), 8)}, r"codes: 8 at \[1, 5\] is outside -8..7"),
        ({"codes": at(np.zeros((3, 8), np.int8), (2, 0), -9)}, r"codes: -9 at \[2, 0\] is outside -8..7"),
        ({"scale": np.ones((3, 1), np.float16)}, r"scale: expected shape \[3, 2\], found \[3, 1\]"),
        ({"scale": np.ones((3, 2))}, r"scale: expected dtype .*, found float64"),
        ({"scale": [[1.0] * 2] * 3}, r"scale: expected dtype .*, found list"),
        (
            {"scale": at(np.ones((3, 2), np.float16), (2, 1), np.nan)},
            r"scale: nan at \[2, 1\] is not a finite",
        ),
        ({"scale": at(np.ones((3, 2), np.float32), (0, 1), -np.inf)}, r"scale: -inf at \[0, 1\] is not a "),
        ({"zero_point": None}, r"zero_point: missing from the weight of an asymmetric format"),
        ({"format": WeightFormat.of(4, 4, True)}, r"zero_point: present in the weight of a symmetric format"),
        ({"zero_point": np.zeros((3, 1), np.int8)}, r"zero_point: expected shape \[3, 2\]"),
        ({"zero_point": np.zeros((3, 2), np.int32)}, r"zero_point: expected dtype int8, found int32"),
        ({"zero_point": np.full((3, 2), 8, np.int8)}, r"zero_point: 8 at \[0, 0\] is outside -8..7"),
        ({"group_index": np.zeros(7, np.int32)}, r"g_idx: expected shape \[8\], found \[7\]"),
        ({"group_index": np.zeros(8, np.int64)}, r"g_idx: expected dtype int32, found int64"),
        ({"group_index": at(np.zeros(8, np.int32), 5, 2)}, r"g_idx: 2 at \[5\] is outside 0..1"),
        ({"group_index": at(np.zeros(8, np.int32), 3, -1)}, r"g_idx: -1 at \[3\] is outside 0..1"),
    ],
)
def test_each_fault_of_a_weight_is_named(changes, message):
    QuantizedWeight(**parts())
    with pytest.raises(TensorError, match=f"^{message}"):
        QuantizedWeight(**parts(**changes))


def test_a_group_index_needs_groups():
    with pytest.raises(TensorError, match=r"^g_idx: a format of strategy 'channel'"):
        QuantizedWeight(
            SYM4, np.zeros((3, 8), np.int8), np.ones((3, 1), np.float32), None, np.zeros(8, np.int32)
        )
    with pytest.raises(TensorError, match=r"^g_idx: some of the 2 groups have no column"):
        compute_qparams(np.ones((3, 8), np.float32), GROUPED, np.zeros(8, np.int32))


@pytest.mark.parametrize("weight", [row(1, np.nan), row(np.inf, 1), row(-np.inf, 1)])
def test_weights_that_are_no_numbers_are_refused(weight):
    with pytest.raises(TensorError, match=r"^weight: it holds NaN or Inf"):
        compute_qparams(weight, SYM4)
    with pytest.raises(TensorError, match=r"^weight: it holds NaN or Inf"):
        quantize(weight, SYM4, row(1))


@pytest.mark.parametrize("shape", [(4,), (0, 4), (4, 0), (2, 2, 4)])
def test_weights_that_are_no_matrix_with_elements_have_no_scale(shape):
    with pytest.raises(TensorError, match=r"^weight: expected a matrix"):
        compute_qparams(np.ones(shape, np.float32), SYM4)


def test_weights_of_another_type_are_refused():
    with pytest.raises(FormatError, match=r"^dtype: float64"):
        compute_qparams(np.ones((2, 2)), SYM4)


def test_a_scale_of_zero_cannot_quantize():
    with pytest.raises(TensorError, match=r"^scale: 0 at \[1, 0\] cannot quantize"):
        quantize(np.ones((2, 4), np.float32), SYM4, np.array([[1], [0]], np.float32))


def test_inputs_are_not_modified():
    rng = np.random.default_rng(5)
    for dtype in DTYPES.values():
        weight = rng.normal(0, 1, (4, 8)).astype(dtype)
        weight.flags.writeable = False
        scale, zeros = compute_qparams(weight, GROUPED)
        for array in (scale, zeros):
            array.flags.writeable = False
        quantized = quantize(weight, GROUPED, scale, zeros)
        quantized.codes.flags.writeable = False
        dequantize(quantized)
        dequantize_exact(quantized)
