"""One case, one backend, one verdict: what the suites call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from conformance.backend import Support, contract_of
from conformance.cases import Case
from conformance.goals import Goal
from conformance.subject import Answer, Subject
from conformance.verdict import Outcome, Verdict, decide, decide_refusal


class Judge:
    """Collects the verdict of one case. `verdict` is None until something was judged; `answer` is the last that was
    judged, and `step` what it was asked for in a case of several."""

    def __init__(self, subject: Subject, on_failure: Callable[[Verdict], None]) -> None:
        self.subject = subject
        self.verdict: Verdict | None = None
        self.answer: Answer | None = None
        self.step = ""
        self._on_failure = on_failure

    def __call__(self, answer: Answer | None, goal: Callable[[], Goal], step: str = "") -> None:
        """Judge one answer against a goal; a step that fails ends a case of several."""
        self.answer, self.step = answer, step
        support = self._said()
        verdict = decide(self._case, self._name, support, answer, goal, self.subject.own_kernels())
        if step and verdict.fails:
            verdict = replace(verdict, detail=f"{step}: {verdict.detail}")
        self._settle(verdict)

    def refusal(self, ask: Callable[[], Answer | None], control: Callable[[], Answer | None]) -> None:
        """Judge whether bad data are refused, by a backend that claims to look at them.

        control asks the same with good data: what refuses those as well has not looked.
        """
        support = self._said()
        if support.claimed:
            good = control()
            if good is None or good.arrays is None:
                said = good and (good.refusal or good.crash or good.wrong)
                detail = f"it claims to validate, and good data do not pass it either: {said}"
                self._settle(Verdict(self._case.id, self._name, Outcome.DISHONEST, detail))
                return
        self.answer = answer = ask() if support.claimed else None
        self._settle(decide_refusal(self._case, self._name, support, answer))

    def _said(self) -> Support:
        try:
            return self.subject.support()
        except Exception as error:
            detail = f"supports() raised {type(error).__name__}: {error}"
            self._settle(Verdict(self._case.id, self._name, Outcome.CRASHES, detail))
            raise

    @property
    def _case(self) -> Case:
        return self.subject.case

    @property
    def _name(self) -> str:
        return self.subject.backend.name

    def _settle(self, verdict: Verdict) -> None:
        if self.verdict is not None:
            before = self.verdict
            verdict = replace(
                verdict,
                oracle_seconds=before.oracle_seconds + verdict.oracle_seconds,
                backend_seconds=before.backend_seconds + verdict.backend_seconds,
            )
        else:
            making = self.subject.making_seconds + verdict.oracle_seconds
            verdict = replace(verdict, oracle_seconds=making, contract=self._departures())
        self.verdict = verdict
        if verdict.fails:
            self._on_failure(verdict)

    def _departures(self) -> dict[str, Any]:
        """What the backend promises for this case, where that is not what it promises in general."""
        general, here = asdict(contract_of(self.subject.backend)), asdict(self.subject.contract)
        return {name: value for name, value in here.items() if value != general[name]}
