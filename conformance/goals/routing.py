"""Goals of the router and of block alignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import Case
from conformance.compare import Comparison
from conformance.data.routing import AlignProblem, RoutingProblem
from conformance.diagnosis import Diagnosis, Match, Suspects, by_stage, diagnose, explains, pattern
from reference.bounds import Contract
from reference.mutants import Mutant
from reference.mutants.routing import AlignTraits, RoutingTraits
from reference.routing import Alignment, misaligned, route

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

ROUTER_STAGES = ("scores", "keys", "eligible", "choose", "weigh")


def routing_traits(case: Case) -> RoutingTraits:
    """What the router's mutants need to know of a case."""
    assert case.routing is not None
    return RoutingTraits(case.routing, case.m, case.dtype, case.recipe == "poisoned", case.recipe == "wide")


def align_traits(case: Case) -> AlignTraits:
    return AlignTraits(
        case.m, case.experts, case.top_k, case.block, "absent" in case.recipe, "dropped" in case.recipe
    )


@dataclass(frozen=True)
class RoutingGoal:
    """Weights and ids: the selection first, then the weights of what was selected (C72, C73)."""

    problem: RoutingProblem
    contract: Contract

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        weights, ids = arrays
        acceptable = self.problem.acceptable(self.contract)
        refused = acceptable.refused(ids)
        if refused.any():
            token = int(np.argmax(refused))
            detail = f"{int(refused.sum())} of {len(ids)} tokens select wrongly; {self._why(ids, token)}"
            return Comparison(False, np.inf, detail=detail)
        low, high = acceptable.weights_between(ids)
        values = weights.astype(np.float64)
        wrong = ~((low <= values) & (values <= high))
        centre, radius = (low + high) / 2, (high - low) / 2
        error = np.nan_to_num(np.abs(values - centre) / radius, nan=np.inf, posinf=np.inf)
        worst = float(error.max(initial=0.0))
        if not wrong.any():
            name = f"{self.contract.router} router, ties {self.contract.ties}"
            return Comparison(True, worst, name)
        token, place = (int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
        detail = f"the selection is right; token {token}: the weight of expert {ids[token, place]} is off"
        return Comparison(False, worst, detail=detail, wrong=wrong, right=centre, allowed=(low, high))

    def _why(self, ids: Array, token: int) -> str:
        """What is wrong with one selection, and what is expected."""
        acceptable, experts = self.problem.acceptable(self.contract), self.problem.routing.experts
        chosen = [int(i) for i in ids[token]]
        outside = [i for i in chosen if not 0 <= i < experts]
        twice = [i for i in chosen if chosen.count(i) > 1]
        expected = sorted(int(i) for i in acceptable.ids[token])
        said = f"token {token}: got experts {sorted(chosen)}, expected {expected}"
        others = len(acceptable.selections(token, 8)) - 1
        said += f" or one of {others}{'+' if others == 7 else ''} near ties" if others > 0 else ""
        if outside:
            return f"{said}; there is no expert {outside[0]}"
        if twice:
            return f"{said}; expert {twice[0]} is there twice"
        keys = (acceptable.keys.low[token] + acceptable.keys.high[token]) / 2
        surplus = [i for i in chosen if i not in expected]
        missing = [i for i in expected if i not in chosen]
        eligible = np.logical_or.reduce(acceptable.eligible(token))
        masked = [i for i in surplus if not eligible[i]]
        if masked:
            return f"{said}; expert {masked[0]} is not in a group that may be chosen from"
        more, less = max(missing, key=lambda i: keys[i]), min(surplus, key=lambda i: keys[i])
        return f"{said}; the key of {less} is {keys[less]:.9g}, that of {more} is {keys[more]:.9g}"

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        problem = self.problem
        weights, ids = arrays
        acceptable = problem.acceptable(self.contract)
        plain = (acceptable.weights, acceptable.ids)
        low, high = acceptable.weights_between(acceptable.ids)
        relative = float(np.max((high - low) / np.maximum(acceptable.weights, 2.0**-20), initial=0.0))
        actual = (weights.astype(np.float64), ids)

        def answer(mutant: Mutant) -> tuple[Float64Array, Array]:
            return route(problem.logits, problem.routing, problem.bias, mutant.semantics)

        def differs(mutant: Mutant) -> float | None:
            if not mutant.applies(routing_traits(problem.case)):
                return None
            other = answer(mutant)
            return None if _mismatches(other, plain, relative) == 0 else _mismatches(other, actual, relative)

        off = _mismatches(plain, actual, relative)

        def match(mutant: Mutant) -> Match:
            share = _mismatches(answer(mutant), actual, relative)
            return Match(share == 0 or explains(share, off, ids.size), share, share)

        right = Match(False, off, comparison.worst)
        where = pattern(comparison, weights)
        return diagnose(Suspects(by_stage(*ROUTER_STAGES), differs, match, right, where))


def _mismatches(one: tuple[Float64Array, Array], other: tuple[Float64Array, Array], relative: float) -> float:
    """The share of places whose expert or weight differs, in the order of the experts."""
    if one[1].size == 0:
        return 0.0
    (a, i), (b, j) = (_ordered(*pair) for pair in (one, other))
    with np.errstate(invalid="ignore"):
        near = (a == b) | (np.abs(a - b) <= relative * np.maximum(np.abs(a), 2.0**-20))
    return float(((i != j) | ~(near | (np.isnan(a) & np.isnan(b)))).mean())


def _ordered(weights: Float64Array, ids: Array) -> tuple[Float64Array, Array]:
    order = np.argsort(ids, axis=1, kind="stable")
    return np.take_along_axis(weights, order, axis=1), np.take_along_axis(ids, order, axis=1)


@dataclass(frozen=True)
class AlignGoal:
    """sorted_ids, expert_ids and num_tokens_post_pad, against what C77 asks of them."""

    problem: AlignProblem

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        case = self.problem.case
        reason = misaligned(
            self.problem.ids, case.experts, case.block, self.problem.expert_map, Alignment(*arrays)
        )
        return Comparison(reason is None, 0.0 if reason is None else np.inf, "aligned", detail=reason or "")

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        case, problem = self.problem.case, self.problem
        actual = _contents(Alignment(*arrays), case.block)

        def answer(mutant: Mutant) -> Alignment:
            found: Alignment = mutant.semantics.align(
                problem.ids, case.experts, case.block, problem.expert_map
            )
            return found

        def share(mutant: Mutant) -> float:
            return float(_contents(answer(mutant), case.block) != actual)

        def differs(mutant: Mutant) -> float | None:
            if not mutant.applies(align_traits(case)) or self.compare(answer(mutant).arrays).passes:
                return None
            return share(mutant)

        def match(mutant: Mutant) -> Match:
            return Match(share(mutant) == 0, share(mutant), share(mutant))

        right = Match(False, 1.0, np.inf)
        return diagnose(Suspects(by_stage("align"), differs, match, right, comparison.detail))


def _contents(found: Alignment, block: int) -> tuple[Any, ...]:
    """What an alignment says, without the orders that are free."""
    padded = int(found.num_tokens_post_pad[0])
    owners = np.repeat(found.expert_ids, block)[:padded]
    slots = found.sorted_ids[: len(owners)]
    said: Callable[[Any], list[int]] = np.ndarray.tolist
    return padded, sorted(zip(said(owners[: len(slots)]), said(slots), strict=True))
