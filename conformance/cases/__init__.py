"""The matrix as data: what is tested, enumerated once.

A case is one fully determined test. Its id is stable, readable and greppable, and the same everywhere:

    packing/w3/dim1/n7-k250/uniform-0
    dequantize/w3-g128-asym/bf16/n160-k384/uniform-0
    linear/w3-g128-asym/a16/bf16/m17-n72-k544-bias/random-0
    linear/w4-g128-sym/a-int8/bf16/m17-n160-k640/integers-0
    activation_quantization/a-int8/bf16/m17-k640/ties-0
    validation/w3-g32-asym/bf16/scale-nan
    routing/sigmoid-renorm-bias/bf16/t33-e60-k6/random-0
    moe_align/b16/t33-e8-k2/random-0
    swiglu/swigluoai/bf16/m33-i96/random-0
    moe/w4-g128-sym/a16/bf16/silu/t33-e8-k2-h128-i256/random-0
    sharding/w4-g128-asym/tp2/e4-h256-i256/uniform-0
    moe_parallel/w4-g128-sym/a16/bf16/silu/tp2/t33-e8-k2-h256-i256/random-0
    conduct/w4-g128-sym/a16/bf16/linear/m33-n256-k512/strided-0
    linear/w3-g32-asym/a-int8/bf16/m3-n10-k96-bias/golden-0

The cell is the format part of the id. docs/specification.md holds the clauses that cases cite.
"""

from __future__ import annotations

from functools import cache

from conformance.cases.case import CONDUCT, DEFECTS, DTYPES, GOLDEN, Case
from conformance.cases.conduct import conduct_cases
from conformance.cases.dense import (
    BITS,
    EXACT_RECIPES,
    GROUP_SIZES,
    dense_cases,
    weight_formats,
)
from conformance.cases.golden import golden_cases
from conformance.cases.moe import moe_cases
from conformance.cases.routing import routing_cases
from conformance.cases.sharding import sharding_cases

__all__ = [
    "BITS",
    "CONDUCT",
    "DEFECTS",
    "DTYPES",
    "EXACT_RECIPES",
    "GOLDEN",
    "GROUP_SIZES",
    "Case",
    "all_cases",
    "weight_formats",
]


@cache
def all_cases() -> dict[str, Case]:
    """Every case by id, in a stable order. The quick ones judge every dense cell at least once, and of the
    mixtures of experts every pair of properties."""
    cases = [
        *dense_cases(),
        *moe_cases(),
        *routing_cases(),
        *sharding_cases(),
        *conduct_cases(),
        *golden_cases(),
    ]
    by_id = {case.id: case for case in cases}
    if len(by_id) != len(cases):
        raise AssertionError("two cases share an id")
    return by_id
