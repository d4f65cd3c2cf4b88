"""Checks that only call: the same again, what calls leave behind, two layers in turn, no rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.arrays import WrongAnswer, from_backend
from conformance.backend import nondeterminism_of
from conformance.conduct.loaded import Array, Loaded, difference, distinct, overwrite
from conformance.conduct.observed import Observed, Output, Question
from conformance.subject import Subject, describe

ORDINALS = ("first", "second", "third", "fourth", "fifth")
ARGUMENTS = ("x", "the router weights", "the ids")


def repeat(subject: Subject, questions: Sequence[Question]) -> Observed:
    """The same calls five times, with fresh copies of the same inputs (C110)."""
    loaded = Loaded(subject, questions[0])
    answers = [loaded.answers() for _ in ORDINALS]
    outputs = distinct(
        [Output(f"the {o} of {len(answers)} equal calls", a) for o, a in zip(ORDINALS, answers, strict=True)]
    )
    found = [
        (o, where) for o, a in zip(ORDINALS, answers, strict=True) if (where := difference(answers[0], a))
    ]
    if not found:
        return Observed(outputs, seen=f"{len(answers)} equal calls give equal bits")
    said = f"the {found[0][0]} of {len(answers)} equal calls differs in {found[0][1]}"
    declared = nondeterminism_of(subject.backend)
    if declared:
        return Observed(outputs, notes=(f"declared nondeterministic ({declared}): {said}",))
    return Observed(outputs, faults=(f"{said}; it does not declare itself nondeterministic",))


def inputs(subject: Subject, questions: Sequence[Question]) -> Observed:
    """What was handed over is read again after loading, and after each call (C111)."""
    question = questions[0]
    loaded = Loaded(subject, question)
    faults = _changed(loaded, "loading", question.checkpoint.tensors, loaded.handed.tensors)
    parts = []
    for call in question.calls:
        handed = loaded.hand(call)
        parts.append(loaded.array(loaded.run(handed), len(call[0])))
        names = ARGUMENTS[: len(call)]
        faults += _changed(
            loaded, "a call", dict(zip(names, call, strict=True)), dict(zip(names, handed, strict=True))
        )
    if not faults:
        faults = _changed(loaded, "a call", question.checkpoint.tensors, loaded.handed.tensors)
    output = Output("while its inputs were watched", np.concatenate(parts))
    return Observed((output,), tuple(dict.fromkeys(faults)), seen="inputs and tensors are unchanged")


def _changed(loaded: Loaded, act: str, before: Any, handed: Any) -> list[str]:
    """A sentence for each array that is not what it was. before, handed: name -> array, on either side."""
    faults = []
    for name, array in before.items():
        try:
            after = from_backend(handed[name], loaded.backend, array.dtype, array.shape)
        except WrongAnswer as error:
            faults.append(f"{act} changed {name}: {error}")
            continue
        where = difference(array, after)
        if where is not None:
            faults.append(f"{act} changed {name}: {where}")
    return faults


def outputs(subject: Subject, questions: Sequence[Question]) -> Observed:
    """An answer outlives the next call, and is its caller's to write over (C112)."""
    loaded = Loaded(subject, questions[0])
    kept = []  # what came back, and what was in it at once
    for call in (*loaded.calls, *reversed(loaded.calls)):
        raw = loaded.run(loaded.hand(call))
        kept.append((raw, loaded.array(raw, len(call[0]))))
    faults = []
    for raw, array in kept:
        where = difference(array, loaded.array(raw, len(array)))
        if where is not None:
            faults.append(f"a later call changed the answer to an earlier one: {where}")
    for raw, _ in kept if not faults else []:
        try:
            overwrite(raw)
        except Exception as error:  # read-only, or one number for many
            faults.append(f"an answer cannot be written over by its caller: {describe(error)}")
    read = [array for _, array in kept[: len(loaded.calls)]]
    found = [Output("two calls", np.concatenate(read))]
    if not faults:
        found.append(Output("after earlier answers were written over", loaded.answers()))
    return Observed(distinct(found), tuple(faults[:1]), seen="each call returns an array of its own")


def alternating(subject: Subject, questions: Sequence[Question]) -> Observed:
    """Two layers of one shape, both loaded, then called in turn (C115)."""
    layers = [Loaded(subject, question) for question in questions]
    parts: list[list[Array]] = [[] for _ in layers]
    for calls in zip(*(layer.calls for layer in layers), strict=True):
        for layer, call, part in zip(layers, calls, parts, strict=True):
            part.append(layer.answer(call))
    found = [
        Output(f"the {ORDINALS[number]} of two layers called in turn", np.concatenate(part), number)
        for number, part in enumerate(parts)
    ]
    return Observed(tuple(found), seen="two layers of one shape keep apart")


def empty(subject: Subject, questions: Sequence[Question]) -> Observed:
    """A call without rows, then the others (C116)."""
    loaded = Loaded(subject, questions[0])
    loaded.answer(tuple(array[:0] for array in loaded.calls[0]))
    output = Output("after a call without rows", loaded.answers())
    return Observed((output,), seen=f"no rows give shape [0, {loaded.width}]")
