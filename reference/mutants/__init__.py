"""The named wrong semantics: they name what a failing backend computes, and they judge the suites.

One module for each thing that they get wrong; `held_out` was written after the suites were frozen and serves only to
judge them (`nox -s mutants`).
"""

from __future__ import annotations

from reference.mutants.activations import ACTIVATIONS
from reference.mutants.arithmetic import ARITHMETIC
from reference.mutants.experts import EXPERTS
from reference.mutants.gated import GATED
from reference.mutants.registry import KINDS, Mutant, Traits
from reference.mutants.routing import ROUTING
from reference.mutants.sharding import SHARDING
from reference.mutants.weights import WEIGHTS

REGISTRIES = (WEIGHTS, ACTIVATIONS, ARITHMETIC, ROUTING, GATED, EXPERTS, SHARDING)
MUTANTS: dict[str, Mutant] = {name: mutant for registry in REGISTRIES for name, mutant in registry.items()}
if len(MUTANTS) != sum(map(len, REGISTRIES)):
    raise AssertionError("two mutants share a name")

__all__ = ["KINDS", "MUTANTS", "Mutant", "Traits"]
