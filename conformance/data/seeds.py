"""Where a case's random numbers come from."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(case_id: str) -> np.random.Generator:
    """The random numbers of a case: they depend on its id and on nothing else."""
    digest = hashlib.sha256(case_id.encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
