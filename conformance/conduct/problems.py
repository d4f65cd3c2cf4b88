"""The data of a case of conduct, and what the outputs that its check kept are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from conformance.cases import Case
from conformance.cases.conduct import ROWS
from conformance.compare import Comparison
from conformance.conduct import large
from conformance.conduct.observed import Observed, Output, Question
from conformance.data import LinearProblem, MoeProblem, linear_problem, moe_problem
from conformance.diagnosis import Diagnosis
from conformance.goals import Goal, LinearGoal, MoeGoal
from reference.bounds import Contract

Array = npt.NDArray[Any]
Problem = LinearProblem | MoeProblem


def conduct_problems(case: Case) -> list[Problem]:
    """The layers that the check is given: one, two of one shape for `alternating`."""
    layer = replace(case.plain, recipe="random", m=case.m or ROWS)
    if case.recipe == "overflow":
        layer = replace(layer, m=min(case.m, large.ROWS), n=min(case.n, large.FEATURES))
    layers = [layer, replace(layer, seed=1)] if case.recipe == "alternating" else [layer]
    return [moe_problem(one) if one.experts else linear_problem(one) for one in layers]


def question_of(problem: Problem) -> Question:
    if isinstance(problem, MoeProblem):
        return Question(problem.checkpoint, tuple(problem.calls))
    return Question(problem.checkpoint, tuple((x,) for x in problem.batches))


def goal_of(problem: Problem, contract: Contract) -> Goal:
    if isinstance(problem, MoeProblem):
        return MoeGoal(problem, contract)
    return LinearGoal(problem, contract)


@dataclass(frozen=True)
class ConductGoal:
    """Each output that the check kept is right, as the layer's own cases say it. goals: one a question."""

    goals: Sequence[Goal]
    observed: Observed

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        """The first output that is wrong, or all of them in one: the worst number, all notes, all elements."""
        found = [self._compared(*pair) for pair in zip(self.observed.outputs, arrays, strict=True)]
        wrong = next((comparison for comparison in found if not comparison.passes), None)
        if wrong is not None:
            return wrong
        notes = [*self.observed.notes, *dict.fromkeys(c.note for c in found if c.note)]
        explained = dict.fromkeys(c.explained_by for c in found)
        return replace(
            found[0],
            worst=max(c.worst for c in found),
            explained_by="; ".join([*explained, *([self.observed.seen] if self.observed.seen else [])]),
            note="; ".join(notes),
            detail="",
            elements=sum(c.elements for c in found),
        )

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        pairs = zip(self.observed.outputs, arrays, strict=True)
        output, array = next((o, a) for o, a in pairs if not self._compared(o, a).passes)
        return self.goals[output.question].diagnose((array,), comparison)

    def _compared(self, output: Output, array: Array) -> Comparison:
        """The detail begins with how the layer was called."""
        found = self.goals[output.question].compare((array,))
        return replace(found, detail="; ".join(word for word in (output.how, found.detail) if word))
