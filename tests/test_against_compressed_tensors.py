"""The oracle and compressed-tensors give the same bits, and where they cannot, a test says so."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle import forward
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.formats import WeightFormat
from reference.layouts import layout
from reference.packing import pack, packed_size, unpack
from reference.rounding import float_format
from reference.weights import compute_qparams, dequantize, quantize, scale_shape

torch.set_num_threads(1)

BITS = range(1, 9)
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
SPANS = (("tensor", -1), ("channel", -1), ("group", 8), ("group", 32))
SYMMETRY = [pytest.param(True, id="sym"), pytest.param(False, id="asym")]


def search(examples):
    return settings(deadline=None, database=None, max_examples=examples)


def to_torch(array):
    """The same bytes as a tensor."""
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bits_of(array):
    """The bits as integers, so that -0 and +0 differ and NaN equals itself; takes tensors as well."""
    if isinstance(array, torch.Tensor):
        array = array.contiguous()
        array = (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
    return array.view(f"i{array.dtype.itemsize}")


def assert_same(ours, theirs, what=""):
    assert tuple(ours.shape) == tuple(theirs.shape), what
    a, b = bits_of(ours), bits_of(theirs)
    assert a.dtype == b.dtype, what
    assert np.array_equal(a, b), f"{what}: {int((a != b).sum())} of {a.size} differ"


# ---- packing


def codes_of(seed, bits, shape):
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return np.random.default_rng(seed).integers(low, high + 1, shape).astype(np.int8)


def assert_packs_the_same(codes, bits, dim):
    """dim counts inside the last two dimensions, as packed_dim does."""
    axis = dim - 2
    words = pack(codes, bits, axis)
    theirs = pack_to_int32(to_torch(codes), bits, packed_dim=dim)
    assert_same(words, theirs)
    if not upstream_cannot_unpack(codes.shape, bits, dim):
        assert_same(
            unpack(words, bits, codes.shape[axis], axis),
            unpack_from_int32(theirs, bits, torch.Size(codes.shape), packed_dim=dim),
        )
    assert np.array_equal(unpack(words, bits, codes.shape[axis], axis), codes)


def upstream_cannot_unpack(shape, bits, dim):
    """See test_upstream_fails_to_unpack_one_word_of_four_bits and ..._no_rows_of_four_bits."""
    packed, other = shape[-2:] if dim == 0 else shape[:-3:-1]
    one_word = dim == 0 and packed_size(packed, 4) <= 1 and other > 1
    return bits == 4 and (one_word or other == 0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1), (1, 5), (5, 1), (7, 31), (4, 32), (10, 33), (33, 10), (16, 250), (64, 256), (9, 0), (0, 9)),
        *((3, 10, 33), (2, 64, 32), (1, 1, 7), (2, 3, 9, 17)),
    ],
)
def test_pack_and_unpack(bits, dim, shape):
    assert_packs_the_same(codes_of([bits, dim], bits, shape), bits, dim)


@search(150)
@given(
    bits=st.integers(1, 8),
    dim=st.integers(0, 1),
    lead=st.lists(st.integers(1, 3), max_size=1),
    matrix=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    seed=st.integers(0, 2**32),
)
def test_pack_and_unpack_of_any_shape(bits, dim, lead, matrix, seed):
    assert_packs_the_same(codes_of(seed, bits, (*lead, *matrix)), bits, dim)


@pytest.mark.parametrize("bits", BITS)
def test_bits_after_the_last_code_are_ignored(bits):
    codes = codes_of(bits, bits, (3, 37))
    words = pack(codes, bits).view(np.uint32)
    words[:, -1] |= np.uint32(0xFFFFFFFF << (37 * bits % 32) & 0xFFFFFFFF if 37 * bits % 32 else 0)
    dirty = words.view(np.int32)
    assert_same(unpack(dirty, bits, 37), unpack_from_int32(to_torch(dirty), bits, torch.Size([3, 37])))
    assert np.array_equal(unpack(dirty, bits, 37), codes)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("n", [1, 8])
def test_upstream_fails_to_unpack_one_word_of_four_bits(n, columns):
    """A transposed single row of words is no byte view: zero points of N <= 8 rows do not load."""
    codes = codes_of(0, 4, (n, columns))
    words = pack_to_int32(to_torch(codes), 4, packed_dim=0)
    with pytest.raises(RuntimeError, match="stride"):
        unpack_from_int32(words, 4, torch.Size(codes.shape), packed_dim=0)
    assert np.array_equal(unpack(words.numpy(), 4, n, axis=0), codes)


@pytest.mark.parametrize(("shape", "dim"), [((0, 5), 1), ((50, 0), 0)])
def test_upstream_fails_to_unpack_no_rows_of_four_bits(shape, dim):
    words = pack_to_int32(torch.zeros(shape, dtype=torch.int8), 4, packed_dim=dim)
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        unpack_from_int32(words, 4, torch.Size(shape), packed_dim=dim)
    assert unpack(words.numpy(), 4, shape[dim], axis=dim).shape == shape


@pytest.mark.parametrize("dim", [0, 1])
def test_upstream_fails_to_pack_a_stack_of_no_experts(dim):
    with pytest.raises(RuntimeError, match="non-empty"):
        pack_to_int32(torch.zeros((0, 4, 5), dtype=torch.int8), 3, packed_dim=dim)
    assert pack(np.zeros((0, 4, 5), np.int8), 3, axis=dim - 2).shape[0] == 0


def test_upstream_packs_a_code_out_of_range_into_its_neighbour():
    words = pack_to_int32(torch.tensor([[8, 0, 0, 0]], dtype=torch.int8), 4)
    assert words.item() == 0x8890
    with pytest.raises(ValueError, match=r"8 at \[0, 0\]"):
        pack(np.array([[8, 0, 0, 0]], np.int8), 4)


# ---- scales and zero points


def formats(bits_range=BITS):
    for bits in bits_range:
        for strategy, size in SPANS:
            yield bits, strategy, size


def arguments(fmt):
    return QuantizationArgs(**fmt.to_quantization_args())


def their_extrema(weight, fmt):
    tensor = to_torch(weight)
    if fmt.strategy == "tensor":
        return tensor.amin().reshape(1), tensor.amax().reshape(1)
    grouped = tensor.unflatten(-1, (fmt.groups(weight.shape[1]), -1))
    return grouped.amin(-1), grouped.amax(-1)


def their_qparams(weight, fmt):
    return calculate_qparams(*their_extrema(weight, fmt), arguments(fmt))


def assert_qparams_agree(weight, fmt):
    scale, zero_point = compute_qparams(weight, fmt)
    their_scale, their_zero_point = their_qparams(weight, fmt)
    assert scale.shape == scale_shape(fmt, *weight.shape)
    assert_same(scale, their_scale, "scale")
    if fmt.symmetric:
        assert zero_point is None
        assert not their_zero_point.any()
    else:
        low, high = (t.float().numpy() for t in their_extrema(weight, fmt))
        defined = ~divides_zero_by_zero(np.minimum(low, 0), np.maximum(high, 0), weight.dtype, fmt.bits)
        assert zero_point.shape == scale.shape
        assert np.array_equal(zero_point[defined], their_zero_point.numpy()[defined])
    return scale, zero_point


def divides_zero_by_zero(low, high, dtype, bits):
    """Groups whose zero point is 0/0 upstream: all zeros, or no minimum and a scale that underflows."""
    scale = high.astype(dtype) / dtype.type((1 << bits) - 1)
    return (low == 0) & (scale.astype(np.float32) == 0)


KINDS = (
    "normal",
    "positive",
    "negative",
    "offset",
    "tiny",
    "subnormal",
    "huge",
    "sparse",
    "any bits",
    "ties",
)


def weights_of(kind, dtype, seed, shape):
    """A finite matrix of a float type, of a kind that reaches one corner of the arithmetic."""
    rng = np.random.default_rng(seed)
    form = float_format(dtype)
    if kind == "any bits":
        raw = rng.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8).view(dtype)[..., 0]
        return np.where(np.isfinite(raw.astype(np.float32)), raw, dtype.type(0))
    normal = rng.normal(0, 1, shape)
    values = {
        "normal": normal * 0.02,
        "positive": np.abs(normal) + 0.5,
        "negative": -np.abs(normal) - 0.5,
        "offset": normal + 3,
        "tiny": normal * 2.0 ** (form.emin + 2),
        "subnormal": normal * 2.0 ** (form.emin - 3),
        "huge": np.clip(normal * 0.4, -0.99, 0.99) * form.largest,
        "sparse": normal * (rng.random(shape) < 0.05),
        "ties": rng.integers(-16, 16, shape) / 2,
    }[kind]
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", SYMMETRY)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_and_zero_points(kind, symmetric, dtype):
    for turn, (bits, strategy, size) in enumerate(formats()):
        fmt = WeightFormat(bits, symmetric, size, strategy)
        assert_qparams_agree(weights_of(kind, DTYPES[dtype], turn, (9, 64)), fmt)


def assert_quantize_agrees(weight, fmt, scale, zero_point):
    quantized = quantize(weight, fmt, scale, zero_point)
    theirs = forward.quantize(
        to_torch(weight),
        to_torch(scale),
        None if zero_point is None else to_torch(zero_point),
        arguments(fmt),
        dtype=torch.int8,
    )
    assert_same(quantized.codes, theirs, "codes")
    return quantized


def assert_dequantize_agrees(quantized):
    zero_point = quantized.zero_point
    theirs = forward.dequantize(
        to_torch(quantized.codes),
        to_torch(quantized.scale),
        None if zero_point is None else to_torch(zero_point),
        arguments(quantized.format),
    )
    assert_same(dequantize(quantized), theirs, "weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", SYMMETRY)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_and_dequantize(kind, symmetric, dtype):
    for turn, (bits, strategy, size) in enumerate(formats()):
        fmt = WeightFormat(bits, symmetric, size, strategy)
        weight = weights_of(kind, DTYPES[dtype], turn, (9, 64))
        scale, zero_point = compute_qparams(weight, fmt)
        if np.isfinite(scale.astype(np.float32)).all():
            assert_dequantize_agrees(assert_quantize_agrees(weight, fmt, scale, zero_point))


@st.composite
def any_format(draw):
    strategy, size = draw(st.sampled_from([*SPANS, ("group", 1), ("group", 3), ("group", 5)]))
    return WeightFormat(draw(st.integers(1, 8)), draw(st.booleans()), size, strategy)


@st.composite
def any_weight(draw):
    """A format, and a matrix of few rows that it divides, in any float type."""
    fmt = draw(any_format())
    columns = draw(st.integers(1, 5)) * max(fmt.group_size, 1) if fmt.strategy == "group" else None
    shape = (draw(st.integers(1, 9)), columns or draw(st.integers(1, 70)))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    return fmt, weights_of(draw(st.sampled_from(KINDS)), dtype, draw(st.integers(0, 2**32)), shape)


@search(200)
@given(any_weight())
def test_the_whole_way_of_any_weight(problem):
    fmt, weight = problem
    scale, zero_point = assert_qparams_agree(weight, fmt)
    if np.isfinite(scale.astype(np.float32)).all():
        assert_dequantize_agrees(assert_quantize_agrees(weight, fmt, scale, zero_point))


@search(200)
@given(any_weight(), st.sampled_from(sorted(DTYPES)), st.integers(0, 2**32))
def test_scales_of_any_bits_and_another_type(problem, scale_dtype, seed):
    """Scales that no calibration makes: negative, subnormal, of another type than the weight."""
    fmt, weight = problem
    shape = scale_shape(fmt, *weight.shape)
    scale = weights_of("any bits", DTYPES[scale_dtype], seed, shape)
    scale = np.where(scale.astype(np.float32) == 0, DTYPES[scale_dtype].type(1), scale)
    zero_point = None if fmt.symmetric else codes_of(seed, fmt.bits, shape)
    assert_dequantize_agrees(assert_quantize_agrees(weight, fmt, scale, zero_point))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_groups_of_zeros_have_the_scale_eps_and_dequantize_to_zero(bits, dtype):
    """An asymmetric zero point is 0/0 upstream, cast to an integer: any code may come out."""
    weight = np.zeros((4, 64), DTYPES[dtype])
    weight[0, :32] = np.linspace(-1, 1, 32)
    for fmt in (WeightFormat(bits, s, 32, "group") for s in (True, False)):
        scale, zero_point = assert_qparams_agree(weight, fmt)
        assert (scale[1:] == torch.finfo(to_torch(weight).dtype).eps).all()
        if zero_point is not None:
            assert not zero_point[1:].any()
        quantized = assert_quantize_agrees(weight, fmt, scale, zero_point)
        assert not dequantize(quantized)[1:].any()
        for z in range(*fmt.code_range) if zero_point is not None else ():
            quantized = assert_quantize_agrees(weight, fmt, scale, np.full_like(zero_point, z))
            assert not dequantize(quantized)[1:].any()


def test_upstream_rounds_the_zero_point_of_a_scalar_range_differently():
    """Zero-dimensional extrema promote to float32 where one-element ones stay in bfloat16."""
    args = QuantizationArgs(num_bits=8, symmetric=False, strategy="tensor")
    low, high = torch.tensor(-0.6, dtype=torch.bfloat16), torch.tensor(254.0, dtype=torch.bfloat16)
    _, scalar = calculate_qparams(low, high, args)
    _, element = calculate_qparams(low.reshape(1), high.reshape(1), args)
    assert (scalar.item(), element.item()) == (-127, -128)
    weight = np.array([[-0.6, 254.0]], DTYPES["bf16"])
    assert compute_qparams(weight, WeightFormat(8, False, -1, "tensor"))[1].item() == -128


def test_a_range_beyond_float16_has_an_infinite_scale():
    weight = np.array([[-60000, 60000]], np.float16)
    scale, zero_point = assert_qparams_agree(weight, WeightFormat(4, False))
    assert np.isinf(scale).all()
    assert zero_point.item() == -8
    assert np.isfinite(compute_qparams(weight, WeightFormat(4, True))[0]).all()


# ---- whole checkpoints


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", SYMMETRY)
@pytest.mark.parametrize("bits", BITS)
def test_checkpoint_tensors(bits, symmetric, dtype):
    """compress() writes the tensors that ct-dense-le-v1 writes, and each reads what the other wrote."""
    for strategy, size, shape in (
        ("tensor", -1, (10, 33)),
        ("channel", -1, (10, 33)),
        ("channel", -1, (17, 250)),
        ("group", 32, (33, 96)),
        ("group", 8, (72, 40)),
    ):
        fmt = WeightFormat(bits, symmetric, size, strategy)
        weight = weights_of("normal", DTYPES[dtype], bits, shape)
        scale, zero_point = compute_qparams(weight, fmt)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments(fmt), format="pack-quantized")
        state = {"weight": to_torch(weight), "weight_scale": to_torch(scale)}
        if zero_point is not None:
            state["weight_zero_point"] = to_torch(zero_point)
        theirs = PackedQuantizationCompressor.compress(state, scheme)
        quantized = quantize(weight, fmt, scale, zero_point)
        ours = layout("ct-dense-le-v1").encode(quantized)
        assert set(theirs) == set(ours)
        for name, tensor in theirs.items():
            assert_same(ours[name], tensor, name)
        read = PackedQuantizationCompressor.decompress({k: to_torch(v) for k, v in ours.items()}, scheme)
        assert_same(dequantize(quantized), read["weight"], "decompressed")
        back = layout("ct-dense-le-v1").decode(ours, fmt)
        assert_same(back.codes, to_torch(quantized.codes))
        assert_same(dequantize(back), read["weight"])


def test_the_order_of_activations_is_no_part_of_a_checkpoint_of_today():
    """act-order "weight" changes nothing; what needed a g_idx is refused by both."""
    fmt = WeightFormat.of(4, 32, True)
    args = {**fmt.to_quantization_args(), "actorder": "weight"}
    assert QuantizationArgs(**args).actorder == "weight"
    assert WeightFormat.from_quantization_args(args) == fmt
    for order in ("group", "dynamic", True):
        with pytest.raises(ValueError, match="actorder"):
            QuantizationArgs(**{**args, "actorder": order})
        with pytest.raises(ValueError, match="actorder"):
            WeightFormat.from_quantization_args({**args, "actorder": order})


# ---- configurations


@pytest.mark.parametrize("symmetric", SYMMETRY)
@pytest.mark.parametrize(("bits", "strategy", "size"), list(formats()))
def test_formats_survive_quantization_args(bits, strategy, size, symmetric):
    fmt = WeightFormat(bits, symmetric, size, strategy)
    dumped = QuantizationArgs(**fmt.to_quantization_args()).model_dump()
    assert WeightFormat.from_quantization_args(dumped) == fmt


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_bits": 4},
        {"num_bits": 4, "group_size": -1},
        {"num_bits": 4, "group_size": 128},
        {"num_bits": 3, "strategy": "channel"},
        {"num_bits": 3, "strategy": "tensor", "symmetric": False},
        {"num_bits": 3, "strategy": "tensor", "group_size": -1},
    ],
)
def test_absent_fields_mean_what_upstream_infers(given):
    dumped = QuantizationArgs(**given).model_dump()
    assert WeightFormat.from_quantization_args(given) == WeightFormat.from_quantization_args(dumped)
    assert WeightFormat.from_quantization_args(given).strategy == dumped["strategy"]


@pytest.mark.parametrize("size", [0, -2])
def test_both_refuse_a_group_size_without_meaning(size):
    with pytest.raises(ValueError, match=r"[Gg]roup.size"):
        QuantizationArgs(num_bits=4, group_size=size)
    with pytest.raises(ValueError, match=r"^group_size: "):
        WeightFormat.from_quantization_args({"num_bits": 4, "group_size": size})


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_upstream_overlooks_a_group_size_of_zero_beside_a_strategy(strategy):
    args = {"num_bits": 4, "group_size": 0, "strategy": strategy}
    assert QuantizationArgs(**args).group_size == 0
    with pytest.raises(ValueError, match=r"^group_size: 0 is neither"):
        WeightFormat.from_quantization_args(args)
