"""The cases that are vectors: small, and between them every cell, every flag and every fault of docs/faults.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache

from conformance.cases import DTYPES, GOLDEN, Case, all_cases
from conformance.cases.moe import MOE_EXACT_RECIPES, MOE_SITUATIONS
from conformance.vectors.contracts import CONTRACTS

# What the rules below leave to single cases, each for the faults that it is named for in docs/faults.md or the flags
# that only it has.
SINGLE = (
    "linear/w3-channel-sym/a16/fp16/m7-n64-k384/magnitudes-0",
    "linear/w4-channel-sym/a16/bf16/m7-n64-k33/identity-0",
    "linear/w4-channel-sym/a16/bf16/m1-n10-k250/integers-0",
    "linear/w4-channel-sym/a16/bf16/m0-n64-k128/empty-0",
    "moe_align/b16/t3-e128-k8/dropped-0",
    "sharding/w2-channel-asym/tp2/e3-h50-i96/uniform-0",
    "sharding/w2-channel-sym/ep2/e5-h50-i34-bias/uniform-0",
    "sharding/w2-channel-sym/ep4/e5-h50-i34/shared-0",
    "sharding/w2-g128-sym-gidx/tp2/e3-h128-i256-bias/uniform-0",
    "sharding/w2-g32-sym/tp2/e3-h96-i192-bias/uniform-0",
    "sharding/w3-channel-sym/tp2/e3-h50-i192-bias/uniform-0",
)


@cache
def chosen() -> dict[str, Case]:
    """By id, in the order of the matrix."""
    wanted = set(SINGLE)
    for operation, rule in _RULES.items():
        wanted |= {c.id for c in all_cases().values() if c.operation == operation and rule(c)}
    wanted |= _smallest()
    return {case_id: case for case_id, case in all_cases().items() if case_id in wanted}


def contracts_of(case: Case) -> tuple[str, ...]:
    """The contracts under which a case's vector holds an expectation.

    Of experts the default class leaves dozens of alternatives open: they are listed for some cells.
    """
    if case.operation != "moe" or case.id in _of_every_contract():
        return tuple(CONTRACTS)
    return ("rounded",) if case.recipe == GOLDEN else ("rounded", "exact-16", "rounded-16")


@cache
def _of_every_contract() -> frozenset[str]:
    """Of golden cases of experts two for each width, the other properties in turn."""
    found = {}
    own = [
        c
        for c in all_cases().values()
        if c.recipe == GOLDEN and c.operation == "moe" and not c.act_order and c.m < 3
    ]
    for case in own:
        kinds = ("a16", "int8", "int4", "fp8")
        turn = case.weight.bits + kinds.index(case.activation.kind)
        if turn % 2:
            continue
        wanted = ((-1, 32)[turn // 2 % 2], turn // 4 % 2 == 0, DTYPES[turn // 3 % 2])
        if (case.weight.group_size, case.weight.symmetric, case.dtype) == wanted:
            found[case.id] = case
    return frozenset(found)


_EXACT = ("identity", "scales", "integers")  # of the linear
# Recipes whose near ties among many experts are too many to list
_TIED = ("close", "ties", "poisoned", "wide")
_FEW = 8


def _smallest() -> set[str]:
    """Of each cell of the quantizers, routers and alignments and each recipe the case of the fewest numbers, recipes
    other than `random` for one dtype each; of the quantizers with tokens to tell apart."""
    least: dict[tuple[str, str], Case] = {}
    for case in all_cases().values():
        if case.operation not in ("activation_quantization", "routing", "moe_align"):
            continue
        if case.m < 3 or (case.operation == "activation_quantization" and case.k < 3):
            continue
        if case.experts > _FEW and case.recipe in _TIED:
            continue
        key = (
            case.cell.removesuffix(f"/{case.dtype}") if case.recipe != "random" else case.cell,
            case.recipe,
        )
        if key not in least or _numbers(case) < _numbers(least[key]):
            least[key] = case
    return {case.id for case in least.values()}


def _numbers(case: Case) -> tuple[int, str]:
    """Equal ones in an order that is not that of the matrix."""
    return case.m * max(case.k, case.experts), _shuffled(case.id)


def _shuffled(name: str) -> str:
    """An order that is not that of the matrix, and the same everywhere."""
    return hashlib.sha256(name.encode()).hexdigest()


_RULES: dict[str, Callable[[Case], bool]] = {
    "packing": lambda c: (
        c.weight.bits >= 2
        and (
            (c.n, c.k) == (10, 33)
            or (c.recipe == "uniform" and c.n * c.k <= 300)
            or (c.recipe, c.n, c.k, c.dim) == ("uniform", 16, 250, 1)
        )
    ),
    "dequantize": lambda c: c.recipe == GOLDEN,
    "linear": lambda c: (
        c.recipe == GOLDEN
        or ((c.m, c.n, c.k) == (7, 33, 32) and c.recipe in _EXACT and c.weight.group_size == 32 and _plain(c))
    ),
    "moe": lambda c: (
        c.recipe == GOLDEN
        or (_weights(c) < 15_000 and c.m <= 3 and (c.recipe in MOE_SITUATIONS or _exact_in_turn(c)))
    ),
    "validation": lambda c: True,
    "swiglu": lambda c: (c.m, c.n) in ((3, 17), (7, 1)) or (c.m == 0 and c.recipe == "random"),
    "sharding": lambda c: (
        c.recipe == "illegal"
        and c.ranks == "tp2"
        and _weights(c) <= 20_500
        and _in_turn(c)
        and (c.weight.group_size, c.weight.bits) not in ((32, b) for b in range(3, 9))
    ),
}


def _weights(case: Case) -> int:
    return 3 * case.n * case.k * case.experts


def _plain(case: Case) -> bool:
    return (case.activation.kind, case.dtype) == ("a16", "bf16") and _in_turn(case)


def _exact_in_turn(case: Case) -> bool:
    return case.recipe in MOE_EXACT_RECIPES and case.weight.bits in (3, 8)


def _in_turn(case: Case) -> bool:
    return case.weight.symmetric == (case.weight.bits % 2 == 0)
