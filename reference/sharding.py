"""Shards: what each rank of a divided mixture of experts holds, and what the ranks' outputs add up to (C100-C105).

Twice, by ways that share no code: `cut_tensors` slices packed tensors as a loader does, stage by stage, and can be
wrong by one (`reference.mutants.sharding`); `cut_layer` slices the codes that they mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.bounds import Expected, Hypothesis
from reference.errors import FormatError, TensorError
from reference.formats import WeightFormat
from reference.moe import Expert, MoeLayer
from reference.packing import packed_size
from reference.rounding import FLOAT_FORMATS, half_ulps, round_to
from reference.swiglu import Arrangement
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

_WORD = 32


@dataclass(frozen=True)
class Ranks:
    """How a layer is divided over `count` ranks: `tp` cuts every expert, `ep` deals the experts out."""

    way: str
    count: int

    @classmethod
    def parse(cls, name: str) -> Ranks:
        """Read `tp2`, `ep4`. Raises FormatError for anything else."""
        match = re.fullmatch(r"(tp|ep)([1-9]\d*)", name)
        if match is None:
            raise FormatError(f"ranks: {name!r} is not `tp` or `ep` and a number of ranks, such as tp2")
        return cls(match[1], int(match[2]))


@dataclass(frozen=True)
class StoredExperts:
    """The packed tensors of a layer's experts, and what they do not tell.

    tensors: `w13_weight_packed` int32 (E, 2I, words of H), `w13_weight_scale` (E, 2I, G), `w13_weight_zero_point`
    int32 (E, words of 2I, G), `w13_weight_g_idx` int32 (E, H), `w13_bias` (E, 2I), the same with `w2_` of
    (E, H, I), and a shared expert's with `shared_` before the name and E = 1; E counts the experts that are present.
    experts: of the router, global. arrangement: of the rows of w13. expert_map: int32 (experts), the place of
    each in the tensors or -1, None where all are present in order.
    """

    tensors: Mapping[str, Array]
    format: WeightFormat
    hidden: int
    intermediate: int
    experts: int
    arrangement: Arrangement = "gate-up"
    expert_map: Array | None = None


@dataclass(frozen=True)
class Cut:
    """One rank's share of one layer, in numbers. intermediate, experts: of the whole layer."""

    ranks: Ranks
    rank: int
    format: WeightFormat
    hidden: int
    intermediate: int
    experts: int
    interleaved: bool
    act_order: bool
    bias: bool
    shared: bool

    @property
    def units(self) -> int:
        """Units of the intermediate a rank holds."""
        return self.intermediate // self.ranks.count

    @classmethod
    def of(cls, stored: StoredExperts, ranks: Ranks, rank: int) -> Cut:
        return cls(
            ranks, rank, stored.format, stored.hidden, stored.intermediate, stored.experts,
            stored.arrangement == "interleaved", "w2_weight_g_idx" in stored.tensors,
            "w2_bias" in stored.tensors, "shared_w2_weight_packed" in stored.tensors,
        )  # fmt: skip


# ---- route one: packed tensors, as a loader cuts them


@dataclass(frozen=True)
class ShardingSemantics:
    """The stages of cutting, each with the signature of the right function below.

    Arrays are stacks of experts. Rows are those of w13, units the columns of w2, words those that hold
    them; groups are the columns of w2's scales and zero points.
    """

    legal: Callable[[Cut], None]
    rows_held: Callable[[Cut], Index]
    units_held: Callable[[Cut], Index]
    words_held: Callable[[Index, int], Index]
    w13_scale: Callable[[Array, Index, Cut], Array]
    w13_zero_point: Callable[[Array, Index, Cut], Array]
    w13_bias: Callable[[Array, Index, Cut], Array]
    w2_packed: Callable[[Array, Index, Cut], Array]
    w2_groups: Callable[[Index, Cut], Index]
    w2_g_idx: Callable[[Array, Index, Cut], Array]
    w2_bias: Callable[[Array, Cut], Array]
    experts_held: Callable[[Cut], Index]
    expert_places: Callable[[Index, Cut], npt.NDArray[np.int32]]
    shared_held: Callable[[Cut], bool]


def legal(cut: Cut) -> None:
    """Refuse a cut that slices cannot make (C101): TensorError with the tensor, the reason and the remedy.

    Zero points of w13 need no rule of their own: they lie along the same units, in runs of as many bits or twice
    as many.
    """
    if cut.ranks.way == "ep":
        if cut.ranks.count > cut.experts:
            raise TensorError(
                f"w13_weight_packed: {cut.ranks.count} ranks for {cut.experts} experts; use fewer ranks"
            )
        return
    whole_units(cut)
    whole_words(cut)
    whole_groups(cut)


def whole_units(cut: Cut) -> None:
    """Refuse a number of ranks that does not divide I."""
    if cut.intermediate % cut.ranks.count:
        raise TensorError(
            f"w2_weight_packed: {cut.ranks.count} ranks do not divide the intermediate size {cut.intermediate}; "
            "use a number of ranks that does"
        )


def whole_words(cut: Cut) -> None:
    """Refuse a cut inside a word."""
    count, bits = cut.ranks.count, cut.format.bits
    if count > 1 and cut.units * bits % _WORD:
        raise TensorError(
            f"w2_weight_packed: {count} ranks cut {cut.intermediate} columns of {bits} bits after every "
            f"{cut.units}, inside a 32-bit word, and a loader does not repack; a rank's share has to be a multiple "
            f"of {_WORD // math.gcd(bits, _WORD)}: use another number of ranks, or repack the checkpoint"
        )


def whole_groups(cut: Cut) -> None:
    """Refuse a cut inside a group of scales."""
    size = cut.format.group_size
    if cut.format.strategy == "group" and not cut.act_order and cut.units % size:
        raise TensorError(
            f"w2_weight_scale: {cut.ranks.count} ranks cut {cut.intermediate} columns after every {cut.units}, inside "
            f"a group of {size}; a rank's share has to be a multiple of it: use another number of ranks, or a "
            "smaller group_size"
        )


def rows_held(cut: Cut) -> Index:
    """The rows of w13 of the rank's units in both halves: two runs, or the pairs of an interleaved one (C100)."""
    first, last = cut.rank * cut.units, (cut.rank + 1) * cut.units
    if cut.interleaved:
        return np.arange(2 * first, 2 * last)
    gate = np.arange(first, last)
    return np.concatenate([gate, gate + cut.intermediate])


def units_held(cut: Cut) -> Index:
    """The columns of w2: the units of the rows (C100)."""
    return np.arange(cut.rank * cut.units, (cut.rank + 1) * cut.units)


def words_held(places: Index, bits: int) -> Index:
    """The words that hold codes, in their order; a legal cut shares none of them with another rank (C101)."""
    words = places * bits // _WORD
    last = (places * bits + bits - 1) // _WORD
    found: Index = np.array(list(dict.fromkeys(np.stack([words, last], axis=1).ravel().tolist())), np.int64)
    return found


def w13_scale(array: Array, rows: Index, cut: Cut) -> Array:
    """Those of the rows; one scale of a whole tensor is everybody's (C100)."""
    return array if cut.format.strategy == "tensor" else array[:, rows]


def w13_zero_point(array: Array, words: Index, cut: Cut) -> Array:
    """The words that hold those of the rows (C100)."""
    return array if cut.format.strategy == "tensor" else array[:, words]


def w13_bias(array: Array, rows: Index, cut: Cut) -> Array:
    """Those of the rows (C100)."""
    return array[:, rows]


def w2_packed(array: Array, words: Index, cut: Cut) -> Array:
    """The words of the units, of every row (C100)."""
    return array[:, :, words]


def w2_groups(units: Index, cut: Cut) -> Index:
    """The groups of the units; all of them under act-order, and the one of a channel (C100, C102)."""
    if cut.format.strategy != "group" or cut.act_order:
        return np.arange(cut.format.groups(cut.intermediate))
    return np.unique(units // cut.format.group_size)


def w2_g_idx(array: Array, units: Index, cut: Cut) -> Array:
    """Those of the units, naming the groups of the whole (C102)."""
    return array[:, units]


def w2_bias(array: Array, cut: Cut) -> Array:
    """The bias on rank 0, zeros on the others, so that the sum has it once (C100)."""
    return array if cut.rank == 0 else np.zeros_like(array)


def experts_held(cut: Cut) -> Index:
    """Global experts in runs; the first E mod T ranks hold one more (C104)."""
    each, more = divmod(cut.experts, cut.ranks.count)
    first = cut.rank * each + min(cut.rank, more)
    return np.arange(first, first + each + (cut.rank < more))


def expert_places(held: Index, cut: Cut) -> npt.NDArray[np.int32]:
    """The local place of each global expert, -1 for those of other ranks (C104)."""
    places = np.full(cut.experts, -1, np.int32)
    places[held] = np.arange(len(held))
    return places


def shared_held(cut: Cut) -> bool:
    """Whether the rank of `ep` holds the shared expert: rank 0 alone (C104)."""
    return cut.rank == 0


SHARDING_RIGHT = ShardingSemantics(
    legal, rows_held, units_held, words_held, w13_scale, w13_zero_point, w13_bias,
    w2_packed, w2_groups, w2_g_idx, w2_bias, experts_held, expert_places, shared_held,
)  # fmt: skip


def cut_tensors(
    stored: StoredExperts, ranks: Ranks, rank: int, semantics: ShardingSemantics = SHARDING_RIGHT
) -> StoredExperts:
    """What a rank holds of packed tensors (C100-C102, C104): slices of them, nothing repacked.

    Raises TensorError naming the tensor: shapes that do not fit, a rank outside 0..T-1, experts that are dealt out
    already, and the cuts that C101 forbids.
    """
    if not 0 <= rank < ranks.count:
        raise TensorError(f"rank: {rank} is outside 0..{ranks.count - 1}")
    _check_shapes(stored)
    cut = Cut.of(stored, ranks, rank)
    semantics.legal(cut)
    if ranks.way == "ep":
        return _dealt_tensors(stored, cut, semantics)
    s, bits = semantics, stored.format.bits
    rows, units = s.rows_held(cut), s.units_held(cut)
    row_words, unit_words, groups = (
        s.words_held(rows, bits),
        s.words_held(units, bits),
        s.w2_groups(units, cut),
    )

    def of_groups(array: Array) -> Array:
        return array if stored.format.strategy == "tensor" else array[:, :, groups]

    slices: dict[str, Callable[[Array], Array]] = {
        "w13_weight_packed": lambda a: a[:, rows],
        "w13_weight_scale": lambda a: s.w13_scale(a, rows, cut),
        "w13_weight_zero_point": lambda a: s.w13_zero_point(a, row_words, cut),
        "w13_weight_g_idx": lambda a: a,
        "w13_bias": lambda a: s.w13_bias(a, rows, cut),
        "w2_weight_packed": lambda a: s.w2_packed(a, unit_words, cut),
        "w2_weight_scale": of_groups,
        "w2_weight_zero_point": of_groups,
        "w2_weight_g_idx": lambda a: s.w2_g_idx(a, units, cut),
        "w2_bias": lambda a: s.w2_bias(a, cut),
    }
    tensors = {name: slices[name.removeprefix("shared_")](a) for name, a in stored.tensors.items()}
    return replace(stored, tensors=_contiguous(tensors), intermediate=cut.units)


def _dealt_tensors(stored: StoredExperts, cut: Cut, semantics: ShardingSemantics) -> StoredExperts:
    if stored.expert_map is not None:
        raise TensorError("expert_map: the experts are dealt out already; divide the whole layer")
    held = semantics.experts_held(cut)
    shared = semantics.shared_held(cut)
    tensors = {
        name: array if name.startswith("shared_") else array[held]
        for name, array in stored.tensors.items()
        if shared or not name.startswith("shared_")
    }
    return replace(stored, tensors=_contiguous(tensors), expert_map=semantics.expert_places(held, cut))


def _contiguous(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def _check_shapes(stored: StoredExperts) -> None:
    fmt, h, i = stored.format, stored.hidden, stored.intermediate
    present = stored.experts if stored.expert_map is None else int((stored.expert_map >= 0).sum())
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, e in (("", present), ("shared_", 1)):
        for name, n, k in (("w13", 2 * i, h), ("w2", h, i)):
            one = fmt.strategy == "tensor"
            groups = fmt.groups(k)
            shapes[f"{prefix}{name}_weight_packed"] = (e, n, packed_size(k, fmt.bits))
            shapes[f"{prefix}{name}_weight_scale"] = (e, 1) if one else (e, n, groups)
            zero_points = (e, 1) if one else (e, packed_size(n, fmt.bits), groups)
            shapes[f"{prefix}{name}_weight_zero_point"] = zero_points
            shapes[f"{prefix}{name}_weight_g_idx"] = (e, k)
            shapes[f"{prefix}{name}_bias"] = (e, n)
    for name, array in stored.tensors.items():
        if name not in shapes:
            raise TensorError(f"{name}: no tensor of a mixture of experts has this name")
        if array.shape != shapes[name]:
            raise TensorError(f"{name}: expected shape {list(shapes[name])}, found {list(array.shape)}")


# ---- route two: the codes


def cut_layer(layer: MoeLayer, ranks: Ranks, rank: int) -> MoeLayer:
    """What a rank holds of a layer (C100, C102, C104), from the codes themselves.

    Words are no matter here. Raises TensorError for a cut that no weight of whole groups can hold.
    """
    if ranks.way == "ep":
        if layer.expert_map is not None:
            raise TensorError("expert_map: the experts are dealt out already; divide the whole layer")
        parts = np.array_split(np.arange(len(layer.experts)), ranks.count)
        places = np.full(len(layer.experts), -1, np.int32)
        places[parts[rank]] = np.arange(len(parts[rank]))
        experts = tuple(layer.experts[e] for e in parts[rank])
        return replace(layer, experts=experts, expert_map=places, shared=layer.shared if rank == 0 else None)
    interleaved = layer.gated.arrangement == "interleaved"

    def cut(expert: Expert) -> Expert:
        return _cut_expert(expert, ranks.count, rank, interleaved)

    shared = None if layer.shared is None else cut(layer.shared)
    return replace(layer, experts=tuple(cut(e) for e in layer.experts), shared=shared)


def _cut_expert(expert: Expert, count: int, rank: int, interleaved: bool) -> Expert:
    w13, w2, b2 = expert.w13, expert.w2, expert.b2
    indexed = w2.group_index is not None
    if w2.k % count or (w2.format.strategy == "group" and not indexed and w2.scale.shape[1] % count):
        raise TensorError(f"w2: {count} ranks cut {w2.k} columns inside a column or a group of scales")

    def rows(array: Array) -> Array:
        """Of (2I, ...): unit by unit where they are interleaved, half by half otherwise."""
        rest = array.shape[1:]
        if interleaved:
            return np.asarray(array.reshape(count, -1, *rest)[rank])
        return np.asarray(array.reshape(2, count, -1, *rest)[:, rank].reshape(-1, *rest))

    def columns(array: Array) -> Array:
        return np.ascontiguousarray(array.reshape(len(array), count, -1)[:, rank])

    def whole(array: Array) -> Array:
        return array

    grouped = w2.format.strategy == "group" and not indexed
    index = None if w2.group_index is None else w2.group_index.reshape(count, -1)[rank]
    return Expert(
        _remade(w13, rows, whole if w13.format.strategy == "tensor" else rows, w13.group_index),
        _remade(w2, columns, columns if grouped else whole, index),
        None if expert.b13 is None else rows(expert.b13),
        None if b2 is None else b2 if rank == 0 else np.zeros_like(b2),
    )


def _remade(
    weight: QuantizedWeight,
    codes: Callable[[Array], Array],
    scales: Callable[[Array], Array],
    index: npt.NDArray[np.int32] | None,
) -> QuantizedWeight:
    zero_point = None if weight.zero_point is None else scales(weight.zero_point)
    return QuantizedWeight(weight.format, codes(weight.codes), scales(weight.scale), zero_point, index)


# ---- what the ranks add up to


def added_up(parts: Sequence[Expected]) -> Expected:
    """The float32 sum of the ranks' 16-bit outputs (C103, C105), from what each rank may answer.

    All ranks compute by the same hypothesis; one that a rank does not tell apart says there what its first says. An
    output lies between the sum of the lowest and the sum of the highest answers, and what float32 rounds: T
    numbers take T - 1 additions, the last of which is the rounding of the output; each of the others rounds a
    partial sum, by at most 2^-24 of the sum of magnitudes, and not at all while all are multiples of some D and
    below 2^24 D together. Codes that may flip on a rank (C63) widen nothing here.
    """
    names = dict.fromkeys(name for part in parts for name in part.hypotheses)
    value: Float64Array = np.sum([part.value for part in parts], axis=0)
    return Expected(value, {name: _added_up(parts, name) for name in names}, FLOAT_FORMATS["fp32"])


def _added_up(parts: Sequence[Expected], name: str) -> Hypothesis:
    own = [part.hypotheses.get(name, next(iter(part.hypotheses.values()))) for part in parts]
    pairs = list(zip(parts, own, strict=True))
    centre: Float64Array = np.sum([part.finish(h, h.centre) for part, h in pairs], axis=0)
    ends = [part.interval(h) for part, h in pairs]
    slack = _partial_sums(parts, ends)
    low = np.sum([pair[0] for pair in ends], axis=0) - slack
    high = np.sum([pair[1] for pair in ends], axis=0) + slack
    with np.errstate(invalid="ignore"):
        radius = np.nan_to_num(np.maximum(high - centre, centre - low), nan=0.0, posinf=np.inf)

    def finish(values: Float64Array) -> Float64Array:
        """As far along every rank's interval as values lie along the whole: monotone, and the ends are the ends."""
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(radius > 0, (values - centre) / radius, 0.0)
        reach = [part.around(h, h.centre, h.radius * np.abs(share)) for part, h in pairs]
        side = np.sum([np.where(share < 0, *pair) for pair in reach], axis=0)
        return round_to(side + share * slack, FLOAT_FORMATS["fp32"])

    return Hypothesis(centre, radius, finish)


def _partial_sums(
    parts: Sequence[Expected], ends: Sequence[tuple[Float64Array, Float64Array]]
) -> Float64Array:
    """What the partial sums of the ranks' outputs may round by in float32 (C105)."""
    sizes = [np.maximum(np.abs(low), np.abs(high)) for low, high in ends]
    total: Float64Array = np.sum(sizes, axis=0)
    steps = []
    for part, (low, high), size in zip(parts, ends, sizes, strict=True):
        least = np.where(np.sign(low) == np.sign(high), np.minimum(np.abs(low), np.abs(high)), 0.0)
        below, above = half_ulps(least, part.output)
        steps.append(np.where(size == 0, np.inf, 2 * np.minimum(below, above)))
    exact = total <= 2.0**24 * np.minimum.reduce(steps)
    return np.where(exact, 0.0, max(len(parts) - 2, 0) * 2.0**-24 * (1 + 2.0**-20) * total)
