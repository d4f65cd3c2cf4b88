"""Where a replay takes what it asks: the tensors of a bundle, or the case's recipe where they do not say all.

From the tensors: inputs and expectation as they lie in the bundle, no oracle, whatever became of recipes since.
From the recipe: the inputs are made again and have to be those of the bundle, then the oracle says what is right; of
checks of conduct, of ranks, of open codes, and of a backend that promises otherwise than the one that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from conformance.cases import Case, all_cases
from conformance.goals import Goal
from conformance.replay.bundle import Bundle, BundleError
from conformance.replay.taken import asked_inputs
from conformance.sources import Computed, Source
from conformance.sources.asked import (
    LinearAsked,
    MoeAsked,
    QuantizationAsked,
    RoutingAsked,
    SwigluAsked,
)
from conformance.vectors.contracts import canonical
from conformance.vectors.document import Vector, VectorSet
from conformance.vectors.formats import format_of
from conformance.vectors.roles import check_extra, check_roles
from conformance.vectors.stored import Stored
from conformance.vectors.tensors import VectorError
from reference.bounds import Contract

T = TypeVar("T", LinearAsked, MoeAsked, QuantizationAsked, RoutingAsked, SwigluAsked)


def source_of(bundle: Bundle, contract: Contract) -> Source:
    """What asks the bundle of a backend with this promise. Raises BundleError where it cannot be asked."""
    case = bundle.case
    if bundle.complete and canonical(contract, case) == canonical(bundle.contract, case):
        return Bundled(bundle)
    _check_recipe(bundle)
    return Computed()


def source_name(source: Source) -> str:
    return "the bundle's tensors" if isinstance(source, Bundled) else "the case's recipe and the oracle"


def _check_recipe(bundle: Bundle) -> None:
    """The recipe makes the inputs of the bundle, or what it expects is of something else."""
    case = bundle.case
    if not bundle.inputs and case.id in all_cases():
        return
    why = "" if bundle.complete else "its tensors do not say all that is right, and "
    if bundle.complete:
        check(bundle)  # the sizes are those of the tensors: no recipe is asked for more
    elif case.id not in all_cases():
        most = max((array.size for array in bundle.inputs.values()), default=0)
        if max(case.m, case.n, case.k, case.experts) > max(most, 1):
            raise BundleError(
                f"{bundle.path}: case: its sizes are not those of its inputs; write the bundle anew"
            )
    try:
        made = asked_inputs(case)
    except (AssertionError, ValueError, ArithmeticError, LookupError) as error:
        raise BundleError(f"{bundle.path}: case: {why}no recipe makes it: {error}") from error
    same = made.keys() == bundle.inputs.keys() and all(
        array.dtype == bundle.inputs[role].dtype and np.array_equal(_bits(array), _bits(bundle.inputs[role]))
        for role, array in made.items()
    )
    if not same:
        raise BundleError(
            f"{bundle.path}: inputs.safetensors: {why}the recipe of this version makes other data of the case; "
            "replay it with the version that wrote it (environment.json), and a backend of the same promise"
        )


def _bits(array: Any) -> Any:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).reshape(*array.shape, -1)


def check(bundle: Bundle) -> Vector:
    """The bundle as a vector. Raises BundleError for tensors that are not those of its case."""
    case = bundle.case
    vector = Vector(
        case.id, case.operation, not bundle.control, {**bundle.format, **format_of(case)}, case.clauses, (),
        bundle.inputs, bundle.expected, bundle.control, bundle.reason, str(bundle.path),
    )  # fmt: skip
    try:
        check_roles(vector, case)
        check_extra(vector, case)
    except VectorError as error:
        raise BundleError(f"{error}; write the bundle anew with `quantcts run --bundles DIR`") from error
    return vector


class Bundled(Stored):
    """A set of one vector, whose alternatives were made under the promise of the backend that failed."""

    def __init__(self, bundle: Bundle) -> None:
        vector = check(bundle)
        self.set = VectorSet(bundle.path, "", "", {}, {}, {vector.id: vector})
        self.cases, self.elsewhere = {vector.id: bundle.case}, []

    def activation_quantization(self, case: Case) -> QuantizationAsked:
        return _held(super().activation_quantization(case))

    def linear(self, case: Case) -> LinearAsked:
        return _held(super().linear(case))

    def routing(self, case: Case) -> RoutingAsked:
        return _held(super().routing(case))

    def swiglu(self, case: Case) -> SwigluAsked:
        return _held(super().swiglu(case))

    def moe(self, case: Case) -> MoeAsked:
        return _held(super().moe(case))


def _held(asked: T) -> T:
    """Goals of the one promise that there is: it was compared with the backend's, and stands under every name."""
    return replace(asked, goal=partial(_goal, asked.goal))


def _goal(goal: Callable[[Contract], Goal], _: Contract) -> Goal:
    return goal(Contract())
