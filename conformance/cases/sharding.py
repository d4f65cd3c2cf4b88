"""The matrix of divided layers: what each rank holds, which cuts are refused, what the ranks add up to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from conformance.cases.case import DTYPES, Case
from conformance.cases.dense import QUANTIZED_ACTIVATIONS, weight_formats
from reference.formats import ActivationFormat, WeightFormat

RANKS = ("tp2", "tp4", "ep2", "ep4")
# Halves and pairs of rows are cut in different ways: the seed of a case counts them.
ARRANGEMENTS = ("silu", "swigluoai")

ACTIVATIONS = (ActivationFormat(), *QUANTIZED_ACTIVATIONS)
PARALLEL_VARIANTS = ("silu", "swigluoai", "silu-limit", "gelu-tanh", "swiglustep")
# (tokens, experts, top_k)
PARALLEL_LOADS = (
    (33, 8, 2),
    (3, 4, 2),
    (33, 60, 6),
    (1, 8, 2),
    (33, 4, 4),
    (3, 60, 6),
    (33, 8, 1),
    (0, 8, 2),
)


def sharding_cases() -> Iterator[Case]:
    yield from _sharding()
    yield from _moe_parallel()


def _share(fmt: WeightFormat) -> int:
    """Columns of w2 that fill whole words."""
    return 32 // math.gcd(fmt.bits, 32)


def legal_shape(fmt: WeightFormat, ranks: str) -> tuple[int, int]:
    """Hidden and intermediate size that so many ranks can divide: few whole words and groups a rank, and for `ep`,
    which cuts neither, what is ragged if the groups allow it."""
    count = int(ranks[2:])
    if fmt.strategy != "group":
        return (50, 3 * _share(fmt) * count) if ranks[:2] == "tp" else (50, 34)
    if fmt.group_size == 32:
        return (96, 96 * count) if ranks[:2] == "tp" else (96, 32)
    return (128, 512) if ranks[:2] == "tp" else (128, 128)


def illegal_shapes(fmt: WeightFormat, count: int) -> Iterator[tuple[int, int]]:
    """Hidden and intermediate sizes that cannot be cut: inside a word, inside a column, inside a group."""
    if fmt.strategy == "group":
        yield fmt.group_size, 3 * fmt.group_size
        return
    share = _share(fmt)
    yield 50, (share + 1) * count
    yield 50, 3 * share * count // 2
    yield 50, 3 * share * count + 1


def _sharding() -> Iterator[Case]:
    for f, fmt in enumerate(weight_formats()):
        for r, ranks in enumerate(RANKS):
            h, i = legal_shape(fmt, ranks)
            cut = ranks[:2] == "tp"
            for seed, variant in enumerate(ARRANGEMENTS if cut else ARRANGEMENTS[:1]):
                bias = (f + r + seed) % 2 == 0
                quick = seed == f // 2 % 2 if cut else (f + r) % 2 == 0
                yield Case(
                    "sharding", fmt, "uniform", i, h, bias=bias, experts=3 if cut else 5,
                    seed=seed, variant=variant, ranks=ranks, quick=quick and (f // 3 + r) % 2 == 0,
                )  # fmt: skip
            if f % 3 == r % 3:
                yield Case("sharding", fmt, "shared", i, h, experts=5, ranks=ranks, quick=f % 2 == 0)
            if not cut:
                continue
            if fmt.group_size == 128:  # under act-order a rank may hold half a group
                yield Case(
                    "sharding", fmt, "uniform", 256, 128, bias=f % 2 == 0,
                    act_order=True, experts=3, ranks=ranks, quick=(f // 2 + r) % 2 == 0,
                )  # fmt: skip
            for s, (h, i) in enumerate(illegal_shapes(fmt, int(ranks[2:]))):
                quick = (f + r + s) % 3 == 0
                yield Case("sharding", fmt, "illegal", i, h, experts=2, ranks=ranks, quick=quick)


# (a, b, c): the cell j of the format f takes the value (a f + b j + f // c) of a property, modulo their number. Found
# by search: pairs of properties meet, which a test counts.
_PACES = {
    "ranks": (2, 5, 2),
    "activation": (7, 4, 11),
    "dtype": (1, 1, 6),
    "variant": (3, 3, 2),
    "recipe": (4, 7, 6),
    "bias": (1, 3, 11),
    "load": (3, 4, 2),
}
_VALUES: dict[str, tuple[Any, ...]] = {
    "ranks": RANKS,
    "activation": ACTIVATIONS,
    "dtype": DTYPES,
    "variant": PARALLEL_VARIANTS,
    "recipe": ("random", "integers"),
    "bias": (False, True),
    "load": PARALLEL_LOADS,
}


def _moe_parallel() -> Iterator[Case]:
    """Three cells a format."""
    for f, fmt in enumerate(weight_formats()):
        for j in range(3):
            own = {
                name: values[(a * f + b * j + f // c) % len(values)]
                for (name, values), (a, b, c) in zip(_VALUES.items(), _PACES.values(), strict=True)
            }
            t, e, k = own.pop("load")
            if e == 60 and own["ranks"][:2] == "tp" and fmt.group_size == 128:
                e, k = 8, 2  # half a million weights an expert
            h, i = legal_shape(fmt, own["ranks"])
            quick = (3 * f + j) % 5 == (3 * f + j) // 25 % 5
            yield Case("moe_parallel", fmt, n=i, k=h, m=t, experts=e, top_k=k, quick=quick, **own)
