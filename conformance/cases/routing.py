"""The matrix of routers and of block alignment.

| recipe   | logits                                                                        |
| -------- | ----------------------------------------------------------------------------- |
| random   | normal; a bias as large as the spread of the scores                           |
| close    | apart by one step of their format, and in float32 by more than rounding hides |
| ties     | of few different numbers, as is the bias                                      |
| negative | normal; the bias so far below zero that every key is negative                 |
| poisoned | NaN, infinities and rows of nothing else among ordinary tokens                |
| wide     | up to some ten thousands                                                      |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.cases.case import NO_WEIGHT, Case
from reference.errors import FormatError
from reference.routing import Routing

LOGITS = ("bf16", "fp16", "fp32")
RECIPES = ("random", "close", "ties", "negative", "poisoned", "wide")

# Experts and top_k are those of the shape.
_ROUTINGS = (
    Routing(256, 8, "softmax", renormalize=False),
    Routing(256, 8, "softmax"),
    Routing(256, 8, "softmax-selected", renormalize=False),
    Routing(256, 8, "softmax", bias=True),
    Routing(256, 8, "sigmoid", renormalize=False),
    Routing(256, 8, "sigmoid"),
    Routing(256, 8, "sigmoid", bias=True, scaling=2.5),
    Routing(256, 8, "sigmoid", renormalize=False, bias=True, scaling=2.5),
    Routing(256, 8, "softmax", renormalize=False, groups=4, top_groups=2),
    Routing(256, 8, "softmax", renormalize=False, groups=4, top_groups=1, scaling=16.0),
    Routing(256, 8, "sigmoid", groups=4, top_groups=2),
    Routing(256, 8, "sigmoid", bias=True, groups=4, top_groups=2, group_score="sum-of-two"),
    Routing(256, 8, "sigmoid", bias=True, groups=8, top_groups=4, group_score="sum-of-two", scaling=2.5),
)
# (tokens, experts, top_k)
SHAPES = (
    (33, 8, 2),
    (17, 128, 8),
    (257, 60, 6),
    (3, 256, 8),
    (33, 4, 1),
    (1, 128, 6),
    (17, 8, 8),
    (257, 8, 1),
    (33, 256, 8),
    (3, 60, 2),
    (17, 4, 2),
    (33, 128, 1),
)
ODD = (33, 60, 3)  # sums over pairs leave one out
NO_TOKENS = (0, 128, 8)

BLOCKS = (16, 64)
ALIGN_SHAPES = (
    (33, 8, 2),
    (3, 128, 8),
    (257, 60, 6),
    (1, 4, 1),
    (17, 8, 8),
    (257, 256, 1),
    (257, 4, 2),
    (33, 256, 6),
)
ALIGN_RECIPES = ("random", "one-expert", "absent", "dropped", "absent-dropped")


def routing_cases() -> Iterator[Case]:
    yield from _routing()
    yield from _aligned()


def _routing() -> Iterator[Case]:
    for r, routing in enumerate(_ROUTINGS):
        shapes = [(s, fitted) for s in SHAPES if (fitted := _fitted(routing, s)) is not None]
        recipes = [recipe for recipe in RECIPES if recipe != "negative" or routing.bias]
        for d, dtype in enumerate(LOGITS):
            for i, recipe in enumerate(recipes):
                for j in range(3 if recipe == "random" else 2):
                    (m, e, k), fitted = shapes[(r + 2 * d + 5 * i + j) % len(shapes)]
                    quick = j == 0 and (i + d) % 2 == r % 2
                    yield _case(recipe, m, e, k, dtype, fitted, quick)
            odd = _fitted(routing, ODD)
            if odd is not None and d == r % 3:
                yield _case("random", *ODD, dtype, odd, True)
            empty = _fitted(routing, NO_TOKENS)
            if empty is not None:
                yield _case("random", *NO_TOKENS, dtype, empty, quick=d == r % 3)


def _case(recipe: str, m: int, e: int, k: int, dtype: str, routing: Routing, quick: bool) -> Case:
    return Case(
        "routing", NO_WEIGHT, recipe, m=m, dtype=dtype, experts=e, top_k=k, routing=routing, quick=quick
    )  # fmt: skip


def _fitted(routing: Routing, shape: tuple[int, int, int]) -> Routing | None:
    """The routing with the experts and top_k of a shape, None where its groups do not fit them."""
    try:
        return replace(routing, experts=shape[1], top_k=shape[2])
    except FormatError:
        return None


def _aligned() -> Iterator[Case]:
    for b, block in enumerate(BLOCKS):
        for r, recipe in enumerate(ALIGN_RECIPES):
            for i, (m, e, k) in enumerate(ALIGN_SHAPES):
                quick = i in ((b + r) % 3, 3 + (b + 2 * r) % 5)
                yield Case("moe_align", NO_WEIGHT, recipe, m=m, block=block, experts=e, top_k=k, quick=quick)
            yield Case("moe_align", NO_WEIGHT, recipe, m=0, block=block, experts=8, top_k=2, quick=r == b)
