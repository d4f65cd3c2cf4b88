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

    `golden` cases of one weight format and shape share the former, those of one activation format and dtype the
    latter, so that vectors need not store them again.
    """
    if case.recipe != GOLDEN:
        both = generator(case.id)
        return both, both
    order = "-gidx" if case.act_order else ""
    shape = f"{case.operation == 'moe'}/e{case.experts}-n{case.n}-k{case.k}"
    asked = f"{case.activation.name}/{case.dtype}/m{case.m}"
    return generator(f"golden/{case.weight.name}{order}/{shape}"), generator(f"golden/{asked}/{shape}")
