"""The named wrong semantics: they name what a failing backend computes, and they judge the suites.

Three modules by what they get wrong; `held_out` was written after the suites were frozen and serves only to
judge them (`nox -s mutants`).
"""

from __future__ import annotations

from reference.mutants.activations import ACTIVATIONS
from reference.mutants.arithmetic import ARITHMETIC
from reference.mutants.registry import KINDS, Mutant, Traits
from reference.mutants.weights import WEIGHTS

MUTANTS: dict[str, Mutant] = {**WEIGHTS, **ACTIVATIONS, **ARITHMETIC}

__all__ = ["KINDS", "MUTANTS", "Mutant", "Traits"]
