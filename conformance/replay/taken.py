"""From a failing case to its bundle: inputs, what is right under the backend's promise, what came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.cases import Case
from conformance.conduct.problems import conduct_problems
from conformance.data import linear_problem, moe_problem, swiglu_problem
from conformance.data.sharding import parallel_problem
from conformance.replay.bundle import Bundle, Tensors
from conformance.subject import Answer
from conformance.vectors.bounded import NotStorable, stored
from conformance.vectors.document import Entry
from conformance.vectors.formats import moe_fields
from conformance.vectors.made import Parts, parts
from conformance.vectors.tensors import MOST_BYTES
from conformance.verdict import Verdict
from reference.bounds import Contract, Expected

_NAME = "judged"
_PROBLEMS: Mapping[str, Callable[[Case], Any]] = {
    "linear": linear_problem, "moe": moe_problem, "swiglu": swiglu_problem,
}  # fmt: skip
# What an operation answers, in its order
_ROLES = {
    "packing": ("codes",),
    "dequantize": ("weight",),
    "activation_quantization": ("codes", "scale", "zero_point"),
    "routing": ("weights", "ids"),
    "moe_align": ("sorted_ids", "expert_ids", "num_tokens_post_pad"),
}


def taken(
    case: Case, verdict: Verdict, spec: str, contract: Contract, answer: Answer | None, step: str = ""
) -> Bundle:
    """The bundle of a failing verdict. Tensors of more bytes than a bundle takes are left to the case's recipe."""
    (inputs, extra, entries, control), complete = _asked(case, contract)
    bundle = Bundle(
        case, verdict.backend, spec, contract, verdict.outcome.value, verdict.detail, complete, extra, inputs, control,
        tuple(
            Entry(tuple(alternatives), tensors, more.get("rank"), more.get("intermediate"))
            for alternatives, tensors, more in entries
        ),
        actual_of(case, answer, step),
        fault_of(verdict), step, f"bad data: {case.recipe}" if control else "",
    )  # fmt: skip
    if _bytes(inputs, control, *(e.tensors for e in bundle.expected)) > MOST_BYTES // 2:
        bundle = replace(bundle, inputs={}, control={}, expected=(), complete=False)
    return replace(bundle, actual={}) if _bytes(bundle.actual) > MOST_BYTES // 2 else bundle


def fault_of(verdict: Verdict) -> str:
    """The known fault that the diagnosis names, if any."""
    return str((verdict.diagnosis or {}).get("fault", ""))


def actual_of(case: Case, answer: Answer | None, step: str = "") -> Tensors:
    """The arrays of an answer by role."""
    if answer is None or answer.arrays is None:
        return {}
    if case.operation == "conduct" and answer.observed is not None:
        return {f"{i}.y": np.ascontiguousarray(array) for i, array in enumerate(answer.arrays)}
    if step == "pack":
        return {"words": answer.arrays[0]}
    roles = _ROLES.get(case.operation, ("y",))
    if len(roles) < len(answer.arrays):  # the tensors of a shard
        roles = tuple(f"{i}" for i in range(len(answer.arrays)))
    return dict(zip(roles, answer.arrays, strict=False))


def _asked(case: Case, contract: Contract) -> tuple[Parts, bool]:
    """What the case asks, and whether the tensors say all that is right."""
    if case.operation == "conduct":
        problems = conduct_problems(case)
        found = [_asked(problem.case, contract)[0][2] for problem in problems]
        return (asked_inputs(case), {}, [entry for entries in found for entry in entries], {}), False
    if case.operation == "moe_parallel":
        problem = parallel_problem(case)
        extra = moe_fields(problem.whole.checkpoint)
        return (asked_inputs(case), extra, [_plain(problem.expected(contract))], {}), False
    try:
        return parts(case, {_NAME: contract}), True
    except NotStorable:
        inputs, extra, _, _ = parts(case, {})
        make = _PROBLEMS.get(case.operation)
        entries = [] if make is None else [_plain(make(case).expected(contract))]
        return (inputs, extra, entries, {}), False


def _bytes(*tensors: Tensors) -> int:
    return sum(array.nbytes for each in tensors for array in each.values())


def _plain(expected: Expected) -> tuple[Any, Tensors, dict[str, Any]]:
    """The ends around the answers of the plain codes; those of codes that may flip are not among them."""
    plain = {name: replace(h, flips={}) for name, h in expected.hypotheses.items()}
    alternatives, tensors = stored({_NAME: replace(expected, hypotheses=plain)})
    return alternatives, tensors, {}


def asked_inputs(case: Case) -> Tensors:
    """What the recipe of a case hands to a backend, by role."""
    if case.operation == "conduct":
        problems = enumerate(conduct_problems(case))
        return {f"{i}.{role}": a for i, problem in problems for role, a in asked_inputs(problem.case).items()}
    return parts(case, {})[0]
