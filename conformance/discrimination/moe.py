"""Whether a case of a gated activation or of experts tells a mutant from the right answer, and by how much."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import Case
from conformance.compare import compare_to_expected
from conformance.data import moe_problem, swiglu_problem
from conformance.diagnosis import distance_in_bounds
from conformance.discrimination.dense import CONTRACT
from conformance.goals.moe import GATED_STAGES, LAYER_STAGES, PROJECTION_STAGES, concerns_layer
from reference.bounds import Expected
from reference.moe import moe_semantics
from reference.mutants import Mutant

Float64Array = npt.NDArray[np.float64]

MOE_STAGES = {
    **dict.fromkeys(GATED_STAGES, ("swiglu", "moe")),
    **dict.fromkeys((*LAYER_STAGES, *PROJECTION_STAGES), ("moe",)),
}


def concerns_moe(case: Case, mutant: Mutant) -> bool:
    """Whether the mutant's stage is part of the case, and wrong there at all."""
    if case.m == 0:
        return False
    if case.operation == "swiglu":
        return mutant.applies(case.gated)
    return concerns_layer(case, moe_problem(case), mutant, CONTRACT)


class SwigluBench:
    def __init__(self, case: Case) -> None:
        self.problem = swiglu_problem(case)
        self.expected = self.problem.expected(CONTRACT)

    def answer(self, semantics: Any) -> Float64Array:
        return _first(self.problem.expected(CONTRACT, semantics))

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        return _judged(self.expected, self.answer(mutant.semantics))


class MoeBench:
    def __init__(self, case: Case) -> None:
        self.problem = moe_problem(case)
        self.expected = self.problem.expected(CONTRACT)

    def answer(self, semantics: Any) -> Float64Array:
        return _first(self.problem.mutated(moe_semantics(semantics), CONTRACT))

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        return _judged(self.expected, self.answer(mutant.semantics))


def _first(expected: Expected) -> Float64Array:
    hypothesis = next(iter(expected.hypotheses.values()))
    return expected.finish(hypothesis, hypothesis.centre)


def _judged(expected: Expected, y: Float64Array) -> tuple[bool, float]:
    """Whether the answer is refused, and the margin in bounds."""
    refused = not compare_to_expected(expected, y).passes
    return refused, min(distance_in_bounds(expected, y), 1e30) if refused else 0.0
