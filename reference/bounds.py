"""The error model: what a correct kernel may differ by, and why (C40-C46).

A rounding that a contract leaves open but that is deterministic (weights kept exact or rounded to 16
bits) is not an error to bound: it is a hypothesis, computed exactly, and one hypothesis has to explain a
whole output. What is left, the order and the internal width of a float32 accumulation, is bounded by a
radius around each hypothesis. The rounding of the output is exact: an output is acceptable when it is
the rounding of some number within the radius.

The terms and their constants are those measured on simulated correct kernels; docs/specification.md
derives each (C44).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from reference.errors import FormatError
from reference.rounding import FloatFormat, round_to

Float64Array = npt.NDArray[np.float64]

# Confidence of the probabilistic terms: a sum of n zero-mean roundings stays below LAMBDA standard
# deviations; by Hoeffding's inequality it fails with probability 2 exp(-LAMBDA^2 / 2) = 2.6e-14.
LAMBDA = 8.0


@dataclass(frozen=True)
class Contract:
    """What a backend promises of its arithmetic (C40).

    weights: `exact` when q - z and s meet the activations without a 16-bit rounding, `rounded` when the
    product (q - z) * s is rounded to the 16-bit dtype first, `any` when it depends on the path taken.
    accumulator: `fp32` in any order and split, partial sums in float32; tensor cores that truncate to 23
    bits or more belong to it. The bias is added in float32 and the output is rounded once.
    """

    weights: Literal["exact", "rounded", "any"] = "any"
    accumulator: Literal["fp32"] = "fp32"

    def __post_init__(self) -> None:
        if self.weights not in ("exact", "rounded", "any"):
            raise FormatError(f"contract: weights {self.weights!r} is none of exact, rounded, any")
        if self.accumulator != "fp32":
            raise FormatError(f"contract: accumulator {self.accumulator!r} is not fp32")


@dataclass(frozen=True)
class Expected:
    """What a correct output is: float64 centres, one a hypothesis, and the radius around them (M, N).

    A radius of zero everywhere asks for the rounded centre itself, bit for bit. output is the format
    that centres are rounded to.
    """

    hypotheses: dict[str, Float64Array]
    radius: Float64Array
    output: FloatFormat

    @property
    def value(self) -> Float64Array:
        """The ideal value before output rounding (M, N)."""
        return next(iter(self.hypotheses.values()))

    @property
    def exact(self) -> bool:
        return not self.radius.any()

    def interval(self, centre: Float64Array, fraction: float = 1.0) -> tuple[Float64Array, Float64Array]:
        """Lowest and highest acceptable outputs around a centre; rounding is monotone (C45)."""
        if self.exact:
            rounded = round_to(centre, self.output)
            return rounded, rounded
        reach = self.radius * fraction
        return round_to(centre - reach, self.output), round_to(centre + reach, self.output)


def accumulation_radius(
    x: Float64Array,
    codes: Float64Array,
    zero_points: Float64Array,
    scales: Float64Array,
    groups: npt.NDArray[np.int64],
) -> Float64Array:
    """Radius of a float32 accumulation of x (M, K) with w = (u - u_z) * s (N, K), as float64 (M, N).

    codes and zero_points are the stored, unsigned ones, because a kernel may accumulate u and correct by
    u_z * sum(x) later; both halves are then really formed. All three are (N, K), per column; groups is
    the group of each column. Terms (C44), with nz the root of the sum of squared products, pre the largest
    prefix sum, P_g the two halves of the late correction in group g, G groups, K columns:

      2^-23 [ (K/8)(A/2 + nz)           a truncating tensor core loses up to an ulp of the running sum
                                        each 8 columns, half of it on average, always toward zero
            + (L sqrt(K)/2)(A + nz)     K zero-mean float32 roundings
            + (L/2) sqrt(sum P_g^2)     a zero point subtracted late, once a group
            + (G + 4)(pre + nz)         a scaling and an addition a group, and the epilogue
            + (K/4) max(0, A - 6 nz) ]  products of one sign: the truncations add up
    with A = max(pre, mean P_g) and L = LAMBDA.
    """
    m, k = x.shape
    n = codes.shape[0]
    if m == 0 or n == 0 or k == 0:
        return np.zeros((m, n))
    count = int(groups.max()) + 1
    scaled, corrections = codes * scales, zero_points * scales
    nz = np.sqrt((x * x) @ np.square(scaled - corrections).T)
    prefix, pre, up, down, total, squares = (np.zeros((m, n)) for _ in range(6))
    for columns, last in _chunks(groups):
        first = x[:, columns] @ scaled[:, columns].T
        second = x[:, columns] @ corrections[:, columns].T
        prefix += first - second
        np.maximum(pre, np.abs(prefix), out=pre)
        up, down = up + first, down + second
        if last:
            both = np.abs(up) + np.abs(down)
            total += both
            squares += both * both
            up, down = np.zeros_like(up), np.zeros_like(down)
    reach = np.maximum(pre, total / count)
    radius: Float64Array = 2.0**-23 * (
        (k / 8) * (reach / 2 + nz)
        + (LAMBDA * np.sqrt(k) / 2) * (reach + nz)
        + (LAMBDA / 2) * np.sqrt(squares)
        + (count + 4) * (pre + nz)
        + (k / 4) * np.maximum(0, reach - 6 * nz)
    )
    return radius


def _chunks(groups: npt.NDArray[np.int64]) -> list[tuple[npt.NDArray[np.int64], bool]]:
    """Columns in steps of at most 128 inside one group, and whether the group ends with the step."""
    order = np.argsort(groups, kind="stable")
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    steps = []
    for columns in np.split(order, cuts):
        parts = [columns[i : i + 128] for i in range(0, len(columns), 128)]
        steps += [(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    return steps
