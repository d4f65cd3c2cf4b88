"""Wrong semantics of routing and block alignment, by the stage of `reference.routing` that they replace.

scores(logits, routing), keys(scored), eligible(scored, keys), choose(keys, routing), weigh(scored, ids),
align(ids, experts, block, expert_map).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from reference import routing as right
from reference.mutants.registry import Registry, registrar
from reference.rounding import FLOAT_FORMATS, float_format, round_to
from reference.routing import ROUTING_RIGHT, Alignment, Routing

ROUTING: Registry = {}
mutant = registrar(ROUTING, ROUTING_RIGHT)


@dataclass(frozen=True)
class RoutingTraits:
    """What a mutant needs to know of a call to tell whether it is wrong there at all.

    m: tokens; dtype: of the logits; poisoned: whether some logits are not finite; wide: whether they are large.
    """

    routing: Routing
    m: int
    dtype: str
    poisoned: bool = False
    wide: bool = False


@dataclass(frozen=True)
class AlignTraits:
    """m: tokens; mapped: whether an expert_map is given; dropped: whether some ids are -1."""

    m: int
    experts: int
    top_k: int
    block: int
    mapped: bool = False
    dropped: bool = False


def stage(name, computes, when=lambda t: True):
    return mutant("routing", name, computes, lambda t: t.m > 0 and when(t))


def softmax(t):
    return t.routing.scoring != "sigmoid"


def sigmoid(t):
    return not softmax(t)


def normalized(t):
    return t.routing.normalized and t.routing.top_k > 1


def biased(t):
    return t.routing.bias


def grouped(t):
    return t.routing.groups > 1


def masking(t):
    """Whether groups take any expert away."""
    return t.routing.top_groups < t.routing.groups


def pairs(t):
    """Whether groups have two members."""
    return t.routing.experts >= 2 * t.routing.groups


def partial(t):
    """Whether experts are left out at all."""
    return t.routing.top_k < t.routing.experts


def several(t):
    return t.m > 1


# ---- scores


def _as(logits, routing, scoring):
    return right.scores_of(logits, replace(routing, scoring=scoring, bias=False, groups=1, top_groups=1))


@stage("scores", "a sigmoid of each logit instead of a softmax", softmax)
def sigmoid_instead_of_softmax(logits, routing):
    return _as(logits, routing, "sigmoid")


@stage("scores", "a softmax instead of a sigmoid of each logit", sigmoid)
def softmax_instead_of_sigmoid(logits, routing):
    return _as(logits, routing, "softmax")


@stage("scores", "a softmax over the tokens of the call", lambda t: softmax(t) and several(t))
def softmax_over_tokens(logits, routing):
    return right.scores_of(logits.T, routing).T


@stage("scores", "a softmax of the scores once more", softmax)
def softmax_twice(logits, routing):
    scores = right.scores_of(logits, routing)
    return right.scores_of(scores, routing)


@stage("scores", "exponentials without subtracting the largest logit", lambda t: softmax(t) and t.wide)
def softmax_without_maximum(logits, routing):
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp(logits.astype(np.float32))
        return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float64)


@stage("scores", "scores rounded to bf16")
def scores_in_bf16(logits, routing):
    return round_to(right.scores_of(logits, routing), FLOAT_FORMATS["bf16"])


@stage("scores", "scores of logits read in another dtype")
def logits_read_in_another_dtype(logits, routing):
    other = "fp16" if float_format(logits.dtype).name == "bf16" else "bf16"
    bits = np.ascontiguousarray(logits).view(np.uint16)[:, : logits.shape[1]]
    return right.scores_of(bits.view(FLOAT_FORMATS[other].dtype), routing)


@stage("scores", "the scores of the next token", several)
def scores_of_next_token(logits, routing):
    return np.roll(right.scores_of(logits, routing), -1, axis=0)


@stage("scores", "scores that are NaN where a logit makes them so", lambda t: t.poisoned and several(t))
def nan_kept(logits, routing):
    values = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if routing.scoring == "sigmoid":
            return 1 / (1 + np.exp(-values))
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)


@stage("scores", "no score for a token with a logit of minus infinity", lambda t: t.poisoned and t.m > 3)
def minus_infinity_is_poison(logits, routing):
    scores = right.scores_of(logits, routing)
    return np.where((logits.astype(np.float64) == -np.inf).any(axis=1, keepdims=True), 0.0, scores)


@stage("scores", "no scores after a token that is not finite", lambda t: t.poisoned and t.m > 3)
def poison_spreads(logits, routing):
    scores = right.scores_of(logits, routing)
    bad = ~np.isfinite(logits.astype(np.float64)).all(axis=1)
    return np.where(np.maximum.accumulate(bad)[:, None], 0.0, scores)


# ---- keys


@stage("keys", "no correction bias", biased)
def bias_ignored(scored):
    return scored.scores


@stage("keys", "the correction bias added twice", biased)
def bias_added_twice(scored):
    return scored.scores + 2 * scored.bias


@stage("keys", "the correction bias subtracted", biased)
def correction_bias_subtracted(scored):
    return scored.scores - scored.bias


@stage("keys", "the correction bias of the next expert", biased)
def bias_of_next_expert(scored):
    return scored.scores + np.roll(scored.bias, -1)


@stage("keys", "keys rounded to bf16 before the selection", partial)
def keys_in_bf16(scored):
    return round_to(right.keys_of(scored), FLOAT_FORMATS["bf16"])


@stage("keys", "ties broken by a thousandth of the index, which is more than scores differ by", partial)
def index_added_to_keys(scored):
    return right.keys_of(scored) - 1e-3 * np.arange(scored.routing.experts)


@stage("keys", "negative keys as zero", biased)
def negative_keys_as_zero(scored):
    return np.maximum(right.keys_of(scored), 0.0)


# ---- eligible


@stage("eligible", "a selection over all groups", masking)
def groups_ignored(scored, keys):
    return keys


@stage("eligible", "zero for the keys of masked groups", lambda t: masking(t) and biased(t))
def masked_with_zero(scored, keys):
    return _masked(scored, keys, 0.0)


@stage("eligible", "-1 for the keys of masked groups", lambda t: masking(t) and biased(t))
def masked_with_minus_one(scored, keys):
    return _masked(scored, keys, -1.0)


def _masked(scored, keys, value):
    kept = right.largest(right.group_scores(keys, scored.routing), scored.routing.top_groups)
    return right.only_groups(keys, kept, scored.routing, value)


def _with(scored, keys, **changes):
    return right.eligible(replace(scored, routing=replace(scored.routing, **changes)), keys)


@stage("eligible", "the largest key of a group where the two largest are summed",
       lambda t: masking(t) and t.routing.group_score == "sum-of-two")  # fmt: skip
def group_max_instead_of_sum(scored, keys):
    return _with(scored, keys, group_score="max")


@stage("eligible", "the sum of the two largest keys of a group where the largest counts",
       lambda t: masking(t) and t.routing.group_score == "max" and pairs(t))  # fmt: skip
def group_sum_instead_of_max(scored, keys):
    return _with(scored, keys, group_score="sum-of-two")


@stage("eligible", "group scores as sums of all keys of a group",
       lambda t: masking(t) and t.routing.experts > 2 * t.routing.groups)  # fmt: skip
def group_sum_of_all(scored, keys):
    size = scored.routing.experts // scored.routing.groups
    totals = keys.reshape(len(keys), scored.routing.groups, size).sum(axis=2)
    return right.only_groups(keys, right.largest(totals, scored.routing.top_groups), scored.routing)


@stage("eligible", "group scores without the correction bias", lambda t: masking(t) and biased(t))
def group_scores_without_bias(scored, keys):
    totals = right.group_scores(scored.scores, scored.routing)
    return right.only_groups(keys, right.largest(totals, scored.routing.top_groups), scored.routing)


@stage("eligible", "one group too few", lambda t: grouped(t) and t.routing.top_groups > 1)
def one_group_too_few(scored, keys):
    kept = right.largest(right.group_scores(keys, scored.routing), scored.routing.top_groups - 1)
    return right.only_groups(keys, kept, scored.routing)


@stage("eligible", "one group too many", masking)
def one_group_too_many(scored, keys):
    return _with(scored, keys, top_groups=scored.routing.top_groups + 1)


@stage("eligible", "groups of every G-th expert instead of runs",
       lambda t: masking(t) and t.routing.experts > t.routing.groups)  # fmt: skip
def groups_interleaved(scored, keys):
    count = scored.routing.groups
    order = np.arange(scored.routing.experts).reshape(-1, count).T.reshape(-1)
    found = np.empty_like(keys)
    found[:, order] = right.eligible(scored, keys[:, order])
    return found


@stage("eligible", "of groups that tie the last", masking)
def group_ties_to_the_last(scored, keys):
    totals = right.group_scores(keys, scored.routing)[:, ::-1]
    kept = scored.routing.groups - 1 - right.largest(totals, scored.routing.top_groups)
    return right.only_groups(keys, kept, scored.routing)


# ---- choose


@stage("choose", "of equal keys the highest index", partial)
def ties_to_the_highest(keys, routing):
    return routing.experts - 1 - right.largest(keys[:, ::-1], routing.top_k)


@stage("choose", "the smallest keys", partial)
def smallest_chosen(keys, routing):
    return right.choose(np.where(np.isfinite(keys), -keys, keys), routing)


@stage("choose", "a selection without the last expert", partial)
def last_expert_never_chosen(keys, routing):
    return right.largest(keys[:, :-1], routing.top_k)


@stage("choose", "the first id again in the last place", lambda t: t.routing.top_k > 1)
def last_id_repeats_the_first(keys, routing):
    ids = right.choose(keys, routing)
    return np.concatenate([ids[:, :-1], ids[:, :1]], axis=1)


@stage("choose", "the best expert skipped", partial)
def best_expert_skipped(keys, routing):
    return right.largest(keys, routing.top_k + 1)[:, 1:]


@stage("choose", "the next expert in the last place", partial)
def last_place_one_too_late(keys, routing):
    ids = right.largest(keys, routing.top_k + 1)
    return np.delete(ids, routing.top_k - 1, axis=1)


@stage("choose", "expert 0 where no key is above -1", biased)
def maximum_starts_at_minus_one(keys, routing):
    ids = right.choose(keys, routing)
    return np.where(np.take_along_axis(keys, ids, axis=1) > -1, ids, 0)


@stage("choose", "experts of the first 16 tokens, zeros for the others",
       lambda t: t.m > 16 and t.routing.top_k < t.routing.experts)  # fmt: skip
def only_first_16_tokens(keys, routing):
    ids = right.choose(keys, routing)
    ids[16:] = 0
    return ids


@stage("choose", "the expert after each chosen one", partial)
def expert_after_the_chosen(keys, routing):
    return (right.choose(keys, routing) + 1) % routing.experts


@stage("choose", "the ids of the next token", lambda t: several(t) and partial(t))
def ids_of_next_token(keys, routing):
    return np.roll(right.choose(keys, routing), -1, axis=0)


# ---- weigh


def _scores(scored, ids):
    return np.take_along_axis(scored.scores, ids, axis=1)


def _divided(values):
    total = values.sum(axis=1, keepdims=True)
    return values / np.where(total > 0, total, 1.0)


@stage("weigh", "weights that are not divided by their sum", lambda t: t.routing.normalized)
def not_renormalized(scored, ids):
    return _scores(scored, ids) * scored.routing.scaling


@stage("weigh", "weights divided by their sum where the model does not", lambda t: not t.routing.normalized)
def always_renormalized(scored, ids):
    return _divided(_scores(scored, ids)) * scored.routing.scaling


@stage(
    "weigh",
    "weights divided by the sum over all experts",
    lambda t: normalized(t) and sigmoid(t) and partial(t),
)
def renormalized_over_all(scored, ids):
    total = scored.scores.sum(axis=1, keepdims=True)
    return _scores(scored, ids) / np.where(total > 0, total, 1.0) * scored.routing.scaling


@stage("weigh", "weights divided by the sum over the tokens", lambda t: t.routing.normalized and several(t))
def renormalized_over_tokens(scored, ids):
    return _divided(_scores(scored, ids).T).T * scored.routing.scaling


@stage("weigh", "weights divided by the root of their sum of squares", normalized)
def renormalized_by_the_root(scored, ids):
    found = _scores(scored, ids)
    root = np.sqrt(np.square(found).sum(axis=1, keepdims=True))
    return found / np.where(root > 0, root, 1.0) * scored.routing.scaling


@stage("weigh", "weights divided by their sum plus 1 %", lambda t: t.routing.normalized)
def renormalized_with_a_large_epsilon(scored, ids):
    found = _scores(scored, ids)
    return found / (found.sum(axis=1, keepdims=True) + 1e-2) * scored.routing.scaling


@stage("weigh", "weights with the correction bias", biased)
def bias_in_the_weights(scored, ids):
    keyed = replace(scored, scores=right.keys_of(scored))
    return right.weigh(keyed, ids)


@stage("weigh", "logits for weights", lambda t: not t.routing.normalized)
def logits_for_weights(scored, ids):
    return np.take_along_axis(scored.logits.astype(np.float64), ids, axis=1) * scored.routing.scaling


@stage("weigh", "a softmax over the selected scores", normalized)
def softmax_of_selected_scores(scored, ids):
    powers = np.exp(_scores(scored, ids))
    return powers / powers.sum(axis=1, keepdims=True) * scored.routing.scaling


@stage("weigh", "the routed scaling factor twice", lambda t: t.routing.scaling != 1)
def scaled_twice(scored, ids):
    return right.weigh(scored, ids) * scored.routing.scaling


@stage("weigh", "no routed scaling factor", lambda t: t.routing.scaling != 1)
def not_scaled(scored, ids):
    return right.weigh(scored, ids) / scored.routing.scaling


@stage("weigh", "weights divided by the routed scaling factor", lambda t: t.routing.scaling != 1)
def divided_by_the_factor(scored, ids):
    return right.weigh(scored, ids) / scored.routing.scaling**2


@stage("weigh", "weights of the next token", several)
def weights_of_next_token(scored, ids):
    return np.roll(right.weigh(scored, ids), -1, axis=0)


@stage("weigh", "weights in the order of the ids, ids in that of the scores", lambda t: t.routing.top_k > 1)
def weights_in_the_order_of_ids(scored, ids):
    return right.weigh(scored, np.sort(ids, axis=1))


@stage("weigh", "the weight of the next place", lambda t: t.routing.top_k > 1)
def weights_of_next_place(scored, ids):
    return np.roll(right.weigh(scored, ids), -1, axis=1)


@stage("weigh", "weights rounded to bf16", lambda t: t.routing.top_k > 1 or not t.routing.normalized)
def router_weights_in_bf16(scored, ids):
    return round_to(right.weigh(scored, ids), FLOAT_FORMATS["bf16"])


@stage("weigh", "weights of one for each place", normalized)
def equal_weights(scored, ids):
    return np.full(ids.shape, scored.routing.scaling / scored.routing.top_k)


# ---- align


@stage("align", "slot 0 for padding")
def padding_is_slot_zero(ids, experts, block, expert_map):
    return right.laid_out(right.local_ids(ids, expert_map), right.local_count(experts, expert_map), block, 0)


def _where(ids, experts, block, expert_map, change):
    """Aligned after change(local ids) of the slots."""
    local = right.local_ids(ids, expert_map)
    return right.laid_out(change(local), right.local_count(experts, expert_map), block)


@stage("align", "alignments without the last slot of each expert")
def last_slot_of_an_expert_lost(ids, experts, block, expert_map):
    def change(local):
        last = np.array([np.flatnonzero(local == e)[-1] for e in np.unique(local[local >= 0])], np.int64)
        return np.where(np.isin(np.arange(len(local)), last), -1, local)

    return _where(ids, experts, block, expert_map, change)


@stage("align", "alignments of the first slot of each expert alone", lambda t: t.m * t.top_k > t.experts)
def only_first_slot_of_an_expert(ids, experts, block, expert_map):
    def change(local):
        first = np.array([np.flatnonzero(local == e)[0] for e in np.unique(local)], np.int64)
        return np.where(np.isin(np.arange(len(local)), first), local, -1)

    return _where(ids, experts, block, expert_map, change)


@stage("align", "absent experts as the last one", lambda t: t.mapped)
def alignment_of_absent_as_the_last(ids, experts, block, expert_map):
    last = right.local_count(experts, expert_map) - 1
    return right.align(ids, experts, block, np.where(expert_map < 0, last, expert_map))


@stage("align", "ids of -1 as the last expert", lambda t: t.dropped)
def invalid_read_as_the_last(ids, experts, block, expert_map):
    return right.align(np.where(ids < 0, experts - 1, ids), experts, block, expert_map)


@stage("align", "all experts as if they were present", lambda t: t.mapped)
def alignment_ignores_the_map(ids, experts, block, expert_map):
    return right.align(ids, experts, block, None)


@stage("align", "global ids of the experts of blocks", lambda t: t.mapped)
def global_ids_of_blocks(ids, experts, block, expert_map):
    found = right.align(ids, experts, block, expert_map)
    present = np.flatnonzero(expert_map >= 0)
    places = present[np.argsort(expert_map[present])]
    owners = np.where(found.expert_ids < 0, -1, places[np.maximum(found.expert_ids, 0)])
    return replace(found, expert_ids=owners.astype(np.int32))


@stage("align", "the expert of the next block", lambda t: t.m > 1)
def expert_of_next_block(ids, experts, block, expert_map):
    found = right.align(ids, experts, block, expert_map)
    blocks = int(found.num_tokens_post_pad[0]) // block
    owners = found.expert_ids.copy()
    owners[:blocks] = np.roll(owners[:blocks], -1)
    return replace(found, expert_ids=owners)


@stage("align", "ids of experts counted from 1")
def experts_counted_from_one(ids, experts, block, expert_map):
    found = right.align(ids, experts, block, expert_map)
    return replace(
        found, expert_ids=np.where(found.expert_ids < 0, -1, found.expert_ids + 1).astype(np.int32)
    )


@stage("align", "num_tokens_post_pad without the padding")
def padding_not_counted(ids, experts, block, expert_map):
    found = right.align(ids, experts, block, expert_map)
    live = int((right.local_ids(ids, expert_map) >= 0).sum())
    return replace(found, num_tokens_post_pad=np.array([live], np.int32))


@stage("align", "num_tokens_post_pad of full buffers")
def whole_buffer_counted(ids, experts, block, expert_map):
    found = right.align(ids, experts, block, expert_map)
    size = len(found.expert_ids) * block
    slots = np.full(size, ids.size, np.int32)
    slots[: len(found.sorted_ids)] = found.sorted_ids[:size]
    return Alignment(slots, found.expert_ids, np.array([size], np.int32))


@stage("align", "tokens instead of slots", lambda t: t.top_k > 1)
def tokens_instead_of_slots(ids, experts, block, expert_map):
    found = right.align(ids, experts, block, expert_map)
    slots = np.where(found.sorted_ids < ids.size, found.sorted_ids // ids.shape[1], ids.size)
    return replace(found, sorted_ids=slots.astype(np.int32))


@stage("align", "the number of tokens for padding", lambda t: t.top_k > 1)
def padding_is_the_number_of_tokens(ids, experts, block, expert_map):
    return right.laid_out(
        right.local_ids(ids, expert_map), right.local_count(experts, expert_map), block, len(ids)
    )


@stage("align", "blocks of 16", lambda t: t.block != 16)
def blocks_of_16(ids, experts, block, expert_map):
    return right.align(ids, experts, 16, expert_map)


@stage(
    "align", "a block for every expert, also for those without tokens", lambda t: t.experts > t.m * t.top_k
)
def block_for_every_expert(ids, experts, block, expert_map):
    count = right.local_count(experts, expert_map)
    local = right.local_ids(ids, expert_map)
    parts = [right.laid_out(np.where(local == e, local, -1), count, block) for e in range(count)]
    padded = [int(p.num_tokens_post_pad[0]) for p in parts]
    empty = np.full(block, ids.size, np.int32)
    slots = [p.sorted_ids[:n] if n else empty for p, n in zip(parts, padded, strict=True)]
    owners = [np.full(max(n // block, 1), e, np.int32) for e, n in enumerate(padded)]
    found = np.concatenate(slots)
    return Alignment(found, np.concatenate(owners), np.array([len(found)], np.int32))
