"""Checkpoint layouts against bit-by-bit models of GPTQ, AWQ and compressed-tensors (C10-C19)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.errors import FormatError, QuantizationError, TensorError
from reference.formats import WeightFormat
from reference.layouts import LAYOUTS, layout
from reference.weights import QuantizedWeight, dequantize, scale_shape

DENSE = ("ct-dense-le-v1", "ct-aligned-le-v0")
GPTQ = ("gptq-v1", "gptq-v2")


def weight_of(fmt, n, k, seed=0, index=None):
    """A random weight; zero points leave out the lowest code, which gptq-v1 cannot store."""
    rng = np.random.default_rng(seed)
    low, high = fmt.code_range
    shape = scale_shape(fmt, n, k)
    codes = rng.integers(low, high + 1, (n, k)).astype(np.int8)
    scale = np.exp2(rng.normal(0, 1, shape)).astype(np.float16)
    zeros = None if fmt.symmetric else rng.integers(low + 1, high + 1, shape).astype(np.int8)
    return QuantizedWeight(fmt, codes, scale, zeros, index)


def assert_equal(a, b):
    assert a.format == b.format
    assert np.array_equal(a.codes, b.codes)
    assert np.array_equal(a.scale, b.scale)
    assert (a.zero_point is None) == (b.zero_point is None)
    assert a.zero_point is None or np.array_equal(a.zero_point, b.zero_point)
    assert np.array_equal(a.groups(), b.groups())


def unsigned(values, fmt):
    return values.astype(int) + fmt.offset


def dense_words(codes, bits):
    """The little-endian stream of one run of unsigned codes."""
    stream = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    return [(stream >> (32 * j)) & 0xFFFFFFFF for j in range(-(-len(codes) * bits // 32))]


def aligned_words(codes, bits):
    """floor(32 / bits) codes a word, none of them across two."""
    factor = 32 // bits
    runs = [codes[i : i + factor] for i in range(0, len(codes), factor)]
    return [sum(int(code) << (bits * i) for i, code in enumerate(run)) for run in runs]


def columns(words_of, matrix, bits):
    """words_of for every column of an unsigned matrix: the words run along the first axis."""
    return np.array([words_of(column, bits) for column in matrix.T], np.uint32).T


def rows(words_of, matrix, bits):
    return np.array([words_of(row, bits) for row in matrix], np.uint32)


# ---- compressed-tensors


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("name", "words_of"), [(DENSE[0], dense_words), (DENSE[1], aligned_words)])
@pytest.mark.parametrize(("size", "n", "k"), [(-1, 10, 33), (-1, 7, 250), (32, 33, 96)])
def test_compressed_tensors_layouts_bit_by_bit(name, words_of, bits, size, n, k):
    weight = weight_of(WeightFormat.of(bits, size, False), n, k)
    tensors = layout(name).encode(weight)
    fmt = weight.format
    assert sorted(tensors) == ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]
    assert np.array_equal(
        tensors["weight_packed"].view(np.uint32), rows(words_of, unsigned(weight.codes, fmt), bits)
    )
    assert np.array_equal(
        tensors["weight_zero_point"].view(np.uint32),
        columns(words_of, unsigned(weight.zero_point, fmt), bits),
    )
    assert tensors["weight_shape"].tolist() == [n, k]
    assert_equal(layout(name).decode(tensors, fmt), weight)


@pytest.mark.parametrize("bits", range(1, 9))
def test_dense_and_aligned_words_differ_where_codes_straddle(bits):
    weight = weight_of(WeightFormat.of(bits, 32, False), 33, 96)
    dense, aligned = (layout(name).encode(weight) for name in DENSE)
    same = all(np.array_equal(dense[name], aligned[name]) for name in dense)
    assert same == (bits in (1, 2, 4, 8))


@pytest.mark.parametrize(("bits", "k"), [(3, 20), (5, 12), (6, 10), (7, 8)])
def test_where_both_have_as_many_words_only_the_name_tells(bits, k):
    """Neither a shape nor an error says that the wrong layout read the tensors."""
    weight = weight_of(WeightFormat.of(bits, -1, True), 4, k)
    dense, aligned = (layout(name) for name in DENSE)
    tensors = dense.encode(weight)
    assert (
        tensors["weight_packed"].shape
        == aligned.encode(weight)["weight_packed"].shape
        == (4, -(-k * bits // 32))
    )
    assert not np.array_equal(aligned.decode(tensors, weight.format).codes, weight.codes)


@pytest.mark.parametrize("name", DENSE)
def test_zero_points_of_a_whole_tensor_are_not_packed(name):
    weight = weight_of(WeightFormat(4, False, -1, "tensor"), 10, 33)
    tensors = layout(name).encode(weight)
    assert np.array_equal(tensors["weight_zero_point"], weight.zero_point)
    assert_equal(layout(name).decode(tensors, weight.format), weight)


@pytest.mark.parametrize("name", DENSE)
def test_a_group_index_travels_with_compressed_tensors(name):
    index = np.random.default_rng(0).permutation(np.arange(64) // 8).astype(np.int32)
    weight = weight_of(WeightFormat.of(3, 8, False), 10, 64, index=index)
    tensors = layout(name).encode(weight)
    assert np.array_equal(tensors["weight_g_idx"], index)
    assert_equal(layout(name).decode(tensors, weight.format), weight)


# ---- GPTQ


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [-1, 32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("name", "minus"), [("gptq-v1", 1), ("gptq-v2", 0)])
def test_gptq_bit_by_bit(name, minus, bits, size, symmetric):
    weight = weight_of(WeightFormat.of(bits, size, symmetric), 64, 96)
    fmt = weight.format
    tensors = layout(name).encode(weight)
    codes = unsigned(weight.codes, fmt).T
    zeros = np.zeros(weight.scale.shape, int) if symmetric else weight.zero_point
    stored = unsigned(zeros, fmt).T - minus
    assert sorted(tensors) == ["g_idx", "qweight", "qzeros", "scales"]
    assert np.array_equal(tensors["qweight"].view(np.uint32), columns(dense_words, codes, bits))
    assert np.array_equal(tensors["qzeros"].view(np.uint32), rows(dense_words, stored, bits))
    assert np.array_equal(tensors["scales"], weight.scale.T)
    assert tensors["g_idx"].tolist() == [k // (size if size > 0 else 96) for k in range(96)]
    assert {tensors[n].dtype for n in ("qweight", "qzeros", "g_idx")} == {np.dtype(np.int32)}
    assert_equal(layout(name).decode(tensors, fmt), weight)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_element_k_lies_in_word_k_over_the_pack_factor(bits):
    weight = weight_of(WeightFormat.of(bits, -1, True), 32, 64)
    qweight = layout("gptq-v2").encode(weight)["qweight"].view(np.uint32)
    factor, codes = 32 // bits, unsigned(weight.codes, weight.format)
    for k in range(64):
        field = qweight[k // factor] >> np.uint32(k % factor * bits) & np.uint32(2**bits - 1)
        assert np.array_equal(field, codes[:, k])


def test_gptq_symmetric_zero_points_are_constant_words():
    weight = weight_of(WeightFormat.of(4, 32, True), 64, 96)
    for name, word in (("gptq-v1", 0x77777777), ("gptq-v2", 0x88888888)):
        tensors = layout(name).encode(weight)
        assert (tensors["qzeros"].view(np.uint32) == word).all()
        tensors["qzeros"][1, 3] ^= 1 << 8
        with pytest.raises(TensorError, match=r"^qzeros: a symmetric format of 4 bits has the zero point 8"):
            layout(name).decode(tensors, weight.format)


def test_gptq_versions_differ_by_one_zero_point():
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    tensors = layout("gptq-v2").encode(weight)
    tensors["qzeros"] &= 0x77777777
    read = layout("gptq-v1").decode(tensors, weight.format)
    other = layout("gptq-v2").decode(tensors, weight.format)
    assert np.array_equal(read.zero_point, other.zero_point + 1)
    assert np.array_equal(read.codes, other.codes)


def test_gptq_v1_cannot_store_the_lowest_zero_point():
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    weight.zero_point[5, 1] = -8
    with pytest.raises(TensorError, match=r"^zero_point: .* no code for -8; use gptq-v2"):
        layout("gptq-v1").encode(weight)
    assert_equal(layout("gptq-v2").decode(layout("gptq-v2").encode(weight), weight.format), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_v1_refuses_the_stored_value_that_readers_disagree_on(bits):
    weight = weight_of(WeightFormat.of(bits, 32, False), 64, 96)
    tensors = layout("gptq-v1").encode(weight)
    tensors["qzeros"][0, 0] |= 2**bits - 1
    with pytest.raises(TensorError, match=rf"^qzeros: the stored value {2**bits - 1} of gptq-v1"):
        layout("gptq-v1").decode(tensors, weight.format)


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_group_index_in_any_order(name):
    index = np.random.default_rng(0).permutation(np.arange(96) // 32).astype(np.int32)
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96, index=index)
    tensors = layout(name).encode(weight)
    assert np.array_equal(tensors["g_idx"], index)
    back = layout(name).decode(tensors, weight.format)
    assert_equal(back, weight)
    assert np.array_equal(dequantize(back), dequantize(weight))


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_regular_group_index_is_no_act_order(name):
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    assert layout(name).decode(layout(name).encode(weight), weight.format).group_index is None


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_short_last_group(name):
    fmt = WeightFormat(4, False, 32, "group", short_last_group=True)
    weight = weight_of(fmt, 64, 72)
    tensors = layout(name).encode(weight)
    assert tensors["scales"].shape == (3, 64)
    assert tensors["g_idx"].tolist() == [k // 32 for k in range(72)]
    assert_equal(layout(name).decode(tensors, fmt), weight)
    with pytest.raises(FormatError, match=r"^group_size: 32 does not divide K=72"):
        layout(name).decode(tensors, WeightFormat.of(4, 32, False))


@pytest.mark.parametrize("name", [*GPTQ, "awq-gemm"])
def test_one_scale_for_the_whole_tensor_is_written_a_row(name):
    weight = weight_of(WeightFormat(4, False, -1, "tensor"), 64, 96)
    tensors = layout(name).encode(weight)
    assert tensors["scales"].shape == (1, 64)
    read = layout(name).decode(tensors, WeightFormat(4, False))
    assert np.array_equal(dequantize(read), dequantize(weight))


# ---- AWQ


def test_awq_nibble_by_nibble():
    """The published order: the nibbles of a word hold columns 0, 2, 4, 6, 1, 3, 5, 7, lowest first."""
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    fmt = weight.format
    tensors = layout("awq-gemm").encode(weight)
    codes, zeros = unsigned(weight.codes, fmt), unsigned(weight.zero_point, fmt)
    assert sorted(tensors) == ["qweight", "qzeros", "scales"]
    assert tensors["qweight"].shape == (96, 8)
    assert tensors["qzeros"].shape == (3, 8)
    for position, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        for name, values in (("qweight", codes), ("qzeros", zeros)):
            field = tensors[name].view(np.uint32) >> np.uint32(4 * position) & np.uint32(15)
            assert np.array_equal(field, values[column::8].T)
    assert_equal(layout("awq-gemm").decode(tensors, fmt), weight)


def test_awq_word_by_hand():
    weight = weight_of(WeightFormat.of(4, -1, False), 8, 1)
    weight.codes[:, 0] = np.arange(8) - 8
    assert f"{layout('awq-gemm').encode(weight)['qweight'].item():08x}" == "75316420"


def test_awq_against_the_converter_of_compressed_tensors():
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    tensors = layout("awq-gemm").encode(weight)
    converter = AutoAWQConverter(bits=4, group_size=32)
    converted = converter.process({f"layer.{n}": torch.from_numpy(t.copy()) for n, t in tensors.items()})
    dense = layout("ct-dense-le-v1").encode(weight)
    assert set(converted) == {f"layer.{name}" for name in dense}
    for name, tensor in dense.items():
        assert np.array_equal(converted[f"layer.{name}"].numpy(), tensor), name


def test_awq_is_asymmetric_and_knows_no_act_order():
    symmetric = weight_of(WeightFormat.of(4, 32, True), 64, 96)
    with pytest.raises(FormatError, match=r"^layout: awq-gemm is asymmetric"):
        layout("awq-gemm").encode(symmetric)
    with pytest.raises(FormatError, match=r"^symmetric: awq-gemm always stores zero points"):
        layout("awq-gemm").decode({}, symmetric.format)
    index = np.random.default_rng(0).permutation(np.arange(96) // 32).astype(np.int32)
    with pytest.raises(FormatError, match=r"no g_idx"):
        layout("awq-gemm").encode(weight_of(WeightFormat.of(4, 32, False), 64, 96, index=index))


# ---- every layout


@st.composite
def encodings(draw):
    name = draw(st.sampled_from(sorted(LAYOUTS)))
    bits = draw(st.sampled_from(LAYOUTS[name].bits))
    size = draw(st.sampled_from([-1, 8, 32]))
    whole = name not in DENSE
    n = draw(st.integers(1, 3)) * 32 if whole else draw(st.integers(1, 70))
    k = draw(st.integers(1, 4)) * 32 if whole or size > 0 else draw(st.integers(1, 70))
    symmetric = name != "awq-gemm" and draw(st.booleans())
    return name, weight_of(WeightFormat.of(bits, size, symmetric), n, k, draw(st.integers(0, 2**32)))


@settings(deadline=None, database=None, max_examples=150)
@given(encodings())
def test_every_layout_reads_what_it_wrote(problem):
    name, weight = problem
    tensors = layout(name).encode(weight)
    assert_equal(layout(name).decode(tensors, weight.format), weight)
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())


def test_layouts_are_found_by_name_only():
    assert set(LAYOUTS) == {*DENSE, *GPTQ, "awq-gemm"}
    with pytest.raises(FormatError, match=r"^layout: unknown name 'gptq'; known: ct-dense-le-v1, .*awq-gemm"):
        layout("gptq")


@pytest.mark.parametrize(("name", "bits"), [("awq-gemm", 8), ("gptq-v1", 5), ("gptq-v2", 6)])
def test_widths_without_a_layout_are_refused(name, bits):
    fmt = WeightFormat.of(bits, 32, False)
    for call in (lambda: layout(name).encode(weight_of(fmt, 64, 96)), lambda: layout(name).decode({}, fmt)):
        with pytest.raises(
            FormatError, match=rf"^num_bits: layout {name} is defined for .* bits, not {bits}"
        ):
            call()


@pytest.mark.parametrize("name", GPTQ)
@pytest.mark.parametrize(("n", "k", "axis"), [(64, 92, "K=92"), (60, 96, "N=60")])
def test_gptq_needs_whole_words(name, n, k, axis):
    with pytest.raises(TensorError, match=rf"^codes: {axis} of 4 bits does not fill"):
        layout(name).encode(weight_of(WeightFormat.of(4, -1, False), n, k))


TENSORS = [(name, tensor) for name in DENSE for tensor in ("packed", "scale", "zero_point", "shape")]
TENSORS = [(name, f"weight_{tensor}") for name, tensor in TENSORS]
TENSORS += [(name, tensor) for name in GPTQ for tensor in ("qweight", "qzeros", "scales", "g_idx")]
TENSORS += [("awq-gemm", tensor) for tensor in ("qweight", "qzeros", "scales")]


def damaged(tensor):
    """A tensor that is missing, of another type, or of another shape in each of its dimensions."""
    yield None
    yield tensor.astype(np.float64)
    yield tensor[None]
    yield tensor[0]
    for axis in range(tensor.ndim):
        yield np.concatenate([tensor, tensor.take([0], axis)], axis)
        yield np.ascontiguousarray(tensor.take(range(tensor.shape[axis] - 1), axis))


@pytest.mark.parametrize(("name", "victim"), TENSORS)
def test_every_decode_error_names_a_tensor(name, victim):
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    good = layout(name).encode(weight)
    assert_equal(layout(name).decode(good, weight.format), weight)
    for turn, tensor in enumerate(damaged(good[victim])):
        tensors = {k: v for k, v in good.items() if k != victim}
        if tensor is not None:
            tensors[victim] = tensor
        with pytest.raises(QuantizationError) as caught:
            layout(name).decode(tensors, weight.format)
        accused = str(caught.value).split(":")[0]
        assert accused in {*good, "group_size"}, (turn, caught.value)
        if turn < 4:
            assert accused == victim, (turn, caught.value)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_no_numbers_name_their_tensor(name, value):
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    tensors = layout(name).encode(weight)
    victim = "weight_scale" if name in DENSE else "scales"
    tensors[victim] = tensors[victim].copy()
    tensors[victim][2, 1] = value
    with pytest.raises(TensorError, match=rf"^{victim}: {value} at \[2, 1\] is not a finite number"):
        layout(name).decode(tensors, weight.format)


@pytest.mark.parametrize(("name", "victim"), [(DENSE[0], "weight_g_idx"), ("gptq-v1", "g_idx")])
def test_group_indices_without_a_group_name_their_tensor(name, victim):
    index = np.random.default_rng(0).permutation(np.arange(96) // 32).astype(np.int32)
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96, index=index)
    tensors = layout(name).encode(weight)
    tensors[victim] = tensors[victim].copy()
    tensors[victim][7] = 3
    with pytest.raises(TensorError, match=rf"^{victim}: 3 at \[7\] is outside 0..2"):
        layout(name).decode(tensors, weight.format)


@pytest.mark.parametrize("name", DENSE)
def test_a_zero_point_of_a_whole_tensor_out_of_range_names_its_tensor(name):
    weight = weight_of(WeightFormat(4, False, -1, "tensor"), 10, 33)
    tensors = layout(name).encode(weight) | {"weight_zero_point": np.array([8], np.int8)}
    with pytest.raises(TensorError, match=r"^weight_zero_point: 8 at \[0\] is outside -8..7"):
        layout(name).decode(tensors, weight.format)


@pytest.mark.parametrize("shape", [[-64, 96], [64, -96]])
def test_a_negative_weight_shape_is_refused(shape):
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    tensors = layout("ct-dense-le-v1").encode(weight) | {"weight_shape": np.array(shape)}
    with pytest.raises(TensorError, match=r"^weight_shape: "):
        layout("ct-dense-le-v1").decode(tensors, weight.format)


def test_zero_points_of_a_symmetric_format_are_refused():
    weight = weight_of(WeightFormat.of(4, 32, False), 64, 96)
    tensors = layout("ct-dense-le-v1").encode(weight)
    with pytest.raises(TensorError, match=r"^weight_zero_point: present although the format is symmetric"):
        layout("ct-dense-le-v1").decode(tensors, WeightFormat.of(4, 32, True))
