"""The fused mixture-of-experts layer: y = factor * sum_j w_j f_j(x) + f_shared(x) (C90-C99).

f(x) = down(activation(gate_up(x))), each projection a quantized linear. Tokens are dispatched to experts by
ids that a router gave; one token and one of its ids make a slot. `moe` gives the right answer with its bound,
`moe_of` what any semantics compute of the same calls.

Roundings that a contract leaves open are hypotheses, as in `linear`; what is open after that is carried
through the layer as a radius around each number (`balls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from reference import activations, bounds, swiglu
from reference.activations import QuantizedActivations, Quantizer, quantizers
from reference.balls import UNBOUNDED, Ball
from reference.bounds import Contract, Expected, Hypothesis
from reference.errors import TensorError
from reference.exactness import exact_outputs, granule
from reference.formats import ActivationFormat
from reference.linear import matrices, quantize_calls, radius_of_sums
from reference.rounding import FloatFormat, round_to
from reference.routing import local_ids
from reference.semantics import RIGHT, Columns, Operands, Semantics, reload
from reference.swiglu import GatedActivation
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# x (T, H) in 16 bits, router weights float32 (T, k), ids int32 (T, k)
Call = tuple[Array, Array, Array]
Memo = dict[Any, Any]
Quantized = QuantizedActivations | Float64Array


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
    """What a checkpoint means (C91).

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

    def __post_init__(self) -> None:
        if self.weights_on_input and self.top_k != 1:
            raise TensorError(f"weights_on_input: legal for top_k 1 only, not for {self.top_k} (C95)")
        present = [*self.experts, *([self.shared] if self.shared else [])]
        for i, expert in enumerate(present):
            if expert.w13.n != 2 * expert.w2.k or expert.w13.k != expert.w2.n:
                raise TensorError(
                    f"expert {i}: w13 of shape [{expert.w13.n}, {expert.w13.k}] and w2 of "
                    f"[{expert.w2.n}, {expert.w2.k}] are no [2I, H] and [H, I]"
                )
            for name, bias, n in (("b13", expert.b13, expert.w13.n), ("b2", expert.b2, expert.w2.n)):
                if bias is not None and bias.shape != (n,):
                    raise TensorError(f"expert {i}: {name}: expected shape [{n}], found {list(bias.shape)}")
        places = self.expert_map
        if (
            places is not None
            and places.size
            and not (places.min() >= -1 and places.max() < len(self.experts))
        ):
            raise TensorError(
                f"expert_map: {places.min()}..{places.max()} is outside -1..{len(self.experts) - 1}, "
                "the experts that are present"
            )

    @property
    def hidden(self) -> int:
        return self.experts[0].w2.n


# ---- the stages, which a mutant replaces one of


@dataclass(frozen=True)
class Dispatch:
    """Where the slots of one call go: rows (T, k) the token that each reads, places (T, k) its expert or -1 for
    none, weights (T, k) float64."""

    rows: IntArray
    places: IntArray
    weights: Float64Array


@dataclass(frozen=True)
class MoeSemantics:
    """linear: the stages of both projections. The others have the signature of the right functions below.

    load: what is read of a checkpoint. requantize: the intermediate (slots of all experts in the order of tokens).
    """

    linear: Semantics
    gated: swiglu.GatedSemantics
    load: Callable[[MoeLayer], MoeLayer]
    dispatch: Callable[[Array, Array, MoeLayer], Dispatch]
    requantize: Callable[[Float64Array, ActivationFormat, Quantizer], Quantized]
    apply_weights: Callable[[Float64Array, Float64Array, IntArray, MoeLayer], Float64Array]
    gather: Callable[[Float64Array, IntArray], Float64Array]
    join: Callable[
        [Float64Array, Float64Array | None, MoeLayer, Stored, Callable[[Float64Array], Float64Array]],
        Float64Array,
    ]


def load(layer: MoeLayer) -> MoeLayer:
    return layer


def dispatch(ids: Array, weights: Array, layer: MoeLayer) -> Dispatch:
    """Global ids to places; an id of -1 is no expert (C92)."""
    places = local_ids(ids, layer.expert_map).reshape(ids.shape)
    rows = np.broadcast_to(np.arange(len(ids), dtype=np.int64)[:, None], ids.shape)
    return Dispatch(rows, places, weights.astype(np.float64))


def requantize(h: Float64Array, fmt: ActivationFormat, how: Quantizer) -> Quantized:
    """The intermediate (S, I), each slot by itself (C94)."""
    return activations.quantize(h, fmt, how)


def apply_weights(
    outputs: Float64Array, weights: Float64Array, places: IntArray, layer: MoeLayer
) -> Float64Array:
    """Each expert's output (T, k, H) times its weight (T, k), unless the input has met it already (C95)."""
    return outputs if layer.weights_on_input else outputs * weights[:, :, None]


def gather(products: Float64Array, places: IntArray) -> Float64Array:
    """The sum over a token's slots (T, k, H); a slot without expert adds nothing (C92)."""
    total: Float64Array = np.where(places[:, :, None] >= 0, products, 0.0).sum(axis=1)
    return total


@dataclass(frozen=True)
class Stored:
    """Which numbers are rounded to 16 bits on the way to the output: the routed sum, the same times the factor,
    the shared expert's output."""

    routed: bool = False
    scaled: bool = False
    shared: bool = False


# What kernels do, by name: nothing, every one, the last two, the shared expert's alone, all but what a fused
# multiplication and addition skips.
JOINED = {
    "": Stored(),
    "joined": Stored(True, True, True),
    "scaled, joined": Stored(False, True, True),
    "shared": Stored(shared=True),
    "joined by fma": Stored(True, False, True),
}


def join(
    routed: Float64Array,
    shared: Float64Array | None,
    layer: MoeLayer,
    stored: Stored,
    kept: Callable[[Float64Array], Float64Array],
) -> Float64Array:
    """factor * routed + shared (C96); kept: how what is stored is rounded."""
    scaled = (kept(routed) if stored.routed else routed) * layer.factor
    scaled = kept(scaled) if stored.scaled else scaled
    return scaled if shared is None else scaled + (kept(shared) if stored.shared else shared)


MOE_RIGHT = MoeSemantics(RIGHT, swiglu.GATED_RIGHT, load, dispatch, requantize, apply_weights, gather, join)


def moe_semantics(semantics: MoeSemantics | swiglu.GatedSemantics | Semantics) -> MoeSemantics:
    """A layer with these stages, right in all others."""
    if isinstance(semantics, swiglu.GatedSemantics):
        return replace(MOE_RIGHT, gated=semantics)
    return replace(MOE_RIGHT, linear=semantics) if isinstance(semantics, Semantics) else semantics


# ---- answers


def moe(calls: Sequence[Call], layer: MoeLayer, output: FloatFormat, contract: Contract) -> Expected:
    """The expected outputs (sum of T, H) of a layer called several times, one below the other, with the bound.

    calls: (x, weights, ids) each. output: the format of x and y. contract: what the backend declares; it
    chooses the hypotheses. Raises TensorError for shapes, ids and weights that do not fit.
    """
    _check(calls, layer)
    found = _Layer(calls, layer, output, contract, MOE_RIGHT, True).answers()
    # One code or one rounding of the intermediate that goes the other way moves a whole row, by all of its radius.
    hypotheses = {name: Hypothesis(ball.centre, ball.radius, tipping=1.0) for name, ball in found.items()}
    return Expected(next(iter(hypotheses.values())).centre, hypotheses, output)


def moe_of(
    expected: Expected,
    calls: Sequence[Call],
    layer: MoeLayer,
    contract: Contract,
    semantics: MoeSemantics,
    memo: Memo | None = None,
) -> Expected:
    """What other semantics compute of the same calls, under the same contract and the radius of the right answer.

    memo: kept by the caller for more semantics of the same calls and contract; it holds what the right stages give.
    """
    centres = moe_centres(calls, layer, expected.output, contract, semantics, memo)
    hypotheses = {
        name: Hypothesis(
            centre, getattr(expected.hypotheses.get(name), "radius", expected.radius), tipping=1.0
        )
        for name, centre in centres.items()
    }
    return Expected(next(iter(centres.values())), hypotheses, expected.output)


def moe_centres(
    calls: Sequence[Call],
    layer: MoeLayer,
    output: FloatFormat,
    contract: Contract,
    semantics: MoeSemantics,
    memo: Memo | None = None,
) -> dict[str, Float64Array]:
    """What any semantics compute before the last rounding (sum of T, H), by hypothesis, without a bound."""
    found = _Layer(calls, layer, output, contract, semantics, False, memo).answers()
    return {name: ball.centre for name, ball in found.items()}


def _check(calls: Sequence[Call], layer: MoeLayer) -> None:
    experts = len(layer.experts if layer.expert_map is None else layer.expert_map)
    for x, weights, ids in calls:
        shape = (len(x), layer.top_k)
        if x.ndim != 2 or x.shape[1] != layer.hidden:
            raise TensorError(f"x: expected shape [T, {layer.hidden}], found {list(x.shape)}")
        for name, array in (("weights", weights), ("ids", ids)):
            if array.shape != shape:
                raise TensorError(f"{name}: expected shape {list(shape)}, found {list(array.shape)}")
        if ids.size and not (ids.min() >= -1 and ids.max() < experts):
            raise TensorError(f"ids: {ids.min()}..{ids.max()} is outside -1..{experts - 1}")
        for token, row in enumerate(ids):
            chosen = row[row >= 0]
            if len(np.unique(chosen)) != len(chosen):
                raise TensorError(f"ids: token {token} names an expert twice: {row.tolist()} (C92)")


@dataclass(frozen=True)
class _Values:
    """The input of a projection, a row a slot: as quantized or as they are, the radius around each value, the
    relative doubt about a slot's scale (S, 1), and whether nothing about a slot is open."""

    plain: Float64Array
    quantized: Quantized
    radius: Float64Array
    scale_doubt: Float64Array
    settled: npt.NDArray[np.bool_]


class _Layer:
    """All calls to one layer under one contract and one semantics; bounded: with radii, which cost most of the time."""

    def __init__(
        self,
        calls: Sequence[Call],
        layer: MoeLayer,
        output: FloatFormat,
        contract: Contract,
        semantics: MoeSemantics,
        bounded: bool,
        memo: Memo | None = None,
    ) -> None:
        self.layer = layer = semantics.load(layer)
        self.output, self.contract, self.semantics, self.bounded = output, contract, semantics, bounded
        self.fmt = layer.activation
        self.x = [x for x, _, _ in calls]
        found = [semantics.dispatch(ids, weights, layer) for _, weights, ids in calls]
        starts = np.cumsum([0, *(len(x) for x in self.x)])
        self.tokens = int(starts[-1])
        self.rows = np.concatenate([d.rows + s for d, s in zip(found, starts, strict=False)])
        self.places = np.concatenate([d.places for d in found])
        self.weights = np.concatenate([d.weights for d in found])
        if layer.shared is not None:  # one more slot a token, of an expert behind the last
            own = np.arange(self.tokens)[:, None]
            self.rows = np.hstack([self.rows, own])
            self.places = np.hstack([self.places, np.full_like(own, len(layer.experts))])
        self.experts = [*layer.experts, *([layer.shared] if layer.shared else [])]
        self.slots = {
            int(e): np.flatnonzero(self.places.reshape(-1) == e) for e in np.unique(self.places) if e >= 0
        }
        self._told: list[Quantizer] = []
        same = semantics.load is load and semantics.dispatch is dispatch and semantics.linear is RIGHT
        self._first = memo if memo is not None and same else {}
        same = same and semantics.gated is swiglu.GATED_RIGHT and semantics.requantize is requantize
        self._outputs = memo if memo is not None and same else {}
        self._sizes: dict[tuple[int, str], bounds.Magnitudes] = {}

    # ---- the hypotheses, branch by branch; those that change nothing are dropped on the way

    def answers(self) -> dict[str, Ball]:
        found: dict[str, Ball] = {}
        for how, values in self._inputs():
            for form in self._forms():
                gate_up = _once(self._first, (form, how), partial(self._project, values, "w13", form))
                for stored, gate_up_ in self._stored("gate and up", gate_up).items():
                    for half, h in self._activated(gate_up_, bool(stored)).items():
                        for kept, values2 in self._intermediates(h, how).items():
                            name = ", ".join(
                                p for p in (form, how.name if how else "", stored, half, kept) if p
                            )
                            outputs = _once(self._outputs, name, partial(self._project, values2, "w2", form))
                            for last, y in self._sums(outputs).items():
                                found[f"{name}, {last}" if last else name] = y
        return _distinct(found)

    def _inputs(self) -> Iterator[tuple[Quantizer | None, _Values]]:
        x = self.x
        if self.layer.weights_on_input:
            counts = np.cumsum([len(part) for part in x])[:-1]
            on = np.split(self.weights[:, 0], counts)
            x = [
                # float32 products, rounded again as they are stored
                (part.astype(np.float32) * w[:, None].astype(np.float32)).astype(self.output.dtype)
                for part, w in zip(x, on, strict=True)
            ]
        ways = quantize_calls(x, self.fmt, self.contract, None, self.semantics.linear)
        by_name: dict[str, Quantizer | None] = {"": None}
        if self.fmt.kind != "a16":
            by_name = {q.name: q for q in quantizers(self.fmt, self.contract.quantizer, self.output)}
        self._told = [q for name in ways if (q := by_name[name]) is not None]
        first = next(iter(ways.values()))
        open_rows = np.zeros(self.tokens, np.bool_)
        if self.bounded and self.fmt.kind != "a16":
            open_rows = np.concatenate(
                [
                    activations.open_tokens(part, self.fmt, self.contract.quantizer, q)  # type: ignore[arg-type]
                    for part, q in zip(x, first, strict=True)
                ]
            )
        source = self.rows.reshape(-1)
        for name, parts in ways.items():
            whole = _stacked(parts)
            plain = whole.dequantized() if isinstance(whole, QuantizedActivations) else whole
            settled = np.ones(len(plain), np.bool_)
            if isinstance(whole, QuantizedActivations):
                settled = ~open_rows & np.isin(np.frexp(whole.scale)[0], (0.0, 0.5))[:, 0]
            yield (
                by_name.get(name),
                _Values(
                    plain[source],
                    _take(whole, source),
                    np.zeros((len(source), plain.shape[1])),
                    np.zeros((len(source), 1)),
                    settled[source],
                ),
            )

    def _forms(self) -> list[str]:
        names = dict.fromkeys(
            form for e in self.slots for which in ("w13", "w2") for form in self._weight(e, which)[1]
        )
        return list(names) or [""]

    def _stored(self, what: str, ball: Ball) -> dict[str, Ball]:
        """As it is, or rounded to 16 bits, or both, as the contract says (C93)."""
        found = {}
        if self.contract.intermediates != "16-bit":
            found[""] = ball
        if self.contract.intermediates != "fp32":
            found[f"{what} in {self.output.name}"] = self._ball(ball.rounded(self.output))
        return _distinct(found)

    def _activated(self, gate_up: Ball, stored: bool) -> dict[str, Ball]:
        """The intermediate in float32 (S, I). What keeps gate and up in float32 rounds no half of it."""
        contract = self.contract if stored else replace(self.contract, intermediates="fp32")
        found = swiglu.activated(gate_up, self.layer.gated, self.output, contract, self.semantics.gated)
        return _distinct({name: self._ball(ball) for name, ball in found.items()})

    def _intermediates(self, h: Ball, how: Quantizer | None) -> dict[str, _Values]:
        """The input of the second projection: in 16 bits, or quantized, from float32 or from 16 bits (C94)."""
        if self.fmt.kind == "a16":
            ball = h.rounded(self.output)
            return {"": _Values(ball.centre, ball.centre, ball.radius, *self._sure(len(ball.centre)))}
        assert how is not None
        found: dict[str, _Values] = {}
        for name, ball in self._stored("intermediate", h).items():
            for way in self._second(how):
                values = self._requantized(ball, way)
                label = ", ".join(p for p in (name, way.name if way is not how else "") if p)
                if not any(_alike(values, other) for other in found.values()):
                    found[label] = values
        return found

    def _second(self, how: Quantizer) -> list[Quantizer]:
        """The same order of operations, and those that x did not tell from an earlier one: floors, and quotients
        of 16 bits, which the radius of a code does not cover."""
        told = {(q.floor, q.quotient) for q in self._told}
        every = quantizers(self.fmt, self.contract.quantizer, self.output)
        others = {(q.floor, q.quotient): q for q in every if (q.floor, q.quotient) not in told}
        return [how, *others.values()]

    def _requantized(self, h: Ball, how: Quantizer) -> _Values:
        """Codes of h, and how far they and the scale may be off, for h is known to its radius only."""
        quantized = self.semantics.requantize(h.centre, self.fmt, how)
        if not isinstance(quantized, QuantizedActivations):
            return _Values(quantized, quantized, np.zeros_like(quantized), *self._sure(len(quantized)))
        plain = quantized.dequantized()
        if not self.bounded:
            return _Values(plain, quantized, np.zeros_like(plain), *self._sure(len(plain)))
        size = np.abs(h.centre)
        scale = quantized.scale
        low = activations.scale_of(
            (np.maximum(size - h.radius, 0)).max(axis=1, keepdims=True, initial=0), self.fmt, how
        )
        high = activations.scale_of((size + h.radius).max(axis=1, keepdims=True, initial=0), self.fmt, how)
        largest = size.max(axis=1, keepdims=True, initial=0)
        sure = (low == high) & (largest == activations.divisor(self.fmt, how) * scale)
        sure &= np.isin(np.frexp(scale)[0], (0.0, 0.5))
        slack = np.where(sure, 0.0, activations.CODE_SLACK)
        low, high = low * (1 - slack), np.minimum(high * (1 + slack), UNBOUNDED)
        sign = np.where(h.centre < 0, -1.0, 1.0)
        shortest, longest = sign * np.maximum(size - h.radius, 0), sign * (size + h.radius)
        across = h.radius > size  # may have either sign
        codes = quantized.codes
        least = np.where(across, -sign * (h.radius - size), shortest)
        ends = (
            self._codes(least, np.where(across, low, high), how),
            self._codes(longest, low, how),
        )
        off = np.maximum(np.abs(ends[0] - codes), np.abs(ends[1] - codes))
        with np.errstate(divide="ignore", invalid="ignore"):
            doubt = np.maximum(
                np.where(scale == 0, 0.0, high / scale - 1), np.where(scale == 0, 0.0, 1 - low / scale)
            )
        return _Values(plain, quantized, off * high, np.abs(doubt), (off == 0).all(axis=1) & sure[:, 0])

    def _codes(self, values: Float64Array, scale: Float64Array, how: Quantizer) -> Float64Array:
        plain = replace(how, code_by="divide")
        return activations.codes_of(values, scale, np.abs(values).max(initial=0) + 0 * scale, self.fmt, plain)

    def _sums(self, outputs: Ball) -> dict[str, Ball]:
        """The weighted sum over the slots and what joins it, (T, H): the factor at the end or in the weights, what
        is stored on the way (C93, C95, C96)."""
        t, hidden, k = self.tokens, outputs.centre.shape[1], self.weights.shape[1]
        shape = (t, self.places.shape[1], hidden)
        every = Ball(outputs.centre.reshape(shape), outputs.radius.reshape(shape))
        shared = every[:, k] if self.layer.shared is not None else None
        every, intermediates = every[:, :k], self.contract.intermediates
        joins = dict(JOINED) if intermediates != "fp32" else {"": JOINED[""]}
        if shared is None:
            joins = {name: how for name, how in joins.items() if not how.shared or how.scaled}
            if self.layer.factor == 1:
                joins = {"": JOINED[""]}
        found = {}
        for place, layer, weights in self._factors():
            for name, ball in self._routed(every, weights).items():
                for last, how in joins.items():
                    label = ", ".join(p for p in (place, name, last and f"{last} in 16 bits") if p)
                    found[label] = self._joined(ball, shared, layer, how)
        return _distinct(found)

    def _factors(self) -> list[tuple[str, MoeLayer, Float64Array]]:
        """The routed scaling factor at the end, or in the weights; in float32 the radius covers both. Of a wrong
        layer the first is enough, for a factor of 1 hides what a mutant does to it."""
        found = [("", self.layer, self.weights)]
        if self.bounded and self.layer.factor != 1 and self.contract.intermediates != "fp32":
            weights = (self.weights * self.layer.factor).astype(np.float32).astype(np.float64)
            found.append(("factor in the weights", replace(self.layer, factor=1.0), weights))
        return found

    def _routed(self, every: Ball, weights: Float64Array) -> dict[str, Ball]:
        places = self.places[:, : weights.shape[1]]
        stored = f"in {self.output.name}"
        found: dict[str, Ball] = {}
        if self.contract.intermediates != "16-bit":
            found[""] = self._gathered(self._weighed(every, weights, places), places)
        if self.contract.intermediates != "fp32":
            rounded = self._weighed(self._ball(every.rounded(self.output)), weights, places)
            found[f"experts {stored}"] = self._gathered(rounded, places)
            products = self._ball(self._weighed(every, weights, places).rounded(self.output))
            found[f"weighted experts {stored}"] = self._gathered(products, places)
            found[f"weighted experts {stored} and so their sum"] = self._folded(products, places)
        return _distinct(found)

    def _weighed(self, outputs: Ball, weights: Float64Array, places: IntArray) -> Ball:
        weights = np.where(places >= 0, weights, 0.0)  # that of no expert may be anything
        centre = self.semantics.apply_weights(outputs.centre, weights, places, self.layer)
        if self.layer.weights_on_input or not self.bounded:
            return Ball(centre, outputs.radius)
        return Ball(centre, outputs.radius * np.abs(weights[:, :, None])).kept()

    def _gathered(self, products: Ball, places: IntArray) -> Ball:
        """Summed in float32 in any order."""
        centre = self.semantics.gather(products.centre, places)
        if not self.bounded:
            return Ball.exact(centre)
        size = np.abs(products.centre)
        unit = _least_unit(products.centre)
        whole = (products.radius == 0).all(axis=1) & (size.sum(axis=1) <= 2.0**24 * unit)
        additions = max(size.shape[1] - 1, 0) * 2.0**-24 * (size + products.radius).sum(axis=1)
        return Ball(centre, products.radius.sum(axis=1) + np.where(whole, 0.0, additions))

    def _folded(self, products: Ball, places: IntArray) -> Ball:
        """Added one after the other in the order of the slots, each sum rounded to 16 bits."""
        if self.semantics.gather is not gather:
            return Ball.exact(round_to(self.semantics.gather(products.centre, places), self.output))
        present = places[:, :, None] >= 0
        products = Ball(np.where(present, products.centre, 0.0), np.where(present, products.radius, 0.0))
        total = products[:, 0]
        for j in range(1, places.shape[1]):
            total = self._ball(total.add(products[:, j]).rounded(self.output))
        return total

    def _joined(self, routed: Ball, shared: Ball | None, layer: MoeLayer, how: Stored) -> Ball:
        kept = partial(round_to, target=self.output)
        other = None if shared is None else shared.centre
        centre = self.semantics.join(routed.centre, other, layer, how, kept)
        if not self.bounded:
            return Ball.exact(centre)

        def stored(ball: Ball, is_stored: bool) -> Ball:
            return ball.rounded(self.output) if is_stored else ball

        ball = stored(routed, how.routed)
        if layer.factor != 1:
            ball = ball.times(Ball.exact(np.full_like(ball.centre, layer.factor)))
            # It may as well be in the weights, which are rounded then.
            ball = ball.plus(2.0**-23 * np.abs(ball.centre) * (ball.radius > 0))
        ball = stored(ball, how.scaled)
        if shared is not None:
            ball = ball.add(stored(shared, how.shared))
        return Ball(centre, ball.radius)

    # ---- the projections

    def _weight(self, expert: int, which: str) -> tuple[Columns, dict[str, Float64Array]]:
        """The columns of one expert's weight, and its matrix in each form that the contract allows."""
        key = (expert, which)
        if key not in self._first:
            linear = self.semantics.linear
            columns = linear.columns(reload(getattr(self.experts[expert], which), linear), self.output)
            self._first[key] = columns, matrices(columns, self.contract, linear)
        found: tuple[Columns, dict[str, Float64Array]] = self._first[key]
        return found

    def _project(self, values: _Values, which: str, form: str) -> Ball:
        """One projection of every slot by its own expert, (S, N); zero for slots without."""
        sides = [getattr(expert, which).n for expert in self.experts]
        centre = np.zeros((self.places.size, sides[0]))
        radius = np.zeros_like(centre)
        for expert, slots in self.slots.items():
            columns, forms = self._weight(expert, which)
            matrix = forms.get(form, next(iter(forms.values())))
            bias = getattr(self.experts[expert], f"b{which[1:]}")
            operands = Operands.of(_take(values.quantized, slots), matrix, columns)
            total = self.semantics.linear.product(operands)
            offset = None if bias is None else bias.astype(np.float64)
            centre[slots] = total if offset is None else total + offset
            if self.bounded:
                radius[slots] = self._radius(values, slots, (expert, which), columns, matrix, bias, total)
        return Ball(centre, radius)

    def _radius(
        self,
        values: _Values,
        slots: IntArray,
        key: tuple[int, str],
        columns: Columns,
        matrix: Float64Array,
        bias: Array | None,
        total: Float64Array,
    ) -> Float64Array:
        """What the accumulation adds, and what the radius of the input becomes (C97)."""
        plain, off, doubt = values.plain[slots], values.radius[slots], values.scale_doubt[slots]
        own = self._accumulation(key, plain, columns, bias, total)
        if self.contract.partial_sums == 1 and self.contract.epilogue == "once":
            known = values.settled[slots] & _on_a_lattice(plain, off)
            if known.any():
                narrow = self.fmt.kind == "fp8" and self.contract.accumulator != "fp32"
                exact = exact_outputs(plain[known], columns, bias, 14 if narrow else 24)
                own[known] = np.where(exact, 0.0, own[known])
        if off.any():
            carried = np.minimum(
                off @ np.abs(matrix).T, bounds.LAMBDA * np.sqrt(np.square(off) @ np.square(matrix).T)
            )
            # Among numbers that are exact, what is far below their unit may be kept or lost at each addition.
            carried = np.where(own == 0, (1 + plain.shape[1]) * carried, carried)
            own += (1 + doubt) * carried
        return np.asarray(own + doubt * np.abs(total))

    def _accumulation(
        self,
        key: tuple[int, str],
        plain: Float64Array,
        columns: Columns,
        bias: Array | None,
        total: Float64Array,
    ) -> Float64Array:
        """The radius of one expert's sums. Of the second projection it is that of the first hypothesis and an
        eighth more: the intermediates of the others differ by a rounding to 16 bits, or by codes that flip."""
        contract, weight = self.contract, columns.weight
        offset = None if bias is None else bias.astype(np.float64)
        if key not in self._sizes:
            self._sizes[key] = bounds.magnitudes(
                plain, columns.u, columns.u_z, columns.scale, weight.groups(), weight.format.offset
            )
        own = radius_of_sums(self._sizes[key], total, offset, self.output, contract, self.fmt)
        if key[1] == "w2":
            own = own * 1.125
        if contract.epilogue != "once":
            size = np.abs(total) + (0 if offset is None else np.abs(offset))
            own = own + 4 * self.output.unit_roundoff * size
        return own

    def _ball(self, ball: Ball) -> Ball:
        return ball if self.bounded else Ball.exact(ball.centre)

    def _sure(self, slots: int) -> tuple[Float64Array, npt.NDArray[np.bool_]]:
        return np.zeros((slots, 1)), np.ones(slots, np.bool_)


def _once(memo: Memo, key: Any, project: Callable[[], Ball]) -> Ball:
    if key not in memo:
        memo[key] = project()
    found: Ball = memo[key]
    return found


def _on_a_lattice(plain: Float64Array, off: Float64Array) -> npt.NDArray[np.bool_]:
    """The slots whose values (S, K) are few multiples of a common unit, known but for what is far below it (C98)."""
    unit = granule(plain)
    few = np.abs(plain).max(axis=1, initial=0) <= 2.0**24 * unit
    return np.asarray(few & (off.max(axis=1, initial=0) <= 2.0**-30 * unit))


def _distinct(found: dict[str, Ball]) -> dict[str, Ball]:
    """Without those that say the same as an earlier one."""
    kept: dict[str, Ball] = {}
    for name, ball in found.items():
        if not any(
            np.array_equal(ball.centre, other.centre, equal_nan=True)
            and np.array_equal(ball.radius, other.radius, equal_nan=True)
            for other in kept.values()
        ):
            kept[name] = ball
    return kept


def _alike(a: _Values, b: _Values) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("plain", "radius", "scale_doubt")
    )


def _least_unit(values: Float64Array) -> Float64Array:
    """The largest power of two that divides every number along axis 1 of (T, k, H), as (T, H)."""
    t, k, hidden = values.shape
    return granule(values.transpose(0, 2, 1).reshape(t * hidden, k)).reshape(t, hidden)


def _stacked(parts: list[Quantized]) -> Quantized:
    """The calls one below the other, a scale a token."""
    if not isinstance(parts[0], QuantizedActivations):
        return np.concatenate(parts)  # type: ignore[arg-type]
    codes = np.concatenate([p.codes for p in parts])  # type: ignore[union-attr]
    scale = np.concatenate([np.broadcast_to(p.scale, (len(p.codes), 1)) for p in parts])  # type: ignore[union-attr]
    return QuantizedActivations(codes, scale)


def _take(values: Quantized, rows: IntArray) -> Quantized:
    if not isinstance(values, QuantizedActivations):
        return values[rows]
    scale = values.scale if len(values.scale) == 1 else values.scale[rows]
    return QuantizedActivations(values.codes[rows], scale)
