"""Goals of packing, dequantize, the linear and the quantizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conformance.cases import Case
from conformance.compare import (
    Comparison,
    compare_exactly,
    compare_quantizations,
    compare_to_expected,
)
from conformance.data import LinearProblem, QuantizationProblem
from conformance.diagnosis import (
    Diagnosis,
    Match,
    Suspects,
    by_stage,
    diagnose,
    distance_in_bounds,
    explains,
    pattern,
)
from reference.activations import QuantizedActivations, legal_quantizations, quantizers
from reference.bounds import Contract, Expected
from reference.mutants import Mutant, Traits
from reference.rounding import float_format, half_ulps
from reference.semantics import reload
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]

NOTHING = Match(False, np.inf, np.inf)

# Faults are told apart on at most this many products of a case: the rest is a matter of time, not of evidence.
_LARGEST_DIAGNOSED = 1 << 27


class Goal(Protocol):
    def compare(self, arrays: tuple[Array, ...]) -> Comparison: ...

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis: ...


def traits_of(case: Case, contract: Contract | None = None) -> Traits:
    """What the mutants need to know of a case."""
    return Traits(
        case.weight, case.activation, case.m, case.n, case.k, case.dtype, case.bias, case.act_order,
        contract.quantizer if contract else "kernel",
    )  # fmt: skip


@dataclass(frozen=True)
class ArrayGoal:
    """One array, bit for bit. mutated: what a mutant gives in its place; stages: those it can be wrong in."""

    case: Case
    expected: Array
    mutated: Callable[[Mutant], Array]
    stages: tuple[str, ...]
    weight: QuantizedWeight | None = None

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        return compare_exactly(self.expected, arrays[0])

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        (actual,) = arrays

        def differs(mutant: Mutant) -> float | None:
            if not mutant.applies(traits_of(self.case)):
                return None
            other = self.mutated(mutant)
            if other.shape != actual.shape or np.array_equal(other, self.expected):
                return None
            return float((other != actual).mean())

        groups = None if self.weight is None else self.weight.groups()
        where = pattern(comparison, actual, groups, self.case.weight.bits)
        right = _match_arrays(self.expected, actual)
        mutants = by_stage(*self.stages)
        return diagnose(
            Suspects(mutants, differs, lambda m: _match_arrays(self.mutated(m), actual), right, where)
        )


def _match_arrays(other: Array, actual: Array) -> Match:
    """Distance: in half ulps of floats, in units of integers."""
    a, b = other.astype(np.float64), actual.astype(np.float64)
    differs = ~(a == b)
    unit: Any = 1.0
    if not np.issubdtype(other.dtype, np.integer):
        unit, _ = half_ulps(a, float_format(other.dtype))
    with np.errstate(invalid="ignore"):
        error = np.where(differs, np.nan_to_num(np.abs(a - b) / unit, nan=np.inf, posinf=np.inf), 0.0)
    return Match(
        not differs.any(), float(differs.mean()) if differs.size else 0.0, float(error.max(initial=0.0))
    )


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


@dataclass(frozen=True)
class LinearGoal:
    """The outputs of a linear, within the bound of the backend's contract."""

    problem: LinearProblem
    contract: Contract

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        comparison = compare_to_expected(self.problem.expected(self.contract), arrays[0])
        if self.problem.case.recipe not in ("random", "trained"):
            comparison = replace(comparison, statistics={})  # of constructed data they say nothing
        return comparison

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        (actual,) = arrays
        y = actual.astype(np.float64)
        expected = self.problem.expected(self.contract)
        case = self.problem.case

        off = min(_mismatches(expected, y), 1.0)

        def differs(mutant: Mutant) -> float | None:
            if not mutant.applies(traits_of(case, self.contract)):
                return None
            other = self.problem.mutated(mutant, self.contract)
            return None if _same(other, expected) else _mismatches(other, y)

        def match(mutant: Mutant) -> Match:
            other = self.problem.mutated(mutant, self.contract)
            compared = compare_to_expected(other, actual)
            share = _mismatches(other, y)
            fits = (compared.passes and not compared.note) or explains(share, off, int(np.isfinite(y).sum()))
            if not np.isfinite(y).all():  # numbers that are none have a cause of their own
                places = [np.isfinite(other.finish(h, h.centre)) for h in other.hypotheses.values()]
                fits = share < 0.05 and any(np.array_equal(np.isfinite(y), p) for p in places)
            return Match(fits, share, distance_in_bounds(other, y))

        where = pattern(comparison, actual)
        right = Match(False, off, distance_in_bounds(expected, y))
        stages = ("unpack", "columns", "matrix", "store", "quantize", "product", "finish")
        mutants = by_stage(*stages) if y.size * case.k <= _LARGEST_DIAGNOSED else []
        return diagnose(Suspects(mutants, differs, match, right, where, case.weight.bits))


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


@dataclass(frozen=True)
class QuantizationGoal:
    """Codes and scales of a quantizer, against the legal set of the declared convention."""

    problem: QuantizationProblem
    contract: Contract

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        fmt, convention = self.problem.case.activation, self.contract.quantizer
        actual = self._actual(arrays)
        return compare_quantizations(self.problem.x, fmt, convention, actual, self.problem.input_scale)

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        problem, fmt = self.problem, self.problem.case.activation
        actual = self._actual(arrays)
        ways = list(quantizers(fmt, self.contract.quantizer, float_format(problem.x.dtype)))

        def match(mutant: Mutant) -> Match:
            found = NOTHING
            for how in ways:
                (other,) = mutant.semantics.quantize([problem.x], fmt, how, problem.input_scale)
                if isinstance(other, QuantizedActivations):
                    found = min(found, _match_codes(other, actual), key=lambda m: m.mismatches)
            return found

        def differs(mutant: Mutant) -> float | None:
            applies = mutant.applies(replace(traits_of(problem.case, self.contract), calls=1))
            return match(mutant).mismatches if applies else None

        where = pattern(comparison, actual.codes)
        legal = legal_quantizations(problem.x, fmt, self.contract.quantizer, problem.input_scale)
        right = min((_match_codes(r, actual) for r in legal.values()), key=lambda m: m.mismatches)
        return diagnose(Suspects(by_stage("quantize"), differs, match, right, where))

    def _actual(self, arrays: tuple[Array, ...]) -> QuantizedActivations:
        codes, scale, *zero = (a.astype(np.float64) for a in arrays)
        return QuantizedActivations(
            codes, scale, zero[0] if zero else None, self.problem.case.activation.group_size
        )


def _match_codes(other: QuantizedActivations, actual: QuantizedActivations) -> Match:
    """Distance: the largest difference of two codes."""
    near = np.allclose(other.scale, actual.scale, rtol=2.0**-22, atol=0, equal_nan=True)
    error = np.abs(other.codes - actual.codes)
    distance = float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max(initial=0.0))
    share = float((error != 0).mean()) if error.size else 0.0
    return Match(bool(near and distance == 0), share + (0.0 if near else 1.0), distance)


def dequantize_goal(case: Case, weight: QuantizedWeight, expected: Array) -> ArrayGoal:
    """The matrix of a checkpoint, bit for bit."""
    output = float_format(case.dtype)

    def mutated(mutant: Mutant) -> Array:
        s = mutant.semantics
        matrix = s.store(s.matrix(s.columns(reload(weight, s), output)), output)
        return matrix.astype(output.dtype)

    return ArrayGoal(case, expected, mutated, ("unpack", "columns", "matrix", "store"), weight)


def pack_goal(case: Case, codes: Array, axis: int, words: Array) -> ArrayGoal:
    return ArrayGoal(case, words, lambda m: m.semantics.pack(codes, case.weight.bits, axis), ("pack",))


def unpack_goal(case: Case, codes: Array, axis: int, words: Array) -> ArrayGoal:
    def mutated(mutant: Mutant) -> Array:
        return mutant.semantics.unpack(words, case.weight.bits, codes.shape[axis], axis)

    return ArrayGoal(case, codes, mutated, ("unpack",))
