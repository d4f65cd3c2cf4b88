"""Goals of packing, dequantize, the linear and the quantizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
from conformance.diagnosis import Diagnosis, Match, Suspects, by_stage, diagnose, pattern
from conformance.goals.expected import LARGEST_DIAGNOSED, NOTHING, diagnose_expected
from reference.activations import QuantizedActivations, legal_quantizations, quantizers
from reference.bounds import Contract
from reference.mutants import Mutant, Traits
from reference.rounding import float_format, half_ulps
from reference.semantics import reload
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]


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
        case, size = self.problem.case, arrays[0].size
        stages = ("unpack", "columns", "matrix", "store", "quantize", "product", "finish")
        return diagnose_expected(
            self.problem.expected(self.contract),
            arrays[0],
            comparison,
            by_stage(*stages) if size * case.k <= LARGEST_DIAGNOSED else [],
            lambda m: m.applies(traits_of(case, self.contract)),
            lambda m: self.problem.mutated(m, self.contract),
            case.weight.bits,
        )


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
        return np.asarray(matrix.astype(output.dtype))

    return ArrayGoal(case, expected, mutated, ("unpack", "columns", "matrix", "store"), weight)


def pack_goal(case: Case, codes: Array, axis: int, words: Array) -> ArrayGoal:
    return ArrayGoal(
        case, words, lambda m: np.asarray(m.semantics.pack(codes, case.weight.bits, axis)), ("pack",)
    )


def unpack_goal(case: Case, codes: Array, axis: int, words: Array) -> ArrayGoal:
    def mutated(mutant: Mutant) -> Array:
        return np.asarray(mutant.semantics.unpack(words, case.weight.bits, codes.shape[axis], axis))

    return ArrayGoal(case, codes, mutated, ("unpack",))
