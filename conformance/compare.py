"""From expected and actual numbers to a comparison: does one hypothesis explain every element (C45, C46, C63)?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.activations import (
    Convention,
    QuantizedActivations,
    amax,
    legal_codes,
    legal_quantizations,
    open_tokens,
)
from reference.bounds import Expected, Hypothesis
from reference.formats import ActivationFormat
from reference.rounding import half_ulps

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

UNEXPLAINED = "unexplained rounding path"


@dataclass(frozen=True)
class Comparison:
    """worst: the largest error beyond rounding as a fraction of what is allowed (0: none, inf: not allowed
    at all). explained_by: the hypothesis that fits. note: what is odd about an answer that passes.
    wrong: the elements that are, right and allowed: what they should be. width: how many ulps apart the
    lowest and the highest acceptable value are, for the median element. elements: how many were bounded.
    statistics: advice (see `statistics`)."""

    passes: bool
    worst: float
    explained_by: str = ""
    note: str = ""
    detail: str = ""
    wrong: Mask | None = None
    right: Array | None = None
    allowed: tuple[Array, Array] | None = None
    width: float = 0.0
    elements: int = 0
    statistics: dict[str, float] = field(default_factory=dict)


def compare_exactly(expected: Array, actual: Array) -> Comparison:
    """Equal element by element, -0 equal to +0, NaN equal to nothing."""
    wrong = ~(expected == actual)
    if not wrong.any():
        return Comparison(True, 0.0, "exact")
    integers = np.issubdtype(expected.dtype, np.integer)
    return Comparison(False, np.inf, wrong=wrong, right=expected.astype(np.int64 if integers else np.float64))


def compare_to_expected(expected: Expected, actual: Array) -> Comparison:
    """Judge an output of the output dtype against the oracle's hypotheses and radius."""
    y = actual.astype(np.float64)
    trials = [Trial(name, hypothesis, expected, y) for name, hypothesis in expected.hypotheses.items()]
    fitting = [trial for trial in trials if trial.fits]
    if fitting:
        return min(fitting, key=Trial.worst).comparison(True)
    best = min(trials, key=lambda trial: (int(trial.outside.sum()), int(trial.off.sum())))
    if (
        not expected.exact
        and all(trial.outside.any() for trial in trials)
        and _in_the_hull(trials, expected, y)
    ):
        return best.comparison(True, note=UNEXPLAINED)
    inside = np.logical_or.reduce([~trial.outside for trial in trials])
    if inside.all():
        off = f"{int(best.off.sum())} of {y.size} elements are not the nearest rounding, each allowed"
        return best.comparison(False, detail=f"{off}, together more than it can tip (C46)", wrong=best.off)
    return best.comparison(False, wrong=~inside)


class Trial:
    """One hypothesis against one output y (M, N)."""

    def __init__(self, name: str, hypothesis: Hypothesis, expected: Expected, y: Float64Array) -> None:
        self.name, self.hypothesis, self.expected, self.y = name, hypothesis, expected, y
        self.low, self.high = expected.interval(hypothesis)
        self.nearest = expected.finish(hypothesis, hypothesis.centre)
        self.outside: Mask = ~((self.low <= y) & (y <= self.high))
        self.off: Mask = y != self.nearest
        self.fits = not self.outside.any() and self._roundings_plausible()

    def _roundings_plausible(self) -> bool:
        if not self.off.any():
            return True
        low, high = self.expected.interval(self.hypothesis, self.hypothesis.tipping)
        return roundings_plausible(self.off, low != high)

    def worst(self) -> float:
        """The largest distance from the centre to what rounds to y, as a fraction of the radius. Where more
        than a rounding follows the centre, in sixteenths."""
        if self.y.size == 0:
            return 0.0
        radius = self.hypothesis.radius
        if not radius.any() or self.hypothesis.finish is not None:
            if self.outside.any():
                return np.inf
            return next((i / 16 for i in range(17) if self._within(i / 16)), 1.0)
        below, above = half_ulps(self.y, self.expected.output)
        centre = self.hypothesis.centre
        with np.errstate(invalid="ignore", divide="ignore"):
            distance = np.maximum(0.0, np.maximum((self.y - below) - centre, centre - (self.y + above)))
            fraction = np.where(distance == 0, 0.0, distance / radius)
        fraction = np.where(np.isinf(self.y) & ~self.outside, 0.0, fraction)
        return float(np.max(np.nan_to_num(fraction, nan=np.inf, posinf=np.inf)))

    def _within(self, fraction: float) -> bool:
        low, high = self.expected.interval(self.hypothesis, fraction)
        return bool(((low <= self.y) & (self.y <= high)).all())

    def comparison(
        self, passes: bool, note: str = "", detail: str = "", wrong: Mask | None = None
    ) -> Comparison:
        bounded = not self.expected.exact
        return Comparison(
            passes, self.worst(), self.name, note, detail, wrong, self.nearest,
            (self.low, self.high) if bounded else None,
            self._width() if bounded else 0.0,
            int(np.count_nonzero(self.hypothesis.radius)) if bounded else 0,
            statistics(self.hypothesis, self.expected, self.y) if bounded else {},
        )  # fmt: skip

    def _width(self) -> float:
        """Between the ends of the interval of the median element, in ulps of the outputs' root mean square."""
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        if not finite.any():
            return 0.0
        size = np.sqrt(np.square(self.nearest[finite]).mean())
        _, above = half_ulps(np.asarray(size), self.expected.output)
        return float(np.median(self.high[finite] - self.low[finite]) / (2 * above))


# Subsets of the flipping codes of one token are tried one by one up to this many codes.
_FLIPS = 10


def _in_the_hull(trials: list[Trial], expected: Expected, y: Float64Array) -> bool:
    """Whether each element is explained by some hypothesis, or each token by one with some of the activation
    codes flipped that legally may (C45), and no more of them are off than can tip (C46)."""
    inside = np.logical_or.reduce([~trial.outside for trial in trials])
    off = np.logical_and.reduce([trial.off for trial in trials])
    for token in np.flatnonzero(~inside.all(axis=1)):
        nearest = [found for t in trials if (found := _flipped(t, expected, y, int(token))) is not None]
        if not nearest:
            return False
        off[token] = y[token] != nearest[0]
    intervals = [expected.interval(t.hypothesis, t.hypothesis.tipping) for t in trials]
    return roundings_plausible(off, np.logical_or.reduce([low != high for low, high in intervals]))


def _flipped(trial: Trial, expected: Expected, y: Float64Array, token: int) -> Float64Array | None:
    """The finished centre (N) of the subset of flipping codes that explains a whole token, or None."""
    hypothesis = trial.hypothesis
    changes = hypothesis.flips.get(token)
    if changes is None or len(changes) > _FLIPS:
        return None
    subsets = (np.arange(1 << len(changes))[:, None] >> np.arange(len(changes))) & 1
    centres = hypothesis.centre[token] + subsets @ changes
    low, high = expected.around(hypothesis, centres, hypothesis.radius[token])
    fitting = np.flatnonzero(((low <= y[token]) & (y[token] <= high)).all(axis=1))
    return None if len(fitting) == 0 else expected.finish(hypothesis, centres[fitting[0]])


def roundings_plausible(off: Mask, tippable: Mask) -> bool:
    """Few enough elements off the finished centre: at most S + 6 sqrt(S) + 3, where S counts those that
    can tip; in total, in each row and in each column (C46)."""
    for axis in (None, 0, 1):
        s = np.asarray(tippable.sum(axis=axis))
        if (np.asarray(off.sum(axis=axis)) > s + 6 * np.sqrt(s) + 3).any():
            return False
    return True


def statistics(hypothesis: Hypothesis, expected: Expected, y: Float64Array) -> dict[str, float]:
    """How the residual compares with what one rounding of the output alone gives: advice, never pass or fail.

    rms: root mean square over that of a uniform rounding error and a sixth of the radius (1: nothing else).
    bias: mean of the signed residual, away from zero positive, in standard errors. row, column: the worst
    one's mean square, over the same.
    """
    if hypothesis.finish is not None or np.count_nonzero(hypothesis.radius) <= 0.75 * y.size:
        return {}  # what is exact leaves no residual to speak of
    below, above = half_ulps(y, expected.output)
    with np.errstate(invalid="ignore", divide="ignore"):
        sigma = np.sqrt((below + above) ** 2 / 12 + (hypothesis.radius / 6) ** 2)
        t = (y - hypothesis.centre) / sigma
    t = np.where(np.isfinite(t), t, 0.0)
    square = t * t
    return {
        "rms": round(float(np.sqrt(square.mean())), 3),
        "bias": round(float((t * np.sign(hypothesis.centre)).mean() * np.sqrt(t.size)), 2),
        "row": round(float(square.mean(axis=1).max()), 2),
        "column": round(float(square.mean(axis=0).max()), 2),
    }


# ---- the quantizer alone


@dataclass(frozen=True)
class LegalQuantizations:
    """What quantizations of some activations are right.

    results: by the name of the order of operations, the plainest first. zero: tokens, groups or the tensor that are all
    zeros, shaped like scales. ends: lowest and highest codes (M, K) under the scales of an answer.
    """

    results: Mapping[str, QuantizedActivations]
    zero: Mask
    ends: Callable[[QuantizedActivations], tuple[Array, Array]]


def compare_quantizations(
    x: Array,
    fmt: ActivationFormat,
    convention: Convention,
    actual: QuantizedActivations,
    input_scale: float | None = None,
) -> Comparison:
    """Judge codes and scales against the legal ones of x (M, K) (C63)."""
    return compare_quantized(legal_of(x, fmt, convention, input_scale), actual)


def legal_of(
    x: Array, fmt: ActivationFormat, convention: Convention, input_scale: float | None = None
) -> LegalQuantizations:
    """The legal quantizations of x (M, K) in a convention."""
    legal = legal_quantizations(x, fmt, convention, input_scale)
    plain = next(iter(legal.values()))

    def ends(actual: QuantizedActivations) -> tuple[Array, Array]:
        low, high = legal_codes(x, fmt, actual.scale, actual.zero_point)
        free = open_tokens(x, fmt, convention, plain)[:, None]
        return np.where(free, low, plain.codes), np.where(free, high, plain.codes)

    return LegalQuantizations(legal, _zeros(x, fmt), ends)


def compare_quantized(right: LegalQuantizations, actual: QuantizedActivations) -> Comparison:
    """One legal order of operations must give all codes and scales. Where none does, scales that are each legal
    and codes that are each legal under their own scale pass with a note.
    """
    legal, zero = right.results, right.zero
    for name, candidate in legal.items():
        if (
            not _wrong_codes(candidate, actual, zero).any()
            and not _wrong_scales([candidate], actual, zero).any()
        ):
            return Comparison(True, 0.0, name)
    scales = _wrong_scales(list(legal.values()), actual, zero)
    low, high = right.ends(actual)
    plain = next(iter(legal.values()))
    codes = ~((low <= actual.codes) & (actual.codes <= high))
    if zero.any():
        codes &= ~actual.spread(zero)
        codes |= actual.spread(zero) & (actual.dequantized() != 0)
    if not scales.any() and not codes.any():
        return Comparison(True, 0.0, next(iter(legal)), note=UNEXPLAINED)
    if scales.any():
        what = f"{int(scales.sum())} of {scales.size} scales are wrong"
        place = tuple(int(i) for i in np.argwhere(scales)[0])
        found = f"{what}, first at {list(place)}: got {actual.scale[place]:.9g}, expected {plain.scale[place]:.9g}"
        if plain.zero_point is not None and actual.zero_point is not None:
            found += f", zero point {actual.zero_point[place]:g}, expected {plain.zero_point[place]:g}"
        return Comparison(
            False, np.inf, detail=found, wrong=_wrong_codes(plain, actual, zero), right=plain.codes
        )
    # Of what is allowed under the scales that were given, the nearest to what it would be under the right ones
    nearest = np.clip(plain.codes, low, high)
    return Comparison(False, np.inf, wrong=codes, right=nearest, allowed=(low, high))


def _zeros(x: Array, fmt: ActivationFormat) -> Mask:
    """Tokens (M, 1), groups (M, G) or the tensor (1, 1) that are all zeros: any finite scale is right (C64)."""
    return np.asarray(amax(x.astype(np.float64), fmt) == 0) if fmt.dynamic else np.zeros((1, 1), np.bool_)


def _wrong_scales(legal: list[QuantizedActivations], actual: QuantizedActivations, zero: Mask) -> Mask:
    right = np.zeros(actual.scale.shape, np.bool_)
    for candidate in legal:
        same = candidate.scale == actual.scale
        if candidate.zero_point is not None:
            same &= candidate.zero_point == actual.zero_point
        right |= same
    return np.asarray(~np.where(zero, np.isfinite(actual.scale) & (actual.scale >= 0), right))


def _wrong_codes(candidate: QuantizedActivations, actual: QuantizedActivations, zero: Mask) -> Mask:
    """Codes that differ; those of zero tokens must mean zero."""
    wrong: Mask = candidate.codes != actual.codes
    if zero.any():
        wrong = np.where(actual.spread(zero), actual.dequantized() != 0, wrong)
    return wrong
