"""Logits to experts and weights, and ids to blocks of one expert each (C70-C77)."""

from conformance.data.routing import align_problem, routing_problem
from conformance.goals.routing import AlignGoal, RoutingGoal
from conformance.plugin import judges


@judges("routing")
def test_routing(case, subject, judge):
    problem = routing_problem(case)
    answer = subject.route(problem.logits, problem.bias)
    judge(answer, lambda: RoutingGoal(problem, subject.contract))


@judges("moe_align")
def test_moe_align(case, subject, judge):
    problem = align_problem(case)
    answer = subject.align(problem.ids, problem.expert_map)
    judge(answer, lambda: AlignGoal(problem))
