"""Wrong semantics of every kind, written after the suites were frozen: they judge the suites, no more.

Their sizes differ on purpose: from an order that is wrong everywhere to one tile, lane, element or tie.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from reference.activations import QuantizedActivations, amax, code_range, divisor, scale_of, spread_groups
from reference.activations import quantize as right_quantize
from reference.mutants.activations import (
    _each,
    _recoded,
    _with_amax,
    dynamic,
    fp8,
    integer,
    quantized,
    symmetric,
    token,
)
from reference.mutants.arithmetic import biased
from reference.mutants.registry import Registry, registrar
from reference.mutants.weights import _along, _shuffled, _signed, _stored, asym, grouped
from reference.packing import pack, packed_size, unpack
from reference.rounding import E4M3, FLOAT_FORMATS, FloatFormat, half_ulps, round_to
from reference.semantics import RIGHT, Columns, columns_of

HELD_OUT: Registry = {}
_enter = registrar(HELD_OUT)

right = RIGHT.product
finish = RIGHT.finish
_BF16, _FP16 = FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp16"]


def mutant(kind, stage, computes, when=lambda t: True):
    """As registered, but where a call has no tokens nothing but packed words can be wrong."""
    return _enter(kind, stage, computes, when if stage == "pack" else lambda t: t.m > 0 and when(t))


def a16(t):
    return t.activation.kind == "a16"


def per_row(t):
    """Scales and zero points of a row of its own."""
    return t.weight.strategy != "tensor"


def static(t):
    return symmetric(t) and not t.activation.dynamic


def asym_activations(t):
    return quantized(t) and not t.activation.symmetric and t.k > 1


def flat(t):
    """Asymmetric tokens of one value span nothing: they have scale 0 whatever their codes."""
    return not t.activation.symmetric and t.k == 1


def free_codes(t):
    """Whether codes exist that are not their scale's own largest."""
    together = t.m * t.k if t.activation.strategy == "tensor" else t.k
    return static(t) or (dynamic(t) and together > 1)


def asym_rows(t):
    return asym(t) and per_row(t)


def unpacked(t, affected):
    """Whether codes (along K) or packed zero points (along N) have a length that is affected."""
    return affected(t.k) or (asym_rows(t) and affected(t.n))


def several_words(t):
    return unpacked(t, lambda size: size * t.weight.bits > 32)


def inexact_weights(t):
    """Whether a difference of codes can be 3 or more, so that its product with a scale needs a rounding."""
    return t.weight.bits > 2 or (t.weight.bits == 2 and asym(t))


# ---- packing


def _in_rows(axis, array, change):
    """Apply a change to an array seen as rows along its packed axis."""
    moved = np.ascontiguousarray(np.moveaxis(array, axis, -1))
    rows = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    changed = change(rows).reshape(*moved.shape[:-1], -1) if rows.size else moved
    return np.ascontiguousarray(np.moveaxis(changed, -1, axis))


def _split_codes(codes, bits):
    """Of each code along the last axis: its part in the first word, the rest, the width of the first part,
    and whether there is a rest."""
    kept = 32 - np.arange(codes.shape[-1]) * bits % 32
    across = kept < bits
    kept = np.minimum(kept, bits)
    stored = _stored(codes, bits)
    return stored & ((1 << kept) - 1), stored >> kept, kept, across


@mutant("packing", "unpack", "weights whose words are read with their bytes in the other order")
def words_in_big_endian(words, bits, size, axis):
    return unpack(words.byteswap(), bits, size, axis)


@mutant("packing", "unpack", "codes with their bits in the other order", lambda t: t.weight.bits > 1)
def bits_of_codes_reversed(words, bits, size, axis):
    table = np.array([int(f"{code:0{bits}b}"[::-1], 2) for code in range(1 << bits)])
    return _along(axis, unpack(words, bits, size, axis), lambda c: _signed(table[_stored(c, bits)], bits))


@mutant("packing", "unpack", "weights with the halves of 64-bit words exchanged", several_words)
def word_pairs_exchanged(words, bits, size, axis):
    count = words.shape[axis]
    order = np.arange(count) ^ 1
    return unpack(
        np.take(words, np.where(order < count, order, np.arange(count)), axis=axis), bits, size, axis
    )


@mutant(
    "packing",
    "unpack",
    "weights whose rows follow each other without starting at a word",
    lambda t: (
        (t.n > 1 and t.k * t.weight.bits % 32 != 0)
        or (asym(t) and t.groups > 1 and t.n * t.weight.bits % 32 != 0)
    ),
)
def rows_without_word_boundary(words, bits, size, axis):
    def change(rows):
        count = len(rows) * size
        return unpack(rows.reshape(-1)[: packed_size(count, bits)], bits, count, -1)

    return _in_rows(axis, words, change) if words.size else unpack(words, bits, size, axis)


@mutant(
    "packing",
    "unpack",
    "weights whose words are read in column-major order",
    lambda t: t.n > 1 and t.k * t.weight.bits > 32,
)
def words_in_column_major_order(words, bits, size, axis):
    return unpack(words.ravel(order="F").reshape(words.shape), bits, size, axis)


@mutant(
    "packing",
    "unpack",
    "weights whose straddling codes have their high bits one place too low",
    lambda t: t.straddles,
)
def straddling_bits_one_place_low(words, bits, size, axis):
    def change(codes):
        low, high, kept, across = _split_codes(codes, bits)
        return np.where(across, _signed(low | high << (kept - 1), bits), codes)

    return _along(axis, unpack(words, bits, size, axis), change)


@mutant(
    "packing",
    "unpack",
    "weights whose straddling codes have their two parts exchanged",
    lambda t: t.straddles,
)
def straddling_parts_exchanged(words, bits, size, axis):
    def change(codes):
        low, high, kept, across = _split_codes(codes, bits)
        return np.where(across, _signed(high | low << (bits - kept), bits), codes)

    return _along(axis, unpack(words, bits, size, axis), change)


@mutant(
    "packing",
    "unpack",
    "weights without the high bits of codes that straddle out of every second word",
    lambda t: 32 % t.weight.bits != 0 and t.k * t.weight.bits > 64,
)
def second_straddling_code_cut(words, bits, size, axis):
    def change(codes):
        low, _, _, across = _split_codes(codes, bits)
        odd = np.arange(size) * bits // 32 % 2 == 1
        return np.where(across & odd, _signed(low, bits), codes)

    return _along(axis, unpack(words, bits, size, axis), change)


@mutant(
    "packing",
    "unpack",
    "weights in the inverse of AWQ's order of eight",
    lambda t: unpacked(t, lambda s: s >= 8),
)
def interleaved_by_inverse_of_awq(words, bits, size, axis):
    return _shuffled(words, bits, size, axis, (0, 4, 1, 5, 2, 6, 3, 7))


@mutant(
    "packing",
    "unpack",
    "weights whose tiles of 16 columns are read as 4 by 4, transposed",
    lambda t: unpacked(t, lambda s: s >= 16),
)
def tiles_of_16_transposed(words, bits, size, axis):
    column = np.arange(size)
    whole = size // 16 * 16
    column[:whole] = column[:whole] // 16 * 16 + column[:whole] % 4 * 4 + column[:whole] % 16 // 4
    return np.take(unpack(words, bits, size, axis), column, axis=axis)


@mutant("packing", "unpack", "the smallest code as one more")
def bottom_code_lost(words, bits, size, axis):
    return np.maximum(unpack(words, bits, size, axis), np.int8(1 - (1 << (bits - 1))))


@mutant(
    "packing",
    "unpack",
    "the last column of an odd number as a copy of the one before",
    lambda t: unpacked(t, lambda s: s > 1 and s % 2 == 1),
)
def odd_column_copied(words, bits, size, axis):
    column = np.arange(size)
    if size > 1 and size % 2 == 1:
        column[-1] -= 1
    return np.take(unpack(words, bits, size, axis), column, axis=axis)


@mutant("packing", "unpack", "the last word of the last row as the word before it", several_words)
def last_word_of_last_row_stale(words, bits, size, axis):
    def change(rows):
        rows = rows.copy()
        if rows.shape[1] > 1:
            rows[-1, -1] = rows[-1, -2]
        return rows

    return unpack(_in_rows(axis, words, change), bits, size, axis)


@mutant(
    "packing",
    "unpack",
    "the first and the last column of the last row exchanged",
    lambda t: unpacked(t, lambda s: s > 1),
)
def ends_of_last_row_exchanged(words, bits, size, axis):
    def change(rows):
        rows = rows.copy()
        rows[-1, [0, -1]] = rows[-1, [-1, 0]]
        return rows

    return _in_rows(axis, unpack(words, bits, size, axis), change)


@mutant("packing", "pack", "words with the codes of each row from the last to the first", lambda t: t.k > 1)
def packed_from_the_end(codes, bits, axis):
    return pack(np.flip(codes, axis), bits, axis)


@mutant("packing", "pack", "words whose unused high bits are ones", lambda t: t.k * t.weight.bits % 32 != 0)
def unused_bits_set(codes, bits, axis):
    words = pack(codes, bits, axis)
    used = codes.shape[axis] * bits % 32
    if used:
        np.moveaxis(words, axis, -1)[..., -1] |= np.int32(-(1 << used))
    return words


@mutant("packing", "pack", "words without what straddles into them", lambda t: t.straddles)
def straddling_bits_not_packed(codes, bits, axis):
    words = pack(codes, bits, axis)
    into = np.arange(words.shape[axis]) * 32 % bits
    into = np.where(into == 0, 0, bits - into)
    np.moveaxis(words, axis, -1)[...] &= -(1 << into).astype(np.int32)
    return words


# ---- zero points


def _tables(weight):
    """Scales and stored zero points as float64 (N, G)."""
    shape = (weight.n, weight.scale.shape[-1])
    stored = 0.0 if weight.zero_point is None else weight.zero_point.astype(np.float64)
    return (
        np.broadcast_to(weight.scale.astype(np.float64), shape).copy(),
        np.broadcast_to(stored + weight.format.offset, shape).copy(),
    )


def _columns(weight, output, scale=None, zeros=None, groups=None):
    """Columns with a table, or the groups, replaced."""
    own_scale, own_zeros = _tables(weight)
    chosen = weight.groups() if groups is None else groups
    return Columns(
        weight.codes.astype(np.float64) + weight.format.offset,
        (own_zeros if zeros is None else zeros)[:, chosen],
        (own_scale if scale is None else scale)[:, chosen],
        weight,
        output,
    )


def _with_zeros(weight, output, change):
    return _columns(weight, output, zeros=change(_tables(weight)[1]))


def _one_column_late(groups):
    return np.append(groups[:1], groups[:-1])


@mutant("zero points", "columns", "weights whose zero points of 0 are taken for none", asym)
def zero_point_0_taken_for_none(weight, output):
    return _with_zeros(weight, output, lambda z: np.where(z == 0, weight.format.offset, z))


@mutant(
    "zero points",
    "columns",
    "weights whose zero points of 0 are read as 2^bits (stored less one, read plus one)",
    asym,
)
def zero_point_0_wraps(weight, output):
    return _with_zeros(weight, output, lambda z: np.where(z == 0, 2 * weight.format.offset, z))


@mutant("zero points", "columns", "weights with zero points that lost their top bit", asym)
def zero_point_top_bit_lost(weight, output):
    return _with_zeros(weight, output, lambda z: z % weight.format.offset)


@mutant(
    "zero points",
    "columns",
    "the first column of each group with the zero points of the group before",
    lambda t: asym(t) and grouped(t),
)
def zero_point_one_column_late(weight, output):
    columns = columns_of(weight, output)
    late = _one_column_late(weight.groups())
    return replace(columns, u_z=_tables(weight)[1][:, late])


@mutant(
    "zero points",
    "columns",
    "odd rows with the zero points of the even row before",
    lambda t: asym_rows(t) and t.n > 1,
)
def zero_point_of_even_row(weight, output):
    return _with_zeros(weight, output, lambda z: z[np.arange(weight.n) & ~1])


@mutant(
    "zero points",
    "columns",
    "weights with zero points read as (groups, rows)",
    lambda t: asym(t) and grouped(t) and t.n > 1,
)
def zero_point_transposed(weight, output):
    return _with_zeros(weight, output, lambda z: z.reshape(z.shape[::-1]).T)


@mutant(
    "zero points",
    "columns",
    "rows after the first 64 with the zero points of the first 64",
    lambda t: asym_rows(t) and t.n > 64,
)
def zero_points_restart_after_64_rows(weight, output):
    return _with_zeros(weight, output, lambda z: z[np.arange(weight.n) % 64])


@mutant(
    "zero points",
    "columns",
    "the last row of an odd number with zero points of 0",
    lambda t: asym(t) and t.n % 2 == 1,
)
def zero_point_of_odd_row_lost(weight, output):
    columns = columns_of(weight, output)
    u_z = columns.u_z.copy()
    if weight.n % 2 == 1:
        u_z[-1] = 0
    return replace(columns, u_z=u_z if weight.zero_point is not None else columns.u_z)


@mutant(
    "zero points",
    "columns",
    "zero points multiplied by the scale of the next group",
    lambda t: asym(t) and grouped(t),
)
def zero_point_with_scale_of_next_group(weight, output):
    scale, zeros = _tables(weight)
    following = np.roll(scale, -1, axis=1)
    # u_z * next scale, told as a zero point under the right scale, so that no later stage has to know
    ratio = np.divide(following, scale, out=np.ones_like(scale), where=scale != 0)
    return _columns(weight, output, zeros=zeros * ratio) if scale.shape[1] > 1 else columns_of(weight, output)


@mutant("zero points", "matrix", "(code + zero point) * scale")
def zero_point_added(columns):
    return (columns.u + columns.u_z) * columns.scale


@mutant(
    "zero points",
    "matrix",
    "symmetric weights centred: (code - offset + 1/2) * scale",
    lambda t: t.weight.symmetric,
)
def symmetric_levels_centred(columns):
    centre = 0.5 if columns.weight.zero_point is None else 0.0
    return (columns.u - columns.u_z + centre) * columns.scale


@mutant("zero points", "matrix", "weights whose code - zero point wraps at the width of the codes", asym)
def difference_wraps(columns):
    low, high = columns.weight.format.code_range
    difference = columns.u - columns.u_z
    difference -= (high - low + 1.0) * ((difference > high) * 1.0 - (difference < low))
    return difference * columns.scale


@mutant("zero points", "matrix", "weights whose code - zero point saturates at the range of the codes", asym)
def difference_saturates(columns):
    low, high = columns.weight.format.code_range
    return np.clip(columns.u - columns.u_z, low, high) * columns.scale


def _group_sums(operands):
    """Of the groups that occur: sums of x over each (M, G) and zero point * scale of each (N, G)."""
    c = operands.columns
    found, first, which = np.unique(c.weight.groups(), return_index=True, return_inverse=True)
    one_hot = (which[:, None] == np.arange(len(found))).astype(np.float64)
    return operands.x @ one_hot, (c.u_z * c.scale)[:, first]


@mutant(
    "zero points",
    "product",
    "the correction by zero points from sums of activations rounded to 16 bits",
    lambda t: asym(t) and t.k > 1 and t.weight.group_size != 1,
)
def zero_point_correction_from_rounded_sums(operands):
    sums, late = _group_sums(operands)
    return right(operands) + (sums - round_to(sums, operands.output)) @ late.T


# ---- scales


def _with_scales(weight, output, change):
    return _columns(weight, output, scale=change(_tables(weight)[0]))


@mutant(
    "scales",
    "columns",
    "rows that begin a tile of 64, after the first, with the scales of the row before",
    lambda t: per_row(t) and t.n > 64,
)
def scale_late_at_tile_start(weight, output):
    row = np.arange(weight.n)
    row[64::64] -= 1
    return _with_scales(weight, output, lambda s: s[row])


@mutant(
    "scales",
    "columns",
    "weights with scales permuted 8 by 8 in tiles of 64 rows",
    lambda t: per_row(t) and t.n >= 64,
)
def scales_permuted_in_64_rows(weight, output):
    row = np.arange(weight.n)
    whole = weight.n // 64 * 64
    row[:whole] = row[:whole] // 64 * 64 + row[:whole] % 8 * 8 + row[:whole] % 64 // 8
    return _with_scales(weight, output, lambda s: s[row])


@mutant("scales", "columns", "weights with their scales applied twice")
def scale_applied_twice(weight, output):
    return _with_scales(weight, output, np.square)


@mutant("scales", "columns", "weights divided by their scales")
def scale_inverted(weight, output):
    def change(scale):
        inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
        # no weight overflows: NaN everywhere would be another, easier fault
        return np.clip(inverse, -output.largest / 512, output.largest / 512)

    return _with_scales(weight, output, change)


@mutant("scales", "columns", "weights with scales half as large")
def scale_halved(weight, output):
    return _with_scales(weight, output, lambda s: s / 2)


@mutant("scales", "columns", "every second group with the scale of the group before", grouped)
def scale_of_even_group(weight, output):
    return _with_scales(weight, output, lambda s: s[:, np.arange(s.shape[1]) & ~1])


@mutant("scales", "columns", "all rows with the scales of row 0", lambda t: per_row(t) and t.n > 1)
def scale_of_first_row(weight, output):
    return _with_scales(weight, output, lambda s: np.repeat(s[:1], len(s), axis=0))


@mutant(
    "scales",
    "columns",
    "both halves of the rows with the larger of their two scales",
    lambda t: per_row(t) and t.n > 1,
)
def halves_share_the_larger_scale(weight, output):
    half = weight.n // 2

    def change(scale):
        scale[: 2 * half] = np.tile(np.maximum(scale[:half], scale[half : 2 * half]), (2, 1))
        return scale

    return _with_scales(weight, output, change)


@mutant("scales", "columns", "the last row with scales one unit in the last place too large")
def scale_of_last_row_an_ulp_up(weight, output):
    def change(scale):
        scale[-1] += np.ldexp(1.0, np.frexp(scale[-1])[1] - output.precision) * (scale[-1] != 0)
        return scale

    return _with_scales(weight, output, change)


@mutant("scales", "columns", "the last group of each row with the scale of the next row's first", grouped)
def scale_of_last_group_from_next_row(weight, output):
    def change(scale):
        scale[:, -1] = np.roll(scale[:, 0], -1)
        return scale

    return _with_scales(weight, output, change) if weight.scale.shape[-1] > 1 else columns_of(weight, output)


@mutant(
    "scales",
    "columns",
    "the last row of an odd number with the scales of the row before",
    lambda t: per_row(t) and t.n > 1 and t.n % 2 == 1,
)
def scale_of_odd_row_stale(weight, output):
    row = np.arange(weight.n)
    if weight.n > 1 and weight.n % 2 == 1:
        row[-1] -= 1
    return _with_scales(weight, output, lambda s: s[row])


@mutant(
    "scales",
    "columns",
    "columns after the first 128 with the scales of the next row",
    lambda t: per_row(t) and t.n > 1 and t.k > 128,
)
def scale_of_next_row_after_128_columns(weight, output):
    columns = columns_of(weight, output)
    scale = columns.scale.copy()
    scale[:, 128:] = np.roll(scale[:, 128:], -1, axis=0)
    return replace(columns, scale=scale)


@mutant(
    "scales",
    "columns",
    "columns 8 to 15 of each 32 with the scale of the next row",
    lambda t: per_row(t) and t.n > 1 and t.k > 8,
)
def scale_of_next_row_in_a_lane(weight, output):
    columns = columns_of(weight, output)
    lane = np.arange(weight.k) % 32 // 8 == 1
    return replace(columns, scale=np.where(lane, np.roll(columns.scale, -1, axis=0), columns.scale))


# ---- groups


@mutant("groups", "columns", "weights whose groups begin one column late", grouped)
def groups_one_column_late(weight, output):
    return _columns(weight, output, groups=_one_column_late(weight.groups()))


@mutant(
    "groups",
    "columns",
    "weights in groups of 128 whatever their size",
    lambda t: grouped(t) and (t.act_order or t.weight.group_size != 128),
)
def group_size_taken_as_128(weight, output):
    last = weight.scale.shape[-1] - 1
    return _columns(weight, output, groups=np.minimum(np.arange(weight.k) // 128, last))


@mutant(
    "groups",
    "columns",
    "tiles of 32 columns with the group of their first column",
    lambda t: grouped(t) and (t.act_order or t.weight.group_size % 32 != 0),
)
def group_of_first_column_of_a_tile(weight, output):
    return _columns(weight, output, groups=weight.groups()[np.arange(weight.k) // 32 * 32])


@mutant(
    "groups",
    "columns",
    "columns in groups permuted by the inverse of the order of g_idx",
    lambda t: t.act_order and grouped(t),
)
def group_index_inverted(weight, output):
    groups = weight.groups()
    order = np.argsort(groups, kind="stable")
    return _columns(weight, output, groups=np.sort(groups)[order])


@mutant(
    "groups",
    "product",
    "activations reordered by g_idx against weights that are not",
    lambda t: t.act_order and grouped(t),
)
def activations_reordered_by_group_index(operands):
    order = np.argsort(operands.columns.weight.groups(), kind="stable")
    return right(replace(operands, x=operands.x[:, order]))


@mutant(
    "groups",
    "columns",
    "the last, shorter group with the scales and zero points of group 0",
    lambda t: grouped(t) and t.k % t.weight.group_size != 0,
)
def short_group_read_as_first(weight, output):
    groups = weight.groups().copy()
    if weight.format.group_size > 0 and weight.k % weight.format.group_size:
        groups[groups == weight.scale.shape[-1] - 1] = 0
    return _columns(weight, output, groups=groups)


@mutant(
    "groups",
    "columns",
    "groups that span two rows: odd rows are read as the row before",
    lambda t: grouped(t) and t.n > 1,
)
def groups_span_two_rows(weight, output):
    if weight.scale.shape[-1] == 1:
        return columns_of(weight, output)
    even = np.arange(weight.n) & ~1
    scale, zeros = _tables(weight)
    return _columns(weight, output, scale=scale[even], zeros=zeros[even])


@mutant("groups", "columns", "group indices modulo 4", lambda t: t.groups > 4)
def group_index_modulo_4(weight, output):
    return _columns(weight, output, groups=weight.groups() % 4)


@mutant(
    "groups",
    "columns",
    "column k in group k modulo their number",
    lambda t: grouped(t) and t.weight.group_size > 1,
)
def groups_strided(weight, output):
    return _columns(weight, output, groups=np.arange(weight.k) % weight.scale.shape[-1])


@mutant(
    "groups", "columns", "the last group of the last row with the scale and zero point of its first", grouped
)
def last_group_of_last_row_read_as_first(weight, output):
    tables = _tables(weight)
    for table in tables:
        table[-1, -1] = table[-1, 0]
    return _columns(weight, output, *tables)


@mutant(
    "groups",
    "columns",
    "the second half of K with groups counted from 0",
    lambda t: grouped(t) and t.k // 2 >= t.weight.group_size,
)
def groups_restart_with_second_half(weight, output):
    groups = weight.groups().copy()
    half = weight.k // 2
    if weight.format.strategy == "group":
        groups[half:] = np.maximum(groups[half:] - half // weight.format.group_size, 0)
    return _columns(weight, output, groups=groups)


@mutant(
    "groups",
    "product",
    "tokens after the first 16 with the scales of the next group",
    lambda t: grouped(t) and t.m > 16,
)
def groups_shifted_after_16_tokens(operands):
    y = right(operands)
    weight = operands.columns.weight
    if len(y) > 16 and weight.scale.shape[-1] > 1:
        shifted = _with_scales(weight, operands.output, lambda s: np.roll(s, -1, axis=1))
        y[16:] = operands.x[16:] @ RIGHT.matrix(shifted).T
    return y


# ---- tails


@mutant("tails", "product", "the last column of K with the next token's first activation")
def last_column_reads_next_token(operands):
    x = operands.x.copy()
    x[:, -1] = np.append(operands.x[1:, 0], np.zeros(min(1, len(x))))
    return right(replace(operands, x=x))


@mutant(
    "tails",
    "product",
    "sums whose last tile of 64 columns is moved back and overlaps the one before",
    lambda t: t.k > 64 and t.k % 64 != 0,
)
def last_k_tile_overlaps(operands):
    k = operands.x.shape[1]
    column = np.arange(k)
    twice = (column >= k - 64) & (column < k // 64 * 64) & (k > 64) & (k % 64 != 0)
    return right(replace(operands, x=operands.x * np.where(twice, 2.0, 1.0)))


@mutant(
    "tails",
    "product",
    "the last, partial tile of 16 output columns from a tile that ends at N",
    lambda t: t.n > 16 and t.n % 16 != 0,
)
def output_tail_read_from_shifted_tile(operands):
    n = len(operands.matrix)
    column = np.arange(n)
    if n > 16:
        start = n // 16 * 16
        column[start:] = np.arange(n - start) + n - 16
    return right(operands)[:, column]


@mutant(
    "tails", "product", "the last token of an odd number as the first", lambda t: t.m > 1 and t.m % 2 == 1
)
def odd_token_reads_first(operands):
    y = right(operands)
    if len(y) % 2 == 1:
        y[-1] = y[0]
    return y


@mutant("tails", "product", "tokens after the first 16 as the first 16 again", lambda t: t.m > 16)
def tokens_repeat_after_16(operands):
    return right(operands)[np.arange(len(operands.x)) % 16]


@mutant("tails", "product", "zeros in the upper half of each tile of 128 tokens", lambda t: t.m > 64)
def upper_half_of_token_tile_unwritten(operands):
    y = right(operands)
    y[np.arange(len(y)) % 128 >= 64] = 0
    return y


@mutant("tails", "product", "output columns 64 to 127 as the first 64 again", lambda t: t.n > 64)
def second_output_tile_is_the_first(operands):
    column = np.arange(len(operands.matrix))
    column[64:128] -= 64
    return right(operands)[:, column]


@mutant(
    "tails",
    "product",
    "a single token without what is left of K after whole vectors of 32",
    lambda t: t.m == 1 and t.k % 32 != 0,
)
def single_token_without_k_tail(operands):
    k = operands.x.shape[1]
    kept = (np.arange(k) < k // 32 * 32) | (len(operands.x) != 1)
    return right(replace(operands, x=operands.x * kept))


@mutant("tails", "product", "zero in the last output of the last token")
def corner_unwritten(operands):
    y = right(operands)
    y[-1:, -1] = 0
    return y


@mutant(
    "tails",
    "product",
    "sums with one column too many, where K is no multiple of 16: the first of the next token and row",
    lambda t: t.k % 16 != 0,
)
def one_column_too_many(operands):
    y = right(operands)
    if operands.x.shape[1] % 16:
        y += np.outer(np.roll(operands.x[:, 0], -1), np.roll(operands.matrix[:, 0], -1))
    return y


@mutant(
    "tails",
    "product",
    "the last rows of N without the last columns of K, beyond whole tiles of 32 in both",
    lambda t: t.n % 32 != 0 and t.k % 32 != 0,
)
def corner_tile_of_weights_missed(operands):
    matrix = operands.matrix.copy()
    n, k = matrix.shape
    matrix[n // 32 * 32 :, k // 32 * 32 :] = 0
    return right(replace(operands, matrix=matrix))


@mutant(
    "tails",
    "product",
    "zeros in the last token where whole tiles of 16 are filled",
    lambda t: t.m % 16 == 0,
)
def last_token_of_full_tiles_unwritten(operands):
    y = right(operands)
    if len(y) % 16 == 0:
        y[-1:] = 0
    return y


@mutant("tails", "quantize", "the last token of later calls as the last of the call before")
def last_token_kept_from_call_before(calls, fmt, how, input_scale):
    found = []
    for i, x in enumerate(calls):
        if i and len(x) and len(calls[i - 1]):
            x = np.concatenate([x[:-1], calls[i - 1][-1:]])
        found.append(x.astype(np.float64) if fmt.kind == "a16" else right_quantize(x, fmt, how, input_scale))
    return found


# ---- accumulation


@mutant(
    "accumulation",
    "product",
    "tokens 16 to 31 on top of the sums of the first 16: the accumulator was not cleared",
    lambda t: t.m > 16,
)
def accumulator_not_cleared_between_token_tiles(operands):
    y = right(operands)
    y[16:32] += y[: max(0, min(16, len(y) - 16))]
    return y


def _in_steps(operands, step):
    """Partial products of `step` columns each, in order."""
    for start in range(0, operands.x.shape[1], step):
        part = slice(start, start + step)
        yield operands.x[:, part] @ operands.matrix[:, part].T


@mutant(
    "accumulation", "product", "sums truncated to 11 significand bits every 32 columns", lambda t: t.k > 1
)
def sums_truncated_to_11_bits(operands):
    total = np.zeros((len(operands.x), len(operands.matrix)))
    for part in _in_steps(operands, 32):
        mantissa, exponent = np.frexp(total + part)
        total = np.ldexp(np.trunc(np.ldexp(mantissa, 11)), exponent - 11)
    return total


@mutant(
    "accumulation",
    "product",
    "integer sums that saturate at 16 bits every 64 columns",
    lambda t: (
        t.activation.kind == "int8"
        and t.activation.strategy != "group"
        and t.weight.bits == 8
        and not 0 < t.weight.group_size < 16
        and t.k >= 64
    ),
)
def integer_sums_saturate(operands):
    c, q = operands.columns, operands.quantized
    if q is None or q.scale.shape[1] != 1:
        return right(operands)
    scale = c.scale
    codes = q.codes if q.zero_point is None else q.codes - q.zero_point
    difference = c.u - c.u_z
    groups = c.weight.groups()
    total = np.zeros((len(operands.x), len(operands.matrix)))
    for start in range(0, len(groups), 64):
        step = np.arange(start, min(start + 64, len(groups)))
        for g in np.unique(groups[step]):
            chosen = step[groups[step] == g]
            part = codes[:, chosen] @ difference[:, chosen].T
            total += np.clip(part, -(2.0**15), 2.0**15 - 1) * scale[:, chosen[0]]
    return total * q.scale


@mutant(
    "accumulation",
    "product",
    "sums whose last tile of 32 columns is the one before again",
    lambda t: t.k > 32,
)
def last_k_tile_stale(operands):
    k = operands.x.shape[1]
    column = np.arange(k)
    last = (k - 1) // 32 * 32
    if last:
        column[last:] -= 32
    return right(replace(operands, x=operands.x[:, column], matrix=operands.matrix[:, column]))


@mutant(
    "accumulation",
    "product",
    "sums without the last of an odd number of tiles of 64 columns",
    lambda t: t.k > 64 and -(-t.k // 64) % 2 == 1,
)
def odd_k_tile_dropped(operands):
    k = operands.x.shape[1]
    tiles = -(-k // 64)
    end = (tiles - 1) * 64 if tiles > 1 and tiles % 2 == 1 else k
    return operands.x[:, :end] @ operands.matrix[:, :end].T


@mutant(
    "accumulation",
    "product",
    "the first 8 output columns from the second half of K alone: one part of a split overwrote the other",
    lambda t: t.k > 1,
)
def split_overwritten(operands):
    y = right(operands)
    half = operands.x.shape[1] // 2
    y[:, :8] = operands.x[:, half:] @ operands.matrix[:8, half:].T
    return y


@mutant(
    "accumulation",
    "product",
    "the correction by the zero points of each group from the sum of the whole row",
    lambda t: asym(t) and grouped(t),
)
def zero_point_correction_from_whole_row(operands):
    sums, late = _group_sums(operands)
    return right(operands) + (sums - sums.sum(axis=1, keepdims=True)) @ late.T


@mutant(
    "accumulation",
    "product",
    "the correction by activation zero points without the last column of K",
    asym_activations,
)
def activation_correction_misses_a_column(operands):
    q = operands.quantized
    y = right(operands)
    if q is not None and q.zero_point is not None:
        y += (q.spread(q.zero_point) * q.spread(q.scale))[:, -1:] * operands.matrix[:, -1]
    return y


@mutant("accumulation", "product", "sums of groups rounded to 16 bits before they are added", grouped)
def group_sums_in_16_bits(operands):
    groups = operands.columns.weight.groups()
    if not groups.any():
        return right(operands)
    order = np.argsort(groups, kind="stable")
    x, matrix = operands.x[:, order], operands.matrix[:, order]
    total = np.zeros((len(x), len(matrix)))
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(groups)], strict=True):
        total += round_to(x[:, start:stop] @ matrix[:, start:stop].T, operands.output)
    return total


@mutant("accumulation", "product", "sums whose first half of K is never below zero", lambda t: t.k > 1)
def first_half_clipped_at_zero(operands):
    half = operands.x.shape[1] // 2
    parts = [operands.x[:, part] @ operands.matrix[:, part].T for part in (slice(half), slice(half, None))]
    return np.maximum(parts[0], 0.0) + parts[1]


@mutant("accumulation", "product", "sums that begin anew after each 256 columns", lambda t: t.k > 256)
def accumulator_cleared_after_256_columns(operands):
    start = (operands.x.shape[1] - 1) // 256 * 256
    return operands.x[:, start:] @ operands.matrix[:, start:].T


@mutant(
    "accumulation",
    "product",
    "tokens after the first 16 with the last 32 columns of K twice",
    lambda t: t.m > 16,
)
def last_columns_twice_after_16_tokens(operands):
    y = right(operands)
    y[16:] += operands.x[16:, -32:] @ operands.matrix[:, -32:].T
    return y


# ---- rounding


def _sum(total, bias):
    return total if bias is None else total + bias


def _floor(exact, output):
    y = round_to(exact, output)
    above = (y > exact) & np.isfinite(y)
    lower = y[above]
    lower -= 2 * half_ulps(lower, output)[0]
    y[above] = np.where(lower < -output.largest, -np.inf, lower)
    return y


def _ceil(exact, output):
    return -_floor(-exact, output)


def _toward_zero(exact, output):
    return np.where(exact < 0, _ceil(exact, output), _floor(exact, output))


def _ties(exact, output):
    """The rounded numbers, and the same with the other neighbour where two are equally near."""
    y = round_to(exact, output)
    finer = replace(output, precision=output.precision + 1, largest=math.inf)
    tie = (y != exact) & np.isfinite(y) & (round_to(exact, finer) == exact)
    other = y.copy()
    other[tie] = 2 * exact[tie] - y[tie]
    return y, other


def _half_away(exact, output):
    y, other = _ties(exact, output)
    return np.where(np.abs(other) > np.abs(y), other, y)


@mutant("rounding", "finish", "outputs rounded up")
def output_rounded_up(total, bias, output):
    return _ceil(_sum(total, bias), output)


@mutant("rounding", "finish", "negative outputs truncated, positive ones rounded")
def negative_outputs_truncated(total, bias, output):
    exact = _sum(total, bias)
    return np.where(exact < 0, _ceil(exact, output), round_to(exact, output))


@mutant("rounding", "finish", "outputs with ties rounded up")
def output_half_up(total, bias, output):
    return np.maximum(*_ties(_sum(total, bias), output))


@mutant("rounding", "finish", "outputs with ties rounded toward zero")
def output_half_toward_zero(total, bias, output):
    y, other = _ties(_sum(total, bias), output)
    return np.where(np.abs(other) < np.abs(y), other, y)


@mutant("rounding", "finish", "outputs rounded twice, first to three bits more")
def output_rounded_twice(total, bias, output):
    wider = replace(output, precision=output.precision + 3, largest=math.inf)
    return round_to(round_to(_sum(total, bias), wider), output)


@mutant("rounding", "finish", "outputs rounded against a threshold that changes from place to place")
def output_dithered(total, bias, output):
    exact = _sum(total, bias)
    low, high = _floor(exact, output), _ceil(exact, output)
    usable = np.isfinite(low) & np.isfinite(high) & (high > low)
    step = np.where(usable, high, 1.0) - np.where(usable, low, 0.0)
    share = (np.where(usable, exact, 0.0) - np.where(usable, low, 0.0)) / step
    m, n = exact.shape
    threshold = ((np.arange(m)[:, None] * 7 + np.arange(n) * 13) % 16 + 0.5) / 16
    return np.where(usable, np.where(share > threshold, high, low), round_to(exact, output))


@mutant("rounding", "finish", "outputs rounded to one bit less")
def output_last_bit_lost(total, bias, output):
    return round_to(_sum(total, bias), replace(output, precision=output.precision - 1))


@mutant("rounding", "finish", "outputs that should round up to a power of two as the number below it")
def carry_into_exponent_lost(total, bias, output):
    exact = _sum(total, bias)
    y = round_to(exact, output)
    power = np.isfinite(y) & (np.frexp(np.abs(y))[0] == 0.5) & (np.abs(y) > np.abs(exact))
    return np.where(power, _toward_zero(exact, output), y)


@mutant("rounding", "finish", "the outputs of the last token truncated")
def last_token_truncated(total, bias, output):
    exact = _sum(total, bias)
    y = round_to(exact, output)
    y[-1:] = _toward_zero(exact[-1:], output)
    return y


@mutant("rounding", "finish", "negative outputs one unit in the last place nearer to zero")
def negative_outputs_an_ulp_short(total, bias, output):
    y = finish(total, bias, output)
    _, above = half_ulps(y, output)
    return np.where((y < 0) & np.isfinite(y), y + 2 * above, y)


@mutant("rounding", "store", "weights rounded up to 16 bits", lambda t: a16(t) and inexact_weights(t))
def weights_rounded_up(matrix, output):
    return _ceil(matrix, output)


@mutant(
    "rounding",
    "store",
    "weights rounded to 16 bits with ties away from zero",
    lambda t: a16(t) and inexact_weights(t),
)
def weights_half_away(matrix, output):
    return _half_away(matrix, output)


@mutant("rounding", "product", "activations rounded to 7 significand bits", a16)
def activations_in_7_bits(operands):
    if operands.quantized is not None:
        return right(operands)
    return right(
        replace(operands, x=round_to(operands.x, replace(operands.output, precision=7, largest=math.inf)))
    )


# ---- bias


def _biased_by(total, bias, output, change):
    """Finished with another bias, (N) or (M, N); without one nothing is wrong."""
    return finish(total if bias is None else total + change(bias), None, output)


@mutant("bias", "finish", "outputs with 1 in the place of the bias", biased)
def bias_taken_as_1(total, bias, output):
    return _biased_by(total, bias, output, np.ones_like)


@mutant("bias", "finish", "all outputs with the bias of the first column", lambda t: t.bias and t.n > 1)
def bias_of_first_column(total, bias, output):
    return _biased_by(total, bias, output, lambda b: b[0])


@mutant("bias", "finish", "outputs with the bias in fp8", biased)
def bias_in_fp8(total, bias, output):
    return _biased_by(total, bias, output, lambda b: round_to(b, E4M3))


@mutant(
    "bias",
    "finish",
    "no bias beyond the last whole tile of 32 output columns",
    lambda t: t.bias and t.n % 32 != 0,
)
def bias_missing_in_output_tail(total, bias, output):
    return _biased_by(total, bias, output, lambda b: b * (np.arange(len(b)) < len(b) // 32 * 32))


@mutant("bias", "finish", "no bias after the first 16 tokens", lambda t: t.bias and t.m > 16)
def bias_missing_after_16_tokens(total, bias, output):
    return _biased_by(total, bias, output, lambda b: b * (np.arange(len(total))[:, None] < 16))


@mutant(
    "bias", "finish", "outputs with a bias that begins anew after 64 columns", lambda t: t.bias and t.n > 64
)
def bias_restarts_after_64_columns(total, bias, output):
    return _biased_by(total, bias, output, lambda b: b[np.arange(len(b)) % 64])


@mutant("bias", "finish", "no bias in the last token", biased)
def bias_missing_in_last_token(total, bias, output):
    return _biased_by(total, bias, output, lambda b: b * (np.arange(len(total))[:, None] < len(total) - 1))


@mutant(
    "bias",
    "finish",
    "outputs with the biases of even columns before those of odd ones",
    lambda t: t.bias and t.n > 2,
)
def bias_deinterleaved(total, bias, output):
    return _biased_by(total, bias, output, lambda b: np.concatenate([b[::2], b[1::2]]))


@mutant("bias", "finish", "outputs with the halves of the bias exchanged", lambda t: t.bias and t.n > 1)
def bias_halves_exchanged(total, bias, output):
    return _biased_by(total, bias, output, lambda b: np.roll(b, -(len(b) // 2)))


@mutant("bias", "finish", "outputs without negative biases", biased)
def negative_bias_lost(total, bias, output):
    return _biased_by(total, bias, output, lambda b: np.maximum(b, 0.0))


@mutant("bias", "finish", "sums multiplied by 1 + bias", biased)
def bias_as_gain(total, bias, output):
    return _biased_by(total, bias, output, lambda b: total * b)


@mutant("bias", "finish", "no bias where the sum is negative", biased)
def bias_missing_from_negative_sums(total, bias, output):
    return _biased_by(total, bias, output, lambda b: np.where(total < 0, 0.0, b))


@mutant("bias", "finish", "no bias in one column in the middle", biased)
def bias_missing_in_one_column(total, bias, output):
    return _biased_by(total, bias, output, lambda b: np.where(np.arange(len(b)) == len(b) // 2, 0.0, b))


@mutant("bias", "finish", "outputs with biases that lost their last bit", biased)
def bias_last_bit_lost(total, bias, output):
    # the format itself with one bit less, rounded toward zero
    shorter = replace(output, precision=output.precision - 1)
    return _biased_by(total, bias, output, lambda b: _toward_zero(b, shorter))


@mutant("bias", "finish", "no bias in tokens whose sums are all zero", biased)
def bias_missing_in_zero_tokens(total, bias, output):
    return _biased_by(total, bias, output, lambda b: b * (total != 0).any(axis=1, keepdims=True))


@mutant("bias", "finish", "no bias for a single token", lambda t: t.bias and t.m == 1)
def bias_missing_for_single_token(total, bias, output):
    return _biased_by(total, bias, output, lambda b: b * (len(total) != 1))


# ---- dtype


@mutant(
    "dtype", "finish", "the largest number in the place of outputs that overflow", lambda t: t.dtype == "fp16"
)
def overflow_saturates(total, bias, output):
    exact = _sum(total, bias)
    finite = np.isfinite(exact)
    y = finish(total, bias, output)
    return np.where(finite & np.isinf(y), np.copysign(output.largest, y), y)


@mutant("dtype", "store", "zero in the place of subnormal weights", lambda t: t.dtype == "fp16" and a16(t))
def subnormal_weights_flushed(matrix, output):
    y = round_to(matrix, output)
    return np.where(np.abs(y) < 2.0**output.emin, 0.0, y)


@mutant(
    "dtype", "product", "zero in the place of subnormal activations", lambda t: t.dtype == "fp16" and a16(t)
)
def subnormal_activations_flushed(operands):
    if operands.quantized is not None:
        return right(operands)
    x = operands.x
    return right(replace(operands, x=np.where(np.abs(x) < 2.0**operands.output.emin, 0.0, x)))


@mutant("dtype", "matrix", "weights rounded to bf16", lambda t: t.dtype == "fp16")
def weights_in_bf16(columns):
    return round_to(RIGHT.matrix(columns), _BF16)


@mutant("dtype", "finish", "outputs rounded to the 4 significand bits of fp8")
def output_in_4_bits(total, bias, output):
    return round_to(_sum(total, bias), replace(output, precision=E4M3.precision))


@mutant("dtype", "product", "16-bit activations rounded to fp8", a16)
def activations_in_fp8(operands):
    if operands.quantized is not None:
        return right(operands)
    return right(replace(operands, x=round_to(operands.x, E4M3)))


@mutant("dtype", "product", "16-bit activations quantized to int8 a token", lambda t: a16(t) and t.k > 1)
def activations_quantized_unasked(operands):
    if operands.quantized is not None:
        return right(operands)
    scale = np.abs(operands.x).max(axis=1, keepdims=True, initial=0.0) / 127
    codes = np.rint(operands.x / np.where(scale == 0, 1.0, scale))
    return right(replace(operands, x=codes * scale))


@mutant(
    "dtype",
    "quantize",
    "the right codes with activation scales rounded to fp16",
    lambda t: dynamic(t) and t.convention == "kernel",
)
def activation_scale_in_fp16(calls, fmt, how, input_scale):
    def rounded(x):
        found = right_quantize(x, fmt, how, input_scale)
        return replace(found, scale=np.minimum(round_to(found.scale, _FP16), _FP16.largest))

    return _each(calls, rounded)


@mutant(
    "dtype",
    "quantize",
    "negative activation codes read as unsigned",
    lambda t: t.activation.kind in ("int8", "int4") and not flat(t),
)
def activation_codes_read_as_unsigned(calls, fmt, how, input_scale):
    low, high = code_range(fmt)

    def unsigned(x):
        found = right_quantize(x, fmt, how, input_scale)
        return replace(found, codes=np.where(found.codes < 0, found.codes + (high - low + 1), found.codes))

    return _each(calls, unsigned)


@mutant(
    "dtype",
    "product",
    "the product of activation scale and weight scale rounded to 16 bits",
    lambda t: quantized(t) and not flat(t) and t.groups == 1 and t.activation.strategy != "group",
)
def product_of_scales_in_16_bits(operands):
    c, q = operands.columns, operands.quantized
    y = right(operands)
    if q is None or q.scale.shape[1] != 1 or c.weight.scale.shape[-1] != 1:
        return y
    both = q.scale * c.scale[:, 0]
    return y * np.divide(round_to(both, operands.output), both, out=np.ones_like(both), where=both != 0)


@mutant("dtype", "finish", "outputs of the other 16-bit type, their bits taken as they are")
def output_bits_misread(total, bias, output):
    other = _FP16 if output.name == "bf16" else _BF16
    with np.errstate(over="ignore", invalid="ignore"):
        bits = finish(total, bias, other).astype(other.dtype).view(np.uint16)
        return np.nan_to_num(bits.view(output.dtype).astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


@mutant("dtype", "finish", "outputs with the bias rounded to bf16", lambda t: t.bias and t.dtype == "fp16")
def bias_in_bf16(total, bias, output):
    return _biased_by(total, bias, output, lambda b: round_to(b, _BF16))


_FOUR_BITS = FloatFormat("4 bits", 4, -60, 2.0**60, np.dtype(np.float64))


@mutant(
    "dtype",
    "columns",
    "weights with zero points rounded to 4 significand bits",
    lambda t: asym(t) and t.weight.bits > 4,
)
def zero_point_in_4_bits(weight, output):
    columns = columns_of(weight, output)
    return columns if weight.zero_point is None else replace(columns, u_z=round_to(columns.u_z, _FOUR_BITS))


# ---- activation quantization


def _quotients(x, fmt, how, input_scale):
    """x / scale before any clamp, and the scale."""
    values = x.astype(np.float64)
    scale = scale_of(amax(values, fmt), fmt, how, input_scale)
    spread = spread_groups(scale, fmt.group_size, values.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        return round_to(np.where(values == 0, 0.0, values / spread), how.quotient), scale


def _by_amax(calls, fmt, how, change):
    """Quantized with amax changed: change(amax, x in float64)."""

    def quantize(x):
        values = x.astype(np.float64)
        return _with_amax(x, fmt, how, change(amax(values, fmt), values))

    return _each(calls, quantize)


@mutant(
    "activation quantization",
    "quantize",
    "tokens after the first 16 with the activation scales of the first 16",
    lambda t: token(t) and t.m > 16,
)
def activation_scales_repeat_after_16_tokens(calls, fmt, how, input_scale):
    def repeated(x):
        found = right_quantize(x, fmt, how, input_scale)
        return replace(found, scale=found.scale[np.arange(len(found.scale)) % 16])

    return _each(calls, repeated)


@mutant(
    "activation quantization",
    "quantize",
    "activation scales without what is left of K after whole vectors of 32",
    lambda t: token(t) and t.k % 32 != 0,
)
def amax_without_k_tail(calls, fmt, how, input_scale):
    def change(_, values):
        head = values[:, : values.shape[1] // 32 * 32]
        return np.maximum(np.abs(head).max(axis=1, keepdims=True, initial=0.0), 1e-30)

    return _by_amax(calls, fmt, how, change)


@mutant(
    "activation quantization",
    "quantize",
    "one activation scale for two tokens, the larger",
    lambda t: token(t) and t.m > 1,
)
def tokens_share_a_scale(calls, fmt, how, input_scale):
    def change(largest, values):
        other = np.arange(len(largest)) ^ 1
        return np.maximum(largest, largest[np.where(other < len(largest), other, other ^ 1)])

    return _by_amax(calls, fmt, how, change)


@mutant("activation quantization", "quantize", "activation scales that are never below 0.001", dynamic)
def activation_scale_floored(calls, fmt, how, input_scale):
    return _by_amax(calls, fmt, how, lambda largest, _: np.maximum(largest, 1e-3 * divisor(fmt, how)))


@mutant(
    "activation quantization", "quantize", "scales of each call where the format has a static one", static
)
def dynamic_instead_of_static(calls, fmt, how, input_scale):
    return _each(calls, lambda x: right_quantize(x, replace(fmt, dynamic=True), how, None))


@mutant(
    "activation quantization",
    "quantize",
    "codes that wrap beyond the range instead of saturating",
    lambda t: static(t) and integer(t),
)
def static_codes_wrap(calls, fmt, how, input_scale):
    low, high = code_range(fmt)

    def wrapped(x):
        t, scale = _quotients(x, fmt, how, input_scale)
        return QuantizedActivations((np.rint(t) - low) % (high - low + 1) + low, scale, None, fmt.group_size)

    return _each(calls, wrapped)


@mutant(
    "activation quantization",
    "quantize",
    "NaN in the place of fp8 codes beyond 448",
    lambda t: static(t) and fp8(t),
)
def static_fp8_overflow_is_nan(calls, fmt, how, input_scale):
    def unclamped(x):
        t, scale = _quotients(x, fmt, how, input_scale)
        # 464 is the tie between 448 and the NaN that follows it, and 448 is even
        return QuantizedActivations(
            np.where(np.abs(t) > 464, np.nan, round_to(t, E4M3)), scale, None, fmt.group_size
        )

    return _each(calls, unclamped)


@mutant(
    "activation quantization",
    "quantize",
    "codes of activations multiplied, not divided, by their static scale",
    static,
)
def static_scale_as_multiplier(calls, fmt, how, input_scale):
    def multiplied(x):
        _, scale = _quotients(x, fmt, how, input_scale)
        t = np.clip(x.astype(np.float64) * scale, *code_range(fmt))
        codes = round_to(t, E4M3) if fmt.kind == "fp8" else np.rint(t)
        return QuantizedActivations(codes, scale, None, fmt.group_size)

    return _each(calls, multiplied)


@mutant(
    "activation quantization",
    "quantize",
    "the first token of later calls with the scale of the first call's",
    token,
)
def first_scale_kept_from_first_call(calls, fmt, how, input_scale):
    found = _each(calls, lambda x: right_quantize(x, fmt, how, input_scale))
    first = found[0].scale[:1] if found else None
    return [
        q
        if i == 0 or not len(first)
        else replace(q, scale=np.concatenate([first, q.scale[1:]])[: len(q.scale)])
        for i, q in enumerate(found)
    ]


@mutant(
    "activation quantization",
    "quantize",
    "codes with ties rounded up",
    lambda t: integer(t) and free_codes(t),
)
def codes_half_up(calls, fmt, how, input_scale):
    return _each(calls, lambda x: _recoded(x, fmt, how, input_scale, lambda t: np.floor(t + 0.5)))


@mutant(
    "activation quantization",
    "quantize",
    "fp8 codes with ties rounded away from zero",
    lambda t: fp8(t) and free_codes(t),
)
def fp8_codes_half_away(calls, fmt, how, input_scale):
    return _each(calls, lambda x: _recoded(x, fmt, how, input_scale, lambda t: _half_away(t, E4M3)))


@mutant(
    "activation quantization",
    "quantize",
    "zero in the place of subnormal fp8 codes",
    lambda t: fp8(t) and free_codes(t),
)
def fp8_subnormal_codes_flushed(calls, fmt, how, input_scale):
    def flushed(x):
        found = right_quantize(x, fmt, how, input_scale)
        return replace(found, codes=np.where(np.abs(found.codes) < 2.0**E4M3.emin, 0.0, found.codes))

    return _each(calls, flushed)


@mutant(
    "activation quantization",
    "quantize",
    "codes with the activation zero points of the next token",
    lambda t: asym_activations(t) and t.m > 1,
)
def activation_zero_point_of_next_token(calls, fmt, how, input_scale):
    def rolled(x):
        found = right_quantize(x, fmt, how, input_scale)
        zero_point = found.zero_point
        return found if zero_point is None else replace(found, zero_point=np.roll(zero_point, -1, axis=0))

    return _each(calls, rolled)


@mutant(
    "activation quantization",
    "quantize",
    "asymmetric codes of at most 126",
    asym_activations,
)
def asymmetric_top_code_lost(calls, fmt, how, input_scale):
    def cut(x):
        found = right_quantize(x, fmt, how, input_scale)
        return replace(found, codes=np.minimum(found.codes, code_range(fmt)[1] - 1))

    return _each(calls, cut)


def _partly_quantized(calls, fmt, how, input_scale, bare):
    """As quantized, but as they came where bare((M, K)) holds."""

    def mixed(x):
        found = right_quantize(x, fmt, how, input_scale).dequantized()
        return np.where(bare(*x.shape), x.astype(np.float64), found)

    return _each(calls, mixed)


@mutant(
    "activation quantization",
    "quantize",
    "unquantized activations in what is left of K after whole vectors of 32",
    lambda t: quantized(t) and t.k > 1 and t.k % 32 != 0,
)
def k_tail_not_quantized(calls, fmt, how, input_scale):
    return _partly_quantized(calls, fmt, how, input_scale, lambda m, k: np.arange(k) >= k // 32 * 32)


@mutant(
    "activation quantization",
    "quantize",
    "unquantized activations after the first 16 tokens",
    lambda t: quantized(t) and t.k > 1 and t.m > 16,
)
def tokens_after_16_not_quantized(calls, fmt, how, input_scale):
    return _partly_quantized(calls, fmt, how, input_scale, lambda m, k: np.arange(m)[:, None] >= 16)


def several_activation_groups(t):
    return dynamic(t) and t.activation.strategy == "group" and t.k > t.activation.group_size


@mutant(
    "activation quantization",
    "quantize",
    "codes with the activation scales of the next group",
    several_activation_groups,
)
def activation_scale_of_next_group(calls, fmt, how, input_scale):
    def rolled(x):
        found = right_quantize(x, fmt, how, input_scale)
        return replace(found, scale=np.roll(found.scale, -1, axis=1))

    return _each(calls, rolled)


@mutant(
    "activation quantization",
    "quantize",
    "one activation scale a token where there is one a group",
    several_activation_groups,
)
def per_token_instead_of_per_group(calls, fmt, how, input_scale):
    return _by_amax(
        calls, fmt, how, lambda largest, _: np.broadcast_to(largest.max(axis=1, keepdims=True), largest.shape)
    )


@mutant(
    "activation quantization",
    "quantize",
    "activation scales from a largest magnitude rounded to bf16",
    lambda t: dynamic(t) and t.dtype == "fp16" and t.convention == "kernel",
)
def amax_in_bf16(calls, fmt, how, input_scale):
    return _by_amax(calls, fmt, how, lambda largest, _: round_to(largest, _BF16))


@mutant(
    "activation quantization",
    "quantize",
    "activation scales of amax / 255 (or 15): the larger half saturates",
    lambda t: dynamic(t) and integer(t),
)
def scale_by_unsigned_range(calls, fmt, how, input_scale):
    low, high = code_range(fmt)
    return _by_amax(calls, fmt, how, lambda largest, _: largest * (divisor(fmt, how) / (high - low)))
