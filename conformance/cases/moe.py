"""The matrix of mixtures of experts: routers, gated activations, the fused layer, its division over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.cases.case import DTYPES, NO_WEIGHT, Case
from conformance.cases.dense import QUANTIZED_ACTIVATIONS, weight_formats
from reference.formats import ActivationFormat, WeightFormat
from reference.swiglu import VARIANTS

A16 = ActivationFormat()

SWIGLU_SHAPES = ((1, 64), (3, 17), (33, 96), (257, 40), (7, 1), (0, 64))  # (rows, I)
SWIGLU_RECIPES = ("random", "limits", "wide")

# The variants that the fused layer meets; the others differ in what test_swiglu sees.
MOE_VARIANTS = ("silu", "silu-limit", "swigluoai", "swigluoai-halves", "swiglustep", "gelu-tanh")
# (tokens, experts, top_k, hidden, intermediate). A group takes the shapes whose hidden and intermediate it divides.
MOE_SHAPES = (
    # multiples of 128: every format
    (3, 8, 2, 128, 256),
    (3, 8, 2, 256, 128),
    (1, 4, 1, 128, 128),
    (33, 4, 2, 128, 128),
    (3, 4, 4, 128, 128),
    # no multiples of 64
    (33, 8, 2, 96, 32),
    (3, 8, 2, 32, 160),
    # K * bits no multiple of 32, in either projection
    (33, 8, 2, 50, 74),
    (3, 8, 8, 90, 50),
    (1, 4, 1, 33, 17),
)
# Many experts and many tokens take long: they come once in so many turns.
LARGE_MOE_SHAPES = (
    (257, 4, 2, 128, 128),
    (33, 60, 6, 128, 128),
    (3, 128, 8, 128, 128),
    (1, 256, 6, 128, 128),
    (33, 128, 8, 32, 64),
    (3, 256, 8, 64, 32),
    (257, 8, 2, 64, 96),
    (33, 60, 2, 50, 34),
)
_LARGE_EVERY = 11
# Recipes that ask for one property of the layer, a few cells of each format
MOE_SITUATIONS = ("one-expert", "absent", "unrouted", "shared", "on-input", "empty")
MOE_EXACT_RECIPES = ("readout", "integers")


def moe_cases() -> Iterator[Case]:
    yield from _swiglu()
    yield from _moe()


def _swiglu() -> Iterator[Case]:
    for dtype in DTYPES:
        for turn, variant in enumerate(VARIANTS):
            for r, recipe in enumerate(SWIGLU_RECIPES):
                for i, (m, n) in enumerate(SWIGLU_SHAPES):
                    quick = i in ((turn + r) % 6, (turn + r + 3) % 6)
                    yield Case("swiglu", NO_WEIGHT, recipe, n, m=m, dtype=dtype, variant=variant, quick=quick)


def _shape(fmt: WeightFormat, turn: int) -> tuple[int, int, int, int, int]:
    """One that the format takes, in turn."""
    size = max(fmt.group_size, 1)
    table = LARGE_MOE_SHAPES if turn % _LARGE_EVERY == 0 else MOE_SHAPES
    fitting = [s for s in table if s[3] % size == 0 and s[4] % size == 0]
    number = turn // _LARGE_EVERY if table is LARGE_MOE_SHAPES else turn
    return fitting[number % len(fitting)]


def _moe() -> Iterator[Case]:
    activations = (A16, *QUANTIZED_ACTIVATIONS)
    for f, fmt in enumerate(weight_formats()):
        for a, activation in enumerate(activations):
            for d, dtype in enumerate(DTYPES):
                for v, variant in enumerate(MOE_VARIANTS):
                    turn = f + 5 * a + 3 * d + 7 * v
                    quick = _paired(fmt, a, d, v)
                    for r, recipe in enumerate(("random", "integers")):
                        t, e, k, h, i = _shape(fmt, turn + 2 * r)
                        yield Case(
                            "moe", fmt, recipe, i, h, t, dtype, activation, bias=(turn + r) % 2 == 0,
                            experts=e, top_k=k, variant=variant, quick=quick,
                        )  # fmt: skip
                yield from _situations(fmt, f + a + 3 * d, activation, dtype)


def _situations(fmt: WeightFormat, turn: int, activation: ActivationFormat, dtype: str) -> Iterator[Case]:
    """Two of the situations, the readout and, for groups of 128, act-order, with variants in turn."""
    for i in range(2):
        recipe = MOE_SITUATIONS[(turn + 2 * i) % len(MOE_SITUATIONS)]
        variant = MOE_VARIANTS[(turn + 3 * i) % len(MOE_VARIANTS)]
        t, e, k, h, n = _shape(fmt, 3 * turn + i)
        t = max(t, 3)
        t, k = {"empty": 0}.get(recipe, t), {"on-input": 1, "one-expert": 1}.get(recipe, k)
        yield Case(
            "moe", fmt, recipe, n, h, t, dtype, activation, bias=turn % 2 == i,
            experts=e, top_k=k, variant=variant, quick=turn % 7 == i,
        )  # fmt: skip
    variant = MOE_VARIANTS[turn % len(MOE_VARIANTS)]
    t, e, k, h, n = _shape(fmt, 3 * turn + 2)
    yield Case(
        "moe", fmt, "readout", n, h, t, dtype, activation,
        experts=e, top_k=k, variant=variant, quick=turn % 7 == 2,
    )  # fmt: skip
    if fmt.group_size == 128:
        recipe = ("random", "integers")[turn % 2]
        yield Case(
            "moe", fmt, recipe, 256, 256, 33, dtype, activation, act_order=True,
            experts=8, top_k=2, variant=variant, quick=turn % 7 in (3, 4),
        )  # fmt: skip
    if turn % 4 == 0:  # an odd number of slots: sums over pairs leave one out
        yield Case(
            "moe", fmt, "random", 128, 128, 5, dtype, activation,
            experts=8, top_k=3, variant=variant, quick=turn % 7 == 4,
        )  # fmt: skip


def _paired(fmt: WeightFormat, a: int, d: int, v: int) -> bool:
    """Two cells for each pair of width and variant, the other properties turning with both: every pair of
    properties is met, which a test counts."""
    b = fmt.bits - 2
    group = (-1, 32, 128).index(fmt.group_size)
    return any(
        (group, fmt.symmetric, a, d)
        == ((b + v + s) % 3, (b // 2 + v + s) % 2 == 0, (b + v // 2 + 2 * s + v) % 4, (b + v // 3 + s) % 2)
        for s in (0, 1)
    )
