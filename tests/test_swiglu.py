"""Gated activations: other formulas, float32 in many forms against the radius, what is refused (C80-C84)."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from conformance.cases import Case
from conformance.cases.case import NO_WEIGHT
from conformance.cases.moe import SWIGLU_RECIPES
from conformance.data import swiglu_problem
from reference.balls import Ball
from reference.bounds import Contract
from reference.errors import FormatError, TensorError
from reference.rounding import FLOAT_FORMATS, round_to
from reference.swiglu import LIPSCHITZ, VARIANTS, GatedActivation, activated, factors, phi, split, swiglu

torch.set_num_threads(1)

F32 = np.float32
BF16, FP16 = FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp16"]
FP32_INSIDE, IN_16_BITS, ANY = (Contract(intermediates=i) for i in ("fp32", "16-bit", "any"))
SIGMOIDS = ("exp", "tanh", "tanh.approx")
SHAPES = {"silu": GatedActivation(), "alpha": GatedActivation(alpha=1.702)} | {
    kind: GatedActivation(kind=kind) for kind in ("gelu", "gelu-tanh")
}

variants = pytest.mark.parametrize("gated", VARIANTS.values(), ids=VARIANTS)
shapes = pytest.mark.parametrize("gated", SHAPES.values(), ids=SHAPES)


# ---- the right answer


def phi_by_hand(g, gated):
    if gated.kind == "silu":
        t = gated.alpha * g
        return g / (1 + math.exp(-t)) if t > -700 else g * math.exp(t)
    if gated.kind == "gelu":
        return g / 2 * math.erfc(-g / math.sqrt(2))
    return g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))


def by_hand(row, gated):
    """h of one row, one unit after the other in Python's own floats: the two factors of each."""
    count, found = len(row) // 2, []
    for i in range(count):
        g, u = {
            "gate-up": (row[i], row[count + i]),
            "up-gate": (row[count + i], row[i]),
            "interleaved": (row[2 * i], row[2 * i + 1]),
        }[gated.arrangement]
        if gated.limit is not None:
            u = max(-gated.limit, min(u, gated.limit))
            g = min(g, gated.limit) if gated.clamp == "before" else g
        a = phi_by_hand(g, gated)
        found.append((min(a, gated.limit) if gated.clamp == "after" else a, u + gated.beta))
    return found


def problems(gated, dtype="bf16"):
    """One of each recipe."""
    variant = next((name for name, known in VARIANTS.items() if known == gated), "silu")
    for recipe in SWIGLU_RECIPES:
        yield swiglu_problem(Case("swiglu", NO_WEIGHT, recipe, 33, m=9, dtype=dtype, variant=variant)).x


@variants
def test_against_a_formula_unit_by_unit(gated):
    for x in problems(gated):
        expected = swiglu(x, gated, ANY)
        assert list(expected.hypotheses) == ["once", "activated half in bf16"]
        hand = np.array([by_hand([float(v) for v in row], gated) for row in x])
        a, b = hand[..., 0], hand[..., 1]
        # Where float32 cannot tell phi from g or 0, the oracle gives these.
        close = 1e-12 + np.where(np.abs(a) > 7, 5e-8, 0)
        assert (np.abs(expected.value - a * b) <= close * np.abs(a * b) + 1e-11 * np.abs(b)).all()
        assert np.array_equal(expected.value, expected.hypotheses["once"].centre)
        rounded = expected.hypotheses["activated half in bf16"].centre
        away = np.abs(a) > 2.0**-30
        assert np.allclose(rounded[away], (round_to(a, BF16) * b)[away], rtol=1e-12, atol=0)


@variants
def test_against_torch_in_float64(gated):
    """With torch's own functions, where they are not flushed to the gate or to 0."""
    for x in problems(gated):
        gate, up = (torch.from_numpy(half.copy()) for half in split(x.astype(np.float64), gated))
        limit = gated.limit or math.inf
        gate = gate.clamp(max=limit) if gated.clamp == "before" else gate
        if gated.kind == "silu":
            a = torch.nn.functional.silu(gated.alpha * gate) / gated.alpha
        else:
            a = torch.nn.functional.gelu(gate, approximate="tanh" if gated.kind == "gelu-tanh" else "none")
        a = a.clamp(max=limit) if gated.clamp == "after" else a
        h = (a * (up.clamp(-limit, limit) + gated.beta)).numpy()
        assert np.allclose(swiglu(x, gated, ANY).value, h, rtol=6e-8, atol=1e-9)


def test_arrangements_are_permutations_of_the_columns():
    x = np.arange(12.0).reshape(2, 6)
    gate, up = x[:, :3], x[:, 3:]
    interleaved = x[:, [0, 3, 1, 4, 2, 5]]
    for arrangement, columns in (
        ("gate-up", x),
        ("up-gate", np.hstack([up, gate])),
        ("interleaved", interleaved),
    ):
        found = split(columns, GatedActivation(arrangement=arrangement))
        assert np.array_equal(found, [gate, up])


def one(gate, up, gated, contract=FP32_INSIDE):
    """h of one gate and one up, and its radius."""
    a, b = factors(Ball.exact(np.array([[gate, up]])), gated, contract)
    found = a.times(b)
    return found.centre.item(), found.radius.item()


def test_a_limit_cuts_the_gate_from_above_before_or_after_and_up_on_both_sides():
    before = GatedActivation(alpha=2.0, limit=1.0)
    after = replace(before, clamp="after")
    at_one = 1 / (1 + math.exp(-2.0))
    for gate in (1.0, 1.1, 50.0):
        assert one(gate, 1.0, before)[0] == pytest.approx(at_one, rel=1e-14)
        assert one(gate, 1.0, after)[0] == pytest.approx(min(phi_by_hand(gate, before), 1.0), rel=1e-14)
    assert one(50.0, 1.0, after)[0] == 1.0
    for gated in (before, after):
        assert one(-3.0, 1.0, gated)[0] == pytest.approx(-3 / (1 + math.exp(6.0)), rel=1e-14)
        assert one(0.5, -9.0, gated)[0] == one(0.5, -1.0, gated)[0] == -one(0.5, 1.0, gated)[0]
        assert one(0.5, 9.0, gated)[0] == one(0.5, 1.0, gated)[0]
    assert one(9.0, 9.0, GatedActivation())[0] > 80


def test_beta_is_added_to_up_after_the_limit():
    gated = GatedActivation(beta=1.0, limit=7.0)
    half = 0.5 / (1 + math.exp(-0.5))
    for up, factor in ((9.0, 8.0), (-9.0, -6.0), (3.0, 4.0), (-1.0, 0.0)):
        assert one(0.5, up, gated)[0] == pytest.approx(half * factor, rel=1e-14)
    assert one(20.0, -1.0 + 2.0**-30, GatedActivation(beta=1.0)) == (20 * 2.0**-30, 0.0)
    _, b = factors(Ball.exact(np.array([[1.0, 2.0**-30]])), GatedActivation(beta=1.0), ANY)
    assert b.radius.item() > 0  # the sum is no float32


# ---- float32, in many forms (C82)


def exponentials(g, t, exp):
    """silu by an exponential."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        one, small = F32(1), exp(-np.abs(t))
        return {
            "g / (1 + e)": g / (one + exp(-t)),
            "g (1 / (1 + e))": g * (one / (one + exp(-t))),
            "mirrored": g * np.where(t >= 0, one / (one + small), small / (one + small)),
        }


def approximate(errors):
    """An exponential as wrong as the hardware's may be: 2 + 1.173 |t| ulps, up or down."""

    def exp(v):
        wide = v.astype(np.float64)
        return (np.exp(wide) * (1 + errors * (2 + 1.173 * np.abs(wide)) * 2.0**-23)).astype(F32)

    return exp


def by_exponential(g, alpha):
    t = g * F32(alpha)
    log2e = F32(1.4426950408889634)
    found = {}
    for name, exp in (
        ("exp", np.exp),
        ("exp2", lambda v: np.exp2(v * log2e)),
        ("approximate up", approximate(1)),
        ("approximate down", approximate(-1)),
    ):
        found |= {f"{name} {form}": value for form, value in exponentials(g, t, exp).items()}
    with np.errstate(over="ignore"):
        found["folded"] = g / (F32(1) + np.exp2(-g * (F32(alpha) * log2e)))
    found["correctly rounded"] = g * (1 / (1 + np.exp(-np.clip(t.astype(np.float64), -700, None)))).astype(
        F32
    )
    found["torch"] = (torch.from_numpy(g) * torch.sigmoid(torch.from_numpy(t))).numpy()
    return found


def by_tanh(g, alpha, tanh=np.tanh):
    t = g * F32(alpha) if alpha != 1 else g
    return {"tanh": g * (F32(0.5) * tanh(F32(0.5) * t) + F32(0.5))}


def coarse(v):
    """The hardware's tanh: off by 2^-11, but not where it is 1 to within float32."""
    exact = np.tanh(v.astype(np.float64))
    error = np.where(np.abs(v) < 8.5, 2.0**-11, 0) * np.where(v.view(np.int32) % 2, 1, -1)
    return np.clip(exact * (1 + error), -1, 1).astype(F32)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelus(g, kind, tanh=np.tanh):
    half, one = F32(0.5), F32(1)
    form = "none" if kind == "gelu" else "tanh"
    found = {"torch": torch.nn.functional.gelu(torch.from_numpy(g), approximate=form).numpy()}
    if kind == "gelu":
        found["erf"] = half * g * (one + _erf(g * F32(math.sqrt(0.5))).astype(F32))
        return found
    with np.errstate(over="ignore"):
        inner = F32(math.sqrt(2 / math.pi)) * (g + F32(0.044715) * g * g * g)
        other = g * (F32(math.sqrt(2 / math.pi)) + F32(math.sqrt(2 / math.pi) * 0.044715) * (g * g))
    return found | {"sum": half * g * (one + tanh(inner)), "product": half * g * (one + tanh(other))}


def float32_forms(g, gated, sigmoid):
    if gated.kind != "silu":
        return gelus(g, gated.kind, coarse if sigmoid == "tanh.approx" else np.tanh)
    if sigmoid == "exp":
        return by_exponential(g, gated.alpha)
    return by_tanh(g, gated.alpha, coarse if sigmoid == "tanh.approx" else np.tanh)


def grid():
    """Every bf16 number from 2^-20 to 2^10, of both signs, the float32 numbers between -40 and 40 evenly, and ends."""
    bits = np.arange(0, 1 << 15, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F32)
    bits = bits[(bits >= 2.0**-20) & (bits <= 2.0**10)]
    ends = [0.0, 2.0**-126, 88.5, 89.0, 103.9, 104.0, 2.0**60]
    positive = np.concatenate([bits, np.linspace(2.0**-9, 40, 20_001), ends]).astype(F32)
    return np.concatenate([positive, -positive])


GRID = grid()


def phi_ball(g, gated, sigmoid="exp"):
    """The activated half of gates (M,), and its radius."""
    columns = np.stack([g.astype(np.float64), np.ones(len(g))], axis=1)
    a, _ = factors(Ball.exact(columns), gated, Contract(sigmoid=sigmoid))
    return a.centre[:, 0], a.radius[:, 0]


@shapes
@pytest.mark.parametrize("sigmoid", SIGMOIDS)
def test_float32_stays_inside_the_radius(gated, sigmoid):
    centre, radius = phi_ball(GRID, gated, sigmoid)
    worst = 0.0
    for name, y in float32_forms(GRID, gated, sigmoid).items():
        # The radius is that of phi; the product with the gate is a float32 number like any other.
        off = np.abs(y.astype(np.float64) - centre)
        assert (off <= radius).all(), (name, GRID[off > radius][:5])
        between = (radius > 0) & (np.abs(GRID) < 16) & (np.abs(GRID) > 2.0**-10)
        worst = max(worst, float((off / np.where(radius > 0, radius, 1))[between].max()))
    assert worst > (0.001 if sigmoid == "tanh.approx" and gated.kind == "gelu" else 0.1)  # it is not far away


def early(gates, gated, sigmoid="exp"):
    """The forms that differ from the gate where the oracle gives it exactly."""
    centre, radius = phi_ball(gates, gated, sigmoid)
    sure = (radius == 0) & (centre == gates)
    return [name for name, y in float32_forms(gates, gated, sigmoid).items() if (y != gates)[sure].any()]


@shapes
@pytest.mark.parametrize("sigmoid", SIGMOIDS)
def test_far_above_zero_every_form_gives_the_gate_bit_for_bit(gated, sigmoid):
    """From 32 on, where the gates of exact probes lie, and for GELU from 8 on."""
    centre, radius = phi_ball(GRID, gated, sigmoid)
    far = (32 if gated.kind == "silu" else 8) <= GRID
    assert not radius[far].any()
    assert np.array_equal(centre[far], GRID[far])
    assert early(GRID[far], gated, sigmoid) == []


@pytest.mark.parametrize("sigmoid", ["exp", "tanh"])
def test_as_soon_as_the_oracle_gives_the_gate_itself_every_form_does(sigmoid):
    gates = np.linspace(15, 25, 100_001).astype(F32)
    assert early(gates, GatedActivation(), sigmoid) == []


@shapes
def test_far_below_zero_phi_is_0_and_next_to_nothing_is_left(gated):
    centre, radius = phi_ball(GRID, gated)
    t = gated.alpha * GRID.astype(np.float64)
    far = t <= (-32 if gated.kind == "silu" else -8)
    power = t[far] if gated.kind == "silu" else -np.square(t[far]) / 2
    left = 2 * np.abs(t[far]) / gated.alpha * np.exp(np.maximum(power, -700))
    assert not centre[far].any()
    assert np.allclose(radius[far], left, rtol=1e-12, atol=0)
    assert phi_ball(np.zeros(1, F32), gated) == (0, 0)


# ---- a gate and an up that are not known exactly


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu-tanh"])
def test_no_slope_of_the_family_is_steeper(kind):
    g = np.linspace(-40, 20, 300_001)
    for alpha in (0.25, 1.0, 1.702, 5.0) if kind == "silu" else (1.0,):
        values = phi(g, GatedActivation(kind=kind, alpha=alpha))
        inside = (alpha * np.abs(g[1:]) < 16) & (np.abs(g[1:]) < (np.inf if kind == "silu" else 7))
        steepest = np.abs(np.diff(values) / np.diff(g))[inside].max()
        assert (1.099 if kind == "silu" else 1.128) < steepest < LIPSCHITZ


def carried(gated, rng, count=60_000):
    """Balls around gate and up, some of them wide, with numbers inside, and how far h is outside."""
    gate = rng.normal(0, 1, count) * np.exp2(rng.integers(-3, 6, count))
    up = rng.normal(0, 1, count) * np.exp2(rng.integers(-3, 5, count))
    if gated.limit is not None:
        at = rng.random(count) < 0.3
        gate = np.where(at, gated.limit * (1 + rng.normal(0, 1e-3, count)), gate)
        up = np.where(at, gated.limit * (1 + rng.normal(0, 1e-3, count)) * rng.choice([-1, 1], count), up)
    centres = np.stack([gate, up]).astype(F32).astype(np.float64)
    radii = np.abs(centres) * np.exp2(rng.integers(-24, 2, (2, count)))
    inside = centres + radii * rng.choice([-1.0, -0.5, 0.0, 1.0], (2, count))
    halves = replace(gated, arrangement="gate-up")
    ball = activated(Ball(centres.reshape(1, -1), radii.reshape(1, -1)), halves, BF16, FP32_INSIDE)[""]
    limit = gated.limit or np.inf
    hand = phi_by_hand_of(inside[0], halves) * (np.clip(inside[1], -limit, limit) + gated.beta)
    return centres[0], radii[0], np.abs(hand - ball.centre[0]), ball.radius[0]


_phi_by_hand = np.vectorize(phi_by_hand, otypes=[np.float64], excluded={1})


def phi_by_hand_of(gate, gated):
    limit = np.inf if gated.limit is None else gated.limit
    if gated.clamp == "after":
        return np.minimum(_phi_by_hand(gate, gated), limit)
    return _phi_by_hand(np.minimum(gate, limit), gated)


@variants
def test_what_gate_and_up_may_be_carries_on_into_h(gated):
    gate, moved, off, radius = carried(gated, np.random.default_rng(7))
    above = gated.alpha * (gate - moved) < 17
    sure = above | (moved == 0) if gated.alpha != 1 else np.ones(len(gate), np.bool_)
    assert (off <= radius)[sure].all()


def test_a_wide_gate_with_alpha_reaches_the_curve_below():
    gated = GatedActivation(alpha=1.702)
    (a, _) = factors(Ball(np.array([[20.0, 1.0]]), np.array([[17.0, 0.0]])), gated, FP32_INSIDE)
    assert a.centre.item() - a.radius.item() <= phi_by_hand(3.0, gated)


def test_behind_a_limit_nothing_is_left_of_a_radius():
    gated = GatedActivation(limit=7.0)
    wide = Ball(np.array([[9.0, 9.0]]), np.array([[1.0, 1.5]]))
    a, b = factors(wide, gated, FP32_INSIDE)
    exact, _ = factors(Ball.exact(np.array([[7.0, 7.0]])), gated, FP32_INSIDE)
    assert (a.centre, a.radius) == (exact.centre, exact.radius)
    assert (b.centre.item(), b.radius.item()) == (7.0, 0.0)
    a, b = factors(Ball(wide.centre, wide.radius + 1.5), gated, FP32_INSIDE)
    assert a.radius.item() > 2.5
    assert b.radius.item() == 3.0
    a, _ = factors(Ball(np.array([[-60.0, 1.0]]), np.array([[1.0, 0.0]])), gated, FP32_INSIDE)
    assert a.radius.item() < 2.0**-19
    a, _ = factors(Ball(np.array([[-33.0, 1.0]]), np.array([[30.0, 0.0]])), gated, FP32_INSIDE)
    assert a.radius.item() > 0.3
    a, _ = factors(Ball(np.array([[60.0, 1.0]]), np.array([[1.0, 0.0]])), GatedActivation(), FP32_INSIDE)
    assert a.radius.item() == 1.0


# ---- 16-bit outputs


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@variants
def test_right_kernels_are_accepted_and_one_hypothesis_explains_them(gated, dtype):
    form = FLOAT_FORMATS[dtype]
    half = f"activated half in {dtype}"
    for x in problems(gated, dtype):
        expected = swiglu(x, gated, ANY)
        gate, up = (part.astype(F32) for part in split(x.astype(F32), gated))
        limit = F32(np.inf if gated.limit is None else gated.limit)
        clamped = np.minimum(gate, limit) if gated.clamp == "before" else gate
        other = np.clip(up, -limit, limit) + F32(gated.beta)
        for name, a in float32_forms(np.ascontiguousarray(clamped), gated, "exp").items():
            a = np.minimum(a, limit) if gated.clamp == "after" else a
            stored = round_to(a.astype(np.float64), form).astype(F32)
            for hypothesis, y in (("once", a * other), (half, stored * other)):
                low, high = expected.interval(expected.hypotheses[hypothesis])
                y = round_to(y.astype(np.float64), form)
                assert ((low <= y) & (y <= high)).all(), (name, hypothesis)


@variants
def test_the_contract_chooses_what_is_rounded_on_the_way(gated):
    x = next(problems(gated, "fp16"))
    names = {c.intermediates: list(swiglu(x, gated, c).hypotheses) for c in (FP32_INSIDE, IN_16_BITS, ANY)}
    both = ["once", "activated half in fp16"]
    assert names == {"fp32": ["once"], "16-bit": both, "any": both}
    assert swiglu(x, gated, ANY).output is FP16
    assert swiglu(x[:0], gated, ANY).value.shape == (0, 33)


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "relu"}, "kind 'relu' is none of silu, gelu, gelu-tanh"),
        ({"arrangement": "halves"}, "arrangement 'halves' is none of gate-up, up-gate, interleaved"),
        ({"clamp": None}, "clamp None is none of before, after"),
        ({"alpha": math.nan}, "alpha nan is not a finite number"),
        ({"beta": math.inf}, "beta inf is not a finite number"),
        ({"kind": "gelu", "alpha": 1.702}, "alpha 1.702 belongs to silu; gelu has none"),
        ({"limit": 0.0}, "limit 0.0 is no positive number"),
        ({"limit": -7.0}, "limit -7.0 is no positive number"),
        ({"limit": math.inf}, "limit inf is not a finite number"),
        ({"clamp": "after"}, "clamp 'after' needs a limit"),
        ({"swiglu_limit": 7.0, "a": 1}, "unknown field a, swiglu_limit"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_fields_without_meaning_are_refused(fields, message):
    with pytest.raises(FormatError, match=f"^activation: {message}"):
        GatedActivation.from_config(fields)


@pytest.mark.parametrize("fields", [{"alpha": "1.702"}, {"beta": None}, {"limit": "7"}])
def test_what_is_no_number_is_refused(fields):
    with pytest.raises(FormatError, match=r"^activation: "):
        GatedActivation.from_config(fields)


@variants
def test_a_configuration_comes_back(gated):
    config = gated.to_config()
    assert list(config) == ["kind", "alpha", "beta", "limit", "clamp", "arrangement"]
    assert GatedActivation.from_config(config) == gated
    assert GatedActivation.from_config({}) == GatedActivation()


@pytest.mark.parametrize("shape", [(2, 5), (6,), (1, 2, 4)])
def test_columns_that_are_no_halves_are_refused(shape):
    with pytest.raises(TensorError, match=r"^x: expected shape \[M, 2I\], found "):
        swiglu(np.zeros(shape, BF16.dtype), GatedActivation(), ANY)
