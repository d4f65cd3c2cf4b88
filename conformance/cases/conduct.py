"""How a backend behaves beside what it computes: a few formats, dense layers and experts, one check a case.

| check       | what is done                                                | what is right                     |
| ----------- | ----------------------------------------------------------- | --------------------------------- |
| repeat      | the same call five times                                    | the same bits, unless declared    |
| inputs      | inputs and tensors are read again after loading and calling | they are what they were           |
| outputs     | answers are read again after later calls, then written over | each call has an array of its own |
| strided     | x as a slice of columns, transposed, at an odd offset       | right, or refused with a message  |
| batch       | each row alone and among 33                                 | right; equal bits are reported    |
| alternating | two layers of one shape, called in turn                     | each answers with its own weights |
| empty       | a call without rows, then others                            | shape (0, N), the others right    |
| stream      | on a second CUDA stream, where a slow kernel goes before    | right                             |
| graph       | captured in a CUDA graph, replayed with other inputs        | right, or the capture refused     |
| canary      | bands around every allocation, memory full of NaN           | the bands are whole               |
| device      | tensors on cuda:1 while cuda:0 is current                   | right, or refused with a message  |
| overflow    | more than 2^31 weights, outputs or activations              | right                             |

What follows `empty` is asked of CUDA devices alone; `overflow` takes most of a GPU and is judged only where a query
names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.cases.case import DTYPES, Case
from reference.formats import ActivationFormat, WeightFormat

A16 = ActivationFormat()

ROWS = 33  # no multiple of any tile
# Weight, activation, (N, K) of the dense layer, (experts, top_k, hidden, intermediate) of the experts
FORMATS = (
    (WeightFormat.of(4, 128, True), A16, (256, 512), (8, 2, 128, 256)),
    (WeightFormat.of(4, -1, False), A16, (192, 384), (8, 2, 128, 128)),
    (WeightFormat.of(3, 32, False), A16, (72, 544), (8, 2, 96, 160)),
    (WeightFormat.of(8, -1, True), ActivationFormat("int8"), (256, 256), (4, 2, 128, 256)),
    (WeightFormat.of(4, 128, True), ActivationFormat("fp8"), (128, 256), (8, 2, 256, 128)),
)
# Few columns and a long sum, which kernels split among thread blocks
LONG = (128, 4096)
# Every format, dense and experts
EVERYWHERE = ("repeat", "strided", "batch", "graph", "canary")
# Half of them, in turn
IN_TURN = ("inputs", "outputs", "alternating", "empty", "stream", "device")
# A process of its own for each takes seconds.
SLOW = ("canary",)
# (M, N, K): more than 2^31 weights; more than 2^31 outputs, and more than 2^32 bytes of them; as many activations
BEYOND = ((1, 2**18 + 2048, 8192), (65664, 32896, 128), (2**18 + 2048, 64, 8192))


def conduct_cases() -> Iterator[Case]:
    for f in range(len(FORMATS)):
        for kind in (0, 1):
            first = (f, kind) == (0, 0)  # what every library has meets every check
            for j, check in enumerate(EVERYWHERE):
                quick = f < 2 and f == kind if check in SLOW else first or (f + kind + j) % 2 == 0
                yield _case(f, kind, check, quick)
            for j, check in enumerate(IN_TURN):
                if first or (f + kind + j) % 2 == 0:
                    yield _case(f, kind, check, quick=f < 2)
    weight, activation, _, _ = FORMATS[0]
    for m, n, k in BEYOND:
        yield Case("conduct", weight, "overflow", n, k, m, DTYPES[0], activation)


def called(case: Case) -> tuple[Case, ...]:
    """The plain cases that a case calls its layer as, one for each number of rows: what a library compiles for."""
    if case.operation != "conduct":
        return (case,)
    rows = {"batch": (case.m, 1), "empty": (0, ROWS)}.get(case.recipe, (case.m,))
    return tuple(replace(case.plain, recipe="random" if m else "empty", m=m) for m in rows)


def _case(f: int, kind: int, check: str, quick: bool) -> Case:
    """kind: 0 a dense layer, 1 experts."""
    weight, activation, (n, k), (experts, top_k, hidden, intermediate) = FORMATS[f]
    rows = {"empty": 0, "graph": 1 if f % 2 == 0 else ROWS}.get(check, ROWS)
    dtype = DTYPES[(f + kind) % 2]
    if kind == 1:
        return Case(
            "conduct", weight, check, intermediate, hidden, rows, dtype, activation,
            experts=experts, top_k=top_k, quick=quick,
        )  # fmt: skip
    n, k = LONG if check == "repeat" else (n, k)
    return Case("conduct", weight, check, n, k, rows, dtype, activation, quick=quick)
