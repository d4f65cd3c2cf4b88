"""Wrong semantics of weights: packing, zero points, scales, groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.mutants.registry import Registry, registrar
from reference.packing import pack, packed_size, unpack
from reference.rounding import FLOAT_FORMATS, round_to
from reference.semantics import columns_of

WEIGHTS: Registry = {}
mutant = registrar(WEIGHTS)


def asym(t):
    return not t.weight.symmetric


def grouped(t):
    return t.groups > 1


# ---- packing: unpack(words, bits, size, axis) -> int8 codes


def _along(axis, codes, change):
    """Apply a change to codes with the packed axis last; codes come and go signed, int8."""
    moved = np.ascontiguousarray(np.moveaxis(codes, axis, -1))
    return np.ascontiguousarray(np.moveaxis(change(moved), -1, axis)).astype(np.int8)


def _stored(codes, bits):
    return codes.astype(np.int64) + (1 << (bits - 1))


def _signed(codes, bits):
    return (codes - (1 << (bits - 1))).astype(np.int8)


def _shuffled(words, bits, size, axis, order_of_eight):
    """Codes read in another order inside each run of eight; a tail shorter than eight stays."""
    codes = unpack(words, bits, size, axis)
    columns = np.arange(size)
    whole = size // 8 * 8
    columns[:whole] = columns[:whole] // 8 * 8 + np.array(order_of_eight)[columns[:whole] % 8]
    return np.take(codes, columns, axis=axis)


@mutant(
    "packing",
    "unpack",
    "weights whose last, partial word is not read",
    lambda t: t.k * t.weight.bits % 32 != 0,
)
def partial_word_unread(words, bits, size, axis):
    whole = size * bits // 32
    kept = np.take(words, range(whole), axis=axis)
    missing = packed_size(size, bits) - whole
    width = [(0, 0)] * words.ndim
    width[axis] = (0, missing)
    return unpack(np.pad(kept, width), bits, size, axis)


@mutant("packing", "unpack", "weights without the high bits that lie in the next word", lambda t: t.straddles)
def straddling_bits_dropped(words, bits, size, axis):
    def change(codes):
        kept = 32 - np.arange(size) * bits % 32
        mask = np.where(kept < bits, (1 << np.minimum(kept, bits)) - 1, (1 << bits) - 1)
        return _signed(_stored(codes, bits) & mask, bits)

    return _along(axis, unpack(words, bits, size, axis), change)


@mutant(
    "packing",
    "unpack",
    "weights whose straddling codes take their high bits from the same word",
    lambda t: t.straddles,
)
def straddling_bits_of_same_word(words, bits, size, axis):
    def change(codes):
        position = np.arange(size) * bits
        kept = 32 - position % 32
        first = (
            np.ascontiguousarray(np.moveaxis(words, axis, -1))
            .view(np.uint32)
            .astype(np.int64)[..., position // 32]
        )
        low = _stored(codes, bits) & ((1 << np.minimum(kept, bits)) - 1)
        high = first & ((1 << np.maximum(bits - kept, 0)) - 1)
        mixed = low | high << np.minimum(kept, bits)
        return _signed(np.where(kept < bits, mixed, _stored(codes, bits)), bits)

    return _along(axis, unpack(words, bits, size, axis), change)


@mutant("packing", "unpack", "weights read as floor(32 / bits) codes a word", lambda t: t.straddles)
def aligned_words(words, bits, size, axis):
    def change(packed):
        per_word = 32 // bits
        column = np.arange(size)
        word = np.minimum(column // per_word, packed.shape[-1] - 1)
        stored = packed.view(np.uint32).astype(np.int64)[..., word] >> (column % per_word * bits)
        return _signed(stored & ((1 << bits) - 1), bits)

    return _along(axis, words, change) if words.shape[axis] else unpack(words, bits, size, axis)


@mutant(
    "packing",
    "unpack",
    "weights read from the high end of each word down",
    lambda t: 32 % t.weight.bits == 0 and t.k > 1,
)
def high_code_first(words, bits, size, axis):
    per_word = 32 // bits
    whole = packed_size(size, bits) * per_word
    codes = unpack(words, bits, whole, axis)
    column = np.arange(size)
    return np.take(codes, column // per_word * per_word + per_word - 1 - column % per_word, axis=axis)


@mutant("packing", "unpack", "weights in AWQ's order of eight", lambda t: t.k >= 8)
def interleaved_by_awq(words, bits, size, axis):
    return _shuffled(words, bits, size, axis, (0, 2, 4, 6, 1, 3, 5, 7))


@mutant("packing", "unpack", "weights with neighbours swapped", lambda t: t.k >= 8)
def neighbours_swapped(words, bits, size, axis):
    return _shuffled(words, bits, size, axis, (1, 0, 3, 2, 5, 4, 7, 6))


@mutant("packing", "unpack", "codes read as two's complement instead of offset binary")
def twos_complement(words, bits, size, axis):
    return _along(
        axis, unpack(words, bits, size, axis), lambda c: _signed(_stored(c, bits) ^ (1 << (bits - 1)), bits)
    )


@mutant("packing", "unpack", "the largest code as one less")
def top_code_lost(words, bits, size, axis):
    top = (1 << (bits - 1)) - 1
    return _along(axis, unpack(words, bits, size, axis), lambda c: np.minimum(c, top - 1))


@mutant("packing", "unpack", "codes without their top bit in one lane of 64", lambda t: t.k > 37)
def top_bit_lost_in_a_lane(words, bits, size, axis):
    def change(codes):
        codes = codes.copy()
        lane = np.arange(size) % 64 == 37
        codes[..., lane] = _signed(_stored(codes[..., lane], bits) & ((1 << (bits - 1)) - 1), bits)
        return codes

    return _along(axis, unpack(words, bits, size, axis), change)


@mutant("packing", "unpack", "one weight of the matrix one quantum off")
def one_weight_off_by_one(words, bits, size, axis):
    codes = unpack(words, bits, size, axis).copy()
    place = tuple(length * 2 // 3 for length in codes.shape)
    codes[place] += 1 if codes[place] < (1 << (bits - 1)) - 1 else -1
    return codes


@mutant("packing", "pack", "words with one code too few", lambda t: True)
def last_code_not_packed(codes, bits, axis):
    codes = codes.copy()
    np.moveaxis(codes, axis, -1)[..., -1] = -(1 << (bits - 1))
    return pack(codes, bits, axis)


@mutant("packing", "pack", "words without the offset", lambda t: True)
def packed_without_offset(codes, bits, axis):
    return pack(_signed(_stored(codes, bits) ^ (1 << (bits - 1)), bits), bits, axis)


# ---- zero points: columns(weight, output) -> Columns


@mutant("zero points", "columns", "weights without their zero points", asym)
def zero_point_ignored(weight, output):
    columns = columns_of(weight, output)
    return replace(columns, u_z=np.full_like(columns.u_z, weight.format.offset))


@mutant("zero points", "columns", "weights with zero points one too large (GPTQ v1 read as v2)", asym)
def zero_point_plus_one(weight, output):
    columns = columns_of(weight, output)
    return replace(columns, u_z=columns.u_z + 1)


@mutant("zero points", "columns", "weights with zero points one too small", asym)
def zero_point_minus_one(weight, output):
    columns = columns_of(weight, output)
    return replace(columns, u_z=columns.u_z - 1)


@mutant(
    "zero points", "columns", "symmetric weights with an offset of one less", lambda t: t.weight.symmetric
)
def symmetric_offset_minus_one(weight, output):
    columns = columns_of(weight, output)
    return replace(columns, u_z=columns.u_z - 1)


@mutant(
    "zero points",
    "columns",
    "weights with the zero points of the next group",
    lambda t: asym(t) and grouped(t),
)
def zero_point_of_next_group(weight, output):
    rolled = replace(weight, zero_point=np.roll(weight.zero_point, -1, axis=1))
    return columns_of(rolled, output)


@mutant(
    "zero points", "columns", "weights with the zero points of the next row", lambda t: asym(t) and t.n > 1
)
def zero_point_of_next_row(weight, output):
    return columns_of(replace(weight, zero_point=np.roll(weight.zero_point, -1, axis=0)), output)


@mutant("zero points", "columns", "zero points in AWQ's order of eight rows", lambda t: asym(t) and t.n >= 8)
def zero_points_interleaved(weight, output):
    rows = np.arange(weight.n)
    whole = weight.n // 8 * 8
    rows[:whole] = rows[:whole] // 8 * 8 + np.array([0, 2, 4, 6, 1, 3, 5, 7])[rows[:whole] % 8]
    return columns_of(replace(weight, zero_point=weight.zero_point[rows]), output)


@mutant("zero points", "columns", "weights with the zero points of group 0", lambda t: asym(t) and grouped(t))
def zero_point_of_group_0(weight, output):
    first = np.broadcast_to(weight.zero_point[:, :1], weight.zero_point.shape)
    return columns_of(replace(weight, zero_point=np.ascontiguousarray(first)), output)


@mutant("zero points", "matrix", "code * scale - zero point: the zero point is not scaled", asym)
def zero_point_not_scaled(columns):
    return columns.u * columns.scale - columns.u_z


@mutant("zero points", "columns", "weights with zero points read as signed", asym)
def zero_point_read_as_signed(weight, output):
    columns = columns_of(weight, output)
    offset = weight.format.offset
    return replace(columns, u_z=np.where(columns.u_z >= offset, columns.u_z - offset, columns.u_z + offset))


# ---- scales


def _with_scale(weight, output, scale):
    return columns_of(replace(weight, scale=np.ascontiguousarray(scale).astype(weight.scale.dtype)), output)


@mutant("scales", "columns", "weights with the scales of the next group", grouped)
def scale_of_next_group(weight, output):
    return _with_scale(weight, output, np.roll(weight.scale, -1, axis=1))


@mutant("scales", "columns", "weights with the scale of group 0", grouped)
def scale_of_group_0(weight, output):
    return _with_scale(weight, output, np.broadcast_to(weight.scale[:, :1], weight.scale.shape))


@mutant("scales", "columns", "weights with the scales of the next row", lambda t: t.n > 1)
def scale_of_next_row(weight, output):
    return _with_scale(weight, output, np.roll(weight.scale, -1, axis=0))


@mutant("scales", "columns", "weights with scales read as (groups, rows)", lambda t: t.groups > 1 and t.n > 1)
def scale_transposed(weight, output):
    return _with_scale(weight, output, weight.scale.reshape(weight.scale.shape[::-1]).T)


@mutant(
    "zero points",
    "columns",
    "weights with zero points read as (groups, rows)",
    lambda t: not t.weight.symmetric and t.groups > 1 and t.n > 1,
)
def zero_points_transposed(weight, output):
    zero = weight.zero_point.reshape(weight.zero_point.shape[::-1]).T
    return columns_of(replace(weight, zero_point=np.ascontiguousarray(zero)), output)


@mutant("scales", "columns", "weights with scales that lost their last bit")
def scale_last_bit_lost(weight, output):
    bits = weight.scale.view(np.uint16 if weight.scale.itemsize == 2 else np.uint32)
    cut = (bits & ~np.array(1, bits.dtype)).view(weight.scale.dtype)
    return columns_of(replace(weight, scale=cut), output)


@mutant("scales", "columns", "weights with scales rounded to powers of two")
def scale_power_of_two(weight, output):
    columns = columns_of(weight, output)
    with np.errstate(divide="ignore"):
        rounded = np.sign(columns.scale) * np.exp2(np.ceil(np.log2(np.abs(columns.scale))))
    return replace(columns, scale=np.where(columns.scale == 0, 0.0, rounded))


@mutant("scales", "columns", "weights of one group without their scale", grouped)
def scale_of_one_group_is_1(weight, output):
    scale = weight.scale.copy()
    scale[weight.n // 2, -1] = 1
    return _with_scale(weight, output, scale)


@mutant("scales", "columns", "weights with one scale of the matrix 2 % too large")
def one_scale_too_large(weight, output):
    scale = weight.scale.astype(np.float64)
    scale[weight.n // 2, -1] *= 1.02
    return _with_scale(weight, output, scale)


@mutant("scales", "columns", "weights with scales stored in fp8", grouped)
def scale_in_fp8(weight, output):
    from reference.rounding import E4M3

    columns = columns_of(weight, output)
    top = np.abs(columns.scale).max(axis=1, keepdims=True, initial=0.0)
    unit = np.where(top == 0, 1.0, top / 448)
    return replace(columns, scale=round_to(columns.scale / unit, E4M3) * unit)


# ---- groups


def _groups_as(weight, output, groups):
    """Columns with their scales and zero points taken from other groups."""
    columns = columns_of(weight, output)
    scale = np.broadcast_to(weight.scale, (weight.n, weight.scale.shape[-1])).astype(np.float64)[:, groups]
    if weight.zero_point is None:
        return replace(columns, scale=scale)
    zeros = weight.zero_point.astype(np.float64)[:, groups] + weight.format.offset
    return replace(columns, scale=scale, u_z=zeros)


@mutant("groups", "columns", "weights in groups of twice the size", grouped)
def group_size_doubled(weight, output):
    return _groups_as(weight, output, weight.groups() // 2)


@mutant("groups", "columns", "weights in groups of half the size", grouped)
def group_size_halved(weight, output):
    size = max(1, weight.format.group_size // 2)
    return _groups_as(weight, output, np.minimum(np.arange(weight.k) // size, weight.groups().max()))


@mutant("groups", "columns", "weights whose groups begin one column early", grouped)
def groups_one_column_early(weight, output):
    return _groups_as(weight, output, np.append(weight.groups()[1:], weight.groups()[-1]))


@mutant("groups", "columns", "the last group with the scale of the one before", grouped)
def last_group_missing(weight, output):
    return _groups_as(weight, output, np.minimum(weight.groups(), weight.groups().max() - 1))


@mutant("groups", "columns", "group indices counted the other way", grouped)
def groups_reversed(weight, output):
    return _groups_as(weight, output, weight.groups().max() - weight.groups())


@mutant("groups", "columns", "columns in their plain groups: g_idx is ignored", lambda t: t.act_order)
def group_index_ignored(weight, output):
    return columns_of(replace(weight, group_index=None), output)


@mutant("groups", "columns", "one scale a row where there is one a group", grouped)
def group_read_as_channel(weight, output):
    return _groups_as(weight, output, np.zeros(weight.k, np.int64))


@mutant(
    "groups",
    "columns",
    "groups that restart every 64 columns",
    lambda t: t.groups > 1 and t.k > 64 and t.weight.group_size < 64,
)
def groups_restart_with_each_tile(weight, output):
    return _groups_as(
        weight,
        output,
        np.minimum(np.arange(weight.k) % 64 // weight.format.group_size, weight.groups().max()),
    )


# ---- dtype of scales


@mutant("dtype", "columns", "weights with scales rounded to bf16", lambda t: t.dtype == "fp16")
def scale_in_bf16(weight, output):
    columns = columns_of(weight, output)
    return replace(columns, scale=round_to(columns.scale, FLOAT_FORMATS["bf16"]))


@mutant("dtype", "columns", "weights with the bits of their scales read as the other 16-bit type")
def scale_bits_misread(weight, output):
    import ml_dtypes

    if weight.scale.dtype.itemsize != 2:
        return columns_of(weight, output)
    other = np.float16 if weight.scale.dtype == np.dtype(ml_dtypes.bfloat16) else ml_dtypes.bfloat16
    misread = np.nan_to_num(weight.scale.view(other).astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    columns = columns_of(replace(weight, scale=np.zeros_like(weight.scale)), output)
    spread = np.broadcast_to(misread, (weight.n, misread.shape[-1]))
    return replace(
        columns,
        scale=np.ascontiguousarray(
            spread[:, weight.groups()] if misread.shape[-1] > 1 else np.broadcast_to(spread, columns.u.shape)
        ),
    )
