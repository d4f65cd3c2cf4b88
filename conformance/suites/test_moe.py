"""The fused layer of experts: two projections, a gated activation, a weighted sum; called twice (C90-C99)."""

from conformance.data import moe_problem
from conformance.goals import MoeGoal
from conformance.plugin import judges


@judges("moe")
def test_moe(case, subject, judge):
    problem = moe_problem(case)
    judge(subject.moe(problem.checkpoint, problem.calls), lambda: MoeGoal(problem, subject.contract))
