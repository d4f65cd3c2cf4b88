"""How a backend behaves beside what it computes; the outputs are held to the layer's own bound (C110-C121)."""

from conformance.conduct.checks import CHECKS
from conformance.conduct.observed import Observed
from conformance.conduct.problems import ConductGoal, conduct_problems, goal_of, question_of
from conformance.plugin import judges


@judges("conduct")
def test_conduct(case, subject, judge):
    problems = conduct_problems(case)
    answer = subject.conduct(CHECKS[case.recipe], [question_of(problem) for problem in problems])

    def goal():
        goals = [goal_of(problem, subject.contract) for problem in problems]
        return ConductGoal(goals, answer.observed or Observed(()))

    judge(answer, goal)
