"""What all goals share, and how an answer within a bound is told from the known faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conformance.cases import Case
from conformance.compare import Comparison, compare_to_expected
from conformance.diagnosis import (
    Diagnosis,
    Match,
    Suspects,
    diagnose,
    distance_in_bounds,
    explains,
    pattern,
)
from reference.bounds import Expected
from reference.mutants import Mutant
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]

NOTHING = Match(False, np.inf, np.inf)

# Faults are told apart on at most this many products of a case: the rest is a matter of time, not of evidence.
LARGEST_DIAGNOSED = 1 << 27


class Goal(Protocol):
    def compare(self, arrays: tuple[Array, ...]) -> Comparison: ...

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis: ...


@dataclass(frozen=True)
class ExpectedGoal:
    """The outputs of a checkpoint's layer, within a bound; its failures are located, not named."""

    case: Case
    weight: QuantizedWeight
    expected: Expected

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        return compare_to_expected(self.expected, arrays[0])

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        right = distance_in_bounds(self.expected, arrays[0].astype(np.float64))
        where = pattern(comparison, arrays[0])
        return diagnose(Suspects([], lambda m: None, lambda m: NOTHING, Match(False, 1.0, right), where))


def diagnose_expected(
    expected: Expected,
    actual: Array,
    comparison: Comparison,
    mutants: Sequence[Mutant],
    applies: Callable[[Mutant], bool],
    mutated: Callable[[Mutant], Expected],
    bits: int = 0,
) -> Diagnosis:
    """The mutant whose own expectation the answer meets, or where the answer is wrong."""
    y = actual.astype(np.float64)
    off = min(_mismatches(expected, y), 1.0)

    def differs(mutant: Mutant) -> float | None:
        if not applies(mutant):
            return None
        other = mutated(mutant)
        return None if _same(other, expected) else _mismatches(other, y)

    def match(mutant: Mutant) -> Match:
        other = mutated(mutant)
        compared = compare_to_expected(other, actual)
        share = _mismatches(other, y)
        fits = (compared.passes and not compared.note) or explains(share, off, int(np.isfinite(y).sum()))
        if not np.isfinite(y).all():  # numbers that are none have a cause of their own
            places = [np.isfinite(other.finish(h, h.centre)) for h in other.hypotheses.values()]
            fits = share < 0.05 and any(np.array_equal(np.isfinite(y), p) for p in places)
        return Match(fits, share, distance_in_bounds(other, y))

    where = pattern(comparison, actual)
    right = Match(False, off, distance_in_bounds(expected, y))
    return diagnose(Suspects(mutants, differs, match, right, where, bits))


def _mismatches(expected: Expected, y: npt.NDArray[np.float64]) -> float:
    """The share of elements that are not the finished centre, for the hypothesis that it is smallest for."""
    finished = [expected.finish(h, h.centre) for h in expected.hypotheses.values()]
    shares = [float(((y != f) & ~(np.isnan(y) & np.isnan(f))).mean()) for f in finished] if y.size else [0.0]
    return min(shares)


def _same(a: Expected, b: Expected) -> bool:
    """Whether two expectations ask for the same outputs: such a mutant explains nothing."""
    ours = [b.finish(h, h.centre) for h in b.hypotheses.values()]
    theirs = [a.finish(h, h.centre) for h in a.hypotheses.values()]
    return all(any(np.array_equal(t, o, equal_nan=True) for o in ours) for t in theirs)
