"""From what a backend said and did to one verdict.

| said | did                       | verdict                                                     |
| ---- | ------------------------- | ----------------------------------------------------------- |
| yes  | a right array             | conforms                                                    |
| yes  | a wrong array             | diverges                                                    |
| yes  | refused                   | dishonest                                                   |
| yes  | launched no kernel of its own | dishonest: a fallback computed the answer               |
| no   | refused, or has nothing   | declines                                                    |
| no   | returned an array         | dishonest: right ("works but unclaimed") or wrong           |
| any  | another exception         | crashes                                                     |

A case of bad data turns it round: to refuse is to conform, to compute is to diverge, and a backend that
does not claim to validate is not asked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from conformance.backend import Support
from conformance.cases import Case
from conformance.compare import Comparison
from conformance.goals import Goal
from conformance.subject import Answer


class Outcome(StrEnum):
    CONFORMS = "conforms"
    DIVERGES = "diverges"
    DECLINES = "declines"
    DISHONEST = "dishonest"
    CRASHES = "crashes"
    WAIVED = "waived"


# A refusal that helps nobody: what is not supported stays unsaid.
UNNAMED = "the refusal names nothing of the cell"
# A name of a kernel in C++ can hold the whole of its template arguments: a report has its beginning.
LONGEST_KERNEL = 160

FAILING = (Outcome.DIVERGES, Outcome.DISHONEST, Outcome.CRASHES)
JUDGED = (Outcome.CONFORMS, *FAILING, Outcome.WAIVED)


@dataclass(frozen=True)
class Verdict:
    """worst: largest error as a fraction of what is allowed, None where nothing was compared or nothing
    was allowed. detail: one short paragraph for a person; diagnosis: the record behind it. width, elements,
    statistics: see Comparison. kernels: see Answer, long names cut. contract: where the backend's promise for the case
    departs from its general one. oracle_seconds: making the data, the expectation and the
    comparison."""

    case: str
    backend: str
    outcome: Outcome
    detail: str = ""
    worst: float | None = None
    explained_by: str = ""
    note: str = ""
    diagnosis: dict[str, Any] | None = None
    width: float = 0.0
    elements: int = 0
    statistics: dict[str, float] = field(default_factory=dict)
    kernels: tuple[str, ...] | None = None
    contract: dict[str, Any] = field(default_factory=dict)
    oracle_seconds: float = 0.0
    backend_seconds: float = 0.0

    @property
    def fails(self) -> bool:
        return self.outcome in FAILING

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Verdict:
        kernels = record.get("kernels")
        return cls(
            **{
                **record,
                "outcome": Outcome(record["outcome"]),
                "kernels": None if kernels is None else tuple(kernels),
            }
        )


def decide(
    case: Case | str,
    backend: str,
    support: Support,
    answer: Answer | None,
    goal: Callable[[], Goal],
    own_kernels: str = "",
) -> Verdict:
    """The verdict on a case of good data.

    answer is None when there was nothing to call. goal computes the expectation; it runs after the
    backend has answered, and only if it gave something to compare. own_kernels: the backend's, a regular expression.
    """
    verdict = Verdict(
        case if isinstance(case, str) else case.id,
        backend,
        Outcome.DECLINES,
        backend_seconds=answer.seconds if answer else 0.0,
        kernels=_short(answer.kernels) if answer and answer.kernels is not None else None,
    )
    if answer is None:
        return replace(verdict, detail=support.reason)
    if answer.crash is not None:
        return replace(verdict, outcome=Outcome.CRASHES, detail=answer.crash)
    if answer.refusal is not None and support.claimed:
        return replace(
            verdict, outcome=Outcome.DISHONEST, detail=f"it claims the case and refuses it: {answer.refusal}"
        )
    if answer.refusal is not None:
        note = "" if isinstance(case, str) or names_the_cell(case, answer.refusal) else UNNAMED
        return replace(verdict, detail=f"{support.reason} [when called: {answer.refusal}]", note=note)
    start = time.perf_counter()
    held_against = goal()
    comparison = _compare(held_against, answer)
    diagnosis = None
    detail = comparison.detail
    if not comparison.passes and answer.arrays is not None:
        diagnosis = held_against.diagnose(answer.arrays, comparison)
        detail = diagnosis.text
    verdict = replace(
        verdict,
        oracle_seconds=time.perf_counter() - start,
        worst=comparison.worst if np.isfinite(comparison.worst) else None,
        explained_by=comparison.explained_by,
        note=comparison.note,
        diagnosis=diagnosis.to_json() if diagnosis else None,
        width=comparison.width,
        elements=comparison.elements,
        statistics=comparison.statistics,
    )
    if not support.claimed:
        what = "right: works but unclaimed" if comparison.passes else f"wrong: {detail}"
        said = f"it declines the case ({support.reason}) and computes it all the same; the answer is {what}"
        return replace(verdict, outcome=Outcome.DISHONEST, detail=said)
    if not comparison.passes:
        return replace(verdict, outcome=Outcome.DIVERGES, detail=detail)
    if own_kernels and fell_back(answer, own_kernels):
        launched = ", ".join(verdict.kernels or ()) or "none at all"
        said = f"it claims the case and launches no kernel of its own ({own_kernels}), a fallback did: {launched}"
        return replace(verdict, outcome=Outcome.DISHONEST, detail=said)
    return replace(verdict, outcome=Outcome.CONFORMS)


def _short(kernels: tuple[str, ...]) -> tuple[str, ...]:
    """Names no longer than a line, each once."""
    most = LONGEST_KERNEL
    return tuple(dict.fromkeys(k if len(k) <= most else f"{k[: most - 3]}..." for k in kernels))


def fell_back(answer: Answer, own_kernels: str) -> bool:
    """Whether kernels were recorded for a result of at least one element, and none is the backend's own.

    The first array is the result; a scale beside it can be there where there is nothing to compute.
    """
    if answer.kernels is None or not answer.arrays or not answer.arrays[0].size:
        return False
    return not any(re.search(own_kernels, name) for name in answer.kernels)


def names_the_cell(case: Case, refusal: str) -> bool:
    """Whether an error says what it refuses: bits, group size, symmetry, activations, dtype or shape of the case,
    its experts or ranks, or the tensor or argument that holds them. Advice: a user has to find out what to change."""
    words = "bit group channel symmetric asym zero scale g_idx order activation strategy quantiz dtype shape"
    words += " expert top_k routing bias limit alpha beta shard rank"
    own = (str(case.weight.bits), case.activation.kind, case.dtype, case.operation)
    said = refusal.lower()
    return any(word in said for word in (*words.split(), *own))


def decide_refusal(case: Case, backend: str, support: Support, answer: Answer | None) -> Verdict:
    """The verdict on a case of bad data; answer is None when the backend does not claim to validate."""
    verdict = Verdict(case.id, backend, Outcome.DECLINES, support.reason)
    if answer is None:
        return verdict
    verdict = replace(verdict, backend_seconds=answer.seconds, detail="")
    if answer.crash is not None:
        return replace(verdict, outcome=Outcome.CRASHES, detail=answer.crash)
    if answer.refusal is None:
        defect = f"it claims to validate and computes with bad data ({case.recipe})"
        return replace(verdict, outcome=Outcome.DIVERGES, detail=defect)
    if answer.refusal.endswith("without a message"):
        detail = f"it refuses bad data ({case.recipe}) without saying why: {answer.refusal}"
        return replace(verdict, outcome=Outcome.DIVERGES, detail=detail)
    return replace(verdict, outcome=Outcome.CONFORMS, explained_by=answer.refusal)


def _compare(goal: Goal, answer: Answer) -> Comparison:
    if answer.wrong is not None:
        return Comparison(False, np.inf, detail=answer.wrong)
    assert answer.arrays is not None
    return goal.compare(answer.arrays)
