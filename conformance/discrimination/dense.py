"""Benches of packing, dequantize, the quantizers and the linear.

A bench holds one case's right answer; it computes a mutant's answer with the stages that the mutant leaves
alone taken from the right one, and judges it as the suites judge a backend's. Tests check that the answers are
those of the same mutant as a backend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import Case
from conformance.compare import compare_to_expected
from conformance.data import (
    generators,
    linear_problem,
    packing_axis,
    packing_codes,
    quantization_problem,
    quantized_weight,
)
from conformance.goals import QuantizationGoal, traits_of
from reference.activations import QuantizedActivations, quantizers
from reference.bounds import Contract
from reference.mutants import Mutant
from reference.packing import pack
from reference.rounding import float_format, half_ulps
from reference.semantics import RIGHT, Operands, reload

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

CONTRACT = Contract(weights="rounded", intermediates="fp32")
DENSE_STAGES = {
    "pack": ("packing",),
    "unpack": ("packing", "dequantize", "linear"),
    "columns": ("dequantize", "linear"),
    "matrix": ("dequantize", "linear"),
    "store": ("dequantize", "linear"),
    "quantize": ("activation_quantization", "linear"),
    "product": ("linear",),
    "finish": ("linear",),
}


def concerns_dense(case: Case, mutant: Mutant) -> bool:
    """Whether the mutant's stage is part of the case, and wrong there at all."""
    if mutant.stage == "quantize" and case.activation.kind == "a16":
        return False
    traits = traits_of(case, CONTRACT)
    return mutant.applies(traits if case.operation == "linear" else replace(traits, calls=1))


class PackingBench:
    def __init__(self, case: Case) -> None:
        self.bits, self.codes, self.axis = case.weight.bits, packing_codes(case), packing_axis(case)
        self.words = pack(self.codes, self.bits, self.axis)

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        """Whether the answer is refused, and the margin in bounds (0 where nothing is bounded)."""
        s = mutant.semantics
        packed = s.pack(self.codes, self.bits, self.axis)
        unpacked = s.unpack(self.words, self.bits, self.codes.shape[self.axis], self.axis)
        right = np.array_equal(packed, self.words) and np.array_equal(unpacked, self.codes)
        return not right, 0.0


class DequantizeBench:
    def __init__(self, case: Case) -> None:
        self.weight = quantized_weight(case, generators(case)[0])
        self.output = float_format(case.dtype)
        self.right = self.answer(RIGHT)

    def answer(self, semantics: Any) -> Float64Array:
        columns = semantics.columns(reload(self.weight, semantics), self.output)
        found: Float64Array = semantics.store(semantics.matrix(columns), self.output)
        return found

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        return not np.array_equal(self.answer(mutant.semantics), self.right), 0.0


class QuantizationBench:
    def __init__(self, case: Case) -> None:
        self.problem = quantization_problem(case)
        self.goal = QuantizationGoal(self.problem, CONTRACT)
        self.how = next(quantizers(case.activation, CONTRACT.quantizer, float_format(case.dtype)))

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        fmt = self.problem.case.activation
        (found,) = mutant.semantics.quantize([self.problem.x], fmt, self.how, self.problem.input_scale)
        if not isinstance(found, QuantizedActivations):
            return True, 0.0
        return not self.goal.compare(tuple(found.stored(fmt))).passes, 0.0


class LinearBench:
    """width: the first output columns alone, where it is less than all."""

    def __init__(self, case: Case, width: int | None = None) -> None:
        self.case = case
        problem = linear_problem(case)
        if width is not None and width < case.n:
            bias = None if problem.bias is None else problem.bias[:width]
            problem = replace(problem, weight=problem.weight.rows(0, width), bias=bias, _known={})
        self.problem = problem
        self.output = float_format(case.dtype)
        self.offset = None if problem.bias is None else problem.bias.astype(np.float64)
        self.expected = expected = problem.expected(CONTRACT)
        self.intervals = [expected.interval(h) for h in expected.hypotheses.values()]
        self.firm = np.ones((len(expected.value), 1), np.bool_)  # tokens without a code that may flip
        for h in expected.hypotheses.values():
            self.firm[list(h.flips)] = False
        self.units = []
        for h in expected.hypotheses.values():
            finished = expected.finish(h, h.centre)
            below, above = half_ulps(finished, self.output)
            self.units.append((h.centre, finished, h.radius + np.minimum(below, above)))
        self.columns = RIGHT.columns(problem.weight, self.output)
        self.exact_matrix = RIGHT.matrix(self.columns)
        self.matrix = RIGHT.store(self.exact_matrix, self.output)
        self.activations = self.quantized(RIGHT)

    def quantized(self, semantics: Any) -> list[Any]:
        batches, fmt = self.problem.batches, self.case.activation
        if fmt.kind == "a16":
            return [x.astype(np.float64) for x in batches]
        how = next(quantizers(fmt, CONTRACT.quantizer, self.output))
        found: list[Any] = semantics.quantize(batches, fmt, how, None)
        return found

    def answer(self, semantics: Any) -> Float64Array:
        columns, matrix, activations = self.columns, self.matrix, self.activations
        if semantics.unpack is not RIGHT.unpack or semantics.columns is not RIGHT.columns:
            columns = semantics.columns(reload(self.problem.weight, semantics), self.output)
            matrix = semantics.store(semantics.matrix(columns), self.output)
        elif semantics.matrix is not RIGHT.matrix:
            matrix = semantics.store(semantics.matrix(columns), self.output)
        elif semantics.store is not RIGHT.store:
            matrix = semantics.store(self.exact_matrix, self.output)
        if semantics.quantize is not RIGHT.quantize:
            activations = self.quantized(semantics)
        parts = []
        for found in activations:
            total = semantics.product(Operands.of(found, matrix, columns))
            parts.append(semantics.finish(total, self.offset, self.output))
        return np.concatenate(parts)

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        y = self.answer(mutant.semantics)
        margin = self.margin(y)
        inside = np.logical_or.reduce([(low <= y) & (y <= high) for low, high in self.intervals])
        if (self.firm & ~inside).any():
            return True, margin
        return not compare_to_expected(self.expected, y).passes, margin

    def margin(self, y: Float64Array) -> float:
        """The largest error over what is allowed, for the hypothesis that it is smallest for."""
        best = np.inf
        for centre, finished, unit in self.units:
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.where(y == finished, 0.0, np.abs(y - centre) / unit)
            best = min(best, float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max(initial=0.0)))
        return min(best, 1e30)
