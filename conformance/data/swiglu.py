"""Gated activations alone: what is asked.

| recipe | gate and up                                                            |
| ------ | ---------------------------------------------------------------------- |
| random | normal, of sizes from 1/2 to 4: the curved part of phi                 |
| limits | normal of size 8, some exactly at the limit, some at 0, -0 and just off |
| wide   | powers of two from 2^-10 to the largest that does not overflow          |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import Case
from conformance.data.seeds import generator
from reference.bounds import Contract, Expected
from reference.rounding import float_format, round_to
from reference.swiglu import GATED_RIGHT, GatedSemantics, swiglu

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SwigluProblem:
    """x (M, 2I) and what is right."""

    case: Case
    x: Array

    def expected(self, contract: Contract, semantics: GatedSemantics = GATED_RIGHT) -> Expected:
        return swiglu(self.x, self.case.gated, contract, semantics)


@lru_cache(maxsize=4)
def swiglu_problem(case: Case) -> SwigluProblem:
    rng = generator(case.id)
    output = float_format(case.dtype)
    shape = (case.m, 2 * case.n)
    if case.recipe == "random":
        values = rng.normal(0, 1, shape) * np.exp2(np.arange(case.m)[:, None] % 4 - 1.0)
    elif case.recipe == "limits":
        limit = case.gated.limit or 7.0
        step = limit * 2.0 ** (1 - output.precision)
        special = np.array(
            [limit, -limit, limit + 2 * step, -limit - 2 * step, limit - step, 0.0, -0.0, 2 * limit]
        )
        values = np.where(rng.random(shape) < 0.4, rng.choice(special, shape), rng.normal(0, 8, shape))
    else:  # products below 2^15
        values = np.exp2(rng.uniform(-10, 7.4, shape)) * rng.choice([-1.0, 1.0], shape)
    return SwigluProblem(case, round_to(values, output).astype(output.dtype))
