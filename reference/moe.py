"""The fused mixture-of-experts layer (C90-C99)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from reference.formats import ActivationFormat
from reference.swiglu import GatedActivation
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expert:
    """w13: gate and up projection (2I, H), rows arranged as the layer's activation says. w2: down projection
    (H, I). b13 (2I) and b2 (H): biases in the output format, or None."""

    w13: QuantizedWeight
    w2: QuantizedWeight
    b13: Array | None = None
    b2: Array | None = None


@dataclass(frozen=True)
class MoeLayer:
    """What a checkpoint means.

    experts: those that are present, in the order of their tensors. gated: between the projections.
    activation: how the input of both projections is quantized. top_k: experts a token. expert_map: int32, the place of
    each global expert in experts or -1; None where all are present in order. weights_on_input: the router's weights
    multiply the experts' input. factor: of the sum of the routed experts. shared: an expert that every token meets.
    """

    experts: tuple[Expert, ...]
    gated: GatedActivation
    activation: ActivationFormat
    top_k: int
    expert_map: npt.NDArray[Any] | None = None
    weights_on_input: bool = False
    factor: float = 1.0
    shared: Expert | None = None
