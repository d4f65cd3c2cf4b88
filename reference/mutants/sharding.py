"""Wrong ways to cut packed experts: the stages of `reference.sharding.ShardingSemantics`.

What a mutant is wrong about depends on the `Cut` that its `applies` is asked about.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.mutants.registry import Registry, registrar
from reference.sharding import SHARDING_RIGHT as RIGHT
from reference.sharding import whole_groups, whole_words

SHARDING: Registry = {}
mutant = registrar(SHARDING, RIGHT)


def divided(c):
    """Cut by tensor parallelism; the other way is `dealt`."""
    return c.ranks.way == "tp" and c.ranks.count > 1


def dealt(c):
    return c.ranks.way == "ep" and c.ranks.count > 1


def halves(c):
    return divided(c) and not c.interleaved


def grouped(c):
    return divided(c) and c.format.strategy == "group" and not c.act_order


def stored_zeros(c):
    return divided(c) and not c.format.symmetric and c.format.strategy != "tensor"


def indexed(c):
    return divided(c) and c.act_order


def straddling(c):
    return divided(c) and 32 % c.format.bits != 0


def uneven(c):
    return dealt(c) and c.experts % c.ranks.count != 0


def biased(c):
    return divided(c) and c.bias


# ---- rows of w13


@mutant(
    "sharding", "rows_held", "shards of w13 cut as one run of rows: the first ranks get gates alone", halves
)
def w13_cut_as_one_run(cut):
    return np.arange(2 * cut.rank * cut.units, 2 * (cut.rank + 1) * cut.units)


@mutant("sharding", "rows_held", "shards of w13 with gate and up changed places", halves)
def w13_halves_swapped(cut):
    return np.roll(RIGHT.rows_held(cut), cut.units)


@mutant("sharding", "rows_held", "shards of an interleaved w13 cut as if it were of halves",
        lambda c: divided(c) and c.interleaved)  # fmt: skip
def interleaved_cut_as_halves(cut):
    return RIGHT.rows_held(replace(cut, interleaved=False))


@mutant("sharding", "rows_held", "shards of w13 whose up rows are those of rank 0", halves)
def up_of_rank_0(cut):
    rows = RIGHT.rows_held(cut)
    rows[cut.units :] -= cut.rank * cut.units
    return rows


@mutant("sharding", "rows_held", "the shard of w13 of the next rank", divided)
def w13_of_next_rank(cut):
    return RIGHT.rows_held(replace(cut, rank=(cut.rank + 1) % cut.ranks.count))


@mutant("sharding", "w13_scale", "scales of w13 that are not cut", divided)
def w13_scales_not_cut(array, rows, cut):
    return array


@mutant("sharding", "w13_scale", "scales of w13 cut as one run of rows", halves)
def w13_scales_cut_as_one_run(array, rows, cut):
    return array[:, 2 * cut.rank * cut.units : 2 * (cut.rank + 1) * cut.units]


@mutant("sharding", "w13_zero_point", "zero points of w13 cut as if they were not packed", stored_zeros)
def w13_zero_points_cut_as_unpacked(array, words, cut):
    return np.take(array, RIGHT.rows_held(cut), axis=1, mode="clip")


@mutant("sharding", "w13_zero_point", "zero points of w13 cut as one run of words",
        lambda c: stored_zeros(c) and not c.interleaved)  # fmt: skip
def w13_zero_points_cut_as_one_run(array, words, cut):
    size = array.shape[1] // cut.ranks.count
    return array[:, cut.rank * size : (cut.rank + 1) * size]


@mutant("sharding", "w13_zero_point", "zero points of w13 that are not cut", stored_zeros)
def w13_zero_points_not_cut(array, words, cut):
    return array


@mutant("sharding", "w13_bias", "on every rank the bias of w13 of rank 0", biased)
def w13_bias_of_rank_0(array, rows, cut):
    return array[:, RIGHT.rows_held(replace(cut, rank=0))]


@mutant("sharding", "w13_bias", "biases of w13 cut as one run of rows", lambda c: halves(c) and c.bias)
def w13_bias_cut_as_one_run(array, rows, cut):
    return array[:, 2 * cut.rank * cut.units : 2 * (cut.rank + 1) * cut.units]


# ---- words


@mutant(
    "sharding", "words_held", "words counted by the codes that fit whole, floor(32 / bits) a word", straddling
)
def words_by_whole_codes(places, bits):
    return np.unique(places // (32 // bits))


@mutant("sharding", "words_held", "shards one word short: their number of words is rounded down once too often",
        divided)  # fmt: skip
def words_one_short(places, bits):
    return RIGHT.words_held(places, bits)[:-1]


# ---- columns of w2


@mutant("sharding", "w2_packed", "shards of w2 cut along its rows instead of its columns", divided)
def w2_cut_along_rows(array, words, cut):
    size = array.shape[1] // cut.ranks.count
    return array[:, cut.rank * size : (cut.rank + 1) * size]


@mutant("sharding", "w2_packed", "a w2 that is not cut", divided)
def w2_not_cut(array, words, cut):
    return array


@mutant("sharding", "units_held", "the columns of w2 of the ranks in turn, not in runs", divided)
def w2_columns_in_turn(cut):
    return np.arange(cut.rank, cut.intermediate, cut.ranks.count)


@mutant("sharding", "w2_groups", "scales of w2 that are not cut: the whole table on each rank", grouped)
def w2_scales_not_cut(units, cut):
    return np.arange(cut.format.groups(cut.intermediate))


@mutant(
    "sharding", "w2_groups", "scales of w2 cut twice", lambda c: grouped(c) and c.units > c.format.group_size
)
def w2_scales_cut_twice(units, cut):
    groups = RIGHT.w2_groups(units, cut)
    return groups[: max(1, len(groups) // cut.ranks.count)]


@mutant("sharding", "w2_groups", "on every rank the scales of w2 of rank 0", grouped)
def w2_scales_of_rank_0(units, cut):
    return RIGHT.w2_groups(units - cut.rank * cut.units, cut)


@mutant("sharding", "w2_groups", "scales of w2 cut although g_idx points into all of them", indexed)
def w2_scales_cut_under_act_order(units, cut):
    return np.unique(units // cut.format.group_size)


@mutant("sharding", "w2_g_idx", "a g_idx of w2 that is not cut", indexed)
def g_idx_not_cut(array, units, cut):
    return array


@mutant("sharding", "w2_g_idx", "a g_idx of w2 counted anew from the rank's first group", indexed)
def g_idx_rebased(array, units, cut):
    return array[:, units] - cut.rank * cut.units // cut.format.group_size


@mutant("sharding", "w2_bias", "the bias of w2 on every rank: the sum has it several times", biased)
def w2_bias_on_every_rank(array, cut):
    return array


@mutant("sharding", "w2_bias", "the bias of w2 on the last rank instead of the first", biased)
def w2_bias_on_last_rank(array, cut):
    return array if cut.rank == cut.ranks.count - 1 else np.zeros_like(array)


# ---- experts


@mutant("sharding", "experts_held", "experts dealt out in turn instead of in runs", dealt)
def experts_in_turn(cut):
    return np.arange(cut.rank, cut.experts, cut.ranks.count)


@mutant("sharding", "experts_held", "experts beyond a whole number a rank lost", uneven)
def remainder_of_experts_lost(cut):
    each = cut.experts // cut.ranks.count
    return np.arange(cut.rank * each, (cut.rank + 1) * each)


@mutant(
    "sharding",
    "experts_held",
    "the remainder of the experts on the last rank instead of the first ones",
    uneven,
)
def remainder_of_experts_last(cut):
    each = cut.experts // cut.ranks.count
    last = cut.rank == cut.ranks.count - 1
    return np.arange(cut.rank * each, cut.experts if last else (cut.rank + 1) * each)


@mutant("sharding", "expert_places", "the expert map of the next rank", dealt)
def expert_map_of_next_rank(held, cut):
    following = replace(cut, rank=(cut.rank + 1) % cut.ranks.count)
    return RIGHT.expert_places(RIGHT.experts_held(following), following)


@mutant("sharding", "expert_places", "expert maps of global places", dealt)
def expert_map_of_global_places(held, cut):
    places = np.full(cut.experts, -1, np.int32)
    places[held] = held
    return places


@mutant("sharding", "expert_places", "absent experts mapped to place 0 instead of to none", dealt)
def absent_experts_at_place_0(held, cut):
    return np.maximum(RIGHT.expert_places(held, cut), 0)


@mutant("sharding", "shared_held", "the shared expert on every rank: the sum has it several times",
        lambda c: dealt(c) and c.shared)  # fmt: skip
def shared_expert_on_every_rank(cut):
    return True


# ---- what has to be refused: these are asked about cuts that are


def sized(c):
    return divided(c) and c.intermediate % c.ranks.count == 0


def in_a_word(c):
    return sized(c) and c.units * c.format.bits % 32 != 0


def in_a_group(c):
    return sized(c) and grouped(c) and c.units % c.format.group_size != 0


@mutant("sharding", "legal", "a cut of a size that the ranks do not divide, the rest lost",
        lambda c: divided(c) and not sized(c))  # fmt: skip
def uneven_size_cut(cut):
    if sized(cut):
        RIGHT.legal(cut)


@mutant("sharding", "legal", "a cut inside a word, rounded outward",
        lambda c: in_a_word(c) and not in_a_group(c))  # fmt: skip
def word_cut(cut):
    if sized(cut):
        whole_groups(cut)
    else:
        RIGHT.legal(cut)


@mutant("sharding", "legal", "a cut inside a group of scales, rounded outward",
        lambda c: in_a_group(c) and not in_a_word(c))  # fmt: skip
def group_cut(cut):
    if sized(cut):
        whole_words(cut)
    else:
        RIGHT.legal(cut)
