"""Gated activations: h = phi(gate) * (up + beta), the SwiGLU family and its GELU relatives (C80-C84).

gate and up are the two halves of the first projection's output. The family is one formula with parameters:

    kind       phi(g)                                       models
    silu       g * sigmoid(alpha * g)                       Llama, Qwen, DeepSeek (alpha 1); gpt-oss (1.702)
    gelu       g/2 * (1 + erf(g / sqrt 2))                  GEGLU with the exact GELU
    gelu-tanh  g/2 * (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))   Gemma

and with a limit, min(g, limit) and clamp(up, -limit, limit), before the activation or (`after`) behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from reference.bounds import Contract, Expected, Hypothesis
from reference.errors import FormatError, TensorError
from reference.rounding import FloatFormat, round_to

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Kind = Literal["silu", "gelu", "gelu-tanh"]
Arrangement = Literal["gate-up", "up-gate", "interleaved"]

# The derivative of every phi stays below this: silu 1.0999 at 2.4 for any alpha, GELU 1.1290 at 1.4.
LIPSCHITZ = 1.13
# Where float32 exponentials overflow or vanish, and what they may then be off by (C82).
_UNDERFLOW = 2.0**-120


@dataclass(frozen=True)
class GatedActivation:
    """One member of the family.

    kind, alpha (of silu), beta (added to up), limit (None: none): the formula. clamp: whether the limit cuts the
    gate before or after phi. arrangement: of the two halves in the 2I columns: `gate-up` (gate first), `up-gate`,
    `interleaved` (gate, up, gate, up, ...). Raises FormatError for what is none of these.
    """

    kind: Kind = "silu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    clamp: Literal["before", "after"] = "before"
    arrangement: Arrangement = "gate-up"

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "kind": get_args(Kind), "clamp": ("before", "after"), "arrangement": get_args(Arrangement)
        }  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise FormatError(
                    f"activation: {name} {getattr(self, name)!r} is none of {', '.join(allowed)}"
                )
        for name in ("alpha", "beta"):
            if not math.isfinite(getattr(self, name)):
                raise FormatError(f"activation: {name} {getattr(self, name)!r} is not a finite number")
        if self.kind != "silu" and self.alpha != 1:
            raise FormatError(f"activation: alpha {self.alpha} belongs to silu; {self.kind} has none")
        if self.limit is not None and not (math.isfinite(self.limit) and self.limit > 0):
            raise FormatError(f"activation: limit {self.limit!r} is no positive number; without one give null")
        if self.clamp == "after" and self.limit is None:
            raise FormatError("activation: clamp 'after' needs a limit")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GatedActivation:
        """From the `activation` of a checkpoint's config. Raises FormatError naming an unknown field."""
        unknown = set(config) - set(cls.__dataclass_fields__)
        if unknown:
            raise FormatError(f"activation: unknown field {', '.join(sorted(unknown))}")
        return cls(**config)

    def to_config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


# The variants that real models use, by the name that case ids give them.
VARIANTS: dict[str, GatedActivation] = {
    "silu": GatedActivation(),
    "silu-up-gate": GatedActivation(arrangement="up-gate"),
    "silu-limit": GatedActivation(limit=7.0),
    "swigluoai": GatedActivation(alpha=1.702, beta=1.0, limit=7.0, arrangement="interleaved"),
    "swigluoai-halves": GatedActivation(alpha=1.702, beta=1.0, limit=7.0),
    "swiglustep": GatedActivation(limit=7.0, clamp="after"),
    "gelu": GatedActivation(kind="gelu"),
    "gelu-tanh": GatedActivation(kind="gelu-tanh"),
}
