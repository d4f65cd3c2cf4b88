"""Checks of how rows and columns lie: strided inputs, a row alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.arrays import WrongAnswer
from conformance.conduct.loaded import Inputs, Loaded, difference, distinct, refusal
from conformance.conduct.observed import Observed, Output, Question
from conformance.subject import Subject

# Elements beside a slice: 16 bytes of x, so that its rows stay aligned
_MARGIN = 8


def strided(subject: Subject, questions: Sequence[Question]) -> Observed:
    """x as views of larger arrays; of experts also the router weights and ids as slices (C113).

    What lies around them is NaN, or no expert.
    """
    loaded = Loaded(subject, questions[0])
    found = [Output("x as it is", loaded.answers())]
    notes: list[str] = []
    faults: list[str] = []
    for how, arrange in _manners(len(loaded.calls[0])).items():
        try:
            found.append(Output(how, loaded.answers(arrange)))
        except WrongAnswer:
            raise
        except Exception as error:
            said, why = refusal(f"it refuses {how}", error)
            (notes if why else faults).append(said)
    return Observed(
        distinct(found), tuple(faults), tuple(notes), seen="strides and offsets of x are followed"
    )


def _manners(arguments: int) -> dict[str, Callable[[Inputs], Inputs]]:
    def of_x(view: Callable[[Any], Any]) -> Callable[[Inputs], Inputs]:
        return lambda inputs: [view(inputs[0]), *inputs[1:]]

    found = {
        "x as a slice of columns": of_x(columns),
        "a transposed x": of_x(transposed),
        "x at an odd offset": of_x(odd),
    }
    if arguments > 1:
        found["router weights and ids as slices of columns"] = lambda inputs: [
            inputs[0],
            *(columns(array) for array in inputs[1:]),
        ]
    return found


def columns(array: Any) -> Any:
    """The same rows (M, K) as columns 8 to 8 + K of (M, K + 16)."""
    rows, width = array.shape
    wide = filled(array, (rows, width + 2 * _MARGIN))
    wide[:, _MARGIN : _MARGIN + width] = array
    return wide[:, _MARGIN : _MARGIN + width]


def transposed(array: Any) -> Any:
    """The same numbers (M, K), each column contiguous."""
    tall = filled(array, (array.shape[1], array.shape[0]))
    tall[...] = array.T
    return tall.T


def odd(array: Any) -> Any:
    """The same rows (M, K), contiguous, from the second element of their memory on: numbers of 16 bits lie at an
    address that 4 does not divide."""
    rows, width = array.shape
    flat = filled(array, (rows * width + 1,))
    view = flat[1:].reshape(rows, width)
    view[...] = array
    return view


def filled(like: Any, shape: tuple[int, ...]) -> Any:
    """Memory of the same kind, dtype and device, of NaN or, for integers, of -1."""
    if isinstance(like, np.ndarray):
        return np.full(shape, -1 if np.issubdtype(like.dtype, np.integer) else np.nan, like.dtype)
    return like.new_full(shape, float("nan") if like.is_floating_point() else -1)


def batch(subject: Subject, questions: Sequence[Question]) -> Observed:
    """Each row alone, and among all of its batch (C114)."""
    loaded = Loaded(subject, questions[0])
    together = loaded.answers()
    rows = [tuple(array[i : i + 1] for array in call) for call in loaded.calls for i in range(len(call[0]))]
    alone = np.concatenate([loaded.answer(row) for row in rows])
    size = len(loaded.calls[0][0])
    found = distinct([Output(f"a batch of {size} rows", together), Output("each row alone", alone)])
    where = difference(together, alone)
    if where is None:
        return Observed(found, seen="batch invariant")
    return Observed(
        found, notes=(f"not batch invariant: rows alone differ from a batch of {size} in {where}",)
    )
