"""Compile-time mutants: faults of one macro each, which the suites must refuse when they are compiled in.

Each is an `#ifdef` of a few lines in a kernel. Where the oracle has a mutant that computes the same, it is its twin.
"""

from __future__ import annotations

from cuda_kernels.mutants.dense import DENSE
from cuda_kernels.mutants.experts import EXPERTS
from cuda_kernels.mutants.registry import Mutant, by_name

MUTANTS: dict[str, Mutant] = by_name(DENSE, EXPERTS)

__all__ = ["MUTANTS", "Mutant"]
