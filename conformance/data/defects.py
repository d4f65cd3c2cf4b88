"""Bad data: checkpoints with one defect each, and the same without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import Checkpoint
from conformance.cases import Case
from conformance.data.linear import checkpoint_of
from conformance.data.seeds import generator
from conformance.data.weights import quantized_weight
from reference.packing import packed_size
from reference.rounding import float_format

Array = npt.NDArray[Any]


def codes_in_range(case: Case) -> npt.NDArray[np.int8]:
    """Codes (N, K)."""
    return quantized_weight(replace(case, recipe="random"), generator(case.id)).codes


def codes_out_of_range(case: Case) -> npt.NDArray[np.int8]:
    """The same, but for one that is one too large."""
    codes = codes_in_range(case)
    codes[case.n // 2, case.k // 2] = case.weight.code_range[1] + 1
    return codes


def defective_layer(case: Case) -> tuple[Checkpoint, Checkpoint, Array]:
    """A good checkpoint, the same with the one defect that the case is named after, activations (M, K)."""
    rng = generator(case.id)
    weight = quantized_weight(replace(case, recipe="random"), rng)
    good = checkpoint_of(weight, None, case.dtype)
    tensors = dict(good.tensors)
    args = good.weights
    scale = weight.scale.copy()
    if case.recipe == "word-count":
        tensors["weight_packed"] = np.ascontiguousarray(tensors["weight_packed"][:, :-1])
    elif case.recipe == "zero-words":
        words = packed_size(case.n, case.weight.bits)
        tensors["weight_zero_point"] = tensors["weight_zero_point"][: words - 1]
    elif case.recipe == "scale-shape":
        tensors["weight_scale"] = np.ascontiguousarray(scale[:, :-1])
    elif case.recipe in ("scale-nan", "scale-inf"):
        scale[case.n // 2, 1] = np.nan if case.recipe == "scale-nan" else np.inf
        tensors["weight_scale"] = scale
    elif case.recipe == "group-remainder":  # 96 columns are no whole number of groups of 64
        args = {**args, "group_size": 64}
    x = rng.normal(0, 1, (4, case.k)).astype(float_format(case.dtype).dtype)
    return good, replace(good, tensors=tensors, weights=args), x
