"""Numbers with a radius: what is left of a value when the float32 arithmetic behind it is not known to the last bit.

A ball is a centre and a radius, elementwise. What a kernel does next is done to the ball, and the radius
grows by what a float32 operation may round, unless the operands and the result are exact (C97, C98).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.rounding import FloatFormat, round_to

Float64Array = npt.NDArray[np.float64]

_HALF_ULP = 2.0**-24
_TINY = 2.0**-149  # the least float32
UNBOUNDED = 2.0**100  # a radius that says nothing, and yet is no infinity, which a zero would make NaN of


@dataclass(frozen=True)
class Ball:
    """centre and radius: float64, of one shape. Every number that a correct kernel can hold lies between."""

    centre: Float64Array
    radius: Float64Array

    @classmethod
    def exact(cls, centre: Float64Array) -> Ball:
        return cls(centre, np.zeros_like(centre))

    def __getitem__(self, index: Any) -> Ball:
        return Ball(self.centre[index], self.radius[index])

    def plus(self, more: Any) -> Ball:
        """The same with a wider radius."""
        return Ball(self.centre, self.radius + more)

    def kept(self) -> Ball:
        """As a float32: half an ulp more, unless the value is exact and is one."""
        with np.errstate(over="ignore"):
            whole = (self.radius == 0) & (self.centre.astype(np.float32) == self.centre)
        return Ball(
            self.centre,
            np.where(whole, 0.0, self.radius + _HALF_ULP * (np.abs(self.centre) + self.radius) + _TINY),
        )

    def times(self, other: Ball) -> Ball:
        """The float32 product."""
        a, b = self, other
        radius = a.radius * np.abs(b.centre) + np.abs(a.centre) * b.radius + a.radius * b.radius
        return Ball(a.centre * b.centre, radius).kept()

    def add(self, other: Ball) -> Ball:
        """The float32 sum."""
        return Ball(self.centre + other.centre, self.radius + other.radius).kept()

    def rounded(self, output: FloatFormat) -> Ball:
        """In 16 bits: the radius grows only where both its ends do not round alike."""
        centre = round_to(self.centre, output)
        if not self.radius.any():
            return Ball.exact(centre)
        low = round_to(self.centre - self.radius, output)
        high = round_to(self.centre + self.radius, output)
        # Of a ball that reaches beyond the largest number the end that does not is the centre.
        centre = np.where(centre == np.inf, low, np.where(centre == -np.inf, high, centre))
        with np.errstate(invalid="ignore"):
            radius = np.maximum(high - centre, centre - low)
        radius = np.where(np.isnan(radius), 0.0, radius)  # infinity on both sides
        return Ball(centre, np.minimum(radius, UNBOUNDED))
