"""Goals of the gated activations and of the fused layer of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from conformance.cases import Case
from conformance.cases.moe import MOE_EXACT_RECIPES
from conformance.compare import Comparison, compare_to_expected
from conformance.data import MoeProblem, SwigluProblem
from conformance.diagnosis import Diagnosis, by_stage
from conformance.goals.expected import LARGEST_DIAGNOSED, diagnose_expected
from reference.bounds import Contract
from reference.moe import moe_semantics
from reference.mutants import Mutant, Traits
from reference.mutants.experts import LayerTraits

Array = npt.NDArray[Any]

GATED_STAGES = ("split", "activate")
LAYER_STAGES = ("load", "dispatch", "requantize", "apply_weights", "gather", "join")
PROJECTION_STAGES = ("unpack", "columns", "matrix", "store", "quantize", "product")


@dataclass(frozen=True)
class SwigluGoal:
    """The outputs of a gated activation, within its bound."""

    problem: SwigluProblem
    contract: Contract

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        comparison = compare_to_expected(self.problem.expected(self.contract), arrays[0])
        return replace(comparison, statistics={})  # of constructed data they say nothing

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        problem, contract = self.problem, self.contract
        return diagnose_expected(
            problem.expected(contract),
            arrays[0],
            comparison,
            by_stage(*GATED_STAGES),
            lambda m: m.applies(problem.case.gated),
            lambda m: problem.expected(contract, m.semantics),
        )


@dataclass(frozen=True)
class MoeGoal:
    """The outputs of a layer of experts, within the bound of the backend's contract."""

    problem: MoeProblem
    contract: Contract

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        comparison = compare_to_expected(self.problem.expected(self.contract), arrays[0])
        if self.problem.case.recipe in MOE_EXACT_RECIPES:
            comparison = replace(comparison, statistics={})
        return comparison

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        problem, contract, case = self.problem, self.contract, self.problem.case
        return diagnose_expected(
            problem.expected(contract),
            arrays[0],
            comparison,
            layer_mutants(case),
            lambda m: concerns_layer(case, problem, m, contract),
            lambda m: problem.mutated(moe_semantics(m.semantics), contract),
            case.weight.bits,
        )


def layer_mutants(case: Case) -> list[Mutant]:
    """Those that a layer of experts is compared with; none where that takes too long."""
    products = 2 * case.m * case.top_k * 3 * case.k * case.n
    stages = (*LAYER_STAGES, *GATED_STAGES, *PROJECTION_STAGES)
    return by_stage(*stages) if products <= LARGEST_DIAGNOSED else []


def layer_traits(case: Case, problem: MoeProblem, contract: Contract | None = None) -> LayerTraits:
    """What the mutants of the experts need to know of a case."""
    layer = problem.layer
    return LayerTraits(
        case.weight, layer.gated, case.activation, case.dtype, case.m, case.experts, case.top_k, case.k, case.n,
        case.bias, case.act_order, case.recipe, contract.quantizer if contract else "kernel",
    )  # fmt: skip


def concerns_layer(case: Case, problem: MoeProblem, mutant: Mutant, contract: Contract | None = None) -> bool:
    """Whether a mutant is wrong for a layer at all; one of the linear, in either projection."""
    traits = layer_traits(case, problem, contract)
    if mutant.stage in GATED_STAGES:
        return mutant.applies(traits.gated)
    if mutant.stage in LAYER_STAGES:
        return mutant.applies(traits)
    if mutant.stage == "quantize" and case.activation.kind == "a16":
        return False
    return any(mutant.applies(projection) for projection in projections(traits))


def projections(traits: LayerTraits) -> list[Traits]:
    """The two projections as linears."""
    return [
        Traits(
            traits.weight, traits.activation, traits.tokens, n, k, traits.dtype, traits.bias, traits.act_order,
            traits.convention,
        )
        for n, k in ((2 * traits.intermediate, traits.hidden), (traits.hidden, traits.intermediate))
    ]  # fmt: skip
