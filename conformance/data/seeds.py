"""Where a case's random numbers come from."""

from __future__ import annotations

import hashlib

import numpy as np

from conformance.cases import GOLDEN, Case


def generator(case_id: str) -> np.random.Generator:
    """The random numbers of a case: they depend on its id and on nothing else."""
    digest = hashlib.sha256(case_id.encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def generators(case: Case) -> tuple[np.random.Generator, np.random.Generator]:
    """The random numbers of a case's layer, and those of what it is asked: one after the other of the case's own.

    `golden` cases of one width, group size and shape share the codes of the former, whatever their zero points; those
    of one activation format and dtype share the latter. Vectors need not store them again.
    """
    if case.recipe != GOLDEN:
        both = generator(case.id)
        return both, both
    asked = f"{case.activation.name}/{case.dtype}/m{case.m}"
    return of_layer(case, ""), generator(f"golden/{asked}/{_shape(case)}")


def of_layer(case: Case, part: str) -> np.random.Generator:
    """The random numbers of one part of a `golden` case's layer: those of its codes come first."""
    order = "-gidx" if case.act_order else ""
    return generator(f"golden/w{case.weight.bits}-{case.weight.group_size}{order}/{_shape(case)}{part}")


def _shape(case: Case) -> str:
    return f"{case.operation == 'moe'}/e{case.experts}-n{case.n}-k{case.k}"
