"""What a diverging answer computes instead: the nearest known fault, or where and how it is wrong.

Each mutant of the oracle is asked for its answer to the same case, under the backend's own contract, and judged
by the same comparison as the right answer. Distances are in bounds: the largest error of any element over
what is allowed there (radius and half an ulp), so that a right answer is at most 1 away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.compare import Comparison
from reference.bounds import Expected
from reference.mutants import MUTANTS, Mutant
from reference.rounding import half_ulps

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Faults that fitted before are asked first, and once one has fitted that often, alone: hundreds of failing cases
# mostly have one cause. What nothing fits is asked about for so many seconds of a process in all.
_fitted: dict[str, int] = {}
_ENOUGH = 3
_SECONDS = 30.0
_spent = 0.0
# The nearest ones are compared in full, by the judge's own criterion.
_FINALISTS = 3


@dataclass(frozen=True)
class Match:
    """How a mutant's answer compares with the actual one: fits, by the judge's own criterion; the share of
    elements that differ; distance in bounds."""

    fits: bool
    mismatches: float
    distance: float


@dataclass(frozen=True)
class Diagnosis:
    """fault: the mutant that explains the answer, or "". computes: what it computes. distance, right: how
    far the answer is from that fault's and from the right one, in bounds. runner_up: the next mutant.
    pattern: where the answer is wrong."""

    fault: str = ""
    computes: str = ""
    distance: float | None = None
    right: float | None = None
    runner_up: str = ""
    runner_up_distance: float | None = None
    pattern: str = ""

    @property
    def text(self) -> str:
        """One short paragraph."""
        if not self.fault:
            nearest = f"; no known fault fits, the nearest is {self.runner_up}" if self.runner_up else ""
            return self.pattern + nearest
        away = f"{_number(self.distance)} bounds away; the right answer is {_number(self.right)} away"
        said = f"it computes {self.computes} ({away})"
        if self.distance is None:
            said = f"all but few of its elements are those of {self.computes}"
        if self.runner_up:
            said += f"; the next is {self.runner_up}, {_number(self.runner_up_distance)} away"
        return f"{said}. {self.pattern}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Suspects:
    """The mutants that a case may be compared with. differs: the share of elements in which an answer differs
    from a mutant's, None where the mutant says nothing about the case. match: the full comparison. right: how the
    answer compares with the right one. bits: the width of the case's weights."""

    mutants: Iterable[Mutant]
    differs: Callable[[Mutant], float | None]
    match: Callable[[Mutant], Match]
    right: Match
    pattern: str = ""
    bits: int = 0


def diagnose(suspects: Suspects) -> Diagnosis:
    """Ask the mutants, those that fitted before first."""
    global _spent
    right = _finite(suspects.right.distance)
    ordered = sorted(suspects.mutants, key=lambda m: -_fitted.get(m.name, 0))
    for mutant in ordered:
        if _fitted.get(mutant.name, 0) < _ENOUGH or suspects.differs(mutant) is None:
            continue
        match = suspects.match(mutant)
        if match.fits:
            return _named(suspects, mutant, match, None)
    if _spent > _SECONDS:
        return Diagnosis(right=right, pattern=suspects.pattern)
    started = time.perf_counter()
    shares = [(share, mutant) for mutant in ordered if (share := suspects.differs(mutant)) is not None]
    shares.sort(key=lambda pair: pair[0])
    found = [(suspects.match(mutant), mutant) for _, mutant in shares[:_FINALISTS]]
    found.sort(key=lambda pair: (not pair[0].fits, pair[0].mismatches, pair[0].distance))
    if found and found[0][0].fits:
        best, mutant = found[0]
        return _named(suspects, mutant, best, found[1] if len(found) > 1 else None)
    _spent += time.perf_counter() - started
    if not found:
        return Diagnosis(right=right, pattern=suspects.pattern)
    match, mutant = found[0]
    return Diagnosis(
        right=right,
        runner_up=mutant.name,
        runner_up_distance=_finite(match.distance),
        pattern=suspects.pattern,
    )


def _named(suspects: Suspects, mutant: Mutant, match: Match, rest: tuple[Match, Mutant] | None) -> Diagnosis:
    _fitted[mutant.name] = _fitted.get(mutant.name, 0) + 1
    return Diagnosis(
        mutant.name, mutant.computes.replace("W·", f"W{suspects.bits}"), _finite(match.distance),
        _finite(suspects.right.distance), rest[1].name if rest else "", _finite(rest[0].distance) if rest else None,
        suspects.pattern,
    )  # fmt: skip


def explains(mismatches: float, right: float, elements: int) -> bool:
    """Whether a fault explains an answer that it does not give bit for bit: so many fewer elements differ from
    it than from the right answer that chance is no explanation, and few differ at all."""
    ours = mismatches * elements
    return mismatches < 0.05 and (right - mismatches) * elements > 8 + 4 * np.sqrt(ours + 1)


def distance_in_bounds(expected: Expected, y: Float64Array) -> float:
    """The largest error over what is allowed, for the hypothesis that it is smallest for."""
    if y.size == 0:
        return 0.0
    best = np.inf
    for hypothesis in expected.hypotheses.values():
        finished = expected.finish(hypothesis, hypothesis.centre)
        centre = hypothesis.centre if hypothesis.finish is None else finished
        below, above = half_ulps(finished, expected.output)
        with np.errstate(invalid="ignore", divide="ignore"):
            same = (y == finished) | (np.isnan(y) & np.isnan(finished))
            unit = hypothesis.radius + np.minimum(below, above)
            error = np.where(same, 0.0, np.abs(y - centre) / unit)
        best = min(best, float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max()))
    return best


def _finite(number: float) -> float | None:
    return round(float(number), 2) if np.isfinite(number) else None


def _number(number: float | None) -> str:
    if number is None:
        return "infinitely far"
    return f"{number:.2g}" if number >= 1e5 else f"{number:.0f}" if number >= 10 else f"{number:.1f}"


# ---- where an answer is wrong


def pattern(comparison: Comparison, actual: Array, groups: Array | None = None, bits: int = 0) -> str:
    """How many elements, which rows, columns, groups and places in a word, the worst, NaN and Inf, the bias.

    groups: the group of each column where the columns are those of a weight; bits: its width.
    """
    wrong, right, allowed = comparison.wrong, comparison.right, comparison.allowed
    if wrong is None or right is None or not wrong.any():
        return comparison.detail
    parts = [comparison.detail] if comparison.detail else []
    parts.append(f"{int(wrong.sum())} of {wrong.size} elements are wrong")
    if wrong.ndim == 2:
        parts += [
            _where(word, np.asarray(wrong.any(axis=axis))) for word, axis in (("row", 1), ("column", 0))
        ]
        if groups is not None:
            parts += _of_a_weight(np.asarray(wrong.any(axis=0)), groups, bits)
    values = actual.astype(np.float64)
    nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    if nan or inf:
        parts.append(f"{nan} NaN, {inf} Inf")
    with np.errstate(invalid="ignore"):
        difference = values - right
    parts += _bias(difference[wrong], np.asarray(right)[wrong])
    error = np.where(
        wrong, np.abs(np.nan_to_num(difference, nan=np.inf, posinf=np.inf, neginf=-np.inf)), -1.0
    )
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    worst = f"worst at {list(index)}: got {actual[index]}, expected {right[index]}"
    if allowed is not None:
        low, high = allowed[0][index], allowed[1][index]
        worst += f", allowed {low}" + (f" to {high}" if high > low else " alone")
    return "; ".join([*parts, worst])


def _of_a_weight(hit: Mask, groups: Array, bits: int) -> list[str]:
    """Groups and places in a word, where not all of them are wrong."""
    found = []
    bad = np.bincount(groups, weights=hit) > 0
    if len(bad) > 1 and not bad.all():
        found.append(_where("group", bad))
    position = np.arange(len(hit)) * bits % 32
    straddles = position + bits > 32
    if straddles.any() and hit.any() and straddles[hit].all():
        found.append("only codes that lie in two words")
    else:
        places = np.unique(position[hit])
        if hit.sum() > 1 and len(places) < len(np.unique(position)) and len(places) <= 4:
            found.append(f"only at bit {', '.join(str(p) for p in places)} of a word")
    return found


def _bias(difference: Float64Array, right: Float64Array) -> list[str]:
    """Whether the errors point one way: all up or all down, or all away from zero or toward it."""
    finite = np.isfinite(difference) & (difference != 0)
    if finite.sum() < 8:
        return []
    up = float((difference[finite] > 0).mean())
    away = float((difference[finite] * np.sign(right.astype(np.float64)[finite]) > 0).mean())
    for share, words in (
        (up, "too large"),
        (1 - up, "too small"),
        (away, "too far from zero"),
        (1 - away, "too near zero"),
    ):
        if share > 0.95:
            return [f"{100 * share:.0f} % {words}"]
    return []


def _where(word: str, hit: Mask) -> str:
    """`all 17 rows`, `row 3`, `rows 0, 4, 8 (every 4th)`, `rows 32..63`, `5 rows from 2 to 91`."""
    index = np.flatnonzero(hit)
    if len(index) == len(hit):
        return f"all {len(hit)} {word}s"
    if len(index) == 0:
        return f"no {word}"
    if len(index) == 1:
        return f"{word} {index[0]}"
    steps = np.unique(np.diff(index))
    if len(steps) == 1 and steps[0] == 1:
        return f"{word}s {index[0]}..{index[-1]}"
    if len(steps) == 1:
        return f"{word}s {index[0]} to {index[-1]} in steps of {steps[0]}"
    return f"{len(index)} {word}s from {index[0]} to {index[-1]}"


def by_stage(*stages: str) -> list[Mutant]:
    return [m for m in MUTANTS.values() if m.stage in stages]
