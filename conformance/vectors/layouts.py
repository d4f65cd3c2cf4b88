"""Vectors of the named layouts: codes and zero points to the words of a checkpoint, and back.

No backend of the suite is asked about them: they are for readers and writers of checkpoints. Of each width there are
pairs: the same codes in the dense stream and in element-aligned words, which no shape and no round trip tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.cases import Case
from conformance.cases.dense import BITS
from conformance.data import quantized_weight
from conformance.data.seeds import generator
from reference.formats import WeightFormat
from reference.layouts import LAYOUTS
from reference.weights import QuantizedWeight

CLAUSES = {
    "ct-dense-le-v1": ("C10", "C11", "C12", "C13", "C14", "C17"),
    "ct-aligned-le-v0": ("C16", "C17"),
    "gptq-v1": ("C10", "C19"),
    "gptq-v2": ("C10", "C19"),
    "awq-gemm": ("C18",),
}
# N, K: ragged for the layouts that allow it, else whole words of every width
_RAGGED, _WHOLE = (10, 66), (32, 64)
FLAGS: dict[str, dict[str, Any]] = {
    "dense-or-aligned": {
        "explanation": "One of a pair: the same codes in the dense stream and in element-aligned words.",
        "class": "packing",
        "faults": ["aligned_words"],
        "effect": "A checkpoint of the other layout loads without an error and answers noise.",
    },
    "minus-one": {
        "explanation": "GPTQ v1 stores zero points minus one, v2 as they are: one of a pair.",
        "class": "zero points",
        "faults": ["zero_point_plus_one", "zero_point_minus_one"],
        "effect": "Every weight is one step off: perplexity rises, text stays readable.",
    },
    "interleaved-words": {
        "explanation": "The codes of a word are not in the order of columns.",
        "class": "packing",
        "faults": [],
        "effect": "Columns are permuted within each eight: noise.",
    },
}


def records() -> Iterator[dict[str, Any]]:
    for name, layout in LAYOUTS.items():
        for bits in BITS:
            if bits not in layout.bits:
                continue
            for symmetric in (True, False):
                if name == "awq-gemm" and symmetric:
                    continue
                for n, k in (_RAGGED, _WHOLE) if name.startswith("ct-") else (_WHOLE,):
                    yield _record(name, WeightFormat.of(bits, 33 if k == 66 else 32, symmetric), n, k)


def _record(name: str, fmt: WeightFormat, n: int, k: int) -> dict[str, Any]:
    weight = _weight(name, fmt, n, k)
    tensors = LAYOUTS[name].encode(weight)
    inputs: dict[str, Any] = {"codes": weight.codes, "scale": weight.scale}
    if weight.zero_point is not None:
        inputs["zero_points"] = weight.zero_point
    flags = ["dense-or-aligned"] if name.startswith("ct-") and 32 % fmt.bits else []
    flags += ["minus-one"] if name.startswith("gptq") and not fmt.symmetric else []
    flags += ["interleaved-words"] if name == "awq-gemm" else []
    return {
        "id": f"layouts/{name}/{fmt.name}/n{n}-k{k}",
        "operation": "layouts",
        "result": "valid",
        "format": {"layout": name, "weights": fmt.to_quantization_args(), "n": n, "k": k},
        "clauses": list(CLAUSES[name]),
        "flags": flags,
        "comment": f"{fmt.name} codes and zero points as {name} stores them",
        "inputs": inputs,
        "expected": [
            {
                "alternatives": [{"name": "exact", "contracts": [], "exact": True}],
                "tensors": tensors,
            }
        ],
    }


def _weight(name: str, fmt: WeightFormat, n: int, k: int) -> QuantizedWeight:
    """The same weight for every layout."""
    case = Case("dequantize", fmt, "uniform", n, k, dtype="fp16")
    weight = quantized_weight(case, generator(f"layouts/{fmt.name}/n{n}-k{k}"))
    if weight.zero_point is not None:  # gptq-v1 has no code for the lowest
        zero_point = np.maximum(weight.zero_point, fmt.code_range[0] + 1)
        weight = QuantizedWeight(
            fmt, weight.codes, weight.scale, zero_point.astype(np.int8), weight.group_index
        )
    return weight
