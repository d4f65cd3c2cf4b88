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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from reference.balls import Ball
from reference.bounds import Contract, Expected, Hypothesis
from reference.errors import FormatError, TensorError
from reference.rounding import FloatFormat, float_format

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Kind = Literal["silu", "gelu", "gelu-tanh"]
Arrangement = Literal["gate-up", "up-gate", "interleaved"]

# The derivative of every phi stays below this: silu 1.0999 at 2.4 for any alpha, GELU 1.1290 at 1.4.
LIPSCHITZ = 1.13


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
        for name in ("alpha", "beta", "limit"):
            value = getattr(self, name)
            if name == "limit" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise FormatError(f"activation: {name} {value!r} is not a finite number")
        if self.kind != "silu" and self.alpha != 1:
            raise FormatError(f"activation: alpha {self.alpha} belongs to silu; {self.kind} has none")
        if self.limit is not None and self.limit <= 0:
            raise FormatError(
                f"activation: limit {self.limit!r} is no positive number; without one give null"
            )
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


# ---- the stages, which a mutant replaces one of


def split(x: Float64Array, gated: GatedActivation) -> tuple[Float64Array, Float64Array]:
    """gate and up (M, I) of the first projection's output (M, 2I) (C81)."""
    if gated.arrangement == "interleaved":
        return x[:, 0::2], x[:, 1::2]
    first, second = np.split(x, 2, axis=1)
    return (first, second) if gated.arrangement == "gate-up" else (second, first)


def activate(
    gate: Float64Array, up: Float64Array, gated: GatedActivation
) -> tuple[Float64Array, Float64Array]:
    """The two factors of h: the activated half phi(gate) and up + beta, (M, I) each (C80)."""
    limit = np.inf if gated.limit is None else gated.limit
    before, after = (limit, np.inf) if gated.clamp == "before" else (np.inf, limit)
    return np.minimum(phi(np.minimum(gate, before), gated), after), np.clip(up, -limit, limit) + gated.beta


def phi(g: Float64Array, gated: GatedActivation) -> Float64Array:
    """The activation of one half, in float64; where float32 cannot tell it from g or from 0, g and 0 (C82)."""
    reach, low, high = _ends(g, gated)
    if gated.kind == "silu":
        value = g / (1 + np.exp(-np.clip(reach, -700, 700)))
    elif gated.kind == "gelu":
        value = g * 0.5 * _erfc(-g / np.sqrt(2))
    else:
        value = g * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g * g * g)))
    return np.where(reach >= high, g, np.where(reach <= low, 0.0, value))


def _ends(g: Float64Array, gated: GatedActivation) -> tuple[Float64Array, float, float]:
    """What phi depends on, where it is 0, and where it is g, to within float32."""
    # sigmoid(20) is 1 - 2e-9, which every float32 form gives as 1; 32 exp(-32) is 4e-13. erfc(8 / sqrt 2) is 1e-15.
    return (gated.alpha * g, -32.0, 20.0) if gated.kind == "silu" else (g, -8.0, 8.0)


_erfc_of = np.vectorize(math.erfc, otypes=[np.float64])


def _erfc(v: Float64Array) -> Float64Array:
    found: Float64Array = _erfc_of(v) if v.size else np.zeros_like(v)
    return found


@dataclass(frozen=True)
class GatedSemantics:
    """The stages, each with the signature of the right function above."""

    split: Callable[[Float64Array, GatedActivation], tuple[Float64Array, Float64Array]]
    activate: Callable[[Float64Array, Float64Array, GatedActivation], tuple[Float64Array, Float64Array]]


GATED_RIGHT = GatedSemantics(split, activate)


# ---- with bounds


def factors(
    gate_up: Ball, gated: GatedActivation, contract: Contract, semantics: GatedSemantics = GATED_RIGHT
) -> tuple[Ball, Ball]:
    """The two factors of h as float32 kernels have them, (M, I) each, from gate and up (M, 2I) (C82).

    phi's own error, with t = alpha g: silu by an exponential (5 + 1.75 |t|) 2^-23 relative (an approximate
    exponential is off by 2 + 1.173 |t| ulps, the product alpha g by half an ulp of t); by tanh 2^-22 |g|, by the
    hardware's tanh 2^-12 |g|. GELU 2^-21 |g|, for 1 + erf cancels, or 2^-12 |g|.
    """
    gate, up = semantics.split(gate_up.centre, gated)
    activated, linear = semantics.activate(gate, up, gated)
    gate_radius, up_radius = split(gate_up.radius, gated)
    clamped = np.minimum(gate, np.inf if gated.limit is None or gated.clamp == "after" else gated.limit)
    reach, low, high = _ends(clamped, gated)
    size = np.abs(clamped)
    if contract.sigmoid == "tanh.approx":
        own = (2.0**-12 + 2.0**-21) * size
    elif gated.kind != "silu":
        own = 2.0**-21 * size
    elif contract.sigmoid == "tanh":
        own = 2.0**-22 * size
    else:
        own = (5 + 1.75 * np.abs(reach)) * 2.0**-23 * np.abs(activated)
    with np.errstate(under="ignore"):
        power = reach if gated.kind == "silu" else -reach * reach / 2
        vanished = 2 * size * np.exp(np.clip(power, -700, 0))
    own = np.where(reach >= high, 0.0, np.where(reach <= low, vanished, own))
    # On the far side of the limit, or where phi is g or 0, the gate's own radius does not matter or is kept.
    doubt = gated.alpha * gate_radius
    slope = np.where(reach - doubt >= high, 1.0, np.where(reach + doubt <= low, 2.0**-20, LIPSCHITZ))
    beyond = clamped < gate - gate_radius
    a = Ball(activated, own + np.where(beyond, 0.0, slope * gate_radius))
    limit = np.inf if gated.limit is None else gated.limit
    held = np.abs(up) - up_radius > limit
    b = Ball(linear, np.where(held, 0.0, up_radius))
    return a, b.kept() if gated.beta else b


def activated(
    gate_up: Ball,
    gated: GatedActivation,
    output: FloatFormat,
    contract: Contract,
    semantics: GatedSemantics = GATED_RIGHT,
) -> dict[str, Ball]:
    """h (M, I) in float32, for each place where a kernel may round to 16 bits on the way (C84)."""
    a, b = factors(gate_up, gated, contract, semantics)
    found = {"": a.times(b)}
    if contract.intermediates != "fp32":
        found[f"activated half in {output.name}"] = a.rounded(output).times(b)
    return found


def swiglu(
    x: Array,
    gated: GatedActivation,
    contract: Contract,
    semantics: GatedSemantics = GATED_RIGHT,
) -> Expected:
    """The expected output (M, I) of a gated activation of x (M, 2I) in bf16 or fp16, with its bound.

    Raises TensorError for an odd number of columns.
    """
    if x.ndim != 2 or x.shape[1] % 2:
        raise TensorError(f"x: expected shape [M, 2I], found {list(x.shape)}")
    output = float_format(x.dtype)
    ways = activated(Ball.exact(x.astype(np.float64)), gated, output, contract, semantics)
    # What a form of phi is off by it is off by alike on neighbouring gates: all of the radius may tip a rounding.
    found = {name or "once": Hypothesis(ball.centre, ball.radius, tipping=1.0) for name, ball in ways.items()}
    return Expected(ways[""].centre, found, output)
