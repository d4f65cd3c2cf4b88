"""Tensors of more than 2^31 elements: offsets that 32 bits do not hold (C121).

The large layer repeats the rows of a small one, in weights and in x, so that every output of the large is one of the
small: y[m, n] = small[m mod M', n mod N']. An offset that wraps around by 2^31 or 2^32 elements or bytes meets another
row of the small one, whose numbers of rows divide no power of two. Windows of the size of the small output are read: at
both ends, and where offsets pass 2^31.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.arrays import WrongAnswer, from_backend, to_backend
from conformance.backend import Checkpoint, device_of
from conformance.conduct.observed import Array, Observed, Output, Question
from conformance.subject import Subject, handed_layer
from reference.rounding import float_format

# Of the small layer, at most
ROWS, FEATURES = 33, 193
BOUNDARY = 2**31


def overflow(subject: Subject, questions: Sequence[Question]) -> Observed:
    """A dense layer of the case's M and N, made of the small one of the question."""
    question, case, backend = questions[0], subject.case, subject.backend
    small = question.checkpoint
    assert isinstance(small, Checkpoint)
    features = int(small.tensors["weight_shape"][0])
    dtype = float_format(small.dtype).dtype
    layer = _load(subject, small, features)
    shape = (case.m, case.n)
    parts: dict[tuple[int, int], list[Array]] = {}
    for (x,) in question.calls:
        rows = len(x)
        wide = to_backend(x, backend)[_indices(case.m, rows, backend)]
        answer = layer(wide)
        if tuple(answer.shape) != shape:
            raise WrongAnswer(f"returned shape {list(answer.shape)}, expected {list(shape)}")
        for top, left in _windows(case.m, case.n, case.k, rows, features):
            window = answer[top : top + rows, left : left + features]
            found = from_backend(_contiguous(window), backend, dtype, (rows, features))
            turned = np.empty_like(found)
            turned[np.ix_((top + np.arange(rows)) % rows, (left + np.arange(features)) % features)] = found
            parts.setdefault((top, left), []).append(turned)
    del layer, answer, wide
    free_memory(backend)
    outputs = tuple(
        Output(f"rows from {top} and columns from {left} of [{case.m}, {case.n}]", np.concatenate(part))
        for (top, left), part in parts.items()
    )
    return Observed(outputs, seen=f"{len(outputs)} windows of an output [{case.m}, {case.n}]")


def free_memory(backend: Any) -> None:
    """Give back what torch keeps of the GPU's memory: the next backend needs as much."""
    if device_of(backend).startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def _load(subject: Subject, small: Checkpoint, features: int) -> Callable[[Any], Any]:
    """The large layer. Tensors of the small one that have a row a feature are repeated on the device."""
    n, backend = subject.case.n, subject.backend
    shape = {"weight_shape": np.array([n, subject.case.k], np.int64)}
    handed = handed_layer(
        replace(small, tensors={**small.tensors, **shape}), lambda array: to_backend(array, backend)
    )
    rows = _indices(n, features, backend)
    tensors = {name: t if name in shape else t[rows] for name, t in handed.tensors.items()}
    made: Callable[[Any], Any] = backend.load_linear(replace(handed, tensors=tensors))  # type: ignore[attr-defined]
    return made


def _indices(count: int, period: int, backend: Any) -> Any:
    return to_backend(np.arange(count, dtype=np.int64) % period, backend)


def _windows(m: int, n: int, k: int, rows: int, features: int) -> Iterator[tuple[int, int]]:
    """First row and column of each, without repetition: at the ends, and where m·N + n, n·K + k or m·K + k passes
    2^31."""
    tops = (0, BOUNDARY // n - rows // 2, BOUNDARY // k - rows // 2, m - rows)
    lefts = (0, BOUNDARY // k - features // 2, n - features)
    found = {
        (top, left) for top in tops for left in lefts if 0 <= top <= m - rows and 0 <= left <= n - features
    }
    yield from sorted(found)


def _contiguous(window: Any) -> Any:
    return window.copy() if isinstance(window, np.ndarray) else window.contiguous()
