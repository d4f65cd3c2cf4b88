"""Balls: what float32 and 16-bit arithmetic gives from any numbers inside lies inside the result (C97, C98)."""

from __future__ import annotations

import numpy as np
import pytest

from reference.balls import UNBOUNDED, Ball
from reference.rounding import FLOAT_FORMATS

F32 = np.float32
BF16, FP16 = FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp16"]
DRAWS = 20_000
KINDS = ("zeros", "subnormal", "normal", "few bits", "one ulp apart", "large")


def to_16_bits(values, form):
    """Round to nearest even by another way: NumPy's own float16, and bf16 by the significand."""
    with np.errstate(over="ignore"):
        if form is FP16:
            return values.astype(np.float16).astype(np.float64)
        mantissa, exponent = np.frexp(values)
        kept = np.maximum(np.minimum(8, exponent + 133), -60)
        rounded = np.ldexp(np.rint(np.ldexp(mantissa, kept)), exponent - kept)
        return np.where(np.abs(rounded) > BF16.largest, np.copysign(np.inf, values), rounded)


def numbers(rng, kind, size=DRAWS):
    """float32 numbers of both signs that reach one corner of the arithmetic."""
    drawn = rng.normal(0, 1, size)
    found = {
        "zeros": np.where(rng.random(size) < 0.7, 0.0, drawn),
        "subnormal": drawn * 2.0**-140,
        "normal": drawn * np.exp2(rng.integers(-12, 13, size)),
        "few bits": np.rint(drawn * 8) * np.exp2(rng.integers(-4, 5, size)),
        "one ulp apart": rng.choice([-1.0, 1.0], size) * (1 + rng.integers(-3, 4, size) * 2.0**-23),
        "large": drawn * 2.0**58,
    }[kind]
    return found.astype(F32).astype(np.float64)


def balls(rng, kind):
    """Balls around such numbers, a third of them exact, and a float32 number inside each."""
    inside = numbers(rng, kind)
    size = np.maximum(np.abs(inside), 2.0**-149)
    radius = np.where(rng.random(DRAWS) < 1 / 3, 0.0, size * np.exp2(rng.integers(-30, 3, DRAWS)))
    at_an_end = rng.random(DRAWS) < 0.5
    share = np.where(at_an_end, rng.choice([-1.0, 1.0], DRAWS), rng.uniform(-1, 1, DRAWS))
    return Ball(inside + share * radius, radius * (1 + 2.0**-50)), inside.astype(F32)


def encloses(ball, values):
    values = values.astype(np.float64)
    return (ball.centre - ball.radius <= values) & (values <= ball.centre + ball.radius)


# ---- float32


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_float32_result_lies_inside(first, second):
    rng = np.random.default_rng([KINDS.index(first), KINDS.index(second)])
    (a, x), (b, y) = balls(rng, first), balls(rng, second)
    assert encloses(a, x).all()
    assert encloses(a.times(b), x * y).all()
    assert encloses(a.add(b), x + y).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_as_float32_lies_inside(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    ball, _ = balls(rng, kind)
    anywhere = ball.centre + rng.uniform(-1, 1, DRAWS) * ball.radius
    assert encloses(ball.kept(), anywhere.astype(F32)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_exact_operands_and_exact_results_have_no_radius_and_others_have_one(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    x, y = numbers(rng, kind), numbers(rng, "few bits")
    a, b = Ball.exact(x), Ball.exact(y)
    for ball, exact in ((a.times(b), x * y), (a.add(b), x + y)):
        whole = exact.astype(F32) == exact
        assert np.array_equal(ball.centre, exact)
        assert np.array_equal(ball.radius == 0, whole)
    assert not a.kept().radius.any()
    assert (Ball(x, np.full_like(x, 1e-30)).add(Ball.exact(0 * x)).radius > 0).all()


def test_a_radius_is_little_more_than_half_an_ulp():
    x = 1 + np.arange(3, 100, 2) * 2.0**-23
    once = Ball.exact(x).times(Ball.exact(x))
    assert (once.radius <= 1.001 * 2.0**-24 * once.centre).all()
    wide = Ball(x, np.full_like(x, 2.0**-10)).add(Ball(x, np.full_like(x, 2.0**-11)))
    assert np.allclose(wide.radius, 2.0**-10 + 2.0**-11, rtol=1e-3)
    product = Ball(x, np.full_like(x, 2.0**-10)).times(Ball(x, np.full_like(x, 2.0**-11)))
    assert np.allclose(product.radius, x * (2.0**-10 + 2.0**-11), rtol=1e-3)


def test_a_part_and_a_wider_one():
    ball = Ball(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert np.array_equal(ball[:, 1].centre, [2.0, 4.0])
    assert np.array_equal(ball[:, 1].radius, [0.2, 0.4])
    assert np.array_equal(ball.plus(1.0).radius, ball.radius + 1)
    assert np.array_equal(ball.plus(1.0).centre, ball.centre)


# ---- 16 bits

forms = pytest.mark.parametrize("form", [BF16, FP16], ids=lambda f: f.name)


@forms
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_the_rounding_of_any_number_inside_lies_inside_and_no_more_is_claimed(form, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    ball, inside = balls(rng, kind)
    inside = inside.astype(np.float64)
    finite = np.abs(ball.centre) + ball.radius < form.largest
    ball, inside = ball[finite], inside[finite]
    rounded = ball.rounded(form)
    assert np.array_equal(rounded.centre, to_16_bits(ball.centre, form))
    assert encloses(rounded, to_16_bits(inside, form)).all()
    ends = [to_16_bits(ball.centre + side * ball.radius, form) for side in (-1, 1)]
    assert np.array_equal(rounded.radius, np.maximum(*(np.abs(end - rounded.centre) for end in ends)))
    assert np.array_equal(rounded.radius == 0, ends[0] == ends[1])


@forms
def test_a_radius_grows_to_a_step_at_a_tie_alone(form):
    step, least = 2.0 * form.unit_roundoff, 2.0**-40
    middle = np.array([1 + step / 2, 1 + 1.5 * step, -1 - step / 2, 1 - step / 4])
    at = Ball(middle, np.full(4, least)).rounded(form)
    assert np.array_equal(at.centre, [1, 1 + 2 * step, -1, 1])
    assert np.array_equal(at.radius, [step, step, step, step / 2])
    assert not Ball.exact(middle).rounded(form).radius.any()
    for side in (-1, 1):
        assert not Ball(middle + side * 2 * least, np.full(4, least)).rounded(form).radius.any()


@forms
def test_a_rounding_may_be_infinite_at_one_end_or_at_both(form):
    first = form.largest + form.largest * form.unit_roundoff / (
        2 - 2 * form.unit_roundoff
    )  # becomes infinity
    assert np.isinf(to_16_bits(np.array([first]), form)).all()
    centre = np.array([first * 1.5, -first * 1.5, first / 1.5, form.largest])
    radius = np.array([first / 4, first / 4, 1.0, first / 4])
    rounded = Ball(centre, radius).rounded(form)
    assert np.array_equal(rounded.centre[:2], [np.inf, -np.inf])
    assert not rounded.radius[:3].any()
    assert rounded.radius[3] == UNBOUNDED


def test_a_number_whose_rounding_may_be_finite_is_not_surely_infinite():
    for sign in (-1.0, 1.0):
        ball = Ball(np.array([sign * FP16.largest * 1.01]), np.array([FP16.largest / 2])).rounded(FP16)
        assert (ball.centre - ball.radius <= sign * FP16.largest).all()
        assert (ball.centre + ball.radius >= sign * FP16.largest).all()
