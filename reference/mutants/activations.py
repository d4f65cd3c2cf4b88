"""Wrong semantics of activation quantization: quantize(calls, fmt, how, input_scale) -> one result a call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.activations import (
    QuantizedActivations,
    amax,
    code_range,
    codes_of,
    divisor,
    scale_of,
    spread_groups,
)
from reference.activations import quantize as right
from reference.formats import ActivationFormat
from reference.mutants.registry import Registry, registrar
from reference.rounding import FLOAT_FORMATS, FloatFormat, round_to

ACTIVATIONS: Registry = {}
mutant = registrar(ACTIVATIONS)


def quantized(t):
    return t.activation.kind != "a16"


def symmetric(t):
    return quantized(t) and t.activation.symmetric


def dynamic(t):
    return symmetric(t) and t.activation.dynamic


def token(t):
    return dynamic(t) and t.activation.strategy == "token"


def integer(t):
    return symmetric(t) and t.activation.kind in ("int8", "int4")


def fp8(t):
    return symmetric(t) and t.activation.kind == "fp8"


def _with_amax(x, fmt, how, largest, input_scale=None):
    """Quantized with another idea of the largest magnitude; codes are clamped as always."""
    values = x.astype(np.float64)
    scale = scale_of(largest, fmt, how, input_scale)
    spread = [spread_groups(v, fmt.group_size, values.shape[1]) for v in (scale, largest)]
    how = replace(how, code_by="divide" if how.code_by == "inverse" else how.code_by)
    return QuantizedActivations(codes_of(values, *spread, fmt, how), scale, None, fmt.group_size)


def _recoded(x, fmt, how, input_scale, code):
    """The right scales with codes rounded another way: code(x / scale)."""
    values = x.astype(np.float64)
    scale = scale_of(amax(values, fmt), fmt, how, input_scale)
    spread = spread_groups(scale, fmt.group_size, values.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        t = round_to(np.where(values == 0, 0.0, values / spread), how.quotient)
    low, high = code_range(fmt)
    return QuantizedActivations(code(np.clip(t, low, high)), scale, None, fmt.group_size)


def _each(calls, change):
    return [change(x) for x in calls]


@mutant("activation quantization", "quantize", "W·A16: activation quantization was skipped", quantized)
def quantization_skipped(calls, fmt, how, input_scale):
    return [x.astype(np.float64) for x in calls]


def _as(calls, fmt, how, kind):
    other = ActivationFormat(kind, fmt.symmetric, True, fmt.strategy, fmt.group_size)
    return [right(x, other, how, None) for x in calls]


@mutant(
    "activation quantization",
    "quantize",
    "int8 activations instead of fp8",
    lambda t: fp8(t) and t.activation.dynamic,
)
def int8_instead_of_fp8(calls, fmt, how, input_scale):
    return _as(calls, fmt, how, "int8")


@mutant(
    "activation quantization",
    "quantize",
    "int8 activations instead of int4",
    lambda t: integer(t) and t.activation.kind == "int4",
)
def int8_instead_of_int4(calls, fmt, how, input_scale):
    return _as(calls, fmt, how, "int8")


@mutant(
    "activation quantization",
    "quantize",
    "fp8 activations instead of int8",
    lambda t: dynamic(t) and t.activation.kind == "int8",
)
def fp8_instead_of_int8(calls, fmt, how, input_scale):
    return _as(calls, fmt, how, "fp8")


@mutant(
    "activation quantization",
    "quantize",
    "int4 activations instead of int8",
    lambda t: dynamic(t) and t.activation.kind == "int8",
)
def int4_instead_of_int8(calls, fmt, how, input_scale):
    return _as(calls, fmt, how, "int4")


@mutant("activation quantization", "quantize", "static scales instead of dynamic: the first call's are kept",
        lambda t: dynamic(t) and t.calls > 1)  # fmt: skip
def static_instead_of_dynamic(calls, fmt, how, input_scale):
    first = np.abs(calls[0].astype(np.float64)).max(initial=0.0)

    def kept(x):
        shape = amax(x.astype(np.float64), fmt).shape
        return _with_amax(x, fmt, how, np.full(shape, first))

    return _each(calls, kept)


@mutant(
    "activation quantization",
    "quantize",
    "one scale a call instead of one a token",
    lambda t: token(t) and t.m > 1,
)
def per_tensor_instead_of_per_token(calls, fmt, how, input_scale):
    def together(x):
        largest = np.abs(x.astype(np.float64)).max(initial=0.0)
        return _with_amax(x, fmt, how, np.full((len(x), 1), largest))

    return _each(calls, together)


@mutant("activation quantization", "quantize", "codes rounded half away from zero", integer)
def codes_half_away(calls, fmt, how, input_scale):
    return _each(
        calls, lambda x: _recoded(x, fmt, how, input_scale, lambda t: np.trunc(t + np.copysign(0.5, t)))
    )


@mutant("activation quantization", "quantize", "codes truncated toward zero", integer)
def codes_truncated(calls, fmt, how, input_scale):
    return _each(calls, lambda x: _recoded(x, fmt, how, input_scale, np.trunc))


@mutant("activation quantization", "quantize", "codes rounded down", integer)
def codes_rounded_down(calls, fmt, how, input_scale):
    return _each(calls, lambda x: _recoded(x, fmt, how, input_scale, np.floor))


def _scaled_by(calls, fmt, how, factor):
    """The largest magnitude taken as `factor` times what it is."""
    return _each(calls, lambda x: _with_amax(x, fmt, how, amax(x.astype(np.float64), fmt) * factor))


@mutant(
    "activation quantization",
    "quantize",
    "activation scales of amax / 128 (or 8)",
    lambda t: dynamic(t) and integer(t),
)
def scale_by_code_count(calls, fmt, how, input_scale):
    high = code_range(fmt)[1]
    return _scaled_by(calls, fmt, how, divisor(fmt, how) / (high + 1))


@mutant("activation quantization", "quantize", "activation scales of the other convention, amax / 127.5 for amax / 127",
        lambda t: dynamic(t) and integer(t))  # fmt: skip
def scale_of_other_convention(calls, fmt, how, input_scale):
    high = code_range(fmt)[1]
    other = high + 0.5 if how.levels == "code" else high
    return _scaled_by(calls, fmt, how, divisor(fmt, how) / other)


@mutant(
    "activation quantization",
    "quantize",
    "activation scales of amax / 240 (fp8 without its top binade)",
    lambda t: fp8(t) and t.activation.dynamic,
)
def fp8_largest_is_240(calls, fmt, how, input_scale):
    return _scaled_by(calls, fmt, how, 448 / 240)


@mutant(
    "activation quantization",
    "quantize",
    "activation scales from the largest value, not the largest magnitude",
    dynamic,
)
def amax_without_abs(calls, fmt, how, input_scale):
    def signed(x):
        values = np.maximum(x.astype(np.float64), 0)
        return _with_amax(x, fmt, how, np.maximum(amax(values, fmt), 1e-30))

    return _each(calls, signed)


@mutant(
    "activation quantization",
    "quantize",
    "activation scales from the first half of the columns",
    lambda t: token(t) and t.k > 1,
)
def amax_of_half_a_row(calls, fmt, how, input_scale):
    def half(x):
        values = x.astype(np.float64).copy()
        values[:, values.shape[1] // 2 :] = 0
        return _with_amax(x, fmt, how, np.maximum(amax(values, fmt), 1e-30))

    return _each(calls, half)


@mutant(
    "activation quantization",
    "quantize",
    "activation scales that miss one lane of 32",
    lambda t: dynamic(t) and t.k > 5,
)
def amax_misses_a_lane(calls, fmt, how, input_scale):
    def missing(x):
        values = x.astype(np.float64).copy()
        values[:, np.arange(values.shape[1]) % 32 == 5] = 0
        return _with_amax(x, fmt, how, np.maximum(amax(values, fmt), 1e-30))

    return _each(calls, missing)


@mutant("activation quantization", "quantize", "activation scales rounded to bf16",
        lambda t: dynamic(t) and t.convention == "kernel")  # fmt: skip
def activation_scale_in_bf16(calls, fmt, how, input_scale):
    def rounded(x):
        values = x.astype(np.float64)
        scale = round_to(scale_of(amax(values, fmt), fmt, how), FLOAT_FORMATS["bf16"])
        spread = spread_groups(scale, fmt.group_size, values.shape[1])
        return QuantizedActivations(
            codes_of(values, spread, spread, fmt, replace(how, code_by="divide")), scale, None, fmt.group_size
        )

    return _each(calls, rounded)


@mutant(
    "activation quantization",
    "quantize",
    "the right codes with the scales of the next token",
    lambda t: token(t) and t.m > 1,
)
def scale_of_next_token(calls, fmt, how, input_scale):
    def rolled(x):
        found = right(x, fmt, how, input_scale)
        return replace(found, scale=np.roll(found.scale, -1, axis=0))

    return _each(calls, rolled)


@mutant("activation quantization", "quantize", "fp8 codes truncated", fp8)
def fp8_codes_truncated(calls, fmt, how, input_scale):
    def toward_zero(t):
        _, exponent = np.frexp(t)
        exponent = np.maximum(exponent, -5)
        return np.ldexp(np.trunc(np.ldexp(t, 4 - exponent)), exponent - 4)

    return _each(calls, lambda x: _recoded(x, fmt, how, input_scale, toward_zero))


E5M2 = FloatFormat("e5m2", 3, -14, 57344.0, np.dtype(np.float16), saturates=True)


@mutant("activation quantization", "quantize", "e5m2 activations instead of e4m3", fp8)
def e5m2_instead_of_e4m3(calls, fmt, how, input_scale):
    return _each(calls, lambda x: _recoded(x, fmt, how, input_scale, lambda t: round_to(t, E5M2)))


@mutant("activation quantization", "quantize", "codes clamped one short of the range (126, 6)", integer)
def codes_clamped_short(calls, fmt, how, input_scale):
    high = code_range(fmt)[1] - 1
    return _each(
        calls, lambda x: _recoded(x, fmt, how, input_scale, lambda t: np.clip(np.rint(t), -high, high))
    )


@mutant(
    "activation quantization", "quantize", "codes that are not multiplied by the activation scale", quantized
)
def activation_scale_not_applied(calls, fmt, how, input_scale):
    def bare(x):
        found = right(x, fmt, how, input_scale)
        zero_point = found.zero_point
        return QuantizedActivations(found.codes, np.ones_like(found.scale), zero_point, found.group_size)

    return _each(calls, bare)


@mutant(
    "activation quantization", "quantize", "NaN in the place of tokens that are zero", lambda t: dynamic(t)
)
def zero_token_divided_by_zero(calls, fmt, how, input_scale):
    def divided(x):
        found = right(x, fmt, how, input_scale)
        zero = amax(x.astype(np.float64), fmt) == 0
        return replace(found, scale=np.where(zero, np.nan, found.scale))

    return _each(calls, divided)


@mutant("activation quantization", "quantize", "activation scales rounded up to powers of two", dynamic)
def activation_scale_power_of_two(calls, fmt, how, input_scale):
    def rounded(x):
        values = x.astype(np.float64)
        scale = scale_of(amax(values, fmt), fmt, how)
        with np.errstate(divide="ignore"):
            scale = np.where(scale == 0, 0.0, np.exp2(np.ceil(np.log2(scale))))
        spread = spread_groups(scale, fmt.group_size, values.shape[1])
        return QuantizedActivations(
            codes_of(values, spread, spread, fmt, replace(how, code_by="divide")), scale, None, fmt.group_size
        )

    return _each(calls, rounded)


@mutant(
    "activation quantization",
    "quantize",
    "codes without the activations' zero points",
    lambda t: not t.activation.symmetric,
)
def activation_zero_point_ignored(calls, fmt, how, input_scale):
    def bare(x):
        found = right(x, fmt, how, input_scale)
        return replace(found, zero_point=np.zeros_like(found.scale))

    return _each(calls, bare)


@mutant(
    "activation quantization",
    "quantize",
    "symmetric codes where the format is asymmetric",
    lambda t: not t.activation.symmetric,
)
def symmetric_instead_of_asymmetric(calls, fmt, how, input_scale):
    def plain(x):
        found = right(x, ActivationFormat(fmt.kind), how, None)
        return replace(found, zero_point=np.zeros_like(found.scale))

    return _each(calls, plain)


@mutant(
    "activation quantization",
    "quantize",
    "activation zero points one too large",
    lambda t: not t.activation.symmetric,
)
def activation_zero_point_plus_one(calls, fmt, how, input_scale):
    def shifted(x):
        found = right(x, fmt, how, input_scale)
        return replace(found, zero_point=found.zero_point + 1)

    return _each(calls, shifted)
