"""Wrong semantics of the product and the epilogue: tails, accumulation, rounding, bias, dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.activations import QuantizedActivations
from reference.mutants.registry import Registry, registrar
from reference.rounding import FLOAT_FORMATS, FloatFormat, half_ulps, round_to
from reference.semantics import RIGHT, Operands, columns_of

ARITHMETIC: Registry = {}
mutant = registrar(ARITHMETIC)

right = RIGHT.product
finish = RIGHT.finish
_BF16, _FP16 = FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp16"]


def _times(operands: Operands, factor):
    """The product with each column of x multiplied by a factor (K)."""
    return right(replace(operands, x=operands.x * factor))


# ---- tails: product(operands) -> (M, N)


@mutant("tails", "product", "sums without the last column of K", lambda t: t.k > 1)
def last_column_dropped(operands):
    return _times(operands, np.arange(operands.x.shape[1]) < operands.x.shape[1] - 1)


@mutant("tails", "product", "sums without what is left of K after whole tiles of 64", lambda t: t.k % 64 != 0)
def k_tail_dropped(operands):
    k = operands.x.shape[1]
    return _times(operands, np.arange(k) < k // 64 * 64)


@mutant("tails", "product", "sums with the last column of K twice")
def last_column_twice(operands):
    k = operands.x.shape[1]
    return _times(operands, np.where(np.arange(k) == k - 1, 2.0, 1.0))


@mutant("tails", "product", "the last output column as a copy of its neighbour", lambda t: t.n > 1)
def last_output_column_copied(operands):
    y = right(operands)
    y[:, -1] = y[:, -2]
    return y


@mutant("tails", "product", "the last token as a copy of its neighbour", lambda t: t.m > 1)
def last_token_copied(operands):
    y = right(operands)
    if len(y) > 1:
        y[-1] = y[-2]
    return y


@mutant("tails", "product", "nothing beyond the last whole tile of 16 tokens", lambda t: t.m % 16 != 0)
def token_tail_unwritten(operands):
    y = right(operands)
    y[len(y) // 16 * 16 :] = 0
    return y


@mutant(
    "tails", "product", "nothing beyond the last whole tile of 32 output columns", lambda t: t.n % 32 != 0
)
def output_tail_unwritten(operands):
    y = right(operands)
    y[:, y.shape[1] // 32 * 32 :] = 0
    return y


@mutant("tails", "product", "one lane of K with its neighbour's activation", lambda t: t.k > 12)
def lane_reads_its_neighbour(operands):
    k = operands.x.shape[1]
    column = np.arange(k)
    column[(column % 64 == 11) & (column + 1 < k)] += 1
    return right(replace(operands, x=operands.x[:, column]))


@mutant("tails", "product", "tiles of 8 output columns swapped", lambda t: t.n >= 16)
def output_tiles_swapped(operands):
    y = right(operands)
    n = y.shape[1]
    swapped = np.arange(n) ^ 8
    return y[:, np.where(swapped < n, swapped, np.arange(n))]


@mutant("tails", "product", "neighbouring tokens swapped", lambda t: t.m > 1)
def tokens_swapped(operands):
    y = right(operands)
    m = len(y)
    swapped = np.arange(m) ^ 1
    return y[np.where(swapped < m, swapped, np.arange(m))]


# ---- accumulation


@mutant("accumulation", "product", "sums that miss one part of a split K", lambda t: t.k >= 4)
def split_dropped(operands):
    k = operands.x.shape[1]
    column = np.arange(k)
    return _times(operands, ~((column >= k // 2) & (column < k // 2 + max(1, k // 4))))


@mutant("accumulation", "product", "sums with one part of a split K counted twice", lambda t: t.k >= 4)
def split_counted_twice(operands):
    k = operands.x.shape[1]
    column = np.arange(k)
    return _times(operands, 1.0 + ((column >= k // 4) & (column < k // 4 + max(1, k // 4))))


def _narrow(operands, target, step=16):
    total = np.zeros((len(operands.x), len(operands.matrix)))
    for k in range(0, operands.x.shape[1], step):
        part = operands.x[:, k : k + step] @ operands.matrix[:, k : k + step].T
        total = round_to(total + part, target)
    return total


@mutant(
    "accumulation",
    "product",
    "sums in fp16",
    lambda t: t.k >= 64 and not (t.dtype == "bf16" and t.activation.kind == "a16"),
)
def accumulated_in_fp16(operands):
    return _narrow(operands, _FP16)


@mutant("accumulation", "product", "sums in bf16", lambda t: t.k >= 64)
def accumulated_in_bf16(operands):
    return _narrow(operands, _BF16)


@mutant("accumulation", "product", "two partial sums rounded to 16 bits", lambda t: t.k >= 32)
def partial_sums_in_16_bits(operands):
    half = operands.x.shape[1] // 2
    parts = [
        operands.x[:, part] @ operands.matrix[:, part].T for part in (slice(None, half), slice(half, None))
    ]
    return round_to(parts[0], operands.output) + round_to(parts[1], operands.output)


@mutant(
    "accumulation",
    "product",
    "sums whose accumulator was not cleared between tiles of 8 output columns",
    lambda t: t.n > 8,
)
def accumulator_not_cleared(operands):
    y = right(operands)
    stale = y.copy()
    stale[:, 8:16] += y[:, 0:8][:, : stale[:, 8:16].shape[1]]
    return stale


@mutant("accumulation", "product", "integer sums that wrap at 16 bits",
        lambda t: t.activation.kind == "int8" and t.weight.bits >= 4 and t.k >= 250)  # fmt: skip
def integer_sums_wrap_at_16_bits(operands):
    c, q = operands.columns, operands.quantized
    if q is None:
        return right(operands)
    total = np.zeros((len(operands.x), len(operands.matrix)))
    groups = c.weight.groups()
    for g in range(int(groups.max()) + 1):
        chosen = groups == g
        part = q.codes[:, chosen] @ (c.u - c.u_z)[:, chosen].T
        wrapped = (part + 2.0**15) % 2.0**16 - 2.0**15
        total += wrapped * c.scale[:, chosen][:, 0]
    return total * q.scale


@mutant("accumulation", "product", "the zero points subtracted once a call, not once a column: sum(x) is taken as x[0]",
        lambda t: not t.weight.symmetric and t.k > 1)  # fmt: skip
def zero_point_correction_without_sum(operands):
    c = operands.columns
    return operands.x @ (c.u * c.scale).T - operands.x[:, :1] * (c.u_z * c.scale)[:, 0]


@mutant(
    "accumulation",
    "product",
    "sums that miss one tile of 16 columns by 8 outputs",
    lambda t: t.k >= 32 and t.n >= 16,
)
def one_tile_missed(operands):
    matrix = operands.matrix.copy()
    matrix[8:16, 16:32] = 0
    return right(replace(operands, matrix=matrix))


# ---- rounding


@mutant("rounding", "finish", "outputs truncated toward zero")
def output_truncated(total, bias, output):
    y = finish(total, bias, output)
    exact = total if bias is None else total + bias
    below, above = half_ulps(y, output)
    step = np.where(y > 0, 2 * below, -2 * above)
    return np.where(np.abs(y) > np.abs(exact), np.where(np.isfinite(y), y - step, y), y)


@mutant("rounding", "finish", "outputs with ties rounded away from zero")
def output_half_away(total, bias, output):
    exact = total if bias is None else total + bias
    y = round_to(exact, output)
    below, above = half_ulps(y, output)
    tie = np.where(exact > 0, exact == y + above, exact == y - below) & np.isfinite(y) & (exact != 0)
    return np.where(tie, y + np.where(exact > 0, 2 * above, -2 * below), y)


@mutant("rounding", "finish", "outputs one ulp too large in one column", lambda t: t.n > 1)
def one_column_an_ulp_off(total, bias, output):
    y = finish(total, bias, output)
    _, above = half_ulps(y, output)
    y[:, -1] = y[:, -1] + 2 * above[:, -1]
    return y


@mutant("rounding", "store", "weights truncated to 16 bits",
        lambda t: t.activation.kind == "a16" and (t.weight.bits > 2 or not t.weight.symmetric))  # fmt: skip
def weights_truncated(matrix, output):
    y = round_to(matrix, output)
    below, above = half_ulps(y, output)
    step = np.where(y > 0, 2 * below, -2 * above)
    return np.where(np.abs(y) > np.abs(matrix), y - step, y)


@mutant("rounding", "matrix", "weights rounded to 6 significand bits", lambda t: True)
def weights_in_6_bits(columns):
    mantissa, exponent = np.frexp(RIGHT.matrix(columns))
    return np.ldexp(np.rint(np.ldexp(mantissa, 6)), exponent - 6)


@mutant("rounding", "product", "sums rounded to 16 bits before the channel scale",
        lambda t: t.groups == 1 and t.weight.strategy == "channel")  # fmt: skip
def channel_scale_after_rounding(operands):
    c = operands.columns
    if c.weight.format.strategy != "channel":
        return right(operands)
    scale = c.scale[:, 0]
    bare = operands.x @ (c.u - c.u_z).T
    return round_to(bare, operands.output) * scale


@mutant("rounding", "product", "outputs 0.1 % too large")
def gain_of_a_thousandth(operands):
    return right(operands) * 1.001


# ---- bias


def biased(t):
    return t.bias


@mutant("bias", "finish", "outputs without the bias", biased)
def bias_dropped(total, bias, output):
    return finish(total, None, output)


@mutant("bias", "finish", "outputs with the bias twice", biased)
def bias_twice(total, bias, output):
    return finish(total, bias if bias is None else 2 * bias, output)


@mutant("bias", "finish", "outputs with the bias of the next column", lambda t: t.bias and t.n > 1)
def bias_of_next_column(total, bias, output):
    return finish(total, bias if bias is None else np.roll(bias, -1), output)


@mutant("bias", "finish", "outputs with the bias on the first token alone", lambda t: t.bias and t.m > 1)
def bias_on_first_token(total, bias, output):
    if bias is None:
        return finish(total, bias, output)
    return finish(total + np.where(np.arange(len(total)) == 0, 1.0, 0.0)[:, None] * bias, None, output)


@mutant("bias", "finish", "outputs rounded before the bias is added", biased)
def bias_after_rounding(total, bias, output):
    return finish(round_to(total, output), bias, output)


@mutant("bias", "finish", "outputs with the bias subtracted", biased)
def bias_subtracted(total, bias, output):
    return finish(total, bias if bias is None else -bias, output)


# ---- dtype


@mutant("dtype", "finish", "outputs rounded to fp16 first", lambda t: t.dtype == "bf16")
def output_through_fp16(total, bias, output):
    return round_to(finish(total, bias, _FP16), output)


@mutant("dtype", "finish", "outputs rounded to bf16", lambda t: t.dtype == "fp16")
def output_in_bf16(total, bias, output):
    return round_to(finish(total, bias, _BF16), output)


@mutant(
    "dtype",
    "product",
    "activations rounded to bf16",
    lambda t: t.dtype == "fp16" and t.activation.kind == "a16",
)
def activations_in_bf16(operands):
    if isinstance(operands.quantized, QuantizedActivations):
        return right(operands)
    return right(replace(operands, x=round_to(operands.x, _BF16)))


@mutant(
    "dtype",
    "product",
    "activations rounded to fp16",
    lambda t: t.dtype == "bf16" and t.activation.kind == "a16",
)
def activations_in_fp16(operands):
    if isinstance(operands.quantized, QuantizedActivations):
        return right(operands)
    return np.nan_to_num(right(replace(operands, x=np.clip(round_to(operands.x, _FP16), -65504, 65504))))


@mutant("dtype", "finish", "zero in the place of subnormal outputs", lambda t: t.dtype == "fp16")
def subnormal_outputs_flushed(total, bias, output):
    y = finish(total, bias, output)
    return np.where(np.abs(y) < 2.0**output.emin, 0.0, y)


E4M3_BITS = FloatFormat("weights in 4 bits", 4, -60, 2.0**60, np.dtype(np.float64))


@mutant(
    "dtype",
    "matrix",
    "weights rounded to the 4 significand bits of fp8",
    lambda t: t.weight.bits > (5 if t.weight.symmetric else 4),
)
def weights_in_fp8(columns):
    return round_to((columns.u - columns.u_z), E4M3_BITS) * columns.scale


@mutant("dtype", "columns", "weights with scales rounded to 7 significand bits")
def scale_in_7_bits(weight, output):
    columns = columns_of(weight, output)
    mantissa, exponent = np.frexp(columns.scale)
    return replace(columns, scale=np.ldexp(np.rint(np.ldexp(mantissa, 7)), exponent - 7))
