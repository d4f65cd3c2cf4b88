"""Wrong layers of experts: what is read, where tokens go, what is weighted and summed, the intermediate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from reference.activations import QuantizedActivations, quantize
from reference.formats import ActivationFormat, WeightFormat
from reference.moe import MOE_RIGHT, Dispatch, dispatch, gather, join
from reference.mutants.registry import Registry, registrar
from reference.rounding import E4M3, FLOAT_FORMATS, round_to
from reference.swiglu import GatedActivation

EXPERTS: Registry = {}
_register = registrar(EXPERTS, MOE_RIGHT)


@dataclass(frozen=True)
class LayerTraits:
    """What a mutant needs to know of a layer and its calls; recipe: of the case, which says what is absent,
    unrouted, shared or on the input."""

    weight: WeightFormat
    gated: GatedActivation
    activation: ActivationFormat
    dtype: str
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    bias: bool
    act_order: bool
    recipe: str
    convention: str = "kernel"

    @property
    def present(self) -> int:
        return self.experts // 2 if self.recipe == "absent" else self.experts


def experts(stage, computes, when=lambda t: True):
    return _register("experts", stage, computes, lambda t: t.tokens > 0 and when(t))


def weights(stage, computes, when=lambda t: True):
    return _register("router weights", stage, computes, lambda t: t.tokens > 0 and when(t))


def _several(t):
    return t.present > 1 and t.recipe != "one-expert"


def _asymmetric(t):
    return not t.weight.symmetric and _several(t)


def _lost(t):
    return t.recipe in ("absent", "unrouted")


def _slots(t):
    return t.top_k > 1


def _weighted(t):
    """Whether any weight is not 1."""
    return t.recipe != "on-input" and (_slots(t) or t.recipe in ("readout", "integers"))


def _quantized(t):
    return t.activation.kind != "a16"


def _with(layer, change):
    """The layer with change(expert, index) for every expert."""
    return replace(layer, experts=tuple(change(x, i) for i, x in enumerate(layer.experts)))


def _of_another(layer, which, field, other):
    """Each expert's weight with one field of that of another."""
    count = len(layer.experts)

    def change(x, i):
        source = getattr(layer.experts[other(i) % count], which)
        return replace(x, **{which: replace(getattr(x, which), **{field: getattr(source, field)})})

    return _with(layer, change)


# ---- what is read of the checkpoint


@experts("load", "with the gate and up scales of the next expert", _several)
def w13_scales_of_the_next_expert(layer):
    return _of_another(layer, "w13", "scale", lambda i: i + 1)


@experts("load", "with the down projection's scales of the next expert", _several)
def w2_scales_of_the_next_expert(layer):
    return _of_another(layer, "w2", "scale", lambda i: i + 1)


@experts("load", "with the scales of expert 0 for all", _several)
def scales_of_expert_0(layer):
    return _of_another(_of_another(layer, "w13", "scale", lambda i: 0), "w2", "scale", lambda i: 0)


@experts("load", "with the zero points of the next expert", _asymmetric)
def w13_zero_points_of_the_next_expert(layer):
    return _of_another(layer, "w13", "zero_point", lambda i: i + 1)


@experts("load", "with the down projection's zero points of the next expert", _asymmetric)
def w2_zero_points_of_the_next_expert(layer):
    return _of_another(layer, "w2", "zero_point", lambda i: i + 1)


@experts("load", "with the g_idx of expert 0 for all", lambda t: t.act_order and _several(t))
def g_idx_of_expert_0(layer):
    return _of_another(
        _of_another(layer, "w13", "group_index", lambda i: 0), "w2", "group_index", lambda i: 0
    )


@experts("load", "with the down projection of the next expert", _several)
def w2_of_the_next_expert(layer):
    return _with(layer, lambda x, i: replace(x, w2=layer.experts[(i + 1) % len(layer.experts)].w2))


@experts("load", "with one expert's weights for one other", _several)
def one_expert_for_its_neighbour(layer):
    return replace(layer, experts=(layer.experts[1], *layer.experts[1:]))


@experts("load", "with the scales of the gates for up as well")
def gate_scales_for_up(layer):
    def change(x, i):
        half = x.w2.k
        scale = x.w13.scale.copy()
        if layer.gated.arrangement == "interleaved":
            scale[1::2] = scale[0::2]
        elif layer.gated.arrangement == "gate-up":
            scale[half:] = scale[:half]
        else:
            scale[:half] = scale[half:]
        return replace(x, w13=replace(x.w13, scale=scale))

    return _with(layer, change)


def _transposed(weight):
    codes = np.ascontiguousarray(weight.codes.reshape(weight.k, weight.n).T)
    return replace(weight, codes=codes)


@experts("load", "with the weights read with K in front of N")
def weights_read_transposed(layer):
    return _with(layer, lambda x, i: replace(x, w13=_transposed(x.w13), w2=_transposed(x.w2)))


@experts(
    "load", "without the biases of gate and up", lambda t: t.bias and t.recipe not in ("readout", "integers")
)
def w13_bias_dropped(layer):
    return _with(layer, lambda x, i: replace(x, b13=None))


@experts("load", "without the biases of the down projection", lambda t: t.bias)
def w2_bias_dropped(layer):
    return _with(layer, lambda x, i: replace(x, b2=None))


@experts("load", "with the biases of the next expert", lambda t: t.bias and _several(t))
def biases_of_the_next_expert(layer):
    def change(x, i):
        other = layer.experts[(i + 1) % len(layer.experts)]
        return replace(x, b13=other.b13, b2=other.b2)

    return _with(layer, change)


@experts("load", "without the shared expert", lambda t: t.recipe == "shared")
def shared_expert_dropped(layer):
    return replace(layer, shared=None)


@experts("load", "with the first routed expert as the shared one", lambda t: t.recipe == "shared")
def shared_expert_is_expert_0(layer):
    return replace(layer, shared=layer.experts[0])


@weights(
    "load", "with the weights on the experts' output instead of their input", lambda t: t.recipe == "on-input"
)
def weights_on_output_instead_of_input(layer):
    return replace(layer, weights_on_input=False)


# ---- where tokens go


def _moved(found, **changes):
    return Dispatch(**{"rows": found.rows, "places": found.places, "weights": found.weights, **changes})


@experts("dispatch", "with the expert map ignored: ids taken for places", lambda t: t.recipe == "absent")
def expert_map_ignored(ids, w, layer):
    return _moved(dispatch(ids, w, layer), places=ids.astype(np.int64) % len(layer.experts))


@experts("dispatch", "with the last expert for -1", _lost)
def absent_read_as_the_last(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, places=np.where(found.places < 0, len(layer.experts) - 1, found.places))


@experts("dispatch", "with the first expert for -1", _lost)
def absent_read_as_the_first(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, places=np.maximum(found.places, 0))


@experts("dispatch", "with experts counted from 1", _several)
def experts_counted_from_1(ids, w, layer):
    found = dispatch(ids, w, layer)
    moved = (found.places - 1) % len(layer.experts)
    return _moved(found, places=np.where(found.places < 0, -1, moved))


@experts("dispatch", "without the last expert")
def last_expert_lost(ids, w, layer):
    found = dispatch(ids, w, layer)
    last = found.places.max(initial=-1)
    return _moved(found, places=np.where(found.places == last, -1, found.places))


def _without(ids, w, layer, lost):
    """Slots of each expert, in the order of tokens, of which lost(number, count) are left out."""
    found = dispatch(ids, w, layer)
    flat = found.places.reshape(-1).copy()
    for e in np.unique(flat[flat >= 0]):
        at = np.flatnonzero(found.places.reshape(-1) == e)
        flat[at[lost(np.arange(len(at)), len(at))]] = -1
    return _moved(found, places=flat.reshape(found.places.shape))


@experts("dispatch", "without the first token of each expert")
def first_token_of_an_expert_lost(ids, w, layer):
    return _without(ids, w, layer, lambda i, n: i == 0)


@experts("dispatch", "without the last token of each expert")
def last_token_of_an_expert_lost(ids, w, layer):
    return _without(ids, w, layer, lambda i, n: i == n - 1)


@experts("dispatch", "without an expert's tokens beyond 64", lambda t: t.tokens * t.top_k > 64 * t.present)
def tokens_beyond_64_lost(ids, w, layer):
    return _without(ids, w, layer, lambda i, n: i >= 64)


@experts("dispatch", "without the last, partial block of 16 tokens of an expert")
def partial_block_lost(ids, w, layer):
    return _without(ids, w, layer, lambda i, n: (i >= n // 16 * 16) & (n > 0))


@experts("dispatch", "without the last slot of each token", _slots)
def last_slot_lost(ids, w, layer):
    found = dispatch(ids, w, layer)
    places = found.places.copy()
    places[:, -1] = -1
    return _moved(found, places=places)


@experts("dispatch", "with the row of the next token", lambda t: t.tokens > 1)
def row_of_the_next_token(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, rows=(found.rows + 1) % max(len(ids), 1))


@experts("dispatch", "with the slot's number as the token's row", lambda t: _slots(t) and t.tokens > 1)
def slot_number_as_row(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, rows=np.arange(ids.size).reshape(ids.shape) % max(len(ids), 1))


@experts("dispatch", "with the second slot's expert for the first as well", _slots)
def one_expert_for_two_slots(ids, w, layer):
    found = dispatch(ids, w, layer)
    places = found.places.copy()
    places[:, 0] = places[:, 1]
    return _moved(found, places=places)


@weights("dispatch", "with the weights of the next token", lambda t: t.tokens > 1)
def weights_of_the_next_token(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, weights=np.roll(found.weights, -1, axis=0))


@weights("dispatch", "with the weights of a token's slots in reverse", _slots)
def weights_of_the_slots_reversed(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, weights=found.weights[:, ::-1])


@weights("dispatch", "with the weights in the order of experts instead of slots", _slots)
def weights_in_the_order_of_experts(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, weights=np.take_along_axis(found.weights, np.argsort(ids, axis=1), axis=1))


@weights("dispatch", "with weights read as bf16", lambda t: t.recipe not in ("readout", "integers"))
def weights_in_bf16(ids, w, layer):
    found = dispatch(ids, w, layer)
    return _moved(found, weights=round_to(found.weights, FLOAT_FORMATS["bf16"]))


@weights(
    "dispatch", "with weights made to add up to 1", lambda t: t.recipe in ("readout", "integers", "on-input")
)
def weights_renormalized(ids, w, layer):
    found = dispatch(ids, w, layer)
    total = found.weights.sum(axis=1, keepdims=True)
    return _moved(found, weights=found.weights / np.where(total == 0, 1.0, total))


@weights(
    "dispatch",
    "with weights made to add up to 1 over the experts that are present",
    lambda t: _lost(t) and _slots(t),
)
def weights_renormalized_over_the_present(ids, w, layer):
    found = dispatch(ids, w, layer)
    kept = np.where(found.places >= 0, found.weights, 0.0)
    total = kept.sum(axis=1, keepdims=True)
    return _moved(found, weights=np.where(total == 0, found.weights, kept / np.where(total == 0, 1.0, total)))


# ---- weights


@weights("apply_weights", "without the router's weights", _weighted)
def weights_ignored(outputs, w, places, layer):
    return outputs


@weights("apply_weights", "with the router's weights applied twice", _weighted)
def weights_applied_twice(outputs, w, places, layer):
    return outputs * (w * w)[:, :, None]


@weights("apply_weights", "with the weights on the input and on the output", lambda t: t.recipe == "on-input")
def weights_on_both_sides(outputs, w, places, layer):
    return outputs * w[:, :, None]


@weights(
    "apply_weights",
    "with the down projection's bias outside of the weight",
    lambda t: t.bias and _weighted(t),
)
def bias_outside_of_the_weight(outputs, w, places, layer):
    bias = np.stack([x.b2.astype(np.float64) for x in layer.experts])[np.maximum(places, 0)]
    return outputs * w[:, :, None] + bias * (1 - w)[:, :, None]


# ---- sums


@experts("gather", "the last slot of each token alone", _slots)
def last_slot_overwrites(products, places):
    return gather(products[:, -1:], places[:, -1:])


@experts("gather", "the mean over the slots instead of their sum", _slots)
def mean_of_the_slots(products, places):
    return gather(products, places) / products.shape[1]


@experts("gather", "with what the previous token left where an expert is absent", _lost)
def absent_slots_summed(products, places):
    left = np.roll(products, 1, axis=0)
    return np.where(places[:, :, None] >= 0, products, left).sum(axis=1)


@experts("gather", "without the slots of expert 0")
def expert_0_taken_for_none(products, places):
    return gather(products, np.where(places == 0, -1, places))


# ---- factor and shared expert


def _shared(t):
    return t.recipe == "shared"


@experts("join", "without the routed scaling factor", _shared)
def factor_dropped(routed, shared, layer, stored, kept):
    return join(routed, shared, replace(layer, factor=1.0), stored, kept)


@experts("join", "with the routed scaling factor twice", _shared)
def factor_twice(routed, shared, layer, stored, kept):
    return join(routed, shared, replace(layer, factor=layer.factor**2), stored, kept)


@experts("join", "with the routed scaling factor on the shared expert as well", _shared)
def factor_on_the_shared_expert(routed, shared, layer, stored, kept):
    return join(routed, shared * layer.factor, layer, stored, kept)


@experts("join", "with the shared expert divided by the routed scaling factor", _shared)
def shared_divided_by_the_factor(routed, shared, layer, stored, kept):
    return join(routed, shared / layer.factor, layer, stored, kept)


@experts("join", "with the shared expert twice", _shared)
def shared_added_twice(routed, shared, layer, stored, kept):
    return join(routed, shared * 2, layer, stored, kept)


# ---- the intermediate


def intermediate(computes, when=lambda t: True):
    return _register(
        "activation quantization",
        "requantize",
        computes,
        lambda t: t.tokens > 0 and _quantized(t) and when(t),
    )


@intermediate("with an intermediate that is not quantized")
def intermediate_not_quantized(h, fmt, how):
    return round_to(h, FLOAT_FORMATS["bf16"])


@intermediate("with one scale for the intermediate of all tokens", lambda t: t.tokens * t.top_k > 1)
def intermediate_scale_of_all(h, fmt, how):
    whole = quantize(h.reshape(1, -1), fmt, how)
    return QuantizedActivations(whole.codes.reshape(h.shape), whole.scale)


@intermediate("with the next slot's scale for the intermediate", lambda t: t.tokens * t.top_k > 1)
def intermediate_scale_of_the_next_slot(h, fmt, how):
    right = quantize(h, fmt, how)
    return QuantizedActivations(right.codes, np.roll(right.scale, -1, axis=0))


@intermediate("with an intermediate in int8 instead of fp8", lambda t: t.activation.kind == "fp8")
def intermediate_in_int8(h, fmt, how):
    return quantize(h, ActivationFormat("int8"), how)


@intermediate("with an intermediate in int8 instead of int4", lambda t: t.activation.kind == "int4")
def intermediate_in_int8_for_int4(h, fmt, how):
    return quantize(h, ActivationFormat("int8"), how)


@intermediate("with the largest magnitude of half of the intermediate")
def intermediate_scale_of_half(h, fmt, how):
    half = h.shape[1] // 2
    scale = quantize(h[:, :half], fmt, how).scale
    codes = np.divide(h, scale, out=np.zeros_like(h), where=scale != 0)
    low, high = {"int8": (-128, 127), "int4": (-8, 7), "fp8": (-448, 448)}[fmt.kind]
    codes = np.clip(codes, low, high)
    return QuantizedActivations(np.rint(codes) if fmt.kind != "fp8" else round_to(codes, E4M3), scale)


@intermediate(
    "with the codes of the intermediate cut off instead of rounded", lambda t: t.activation.kind != "fp8"
)
def intermediate_codes_truncated(h, fmt, how):
    right = quantize(h, fmt, how)
    t = np.divide(h, right.scale, out=np.zeros_like(h), where=right.scale != 0)
    return QuantizedActivations(np.trunc(t), right.scale)
