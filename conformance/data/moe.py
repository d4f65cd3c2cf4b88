"""Mixtures of experts: a layer, what it is asked, what is right.

| recipe     | tokens                      | experts                                   | judged                   |
| ---------- | --------------------------- | ----------------------------------------- | ------------------------ |
| readout    | one column a token          | one active unit a column, full widths     | exactly, nearly all      |
| integers   | some columns of +-1         | small first projection, full second       | exactly, nearly all      |
| random     | normal                      | uniform codes, log-normal scales          | within the bound         |
| one-expert | as random                   | all tokens meet one expert                | within the bound         |
| absent     | as random                   | some are on no rank: -1 in the map        | within the bound         |
| unrouted   | as random                   | some ids are -1                           | within the bound         |
| shared     | as random                   | a shared expert, a routed scaling factor  | within the bound         |
| on-input   | as random                   | router weights multiply the input         | within the bound         |
| empty      | none                        | as random                                 | shape and dtype          |
| golden     | as random, shared by cases  | as random, shared by cases                | within the bound         |

In exact recipes gates are 0 or multiples of 32 or more, where phi is the gate itself or 0 in every float32 form,
and scales are powers of two. A limit is replaced by 512, beyond what phi rounds. Where activations are
quantized, three columns of the input have no weight but in the sentinel units: one holds the largest magnitude of
its token (the anchor), two feed the sentinels, units of the intermediate whose value is the largest of the token and
127 (7, 448) or 127.5 (7.5, 448) times a power of two, so that the intermediate's scale is one as well. The first call
is exact for amax / 127, the second for amax / 127.5.

Tokens are drawn again until no code of theirs lies within reach of a rounding boundary: that is what
`activation_quantization` is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import MoeCheckpoint
from conformance.cases import GOLDEN, Case
from conformance.cases.moe import MOE_EXACT_RECIPES
from conformance.data.activations import DIVISORS, beside_codes
from conformance.data.seeds import generators, of_layer
from conformance.data.weights import quantized_weight, zero_points
from reference.activations import open_tokens, quantize, quantizers
from reference.bounds import Contract, Expected
from reference.formats import WeightFormat
from reference.layouts import layout
from reference.moe import Call, Expert, Memo, MoeLayer, MoeSemantics, moe, moe_of
from reference.rounding import float_format, round_to
from reference.swiglu import GatedActivation, activate
from reference.weights import QuantizedWeight, dequantize_exact

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

_LIMIT = 512.0  # of the exact recipes
_ROUTED_FACTOR = 2.5


@dataclass(frozen=True)
class MoeProblem:
    """A layer and what it is asked: checkpoint and calls go to the backend, the rest stays with the judge."""

    case: Case
    layer: MoeLayer
    calls: list[Call]
    checkpoint: MoeCheckpoint
    _known: dict[Contract, Expected] = field(default_factory=dict)
    _memos: dict[Contract, Memo] = field(default_factory=dict)

    def expected(self, contract: Contract) -> Expected:
        """The expected outputs of all calls, one below the other (sum of T, H); computed once a contract."""
        if contract not in self._known:
            output = float_format(self.case.dtype)
            self._known[contract] = moe(self.calls, self.layer, output, contract)
        return self._known[contract]

    def mutated(self, semantics: MoeSemantics, contract: Contract) -> Expected:
        """What other semantics compute of the same calls."""
        memo = self._memos.setdefault(contract, {})
        return moe_of(self.expected(contract), self.calls, self.layer, contract, semantics, memo)


@lru_cache(maxsize=4)
def moe_problem(case: Case) -> MoeProblem:
    rng, asked = generators(case)
    if case.recipe in MOE_EXACT_RECIPES:
        layer, calls = _exact_problem(case, rng)
    else:
        layer = _drawn_layer(case, rng)
        calls = [_drawn_call(case, layer, asked, number) for number in (0, 1)]
    return MoeProblem(case, layer, calls, moe_checkpoint_of(layer, case.dtype, case.k, case.n))


def moe_checkpoint_of(layer: MoeLayer, dtype: str, hidden: int, intermediate: int) -> MoeCheckpoint:
    """The stacked tensors of a layer, matrix by matrix as compressed-tensors packs them, and its configuration."""
    tensors = _stack("", layer.experts)
    if layer.shared is not None:
        tensors |= _stack("shared_", [layer.shared])
    args = None if layer.activation.kind == "a16" else layer.activation.to_quantization_args()
    return MoeCheckpoint(
        tensors,
        layer.experts[0].w13.format.to_quantization_args(),
        args,
        dtype,
        hidden,
        intermediate,
        layer.gated,
        len(layer.experts if layer.expert_map is None else layer.expert_map),
        layer.top_k,
        layer.expert_map,
        layer.weights_on_input,
        layer.factor,
    )


def _stack(prefix: str, experts: Sequence[Expert]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for which in ("w13", "w2"):
        each = [layout("ct-dense-le-v1").encode(getattr(expert, which)) for expert in experts]
        names = [name for name in each[0] if name != "weight_shape"]
        tensors |= {f"{prefix}{which}_{name}": np.stack([t[name] for t in each]) for name in names}
        biases = [getattr(expert, f"b{which[1:]}") for expert in experts]
        if biases[0] is not None:
            tensors[f"{prefix}{which}_bias"] = np.stack(biases)
    return tensors


# ---- layers


def _drawn_layer(case: Case, rng: np.random.Generator) -> MoeLayer:
    expert_map, present = None, case.experts
    if case.recipe == "absent":  # those of one rank of two, but one rank begins in the middle of a quarter
        first = case.experts // 4
        present = case.experts // 2
        expert_map = np.full(case.experts, -1, np.int32)
        expert_map[first : first + present] = np.arange(present)
    shared = None
    if case.recipe == "shared":
        shared = _drawn_experts(case, rng, 1)[0]
    factor = _ROUTED_FACTOR if case.recipe == "shared" else 1.0
    experts = _drawn_experts(case, rng, present)
    on_input = case.recipe == "on-input"
    return MoeLayer(experts, case.gated, case.activation, case.top_k, expert_map, on_input, factor, shared)


def _drawn_experts(case: Case, rng: np.random.Generator, count: int) -> tuple[Expert, ...]:
    """Gates and ups of some units, so that a limit of 7 is passed by some."""
    sides = ((2 * case.n, case.k, 1.0), (case.k, case.n, -1.0))
    own = [of_layer(case, which) if case.recipe == GOLDEN else rng for which in ("/w13", "/w2")]
    stacks = [
        _drawn_weights(case, r, count, n, k, power) for r, (n, k, power) in zip(own, sides, strict=True)
    ]
    biases = [_biases(case, rng, (count, n)) for n, _, _ in sides]
    return tuple(Expert(w13, w2, b13, b2) for w13, w2, b13, b2 in zip(*stacks, *biases, strict=True))


def _drawn_weights(
    case: Case, rng: np.random.Generator, count: int, n: int, k: int, power: float
) -> list[QuantizedWeight]:
    """power: the exponent of a power of two on all scales."""

    def drawn(rows: int) -> QuantizedWeight:
        return _scaled(quantized_weight(replace(case, n=rows, k=k, recipe="random"), rng), power)

    if case.act_order:  # each expert has an order of its own
        return [drawn(n) for _ in range(count)]
    tall = drawn(count * n)
    if tall.zero_point is not None:  # neighbouring experts never share one
        low, high = case.weight.code_range
        moved = tall.zero_point.astype(np.int64) + np.repeat(np.arange(count), n)[:, None]
        tall = replace(tall, zero_point=((moved - low) % (high - low + 1) + low).astype(np.int8))
    return [tall.rows(e * n, (e + 1) * n) for e in range(count)]


def _biases(case: Case, rng: np.random.Generator, shape: tuple[int, int]) -> list[Array | None]:
    if not case.bias:
        return [None] * shape[0]
    output = float_format(case.dtype)
    drawn = (
        rng.integers(-4, 5, shape) * 8.0 if case.recipe in MOE_EXACT_RECIPES else rng.normal(0, 0.5, shape)
    )
    return list(round_to(drawn, output).astype(output.dtype))


# ---- layers of the exact recipes


def _reserved(case: Case) -> tuple[int, int, int]:
    """The anchor's column, and those that feed the two sentinels; any but the edges of K."""
    return case.k // 3, case.k // 2, case.k // 2 + 3


def _sentinels(case: Case) -> tuple[int, int]:
    """The two units of the intermediate that hold the largest value of a token."""
    return case.n // 2, case.n // 3


def _exact_problem(case: Case, rng: np.random.Generator) -> tuple[MoeLayer, list[Call]]:
    gated = case.gated if case.gated.limit is None else replace(case.gated, limit=_LIMIT)
    first = [_first_projection(case, rng, e) for e in range(case.experts)]
    second = [_second_projection(case, rng, e) for e in range(case.experts)]
    calls = [_exact_call(case, rng, number) for number in (0, 1)]
    slots = [_Slots(case, first, x, ids) for x, _, ids in calls]
    up = _up_power(case, gated, slots)
    first = [_with_up(case, w, up, gated) for w in first]
    down = _down_power(case, gated, first, second, calls)
    order = _row_order(case.n, gated)
    experts = []
    for w13, w2 in zip(first, second, strict=True):
        zero = w13.zero_point
        w13 = replace(
            w13,
            codes=w13.codes[order],
            scale=w13.scale[order],
            zero_point=None if zero is None else zero[order],
        )
        b13 = b2 = None
        if case.bias:  # a bias of the gates would leave the multiples of 32
            dtype = float_format(case.dtype).dtype
            b13 = np.zeros(2 * case.n, dtype)
            b2 = (rng.integers(-4, 5, case.k) * 2.0).astype(dtype)
        experts.append(Expert(w13, _scaled(w2, down), b13, b2))
    return MoeLayer(tuple(experts), gated, case.activation, case.top_k), calls


def _row_order(n: int, gated: GatedActivation) -> npt.NDArray[np.int64]:
    """Which row of [gate; up] stands at each place of the arrangement."""
    gate, up = np.arange(n), n + np.arange(n)
    if gated.arrangement == "interleaved":
        return np.stack([gate, up], axis=1).reshape(-1)
    return np.concatenate([gate, up] if gated.arrangement == "gate-up" else [up, gate])


def _first_projection(case: Case, rng: np.random.Generator, expert: int) -> QuantizedWeight:
    """Rows [gate; up] (2I, H), gate weights multiples of 128, up weights of a power of two that _in_range finds."""
    n, k, fmt = case.n, case.k, case.weight
    low, high = fmt.code_range
    groups, index, zero = _frame(case, rng, 2 * n, k)
    if case.activation.kind != "a16":
        # The scales of sentinels are no powers of two: any other zero point may round, scaled.
        zero[[row for unit in _sentinels(case) for row in (unit, n + unit)]] = 0
    centre = zero[:, groups]
    if case.recipe == "readout":
        codes = rng.integers(low, high + 1, (2 * n, k))
        # One unit for each column: what is summed late must leave the other units out.
        active = (np.arange(n)[:, None] - np.arange(k)[None, :] - expert) % n == 0
        codes[:n] = np.where(active, codes[:n], centre[:n])
    else:
        codes = np.clip(centre + rng.integers(-1, 2, (2 * n, k)), low, high)
    if case.activation.kind != "a16":
        reserved = list(_reserved(case))
        codes[:, reserved] = centre[:, reserved]
        for unit, column in zip(_sentinels(case), reserved[1:], strict=True):
            for row in (unit, n + unit):
                codes[row] = centre[row]
                codes[row, column] += 1
    rows, columns = np.arange(2 * n)[:, None], np.arange(zero.shape[1])[None, :]
    scale = np.exp2((rows + columns + expert) % 2.0)
    scale[:n] *= 128
    if case.activation.kind != "a16":
        for unit in _sentinels(case):
            scale[unit] = 128
    return _weight(case, codes, scale, zero, index)


def _second_projection(case: Case, rng: np.random.Generator, expert: int) -> QuantizedWeight:
    n, k, fmt = case.k, case.n, case.weight
    low, high = fmt.code_range
    groups, index, zero = _frame(case, rng, n, k)
    codes = rng.integers(low, high + 1, (n, k))
    if case.activation.kind != "a16":
        for unit in _sentinels(case):
            codes[:, unit] = zero[:, groups[unit]]
    rows, columns = np.arange(n)[:, None], np.arange(zero.shape[1])[None, :]
    return _weight(case, codes, np.exp2((rows + columns + 2 * expert) % 3.0), zero, index)


def _frame(
    case: Case, rng: np.random.Generator, n: int, k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32] | None, npt.NDArray[np.int64]]:
    """The group of each column, its g_idx if there is one, and zero points (N, G) with room for a code above."""
    fmt = case.weight
    count = fmt.groups(k)
    groups = np.arange(k, dtype=np.int64) // (fmt.group_size if fmt.strategy == "group" else k)
    index = None
    if case.act_order:
        index = rng.permutation(groups).astype(np.int32)
        groups = index.astype(np.int64)
    if fmt.symmetric:
        return groups, index, np.zeros((n, count), np.int64)
    zero = zero_points(rng, n, count, fmt).astype(np.int64)
    return groups, index, np.minimum(zero, fmt.code_range[1] - 1)


def _weight(
    case: Case,
    codes: npt.NDArray[Any],
    scale: Float64Array,
    zero: npt.NDArray[np.int64],
    index: npt.NDArray[np.int32] | None,
) -> QuantizedWeight:
    fmt: WeightFormat = case.weight
    zero_point = None if fmt.symmetric else zero.astype(np.int8)
    dtype = float_format(case.dtype).dtype
    return QuantizedWeight(fmt, codes.astype(np.int8), scale.astype(dtype), zero_point, index)


class _Slots:
    """What a call's slots meet in exact arithmetic: gate and up (S, I) of [gate; up], the sentinels left out."""

    def __init__(self, case: Case, first: list[QuantizedWeight], x: Array, ids: Array) -> None:
        values = x.astype(np.float64)
        if case.activation.kind != "a16":
            values = _codes_of(case, x)
        every = np.zeros((ids.size, 2 * case.n))
        rows = np.repeat(np.arange(len(ids)), ids.shape[1])
        for e in np.unique(ids):
            at = np.flatnonzero(ids.reshape(-1) == e)
            every[at] = values[rows[at]] @ dequantize_exact(first[e]).T
        if case.activation.kind != "a16":
            for unit in _sentinels(case):
                every[:, [unit, case.n + unit]] = 0
        self.gate, self.up = every[:, : case.n], every[:, case.n :]


def _codes_of(case: Case, x: Array) -> Float64Array:
    """The values that the convention for which the call is exact gives x; near enough for the other."""
    how = next(quantizers(case.activation, "kernel", float_format(case.dtype)))
    return quantize(x, case.activation, how).dequantized()


def _sentinel_up(case: Case, number: int) -> float:
    """up + beta of a sentinel: the convention's divisor times a power of two, from 100 to 256."""
    divisor = DIVISORS[case.activation.kind][number]
    return float(divisor * 2.0 ** np.ceil(np.log2(100 / divisor)))


def _up_power(case: Case, gated: GatedActivation, slots: list[_Slots]) -> float:
    """The exponent of the scales of up: no unit of the intermediate above the sentinels', none above what
    float16 holds, and small enough that quantization is seen."""
    limit = np.inf if gated.limit is None else gated.limit
    gate = max(np.clip(s.gate, 0, limit).max(initial=1.0) for s in slots)
    up = max(np.abs(s.up).max(initial=1.0) for s in slots)
    quantized = case.activation.kind != "a16"
    room = 128 * min(_sentinel_up(case, n) for n in (0, 1)) if quantized else 2.0**15
    power = np.floor(np.log2((room / gate - gated.beta) / up))
    if not quantized:
        power = min(power, 0.0)
    return float(np.clip(power, -12, 3))


def _with_up(case: Case, weight: QuantizedWeight, power: float, gated: GatedActivation) -> QuantizedWeight:
    scale = weight.scale.astype(np.float64)
    scale[case.n :] *= 2.0**power
    if case.activation.kind != "a16":
        for number, unit in enumerate(_sentinels(case)):
            scale[case.n + unit] = _sentinel_up(case, number) - gated.beta
    return replace(weight, scale=scale.astype(weight.scale.dtype))


def _down_power(
    case: Case,
    gated: GatedActivation,
    first: list[QuantizedWeight],
    second: list[QuantizedWeight],
    calls: list[Call],
) -> float:
    """The exponent of the scales of w2: outputs that float16 holds."""
    if case.dtype != "fp16":
        return 0.0
    largest = 1.0
    for x, _, ids in calls:
        slots = _Slots(case, first, x, ids)
        a, b = activate(slots.gate, slots.up, gated)
        for e in np.unique(ids):
            at = ids.reshape(-1) == e
            outputs = (a * b)[at] @ dequantize_exact(second[e]).T
            largest = max(largest, np.abs(outputs).max(initial=1.0))
    return float(min(0.0, np.floor(np.log2(2.0**14 / largest))))


def _scaled(weight: QuantizedWeight, power: float) -> QuantizedWeight:
    scale = weight.scale.astype(np.float64) * 2.0**power
    return replace(weight, scale=scale.astype(weight.scale.dtype))


# ---- calls


def _drawn_call(case: Case, layer: MoeLayer, rng: np.random.Generator, number: int) -> Call:
    """Tokens of different sizes, drawn until no code is open; router weights as a softmax gives them."""
    t, k = case.m, case.top_k
    ids = _distinct_ids(rng, t, case.experts, k)
    if case.recipe == "one-expert":
        ids[:] = case.experts - 1 - number
    if case.recipe == "unrouted":
        ids[rng.random((t, k)) < 0.3] = -1
    weights = np.exp(rng.normal(0, 1, (t, k)))
    weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    if case.recipe == "on-input":  # a softmax over one is 1: what a sigmoid gives instead
        weights = rng.uniform(0.2, 0.9, (t, k)).astype(np.float32)
    output = float_format(case.dtype)
    x = np.zeros((t, case.k), output.dtype)
    left = np.arange(t)
    for _ in range(50):
        size = np.exp2((left[:, None] + 3 * number) % 4 - 1.0)
        x[left] = round_to(rng.normal(0, 1, (len(left), case.k)) * size, output).astype(output.dtype)
        left = left[_open(case, layer, x[left], weights[left])]
        if len(left) == 0:
            return x, weights, ids.astype(np.int32)
    raise AssertionError(f"{case.id}: tokens with open codes after 50 draws")


def _open(case: Case, layer: MoeLayer, x: Array, weights: Array) -> npt.NDArray[np.bool_]:
    """The tokens whose codes legal kernels may disagree on (C63)."""
    if case.activation.kind == "a16":
        return np.zeros(len(x), np.bool_)
    output = float_format(case.dtype)
    if layer.weights_on_input:
        x = (x.astype(np.float32) * weights).astype(output.dtype)
    plain = quantize(x, case.activation, next(quantizers(case.activation, "kernel", output)))
    return open_tokens(x, case.activation, "kernel", plain)


def _distinct_ids(rng: np.random.Generator, t: int, experts: int, k: int) -> npt.NDArray[np.int64]:
    """k of the experts for each token, in random order; every expert in turn is somebody's first."""
    keys = rng.random((t, experts))
    keys[np.arange(t), (np.arange(t) + rng.integers(experts)) % experts] = -1.0
    ids = np.argsort(keys, axis=1)[:, :k]
    found: npt.NDArray[np.int64] = rng.permuted(ids, axis=1)
    return found


def _exact_call(case: Case, rng: np.random.Generator, number: int) -> Call:
    """Tokens of a few columns; weights that are powers of two and differ from slot to slot and token to token."""
    t, k, hidden = case.m, case.top_k, case.k
    reserved = list(_reserved(case)) if case.activation.kind != "a16" else []
    free = np.setdiff1d(np.arange(hidden), reserved)
    codes = np.zeros((t, hidden))
    for token in range(t):
        if case.recipe == "readout":  # both signs of a column in time: a gate below zero is silent
            codes[token, free[(token + number * t // 2) % len(free)]] = (-1.0) ** number
        else:
            columns = rng.choice(free, min(6, len(free)), replace=False)
            codes[token, columns] = rng.choice([-1.0, 1.0], len(columns))
    x = codes
    if reserved:
        power = np.exp2(-((np.arange(t)[:, None] + number) % 3.0))
        x = beside_codes(codes, case.activation, rng) * power
        divisor = DIVISORS[case.activation.kind][number]
        x[:, reserved[0]] = divisor * power[:, 0] * rng.choice([-1.0, 1.0], t)
        x[:, reserved[1 + number]] = 1.0
    tokens, slots = np.arange(t)[:, None], np.arange(k)[None, :]
    weights = np.exp2(-((tokens + slots) % k + 1.0)).astype(np.float32)
    ids = _distinct_ids(rng, t, case.experts, k)
    dtype = float_format(case.dtype).dtype
    return x.astype(dtype), weights, ids.astype(np.int32)
