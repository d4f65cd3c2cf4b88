"""Routing: from logits to the experts of each token and their weights (C70-C77).

What is right is made of stages that can be replaced one by one, as in `reference.semantics`: `ROUTING_RIGHT` is the
meaning that docs/specification.md gives, a mutant is that with one stage which is wrong. A router computes in float32
or less, so near the cut between chosen and not chosen several selections are right: `acceptable_routes` gives for
each token the interval of every expert's key, judges any selection by it, and lists those that pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from reference.bounds import Contract
from reference.errors import FormatError, TensorError
from reference.rounding import float_format

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Scoring = Literal["softmax", "sigmoid", "softmax-selected"]
GroupScore = Literal["max", "sum-of-two"]

# Half an ulp of float32, relative.
_U = 2.0**-24
# Float32 numbers below it may be flushed to zero, as may the reciprocal of what is beyond its inverse.
_FLUSHED = 2.0**-126
# What a divisor may be padded with so that it is never zero (C73).
_EPSILON = 1e-20


@dataclass(frozen=True)
class Routing:
    """How a model routes.

    experts, top_k: E and k. scoring: `softmax` over all experts, `sigmoid` of each, or `softmax-selected`: the
    logits select, the softmax is taken over the selected. renormalize: weights divided by their sum. bias: a
    float32 correction (E) is added to the scores for the selection, never to the weights. groups, top_groups,
    group_score: experts in equal runs of E / groups; only experts of the top_groups best groups are eligible
    (1 and 1: no grouping). scaling: the routed scaling factor, multiplied into the weights at the end.
    Raises FormatError for counts that do not fit, and for a bias or groups where the logits themselves select.
    """

    experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in get_args(Scoring) or self.group_score not in get_args(GroupScore):
            raise FormatError(
                f"routing: unknown scoring {self.scoring!r} or group score {self.group_score!r}"
            )
        if self.groups < 1 or self.experts < 1 or self.experts % self.groups:
            raise FormatError(f"routing: {self.groups} groups do not divide {self.experts} experts")
        if not 1 <= self.top_groups <= self.groups:
            raise FormatError(f"routing: top_groups {self.top_groups} is outside 1..{self.groups}")
        eligible = self.experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= eligible:
            raise FormatError(f"routing: top_k {self.top_k} is outside 1..{eligible}, the eligible experts")
        if self.group_score == "sum-of-two" and self.experts // self.groups < 2:
            raise FormatError("routing: a sum of two needs groups of two experts or more")
        if self.scoring == "softmax-selected" and (self.bias or self.groups > 1):
            raise FormatError("routing: softmax-selected has no bias and no groups; its logits select")
        if not (math.isfinite(self.scaling) and self.scaling > 0):
            raise FormatError(f"routing: scaling {self.scaling!r} is no positive number")

    @property
    def name(self) -> str:
        """As case ids spell it: `sigmoid-renorm-bias-g8-top4-sum-scaled`."""
        parts = [self.scoring, *(["renorm"] if self.renormalize else []), *(["bias"] if self.bias else [])]
        if self.groups > 1:
            score = "sum" if self.group_score == "sum-of-two" else "max"
            parts += [f"g{self.groups}", f"top{self.top_groups}", score]
        return "-".join([*parts, *(["scaled"] if self.scaling != 1 else [])])

    @property
    def normalized(self) -> bool:
        """Whether the weights are divided by their sum: a softmax over the selected is that of all, so divided."""
        return self.renormalize or self.scoring == "softmax-selected"


# ---- the stages


@dataclass(frozen=True)
class Scored:
    """What is known of the tokens when experts are chosen: logits (T, E) in their own dtype, scores float64 (T, E),
    bias float64 (E), zeros where the model has none."""

    logits: Array
    scores: Float64Array
    bias: Float64Array
    routing: Routing


@dataclass(frozen=True)
class Alignment:
    """sorted_ids: slots, token * k + place, in runs of one expert. expert_ids: one a block. num_tokens_post_pad: one
    number, how much of sorted_ids counts. int32 each (C77)."""

    sorted_ids: Array
    expert_ids: Array
    num_tokens_post_pad: Array

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.sorted_ids, self.expert_ids, self.num_tokens_post_pad


@dataclass(frozen=True)
class RoutingSemantics:
    """The stages, each with the signature of the right function below."""

    scores: Callable[[Array, Routing], Float64Array]
    keys: Callable[[Scored], Float64Array]
    eligible: Callable[[Scored, Float64Array], Float64Array]
    choose: Callable[[Float64Array, Routing], Ids]
    weigh: Callable[[Scored, Ids], Float64Array]
    align: Callable[[Array, int, int, Array | None], Alignment]


def scores_of(logits: Array, routing: Routing) -> Float64Array:
    """The score of every expert (T, E): softmax or sigmoid; one that is not finite counts as 0 (C70, C76)."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = logits.astype(np.float64)
        if routing.scoring == "sigmoid":
            found = 1 / (1 + np.exp(-values))
        else:
            powers = np.exp(values - values.max(axis=1, keepdims=True))
            found = powers / powers.sum(axis=1, keepdims=True)
    return np.where(np.isfinite(found), found, 0.0)


def keys_of(scored: Scored) -> Float64Array:
    """What experts are chosen by (T, E): score + bias (C71)."""
    return np.asarray(scored.scores + scored.bias)


def eligible(scored: Scored, keys: Float64Array) -> Float64Array:
    """The keys (T, E), minus infinity for experts outside the best groups (C75)."""
    routing = scored.routing
    if routing.groups == 1:
        return keys
    return only_groups(keys, largest(group_scores(keys, routing), routing.top_groups), routing)


def group_scores(keys: Float64Array, routing: Routing) -> Float64Array:
    """(T, groups): the largest key of each group, or the sum of its two largest."""
    members = np.sort(keys.reshape(len(keys), routing.groups, routing.experts // routing.groups), axis=2)
    count = 1 if routing.group_score == "max" else 2
    return np.asarray(members[:, :, -count:].sum(axis=2))


def only_groups(
    keys: Float64Array, kept: Ids, routing: Routing, masked: float | Float64Array = -np.inf
) -> Float64Array:
    """The keys with those of other groups than kept (T, n) masked."""
    group = np.arange(routing.experts) // (routing.experts // routing.groups)
    inside = (kept[:, :, None] == group).any(axis=1)
    return np.where(inside, keys, masked)


def largest(keys: Float64Array, count: int) -> Ids:
    """Places of the count largest of each row, equal ones in order (C71)."""
    return np.argsort(-keys, axis=1, kind="stable")[:, :count]


def choose(keys: Float64Array, routing: Routing) -> Ids:
    """The k experts of largest key (T, k), of equal ones the lowest (C71)."""
    return largest(keys, routing.top_k)


def weigh(scored: Scored, ids: Ids) -> Float64Array:
    """Weights (T, k): the unbiased scores, divided by their sum where the model says so, times the factor (C73)."""
    found = np.take_along_axis(scored.scores, ids, axis=1)
    if scored.routing.normalized:
        total = found.sum(axis=1, keepdims=True)
        found = found / np.where(total > 0, total, 1.0)
    return np.asarray(found * scored.routing.scaling)


def align(ids: Array, experts: int, block: int, expert_map: Array | None) -> Alignment:
    """One right alignment: experts in order, slots in order, the sentinel T * k for padding (C77)."""
    return laid_out(local_ids(ids, expert_map), local_count(experts, expert_map), block)


def local_ids(ids: Array, expert_map: Array | None) -> Ids:
    """The local expert of each slot (T * k), -1 for those that are dropped."""
    slots = ids.reshape(-1).astype(np.int64)
    if expert_map is None:
        return slots
    return np.where(slots < 0, -1, expert_map.astype(np.int64)[np.maximum(slots, 0)])


def local_count(experts: int, expert_map: Array | None) -> int:
    return experts if expert_map is None else int(expert_map.max(initial=-1)) + 1


def laid_out(local: Ids, experts: int, block: int, padding: int | None = None) -> Alignment:
    """The runs of experts one after the other, each padded to whole blocks; padding: instead of the sentinel."""
    sentinel = len(local)
    fill = sentinel if padding is None else padding
    runs: list[Array] = []
    owners: list[int] = []
    for expert in range(experts):
        slots = np.flatnonzero(local == expert)
        blocks = -(-len(slots) // block)
        runs.append(np.append(slots, np.full(blocks * block - len(slots), fill)))
        owners += [expert] * blocks
    used = np.concatenate(runs) if runs else np.zeros(0)
    found = np.full(sentinel + experts * (block - 1), sentinel, np.int32)
    found[: len(used)] = used
    expert_ids = np.full(-(-len(found) // block), -1, np.int32)
    expert_ids[: len(owners)] = owners
    return Alignment(found, expert_ids, np.array([len(used)], np.int32))


ROUTING_RIGHT = RoutingSemantics(scores_of, keys_of, eligible, choose, weigh, align)


def route(
    logits: Array, routing: Routing, bias: Array | None, semantics: RoutingSemantics = ROUTING_RIGHT
) -> tuple[Float64Array, Ids]:
    """Weights float64 and ids int64, (T, k) each, of logits (T, E) in bf16, fp16 or fp32 and bias float32 (E) or None.

    Raises TensorError for shapes that are not those of the routing, and for a bias that it does not have or lacks.
    """
    scored = _scored(logits, routing, bias, semantics)
    ids = semantics.choose(semantics.eligible(scored, semantics.keys(scored)), routing)
    return semantics.weigh(scored, ids), ids


def _scored(logits: Array, routing: Routing, bias: Array | None, semantics: RoutingSemantics) -> Scored:
    if logits.ndim != 2 or logits.shape[1] != routing.experts:
        raise TensorError(f"logits: expected shape [T, {routing.experts}], found {list(logits.shape)}")
    if routing.bias != (bias is not None):
        raise TensorError("bias: the routing has one" if routing.bias else "bias: the routing has none")
    if bias is not None and (bias.shape != (routing.experts,) or not np.isfinite(bias).all()):
        raise TensorError(f"bias: expected {routing.experts} finite numbers, found shape {list(bias.shape)}")
    offset = np.zeros(routing.experts) if bias is None else bias.astype(np.float64)
    return Scored(logits, semantics.scores(logits, routing), offset, routing)


# ---- what a router's own rounding leaves open


@dataclass(frozen=True)
class Keys:
    """Intervals (..., n) of what is chosen by, and names: equal ones are an exact tie, which goes by place."""

    low: Float64Array
    high: Float64Array
    names: Ids


@dataclass(frozen=True)
class AcceptableRoutes:
    """What a correct router may answer (C72, C73).

    ids, weights: the plain answer, (T, k) each; plain: the experts (T, E) it may choose from. Where groups are near
    a tie, a token has other sets of eligible experts too (C75). scored: what is exact. keys: of the experts (T, E).
    score_low, score_high: of what weights are made of. contract: ties and precision.
    """

    ids: Ids
    weights: Float64Array
    plain: Mask
    scored: Scored
    keys: Keys
    score_low: Float64Array
    score_high: Float64Array
    contract: Contract
    _eligible: dict[int, list[Mask]] = field(default_factory=dict)

    @property
    def routing(self) -> Routing:
        return self.scored.routing

    def refused(self, ids: Array) -> Mask:
        """The tokens (T) whose ids (T, k) are not an acceptable selection, whatever their order."""
        experts = self.routing.experts
        bad: Mask = np.asarray(((ids < 0) | (ids >= experts)).any(axis=1))
        chosen = np.zeros((len(ids), experts), np.bool_)
        np.put_along_axis(chosen, np.where(bad[:, None], 0, ids).astype(np.int64), True, axis=1)
        bad |= chosen.sum(axis=1) != self.routing.top_k
        wrong: Mask = bad | ~_acceptable(self.keys, chosen, self.plain)
        for token in np.flatnonzero(wrong & ~bad) if self.routing.groups > 1 else ():
            others = self.eligible(int(token))[1:]
            wrong[token] = not any(
                _acceptable(_one(self.keys, token), chosen[token, None], mask[None])[0] for mask in others
            )
        return wrong

    def selections(self, token: int, limit: int = 64) -> list[tuple[int, ...]]:
        """Acceptable selections of a token, each in ascending order, limit of them at most."""
        keys = _one(self.keys, token)
        found: dict[tuple[int, ...], None] = {}
        for mask in self.eligible(token):
            members = np.flatnonzero(mask)
            of = Keys(keys.low[0, members], keys.high[0, members], keys.names[0, members])
            for places in islice(acceptable_sets(of, self.routing.top_k), limit):
                found[tuple(int(members[p]) for p in places)] = None
        return list(found)[:limit]

    def eligible(self, token: int) -> list[Mask]:
        """The sets of experts (E) that a token may choose from, the plain one first."""
        if token not in self._eligible:
            self._eligible[token] = self._sets_of_groups(token)
        return self._eligible[token]

    def _sets_of_groups(self, token: int) -> list[Mask]:
        routing = self.routing
        if routing.groups == 1:
            return [self.plain[token]]
        keys = _one(self.keys, token)
        low, high = _group_ends(keys, routing)
        size = routing.experts // routing.groups
        plain = tuple(int(group) for group in np.flatnonzero(self.plain[token, ::size]))
        found = {plain: None}
        others = np.delete(high, plain)
        if len(others) and low[list(plain)].min() <= others.max():
            near = Keys(low, high, _group_names(keys, routing, self.contract))
            found |= dict.fromkeys(acceptable_sets(near, routing.top_groups))
        return [np.repeat(np.isin(np.arange(routing.groups), kept), size) for kept in found]

    def weights_between(self, ids: Array) -> tuple[Float64Array, Float64Array]:
        """Lowest and highest weights (T, k) of ids that were chosen, all in range (C73)."""
        routing, places = self.routing, ids.astype(np.int64)
        low, high = (np.take_along_axis(s, places, axis=1) for s in (self.score_low, self.score_high))
        roundings = 4.0 if routing.scaling != 1 else 2.0  # of the factor and by it, of a score that is stored
        if routing.normalized:
            roundings += routing.top_k + 4  # the sum, and a quotient or a reciprocal and its product
            others_low = np.maximum(low.sum(axis=1, keepdims=True) - low, 0.0)
            others_high = np.maximum(high.sum(axis=1, keepdims=True) - high, 0.0)
            nothing = high.sum(axis=1, keepdims=True) == 0
            low, high = (
                low / (low + others_high + _EPSILON),
                np.where(nothing, 1 / routing.top_k, high / np.where(high > 0, high + others_low, 1.0)),
            )
        relative, least = roundings * _U, _FLUSHED
        if self.contract.router == "16-bit":
            output = float_format(self.scored.logits.dtype)
            relative += 3 * output.unit_roundoff  # sum, quotient, factor; the score's own is in its interval
            least += 2.0 ** (output.emin - output.precision)
        low, high = low * routing.scaling, high * routing.scaling
        least = least * max(1.0, routing.scaling)
        return low * (1 - relative) - least, high * (1 + relative) + least


def acceptable_routes(
    logits: Array, routing: Routing, bias: Array | None, contract: Contract
) -> AcceptableRoutes:
    """What a correct router of this contract may answer. Arguments and errors are those of `route`.

    Radii of the scores, relative, in units of float32:

        softmax   own: (2 + 1.173 |d|) 2^-23        an approximate exponential of d = l - max
                     + (|l| + |max|) 2^-24          d rounded, or l and max each multiplied by log2(e) before
                     + 2^-22                        a quotient, or a reciprocal and its product
                  of the token: mean own + 3E 2^-23 a sum of E terms, rescaled wherever a larger maximum comes up
        sigmoid   (4 + 1.2 |l|) 2^-23               with 2^-23 (tanh) or 2^-12 (tanh.approx) absolute, if so promised

    and 2^-24 of |score + bias|; below 2^-126 a score may be flushed. What all scores of a token share does not change
    their order, so it counts for weights, and for keys only beside a bias.
    """
    scored = _scored(logits, routing, bias, ROUTING_RIGHT)
    scores = scored.scores
    values = scored.logits.astype(np.float64)
    own, shared = _score_errors(values, scores, routing)
    radius = own * scores + _FLUSHED
    if routing.scoring == "sigmoid":
        radius += {"exp": 0.0, "tanh": 2.0**-23, "tanh.approx": 2.0**-12}[contract.sigmoid]
    if contract.router == "16-bit":
        output = float_format(logits.dtype)
        radius += output.unit_roundoff * scores + 2.0 ** (output.emin - output.precision)
    radius = np.where(_by_rule(scored), 0.0, radius)
    apart = radius + shared * scores
    wide = radius if routing.normalized else apart
    keys = keys_of(scored)
    between = apart + _U * np.abs(keys) if routing.bias else radius
    names = _names(values, scored) if contract.ties == "lowest" else np.arange(routing.experts)
    intervals = Keys(keys - between, keys + between, np.broadcast_to(names, keys.shape))
    weights, ids = route(logits, routing, bias)
    plain = np.isfinite(eligible(scored, keys))
    return AcceptableRoutes(
        ids, weights, plain, scored, intervals, np.maximum(scores - wide, 0.0), scores + wide, contract
    )


def _score_errors(
    values: Float64Array, scores: Float64Array, routing: Routing
) -> tuple[Float64Array, Float64Array]:
    """Relative errors of the scores: each one's own (T, E), and what those of a token share (T, 1)."""
    size = np.abs(np.where(scores > 0, values, 0.0))  # what is not finite has score 0, or sigmoid(inf) = 1
    size = np.where(np.isfinite(size), size, 0.0)
    if routing.scoring == "sigmoid":
        return (4 + 1.2 * size) * 2.0**-23, np.zeros((len(values), 1))
    top = np.where(scores > 0, values, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    below = np.where(scores > 0, top - values, 0.0)
    own = (2 + 1.173 * below) * 2.0**-23 + (size + np.abs(top)) * _U + 2.0**-22
    shared = (own * scores).sum(axis=1, keepdims=True) + 3 * routing.experts * 2.0**-23
    return own, shared


def _by_rule(scored: Scored) -> Mask:
    """The scores that are 0 whatever the arithmetic: of minus infinity, and of what is not finite (C76)."""
    zero = scored.scores == 0
    dead = zero.all(axis=1, keepdims=True) & (scored.routing.scoring != "sigmoid")
    return np.asarray(zero & (dead | ~np.isfinite(scored.logits.astype(np.float64))))


def _names(values: Float64Array, scored: Scored) -> Ids:
    """Equal for experts of a token with equal logit and bias, bit for bit, and where the score is 0 by rule (C72)."""
    logits = np.where(_by_rule(scored), -np.inf, values)
    name = np.unique(logits, return_inverse=True)[1].reshape(logits.shape)
    offsets, number = np.unique(scored.bias, return_inverse=True)
    return np.asarray(name * len(offsets) + number.reshape(-1))


def _one(keys: Keys, token: int | np.int64) -> Keys:
    """The keys of one token, (1, E) each."""
    row = slice(int(token), int(token) + 1)
    return Keys(keys.low[row], keys.high[row], keys.names[row])


def _acceptable(keys: Keys, chosen: Mask, mask: Mask) -> Mask:
    """Whether the chosen (T, E) of the eligible in mask (T, E) are an acceptable selection, a token each (C72).

    No eligible one is surely above a chosen one, and exact ties are taken in order.
    """
    lowest = np.where(chosen, keys.high, np.inf).min(axis=1, initial=np.inf)
    left_out = np.where(mask & ~chosen, keys.low, -np.inf).max(axis=1, initial=-np.inf)
    places = np.arange(chosen.shape[1])
    names = np.where(mask, keys.names, -1 - places)  # what is not eligible ties with nothing
    order = np.argsort(names, axis=1, kind="stable")
    names, taken = (np.take_along_axis(a, order, axis=1) for a in (names, chosen))
    out_of_order = (names[:, 1:] == names[:, :-1]) & taken[:, 1:] & ~taken[:, :-1]
    return np.asarray((lowest >= left_out) & ~(chosen & ~mask).any(axis=1) & ~out_of_order.any(axis=1))


def acceptable_sets(keys: Keys, count: int) -> Iterator[tuple[int, ...]]:
    """Every acceptable set of count places of keys (n), ascending.

    Exact ties have one interval and go in order, so a set is a number of each name. By falling low, whatever is taken
    only has to reach the largest low that was left out before it.
    """
    runs: dict[int, list[int]] = {}
    for place in np.argsort(-keys.low, kind="stable"):
        runs.setdefault(int(keys.names[place]), []).append(int(place))
    ends = [(float(keys.low[run[0]]), float(keys.high[run[0]]), run) for run in runs.values()]

    def taken(start: int, left: int, floor: float) -> Iterator[list[int]]:
        if left == 0:
            yield []
        elif sum(len(run) for _, high, run in ends[start:] if high >= floor) >= left:
            low, high, run = ends[start]
            for number in range(min(len(run), left) if high >= floor else 0, -1, -1):
                passed = floor if number == len(run) else max(floor, low)
                for others in taken(start + 1, left - number, passed):
                    yield run[:number] + others

    for places in taken(0, count, -np.inf):
        yield tuple(sorted(places))


def _group_ends(keys: Keys, routing: Routing) -> tuple[Float64Array, Float64Array]:
    """Lowest and highest group scores (groups) of one token."""
    low, high = (group_scores(a, routing)[0] for a in (keys.low, keys.high))
    if routing.group_score == "sum-of-two":
        low, high = low - _U * np.abs(low), high + _U * np.abs(high)
    return low, high


def _group_names(keys: Keys, routing: Routing, contract: Contract) -> Ids:
    """Equal for groups of one token that tie exactly: what makes their scores has the same names, and surely makes
    them (C75)."""
    if contract.ties == "any":
        return np.arange(routing.groups)
    count = 1 if routing.group_score == "max" else 2
    known: dict[tuple[int, ...], int] = {}
    found = []
    for group in range(routing.groups):
        low, high, names = (np.split(a[0], routing.groups)[group] for a in (keys.low, keys.high, keys.names))
        order = np.argsort(-(low + high), kind="stable")
        lead, rest = order[:count], order[count:]
        sure = ((names[rest] == names[lead[-1]]) | (high[rest] < low[lead[-1]])).all()
        name = tuple(sorted(int(i) for i in names[lead])) if sure else (-1 - group,)
        found.append(known.setdefault(name, len(known)))
    return np.array(found)


# ---- block alignment


def misaligned(
    ids: Array, experts: int, block: int, expert_map: Array | None, found: Alignment
) -> str | None:
    """Why an alignment is not a valid one of ids (T, k), or None (C77).

    The order of the slots inside an expert is free, and so is that of the blocks: what reads them takes a block's
    expert from expert_ids. What lies beyond num_tokens_post_pad only must not name a slot.
    """
    local, count = local_ids(ids, expert_map), local_count(experts, expert_map)
    sentinel = len(local)
    sizes = np.bincount(local[local >= 0], minlength=count)
    wanted = int((-(-sizes // block)).sum()) * block
    padded = int(found.num_tokens_post_pad[0])
    if padded != wanted:
        return f"num_tokens_post_pad is {padded}, expected {wanted}: every expert's slots in whole blocks of {block}"
    if len(found.sorted_ids) < padded or len(found.expert_ids) < padded // block:
        return (
            f"sorted_ids has {len(found.sorted_ids)} and expert_ids {len(found.expert_ids)} entries, "
            f"fewer than num_tokens_post_pad = {padded} needs"
        )
    slots = found.sorted_ids.astype(np.int64)
    beyond = np.flatnonzero((slots[padded:] >= 0) & (slots[padded:] < sentinel))
    if len(beyond):
        place = padded + int(beyond[0])
        return f"sorted_ids[{place}] names slot {slots[place]} beyond num_tokens_post_pad = {padded}"
    slots, owners = slots[:padded], found.expert_ids[: padded // block].astype(np.int64)
    return _misplaced(slots, owners, local, count, block)


def _misplaced(slots: Ids, owners: Ids, local: Ids, count: int, block: int) -> str | None:
    sentinel = len(local)
    for number in np.flatnonzero((owners < 0) | (owners >= count)):
        return (
            f"expert_ids[{number}] is {owners[number]}, outside 0..{count - 1}, the experts that are present"
        )
    for place in np.flatnonzero((slots < 0) | (slots > sentinel)):
        return f"sorted_ids[{place}] is {slots[place]}: neither a slot nor the sentinel {sentinel}"
    live = np.flatnonzero(slots < sentinel)
    times = np.bincount(slots[live], minlength=sentinel)
    for slot in np.flatnonzero(times != (local >= 0)):
        expert = f"of expert {local[slot]}" if local[slot] >= 0 else "of no expert that is present"
        return (
            f"slot {slot} {expert} stands {times[slot]} times in sorted_ids, expected {int(local[slot] >= 0)}"
        )
    of = local[slots[live]]
    for i in np.flatnonzero(of != owners[live // block]):
        at = int(live[i])
        found = f"slot {slots[at]} of expert {of[i]}"
        return f"sorted_ids[{at}] is {found}, in block {at // block} of expert {owners[at // block]}"
    return None
