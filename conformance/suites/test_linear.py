"""y = x . dequant(W)^T + bias, loaded once and called with two batches (C40-C47)."""

from conformance.data import linear_problem
from conformance.plugin import judges


@judges("linear")
def test_linear(case, subject, judge):
    problem = linear_problem(case)
    answer = subject.linear(problem.checkpoint, problem.batches)
    judge(answer, lambda: problem.expected(subject.contract))
