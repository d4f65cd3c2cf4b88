"""A layer of the backend's as the checks call it, and how two answers compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.arrays import from_backend, poison, to_backend
from conformance.backend import Checkpoint, MoeCheckpoint
from conformance.conduct.observed import Output, Question
from conformance.subject import Subject, handed_layer, refused_or_crashed
from reference.rounding import float_format

Array = npt.NDArray[Any]
Call = tuple[Array, ...]
# A call as it is handed over
Inputs = list[Any]

UNSAID = "without a message"


class Loaded:
    """Loading is the backend's first act here: its refusal goes through. handed: the layer as it got it. place: what
    else is done to each array that it is given."""

    def __init__(
        self, subject: Subject, question: Question, place: Callable[[Any], Any] = lambda array: array
    ) -> None:
        backend: Any = subject.backend
        self.backend = backend
        self.calls = question.calls
        self._place = place
        checkpoint = question.checkpoint
        if isinstance(checkpoint, Checkpoint):
            self.width = int(checkpoint.tensors["weight_shape"][0])
            load = self.backend.load_linear
        else:
            self.width = checkpoint.hidden
            load = self.backend.load_moe
        self.dtype = float_format(checkpoint.dtype).dtype
        self.handed: Checkpoint | MoeCheckpoint = handed_layer(checkpoint, self._handed)
        self.layer: Callable[..., Any] = load(self.handed)
        subject.remember(lambda: [self.layer(*self.hand(call)) for call in self.calls])

    def hand(self, call: Call) -> Inputs:
        """Fresh copies, in the backend's own kind and on its device."""
        return [self._handed(array) for array in call]

    def _handed(self, array: Any) -> Any:
        return None if array is None else self._place(to_backend(array, self.backend))

    def run(self, inputs: Inputs) -> Any:
        """One call, into memory full of NaN; what came back, as it came."""
        poison(len(inputs[0]) * self.width * self.dtype.itemsize, self.backend)
        return self.layer(*inputs)

    def array(self, output: Any, rows: int) -> Array:
        """What came back as an array (rows, N). Raises WrongAnswer for another kind, dtype or shape."""
        return from_backend(output, self.backend, self.dtype, (rows, self.width)).copy()

    def answer(self, call: Call, arrange: Callable[[Inputs], Inputs] = lambda inputs: inputs) -> Array:
        """One call and its answer. arrange: what is done to the inputs first."""
        return self.array(self.run(arrange(self.hand(call))), len(call[0]))

    def answers(self, arrange: Callable[[Inputs], Inputs] = lambda inputs: inputs) -> Array:
        """The answers to all calls, one below the other."""
        return np.concatenate([self.answer(call, arrange) for call in self.calls])


def overwrite(output: Any) -> None:
    """NaN in every element of what came back, whether the backend computes in torch's inference mode or not."""
    if isinstance(output, np.ndarray):
        output[...] = np.nan
        return
    import torch

    with torch.inference_mode():
        output.fill_(float("nan"))


def difference(before: Array, after: Array) -> str | None:
    """Where two arrays of one shape and dtype differ in their bits, in words; None where they do not."""
    wrong = bits(before) != bits(after)
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    count = f"{int(wrong.sum())} of {wrong.size} elements"
    return f"{count}, first at {list(index)}: {before[index]}, then {after[index]}"


def bits(array: Array) -> Array:
    """The same memory as unsigned integers: -0 is not 0, and NaN equals itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def refusal(what: str, error: Exception) -> tuple[str, bool]:
    """The sentence for an exception where a refusal is legal, and whether it says why. Raises what is no refusal."""
    answer = refused_or_crashed(error, claimed=True)
    if answer.refusal is None:
        raise error
    return f"{what}: {answer.refusal}", not answer.refusal.endswith(UNSAID)


def distinct(outputs: Iterator[Output] | list[Output]) -> tuple[Output, ...]:
    """The first of each value: what is equal bit for bit is judged once."""
    found: dict[tuple[int, bytes], Output] = {}
    for output in outputs:
        found.setdefault((output.question, output.array.tobytes()), output)
    return tuple(found.values())
