"""Activation quantization: compressed-tensors' bits, the kernels' formulas, and properties of both."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import forward
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.activations import (
    Quantizer,
    legal_codes,
    legal_quantizations,
    open_tokens,
    quantize,
    quantizers,
)
from reference.errors import FormatError, TensorError
from reference.formats import ActivationFormat
from reference.rounding import E4M3, float_format, half_ulps, round_to

torch.set_num_threads(1)

F32 = np.float32
FP8 = ml_dtypes.float8_e4m3fn
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
CONVENTIONS = ("kernel", "compressed-tensors")
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
LOWEST = {"int8": -128.0, "int4": -8.0, "fp8": -448.0}
# The finite magnitudes of e4m3 in order; 0x7F is NaN.
E4M3_GRID = np.arange(0x7F, dtype=np.uint8).view(FP8).astype(np.float64)

INT8, INT4, FP8_TOKEN = (ActivationFormat(kind) for kind in ("int8", "int4", "fp8"))
INT8_ASYM = ActivationFormat("int8", symmetric=False)
INT8_GROUP, FP8_GROUP = (ActivationFormat(k, strategy="group", group_size=128) for k in ("int8", "fp8"))
INT8_TENSOR, FP8_TENSOR = (ActivationFormat(kind, strategy="tensor") for kind in ("int8", "fp8"))
INT8_STATIC, FP8_STATIC = STATIC = [ActivationFormat(k, True, False, "tensor") for k in ("int8", "fp8")]
BY_ROW = [INT8, INT8_ASYM, INT4, FP8_TOKEN, INT8_GROUP, FP8_GROUP]
DYNAMIC = [*BY_ROW, INT8_TENSOR, FP8_TENSOR]
FORMATS = DYNAMIC + STATIC


def search(examples):
    return settings(deadline=None, database=None, max_examples=examples)


def of_formats(formats):
    return pytest.mark.parametrize("fmt", formats, ids=lambda fmt: fmt.name)


every_convention = pytest.mark.parametrize("convention", CONVENTIONS)


# ---- data

KINDS = ("normal", "ties", "zero rows", "outliers", "large", "one-sided", "small")
EXTREMES = ("tiny", "subnormal", "huge")


def activations_of(kind, fmt, dtype, seed, shape=(6, 256)):
    """A finite matrix of a 16-bit type, of a kind that reaches one corner of the arithmetic."""
    rng = np.random.default_rng([seed, (KINDS + EXTREMES).index(kind)])
    form = float_format(DTYPES[dtype])
    values = rng.normal(0, 1, shape)
    if kind == "ties":
        values = ties(fmt, rng, shape)
    elif kind == "zero rows":
        values[rng.random(shape[0]) < 0.5] = 0
        values[0] = 0
    elif kind == "outliers":
        values[:, rng.integers(0, shape[1], 1 + shape[1] // 64)] *= 100
    elif kind == "one-sided":
        values = (np.abs(values) + 0.5) * np.where(np.arange(shape[0]) % 2, 1, -1)[:, None]
    elif kind == "huge":
        values = np.clip(values * 0.4, -0.99, 0.99) * form.largest
    else:
        powers = {"large": 10, "small": -16, "tiny": form.emin + 2, "subnormal": form.emin - 3}
        values *= 2.0 ** powers.get(kind, 0)
        if kind == "subnormal":  # of tokens below zero, the coarse scale puts the zero point out of range
            values[1::2] = -np.abs(values[1::2])
    return round_to(values, form).astype(form.dtype)


def magnitudes(kind):
    """The codes from zero up."""
    return E4M3_GRID if kind == "fp8" else np.arange(LARGEST[kind] + 1)


def boundaries(kind):
    """What lies halfway between two of them."""
    return (magnitudes(kind)[1:] + magnitudes(kind)[:-1]) / 2


def ties(fmt, rng, shape):
    """Halves of codes, under a largest magnitude that makes the scale a power of two in one convention."""
    middle = boundaries(fmt.kind)
    values = rng.choice(middle[middle < 100], shape) * rng.choice([-1.0, 1.0], shape)
    if fmt.symmetric:
        for start in range(0, shape[1], fmt.group_size if fmt.group_size > 0 else shape[1]):
            top = LARGEST[fmt.kind] + (0 if fmt.kind == "fp8" else rng.choice([0, 0.5], shape[0]))
            values[:, start] = top * rng.choice([-1.0, 1.0], shape[0])
    elif shape[1] > 1:
        # Odd zero points tell apart what rounds before and after they are added; halves, under scales that
        # have no exact reciprocal, what divides and what multiplies.
        zero_point = rng.integers(-54, 55, shape[0]) / 2
        values[:, 0], values[:, -1] = -128 - zero_point, 127 - zero_point
        values *= rng.choice([1, 1, 3, 5, 7], (shape[0], 1))
    powers = np.full(shape[0], 1) if fmt.strategy == "tensor" else np.arange(shape[0]) % 7 - 3
    return values * np.exp2(powers)[:, None]


def problems(fmt, kinds=KINDS, seeds=1, shape=(6, 256)):
    """Activations of both types, and a scale for a static format."""
    for kind, dtype, seed in product(kinds, DTYPES, range(seeds)):
        x = activations_of(kind, fmt, dtype, seed, shape)
        yield x, scale_for(x, fmt, seed)


def scale_for(x, fmt, seed):
    """For a static format: a scale that fits x, a power of two, or one under which much of x saturates."""
    if fmt.dynamic:
        return None
    fitting = float(np.abs(x.astype(np.float64)).max() / LARGEST[fmt.kind]) or 1.0
    return float(F32([fitting, np.exp2(np.floor(np.log2(fitting))), fitting / 11][seed % 3]))


@st.composite
def any_activations(draw, formats, kinds=KINDS):
    """A format, and a matrix that it divides."""
    fmt, kind, dtype = (draw(st.sampled_from(list(v))) for v in (formats, kinds, DTYPES))
    columns = draw(st.integers(1, 3)) * 128 if fmt.strategy == "group" else draw(st.integers(1, 70))
    rows, seed = draw(st.integers(1, 9)), draw(st.integers(0, 2**32))
    return fmt, activations_of(kind, fmt, dtype, seed, (rows, columns))


def results(x, fmt, convention, input_scale=None):
    """What every legal order gives, equal results as well."""
    for how in quantizers(fmt, convention, float_format(x.dtype)):
        yield how, quantize(x, fmt, how, input_scale)


def alive(x, fmt):
    """Which tokens, groups or tensors are not all zeros, (M, 1), (M, G) or (1, 1)."""
    size = fmt.group_size if fmt.strategy == "group" else x.shape[1]
    found = (x != 0).reshape(len(x), -1, size).any(axis=2) | (not fmt.dynamic)
    return found.any(keepdims=True) if fmt.strategy == "tensor" else found


def spread(blocks, x):
    return np.broadcast_to(np.repeat(blocks, x.shape[1] // blocks.shape[1], axis=1), x.shape)


# ---- compressed-tensors' own functions


def to_torch(array):
    """The same bytes as a tensor."""
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def doubles(tensor, *shape):
    return tensor.double().numpy().reshape(shape)


def assert_upstream_agrees(x, fmt, input_scale=None, scale_dtype=torch.float32):
    """Scales, zero points and codes are the oracle's, and dequantize to the oracle's, rounded once.

    A third dimension goes in: of a matrix, upstream makes one scale for all tokens. The oracle's two ways
    are the arithmetic of its eager path, and of its Triton path, which is the eager one fed with float32.
    """
    args, value = QuantizationArgs(**fmt.to_quantization_args()), to_torch(x)[None]
    if fmt.dynamic:
        scale, zero_point = compute_dynamic_scales_and_zp(value, args, module=None)
        assert scale.dtype == value.dtype
    else:
        scale, zero_point = torch.tensor([input_scale], dtype=scale_dtype), None
        input_scale = scale.item()
    eager = forward.quantize(value, scale, zero_point, args)
    triton = forward.quantize(value.float(), scale.float(), zero_point, args)

    (how, narrow), (_, wide), *_ = results(x, fmt, "compressed-tensors", input_scale)
    defined = np.ones((len(x), 1), np.bool_)
    if not fmt.symmetric:  # where the scale underflows, upstream has divided by zero
        with np.errstate(over="ignore"):
            span = x.max(axis=1, initial=0).astype(x.dtype) - x.min(axis=1, initial=0).astype(x.dtype)
        defined = (span / x.dtype.type(255) != 0)[:, None]
        for ours in (narrow, wide):
            assert np.array_equal(ours.zero_point[defined], doubles(zero_point, len(x), 1)[defined])
    for ours, theirs in ((wide if scale.dtype != value.dtype else narrow, eager), (wide, triton)):
        assert np.array_equal(ours.scale, doubles(scale, *ours.scale.shape))
        assert np.array_equal(ours.codes * defined, doubles(theirs, *x.shape) * defined)
        if np.isfinite(ours.scale).all():
            back = doubles(forward.dequantize(theirs, scale, zero_point, args), *x.shape)
            form = float_format(x.dtype if scale.dtype == value.dtype else "fp32")
            assert np.array_equal(round_to(ours.dequantized(), form) * defined, back * defined)
    legal = legal_quantizations(x, fmt, "compressed-tensors", input_scale)
    assert np.array_equal(legal[how.name].codes, narrow.codes)
    assert any(np.array_equal(entry.codes, wide.codes) for entry in legal.values())
    return narrow, wide


@pytest.mark.parametrize("kind", KINDS + EXTREMES)
@of_formats(DYNAMIC)
def test_dynamic_scales_and_codes_are_upstreams(fmt, kind):
    for x, _ in problems(fmt, [kind], seeds=2):
        assert_upstream_agrees(x, fmt)


@of_formats(STATIC)
def test_static_codes_are_upstreams(fmt):
    """A float32 scale makes the eager path divide in float32 as well."""
    for x, scale in problems(fmt, KINDS + EXTREMES, seeds=3):
        for scale_dtype in (torch.float32, to_torch(x).dtype):
            if torch.tensor(scale, dtype=scale_dtype) > 0:
                assert_upstream_agrees(x, fmt, scale, scale_dtype)


@search(70)
@given(any_activations(DYNAMIC, KINDS + EXTREMES))
def test_dynamic_codes_of_anything_are_upstreams(problem):
    fmt, x = problem
    assert_upstream_agrees(x, fmt)


@search(40)
@given(any_activations(STATIC), st.floats(-20, 4), st.booleans())
def test_static_codes_under_any_scale_are_upstreams(problem, power, narrow):
    fmt, x = problem
    assert_upstream_agrees(x, fmt, float(F32(2.0**power)), to_torch(x).dtype if narrow else torch.float32)


@of_formats([INT8, INT8_ASYM, FP8_TOKEN, FP8_GROUP, *STATIC])
def test_upstreams_two_paths_differ(fmt):
    """Otherwise, which of the two a call equals would say nothing."""
    for x, scale in problems(fmt, ["normal"], shape=(64, 256)):
        narrow, wide = assert_upstream_agrees(x, fmt, scale, to_torch(x).dtype)
        assert (narrow.codes != wide.codes).any()


def torchao_int8(x):
    """Int8Tensor.from_hp: a scale of 16 bits, its reciprocal in float32."""
    scale = (widest(x) / x.dtype.type(127.5)).astype(F32)
    return np.clip(np.rint(x.astype(F32) * (F32(1) / scale)), -128, 127), scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchaos_formula_is_legal(dtype):
    every = np.arange(DTYPES[dtype].type(2).view(np.uint16), dtype=np.uint16).view(DTYPES[dtype])
    told = 0
    for largest in every[-100:]:
        x = every[None, (every >= largest / 256) & (every <= largest)]
        codes, scale = torchao_int8(x)
        (_, narrow), (_, wide), *_ = found = list(results(x, INT8, "compressed-tensors"))
        assert any(np.array_equal(r.codes, codes) and np.array_equal(r.scale, scale) for _, r in found)
        told += (narrow.codes != codes).any() and (wide.codes != codes).any()
    assert told  # no order that divides gives them all


# ---- the kernels' own formulas, in float32


def saturated(t, kind):
    """A conversion that rounds to nearest even and saturates."""
    t = np.clip(t, F32(LOWEST[kind]), F32(LARGEST[kind]))
    return t.astype(FP8) if kind == "fp8" else np.rint(t)


def widest(x):
    return np.abs(x).max(axis=1, keepdims=True)


def vllm_int8(x):
    return saturated(x * (F32(127) / widest(x)), "int8"), widest(x) / F32(127)


def vllm_azp(x):
    least, greatest = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    scale = (greatest - least) / F32(255)
    zero_point = np.rint(F32(-128) - least / scale).astype(np.int32)
    codes = np.rint(x * (F32(1) / scale)).astype(np.int32) + zero_point
    return np.clip(codes, -128, 127), scale, zero_point


def vllm_fp8_token(x):
    scale = np.maximum(widest(x) / F32(448), F32(1) / (F32(448) * F32(512)))
    return saturated(x / scale, "fp8"), scale


def vllm_fp8_tensor(x):
    scale = np.abs(x).max(keepdims=True) / F32(448)
    return saturated(x * (F32(1) / scale), "fp8"), scale


def vllm_fp8_of_a_group(x):
    scale = np.maximum(widest(x), F32(1e-10)) / F32(448)
    return saturated(x / scale, "fp8"), scale


def vllm_int8_static(x, scale):
    return saturated(x / F32(scale), "int8"), F32(scale).reshape(1, 1)


def vllm_fp8_static(x, scale):
    return saturated(x * (F32(1) / F32(scale)), "fp8"), F32(scale).reshape(1, 1)


def humming(kind):
    def process_input(x):
        scale = np.maximum(widest(x) / F32(LARGEST[kind]), F32(1e-30))
        return saturated(x * (F32(1) / scale), kind), scale

    return process_input


def by_group(kernel):
    def grouped(x):
        codes, scale = kernel(x.reshape(-1, 128))
        return codes.reshape(x.shape), scale.reshape(len(x), -1)

    return grouped


BY_RECIPROCAL, BY_INVERSE = Quantizer(code_by="reciprocal"), Quantizer(code_by="inverse")
FLOOR = 1 / (448 * 512)
KERNELS = {
    "vllm int8": (vllm_int8, INT8, BY_INVERSE),
    "vllm azp": (vllm_azp, INT8_ASYM, BY_INVERSE),
    "vllm fp8 token": (vllm_fp8_token, FP8_TOKEN, Quantizer(floor=FLOOR)),
    "vllm fp8 tensor": (vllm_fp8_tensor, FP8_TENSOR, BY_RECIPROCAL),
    "vllm fp8 group": (by_group(vllm_fp8_of_a_group), FP8_GROUP, Quantizer()),
    "vllm int8 static": (vllm_int8_static, INT8_STATIC, Quantizer()),
    "vllm fp8 static": (vllm_fp8_static, FP8_STATIC, BY_RECIPROCAL),
    "humming int8": (humming("int8"), INT8, BY_RECIPROCAL),
    "humming int4": (humming("int4"), INT4, BY_RECIPROCAL),
    "humming fp8": (humming("fp8"), FP8_TOKEN, BY_RECIPROCAL),
    "humming int8 group": (by_group(humming("int8")), INT8_GROUP, BY_RECIPROCAL),
    "humming fp8 group": (by_group(humming("fp8")), FP8_GROUP, BY_RECIPROCAL),
}


def run_kernel(kernel, x, scale=None):
    """Codes, scales and, where there are any, zero points."""
    with np.errstate(all="ignore"):
        found = kernel(x.astype(F32), *([] if scale is None else [scale]))
    assert found[1].dtype == F32
    return [v.astype(np.float64) for v in found]


def same_apart_from_zeros(x, fmt, ours, theirs):
    """Equal, but where all is zero: any finite scale serves there."""
    blocks = alive(x, fmt)
    masks = (spread(blocks, x), blocks, blocks)
    pairs = zip((ours.codes, ours.scale, ours.zero_point), theirs, masks, strict=False)
    return all(a.shape == b.shape and np.array_equal(a[mask], b[mask]) for a, b, mask in pairs)


def is_legal(x, fmt, theirs, scale=None):
    entries = legal_quantizations(x, fmt, "kernel", scale).values()
    return any(same_apart_from_zeros(x, fmt, entry, theirs) for entry in entries)


def assert_kernel_is_legal(kernel, fmt, how, x, scale):
    theirs = run_kernel(kernel, x, scale)
    assert same_apart_from_zeros(x, fmt, quantize(x, fmt, how, scale), theirs)
    assert is_legal(x, fmt, theirs, scale)
    low, high = legal_codes(x, fmt, *theirs[1:])
    assert ((low <= theirs[0]) & (theirs[0] <= high))[spread(alive(x, fmt), x)].all()


@pytest.mark.parametrize("name", KERNELS)
def test_published_formulas_are_legal(name):
    kernel, fmt, how = KERNELS[name]
    for x, scale in problems(fmt, seeds=3):
        assert_kernel_is_legal(kernel, fmt, how, x, scale)


@search(80)
@given(st.data(), st.sampled_from(sorted(KERNELS)), st.integers(0, 2))
def test_published_formulas_are_legal_for_anything(data, name, seed):
    kernel, fmt, how = KERNELS[name]
    _, x = data.draw(any_activations([fmt]))
    if fmt.symmetric or (x.min(axis=1) < x.max(axis=1)).all():  # a constant token has no asymmetric scale
        assert_kernel_is_legal(kernel, fmt, how, x, scale_for(x, fmt, seed))


def in_order(fmt, how):
    """C63 and C66 as they are written, for a format per token."""

    def kernel(x):
        q = F32(LARGEST[fmt.kind] if fmt.symmetric else 255)
        span = widest(x) if fmt.symmetric else x.max(axis=1, keepdims=True) - x.min(axis=1, keepdims=True)
        scale = span / q if how.scale_by == "divide" else span * (F32(1) / q)
        scale = np.maximum(scale, F32(how.floor))
        reciprocal = F32(1) / scale
        # Under a floored scale Q / amax is no inverse of it; what goes with the scale is 1 / floor.
        inverse = np.minimum(q / span, F32(448 * 512)) if how.floor else q / span
        if fmt.symmetric:
            t = {"divide": x / scale, "reciprocal": x * reciprocal, "inverse": x * inverse}[how.code_by]
            return saturated(t, fmt.kind), scale
        least = x.min(axis=1, keepdims=True)
        below = least * reciprocal if how.code_by == "reciprocal" else least / scale
        zero_point = np.rint(F32(-128) - below)
        t = x / scale if how.code_by == "divide" else x * reciprocal
        return np.clip(np.rint(t) + zero_point, -128, 127), scale, zero_point

    return kernel


@pytest.mark.parametrize("code_by", ["divide", "reciprocal", "inverse"])
@pytest.mark.parametrize("scale_by", ["divide", "reciprocal"])
@of_formats([INT8, INT4, FP8_TOKEN, INT8_ASYM])
def test_every_order_of_the_specification_is_legal(fmt, scale_by, code_by):
    for floor in (0.0, FLOOR) if fmt == FP8_TOKEN else (0.0,):
        how = Quantizer(scale_by=scale_by, code_by=code_by, floor=floor)
        for x, _ in problems(fmt, shape=(40, 64)):
            assert_kernel_is_legal(in_order(fmt, how), fmt, how, x, None)


def test_zero_points_are_rounded_from_a_float32_difference():
    """min / s a hair beyond a half, and -128 - min / s the half itself, for there float32 is coarser."""
    least = np.arange(1024, 2048) / -32
    x = np.stack([least, -509 * least], axis=1).astype(np.float16)
    assert_kernel_is_legal(*KERNELS["vllm azp"], x, None)
    below = x[:, 0].astype(F32) / (vllm_azp(x.astype(F32))[1][:, 0])
    assert ((F32(-128) - below == -127.5) & (below != -0.5)).any()


def half_away(x):
    t = x * (F32(127) / widest(x))
    return np.copysign(np.floor(np.abs(t) + F32(0.5)), t), widest(x) / F32(127)


def truncated(x):
    return np.trunc(x / (widest(x) / F32(127))), widest(x) / F32(127)


def older_humming(x):
    greatest, least = x.max(axis=1, keepdims=True), x.min(axis=1, keepdims=True)
    scale = np.maximum(greatest / F32(127.49), -least / F32(128.49))
    return saturated(x * (F32(1) / scale), "int8"), scale


def upstream(x):
    scale = widest(x) / F32(127.5)
    return saturated(x / scale, "int8"), scale


def rounded_last(x):
    """Asymmetric as upstream rounds: the sum with the zero point."""
    _, scale, zero_point = vllm_azp(x)
    return np.clip(np.rint(x / scale + zero_point), -128, 127).astype(F32), scale, zero_point


OTHERS = {
    half_away: (INT8, "ties"),
    by_group(truncated): (INT8_GROUP, "normal"),
    older_humming: (INT8, "normal"),
    upstream: (INT8, "normal"),
    rounded_last: (INT8_ASYM, "ties"),
}


@pytest.mark.parametrize("kernel", OTHERS)
def test_formulas_of_others_are_not_legal(kernel):
    fmt, kind = OTHERS[kernel]
    for x, _ in problems(fmt, [kind], shape=(40, 256)):
        assert not is_legal(x, fmt, run_kernel(kernel, x))


@every_convention
@of_formats(FORMATS)
def test_legal_quantizations_are_told_apart(fmt, convention):
    for x, scale in problems(fmt, ["normal"], shape=(64, 256)):
        (plain, first), *others = found = list(results(x, fmt, convention, scale))
        assert len({how.name for how, _ in found}) == len(found)
        legal = legal_quantizations(x, fmt, convention, scale)
        entries = {(r.codes.tobytes(), r.scale.tobytes()) for r in legal.values()}
        assert len(entries) == len(legal)
        assert entries == {(r.codes.tobytes(), r.scale.tobytes()) for _, r in found}
        assert np.array_equal(legal[plain.name].codes, first.codes)
        assert plain.scale_by == plain.code_by == "divide"
        assert others


# ---- the codes that are legal under a scale


@pytest.mark.parametrize(
    ("fmt", "zero_point"),
    [(INT8, 0), (INT4, 0), (FP8_TOKEN, 0), (INT8_ASYM, 0), (INT8_ASYM, 5), (INT8_ASYM, -14)],
)
def test_codes_are_open_within_the_slack_of_a_boundary_and_nowhere_else(fmt, zero_point):
    """Counted in rational numbers, up to 20 float32 steps of the scale beside every boundary.

    Of integers the last is the one above the lowest code: only below zero are both of its sides codes.
    """
    grid = E4M3_GRID if fmt.kind == "fp8" else np.arange(LARGEST[fmt.kind] + 2)
    grid = grid[grid < 90] if zero_point else grid
    inner, outer = (np.repeat(side, 41) for side in (grid[:-1], grid[1:]))
    rng = np.random.default_rng(abs(zero_point))
    x = (rng.uniform(0.1, 2, (inner.size, 1)) * rng.choice([-1, 1], (inner.size, 1))).astype(np.float16)
    scale = F32(np.abs(x[:, 0].astype(np.float64)) / ((inner + outer) / 2))
    scale = (scale.view(np.int32) + np.resize(np.arange(-20, 21, dtype=np.int32), inner.size)).view(F32)
    scale = scale[:, None].astype(np.float64)
    zero_points = None if fmt.symmetric else np.full(scale.shape, float(zero_point))
    low, high = (v[:, 0] - zero_point for v in legal_codes(x, fmt, scale, zero_points))
    slack, seen = Fraction(2) ** -21, set()
    for i in range(inner.size):
        t = Fraction(float(x[i, 0])) / Fraction(float(scale[i, 0]))
        distance = abs(t) - Fraction((inner[i] + outer[i]) / 2)
        beyond = abs(distance) - slack * abs(t)
        if abs(beyond) < Fraction(2) ** -45:  # on the edge of the slack itself, either is fine
            continue
        codes = [inner[i], outer[i]] if beyond < 0 else [inner[i] if distance < 0 else outer[i]]
        seen.add((len(codes), t < 0, distance < 0))
        codes = sorted(-c if t < 0 else min(c, LARGEST[fmt.kind]) for c in codes)
        assert [low[i], high[i]] == [codes[0], codes[-1]]
    assert len(seen) == 8


@pytest.mark.parametrize("power", [-9, 0, 5])
@of_formats([INT8, INT4, FP8_TOKEN, *STATIC])
def test_exact_ties_go_to_the_even_code_yet_both_are_listed(fmt, power):
    """At a scale that is a power of two every legal order is exact, so one code is right; legal_codes, which
    knows no order, lists both."""
    edges, grid, top, scale = boundaries(fmt.kind), magnitudes(fmt.kind), LARGEST[fmt.kind], 2.0**power
    even = np.where(np.arange(edges.size) % 2 == 0, grid[:-1], grid[1:])
    x = (np.concatenate([edges, -edges, [top]])[None] * scale).astype(DTYPES["bf16"])
    for _, result in results(x, fmt, "kernel", None if fmt.dynamic else scale):
        assert result.scale == scale
        assert np.array_equal(result.codes[0], np.concatenate([even, -even, [top]]))
        assert open_tokens(x, fmt, "kernel", result).any() == (not fmt.dynamic)
    low, high = legal_codes(x, fmt, np.array([[scale]]))
    assert np.array_equal(low[0], np.concatenate([grid[:-1], -grid[1:], [top]]))
    assert np.array_equal(high[0], np.concatenate([grid[1:], -grid[:-1], [top]]))


@of_formats(FORMATS)
def test_codes_of_every_legal_order_are_legal(fmt):
    """Upstream's float32 quotient too; in the dtype of x it strays further than the slack."""
    for x, scale in problems(fmt):
        for _, result in [*results(x, fmt, "kernel", scale), [*results(x, fmt, CONVENTIONS[1], scale)][1]]:
            low, high = legal_codes(x, fmt, result.scale, result.zero_point)
            assert (low <= high).all()
            assert ((low <= result.codes) & (result.codes <= high))[spread(alive(x, fmt), x)].all()


@every_convention
@of_formats(BY_ROW)
def test_tokens_that_are_not_open_have_one_legal_result(fmt, convention):
    opened = []
    for x, _ in problems(fmt, seeds=3, shape=(12, 128)):
        (_, plain), *others = results(x, fmt, convention)
        opened.append(open_tokens(x, fmt, convention, plain))
        closed = ~opened[-1]
        if fmt.symmetric:
            assert closed[~alive(x, fmt).any(axis=1)].all()
        for how, other in others:
            assert np.array_equal(other.codes[closed], plain.codes[closed]), how.name
            near = np.abs(other.scale - plain.scale) <= 2.0**-22 * plain.scale
            assert (near | ~alive(x, fmt))[closed].all(), how.name
    assert np.any(opened)
    assert np.all(opened) == (not fmt.symmetric)


# ---- what codes and scales mean together


def half_step(t, kind):
    """Half the distance between the two codes around t."""
    if kind != "fp8":
        return 0.5
    above = np.clip(np.searchsorted(E4M3_GRID, np.abs(t)), 1, E4M3_GRID.size - 1)
    return (E4M3_GRID[above] - E4M3_GRID[above - 1]) / 2


@every_convention
@of_formats(DYNAMIC)
def test_round_trips_stay_within_half_a_step(fmt, convention):
    """Half a step and what the rounding of the quotient adds; at the ends of an asymmetric range, where the
    zero point is rounded, a step. Small values are left out: 16-bit scales of them are subnormal."""
    for x, _ in problems(fmt, KINDS[:-1]):
        for how, result in results(x, fmt, convention):
            scale = result.spread(np.where(result.scale == 0, 1.0, result.scale))
            t = x.astype(np.float64) / scale
            noise = max(2.0**-21, 2.1 * how.quotient.unit_roundoff, 1.1 * how.arithmetic.unit_roundoff)
            allowed = half_step(t, fmt.kind) + noise * np.abs(t)
            if not fmt.symmetric:
                allowed += 128 * noise + 0.5 * np.isin(result.codes, (-128, 127))
            assert (np.abs(x - result.dequantized()) <= allowed * scale).all()


@every_convention
@of_formats(STATIC)
def test_static_scales_saturate(fmt, convention):
    low, high = LOWEST[fmt.kind], LARGEST[fmt.kind]
    values = np.array([[high, 1.25 * high, 1000, 65000, -high, low, 1.25 * low, -1000, -65000, 0, 1]])
    for _, result in results((values / 4).astype(np.float16), fmt, convention, 0.25):
        assert result.codes.tolist() == [[high, high, high, high, -high, low, low, low, low, 0, 1]]
        assert result.scale.tolist() == [[0.25]]
        assert result.zero_point is None


@of_formats([INT8, INT4, INT8_GROUP, INT8_TENSOR])
def test_the_lowest_integer_is_upstreams_alone(fmt):
    lowest = {
        c: min(r.codes.min() for x, _ in problems(fmt) for _, r in results(x, fmt, c)) for c in CONVENTIONS
    }
    assert lowest == {"kernel": -LARGEST[fmt.kind], "compressed-tensors": LOWEST[fmt.kind]}


@every_convention
@of_formats(FORMATS)
def test_zeros_decode_to_zero(fmt, convention):
    for mixed, _ in problems(fmt, ["zero rows"]):
        mixed[:, :128] = 0  # a group of zeros
        for x in (mixed, np.zeros_like(mixed), np.full_like(mixed, -0.0)):
            dead = ~spread(alive(x, fmt), x) | (x == 0)
            for how, result in results(x, fmt, convention, scale_for(x, fmt, 0)):
                assert np.isfinite(result.scale).all()
                assert (result.dequantized()[dead] == 0).all()
                zero = 0 if fmt.symmetric else result.spread(result.zero_point)
                assert ((result.codes - zero)[dead] == 0).all()
                if convention == "kernel":
                    assert (result.scale[~alive(x, fmt)] == F32(how.floor)).all()


def test_scales_of_small_fp8_tokens():
    """One order has a floor under the scale, and divides by what it found."""
    x = np.array([[2.0**-20, -(2.0**-22)], [448 * 2.0**-19, -(2.0**-20)], [1.0, 0.5]]).astype(DTYPES["bf16"])
    legal = legal_quantizations(x, FP8_TOKEN, "kernel")
    plain, floored = (legal[f"amax / Q in fp32, x / s in fp32{end}"] for end in ("", ", floored scale"))
    assert np.array_equal(plain.scale[:, 0], (x[:, 0].astype(F32) / F32(448)).astype(np.float64))
    assert np.array_equal(floored.scale[:2], [[F32(FLOOR)]] * 2)
    assert floored.scale[2] == plain.scale[2]
    assert plain.codes.tolist() == [[448, -112], [448, -0.5], [448, 224]]
    # 2^-20 and 2^-22 are 0.21875 and a quarter of it in floors; 448 * 2^-19 is 196.
    assert floored.codes.tolist() == [[0.21875, -0.0546875], [192, -0.21875], [448, 224]]


def assert_same_results(ours, theirs, rows=slice(None), factor=1.0):
    for (how, a), (_, b) in zip(ours, theirs, strict=True):
        assert np.array_equal(a.codes[rows], b.codes[rows]), how.name
        assert np.array_equal(a.scale[rows], b.scale[rows] * factor), how.name
        assert a.zero_point is b.zero_point or np.array_equal(a.zero_point[rows], b.zero_point[rows]), (
            how.name
        )


@every_convention
@of_formats(BY_ROW)
def test_tokens_do_not_see_each_other(fmt, convention):
    for x, _ in problems(fmt, ["normal", "zero rows", "outliers"]):
        for row in (0, 3, 5):
            alone = np.repeat(x[row : row + 1], len(x), axis=0)
            assert_same_results(results(x, fmt, convention), results(alone, fmt, convention), [row])


@every_convention
@of_formats(DYNAMIC)
def test_a_power_of_two_goes_to_the_scale_alone(fmt, convention):
    for x, _ in problems(fmt, ["normal", "ties", "outliers", "one-sided"]):
        for factor in (2, 16):
            larger = x * x.dtype.type(factor)
            assert_same_results(results(larger, fmt, convention), results(x, fmt, convention), factor=factor)


@every_convention
@of_formats(FORMATS)
def test_no_tokens(fmt, convention):
    for _, result in results(np.zeros((0, 256), np.float16), fmt, convention, None if fmt.dynamic else 0.5):
        assert result.codes.shape == result.dequantized().shape == (0, 256)
        assert result.scale.shape == {"token": (0, 1), "tensor": (1, 1), "group": (0, 2)}[fmt.strategy]


# ---- what is refused


@every_convention
def test_groups_divide_the_columns(convention):
    with pytest.raises(TensorError, match=r"^x: groups of 128 do not divide K=200$"):
        legal_quantizations(np.ones((2, 200), np.float16), FP8_GROUP, convention)


@every_convention
@pytest.mark.parametrize("scale", [None, 0.0, -1.0, np.nan, np.inf, -np.inf])
@of_formats(STATIC)
def test_a_static_format_needs_a_positive_scale(fmt, scale, convention):
    message = r"^input_scale: .* is no positive scale; a static format needs one$"
    with pytest.raises(TensorError, match=message):
        legal_quantizations(np.ones((2, 4), np.float16), fmt, convention, scale)


def test_conventions_are_two():
    message = r"^quantizer: 'torch' is neither 'kernel' nor 'compressed-tensors'$"
    with pytest.raises(FormatError, match=message):
        legal_quantizations(np.ones((2, 4), np.float16), INT8, "torch")


@pytest.mark.parametrize("shape", [(4,), (1, 2, 4)])
@of_formats([INT8, INT8_ASYM])
def test_activations_are_a_matrix(fmt, shape):
    with pytest.raises(TensorError, match=r"^x: expected a matrix \[M, K\], found shape \[.*4\]$"):
        quantize(np.ones(shape, np.float16), fmt, Quantizer())


@every_convention
@pytest.mark.parametrize("args", [("fp8",), ("int4",), ("int8", "tensor"), ("int8", "group", 128)])
def test_only_int8_per_token_is_asymmetric(args, convention):
    fmt = ActivationFormat(args[0], False, True, *args[1:])
    message = rf"^activation format {fmt.name}: only int8 per token is asymmetric$"
    with pytest.raises(FormatError, match=message):
        legal_quantizations(np.ones((2, 128), np.float16), fmt, convention)


# ---- rounding to e4m3


def assert_rounds_as_a_cast(values):
    """Bits of e4m3, so that the sign of zero counts; what the cast makes NaN beyond the range saturates."""
    with np.errstate(invalid="ignore"):  # signalling NaNs are among all bits
        values = values.astype(F32)
        ours = round_to(values, E4M3)
    finite = np.abs(values) <= 448
    assert np.array_equal(ours[finite].astype(FP8).view(np.uint8), values[finite].astype(FP8).view(np.uint8))
    beyond = ~finite & ~np.isnan(values)
    assert np.array_equal(ours[beyond], np.copysign(448.0, values[beyond]))
    assert np.isnan(ours[np.isnan(values)]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_number_rounds_to_e4m3_as_a_cast(dtype):
    assert_rounds_as_a_cast(np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_numbers_of_e4m3_and_ties_between_them(sign):
    middle = boundaries("fp8")
    even = np.where(np.arange(middle.size) % 2 == 0, E4M3_GRID[:-1], E4M3_GRID[1:])
    assert_rounds_as_a_cast(sign * middle)
    for toward in (0, np.inf):  # neighbours of ties are no ties
        assert_rounds_as_a_cast(sign * np.nextafter(middle.astype(F32), F32(toward)))
    assert np.array_equal(round_to(sign * middle, E4M3), sign * even)
    assert np.array_equal(round_to(sign * np.nextafter(middle, 0), E4M3), sign * E4M3_GRID[:-1])
    assert np.array_equal(round_to(sign * np.nextafter(middle, np.inf), E4M3), sign * E4M3_GRID[1:])
    assert np.array_equal(round_to(sign * E4M3_GRID, E4M3), sign * E4M3_GRID)


def test_e4m3_saturates():
    values = np.array([448, 463.9, 464, 464.1, 480, 1e300, np.inf])
    assert round_to(np.stack([values, -values]), E4M3).tolist() == [[448.0] * 7, [-448.0] * 7]


def test_half_ulps_of_every_number_of_e4m3():
    values = np.concatenate([-E4M3_GRID[:0:-1], E4M3_GRID])
    gaps = np.diff(values, prepend=-480, append=480) / 2
    assert np.array_equal(half_ulps(values, E4M3), (gaps[:-1], gaps[1:]))
