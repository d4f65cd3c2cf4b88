"""Routing problems: logits and bias, or ids to align, and what is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import Case
from conformance.data.seeds import generator
from reference.bounds import Contract
from reference.rounding import FloatFormat, float_format, round_to
from reference.routing import AcceptableRoutes, Routing, acceptable_routes, scores_of

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RoutingProblem:
    """logits (T, E) in the dtype of the case; bias float32 (E) or None."""

    case: Case
    routing: Routing
    logits: Array
    bias: Array | None
    _known: dict[Contract, AcceptableRoutes] = field(default_factory=dict)

    def acceptable(self, contract: Contract) -> AcceptableRoutes:
        """What a correct router may answer; computed once a contract."""
        if contract not in self._known:
            self._known[contract] = acceptable_routes(self.logits, self.routing, self.bias, contract)
        return self._known[contract]


@dataclass(frozen=True)
class AlignProblem:
    """ids int32 (T, k), distinct in a token, -1 for no expert; expert_map int32 (E) or None."""

    case: Case
    ids: Array
    expert_map: Array | None


@lru_cache(maxsize=4)
def routing_problem(case: Case) -> RoutingProblem:
    routing = case.routing
    assert routing is not None
    rng = generator(case.id)
    target = float_format(case.dtype)
    logits = _logits(case, rng, target)
    with np.errstate(over="ignore"):
        stored = round_to(logits, target).astype(target.dtype)
    bias = None
    if routing.bias:
        bias = _bias(case, scores_of(stored, routing), rng).astype(np.float32)
    return RoutingProblem(case, routing, stored, bias)


def _logits(case: Case, rng: np.random.Generator, target: FloatFormat) -> Float64Array:
    shape = (case.m, case.experts)
    token = np.arange(case.m)[:, None]
    if case.recipe == "ties":
        return np.asarray(rng.choice([-1.0, 0.0, 0.5, 1.0], shape))
    if case.recipe == "close":
        # One step of the format between neighbours; in float32, that is less than a router can resolve, every
        # other token has steps that it must resolve and 16 bits do not.
        step = np.where(token % 2 == 0, target.eps, max(target.eps, 2.0**-14))
        places = rng.permuted(np.broadcast_to(np.arange(case.experts), shape), axis=1)
        return np.asarray(1 + step * places)
    values = rng.normal(0, 2, shape)
    if case.recipe == "wide":
        values *= np.array([1.0, 20.0, 300.0, 8000.0])[(token + 3) % 4]
    if case.recipe == "poisoned":
        _poison(values, rng)
    return values


def _poison(values: Float64Array, rng: np.random.Generator) -> None:
    """Tokens of eight kinds in turn, two of them ordinary."""
    count = values.shape[1]
    for token, row in enumerate(values):
        some = rng.permutation(count)[: max(1, count // 3)]
        one = int(rng.integers(count))
        kind = token % 8
        if kind == 0:
            row[some] = np.nan
        elif kind == 2:
            row[one] = np.inf
        elif kind == 3:
            row[some] = -np.inf
        elif kind == 4:
            row[:] = np.where(np.arange(count) == one, row, -np.inf)
        elif kind == 5:
            row[:] = np.nan
        elif kind == 6:
            row[:] = -np.inf


def _bias(case: Case, scores: Float64Array, rng: np.random.Generator) -> Float64Array:
    """As wide as the scores, so that it decides as often as they do."""
    spread = float(scores.std()) if scores.size else 1.0
    if case.recipe == "ties":
        return np.asarray(spread * rng.choice([-1.0, 0.0, 1.0], case.experts))
    if case.recipe == "close":
        return np.full(case.experts, 0.25)
    found = rng.normal(0, spread, case.experts)
    if case.recipe == "negative":  # below -1 with the largest score
        found -= found.max() + 2 + case.seed
    return found


@lru_cache(maxsize=4)
def align_problem(case: Case) -> AlignProblem:
    rng = generator(case.id)
    drawn = np.array([rng.permutation(case.experts)[: case.top_k] for _ in range(case.m)])
    ids = drawn.reshape(case.m, case.top_k).astype(np.int32)
    expert_map = None
    if case.recipe == "one-expert":  # the first place of every token
        ids[:, 0], moved = case.experts - 1, ids[:, 0].copy()
        ids[:, 1:] = np.where(ids[:, 1:] == case.experts - 1, moved[:, None], ids[:, 1:])
    if "absent" in case.recipe:
        # Every other expert is here: the last one where an id of -1 would read its place.
        present = np.flatnonzero(np.arange(case.experts) % 2 == ("dropped" in case.recipe))
        expert_map = np.full(case.experts, -1, np.int32)
        expert_map[present] = np.arange(len(present))
    if "dropped" in case.recipe:
        gone = rng.random(ids.shape) < 0.4
        gone[: case.m // 4] = True
        ids[gone] = -1
    return AlignProblem(case, ids, expert_map)
