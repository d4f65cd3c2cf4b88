"""In which order cases are asked, so that neither judges nor backends wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import gcd
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def in_turns(cases: Sequence[T], backends: Sequence[U]) -> list[tuple[T, U]]:
    """All backends on a case, then the next case: what is expected of it is computed once. Which backend comes first
    changes, or all judges would wait for the same one."""
    count = len(backends)
    return [(case, backends[(turn + i) % count]) for turn, case in enumerate(cases) for i in range(count)]


def mixed(some: Sequence[T], group_of: Callable[[T], object]) -> list[T]:
    """What lies beside each other in one group stays together; the groups come in an order in which each stretch is
    from all over the sequence: steps of the golden section, around and around."""
    groups = [list(group) for _, group in groupby(some, group_of)]
    step = max(round(len(groups) * 0.618), 1)
    while gcd(step, len(groups)) > 1:
        step += 1
    return [item for number in range(len(groups)) for item in groups[number * step % len(groups)]]


def spread(some: Sequence[T], among: Sequence[T]) -> list[T]:
    """All of both, each in its order, the former at equal distances."""
    places = {(2 * i + 1) * len(among) // (2 * len(some)): i for i in range(len(some))} if some else {}
    if len(places) < len(some):
        return [*some, *among]
    found: list[T] = []
    for place in range(len(among) + 1):
        if place in places:
            found.append(some[places[place]])
        found.extend(among[place : place + 1])
    return found
