"""Small cases of every cell of dequantize, of the linear and of experts, for golden vectors.

They are judged where a query names them (`--cases '*golden-0'`), and from vectors. Shapes are the least that tell
formats apart: ragged rows of words for channels, two groups or more, a zero point's column that ends inside a word.
Cases of one weight format share a layer, those of one activation format and dtype their inputs.
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
    for f, fmt in enumerate(weight_formats()):
        for act_order in (False, True) if fmt.group_size == 128 else (False,):
            yield from _dense(f, fmt, act_order)
            # A layer with a g_idx for each width, symmetric and asymmetric in turn
            if not act_order or fmt.symmetric == (fmt.bits % 2 == 0):
                yield from _experts(f, fmt, act_order)


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
