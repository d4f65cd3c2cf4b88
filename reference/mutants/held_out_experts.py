"""Wrong routing, gated activations and fused MoE layers, written without sight of the suites: they judge them, no more.

Most are narrow on purpose: one row, lane, place, expert or tie of many, or a few bits of precision.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.activations import QuantizedActivations, amax, codes_of, quantize, scale_of
from reference.moe import MOE_RIGHT
from reference.mutants.registry import Registry, registrar
from reference.rounding import FLOAT_FORMATS, round_to
from reference.routing import (
    ROUTING_RIGHT,
    Alignment,
    align,
    eligible,
    keys_of,
    laid_out,
    largest,
    local_count,
    local_ids,
    only_groups,
    scores_of,
    weigh,
)
from reference.swiglu import GATED_RIGHT, activate, phi, split

HELD_OUT_EXPERTS: Registry = {}
_routing = registrar(HELD_OUT_EXPERTS, ROUTING_RIGHT)
_gated = registrar(HELD_OUT_EXPERTS, GATED_RIGHT)
_layer = registrar(HELD_OUT_EXPERTS, MOE_RIGHT)
_BF16, _FP16, _FP32 = (FLOAT_FORMATS[name] for name in ("bf16", "fp16", "fp32"))
# What std::numeric_limits<float>::min() gives to those who want the lowest number: the least positive normal one.
_FLT_MIN = 2.0**-126


def route(stage, computes, when=lambda t: True):
    """Of routing or of block alignment; without tokens nothing is wrong."""
    return _routing("routing", stage, computes, lambda t: t.m > 0 and bool(when(t)))


def activation(stage, computes, when=lambda g: True):
    return _gated("gated activation", stage, computes, lambda g: bool(when(g)))


def layer_mutant(kind, stage, computes, when=lambda t: True):
    return _layer(kind, stage, computes, lambda t: t.tokens > 0 and bool(when(t)))


def several(t):
    """Whether more than one expert is met, as far as a recipe tells."""
    return t.present > 1 and t.recipe != "one-expert"


def partly(t):
    """Whether slots may have no expert here."""
    return t.recipe in ("absent", "unrouted")


def on_output(t):
    return t.recipe != "on-input"


def per_row(t):
    return t.weight.strategy != "tensor"


def requantized(t):
    return t.activation.kind != "a16"


# ---- routing: scores


def softmax(t):
    return t.routing.scoring != "sigmoid"


def values_matter(t):
    """Whether scores show beyond their order: one weight that is divided by itself is 1 whatever the score."""
    r = t.routing
    sums = r.groups > 1 and r.group_score == "sum-of-two"
    return r.experts > 1 and (not r.normalized or r.top_k > 1 or r.bias or sums)


def members(routing):
    return routing.experts // routing.groups


def choice(t):
    """Whether any eligible expert is left out."""
    return members(t.routing) * t.routing.top_groups > t.routing.top_k


@route("scores", "2^x in the softmax, log2(e) left out", lambda t: softmax(t) and values_matter(t))
def softmax_to_base_two(logits, routing):
    values = logits.astype(np.float64)
    return scores_of(values if routing.scoring == "sigmoid" else values * np.log(2), routing)


@route("scores", "scores that are kept in fp16", lambda t: t.routing.experts > 1)
def scores_kept_in_fp16(logits, routing):
    return round_to(scores_of(logits, routing), _FP16)


@route(
    "scores",
    "a softmax whose sum has exp(0 - max) for each lane up to the next power of two",
    lambda t: (
        t.routing.scoring == "softmax"
        and t.routing.experts & (t.routing.experts - 1)
        and (not t.routing.renormalize or t.routing.bias)
    ),
)
def softmax_with_padding_lanes(logits, routing):
    if routing.scoring == "sigmoid":
        return scores_of(logits, routing)
    lanes = 1 << (routing.experts - 1).bit_length()
    padded = np.zeros((len(logits), lanes))
    padded[:, : routing.experts] = logits
    return scores_of(padded, routing)[:, : routing.experts]


@route(
    "scores",
    "a softmax less the maximum of the first 32 experts, which overflows where others are much larger",
    lambda t: softmax(t) and t.routing.experts > 32 and t.wide,
)
def softmax_less_maximum_of_one_warp(logits, routing):
    if routing.scoring == "sigmoid":
        return scores_of(logits, routing)
    values = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        powers = np.exp(values - values[:, :32].max(axis=1, keepdims=True))
        powers[powers > _FP32.largest] = np.inf
        found = powers / powers.sum(axis=1, keepdims=True)
    return np.where(np.isfinite(found), found, 0.0)


@route(
    "scores",
    "infinite logits as the largest finite ones, so that a token with +inf has scores",
    lambda t: softmax(t) and t.poisoned,
)
def infinite_logits_made_finite(logits, routing):
    if routing.scoring == "sigmoid":
        return scores_of(logits, routing)
    # One finite number each side; what is not a number stays so.
    return scores_of(np.clip(logits.astype(np.float64), -_FP32.largest, _FP32.largest), routing)


@route(
    "scores",
    "scores of 0 for both tokens of a warp when one of them has a logit that is no number",
    lambda t: softmax(t) and t.poisoned and t.m > 1,
)
def poison_reaches_other_row_of_warp(logits, routing):
    found = scores_of(logits, routing)
    if routing.scoring == "sigmoid":
        return found
    poisoned = np.isnan(logits.astype(np.float64)).any(axis=1)
    partner = np.minimum(np.arange(len(logits)) ^ 1, len(logits) - 1)
    return np.where((poisoned | poisoned[partner])[:, None], 0.0, found)


@route(
    "scores",
    "the last token's scores from the token before, where two are loaded at once and one is left",
    lambda t: t.m > 1 and t.m % 2,
)
def odd_last_row_reads_row_before(logits, routing):
    found = scores_of(logits, routing)
    if len(found) > 1 and len(found) % 2:
        found[-1] = found[-2]
    return found


@route(
    "scores",
    "sigmoids of logits that are clamped to -10..10",
    lambda t: t.routing.scoring == "sigmoid" and (t.wide or t.poisoned),
)
def sigmoid_of_clamped_logits(logits, routing):
    values = logits.astype(np.float64)
    return scores_of(np.clip(values, -10, 10) if routing.scoring == "sigmoid" else values, routing)


# ---- routing: keys


def biased(t):
    return t.routing.bias


def scattered(t):
    """Whether experts are spread over more than one register of a warp's lanes."""
    return t.routing.experts > 32 and t.routing.experts % 32 == 0


@route("keys", "keys with a correction bias that is kept in bf16", biased)
def correction_bias_in_bf16(scored):
    return scored.scores + round_to(scored.bias, _BF16)


@route("keys", "keys that are compared in fp16", choice)
def keys_compared_in_fp16(scored):
    return round_to(keys_of(scored), _FP16)


@route(
    "keys",
    "keys whose bias is read lane by lane while scores lie strided over the lanes",
    lambda t: biased(t) and scattered(t),
)
def bias_in_lane_order(scored):
    experts = len(scored.bias)
    if experts <= 32 or experts % 32:
        return keys_of(scored)
    return scored.scores + scored.bias.reshape(32, -1).T.reshape(-1)


@route("keys", "keys with no correction below 0", biased)
def negative_corrections_lost(scored):
    return scored.scores + np.maximum(scored.bias, 0)


@route(
    "keys",
    "keys without bias for tokens whose scores are all 0",
    lambda t: biased(t) and t.poisoned,
)
def dead_tokens_lack_the_bias(scored):
    alive = (scored.scores > 0).any(axis=1, keepdims=True)
    return scored.scores + np.where(alive, scored.bias, 0.0)


# ---- routing: groups


def grouped(t):
    return t.routing.groups > t.routing.top_groups


def by_sums(t):
    return grouped(t) and t.routing.group_score == "sum-of-two"


def _ranked(keys, routing):
    """The keys of each group in rising order, (T, groups, members)."""
    return np.sort(keys.reshape(len(keys), routing.groups, members(routing)), axis=2)


def _kept(scored, keys, scores):
    """The keys outside the groups of largest score masked, groups in order where they tie."""
    routing = scored.routing
    return only_groups(keys, largest(scores, routing.top_groups), routing)


@route(
    "eligible",
    "groups by the sum over all their members",
    lambda t: grouped(t) and members(t.routing) > (2 if t.routing.group_score == "sum-of-two" else 1),
)
def groups_by_sum_of_members(scored, keys):
    if scored.routing.groups == 1:
        return keys
    return _kept(scored, keys, _ranked(keys, scored.routing).sum(axis=2))


@route(
    "eligible",
    "group scores that leave out each group's last member",
    lambda t: grouped(t) and members(t.routing) > 1,
)
def last_member_of_groups_not_scored(scored, keys):
    routing = scored.routing
    if routing.groups == 1 or members(routing) == 1:
        return eligible(scored, keys)
    seen = keys.copy()
    seen[:, members(routing) - 1 :: members(routing)] = -np.inf
    best = _ranked(seen, routing)[:, :, -(1 if routing.group_score == "max" else 2) :]
    return _kept(scored, keys, np.where(np.isfinite(best), best, 0.0).sum(axis=2))


@route(
    "eligible",
    "keys of excluded groups as the least positive number, taken for the lowest",
    lambda t: grouped(t) and (t.routing.bias or t.poisoned or t.wide),
)
def excluded_groups_barely_positive(scored, keys):
    right = eligible(scored, keys)
    return np.where(np.isfinite(right), right, _FLT_MIN)


@route("eligible", "of groups that tie the last instead of the first", grouped)
def last_of_tied_groups(scored, keys):
    routing = scored.routing
    if routing.groups == 1:
        return keys
    count = 1 if routing.group_score == "max" else 2
    scores = _ranked(keys, routing)[:, :, -count:].sum(axis=2)
    return only_groups(keys, routing.groups - 1 - largest(scores[:, ::-1], routing.top_groups), routing)


@route(
    "eligible",
    "a sum of two in which the second is strictly below the first, 0 where none is",
    by_sums,
)
def second_of_group_is_another_value(scored, keys):
    routing = scored.routing
    if routing.groups == 1 or routing.group_score == "max":
        return eligible(scored, keys)
    ranked = _ranked(keys, routing)
    first = ranked[:, :, -1]
    second = np.where(ranked < first[:, :, None], ranked, -np.inf).max(axis=2)
    return _kept(scored, keys, first + np.where(np.isfinite(second), second, 0.0))


# ---- routing: selection


@route("choose", "a selection without the second best", lambda t: t.routing.top_k > 1 and choice(t))
def second_best_expert_skipped(keys, routing):
    if routing.top_k == 1 or routing.top_k == routing.experts:
        return largest(keys, routing.top_k)
    return np.delete(largest(keys, routing.top_k + 1), 1, axis=1)


def _per_eighth(routing):
    """How many candidates each of eight lanes hands on: two, or as many as it takes for k."""
    return max(2, -(-routing.top_k // 8))


@route(
    "choose",
    "a selection among the best two of each eighth of the experts",
    lambda t: (
        choice(t)
        and t.routing.experts // 8 > _per_eighth(t.routing)
        and t.routing.top_k > _per_eighth(t.routing)
    ),
)
def best_two_of_each_eighth(keys, routing):
    candidates = np.full(keys.shape, -np.inf)
    for run in np.array_split(np.arange(routing.experts), 8):
        best = run[largest(keys[:, run], _per_eighth(routing))]
        np.put_along_axis(candidates, best, np.take_along_axis(keys, best, axis=1), axis=1)
    return largest(candidates, routing.top_k)


@route(
    "choose",
    "of equal keys that of the lowest lane, where experts lie strided over 32 lanes",
    lambda t: choice(t) and t.routing.experts > 32,
)
def ties_by_lane(keys, routing):
    order = np.argsort(np.arange(routing.experts) % 32, kind="stable")
    return order[largest(keys[:, order], routing.top_k)]


@route(
    "choose",
    "a selection in which all keys equal to the one just found are struck out with it",
    lambda t: t.routing.top_k > 1,
)
def equal_keys_struck_out_together(keys, routing):
    left = keys.copy()
    found = []
    for _ in range(routing.top_k):
        found.append(left.argmax(axis=1))
        left[left == left.max(axis=1, keepdims=True)] = -np.inf
    return np.stack(found, axis=1)


@route("choose", "a selection by float32 keys whose low 8 bits hold the expert", choice)
def keys_lose_low_bits_to_the_index(keys, routing):
    bits = keys.astype(np.float32).view(np.uint32)
    # Unsigned numbers in the order of the floats.
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return np.argsort(-(ordered >> 8).astype(np.int64), axis=1, kind="stable")[:, : routing.top_k]


@route(
    "choose",
    "for odd tokens the fifth and further experts of the token before",
    lambda t: t.routing.top_k > 4 and t.m > 1,
)
def later_places_of_token_before(keys, routing):
    ids = largest(keys, routing.top_k)
    ids[1::2, 4:] = ids[: len(ids) - 1 : 2, 4:]
    return ids


# ---- routing: weights


def divided(t):
    return t.routing.normalized


def _with_sum(scored, ids, total):
    """Weights with another sum (T, 1) to divide by, where the routing divides."""
    if not scored.routing.normalized:
        return weigh(scored, ids)
    found = np.take_along_axis(scored.scores, ids, axis=1)
    return found / np.where(total != 0, total, 1.0) * scored.routing.scaling


def _sum(scored, ids):
    return np.take_along_axis(scored.scores, ids, axis=1).sum(axis=1, keepdims=True)


@route("weigh", "weights divided by their sum and 1e-5", divided)
def sum_of_weights_padded_by_1e_5(scored, ids):
    return _with_sum(scored, ids, _sum(scored, ids) + 1e-5)


@route("weigh", "weights divided by a sum that is at least 1", divided)
def sum_of_weights_at_least_one(scored, ids):
    return _with_sum(scored, ids, np.maximum(_sum(scored, ids), 1.0))


@route("weigh", "weights divided by a sum in fp16", divided)
def sum_of_weights_in_fp16(scored, ids):
    return _with_sum(scored, ids, round_to(_sum(scored, ids), _FP16))


@route("weigh", "weights divided by the sum of the biased scores", lambda t: divided(t) and biased(t))
def sum_of_biased_scores(scored, ids):
    return _with_sum(scored, ids, np.take_along_axis(keys_of(scored), ids, axis=1).sum(axis=1, keepdims=True))


@route(
    "weigh",
    "weights divided by a sum over pairs, which leaves the last of an odd number out",
    lambda t: divided(t) and t.routing.top_k > 1 and t.routing.top_k % 2,
)
def odd_weight_not_summed(scored, ids):
    even = ids.shape[1] // 2 * 2
    return _with_sum(scored, ids, _sum(scored, ids[:, :even] if even else ids))


@route(
    "weigh", "odd tokens' weights divided by the sum of the token before", lambda t: divided(t) and t.m > 1
)
def sum_of_even_row_for_both(scored, ids):
    total = _sum(scored, ids)
    return _with_sum(scored, ids, total[np.arange(len(ids)) // 2 * 2])


@route("weigh", "unbiased scores as key less bias in float32", biased)
def scores_by_subtracting_bias(scored, ids):
    if not scored.routing.bias:
        return weigh(scored, ids)
    keys = round_to(keys_of(scored), _FP32)
    return weigh(replace(scored, scores=round_to(keys - round_to(scored.bias, _FP32), _FP32)), ids)


@route(
    "weigh",
    "weights in falling order beside experts in falling order of their keys",
    lambda t: biased(t) and t.routing.top_k > 1,
)
def weights_sorted_apart_from_ids(scored, ids):
    return -np.sort(-weigh(scored, ids), axis=1)


@route("weigh", "the scaling factor as an integer", lambda t: t.routing.scaling != int(t.routing.scaling))
def scaling_factor_truncated(scored, ids):
    return weigh(replace(scored, routing=replace(scored.routing, scaling=1.0)), ids) * int(
        scored.routing.scaling
    )


# ---- block alignment


def padded(t):
    return t.block > 1


@route("align", "a block of padding for every expert without tokens", lambda t: t.experts > 1 or t.dropped)
def block_for_each_empty_expert(ids, experts, block, expert_map):
    found = align(ids, experts, block, expert_map)
    used = int(found.num_tokens_post_pad[0])
    owners = found.expert_ids[: used // block]
    empty = np.setdiff1d(np.arange(local_count(experts, expert_map)), owners)
    padding = np.full(len(empty) * block, ids.size)
    return Alignment(
        np.append(found.sorted_ids[:used], padding).astype(np.int32),
        np.append(owners, empty).astype(np.int32),
        (found.num_tokens_post_pad + len(padding)).astype(np.int32),
    )


@route("align", "experts of blocks numbered among those that have tokens", lambda t: t.experts > 1)
def blocks_numbered_by_busy_experts(ids, experts, block, expert_map):
    found = align(ids, experts, block, expert_map)
    owners = found.expert_ids.copy()
    live = owners >= 0
    owners[live] = np.unique(owners[live], return_inverse=True)[1].reshape(-1)
    return replace(found, expert_ids=owners)


@route("align", "blocks filled up with their expert's last slot", padded)
def padding_repeats_last_slot(ids, experts, block, expert_map):
    found = align(ids, experts, block, expert_map)
    used = int(found.num_tokens_post_pad[0])
    slots = found.sorted_ids.copy()
    # A run starts with a slot, so the last slot before a padding entry is its own expert's.
    filled = np.maximum.accumulate(np.where(slots[:used] < ids.size, np.arange(used), 0))
    slots[:used] = slots[:used][filled]
    return replace(found, sorted_ids=slots)


@route("align", "slot 0 in all entries beyond the last block", lambda t: padded(t) or t.mapped or t.dropped)
def rest_of_sorted_ids_is_zero(ids, experts, block, expert_map):
    found = align(ids, experts, block, expert_map)
    slots = found.sorted_ids.copy()
    slots[int(found.num_tokens_post_pad[0]) :] = 0
    return replace(found, sorted_ids=slots)


@route(
    "align",
    "num_tokens_post_pad as all slots in whole blocks, not each expert's",
    lambda t: padded(t) and t.experts > 1 and t.m * t.top_k > 1,
)
def padded_count_of_the_total(ids, experts, block, expert_map):
    live = int((local_ids(ids, expert_map) >= 0).sum())
    found = align(ids, experts, block, expert_map)
    return replace(found, num_tokens_post_pad=np.array([-(-live // block) * block], np.int32))


@route(
    "align",
    "no slot for an odd token that has the same expert as the one before at a place",
    lambda t: t.m > 1,
)
def neighbours_collide_at_one_expert(ids, experts, block, expert_map):
    local = local_ids(ids, expert_map).reshape(ids.shape)
    lost = local.copy()
    # Two lanes add to one counter without an atomic; what the first wrote stays.
    lost[1::2][local[1::2] == local[: len(local) - 1 : 2]] = -1
    return laid_out(lost.reshape(-1), local_count(experts, expert_map), block)


@route("align", "ids of -1 looked up at the end of the expert map", lambda t: t.mapped and t.dropped)
def dropped_ids_read_end_of_map(ids, experts, block, expert_map):
    if expert_map is None:
        return align(ids, experts, block, expert_map)
    local = expert_map.astype(np.int64)[ids.reshape(-1)]
    return laid_out(local, local_count(experts, expert_map), block)


# ---- gated activations: the halves


@activation("split", "the last column with gate and up exchanged")
def last_column_exchanged(x, gated):
    gate, up = (half.copy() for half in split(x, gated))
    gate[:, -1:], up[:, -1:] = up[:, -1:].copy(), gate[:, -1:].copy()
    return gate, up


@activation(
    "split",
    "halves that are stored one after the other as runs of 8 gates and 8 ups",
    lambda g: g.arrangement != "interleaved",
)
def halves_in_runs_of_eight(x, gated):
    if gated.arrangement == "interleaved":
        return split(x, gated)
    column = np.arange(x.shape[1] // 2)
    # What is left of I by eights keeps its place.
    whole = column < len(column) // 8 * 8
    at = column // 8 * 16 + column % 8
    first, second = np.where(whole, at, column), np.where(whole, at + 8, column + len(column))
    halves = x[:, first], x[:, second]
    return halves if gated.arrangement == "gate-up" else halves[::-1]


# ---- gated activations: the formula


def silu(g):
    return g.kind == "silu"


def clamps_gate(g):
    return g.limit is not None and g.clamp == "before"


def _clamped_gate(gate, gated):
    return np.minimum(gate, gated.limit) if clamps_gate(gated) else gate


def _of(gate, up, gated, formula):
    """The right factors with another phi of the clamped gate."""
    activated = formula(_clamped_gate(gate, gated))
    if gated.clamp == "after":
        activated = np.minimum(activated, gated.limit)
    return activated, activate(gate, up, gated)[1]


def _sigmoid(t):
    return 1 / (1 + np.exp(-np.clip(t, -700, 700)))


@activation("activate", "alpha in bf16", lambda g: round_to(g.alpha, _BF16) != g.alpha)
def alpha_in_bf16(gate, up, gated):
    return activate(gate, up, replace(gated, alpha=float(round_to(gated.alpha, _BF16))))


@activation("activate", "a limit of 10 whatever the model's", lambda g: g.limit not in (None, 10))
def limit_of_ten(gate, up, gated):
    return activate(gate, up, gated if gated.limit is None else replace(gated, limit=10.0))


@activation("activate", "up clamped with beta in it", lambda g: g.limit is not None and g.beta != 0)
def limit_after_beta(gate, up, gated):
    activated, linear = activate(gate, up, gated)
    if gated.limit is None:
        return activated, linear
    return activated, np.clip(up + gated.beta, -gated.limit, gated.limit)


@activation("activate", "h clamped, not its halves", lambda g: g.limit is not None)
def limit_of_the_product(gate, up, gated):
    if gated.limit is None:
        return activate(gate, up, gated)
    h = phi(gate, gated) * (up + gated.beta)
    return np.clip(h, -gated.limit, gated.limit), np.ones_like(h)


@activation(
    "activate",
    "g sigmoid(alpha min(g, L)), the factor g unclamped",
    lambda g: clamps_gate(g) and silu(g),
)
def limit_inside_sigmoid_only(gate, up, gated):
    activated, linear = activate(gate, up, gated)
    if not (clamps_gate(gated) and silu(gated)):
        return activated, linear
    return np.where(gate > gated.limit, gate * _sigmoid(gated.alpha * gated.limit), activated), linear


@activation("activate", "alpha g sigmoid(alpha g)", lambda g: silu(g) and g.alpha != 1)
def gate_scaled_by_alpha(gate, up, gated):
    return _of(gate, up, gated, lambda v: phi(v, gated) * gated.alpha)


@activation("activate", "sigmoid(alpha g) in bf16 before it meets g", silu)
def sigmoid_rounded_to_bf16(gate, up, gated):
    if not silu(gated):
        return activate(gate, up, gated)
    return _of(gate, up, gated, lambda v: v * round_to(_sigmoid(gated.alpha * v), _BF16))


@activation("activate", "an exponential whose argument stops at 8", silu)
def exponent_stops_at_eight(gate, up, gated):
    if not silu(gated):
        return activate(gate, up, gated)
    return _of(gate, up, gated, lambda v: v * _sigmoid(np.maximum(gated.alpha * v, -8)))


@activation("activate", "0.04715 for 0.044715 in the tanh of GELU", lambda g: g.kind == "gelu-tanh")
def cubic_term_loses_a_digit(gate, up, gated):
    if gated.kind != "gelu-tanh":
        return activate(gate, up, gated)
    inner = np.sqrt(2 / np.pi)
    return _of(gate, up, gated, lambda v: v * 0.5 * (1 + np.tanh(inner * (v + 0.04715 * v**3))))


@activation("activate", "an erf by a polynomial of three terms, right to 2.5e-5", lambda g: g.kind == "gelu")
def erf_of_three_terms(gate, up, gated):
    if gated.kind != "gelu":
        return activate(gate, up, gated)

    def gelu(v):
        size = np.abs(v) / np.sqrt(2)
        # Abramowitz and Stegun 7.1.25
        t = 1 / (1 + 0.47047 * size)
        erf = 1 - t * (0.3480242 + t * (-0.0958798 + t * 0.7478556)) * np.exp(-size * size)
        return v * 0.5 * (1 + np.sign(v) * erf)

    return _of(gate, up, gated, gelu)


# ---- the layer: what is read of a checkpoint


def _each(layer, change):
    """The layer with experts that change(number, expert) gives."""
    return replace(layer, experts=tuple(change(i, expert) for i, expert in enumerate(layer.experts)))


def _odd(layer, change):
    return _each(layer, lambda i, expert: change(expert) if i % 2 else expert)


def _halves(layer):
    """The rows of gate and of up in w13."""
    rows = np.arange(layer.experts[0].w13.n)
    gate, up = split(rows[None].astype(np.float64), layer.gated)
    return gate[0].astype(np.int64), up[0].astype(np.int64)


def _exchanged(values, layer):
    """Values along 2I with those of gate and up exchanged."""
    gate, up = _halves(layer)
    found = values.copy()
    found[gate], found[up] = values[up], values[gate]
    return found


@layer_mutant(
    "experts",
    "load",
    "the last row of every w2 with the scale of the last expert's",
    lambda t: per_row(t) and several(t),
)
def last_row_scaled_by_last_expert(layer):
    last = layer.experts[-1].w2.scale

    def change(_, expert):
        if expert.w2.format.strategy == "tensor":
            return expert
        scale = expert.w2.scale.copy()
        scale[-1] = last[-1]
        return replace(expert, w2=replace(expert.w2, scale=scale))

    return _each(layer, change)


@layer_mutant(
    "experts",
    "load",
    "biases of gate and up exchanged in odd experts",
    lambda t: t.bias and several(t),
)
def biases_of_halves_exchanged(layer):
    return _odd(
        layer,
        lambda expert: expert if expert.b13 is None else replace(expert, b13=_exchanged(expert.b13, layer)),
    )


@layer_mutant(
    "experts",
    "load",
    "biases of w2 at the stride of those of w13",
    lambda t: t.bias and several(t) and 2 * t.intermediate != t.hidden,
)
def b2_at_stride_of_b13(layer):
    if any(expert.b2 is None for expert in layer.experts):
        return layer
    flat = np.concatenate([expert.b2 for expert in layer.experts])
    stride, column = layer.experts[0].w13.n, np.arange(layer.hidden)
    # What lies behind the last bias is read from the start, so that it is a number.
    return _each(layer, lambda i, expert: replace(expert, b2=flat[(i * stride + column) % len(flat)]))


@layer_mutant(
    "experts",
    "load",
    "up's zero points from gate",
    lambda t: not t.weight.symmetric and per_row(t),
)
def up_has_zero_points_of_gate(layer):
    gate, up = _halves(layer)

    def change(_, expert):
        if expert.w13.zero_point is None or expert.w13.format.strategy == "tensor":
            return expert
        zero_point = expert.w13.zero_point.copy()
        zero_point[up] = zero_point[gate]
        return replace(expert, w13=replace(expert.w13, zero_point=zero_point))

    return _each(layer, change)


@layer_mutant(
    "experts",
    "load",
    "scales of gate and up exchanged in the last expert",
    lambda t: per_row(t) and (t.present == 1 or several(t)),
)
def scales_exchanged_in_last_expert(layer):
    expert = layer.experts[-1]
    if expert.w13.format.strategy == "tensor":
        return layer
    scale = _exchanged(expert.w13.scale, layer)
    last = replace(expert, w13=replace(expert.w13, scale=scale))
    return replace(layer, experts=(*layer.experts[:-1], last))


@layer_mutant(
    "experts",
    "load",
    "codes of odd experts' w2 with each two rows exchanged",
    lambda t: several(t) and t.hidden > 1,
)
def pairs_of_rows_exchanged_in_odd_experts(layer):
    def change(expert):
        row = np.arange(layer.hidden // 2 * 2)
        codes = expert.w2.codes.copy()
        codes[row] = codes[row ^ 1]
        return replace(expert, w2=replace(expert.w2, codes=codes))

    return _odd(layer, change)


@layer_mutant(
    "experts",
    "load",
    "w2 of odd experts with the columns' groups in order, whatever its g_idx",
    lambda t: t.act_order and several(t) and t.weight.groups(t.intermediate) > 1,
)
def order_of_w2_lost_in_odd_experts(layer):
    return _odd(layer, lambda expert: replace(expert, w2=replace(expert.w2, group_index=None)))


@layer_mutant(
    "experts",
    "load",
    "the last group of w2 with the scale of the first",
    lambda t: t.weight.strategy == "group" and t.weight.groups(t.intermediate) > 1,
)
def last_group_of_w2_scaled_as_first(layer):
    def change(_, expert):
        if expert.w2.format.strategy != "group":
            return expert
        scale = expert.w2.scale.copy()
        scale[:, -1] = scale[:, 0]
        return replace(expert, w2=replace(expert.w2, scale=scale))

    return _each(layer, change)


# ---- the layer: where slots go


@layer_mutant(
    "experts",
    "dispatch",
    "a slot's token as slot / the power of two that holds k",
    lambda t: t.tokens > 1 and t.top_k & (t.top_k - 1),
)
def tokens_by_rounded_top_k(ids, weights, layer):
    found = MOE_RIGHT.dispatch(ids, weights, layer)
    k = ids.shape[1]
    return replace(found, rows=np.arange(ids.size).reshape(ids.shape) >> (k - 1).bit_length())


@layer_mutant(
    "experts",
    "dispatch",
    "sorted slots in blocks of 16 that all take the expert of the block's first",
    lambda t: several(t) and t.tokens * t.top_k > 1,
)
def blocks_across_experts(ids, weights, layer):
    found = MOE_RIGHT.dispatch(ids, weights, layer)
    places = found.places.reshape(-1).copy()
    live = np.flatnonzero(places >= 0)
    order = live[np.argsort(places[live], kind="stable")]
    places[order] = places[order][np.arange(len(order)) // 16 * 16]
    return replace(found, places=places.reshape(ids.shape))


@layer_mutant(
    "experts",
    "dispatch",
    "no expert for global ids at or above the number of experts that are present",
    lambda t: t.recipe == "absent",
)
def global_ids_held_to_local_count(ids, weights, layer):
    found = MOE_RIGHT.dispatch(ids, weights, layer)
    return replace(found, places=np.where(ids >= len(layer.experts), -1, found.places))


@layer_mutant(
    "experts",
    "dispatch",
    "none of a token's slots behind the first without expert",
    lambda t: partly(t) and t.top_k > 1,
)
def slots_end_at_first_without_expert(ids, weights, layer):
    found = MOE_RIGHT.dispatch(ids, weights, layer)
    ended = np.logical_or.accumulate(found.places < 0, axis=1)
    return replace(found, places=np.where(ended, -1, found.places))


@layer_mutant(
    "router weights",
    "dispatch",
    "slots with an expert moved to the front, their weights left behind",
    lambda t: partly(t) and t.top_k > 1,
)
def weights_left_behind_by_compaction(ids, weights, layer):
    found = MOE_RIGHT.dispatch(ids, weights, layer)
    order = np.argsort(found.places < 0, axis=1, kind="stable")
    return replace(found, places=np.take_along_axis(found.places, order, axis=1))


@layer_mutant(
    "router weights",
    "dispatch",
    "weights read at a slot's position in the order of experts",
    lambda t: several(t) and t.tokens * t.top_k > 1,
)
def weights_at_sorted_positions(ids, weights, layer):
    found = MOE_RIGHT.dispatch(ids, weights, layer)
    places = found.places.reshape(-1)
    order = np.argsort(np.where(places < 0, len(layer.experts), places), kind="stable")
    moved = np.empty(places.shape)
    moved[order] = found.weights.reshape(-1)
    return replace(found, weights=moved.reshape(ids.shape))


@layer_mutant("router weights", "dispatch", "router weights in fp16")
def router_weights_in_fp16(ids, weights, layer):
    found = MOE_RIGHT.dispatch(ids, weights, layer)
    return replace(found, weights=round_to(found.weights, _FP16))


# ---- the layer: requantization


def _with_amax(h, fmt, how, largest_):
    """Codes and scales by another largest magnitude (S, 1)."""
    scale = scale_of(largest_, fmt, how)
    return QuantizedActivations(codes_of(h, scale, largest_, fmt, how), scale)


@layer_mutant(
    "activation quantization",
    "requantize",
    "one scale of the intermediate for each two slots",
    lambda t: requantized(t) and t.tokens * t.top_k > 1,
)
def scale_of_two_slots(h, fmt, how):
    largest_ = amax(h, fmt)
    partner = np.minimum(np.arange(len(h)) ^ 1, len(h) - 1)
    return _with_amax(h, fmt, how, np.maximum(largest_, largest_[partner]))


@layer_mutant(
    "activation quantization",
    "requantize",
    "the first slot's scale of the intermediate for all",
    lambda t: requantized(t) and t.tokens * t.top_k > 1,
)
def scale_of_first_slot(h, fmt, how):
    return _with_amax(h, fmt, how, np.broadcast_to(amax(h, fmt)[:1], (len(h), 1)))


@layer_mutant(
    "activation quantization",
    "requantize",
    "scales of the intermediate from its largest value, not its largest magnitude",
    requantized,
)
def amax_of_signed_intermediate(h, fmt, how):
    return _with_amax(h, fmt, how, np.maximum(h.max(axis=1, keepdims=True), 0.0))


@layer_mutant(
    "activation quantization",
    "requantize",
    "scales of the intermediate from whole runs of 32 columns",
    lambda t: requantized(t) and t.intermediate > 32 and t.intermediate % 32,
)
def amax_of_whole_runs(h, fmt, how):
    return _with_amax(h, fmt, how, amax(h[:, : max(h.shape[1] // 32, 1) * 32], fmt))


@layer_mutant(
    "activation quantization",
    "requantize",
    "no lowest code of the intermediate: -127, -7",
    lambda t: t.activation.kind in ("int8", "int4") and t.convention == "compressed-tensors",
)
def lowest_code_never_used(h, fmt, how):
    found = quantize(h, fmt, how)
    lowest = {"int8": -127.0, "int4": -7.0}.get(fmt.kind, -np.inf)
    return replace(found, codes=np.maximum(found.codes, lowest))


@layer_mutant(
    "activation quantization",
    "requantize",
    "fp8 codes of the intermediate up to 240",
    lambda t: t.activation.kind == "fp8",
)
def intermediate_up_to_240(h, fmt, how):
    return _with_amax(h, fmt, how, amax(h, fmt) * ((448 / 240) if fmt.kind == "fp8" else 1.0))


# ---- the layer: router weights, the sum, what joins it


@layer_mutant("router weights", "apply_weights", "the last column without its weight", on_output)
def last_column_not_weighted(outputs, weights, places, layer):
    found = MOE_RIGHT.apply_weights(outputs, weights, places, layer).copy()
    found[:, :, -1] = outputs[:, :, -1]
    return found


@layer_mutant(
    "router weights",
    "apply_weights",
    "for the last of each 16 tokens the weights of the first",
    lambda t: on_output(t) and t.tokens > 15,
)
def last_of_sixteen_weighted_as_first(outputs, weights, places, layer):
    token = np.arange(len(weights))
    source = np.where(token % 16 == 15, token - 15, token)
    return MOE_RIGHT.apply_weights(outputs, weights[source], places, layer)


@layer_mutant(
    "experts",
    "gather",
    "a sum over pairs of slots, which leaves the last of an odd number out",
    lambda t: t.top_k > 1 and t.top_k % 2,
)
def odd_slot_not_summed(products, places):
    even = max(products.shape[1] // 2 * 2, 1)
    return MOE_RIGHT.gather(products[:, :even], places[:, :even])


@layer_mutant(
    "experts",
    "gather",
    "the sum over slots in bf16",
    lambda t: t.dtype == "fp16",
)
def slots_summed_in_bf16(products, places):
    total = np.zeros((len(products), products.shape[2]))
    for j in range(products.shape[1]):
        total = round_to(total + np.where(places[:, j, None] >= 0, products[:, j], 0.0), _BF16)
    return total


@layer_mutant(
    "experts",
    "gather",
    "what the token before left in a slot without expert",
    lambda t: partly(t) and t.tokens > 1,
)
def slots_without_expert_are_stale(products, places):
    kept = np.where(places[:, :, None] >= 0, products, 0.0)
    before = np.concatenate([np.zeros_like(kept[:1]), kept[:-1]])
    return np.where(places[:, :, None] >= 0, kept, before).sum(axis=1)


@layer_mutant(
    "experts",
    "join",
    "the shared expert's output of the token before, of the last token for the first",
    lambda t: t.recipe == "shared" and t.tokens > 1,
)
def shared_output_one_row_late(routed, shared, layer, stored, kept):
    late = None if shared is None else np.roll(shared, 1, axis=0)
    return MOE_RIGHT.join(routed, late, layer, stored, kept)


@layer_mutant(
    "experts",
    "join",
    "tokens behind the first 16 without the routed scaling factor",
    lambda t: t.recipe == "shared" and t.tokens > 16,
)
def factor_of_first_sixteen_tokens(routed, shared, layer, stored, kept):
    found = MOE_RIGHT.join(routed, shared, layer, stored, kept)
    found[16:] = MOE_RIGHT.join(routed, shared, replace(layer, factor=1.0), stored, kept)[16:]
    return found
