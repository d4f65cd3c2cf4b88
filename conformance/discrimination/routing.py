"""Whether a case tells a mutant of the router or of block alignment from the right answer, and by how much."""

from __future__ import annotations

import numpy as np

from conformance.cases import Case
from conformance.data.routing import align_problem, routing_problem
from conformance.goals.routing import AlignGoal, RoutingGoal, align_traits, routing_traits
from reference.bounds import Contract
from reference.mutants import Mutant
from reference.routing import ROUTING_RIGHT, Alignment, RoutingSemantics, route

ROUTING_STAGES = {
    "scores": ("routing",),
    "keys": ("routing",),
    "eligible": ("routing",),
    "choose": ("routing",),
    "weigh": ("routing",),
    "align": ("moe_align",),
}


def concerns_routing(case: Case, mutant: Mutant) -> bool:
    """Whether the mutant's stage is part of the case, and wrong there at all."""
    return mutant.applies(routing_traits(case) if case.operation == "routing" else align_traits(case))


class RoutingBench:
    def __init__(self, case: Case, contract: Contract | None = None) -> None:
        self.problem = routing_problem(case)
        self.goal = RoutingGoal(self.problem, contract or Contract())

    def answer(self, semantics: RoutingSemantics = ROUTING_RIGHT) -> tuple[np.ndarray, np.ndarray]:
        """Weights float32 and ids int32, as a backend gives them."""
        problem = self.problem
        weights, ids = route(problem.logits, problem.routing, problem.bias, semantics)
        return weights.astype(np.float32), ids.astype(np.int32)

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        """Whether the answer is refused, and the margin: of the weights in bounds, 1e30 of a selection."""
        found = self.goal.compare(self.answer(mutant.semantics))
        return not found.passes, min(found.worst, 1e30)


class AlignBench:
    def __init__(self, case: Case) -> None:
        self.problem = align_problem(case)
        self.goal = AlignGoal(self.problem)

    def answer(self, semantics: RoutingSemantics = ROUTING_RIGHT) -> Alignment:
        case = self.problem.case
        return semantics.align(self.problem.ids, case.experts, case.block, self.problem.expert_map)

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        return not self.goal.compare(self.answer(mutant.semantics).arrays).passes, 0.0
