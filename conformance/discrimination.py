"""Whether a case tells a mutant from the right answer, and by how much.

A bench holds one case's right answer; it computes a mutant's answer with the stages that the mutant leaves
alone taken from the right one, and judges it as the suites judge a backend's. Tests check that the answers are
those of the same mutant as a backend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.benches_moe import MOE_STAGES, MoeBench, SwigluBench, concerns_moe
from conformance.benches_routing import ROUTING_STAGES, AlignBench, RoutingBench, concerns_routing
from conformance.benches_sharding import SHARDING_STAGES, ShardingBench, concerns_sharding
from conformance.cases import Case
from conformance.compare import compare_to_expected
from conformance.data import (
    generator,
    linear_problem,
    packing_axis,
    packing_codes,
    quantization_problem,
    quantized_weight,
)
from conformance.goals import QuantizationGoal, traits_of
from reference.activations import QuantizedActivations, quantizers
from reference.bounds import Contract
from reference.mutants import KINDS, MUTANTS, Mutant
from reference.packing import pack
from reference.rounding import float_format, half_ulps
from reference.semantics import RIGHT, Operands, reload

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

CONTRACT = Contract(weights="rounded")
# A mutant that gives other values must be this many bounds away somewhere; one that only rounds the output or
# the codes in another way stays within an ulp by nature, and must be refused.
MULTIPLE = 4.0

STAGES = {
    "pack": ("packing",),
    "unpack": ("packing", "dequantize", "linear", "moe"),
    "columns": ("dequantize", "linear", "moe"),
    "matrix": ("dequantize", "linear", "moe"),
    "store": ("dequantize", "linear", "moe"),
    "quantize": ("activation_quantization", "linear", "moe"),
    "product": ("linear", "moe"),
    "finish": ("linear",),
    **MOE_STAGES,
    **ROUTING_STAGES,
    **SHARDING_STAGES,
}


def concerns(case: Case, mutant: Mutant) -> bool:
    """Whether the mutant's stage is part of the case, and wrong there at all."""
    if case.operation not in STAGES[mutant.stage]:
        return False
    if case.operation in ("swiglu", "moe"):
        return concerns_moe(case, mutant)
    if mutant.stage in ROUTING_STAGES:
        return concerns_routing(case, mutant)
    if mutant.stage in SHARDING_STAGES:
        return concerns_sharding(case, mutant)
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
        self.weight = quantized_weight(case, generator(case.id))
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


_BENCHES: dict[str, Any] = {
    "packing": PackingBench,
    "dequantize": DequantizeBench,
    "activation_quantization": QuantizationBench,
    "linear": LinearBench,
    "swiglu": SwigluBench,
    "moe": MoeBench,
    "routing": RoutingBench,
    "moe_align": AlignBench,
    "sharding": ShardingBench,
}


def bench(case: Case) -> Any:
    """The bench of a case of any operation that mutants have a stage in."""
    return _BENCHES[case.operation](case)


# ---- what a case promises

# What every case with quantized activations tells from the right answer, whatever its recipe.
ALWAYS = (
    "quantization_skipped",
    "int8_instead_of_fp8",
    "static_instead_of_dynamic",
    "per_tensor_instead_of_per_token",
)
# Recipe -> the kinds of faults that its every case tells from the right answer, but for those of EXCEPT.
SEES = {"random": KINDS, "integers": ("packing", "zero points", "groups", "bias")}
_TIES = "ties do not occur in random data: `integers` and the quantizer's `ties` have them"
_RANGE = "the data have an ordinary range: `magnitudes` has the others"
_CHANCE = "the token's largest magnitude may lie elsewhere: the quantizer's cases see it"
_ONE = "one number of many is off: its trace may drown in the rounding of the output, but not in every case of a cell"
_ANCHOR = "the column may be the anchor, whose weights are zero"
EXCEPT = {
    "output_half_away": _TIES,
    "codes_half_away": _TIES,
    "activations_in_fp16": _RANGE,
    "subnormal_outputs_flushed": _RANGE,
    "zero_token_divided_by_zero": "no token is zero: `integers` and the quantizer's `zero-tokens` have some",
    "amax_misses_a_lane": _CHANCE,
    "amax_of_half_a_row": _CHANCE,
    "amax_without_abs": _CHANCE,
    "one_weight_off_by_one": _ONE,
    "one_scale_too_large": _ONE,
    "top_code_lost": _ONE,
    "gain_of_a_thousandth": "a thousandth of few outputs may drown in their rounding",
    "scale_of_one_group_is_1": _ONE,
    "groups_one_column_early": _ANCHOR,
}
# Faults that only round the output, or a number of the last place, in another way: within an ulp by nature.
_WITHIN_AN_ULP = ("rounding", "dtype", "accumulation")
FINE = ("scale_last_bit_lost", "bias_after_rounding", "activation_scale_in_bf16")
_FEW = 64
_SLICE = 17  # output columns that are asked first
_IN_THE_OUTPUT = (*_WITHIN_AN_ULP, "tails", "bias")


def promises(case: Case) -> list[tuple[Mutant, float]]:
    """The mutants that a linear case must tell from the right answer, and by how many bounds at least."""
    found = []
    for mutant in MUTANTS.values() if case.m else ():
        always = mutant.name in ALWAYS
        seen = mutant.kind in SEES.get(case.recipe, ()) and mutant.name not in EXCEPT
        if case.recipe == "integers" and mutant.name == "bias_after_rounding":
            seen = False  # what is exact rounds once either way
        if (case.m == 1 or case.m * case.n < _FEW) and (mutant.kind in _IN_THE_OUTPUT or mutant.name in FINE):
            seen = False  # one token or so few outputs may round alike
        if (always or seen) and concerns(case, mutant):
            small = mutant.kind in _WITHIN_AN_ULP or mutant.name in FINE
            found.append((mutant, 0.0 if small else MULTIPLE))
    return found


def broken_promises(case: Case) -> list[tuple[str, bool, float]]:
    """(mutant, refused, margin) of each mutant that the case promised to see and does not, or too little.

    A bound is that of an element alone, so a few output columns are asked first, and all of them only when those
    do not show it.
    """
    found = []
    benches: dict[int, LinearBench] = {}
    for mutant, least in promises(case):
        for width in (_SLICE, case.n):
            if width not in benches:
                benches[width] = LinearBench(case, width)
            refused, margin = benches[width].judge(mutant)
            if refused and margin >= least:
                break
        else:
            found.append((mutant.name, refused, margin))
    return found
