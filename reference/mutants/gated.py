"""Wrong gated activations: halves, alpha, beta, limit, the function itself; `when` is asked with a GatedActivation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.mutants.registry import Registry, registrar
from reference.rounding import FLOAT_FORMATS, round_to
from reference.swiglu import GATED_RIGHT, activate, phi, split

GATED: Registry = {}
_register = registrar(GATED, GATED_RIGHT)
_BF16 = FLOAT_FORMATS["bf16"]


def gated(stage, computes, when=lambda g: True):
    return _register("gated activation", stage, computes, when)


def _limited(g):
    return g.limit is not None


def _before(g):
    return _limited(g) and g.clamp == "before"


def _interleaved(g):
    return g.arrangement == "interleaved"


# ---- which half is which


@gated("split", "up as the gate, and the gate as up")
def gate_up_swapped(x, g):
    return split(x, g)[::-1]


@gated("split", "interleaved rows of gate and up as two halves", _interleaved)
def interleaved_read_as_halves(x, g):
    return split(x, replace(g, arrangement="gate-up"))


@gated("split", "two halves as interleaved rows of gate and up", lambda g: not _interleaved(g))
def halves_read_as_interleaved(x, g):
    return split(x, replace(g, arrangement="interleaved"))


@gated("split", "the gate alone: up is the gate again")
def gate_read_twice(x, g):
    gate, _ = split(x, g)
    return gate, gate


# ---- parameters


@gated("activate", "without alpha", lambda g: g.alpha != 1)
def alpha_dropped(gate, up, g):
    return activate(gate, up, replace(g, alpha=1.0))


@gated("activate", "with the alpha of another model, 1.702", lambda g: g.kind == "silu" and g.alpha == 1)
def alpha_invented(gate, up, g):
    return activate(gate, up, replace(g, alpha=1.702))


@gated("activate", "alpha times the gate in front of the sigmoid as well", lambda g: g.alpha != 1)
def alpha_on_both_factors(gate, up, g):
    a, b = activate(gate, up, g)
    return a * g.alpha, b


@gated("activate", "without beta", lambda g: g.beta != 0)
def beta_dropped(gate, up, g):
    return activate(gate, up, replace(g, beta=0.0))


@gated("activate", "up + 1 where there is no beta", lambda g: g.beta == 0)
def beta_invented(gate, up, g):
    return activate(gate, up, replace(g, beta=1.0))


@gated("activate", "beta added to the activated gate instead of up", lambda g: g.beta != 0)
def beta_on_the_gate(gate, up, g):
    a, b = activate(gate, up, replace(g, beta=0.0))
    return a + g.beta, b


@gated("activate", "beta added before up is clamped", lambda g: g.beta != 0 and _limited(g))
def up_clamped_after_beta(gate, up, g):
    a, _ = activate(gate, up, g)
    return a, np.clip(up + g.beta, -g.limit, g.limit)


# ---- limits


@gated("activate", "without the limit", _limited)
def limit_dropped(gate, up, g):
    return activate(gate, up, replace(g, limit=None, clamp="before"))


@gated("activate", "with a limit of 7 that the model does not have", lambda g: g.limit is None)
def limit_invented(gate, up, g):
    return activate(gate, up, replace(g, limit=7.0))


@gated("activate", "a limit that is absent as 0", lambda g: g.limit is None)
def absent_limit_is_zero(gate, up, g):
    return phi(np.minimum(gate, 0.0), g), np.zeros_like(up) + g.beta


@gated("activate", "the limit on the gate alone", _limited)
def limit_on_the_gate_alone(gate, up, g):
    a, _ = activate(gate, up, g)
    return a, up + g.beta


@gated("activate", "the limit on up alone", _limited)
def limit_on_up_alone(gate, up, g):
    _, b = activate(gate, up, g)
    return phi(gate, g), b


@gated("activate", "the gate clamped on both sides", _before)
def gate_clamped_on_both_sides(gate, up, g):
    return activate(np.maximum(gate, -g.limit), up, g)


@gated("activate", "up clamped from above alone", _limited)
def up_clamped_from_above_alone(gate, up, g):
    a, _ = activate(gate, up, g)
    return a, np.minimum(up, g.limit) + g.beta


@gated("activate", "the clamp of up on the gate, and that of the gate on up", _before)
def clamps_swapped(gate, up, g):
    return phi(np.clip(gate, -g.limit, g.limit), g), np.minimum(up, g.limit) + g.beta


@gated("activate", "the gate clamped after the activation instead of before", _before)
def clamp_after_the_activation(gate, up, g):
    return activate(gate, up, replace(g, clamp="after"))


@gated("activate", "the gate clamped before the activation instead of after", lambda g: g.clamp == "after")
def clamp_before_the_activation(gate, up, g):
    return activate(gate, up, replace(g, clamp="before"))


@gated("activate", "the product clamped instead of its factors", _limited)
def product_clamped(gate, up, g):
    a, b = activate(gate, up, replace(g, limit=None, clamp="before"))
    return np.clip(a * b, -g.limit, g.limit), np.ones_like(b)


@gated("activate", "the sigmoid of the gate before it is clamped", _before)
def sigmoid_of_the_unclamped_gate(gate, up, g):
    _, b = activate(gate, up, g)
    return np.minimum(gate, g.limit) / (1 + np.exp(-np.clip(g.alpha * gate, -700, 700))), b


# ---- the function


@gated("activate", "GELU instead of SiLU", lambda g: g.kind == "silu")
def gelu_instead_of_silu(gate, up, g):
    return activate(gate, up, replace(g, kind="gelu-tanh", alpha=1.0))


@gated("activate", "SiLU instead of GELU", lambda g: g.kind != "silu")
def silu_instead_of_gelu(gate, up, g):
    return activate(gate, up, replace(g, kind="silu"))


@gated("activate", "the exact GELU instead of its tanh form", lambda g: g.kind == "gelu-tanh")
def exact_gelu_instead_of_tanh(gate, up, g):
    return activate(gate, up, replace(g, kind="gelu"))


@gated("activate", "the tanh form of GELU instead of the exact one", lambda g: g.kind == "gelu")
def tanh_gelu_instead_of_exact(gate, up, g):
    return activate(gate, up, replace(g, kind="gelu-tanh"))


@gated("activate", "x sigmoid(1.702 x) instead of GELU", lambda g: g.kind != "silu")
def quick_gelu_instead_of_gelu(gate, up, g):
    return activate(gate, up, replace(g, kind="silu", alpha=1.702))


@gated("activate", "ReLU instead of the activation")
def relu_instead_of_the_activation(gate, up, g):
    a, b = activate(gate, up, g)
    return np.where(gate > 0, np.minimum(gate, g.limit or np.inf), 0.0) + 0 * a, b


@gated("activate", "the sigmoid without the gate in front of it", lambda g: g.kind == "silu")
def sigmoid_without_the_gate(gate, up, g):
    a, b = activate(gate, up, g)
    clamped = np.minimum(gate, g.limit or np.inf) if g.clamp == "before" else gate
    return np.divide(a, clamped, out=np.full_like(a, 0.5), where=clamped != 0), b


@gated("activate", "a sigmoid in bf16", lambda g: g.kind == "silu")
def sigmoid_in_bf16(gate, up, g):
    _, b = activate(gate, up, g)
    clamped = np.minimum(gate, g.limit or np.inf) if g.clamp == "before" else gate
    sigmoid = round_to(1 / (1 + np.exp(-np.clip(g.alpha * clamped, -700, 700))), _BF16)
    limit = g.limit if g.clamp == "after" else np.inf
    return np.minimum(clamped * sigmoid, limit), b


@gated("activate", "the activated gate without up")
def up_dropped(gate, up, g):
    a, b = activate(gate, up, g)
    return a, np.ones_like(b)
