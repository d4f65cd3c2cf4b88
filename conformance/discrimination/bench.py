"""The bench of a case, and which mutants it can judge."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from conformance.cases import Case
from conformance.discrimination.dense import (
    DENSE_STAGES,
    DequantizeBench,
    LinearBench,
    PackingBench,
    QuantizationBench,
    concerns_dense,
)
from conformance.discrimination.moe import MOE_STAGES, MoeBench, SwigluBench, concerns_moe
from conformance.discrimination.routing import ROUTING_STAGES, AlignBench, RoutingBench, concerns_routing
from conformance.discrimination.sharding import SHARDING_STAGES, ShardingBench, concerns_sharding
from reference.mutants import Mutant


class Bench(Protocol):
    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        """Whether the mutant's answer is refused, and the margin in bounds (0 where nothing is bounded)."""
        ...


_BENCHES: dict[str, Callable[[Case], Any]] = {
    "packing": PackingBench,
    "dequantize": DequantizeBench,
    "activation_quantization": QuantizationBench,
    "linear": LinearBench,
    "swiglu": SwigluBench,
    "moe": MoeBench,
    "routing": RoutingBench,
    "moe_align": AlignBench,
    "sharding": ShardingBench,
}
OPERATIONS = tuple(_BENCHES)
_CONCERNS = (
    (DENSE_STAGES, concerns_dense),
    (MOE_STAGES, concerns_moe),
    (ROUTING_STAGES, concerns_routing),
    (SHARDING_STAGES, concerns_sharding),
)


@lru_cache(maxsize=2)
def bench(case: Case) -> Bench:
    """The bench of a case of any operation that mutants have a stage in."""
    found: Bench = _BENCHES[case.operation](case)
    return found


def concerns(case: Case, mutant: Mutant) -> bool:
    """Whether the mutant's stage is part of the case, and wrong there at all."""
    return any(
        case.operation in stages.get(mutant.stage, ()) and asked(case, mutant) for stages, asked in _CONCERNS
    )
