"""y = quantize(x) . dequant(W)^T + bias, loaded once and called with two batches (C40-C54, C60-C66)."""

from conformance.data import linear_problem
from conformance.goals import LinearGoal
from conformance.plugin import judges


@judges("linear")
def test_linear(case, subject, judge):
    problem = linear_problem(case)
    answer = subject.linear(problem.checkpoint, problem.batches)
    judge(answer, lambda: LinearGoal(problem, subject.contract))
