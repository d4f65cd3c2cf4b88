"""The error model: what a correct kernel may differ by, and why (C40-C46, C50-C54).

A rounding that a contract leaves open but that is deterministic (weights kept exact or rounded to 16 bits, the
order of a quantizer's operations, an epilogue in 16 bits) is not an error to bound: it is a hypothesis,
computed exactly, and one hypothesis has to explain a whole output. What is left, the order and the internal
width of an accumulation, is bounded by a radius around each hypothesis. What follows the accumulation is
monotone, so an output is acceptable when it lies between the results of both ends of the radius.

The terms and their constants are those measured on simulated correct kernels; docs/specification.md
derives each (C44, C50-C54).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from reference.activations import Convention
from reference.errors import FormatError
from reference.rounding import FloatFormat, round_to

Float64Array = npt.NDArray[np.float64]
Accumulator = Literal["fp32", "e8m13", "e8m13/128"]

# Confidence of the probabilistic terms: a sum of n zero-mean roundings stays below LAMBDA standard
# deviations; by Hoeffding's inequality it fails with probability 2 exp(-LAMBDA^2 / 2) = 2.6e-14.
LAMBDA = 8.0
# Each output has at most this many such sums: the accumulation and the late correction of zero points.
PROBABILISTIC_TERMS = 2


def false_alarm_bound(elements: int) -> float:
    """The probability that a correct kernel leaves the radius in any of so many outputs (union bound, C54)."""
    return float(min(1.0, elements * PROBABILISTIC_TERMS * 2 * np.exp(-(LAMBDA**2) / 2)))


@dataclass(frozen=True)
class Contract:
    """What a backend promises of its arithmetic (C40); the defaults are the default class.

    weights: `exact` when (q - z) * s meets the activations without a 16-bit rounding, `rounded` when the
    product is rounded to the 16-bit dtype first, `any` when it depends on the path taken.
    zero_point: `integer`, subtracted from the code before the scale, or `scaled`: z * s is rounded to 16
    bits and subtracted from q * s (C51).
    accumulator: of products of 16-bit and fp8 operands: `fp32` in any order and split (tensor cores that
    truncate to 23 bits or more belong to it), `e8m13` for fp8 on Hopper's tensor cores, `e8m13/128` with
    promotion to float32 every 128 columns (C52).
    integers: of products of integer codes: `int32` inside a group, or `fp32`.
    quantizer: the convention of activation scales, `kernel` (amax / 127) or `compressed-tensors` (C62).
    epilogue: `once`: scale and bias in float32, one rounding; `16-bit`: the sum is rounded to 16 bits before
    the channel scale and the bias; `any` when it depends on the path taken (C50).
    partial_sums: how many partial sums of 16 bits one output is made of; 1 for none (C53).
    intermediates: of an expert: what lies between its projections and what it returns is kept in `fp32`, or rounded
    where it would be stored, `16-bit`, or `any` of it (C93).
    sigmoid: how phi is computed: by `exp`, by an accurate `tanh`, or by the hardware's `tanh.approx` (C82).
    ties: of router keys that are equal bit for bit the `lowest` index is chosen, or `any` (C72).
    router: scores, their sum and weights in `fp32`, or each rounded to the format of 16-bit logits, `16-bit` (C72).
    """

    weights: Literal["exact", "rounded", "any"] = "any"
    zero_point: Literal["integer", "scaled"] = "integer"
    accumulator: Accumulator = "fp32"
    integers: Literal["int32", "fp32"] = "fp32"
    quantizer: Convention = "kernel"
    epilogue: Literal["once", "16-bit", "any"] = "once"
    partial_sums: int = 1
    intermediates: Literal["fp32", "16-bit", "any"] = "any"
    sigmoid: Literal["exp", "tanh", "tanh.approx"] = "exp"
    ties: Literal["lowest", "any"] = "lowest"
    router: Literal["fp32", "16-bit"] = "fp32"

    def __post_init__(self) -> None:
        choices = {
            "weights": ("exact", "rounded", "any"),
            "zero_point": ("integer", "scaled"),
            "accumulator": get_args(Accumulator),
            "integers": ("int32", "fp32"),
            "quantizer": get_args(Convention),
            "epilogue": ("once", "16-bit", "any"),
            "intermediates": ("fp32", "16-bit", "any"),
            "sigmoid": ("exp", "tanh", "tanh.approx"),
            "ties": ("lowest", "any"),
            "router": ("fp32", "16-bit"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise FormatError(f"contract: {name} {getattr(self, name)!r} is none of {', '.join(allowed)}")
        sums = self.partial_sums
        if isinstance(sums, bool) or not isinstance(sums, int) or not 1 <= sums <= 64:
            raise FormatError(f"contract: partial_sums {sums!r} is not an integer from 1 to 64")


@dataclass(frozen=True)
class Hypothesis:
    """One way to compute an output: float64 centre (M, N), the radius around it, and what follows.

    finish: monotone in each element, from centre to output numbers; None rounds to the output format.
    flips: token -> (A, N), what each of the A activation codes of that token that may legally flip adds to its
    centre; any subset of them makes an acceptable token, with a note (C45, C63).
    tipping: the part of the radius that counts as able to tip a rounding (C46).
    """

    centre: Float64Array
    radius: Float64Array
    finish: Callable[[Float64Array], Float64Array] | None = None
    flips: Mapping[int, Float64Array] = field(default_factory=dict)
    tipping: float = 0.25


@dataclass(frozen=True)
class Expected:
    """What a correct output is. value: the ideal result (M, N) before the output's rounding.

    A radius of zero asks for the finished centre itself, bit for bit.
    """

    value: Float64Array
    hypotheses: dict[str, Hypothesis]
    output: FloatFormat

    @property
    def radius(self) -> Float64Array:
        """The radius of the first hypothesis (M, N)."""
        return next(iter(self.hypotheses.values())).radius

    @property
    def exact(self) -> bool:
        """Whether every element has a single acceptable value a hypothesis."""
        return not any(h.radius.any() for h in self.hypotheses.values())

    def finish(self, hypothesis: Hypothesis, centre: Float64Array) -> Float64Array:
        return round_to(centre, self.output) if hypothesis.finish is None else hypothesis.finish(centre)

    def interval(self, hypothesis: Hypothesis, fraction: float = 1.0) -> tuple[Float64Array, Float64Array]:
        """Lowest and highest acceptable outputs around a centre, (M, N) each (C45)."""
        return self.around(hypothesis, hypothesis.centre, hypothesis.radius * fraction)

    def around(
        self, hypothesis: Hypothesis, centre: Float64Array, radius: Float64Array
    ) -> tuple[Float64Array, Float64Array]:
        """The same for any centre and radius that broadcast to the outputs' columns."""
        if not radius.any():
            finished = self.finish(hypothesis, centre)
            return finished, finished
        ends = [self.finish(hypothesis, centre + side * radius) for side in (-1, 1)]
        return np.minimum(*ends), np.maximum(*ends)  # a negative scale turns the ends round


def side_by_side(parts: Sequence[Expected]) -> Expected:
    """One expectation of blocks of output columns, in order. A hypothesis that a block lacks says the same there
    as the block's first."""
    names = dict.fromkeys(name for part in parts for name in part.hypotheses)
    cuts = np.cumsum([part.value.shape[1] for part in parts])[:-1]

    def joined(name: str) -> Hypothesis:
        own = [part.hypotheses.get(name, next(iter(part.hypotheses.values()))) for part in parts]

        def finish(centre: Float64Array) -> Float64Array:
            blocks = np.split(centre, cuts, axis=1)
            return np.hstack([p.finish(h, b) for p, h, b in zip(parts, own, blocks, strict=True)])

        tokens = own[0].flips if all(h.flips.keys() == own[0].flips.keys() for h in own) else ()
        return Hypothesis(
            np.hstack([h.centre for h in own]),
            np.hstack([h.radius for h in own]),
            finish if any(h.finish is not None for h in own) else None,
            {token: np.hstack([h.flips[token] for h in own]) for token in tokens},
        )

    value = np.hstack([part.value for part in parts])
    return Expected(value, {name: joined(name) for name in names}, parts[0].output)


@dataclass(frozen=True)
class Magnitudes:
    """What an accumulation of x (M, K) with w = (u - u_z) * s (N, K) really reaches, (M, N) each.

    nz: root of the sum of squared products; stored: the same of the products x u s or x q s, the larger, which a
    kernel sums that corrects for zero points late. pre: largest |prefix sum|, at group boundaries and at least
    every 128 columns. halves: mean over the groups of P_g = |sum x u s| + |sum x u_z s|, the two halves of a
    zero-point correction made late, or the same of signed codes, the larger. root: root of the sum of P_g^2.
    groups, k: G and K.
    """

    nz: Float64Array
    stored: Float64Array
    pre: Float64Array
    halves: Float64Array
    root: Float64Array
    groups: int
    k: int
    group_columns: int

    @property
    def reach(self) -> Float64Array:
        return np.maximum(self.pre, self.halves)


def magnitudes(
    x: Float64Array,
    codes: Float64Array,
    zero_points: Float64Array,
    scales: Float64Array,
    groups: npt.NDArray[np.int64],
    offset: int,
) -> Magnitudes:
    """The magnitudes of an accumulation (C44).

    codes and zero_points are the stored, unsigned ones, because a kernel may accumulate u and correct by
    u_z * sum(x) later, or do so with signed codes, u and u_z less offset; both halves are then really formed.
    All three are (N, K), per column; groups is the group of each column.
    """
    m, k = x.shape
    n = codes.shape[0]
    if m == 0 or n == 0 or k == 0:
        empty = np.zeros((m, n))
        return Magnitudes(empty, empty, empty, empty, empty, 1, k, k)
    count = int(groups.max()) + 1
    scaled, corrections = codes * scales, zero_points * scales
    squared = x * x
    nz = np.sqrt(squared @ np.square(scaled - corrections).T)
    signed = (codes - offset) * scales
    stored = np.sqrt(np.maximum(squared @ np.square(scaled).T, squared @ np.square(signed).T))
    prefix, pre, up, down, moved, total, squares = (np.zeros((m, n)) for _ in range(7))
    for columns, last in _chunks(groups):
        part = x[:, columns]
        first = part @ scaled[:, columns].T
        second = part @ corrections[:, columns].T
        prefix += first - second
        np.maximum(pre, np.abs(prefix), out=pre)
        up, down = up + first, down + second
        moved = moved + part @ (offset * scales[:, columns]).T
        if last:
            both = np.maximum(np.abs(up) + np.abs(down), np.abs(up - moved) + np.abs(down - moved))
            total += both
            squares += both * both
            up, down, moved = np.zeros_like(up), np.zeros_like(down), np.zeros_like(moved)
    return Magnitudes(nz, stored, pre, total / count, np.sqrt(squares), count, k, -(-k // count))


def float32_radius(of: Magnitudes) -> Float64Array:
    """Radius of a float32 accumulation (C44), with A = reach and L = LAMBDA:

    2^-23 [ (K/8)(A/2 + nz)           a truncating tensor core loses up to an ulp of the running sum each 8
                                      columns, half of it on average, always toward zero
          + (L sqrt(K)/2)(A + nz)     K zero-mean float32 roundings
          + (L/2) root                a zero point subtracted late, once a group
          + (G + 4)(pre + nz)         a scaling and an addition a group, and the epilogue
          + (K/4) max(0, A - 6 nz) ]  products of one sign: the truncations add up
    """
    k, nz, reach = of.k, of.nz, of.reach
    radius: Float64Array = 2.0**-23 * (
        (k / 8) * (reach / 2 + nz)
        + (LAMBDA * np.sqrt(k) / 2) * (reach + nz)
        + (LAMBDA / 2) * of.root
        + (of.groups + 4) * (of.pre + nz)
        + (k / 4) * np.maximum(0, reach - 6 * nz)
    )
    return radius


def int32_radius(of: Magnitudes) -> Float64Array:
    """Radius of integer products summed exactly in a group and joined in float32 (C44):

    2^-24 [ (L sqrt(G)/2 + 4)(pre + 2 nz)   a conversion, two scalings and an addition a group
          + L root ]                        a zero point subtracted in float32, once a group
    """
    joined: Float64Array = (LAMBDA * np.sqrt(of.groups) / 2 + 4) * (of.pre + 2 * of.nz)
    return 2.0**-24 * (joined + LAMBDA * of.root)


def e8m13_radius(of: Magnitudes, promotion: int) -> Float64Array:
    """What Hopper's fp8 tensor cores add to float32_radius (C52): 32 products a step, 14 significand bits,
    truncated; promotion: columns after which the sum moves to float32 (at most a group).

    2^-13 [ B (R/2 + nz f) + 0.8 L sqrt(B) (3R/4 + nz f) + 8 B max(0, R - 6 nz f) ]
    with B = K/32 steps, f = sqrt(promotion / K), R = max(mean P_g, A f^2), the sum inside one promotion, and nz
    the larger of that of the products x w and x u s.
    """
    if of.k == 0:
        return of.nz
    steps = of.k / 32
    f = np.sqrt(min(promotion, of.group_columns if of.groups > 1 else of.k, of.k) / of.k)
    inside, nz = np.maximum(of.halves, of.reach * f * f), np.maximum(of.nz, of.stored) * f
    radius: Float64Array = 2.0**-13 * (
        steps * (inside / 2 + nz)
        + 0.8 * LAMBDA * np.sqrt(steps) * (0.75 * inside + nz)
        + 8 * steps * np.maximum(0, inside - 6 * nz)
    )
    return radius


def partial_sums_radius(
    of: Magnitudes, value: Float64Array, bias: Float64Array | float, output: FloatFormat, sums: int
) -> Float64Array:
    """What S partial sums stored in the output format add: (2S - 1)(u (|y| + |b| + 5 nz) + half the least
    subnormal) (C53)."""
    size = np.abs(value) + np.abs(bias) + 5 * of.nz
    least = 2.0 ** (output.emin - output.precision)
    return np.asarray((2 * sums - 1) * (output.unit_roundoff * size + least))


def _chunks(groups: npt.NDArray[np.int64]) -> list[tuple[npt.NDArray[np.int64], bool]]:
    """Columns in steps of at most 128 inside one group, and whether the group ends with the step."""
    order = np.argsort(groups, kind="stable")
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    steps = []
    for columns in np.split(order, cuts):
        parts = [columns[i : i + 128] for i in range(0, len(columns), 128)]
        steps += [(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    return steps
