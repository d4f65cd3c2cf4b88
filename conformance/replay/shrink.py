"""The smallest case like it that still fails: fewer rows, features, experts; the same recipe and seed.

A case is smaller where one size of it is. Sizes are those that the format allows: whole groups, ranks that can cut.
A step is taken where the smaller case fails alike: the same outcome, and the same known fault where one was named.
When no single size can be made smaller any more, the case is the smallest that this finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from conformance.cases import Case
from conformance.direct import ask
from conformance.judge import Judge
from conformance.sources import Computed
from conformance.subject import Subject
from conformance.verdict import Verdict
from reference.errors import QuantizationError

# Bad data name no sizes; four processes a question take seconds; beyond 2^31 is the point of `overflow`.
_AS_IT_IS = ("validation", "moe_parallel")
_FIELDS = ("m", "k", "n", "experts", "top_k")


@dataclass(frozen=True)
class Shrunken:
    """case: the smallest that was found, with its judge; the case itself, without a judge, where none smaller fails.

    asked: how many cases were. whole: whether the time was enough.
    """

    case: Case
    judge: Judge | None
    asked: int
    whole: bool


def shrink(
    case: Case,
    alike: Callable[[Verdict], bool],
    subject_of: Callable[[Case], Subject],
    seconds: float,
    stopped: Callable[[], bool] = lambda: False,
) -> Shrunken:
    """alike: whether a verdict is the failure that is looked for. subject_of: a backend to be asked about a case.
    stopped: whether no more cases are to be asked, whatever time is left."""
    deadline = time.monotonic() + seconds
    found, judge, asked = case, None, 0
    known: set[str] = {case.id}
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(found):
            if candidate.id in known:
                continue
            if stopped() or time.monotonic() >= deadline:
                return Shrunken(found, judge, asked, False)
            known.add(candidate.id)
            asked += 1
            own = _judged(subject_of(candidate))
            if stopped():
                return Shrunken(found, judge, asked, False)
            if own is not None and own.verdict is not None and alike(own.verdict):
                found, judge, smaller = candidate, own, True
                break
    return Shrunken(found, judge, asked, True)


def _judged(subject: Subject) -> Judge | None:
    """None where no recipe makes the case: an exact one whose sums have no room, a cut inside a word."""
    try:
        judge = ask(subject, Computed())
    except (AssertionError, ValueError, ArithmeticError, LookupError, QuantizationError):
        return None
    return judge


def candidates(case: Case) -> Iterator[Case]:
    """The cases with one size smaller, or with rows and columns alike where there are as many, as of an identity; the
    largest steps first."""
    if case.operation in _AS_IT_IS or case.on_request:
        return
    together = [("k", "m")] if case.m == case.k else []
    for names in (*together, *((name,) for name in _FIELDS)):
        size, step = getattr(case, names[0]), _step(case, names[0])
        if size <= step or size % step:
            continue
        doubled = [step << power for power in range(size.bit_length()) if step << power < size]
        for value in dict.fromkeys([*doubled, size - step]):
            smaller = _with(case, dict.fromkeys(names, value))
            if smaller is not None:
                yield smaller


def _step(case: Case, name: str) -> int:
    """What a size must be a multiple of."""
    experts = case.operation in ("moe", "sharding") or (case.operation == "conduct" and case.experts > 0)
    if name == "k" or (
        name == "n" and experts
    ):  # the intermediate size is the input of the second projection
        weight = case.weight.group_size if case.weight.strategy == "group" else 1
        inputs = case.activation.group_size if case.activation.strategy == "group" else 1
        return max(weight, inputs, 1)
    return 1


def _with(case: Case, changed: dict[str, Any]) -> Case | None:
    """The case with other sizes, None where its router cannot have them."""
    smaller = replace(case, **changed, quick=False)
    if smaller.top_k > smaller.experts and case.top_k:
        return None
    if case.routing is None:
        return smaller
    try:
        routing = replace(case.routing, experts=smaller.experts, top_k=smaller.top_k)
    except QuantizationError:
        return None
    return replace(smaller, routing=routing)
