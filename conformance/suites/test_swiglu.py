"""h = phi(gate) * (up + beta): the gated activations by themselves (C80-C84)."""

from conformance.data import swiglu_problem
from conformance.goals import SwigluGoal
from conformance.plugin import judges


@judges("swiglu")
def test_swiglu(case, subject, judge):
    problem = swiglu_problem(case)
    judge(subject.swiglu(problem.x), lambda: SwigluGoal(problem, subject.contract))
