"""Correct layers of experts and gated activations, each with an arithmetic of its own.

A seed draws the projections as `correct_linears` does and, on top, what lies between and behind them: exponentials
and tanh with errors as large as hardware allows, what is stored in 16 bits on the way, how the experts' results
become one. tools/correct_kernels.py asks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from correct_linears import EITHER, F32, F64, Array, CorrectKernel, Layer, multiply_add, operand

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.cases import Case
from reference.formats import ActivationFormat
from reference.rounding import float_format
from reference.swiglu import GatedActivation

LOG2_E = F32(1.4426950408889634)
ULP = 2.0**-23

# What a correct layer may choose besides; what stands there twice is chosen twice as often.
CHOICES: dict[str, Sequence[Any]] = {
    # the gated activation
    "sigmoid": ("exp", "exp", "exp", "exp", "tanh", "tanh.approx"),
    "exponential": (
        "exact",
        "exp2",
        "folded",
        "approximate",
        "approximate",
    ),  # folded: alpha log2(e) is one factor
    "errors": ("random", "up", "down"),  # of what is approximate
    "divide": ("quotient", "reciprocal", "approximate", "mirrored"),
    "gelu": ("plain", "complement", "quotient"),
    "cubic": ("sum", "product"),
    "addend_fused": EITHER,
    # what is stored in 16 bits: nothing, all, or each by itself
    "stored": ("nothing", "all", "some", "some"),
    "gate_up": EITHER,
    "activated": EITHER,
    "intermediate": EITHER,
    "results": ("float32", "stored", "weighted", "folded"),
    "joined": EITHER,
    "declared": ("any", "itself"),
    # the way through the experts
    "order_of_tokens": ("ascending", "shuffled"),
    "padding": (1, 16, 64),
    "factor": ("weights", "end"),
    "sum_fused": EITHER,
}


def drawn_experts(seed: int, how: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    """One of each of CHOICES, but for the changes, beside what is drawn for the projections, and made consistent."""
    rng = np.random.default_rng([seed, 3])
    vars(how).update({name: of[rng.integers(len(of))] for name, of in CHOICES.items()})
    vars(how).update(changes)
    if how.sixteen or how.quantizer == "compressed-tensors":  # what projections return, or quantizers read
        how.stored = "some" if how.stored == "nothing" else how.stored
        how.gate_up = how.gate_up or how.sixteen
        how.intermediate = how.intermediate or how.quantizer == "compressed-tensors"
    if how.stored == "nothing":
        how.gate_up = how.activated = how.intermediate = how.joined = False
        how.results = "float32"
    elif how.stored == "all":
        how.gate_up = how.intermediate = how.joined = True
        how.results = "stored" if how.results == "float32" else how.results
    how.activated = how.activated and how.gate_up
    return how


def intermediates_of(how: SimpleNamespace) -> str:
    if how.declared == "any":
        return "any"
    return {"nothing": "fp32", "all": "16-bit", "some": "any"}[how.stored]


# ---- gated activations


class Gated:
    """h (M, I) in float32 of gate and up in float32. half: to 16 bits and back."""

    def __init__(
        self,
        how: SimpleNamespace,
        gated: GatedActivation,
        half: Callable[[Array], Array],
        rng: np.random.Generator,
    ) -> None:
        self.how, self.gated, self.half, self.rng = how, gated, half, rng

    def __call__(self, gate_up: Array) -> Array:
        gated, how = self.gated, self.how
        if gated.arrangement == "interleaved":
            gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
        else:
            gate, up = np.split(gate_up, 2, axis=1)
            if gated.arrangement == "up-gate":
                gate, up = up, gate
        limit = F32(np.inf if gated.limit is None else gated.limit)
        with np.errstate(over="ignore", under="ignore"):
            if gated.clamp == "before":
                activated = self.phi(np.minimum(gate, limit))
            else:
                activated = np.minimum(self.phi(gate), limit)
        if how.activated:
            activated = self.half(activated)
        up = np.clip(up, -limit, limit)
        if gated.beta == 1 and how.addend_fused:
            return multiply_add(activated, up, activated, True)
        return activated * (up + F32(gated.beta) if gated.beta else up)

    def phi(self, g: Array) -> Array:
        kind = self.gated.kind
        if kind == "silu":
            return self.sigmoid_times(g, g, self.gated.alpha)
        return self.gelu(g) if kind == "gelu" else self.gelu_tanh(g)

    def sigmoid_times(self, g: Array, v: Array, alpha: float) -> Array:
        """g * sigmoid(alpha v)"""
        how, one = self.how, F32(1)
        t = v if alpha == 1 else v * F32(alpha)
        if how.sigmoid != "exp":
            return g * (F32(0.5) * self.tanh(F32(0.5) * t) + F32(0.5))
        if how.divide == "mirrored":  # an exponential that never overflows
            e = self.exponential(-np.abs(v), alpha)
            return g * np.where(t >= 0, one / (one + e), e / (one + e))
        d = one + self.exponential(-v, alpha)
        if how.divide == "quotient":
            return g / d
        if how.divide == "reciprocal":
            return g * (one / d)
        return self.off(g / d, np.where(d == 1, 0.0, 2.0))

    def exponential(self, v: Array, alpha: float = 1.0) -> Array:
        """exp(alpha v). The approximate one is off by all that __expf may be: 2 + 1.173 |t| ulps."""
        form = self.how.exponential
        if form == "folded":
            return np.exp2((v * (F32(alpha) * LOG2_E)).astype(F64)).astype(F32)
        t = v if alpha == 1 else v * F32(alpha)
        if form == "exp2":
            return np.exp2((t * LOG2_E).astype(F64)).astype(F32)
        with np.errstate(over="ignore"):
            exact = np.exp(t.astype(F64))
            return (
                exact.astype(F32) if form == "exact" else self.off(exact, 2 + 1.173 * np.abs(t.astype(F64)))
            )

    def off(self, values: Array, ulps: Any) -> Array:
        """values in float32, off by at most so many ulps."""
        errors = {"up": 1.0, "down": -1.0}.get(self.how.errors)
        share = self.rng.uniform(-1, 1, values.shape) if errors is None else errors
        with np.errstate(over="ignore"):
            return (values * (1 + share * np.asarray(ulps) * ULP)).astype(F32)

    def saturating(self, exact: Array, ulps: float, top: float = 1.0) -> Array:
        """What tends to top, off by so many ulps of 1 but where it is nearly there: no implementation errs there."""
        found = self.off(exact, np.where(np.abs(exact) > top * (1 - ULP), 0.0, ulps))
        return np.clip(found, F32(-top), F32(top))

    def tanh(self, v: Array) -> Array:
        """Off by two ulps, or in hardware by 2^-11 of its value."""
        return self.saturating(np.tanh(v.astype(F64)), 2.0**12 if self.how.sigmoid == "tanh.approx" else 1.0)

    def gelu(self, g: Array) -> Array:
        v = (g * F32(math.sqrt(0.5))).astype(F64)
        if self.how.gelu == "complement":
            return g * F32(0.5) * self.saturating(_erfc(-v), 1.0, 2.0)
        return F32(0.5) * g * (F32(1) + self.saturating(_erf(v), 1.0))

    def gelu_tanh(self, g: Array) -> Array:
        a, b, one = F32(math.sqrt(2 / math.pi)), F32(0.044715), F32(1)
        y = a * (g + b * g * g * g) if self.how.cubic == "sum" else g * (a + F32(a * b) * (g * g))
        if self.how.sigmoid != "exp" or self.how.gelu == "plain":
            return F32(0.5) * g * (one + self.tanh(y))
        if self.how.gelu == "complement":
            tanh = one - F32(2) / (one + self.exponential(F32(2) * y))
            return F32(0.5) * g * (one + tanh)
        return self.sigmoid_times(g, F32(2) * y, 1.0)


_erf = np.vectorize(math.erf, otypes=[F64])
_erfc = np.vectorize(math.erfc, otypes=[F64])


# ---- the layer


class CorrectExperts(CorrectKernel):
    """The backend of a seed. changes: to what is drawn."""

    def __init__(self, seed: int, **changes: Any) -> None:
        super().__init__(seed, **changes)
        self.name = f"correct-experts-{seed}"
        self.how = drawn_experts(seed, self.how, **changes)
        self.contract = replace(
            self.contract, intermediates=intermediates_of(self.how), sigmoid=self.how.sigmoid
        )

    def supports(self, case: Case) -> Support:
        large = case.recipe in ("readout", "integers") and self.how.partial_sums > 1
        large |= self.how.sixteen and case.weight.strategy == "channel"
        if case.operation == "moe" and case.dtype == "fp16" and large:
            return Support.no("a sum may be too large for float16 where the output is not")
        return Support.yes()

    def kind(self, case: Case) -> str:
        """What its figures are counted under: see CorrectKernel.kind."""
        if case.operation == "swiglu":
            return f"gated, {self.how.sigmoid}"
        found = super().kind(replace(case, operation="linear"))
        if found in ("partial sums", "scaled zero points") or "16-bit" in found or found.startswith("e8m13"):
            return f"experts, {found}"
        return f"experts {case.activation.kind}, intermediates {self.contract.intermediates}"

    def swiglu(self, x: Array, activation: GatedActivation) -> Array:
        rng = np.random.default_rng([self.seed, 4])
        half = _half(x.dtype)
        h = Gated(self.how, activation, half, rng)(x.astype(F32))
        return half(h).astype(x.dtype)

    def load_moe(self, checkpoint: MoeCheckpoint) -> Callable[[Array, Array, Array], Array]:
        return Experts(self, checkpoint)


def _half(dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    def half(values: Array) -> Array:
        with np.errstate(over="ignore"):
            return values.astype(dtype).astype(F32)

    return half


class Experts:
    def __init__(self, kernel: CorrectExperts, checkpoint: MoeCheckpoint) -> None:
        self.kernel, self.checkpoint, self.how = kernel, checkpoint, kernel.how
        self.activation = ActivationFormat.from_quantization_args(checkpoint.input_activations)
        self.dtype = float_format(checkpoint.dtype).dtype
        self.half = _half(self.dtype)
        self.rng = np.random.default_rng([kernel.seed, 5])
        self.gated = Gated(self.how, checkpoint.activation, self.half, self.rng)
        self.layers: dict[tuple[str, int], Layer] = {}

    def layer(self, which: str, place: int) -> Layer:
        """A projection: which is `w13`, `w2` or a shared expert's."""
        if (which, place) not in self.layers:
            of = self.checkpoint
            tensors = {
                name.removeprefix(f"{which}_"): tensor[place]
                for name, tensor in of.tensors.items()
                if name.startswith(f"{which}_")
            }
            shape = (
                (2 * of.intermediate, of.hidden) if which.endswith("w13") else (of.hidden, of.intermediate)
            )
            tensors["weight_shape"] = np.array(shape)
            one = Checkpoint(tensors, of.weights, of.input_activations, of.dtype)
            self.layers[which, place] = Layer(self.kernel, one, self.how)
        return self.layers[which, place]

    def expert(self, prefix: str, place: int, values: Array, scale: Array | None) -> Array:
        """Its results in float32, a row a slot, in blocks that are padded with the first row."""
        how, rows = self.how, len(values)
        order = np.arange(rows) if how.order_of_tokens == "ascending" else self.rng.permutation(rows)
        padded = np.append(order, np.repeat(order[:1], -rows % how.padding))
        gate_up = self.layer(f"{prefix}w13", place).product(
            values[padded], None if scale is None else scale[padded]
        )
        h = self.gated(self.half(gate_up) if how.gate_up else gate_up)
        if self.activation.kind == "a16" or how.intermediate:
            h = self.half(h)
        if how.quantizer == "compressed-tensors":
            h = h.astype(self.dtype)
        found = self.layer(f"{prefix}w2", place).product(*operand(how, h, self.activation))
        results = np.empty((rows, found.shape[1]), F32)
        results[order] = found[:rows]
        return results

    def __call__(self, x: Array, weights: Array, ids: Array) -> Array:
        of, how = self.checkpoint, self.how
        places = ids.astype(np.int64)
        if of.expert_map is not None:
            places = np.where(places < 0, -1, of.expert_map.astype(np.int64)[places])
        if of.weights_on_input:
            x = (x.astype(F32) * weights).astype(x.dtype)
            weights = np.ones_like(weights)
        factor = F32(of.routed_scaling_factor)
        if how.factor == "weights":
            weights, factor = weights * factor, F32(1)
        values, scale = operand(how, x, self.activation)
        results = np.zeros((*ids.shape, x.shape[1]), F32)
        for place in self.rng.permutation(np.unique(places[places >= 0])):
            token, slot = np.nonzero(places == place)
            own = None if scale is None else scale[token]
            results[token, slot] = self.expert("", int(place), values[token], own)
        total = self.sum(results, weights, places >= 0)
        if how.joined:
            total = self.half(self.half(total) * factor)
        elif factor != 1:
            total = total * factor
        if "shared_w2_weight_packed" in of.tensors:
            shared = self.expert("shared_", 0, values, scale)
            total = total + (self.half(shared) if how.joined else shared)
        return self.half(total).astype(self.dtype)

    def sum(self, results: Array, weights: Array, present: Array) -> Array:
        """Over the slots, (T, H); those without expert are left out."""
        how = self.how
        total = np.zeros((results.shape[0], results.shape[2]), F32)
        slots = range(results.shape[1])
        for j in slots if how.results == "folded" else self.rng.permutation(results.shape[1]):
            result, weight = results[:, j], weights[:, j, None]
            if how.results == "stored":
                result = self.half(result)
            if how.results in ("weighted", "folded"):
                result, weight = self.half(result * weight), F32(1)
            added = multiply_add(result, np.broadcast_to(weight, result.shape), total, how.sum_fused)
            total = np.where(
                present[:, j, None], self.half(added) if how.results == "folded" else added, total
            )
        return total
