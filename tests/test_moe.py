"""The layer of experts: a slow loop, its hypotheses step by step, what is exact, what is carried, what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from test_balls import to_16_bits

from conformance.cases import Case
from conformance.data import moe_problem
from reference import moe as layers
from reference.activations import amax, divisor, quantize, quantizers
from reference.balls import Ball
from reference.bounds import Contract
from reference.errors import TensorError
from reference.formats import ActivationFormat, WeightFormat
from reference.moe import (
    MOE_RIGHT,
    Dispatch,
    Expert,
    MoeLayer,
    dispatch,
    moe,
    moe_centres,
    moe_of,
    moe_semantics,
)
from reference.mutants import MUTANTS
from reference.rounding import FLOAT_FORMATS, float_format
from reference.semantics import RIGHT
from reference.swiglu import GATED_RIGHT, VARIANTS
from reference.weights import QuantizedWeight, dequantize, dequantize_exact

F32 = np.float32
BF16, FP16 = FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp16"]
A16, INT8, INT4, FP8 = KINDS = [
    ActivationFormat(),
    *(ActivationFormat(kind) for kind in ("int8", "int4", "fp8")),
]
CONVENTIONS = ("kernel", "compressed-tensors")
PLAIN = Contract(weights="exact", intermediates="fp32")
# Asymmetric groups that divide both sides, channels that 32 divides neither of; each with its (hidden, intermediate)
GROUPS, CHANNELS = (WeightFormat.of(4, 32, False), 64, 32), (WeightFormat.of(3, -1, True), 50, 34)
SITUATIONS = ("random", "one-expert", "absent", "unrouted", "shared", "on-input", "empty")

kinds = pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
every_convention = pytest.mark.parametrize("convention", CONVENTIONS)


@cache
def problem(
    recipe="random", activation=A16, variant="silu", of=GROUPS, dtype="bf16", tokens=5, top_k=2, **more
):
    fmt, hidden, units = of
    top_k = {"on-input": 1, "one-expert": 1}.get(recipe, top_k)
    tokens = 0 if recipe == "empty" else tokens
    case = Case(
        "moe", fmt, recipe, units, hidden, tokens, dtype, activation, bias=True,
        experts=4, top_k=top_k, variant=variant, **more,
    )  # fmt: skip
    return moe_problem.__wrapped__(case)


def contract_of(convention="kernel", **fields):
    return replace(PLAIN, quantizer=convention, **fields)


# ---- a slow loop, a token and a slot at a time


WHOLE = 20  # C82


def phi(g, gated):
    """0 or the gate itself where the oracle takes float32 to be unable to tell."""
    t, low, high = (gated.alpha * g, -32, WHOLE) if gated.kind == "silu" else (g, -8, 8)
    if not low < t < high:
        return max(g, 0.0)
    if gated.kind == "silu":
        return g / (1 + math.exp(-t))
    return g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))


def halves(row, gated):
    """The activated half and the other one, of one row of gate and up."""
    limit = gated.limit or math.inf
    gate, up = {
        "gate-up": (row[: len(row) // 2], row[len(row) // 2 :]),
        "up-gate": (row[len(row) // 2 :], row[: len(row) // 2]),
        "interleaved": (row[0::2], row[1::2]),
    }[gated.arrangement]
    if gated.clamp == "before":
        a = np.array([phi(min(g, limit), gated) for g in gate])
    else:
        a = np.array([min(phi(g, gated), limit) for g in gate])
    return a, np.clip(up, -limit, limit) + gated.beta


class Loop:
    """The layer by definition. Which of the numbers inside have 16 bits: gate_up, half, h; results: "" for float32,
    `stored`, `weighted` or `folded`; routed, scaled, shared: of what is joined, the factor at the end or in_weights.
    how, again: the orders in which both inputs are quantized."""

    def __init__(self, layer, output, how=None, again=None, rounded_weights=False, **bits):
        self.layer, self.output, self.how, self.again = layer, output, how, again or how
        self.matrix = (lambda w: dequantize(w).astype(np.float64)) if rounded_weights else dequantize_exact
        self.bits = {"results": "", **bits}

    def __getattr__(self, name):
        return self.bits.get(name, False)

    def stored(self, values, chosen=True):
        return to_16_bits(values, self.output) if chosen else values

    def quantized(self, row, how):
        if self.layer.activation.kind == "a16":
            return row
        return quantize(row[None], self.layer.activation, how).dequantized()[0]

    def expert(self, row, expert):
        def project(values, weight, bias):
            return self.matrix(weight) @ values + (0 if bias is None else bias.astype(np.float64))

        row = row.astype(self.output.dtype)  # a quantizer may compute in the type of what it reads
        gate_up = project(self.quantized(row, self.how).astype(np.float64), expert.w13, expert.b13)
        a, b = halves(self.stored(gate_up, self.gate_up), self.layer.gated)
        h = self.stored(a, self.half) * b
        h = self.stored(h, self.h or self.layer.activation.kind == "a16")
        return project(self.quantized(h, self.again), expert.w2, expert.b2)

    def token(self, row, weights, ids):
        layer, total, factor = self.layer, np.zeros(self.layer.hidden), self.layer.factor
        weights = weights.astype(np.float64)
        if self.in_weights:
            weights, factor = (weights * factor).astype(F32).astype(np.float64), 1.0
        for weight, e in zip(weights, ids, strict=True):
            place = e if layer.expert_map is None or e < 0 else layer.expert_map[e]
            if place < 0:
                continue
            if layer.weights_on_input:
                product = (row.astype(F32) * F32(weight)).astype(np.float64)
                y = self.expert(to_16_bits(product, self.output), layer.experts[place])
                weight = 1.0
            else:
                y = self.expert(row, layer.experts[place])
            y = weight * self.stored(y, self.results == "stored")
            total = total + self.stored(y, self.results in ("weighted", "folded"))
            total = self.stored(total, self.results == "folded")
        total = self.stored(factor * self.stored(total, self.routed), self.scaled)
        if layer.shared is None:
            return total
        return total + self.stored(self.expert(row, layer.shared), self.shared)

    def __call__(self, calls):
        rows = [
            self.token(x[t].astype(np.float64), w[t], ids[t]) for x, w, ids in calls for t in range(len(x))
        ]
        return np.array(rows).reshape(-1, self.layer.hidden)


def first_order(activation, convention, output):
    return None if activation.kind == "a16" else next(quantizers(activation, convention, output))


def agree(found, by_hand):
    return np.allclose(found, by_hand, rtol=1e-11, atol=1e-11 * np.abs(by_hand).max(initial=0))


def assert_is_the_loop(p, convention="kernel"):
    output = float_format(p.case.dtype)
    how = first_order(p.case.activation, convention, output)
    expected = p.expected(contract_of(convention))
    first = next(iter(expected.hypotheses.values()))
    assert first.centre is expected.value or np.array_equal(first.centre, expected.value)
    assert agree(first.centre, Loop(p.layer, output, how)(p.calls))


@kinds
@every_convention
@pytest.mark.parametrize("recipe", SITUATIONS)
def test_the_first_hypothesis_is_what_a_slow_loop_computes(activation, convention, recipe):
    for of, dtype in ((GROUPS, "bf16"), (CHANNELS, "fp16")):
        assert_is_the_loop(problem(recipe, activation, "swigluoai", of, dtype), convention)


@kinds
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "gelu"])
def test_the_first_hypothesis_is_that_of_each_variant(activation, variant):
    assert_is_the_loop(problem("random", activation, variant, CHANNELS))


@kinds
@pytest.mark.parametrize("recipe", ["readout", "integers"])
def test_the_first_hypothesis_of_exact_recipes(activation, recipe):
    for variant in ("silu", "swigluoai", "swiglustep", "gelu-tanh"):
        assert_is_the_loop(problem(recipe, activation, variant, GROUPS))


def test_each_expert_has_an_order_of_groups_of_its_own():
    of = (WeightFormat.of(4, 32, False), 128, 64)
    assert_is_the_loop(problem("random", A16, "silu", of, act_order=True))


# ---- hypotheses

GATE_UP, HALF, H = "gate and up in bf16", "activated half in bf16", "intermediate in bf16"
STORED, WEIGHTED = "experts in bf16", "weighted experts in bf16"
FOLDED = f"{WEIGHTED} and so their sum"
# What is stored of the routed sum, of its product with the factor, of the shared expert's output
JOINS = {
    "scaled, joined in 16 bits": (False, True, True),
    "joined in 16 bits": (True, True, True),
    "shared in 16 bits": (False, False, True),
    "joined by fma in 16 bits": (True, False, True),
    "": (False, False, False),
}
EXACT, ROUNDED = "exact weights", "weights rounded to bf16"


def names_of(p, **fields):
    return set(p.expected(Contract(**{"weights": "exact", **fields})).hypotheses)


def joined(*options):
    """Each combination of one of each option; "" for none."""
    return {", ".join(part for part in parts if part) for parts in itertools.product(*options)}


def test_a_contract_that_promises_float32_and_exact_weights_leaves_one_hypothesis():
    for recipe in SITUATIONS:
        nobody = {""} if recipe == "empty" else set()
        assert names_of(problem(recipe), intermediates="fp32") == (nobody or {EXACT})
        assert names_of(problem(recipe), intermediates="fp32", weights="rounded") == (nobody or {ROUNDED})
    assert names_of(problem("random"), intermediates="fp32", weights="any") == {EXACT, ROUNDED}
    assert names_of(problem("integers"), intermediates="fp32", weights="any") == {EXACT}


def test_the_hypotheses_of_16_bit_intermediates():
    halves_, ends = ("", HALF), (STORED, WEIGHTED, FOLDED)
    assert names_of(problem(), intermediates="16-bit") == joined([EXACT], [GATE_UP], halves_, ends)
    either = joined([EXACT], [GATE_UP], halves_, ("", *ends)) | joined([EXACT], ("", *ends))
    assert names_of(problem(), intermediates="any") == either
    # one slot a token: there is nothing to fold, and no weight between two roundings
    assert names_of(problem("on-input"), intermediates="16-bit") == joined(
        [EXACT], [GATE_UP], halves_, [STORED]
    )


@pytest.mark.parametrize("shared", [True, False])
def test_every_way_to_join_what_is_stored_is_among_the_hypotheses(shared):
    p = problem("shared", tokens=1, top_k=3)
    layer = p.layer if shared else replace(p.layer, shared=None)
    found = moe(p.calls, layer, BF16, Contract(weights="exact", intermediates="16-bit")).hypotheses
    joins = JOINS.values() if shared else [(False, False, False), (False, True, False), (True, True, False)]
    ends, seen = ("stored", "weighted", "folded"), set()
    for half, results, in_weights, join in itertools.product((False, True), ends, (False, True), joins):
        bits = dict(zip(("routed", "scaled", "shared"), join, strict=True))
        loop = Loop(layer, BF16, gate_up=True, half=half, results=results, in_weights=in_weights, **bits)
        y = loop(p.calls)
        alike = [name for name, hypothesis in found.items() if agree(hypothesis.centre, y)]
        assert alike, (half, results, in_weights, join)
        seen.update(alike)
    assert seen == set(found)
    factor_1 = moe(
        p.calls, replace(layer, factor=1.0), BF16, Contract(weights="exact", intermediates="16-bit")
    )
    assert not any("factor" in name for name in factor_1.hypotheses)


def orders_in(name, orders):
    """The orders of operations that a name holds, and the name without them. Some begin as others do."""
    for number, order in sorted(enumerate(orders), key=lambda pair: -len(pair[1].name)):
        name = name.replace(order.name, f"<{number}>")
    parts = name.split(", ")
    found = [orders[int(part[1:-1])] for part in parts if part.startswith("<")]
    return found, ", ".join(part for part in parts if not part.startswith("<"))


@pytest.mark.parametrize("activation", KINDS[1:], ids=lambda a: a.name)
@every_convention
def test_the_hypotheses_of_quantized_activations_carry_the_order_of_operations(activation, convention):
    orders = list(quantizers(activation, convention, BF16))
    p = problem("random", activation)
    found = [orders_in(name, orders) for name in names_of(p, intermediates="fp32", quantizer=convention)]
    assert {bits for _, bits in found} == {EXACT}
    if convention == "compressed-tensors":  # a quotient of 16 bits or of 32, the same in both projections
        assert sorted([q.name for q in order] for order, _ in found) == [[q.name] for q in orders[:2]]
    else:  # the drawn tokens leave no order open; what fp8 floors is a scale
        assert {q[0] for q, _ in found} == {orders[0]}
        assert all(q[1].floor for q, _ in found if len(q) > 1)
        assert len(found) <= (2 if activation is FP8 else 1)
    found = [orders_in(name, orders) for name in names_of(p, intermediates="16-bit", quantizer=convention)]
    every = joined([EXACT], [GATE_UP], ("", HALF), ("", H), (STORED, WEIGHTED, FOLDED))
    of_16 = {bits for bits in every if H in bits}
    assert {bits for _, bits in found} == of_16


def loop_of(name, p, convention):
    """The loop that a hypothesis names."""
    orders = list(quantizers(p.case.activation, convention, BF16)) if p.case.activation is not A16 else []
    found, bits = orders_in(name, orders)
    results = {FOLDED: "folded", WEIGHTED: "weighted", STORED: "stored"}
    join = next(stored for name, stored in JOINS.items() if bits.endswith(name))
    return Loop(
        p.layer, BF16, found[0] if found else None, found[-1] if found else None, ROUNDED in bits,
        gate_up=GATE_UP in bits, half=HALF in bits, h=H in bits, in_weights="factor in the weights" in bits,
        results=next((short for long, short in results.items() if long in bits), ""),
        **dict(zip(("routed", "scaled", "shared"), join, strict=True)),
    )  # fmt: skip


@kinds
@pytest.mark.parametrize(
    ("recipe", "convention"),
    [
        *((recipe, "kernel") for recipe in ("random", "shared", "unrouted", "on-input")),
        ("random", "compressed-tensors"),
    ],
)
def test_every_hypothesis_is_what_it_says_step_by_step(activation, convention, recipe):
    p = problem(recipe, activation, "swigluoai", tokens=1, top_k=3)
    inside = "any" if activation is A16 or (recipe, convention) == ("random", "kernel") else "16-bit"
    hypotheses = p.expected(Contract(intermediates=inside, quantizer=convention)).hypotheses
    assert len(hypotheses) >= (2 if recipe == "on-input" else 6)
    for name, hypothesis in hypotheses.items():
        assert agree(hypothesis.centre, loop_of(name, p, convention)(p.calls)), name


def test_hypotheses_tip_as_a_whole():
    for hypothesis in problem().expected(Contract()).hypotheses.values():
        assert hypothesis.tipping == 1.0
        assert hypothesis.finish is None


# ---- what is exact, and what is carried: float32 in an order of its own


class Float32Layer:
    """The layer in float32, every sum in a random order, zero points before or (late) after the sums, codes in any
    legal order of operations. Gives what is there before the last rounding."""

    def __init__(self, p, convention, seed, late):
        self.layer, self.output = p.layer, float_format(p.case.dtype)
        self.rng, self.late = np.random.default_rng(seed), late
        self.orders = (
            list(quantizers(p.case.activation, convention, self.output))
            if p.case.activation is not A16
            else []
        )

    def summed(self, terms):
        return np.cumsum(terms[..., self.rng.permutation(terms.shape[-1])], axis=-1, dtype=F32)[..., -1]

    def quantized(self, values, how):
        """Numbers to multiply and, apart, the scale of each row."""
        if not self.orders:
            return values.astype(F32), F32(1)
        found = quantize(values, self.layer.activation, how)
        return found.codes.astype(F32), found.scale.astype(F32)

    def project(self, values, scale, weight, bias):
        offset, groups = weight.format.offset, weight.groups()
        spread = weight.scale if weight.scale.shape[1] > 1 else np.repeat(weight.scale, weight.k, axis=1)
        s = (spread[:, groups] if weight.format.strategy == "group" else spread).astype(F32)
        u = weight.codes.astype(F32) + F32(offset)
        zero = np.zeros(weight.scale.shape) if weight.zero_point is None else weight.zero_point
        zero = (
            (zero.astype(F32) + F32(offset))[:, groups]
            if zero.shape[1] > 1
            else zero.astype(F32) + F32(offset)
        )
        if not self.late:
            total = self.summed(values[:, None, :] * ((u - zero) * s)[None])
        else:
            total = F32(0)
            for g in self.rng.permutation(np.unique(groups)):
                at = groups == g
                plain = self.summed(values[:, None, at] * u[None, :, at])
                wrong = (
                    self.summed(values[:, at])[:, None] * np.broadcast_to(zero, u.shape)[None, :, at][..., 0]
                )
                total = total + (plain - wrong) * s[None, :, at][..., 0]
        total = total * scale
        return total if bias is None else total + bias.astype(F32)

    def activated(self, gate_up):
        gated = self.layer.gated
        parts = {"gate-up": np.split(gate_up, 2, axis=1), "up-gate": np.split(gate_up, 2, axis=1)[::-1]}
        gate, up = parts.get(gated.arrangement, (gate_up[:, 0::2], gate_up[:, 1::2]))
        limit = F32(gated.limit or np.inf)
        gate = np.minimum(gate, limit) if gated.clamp == "before" else gate
        with np.errstate(over="ignore"):
            if gated.kind == "silu":
                a = gate / (F32(1) + np.exp(-gate * F32(gated.alpha)))
            else:
                inner = F32(math.sqrt(2 / math.pi)) * (gate + F32(0.044715) * gate * gate * gate)
                a = F32(0.5) * gate * (F32(1) + np.tanh(inner))
        a = np.minimum(a, limit) if gated.clamp == "after" else a
        return a * (np.clip(up, -limit, limit) + F32(gated.beta))

    def expert(self, rows, expert):
        first = self.orders[0] if self.orders else None
        gate_up = self.project(*self.quantized(rows, first), expert.w13, expert.b13)
        h = self.activated(gate_up).astype(np.float64)
        if not self.orders:
            h = to_16_bits(h, self.output)
        again = [q for q in self.orders if (q.floor, q.quotient) == (first.floor, first.quotient)]
        return self.project(
            *self.quantized(h, self.rng.choice(again) if again else None), expert.w2, expert.b2
        )

    def __call__(self, x, weights, ids):
        layer = self.layer
        outputs = np.zeros((*ids.shape, layer.hidden), F32)
        places = ids if layer.expert_map is None else np.where(ids < 0, -1, layer.expert_map[ids])
        for e, expert in enumerate(layer.experts):
            rows, slots = np.nonzero(places == e)
            if not len(rows):
                continue
            inputs = x[rows]
            if layer.weights_on_input:
                inputs = inputs.astype(F32) * weights[rows]
                inputs = to_16_bits(inputs.astype(np.float64), self.output).astype(x.dtype)
            outputs[rows, slots] = self.expert(inputs, expert)
        if not layer.weights_on_input:
            outputs = outputs * weights[:, :, None]
        y = self.summed(outputs.transpose(0, 2, 1)) * F32(layer.factor)
        return y if layer.shared is None else y + self.expert(x, layer.shared)


def float32_answers(p, convention):
    for seed, late in itertools.product(range(2), (False, True)):
        kernel = Float32Layer(p, convention, seed, late)
        yield np.concatenate([kernel(*call) for call in p.calls]).astype(np.float64)


EXACT_VARIANTS = ("silu", "swigluoai", "swiglustep", "gelu-tanh")


@kinds
@every_convention
@pytest.mark.parametrize("recipe", ["readout", "integers"])
def test_a_radius_of_0_is_claimed_where_every_order_gives_the_same_bits(activation, convention, recipe):
    for (of, dtype), variant in zip(
        itertools.product((GROUPS, CHANNELS), ("bf16", "fp16")), EXACT_VARIANTS, strict=True
    ):
        p = problem(recipe, activation, variant, of, dtype)
        first = next(iter(p.expected(contract_of(convention)).hypotheses.values()))
        for y in float32_answers(p, convention):
            assert np.array_equal(y[first.radius == 0], first.centre[first.radius == 0])
            assert (np.abs(y - first.centre) <= first.radius).all()


@kinds
@pytest.mark.parametrize("recipe", ["readout", "integers"])
@pytest.mark.parametrize("variant", EXACT_VARIANTS)
def test_exact_recipes_are_exact_in_each_call_for_its_convention(activation, recipe, variant):
    """Measured: every output of call 0 under `kernel` and of call 1 under `compressed-tensors`, of either call where
    the conventions do not differ."""
    for of in (GROUPS, CHANNELS):
        p = problem(recipe, activation, variant, of)
        for number, convention in enumerate(CONVENTIONS):
            first = next(iter(p.expected(contract_of(convention)).hypotheses.values()))
            share = [(part == 0).mean() for part in np.split(first.radius, 2)]
            assert share[number] > 0.99
            assert (share[1 - number] < 0.01) == (activation in (INT8, INT4))


@kinds
@every_convention
@pytest.mark.parametrize("recipe", ["random", "shared", "on-input", "unrouted"])
def test_float32_layers_stay_inside_the_radius(activation, convention, recipe):
    worst = 0.0
    for of, dtype, variant in ((GROUPS, "bf16", "swigluoai"), (CHANNELS, "fp16", "silu-up-gate")):
        p = problem(recipe, activation, variant, of, dtype)
        first = next(iter(p.expected(contract_of(convention)).hypotheses.values()))
        assert (first.radius[(first.centre != 0)] > 0).all()
        assert np.median(first.radius) < 0.02 * np.abs(first.centre).max()
        for y in float32_answers(p, convention):
            off = np.abs(y - first.centre)
            assert (off <= first.radius).all()
            worst = max(worst, float((off / np.where(first.radius > 0, first.radius, 1)).max()))
    assert worst > 0.002


def test_an_input_whose_scale_is_no_power_of_two_is_never_settled():
    """Three times the tokens of an exact recipe: amax / 127 is 3 then, but amax * (1/127) is not."""
    p = problem("integers", INT8, "silu", GROUPS, "fp16")
    for factor, settled in ((1, True), (2, True), (3, False)):
        calls = [((p.calls[0][0] * np.float16(factor)), *p.calls[0][1:])]
        inside = layers._Layer(calls, p.layer, FP16, PLAIN, MOE_RIGHT, True)
        ((_, values),) = inside._inputs()
        assert (values.settled == settled).all()


# ---- the intermediate, quantized again


def inside_of(p, convention):
    return layers._Layer(p.calls, p.layer, BF16, contract_of(convention), MOE_RIGHT, True)


def intermediates(activation, how, rng, rows=60, units=40):
    """h and its radius: rows known to a rounding, to a 16-bit step or exactly; halves of codes, in steps of a power
    of two and in others; largest values that are sure, or one of two within their radius."""
    top = divisor(activation, how)
    codes = rng.integers(-2 * int(top), 2 * int(top) + 1, (rows, units)) / 2
    codes = np.clip(codes, -top, top) * np.exp2(-rng.integers(0, 3, (rows, units)).astype(float))
    codes[:, 0] = top
    centre = codes * np.exp2(rng.integers(-6, 7, (rows, 1)))
    odd = rng.random((rows, 1)) < 0.5
    centre = np.where(odd, centre * rng.uniform(1, 2, (rows, 1)), centre).astype(F32).astype(np.float64)
    radius = np.abs(centre) * np.exp2(rng.choice([-26.0, -22.0, -12.0, -8.0], (rows, units)))
    radius[rng.random((rows, units)) < 0.3] = 0
    radius[:, 0] = np.where(rng.random(rows) < 0.3, radius[:, 0], 0)
    radius[rng.random(rows) < 0.3] = 0
    return Ball(centre, radius)


def numbers_inside(ball, rng, draws):
    """float32 numbers, the same one of all balls' ends, any of the ends, anywhere."""
    shape = ball.centre.shape
    for draw in range(draws):
        side = (draw - 1.0) if draw < 3 else rng.choice([-1.0, 0.0, 1.0], shape)
        side = rng.uniform(-1, 1, shape) if draw > draws - 3 else side
        h = (ball.centre + side * ball.radius).astype(F32).astype(np.float64)
        yield np.where(np.abs(h - ball.centre) <= ball.radius, h, ball.centre)


def alike(order, how):
    """Whether the radius of a code covers both."""
    return (order.floor, order.quotient) == (how.floor, how.quotient)


@pytest.mark.parametrize("activation", KINDS[1:], ids=lambda a: a.name)
@every_convention
def test_what_any_legal_order_makes_of_any_intermediate_lies_within_codes_and_scale(activation, convention):
    rng = np.random.default_rng(3)
    inside = inside_of(problem("random", activation), convention)
    orders = list(quantizers(activation, convention, BF16))
    assert {q for how in inside._second(orders[0]) for q in orders if alike(q, how)} == set(orders)
    tight = 0.0
    for how in inside._second(orders[0]):
        ball = intermediates(activation, how, rng)
        claimed = inside._requantized(ball, how)
        plain, sure = claimed.quantized, claimed.settled
        assert np.array_equal(claimed.plain, plain.dequantized())
        for order in (q for q in orders if alike(q, how)):
            for h in numbers_inside(ball, rng, 10):
                found = quantize(h, activation, order)
                assert (np.abs(found.codes - plain.codes) * found.scale <= claimed.radius * (1 + 1e-12)).all()
                moved = np.abs(found.scale / plain.scale - 1)
                assert (moved <= claimed.scale_doubt).all()
                assert np.array_equal(found.codes[sure], plain.codes[sure])
                assert np.array_equal(found.scale[sure], plain.scale[sure])
                tight = max(
                    tight, float((moved / np.where(claimed.scale_doubt > 0, claimed.scale_doubt, 1)).max())
                )
        power = np.frexp(plain.scale[:, 0])[0] == 0.5
        exact = amax(ball.centre, activation)[:, 0] == divisor(activation, how) * plain.scale[:, 0]
        assert np.array_equal(sure & ~ball.radius.any(axis=1), power & exact & ~ball.radius.any(axis=1))
        assert sure.sum() > 3
        assert not claimed.radius[sure].any()
    assert tight > 0.5


@pytest.mark.parametrize(
    ("centre", "radius"),
    [
        (0.75, 2.25),
        (0.0, 1.5),
    ],
)
def test_an_intermediate_of_either_sign_lies_within_its_codes(centre, radius):
    inside = inside_of(problem("random", INT4), "kernel")
    how = next(quantizers(INT4, "kernel", BF16))
    step = 1.375 + 2.0**-20
    claimed = inside._requantized(
        Ball(np.array([[7.0, centre]]) * step, np.array([[0.0, radius]]) * step), how
    )
    found = quantize(np.array([[7.0, centre - radius]]) * step, INT4, how)
    assert found.codes[0, 1] == -2
    assert (np.abs(found.codes - claimed.quantized.codes) * found.scale <= claimed.radius).all()


def test_an_intermediate_that_is_known_exactly_in_an_odd_step_flips_only_beside_ties():
    inside = inside_of(problem("random", INT8), "kernel")
    how = next(quantizers(INT8, "kernel", BF16))
    step = 1.37
    h = np.array([[127.0, 3.5, -3.5, 3.4, 0.0, 90.49]]) * step
    claimed = inside._requantized(Ball.exact(h), how)
    assert np.array_equal(claimed.radius[0] > 0, [False, True, True, False, False, False])
    assert 0 < claimed.scale_doubt < 2.0**-20
    assert not claimed.settled.any()
    sure = inside._requantized(Ball.exact(h / step), how)
    assert sure.settled.all()
    assert not sure.radius.any()
    assert sure.scale_doubt == 0
    assert np.array_equal(sure.quantized.codes[0], [127, 4, -4, 3, 0, 90])


def test_16_bit_intermediates_are_rounded_with_their_radius():
    inside = inside_of(problem(), "kernel")
    h = Ball(np.array([[1.0, 1 + 2.0**-8, 3.0]]), np.array([[2.0**-20, 2.0**-20, 0.0]]))
    (values,) = inside._intermediates(h, None).values()
    assert np.array_equal(values.plain, [[1.0, 1.0, 3.0]])
    assert np.array_equal(values.radius, [[0.0, 2.0**-7, 0.0]])
    assert not values.scale_doubt.any()
    assert values.settled.all()


@pytest.mark.parametrize("activation", [A16, INT8], ids=lambda a: a.name)
def test_a_projection_carries_what_its_input_may_be(activation):
    p = problem("random", activation, "silu", (WeightFormat.of(4, -1, False), 48, 34))
    inside = inside_of(p, "kernel")
    rng = np.random.default_rng(5)
    slots, units = inside.places.size, p.case.n
    plain = rng.normal(0, 1, (slots, units))
    off = np.abs(rng.normal(0, 0.1, (slots, units))) * (rng.random((slots, units)) < 0.2)
    doubt = np.full((slots, 1), 2.0**-10 if activation is INT8 else 0.0)
    values = layers._Values(plain, plain, off, doubt, np.zeros(slots, np.bool_))
    ball = inside._project(values, "w2", EXACT)
    none = inside._project(replace(values, radius=0 * off, scale_doubt=0 * doubt), "w2", EXACT)
    for e, at in inside.slots.items():
        matrix, bias = dequantize_exact(p.layer.experts[e].w2), p.layer.experts[e].b2.astype(np.float64)
        assert agree(ball.centre[at], plain[at] @ matrix.T + bias)
        moved = [rng.choice([-1.0, 1.0], off[at].shape) * off[at] for _ in range(50)]
        moved += [np.sign(row) * off[at] for row in matrix]  # all to one side of an output
        for change, scale in itertools.product(moved, (1, -1)):
            y = (1 + scale * doubt[at]) * ((plain[at] + change) @ matrix.T) + bias
            assert (np.abs(y - ball.centre[at]) <= ball.radius[at]).all()
        straight = off[at] @ np.abs(matrix).T + doubt[at] * np.abs(ball.centre[at] - bias)
        assert (ball.radius[at] <= none.radius[at] + straight * (1 + 2.0**-9)).all()


def test_many_columns_that_move_at_random_are_bounded_by_their_root():
    fmt, columns = WeightFormat.of(4, -1, True), 512
    ones = QuantizedWeight(fmt, np.ones((1, columns), np.int8), np.ones((1, 1), np.float16))
    first = QuantizedWeight(fmt, np.ones((2 * columns, 1), np.int8), np.ones((2 * columns, 1), np.float16))
    layer = MoeLayer((Expert(first, ones),), VARIANTS["silu"], A16, 1)
    calls = [(np.ones((1, 1), np.float16), np.ones((1, 1), F32), np.zeros((1, 1), np.int32))]
    inside = layers._Layer(calls, layer, FP16, PLAIN, MOE_RIGHT, True)
    plain, off = np.full((1, columns), 1.1), np.full((1, columns), 0.01)
    doubt, unknown = np.zeros((1, 1)), np.zeros(1, np.bool_)
    wide = inside._project(layers._Values(plain, plain, off, doubt, unknown), "w2", EXACT)
    none = inside._project(layers._Values(plain, plain, 0 * off, doubt, unknown), "w2", EXACT)
    assert (wide.radius - none.radius).item() == pytest.approx(8 * math.sqrt(columns) * 0.01, rel=1e-6)


def test_among_exact_numbers_what_is_far_below_their_unit_counts_once_an_addition():
    p = problem("integers")
    inside = inside_of(p, "kernel")
    slots, units = inside.places.size, p.case.n
    plain, off = np.ones((slots, units)), np.zeros((slots, units))
    none, known = np.zeros((slots, 1)), np.ones(slots, np.bool_)
    values = layers._Values(plain, plain, off, none, known)
    assert not inside._project(values, "w2", EXACT).radius.any()
    for unknown in (2.0**-40, 2.0**-30, 2.0**-29, 2.0**-10):
        off[:, 5] = unknown
        radius = inside._project(values, "w2", EXACT).radius
        sure = inside._project(replace(values, radius=0 * off, settled=~known), "w2", EXACT).radius
        for e, at in inside.slots.items():
            one = unknown * np.abs(dequantize_exact(p.layer.experts[e].w2)[:, 5])
            assert np.allclose(
                radius[at], (units + 1) * one if unknown <= 2.0**-30 else sure[at] + one, rtol=1e-12
            )


# ---- sums over the slots


def test_weights_and_sums_round_in_float32_and_nothing_where_all_is_exact():
    p = problem("random", top_k=2)
    inside = inside_of(p, "kernel")
    rng = np.random.default_rng(0)
    places, hidden = inside.places, p.layer.hidden
    outputs = rng.normal(0, 1, (*places.shape, hidden)).astype(F32).astype(np.float64)
    weighed = inside._weighed(Ball(outputs, np.full_like(outputs, 1e-6)), inside.weights, places)
    products = (outputs.astype(F32) * inside.weights[:, :, None].astype(F32)).astype(np.float64)
    assert (np.abs(products - weighed.centre) <= weighed.radius - 0.99e-6 * inside.weights[:, :, None]).all()
    gathered = inside._gathered(Ball.exact(products), places)
    y = products[:, 0].astype(F32) + products[:, 1].astype(F32)
    assert (np.abs(y - gathered.centre) <= gathered.radius).all()
    assert (gathered.radius > 0).mean() > 0.5
    small = np.rint(outputs * 100)
    assert not inside._gathered(Ball.exact(small), places).radius.any()
    far = small.copy()
    far[:, 0] += 2.0**25
    assert inside._gathered(Ball.exact(far), places).radius.any()
    assert (inside._gathered(Ball(small, np.full_like(small, 1e-3)), places).radius >= 2e-3).all()


def test_the_factor_may_be_in_the_weights():
    p = problem("shared")
    p32 = contract_of()
    calls, layer = p.calls, p.layer
    folded = [(x, (w * F32(layer.factor)).astype(F32), ids) for x, w, ids in calls]
    expected = moe(calls, layer, BF16, p32)
    other = moe(folded, replace(layer, factor=1.0), BF16, p32)
    assert (np.abs(other.value - expected.value) <= expected.radius).all()
    alone = moe(calls, replace(layer, shared=None), BF16, p32)
    assert np.allclose(expected.radius - alone.radius > 0, True)


def test_one_call_or_several_one_below_the_other():
    for activation in KINDS:
        p = problem("random", activation)
        whole = p.expected(PLAIN)
        parts = [moe([call], p.layer, BF16, PLAIN) for call in p.calls]
        assert agree(whole.value, np.concatenate([part.value for part in parts]))


# ---- stages


def test_dispatch_looks_ids_up_in_a_permuted_map():
    p = problem()
    order = np.array([2, 0, 3, 1], np.int32)
    permuted = replace(
        p.layer, experts=tuple(p.layer.experts[i] for i in np.argsort(order)), expert_map=order
    )
    assert np.array_equal(moe(p.calls, permuted, BF16, PLAIN).value, p.expected(PLAIN).value)
    ids = np.array([[0, -1], [3, 2], [1, 0]], np.int32)
    found = dispatch(
        ids, np.ones((3, 2), F32), replace(permuted, expert_map=np.array([1, -1, -1, 0], np.int32))
    )
    assert np.array_equal(found.places, [[1, -1], [0, -1], [-1, 1]])
    assert np.array_equal(found.rows, [[0, 0], [1, 1], [2, 2]])
    assert found.weights.dtype == np.float64


def test_a_token_without_experts_is_0_and_has_no_radius():
    p = problem("unrouted")
    x, weights, ids = p.calls[0]
    calls = [(x, weights, np.full_like(ids, -1))]
    expected = moe(calls, p.layer, BF16, Contract())
    assert not expected.value.any()
    assert expected.exact
    assert list(expected.hypotheses)


def test_semantics_of_a_part_become_those_of_a_layer():
    assert moe_semantics(MOE_RIGHT) is MOE_RIGHT
    linear = replace(RIGHT, product=lambda o: 2 * RIGHT.product(o))
    gated = replace(GATED_RIGHT, split=lambda x, g: (x, x))
    assert moe_semantics(linear) == replace(MOE_RIGHT, linear=linear)
    assert moe_semantics(gated) == replace(MOE_RIGHT, gated=gated)


STAGES = {
    "load": lambda p: replace(MOE_RIGHT, load=lambda layer: replace(layer, experts=layer.experts[::-1])),
    "dispatch": lambda p: replace(
        MOE_RIGHT,
        dispatch=lambda ids, w, layer: Dispatch(
            *(dispatch(ids, w, layer).rows, ids.astype(np.int64) * 0, w * 1.0)
        ),
    ),
    "requantize": lambda p: replace(MOE_RIGHT, requantize=lambda h, fmt, how: quantize(h * 2, fmt, how)),
    "apply_weights": lambda p: replace(MOE_RIGHT, apply_weights=lambda y, w, places, layer: y),
    "gather": lambda p: replace(MOE_RIGHT, gather=lambda y, places: y[:, -1]),
    "join": lambda p: replace(MOE_RIGHT, join=lambda routed, *more: routed * 2),
    "split": lambda p: moe_semantics(MUTANTS["gate_up_swapped"].semantics),
    "activate": lambda p: moe_semantics(MUTANTS["up_dropped"].semantics),
    "product": lambda p: moe_semantics(replace(RIGHT, product=lambda o: o.x @ o.matrix[::-1].T)),
    "matrix": lambda p: moe_semantics(replace(RIGHT, matrix=lambda c: RIGHT.matrix(c) * 2)),
    "quantize": lambda p: moe_semantics(
        replace(RIGHT, quantize=lambda calls, *how: RIGHT.quantize([-x for x in calls], *how))
    ),
}


@pytest.mark.parametrize("activation", [A16, INT8], ids=lambda a: a.name)
def test_a_memo_changes_nothing_for_a_mutant_of_any_stage(activation):
    p = problem("shared", activation, tokens=3)
    contract = Contract(weights="exact", intermediates="16-bit")
    expected, memo = p.expected(contract), {}
    assert np.array_equal(moe_of(expected, p.calls, p.layer, contract, MOE_RIGHT, memo).value, expected.value)
    filled = len(memo)
    assert filled
    for stage, of in STAGES.items():
        if stage in ("quantize", "requantize") and activation is A16:
            continue
        semantics = of(p)
        alone = moe_of(expected, p.calls, p.layer, contract, semantics)
        kept = moe_of(expected, p.calls, p.layer, contract, semantics, memo)
        assert list(alone.hypotheses) == list(kept.hypotheses), stage
        for name, hypothesis in alone.hypotheses.items():
            assert np.array_equal(hypothesis.centre, kept.hypotheses[name].centre), (stage, name)
            assert np.array_equal(hypothesis.radius, kept.hypotheses[name].radius), (stage, name)
        assert not agree(alone.value, expected.value), stage
        centres = moe_centres(p.calls, p.layer, BF16, contract, semantics)
        assert list(centres) == list(alone.hypotheses)
        assert np.array_equal(next(iter(centres.values())), alone.value)
    assert np.array_equal(moe_of(expected, p.calls, p.layer, contract, MOE_RIGHT, memo).value, expected.value)
    assert all(h.radius.any() for h in alone.hypotheses.values())


# ---- what is refused


def test_calls_that_do_not_fit_are_refused():
    p = problem()
    x, weights, ids = p.calls[0]

    def refused(message, x=x, weights=weights, ids=ids, layer=p.layer):
        with pytest.raises(TensorError, match=message):
            moe([(x, weights, ids)], layer, BF16, PLAIN)

    refused(r"^x: expected shape \[T, 64\], found \[5, 63\]", x=x[:, 1:])
    refused(r"^x: expected shape \[T, 64\], found \[64\]", x=x[0])
    refused(r"^weights: expected shape \[5, 2\], found \[5, 1\]", weights=weights[:, :1])
    refused(r"^weights: expected shape \[5, 2\], found \[4, 2\]", weights=weights[1:])
    refused(r"^ids: expected shape \[5, 2\], found \[5, 3\]", ids=np.hstack([ids, ids[:, :1]]))
    twice = ids.copy()
    twice[3] = 2
    refused(r"^ids: token 3 names an expert twice: \[2, 2\]", ids=twice)
    for wrong, message in ((4, r"-?\d\.\.4"), (-2, r"-2\.\.\d")):
        beyond = ids.copy()
        beyond[2, 0] = wrong
        refused(rf"^ids: {message} is outside -1\.\.3", ids=beyond)
    absent = ids.copy()
    absent[0] = -1
    moe([(x, weights, absent)], p.layer, BF16, PLAIN)  # twice nobody is legal
    half = replace(p.layer, experts=p.layer.experts[:2], expert_map=np.array([0, 1, -1, -1], np.int32))
    moe([(x, weights, ids)], half, BF16, PLAIN)
    refused(r"is outside -1\.\.1", layer=replace(half, expert_map=None), ids=np.full_like(ids, 3))


def test_layers_that_do_not_fit_are_refused():
    p = problem()
    (first, second, *_), layer = p.layer.experts, p.layer
    with pytest.raises(TensorError, match=r"^weights_on_input: legal for top_k 1 only, not for 2"):
        replace(layer, weights_on_input=True)
    rows = first.w13.rows(0, 62)
    left = first.w13
    narrow = replace(
        left, codes=left.codes[:, :32], scale=left.scale[:, :1], zero_point=left.zero_point[:, :1]
    )
    for w13, shape in ((rows, r"\[62, 64\]"), (narrow, r"\[64, 32\]")):
        wrong = replace(second, w13=w13)
        for at, layers_ in (
            (1, {"experts": (first, wrong)}),
            (2, {"experts": (first, second), "shared": wrong}),
        ):
            with pytest.raises(
                TensorError, match=rf"^expert {at}: w13 of shape {shape} and w2 of \[64, 32\]"
            ):
                replace(layer, **layers_)
