"""From expected and actual numbers to a comparison: does one hypothesis explain every element (C45, C46)?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.bounds import Expected
from reference.rounding import half_ulps, round_to

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Comparison:
    """worst: the largest error beyond rounding as a fraction of what is allowed (0: none, inf: not allowed
    at all). explained_by: the hypothesis that fits. note: what is odd about an answer that passes."""

    passes: bool
    worst: float
    explained_by: str = ""
    note: str = ""
    diagnosis: str = ""


def compare_exactly(expected: Array, actual: Array) -> Comparison:
    """Equal element by element, -0 equal to +0, NaN equal to nothing."""
    wrong = ~(expected == actual)
    if not wrong.any():
        return Comparison(True, 0.0, "exact")
    integers = np.issubdtype(expected.dtype, np.integer)
    kind = np.int64 if integers else np.float64
    return Comparison(
        False, np.inf, diagnosis=describe(wrong, expected.astype(kind), actual.astype(kind), None)
    )


def compare_to_expected(expected: Expected, actual: Array) -> Comparison:
    """Judge an output of the output dtype against the oracle's hypotheses and radius."""
    y = actual.astype(np.float64)
    trials = [_Trial(name, centre, expected, y) for name, centre in expected.hypotheses.items()]
    for trial in trials:
        if trial.fits:
            return Comparison(True, trial.worst(expected, y), trial.name)
    best = min(trials, key=lambda trial: int(trial.outside.sum()))
    hull = np.logical_or.reduce([~trial.outside for trial in trials])
    right = round_to(best.centre, expected.output)
    if not expected.exact and hull.all():
        if all(trial.outside.any() for trial in trials):
            return Comparison(True, best.worst(expected, y), best.name, note="unexplained rounding path")
        off = f"{int((y != right).sum())} of {y.size} elements are not the nearest rounding, each allowed"
        return Comparison(
            False, best.worst(expected, y), best.name, diagnosis=f"{off}, together more than it can tip (C46)"
        )
    allowed = None if expected.exact else (best.low, best.high)
    return Comparison(False, best.worst(expected, y), best.name, diagnosis=describe(~hull, right, y, allowed))


class _Trial:
    """One hypothesis against one output."""

    def __init__(self, name: str, centre: Float64Array, expected: Expected, y: Float64Array) -> None:
        self.name, self.centre = name, centre
        self.low, self.high = expected.interval(centre)
        self.outside: Mask = ~((self.low <= y) & (y <= self.high))
        self.fits = not self.outside.any() and (expected.exact or self._roundings_plausible(expected, y))

    def _roundings_plausible(self, expected: Expected, y: Float64Array) -> bool:
        """Few enough elements off the rounded centre: at most S + 6 sqrt(S) + 3, where S counts those that
        a quarter of the radius can tip; in total, in each row and in each column (C46)."""
        off = y != round_to(self.centre, expected.output)
        low, high = expected.interval(self.centre, 0.25)
        tippable = low != high
        for axis in (None, 0, 1):
            s = np.asarray(tippable.sum(axis=axis))
            if (np.asarray(off.sum(axis=axis)) > s + 6 * np.sqrt(s) + 3).any():
                return False
        return True

    def worst(self, expected: Expected, y: Float64Array) -> float:
        """The largest distance from the centre to what rounds to y, as a fraction of the radius."""
        if y.size == 0:
            return 0.0
        if expected.exact:
            return np.inf if self.outside.any() else 0.0
        below, above = half_ulps(y, expected.output)
        with np.errstate(invalid="ignore", divide="ignore"):
            distance = np.maximum(0.0, np.maximum((y - below) - self.centre, self.centre - (y + above)))
            fraction = np.where(distance == 0, 0.0, distance / expected.radius)
        fraction = np.where(np.isinf(y) & ~self.outside, 0.0, fraction)
        return float(np.max(np.nan_to_num(fraction, nan=np.inf)))


def describe(wrong: Mask, right: Array, actual: Array, allowed: tuple[Array, Array] | None) -> str:
    """Where an answer is wrong, in one short paragraph: how many, which rows and columns, the worst."""
    parts = [f"{int(wrong.sum())} of {wrong.size} elements are wrong"]
    if wrong.ndim == 2:
        parts += [
            _where(word, np.asarray(wrong.any(axis=axis))) for word, axis in (("row", 1), ("column", 0))
        ]
    values = actual.astype(np.float64)
    nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    if nan or inf:
        parts.append(f"{nan} NaN, {inf} Inf")
    with np.errstate(invalid="ignore"):
        error = np.where(wrong, np.abs(np.nan_to_num(values - right, nan=np.inf)), -1.0)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    worst = f"worst at {list(index)}: got {actual[index]}, expected {right[index]}"
    if allowed is not None:
        low, high = allowed[0][index], allowed[1][index]
        worst += f", allowed {low}" + (f" to {high}" if high > low else " alone")
    return "; ".join([*parts, worst])


def _where(word: str, hit: Mask) -> str:
    """`all 17 rows`, `row 3`, `rows 0, 4, 8 (every 4th)`, `rows 32..63`, `5 rows from 2 to 91`."""
    index = np.flatnonzero(hit)
    if len(index) == len(hit):
        return f"all {len(hit)} {word}s"
    if len(index) == 1:
        return f"{word} {index[0]}"
    steps = np.unique(np.diff(index))
    if len(steps) == 1 and steps[0] == 1:
        return f"{word}s {index[0]}..{index[-1]}"
    if len(steps) == 1:
        return f"{word}s {index[0]} to {index[-1]} in steps of {steps[0]}"
    return f"{len(index)} {word}s from {index[0]} to {index[-1]}"
