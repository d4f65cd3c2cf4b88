"""Small cases of every cell of dequantize, of the linear and of experts, for golden vectors.

They are judged where a query names them (`--cases '*golden-0'`), and from vectors. Shapes are the least that tell
formats apart: ragged rows of words for channels, two groups or more, a zero point's column that ends inside a word.
Cases of one width and group size share codes, those of one activation format and dtype their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.cases.case import DTYPES, GOLDEN, Case
from conformance.cases.dense import QUANTIZED_ACTIVATIONS, weight_formats
from conformance.cases.moe import MOE_VARIANTS
from reference.formats import ActivationFormat, WeightFormat

ACTIVATIONS = (ActivationFormat(), *QUANTIZED_ACTIVATIONS)

ROWS, OUTPUTS = 3, 10
# Input features of a dense layer by group size; of a layer with a g_idx those of the group
FEATURES = {-1: 67, 32: 96, 128: 256}
# (tokens, experts, top_k, hidden, intermediate) by group size
LAYERS = {-1: (2, 3, 2, 33, 17), 32: (2, 3, 2, 32, 64), 128: (1, 2, 1, 128, 256)}


def golden_cases() -> Iterator[Case]:
    # More tokens of one expert than a block has rows
    yield Case("moe", WeightFormat.of(4, -1, True), GOLDEN, 17, 33, 66, experts=1, top_k=1)
    for f, fmt in enumerate(weight_formats()):
        yield from _dense(f, fmt, False)
        yield from _experts(f, fmt, False)
        # With a g_idx every width is met, symmetric and asymmetric in turn; experts, whose layers are large, once.
        if fmt.group_size == 128 and fmt.symmetric == (fmt.bits % 2 == 0):
            yield from _dense(f, fmt, True)
            if fmt.bits == 4:
                yield from _experts(f, fmt, True)


def _dense(f: int, fmt: WeightFormat, act_order: bool) -> Iterator[Case]:
    k = FEATURES[fmt.group_size]
    for d, dtype in enumerate(DTYPES):
        yield Case("dequantize", fmt, GOLDEN, OUTPUTS, k, dtype=dtype, act_order=act_order)
        for a, activation in enumerate(ACTIVATIONS):
            bias = (f + a + d) % 2 == 0
            yield Case("linear", fmt, GOLDEN, OUTPUTS, k, ROWS, dtype, activation, bias, act_order)


def _experts(f: int, fmt: WeightFormat, act_order: bool) -> Iterator[Case]:
    """The variants of the gated activation in turn: every pair of properties is met."""
    t, e, top_k, h, i = LAYERS[fmt.group_size]
    for d, dtype in enumerate(DTYPES):
        for a, activation in enumerate(ACTIVATIONS):
            turn = f + a + 3 * d + f // 6
            yield Case(
                "moe", fmt, GOLDEN, i, h, t, dtype, activation, bias=turn % 4 < 2, act_order=act_order,
                experts=e, top_k=top_k, variant=MOE_VARIANTS[turn % len(MOE_VARIANTS)],
            )  # fmt: skip
