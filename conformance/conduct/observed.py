"""What a check of conduct is given, and what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from conformance.backend import Checkpoint, MoeCheckpoint

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Question:
    """A layer and what it is called with, on the judge's side. calls: (x,) each of a dense layer, (x, weights, ids) of
    experts."""

    checkpoint: Checkpoint | MoeCheckpoint
    calls: tuple[tuple[Array, ...], ...]


@dataclass(frozen=True)
class Output:
    """The answers to all calls of a question, one below the other. how: the layer was called, in words; question: its
    number."""

    how: str
    array: Array
    question: int = 0


@dataclass(frozen=True)
class Observed:
    """outputs: to be held against what is expected. faults: what the backend did that it must not, a sentence each.
    notes: what is odd, and allowed. seen: what is good to know of a backend that conforms. spent: the process should
    not be asked again."""

    outputs: tuple[Output, ...]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen: str = ""
    spent: bool = False
