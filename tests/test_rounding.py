"""Rounding to bf16, fp16 and fp32 against exact arithmetic (C5)."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.errors import FormatError
from reference.rounding import FLOAT_FORMATS, float_format, half_ulps, round_to

SMALL = [FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp16"]]
ALL = list(FLOAT_FORMATS.values())
EMAX = {"bf16": 127, "fp16": 15, "fp32": 127}


def named(form):
    return form.name


def exactly(value, form):
    """The rounding of a rational number, by the definition; round() of a Fraction is half to even."""
    if value == 0:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, form.emin) - form.precision + 1)
    rounded = round(value / quantum) * quantum
    if abs(rounded) > Fraction(form.largest):
        return math.copysign(math.inf, value)
    return float(rounded)


def not_negative(form):
    """Every finite number of a 16-bit format from 0 up: indexed by its bit pattern, which is even or odd."""
    infinity = int(np.array(np.inf, form.dtype).view(np.uint16))
    return np.arange(infinity, dtype=np.uint16).view(form.dtype).astype(np.float64)


def same(a, b):
    """Equal as bits: -0 is not 0, NaN is NaN."""
    return np.array_equal(np.asarray(a).view(np.int64), np.asarray(b).view(np.int64))


@pytest.mark.parametrize("form", SMALL, ids=named)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_numbers_of_the_format_stay(form, sign):
    values = sign * not_negative(form)
    assert same(round_to(values, form), values)


@pytest.mark.parametrize("form", SMALL, ids=named)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_midpoint_goes_to_the_even_neighbour(form, sign):
    values = not_negative(form)
    beyond = 2.0 ** (EMAX[form.name] + 1)
    upper = np.append(values[1:], beyond)
    middle = (values + upper) / 2
    target = np.append(values[1:], np.inf)
    even = np.where(np.arange(len(values)) % 2 == 0, values, target)
    assert same(round_to(sign * middle, form), sign * even)
    assert same(round_to(sign * np.nextafter(middle, 0), form), sign * values)
    assert same(round_to(sign * np.nextafter(middle, np.inf), form), sign * target)


@pytest.mark.parametrize("form", ALL, ids=named)
def test_a_hair_beside_a_tie_is_no_tie(form):
    """Rounding by way of float32 would lose the hair, and the tie go to even."""
    tie = 1 + form.eps / 2
    for hair, expected in ((2.0**-52, 1 + form.eps), (0.0, 1.0), (-(2.0**-52), 1.0)):
        assert round_to(np.array([tie + hair]), form) == expected
    odd_tie = 1 + 1.5 * form.eps
    for hair, expected in (
        (2.0**-52, 1 + 2 * form.eps),
        (0.0, 1 + 2 * form.eps),
        (-(2.0**-52), 1 + form.eps),
    ):
        assert round_to(np.array([odd_tie + hair]), form) == expected


@pytest.mark.parametrize("form", ALL, ids=named)
def test_overflow_begins_half_a_step_beyond_the_largest(form):
    threshold = float(
        Fraction(2) ** (EMAX[form.name] + 1) - Fraction(2) ** (EMAX[form.name] - form.precision)
    )
    values = np.array([form.largest, np.nextafter(threshold, 0), threshold, 1e300, np.inf])
    expected = np.array([form.largest, form.largest, np.inf, np.inf, np.inf])
    assert same(round_to(values, form), expected)
    assert same(round_to(-values, form), -expected)


@pytest.mark.parametrize("form", ALL, ids=named)
def test_underflow_keeps_subnormals_and_signs(form):
    least = 2.0 ** (form.emin - form.precision + 1)
    values = np.array([least, least / 2, np.nextafter(least / 2, 1), 1.5 * least, 5e-324, 0.0])
    expected = np.array([least, 0.0, least, 2 * least, 0.0, 0.0])
    assert same(round_to(values, form), expected)
    assert same(round_to(-values, form), -expected)
    below_normal = np.array([2.0**form.emin - least / 4])
    assert round_to(below_normal, form) == 2.0**form.emin


@pytest.mark.parametrize("form", ALL, ids=named)
def test_nan_stays_nan_of_either_sign(form):
    payloads = np.array([0x7FF8000000000000, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, -1], np.int64)
    assert np.isnan(round_to(payloads.view(np.float64), form)).all()


@pytest.mark.parametrize("form", ALL, ids=named)
def test_shapes_are_kept_and_memory_is_not_shared(form):
    for values in (np.ones((2, 3, 4)), np.ones((4, 6))[::2, ::-1], np.ones((0, 3)), np.float64(1.5)):
        before = np.array(values)
        rounded = round_to(values, form)
        assert rounded.shape == np.shape(values)
        assert rounded.dtype == np.float64
        assert not np.shares_memory(rounded, values)
        assert np.array_equal(values, before)


@pytest.mark.parametrize("form", ALL, ids=named)
def test_nothing_warns(form):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        round_to(np.array([np.nan, np.inf, -np.inf, 1e308, 5e-324, 0.0, 65520.0]), form)


@settings(deadline=None, database=None, max_examples=150)
@given(
    form=st.sampled_from(ALL),
    values=st.lists(
        st.floats(allow_nan=False, allow_infinity=False)
        | st.floats(-70000, 70000)
        | st.floats(-(2.0**-13), 2.0**-13)
        | st.floats(-(2.0**-125), 2.0**-125),
        min_size=1,
        max_size=8,
    ),
)
def test_any_number_against_exact_arithmetic(form, values):
    expected = [math.copysign(exactly(Fraction(v), form), v) for v in values]
    assert same(round_to(np.array(values), form), np.array(expected))


@settings(deadline=None, database=None, max_examples=150)
@given(
    form=st.sampled_from(ALL),
    significand=st.integers(2**24, 2**25),
    exponent=st.integers(-160, 130),
    hair=st.integers(-2, 2),
)
def test_any_number_near_a_tie_against_exact_arithmetic(form, significand, exponent, hair):
    """A significand of precision + 1 bits is a number of the format or a tie; the hair is a last place."""
    near = (significand >> (24 - form.precision) << (52 - form.precision)) + hair
    value = math.ldexp(near, exponent - 52)
    assert round_to(np.array([value]), form)[0] == exactly(Fraction(value), form)


@pytest.mark.parametrize("form", SMALL, ids=named)
def test_half_ulps_of_every_number(form):
    magnitudes = not_negative(form)
    values = np.concatenate([-magnitudes[:0:-1], magnitudes])
    edge = 2.0 ** (EMAX[form.name] + 1)
    neighbours = np.concatenate([[-edge], values, [edge]])
    below, above = half_ulps(values, form)
    assert same(below, (values - neighbours[:-2]) / 2)
    assert same(above, (neighbours[2:] - values) / 2)
    assert same(np.array(half_ulps(np.array([-0.0]), form)), np.array(half_ulps(np.array([0.0]), form)))


@pytest.mark.parametrize("form", ALL, ids=named)
def test_half_ulps_of_infinity_is_the_step_beyond_the_largest(form):
    step = 2.0 ** (EMAX[form.name] - form.precision)
    for y in (np.inf, -np.inf):
        assert [float(h) for h in half_ulps(np.array(y), form)] == [step, step]


@settings(deadline=None, database=None, max_examples=200)
@given(form=st.sampled_from(ALL), value=st.floats(-(2.0**17), 2.0**17))
def test_half_ulps_bound_what_rounds_to_a_number(form, value):
    y = round_to(np.array([value]), form)
    if np.isfinite(y).all():
        below, above = half_ulps(y, form)
        assert y - below <= value <= y + above


def test_formats_are_found_by_name_and_by_type():
    for name, form in FLOAT_FORMATS.items():
        assert float_format(name) is form
        assert float_format(form.dtype) is form
        info = np.finfo(form.dtype) if name != "bf16" else None
        if info is not None:
            assert (form.largest, form.eps) == (float(info.max), float(info.eps))
            assert 2.0**form.emin == float(info.tiny)
        assert form.unit_roundoff == form.eps / 2
    for other in ("float16", "fp8", np.dtype(np.float64), np.dtype(np.int8)):
        with pytest.raises(FormatError, match="is none of bf16, fp16, fp32"):
            float_format(other)
