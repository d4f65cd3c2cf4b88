"""Dense little-endian packing against big-integer bit streams (C10-C15)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.errors import FormatError, TensorError
from reference.packing import pack, packed_size, tail_bits, unpack

BITS = range(1, 9)

# One row of the codes 0, 1, 2, ... modulo 2^bits: (bits, how many, words), written out by hand.
GOLDEN = [
    (1, 32, "aaaaaaaa"),
    (1, 33, "aaaaaaaa 00000000"),
    (2, 33, "e4e4e4e4 e4e4e4e4 00000000"),
    (3, 5, "00004688"),
    (3, 11, "88fac688 00000000"),
    (3, 32, "88fac688 c688fac6 fac688fa"),
    (4, 9, "76543210 00000008"),
    (5, 7, "8a418820 00000001"),
    (6, 6, "440c2040 00000001"),
    (7, 5, "40608080 00000000"),
    (8, 5, "03020100 00000004"),
]


def stream_words(codes, bits):
    """The words of one row: a single integer whose bits are the stream, cut every 32 bits."""
    stream = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    return [(stream >> (32 * j)) & 0xFFFFFFFF for j in range((len(codes) * bits + 31) // 32)]


def stream_pack(codes, bits, axis):
    """stream_words along one axis of unsigned codes of any shape."""
    moved = np.moveaxis(np.asarray(codes, dtype=object), axis, -1)
    out = np.zeros((*moved.shape[:-1], (moved.shape[-1] * bits + 31) // 32), np.uint32)
    for index in np.ndindex(*moved.shape[:-1]):
        out[index] = stream_words(moved[index], bits)
    return np.moveaxis(out, -1, axis)


def uniform(rng, bits, shape):
    return rng.integers(0, 1 << bits, shape).astype(np.uint8)


def signed(codes, bits):
    return (codes.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


@pytest.mark.parametrize(("bits", "n", "words"), GOLDEN)
def test_golden_rows(bits, n, words):
    codes = (np.arange(n) % (1 << bits)).astype(np.uint8)
    assert [f"{w:08x}" for w in pack(codes, bits).view(np.uint32)] == words.split()


@pytest.mark.parametrize(("bits", "n", "words"), GOLDEN)
def test_golden_rows_read_back(bits, n, words):
    stored = np.array([int(w, 16) for w in words.split()], np.uint32).view(np.int32)
    assert unpack(stored, bits, n, signed=False).tolist() == [i % (1 << bits) for i in range(n)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 9, 10, 11, 31, 32, 33, 63, 64, 65, 96, 127, 250, 256])
def test_rows_are_the_bit_stream(bits, n):
    codes = uniform(np.random.default_rng([bits, n]), bits, (3, n))
    words = pack(codes, bits)
    assert words.dtype == np.int32
    assert words.view(np.uint32).tolist() == [stream_words(row, bits) for row in codes]
    assert unpack(words, bits, n, signed=False).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_signed_codes_are_stored_with_an_offset(bits, axis):
    codes = uniform(np.random.default_rng(bits), bits, (37, 41))
    words = pack(signed(codes, bits), bits, axis)
    assert np.array_equal(words.view(np.uint32), stream_pack(codes, bits, axis))
    back = unpack(words, bits, codes.shape[axis], axis)
    assert back.dtype == np.int8
    assert np.array_equal(back, signed(codes, bits))


@settings(deadline=None, database=None, max_examples=150)
@given(data=st.data())
def test_any_shape_and_axis(data):
    bits = data.draw(st.integers(1, 8))
    shape = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=2)))
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2))) + shape
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    codes = uniform(np.random.default_rng(data.draw(st.integers(0, 2**32))), bits, shape)
    words = pack(codes, bits, axis)
    assert np.array_equal(words.view(np.uint32), stream_pack(codes, bits, axis))
    assert words.flags.c_contiguous
    assert np.array_equal(unpack(words, bits, shape[axis], axis, signed=False), codes)
    assert np.array_equal(pack(signed(codes, bits), bits, axis), words)


@pytest.mark.parametrize("bits", BITS)
def test_a_single_code_touches_only_its_own_bits(bits):
    n = 67
    for i in range(n):
        codes = np.zeros(n, np.uint8)
        codes[i] = (1 << bits) - 1
        stream = int.from_bytes(pack(codes, bits).tobytes(), "little")
        assert stream == ((1 << bits) - 1) << (bits * i)


@pytest.mark.parametrize("bits", BITS)
def test_a_single_bit_is_read_by_only_its_own_code(bits):
    n = 45
    for j in range(packed_size(n, bits) * 32):
        words = np.frombuffer((1 << j).to_bytes(4 * packed_size(n, bits), "little"), np.int32)
        codes = unpack(words, bits, n, signed=False)
        expected = np.zeros(n, np.uint8)
        if j < n * bits:
            expected[j // bits] = 1 << (j % bits)
        assert np.array_equal(codes, expected), j


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [1, 5, 31, 33, 250])
def test_unused_bits_are_written_as_zero_and_not_read(bits, n):
    codes = np.full((2, n), (1 << bits) - 1, np.uint8)
    words = pack(codes, bits)
    assert not tail_bits(words, bits, n).any()
    used = n * bits % 32
    dirty = words.copy().view(np.uint32)
    if used:
        dirty[:, -1] |= np.uint32((0xFFFFFFFF << used) & 0xFFFFFFFF)
        assert tail_bits(dirty.view(np.int32), bits, n).tolist() == [(1 << (32 - used)) - 1] * 2
    assert np.array_equal(unpack(dirty.view(np.int32), bits, n, signed=False), codes)


def test_tail_bits_along_the_first_axis_and_of_nothing():
    words = pack(np.full((5, 3), 7, np.uint8), 3, axis=0)
    words[-1, 1] |= 1 << 20
    assert tail_bits(words, 3, 5, axis=0).tolist() == [0, 1 << 5, 0]
    assert tail_bits(np.zeros((2, 0), np.int32), 3, 0).tolist() == [0, 0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (0, 4, 5), (3, 4, 0)])
def test_empty_tensors(bits, shape):
    for axis in range(len(shape)):
        words = pack(np.zeros(shape, np.int8), bits, axis)
        expected = list(shape)
        expected[axis] = packed_size(shape[axis], bits)
        assert words.shape == tuple(expected)
        assert unpack(words, bits, shape[axis], axis).shape == shape


@pytest.mark.parametrize("bits", BITS)
def test_stacks_are_packed_slice_by_slice(bits):
    codes = uniform(np.random.default_rng(bits), bits, (2, 3, 10, 33))
    for axis in (-1, -2):
        words = pack(codes, bits, axis)
        for index in np.ndindex(2, 3):
            assert np.array_equal(words[index], pack(codes[index], bits, axis))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_strided_inputs_are_read_in_place(bits, axis):
    full = uniform(np.random.default_rng(bits), bits, (80, 90))
    for view in (full.T, full[::2, 1::3], full[::-1, ::-1], np.asfortranarray(full)):
        plain = np.ascontiguousarray(view)
        words = pack(view, bits, axis)
        assert np.array_equal(words, pack(plain, bits, axis))
        spread = np.zeros((2 * words.shape[0], 2 * words.shape[1]), np.int32)
        spread[::2, ::2] = words
        assert np.array_equal(unpack(spread[::2, ::2], bits, view.shape[axis], axis, signed=False), plain)


@pytest.mark.parametrize("bits", BITS)
def test_inputs_are_not_modified_and_not_shared(bits):
    codes = uniform(np.random.default_rng(bits), bits, (64, 96))
    codes.flags.writeable = False
    words = pack(codes, bits)
    before = words.copy()
    words.flags.writeable = False
    back = unpack(words, bits, 96, signed=False)
    assert not np.shares_memory(words, codes)
    assert not np.shares_memory(back, words)
    assert np.array_equal(words, before)
    assert np.array_equal(back, codes)


@pytest.mark.parametrize("bits", range(1, 8))
def test_the_first_code_out_of_range_is_named(bits):
    high = (1 << (bits - 1)) - 1
    codes = np.zeros((4, 40), np.int8)
    codes[2, 7], codes[3, 1] = high + 1, -high - 2
    with pytest.raises(
        TensorError, match=rf"^codes: {high + 1} at \[2, 7\] is outside {-high - 1}..{high}, "
    ):
        pack(codes, bits)
    codes[1, 39] = -high - 2
    with pytest.raises(TensorError, match=rf"^codes: {-high - 2} at \[1, 39\] "):
        pack(codes, bits, axis=0)


@pytest.mark.parametrize("bits", range(1, 8))
def test_unsigned_codes_out_of_range_are_named(bits):
    codes = np.zeros(9, np.uint8)
    codes[8] = 1 << bits
    with pytest.raises(TensorError, match=rf"{1 << bits} at \[8\] is outside 0..{(1 << bits) - 1}"):
        pack(codes, bits)


def test_every_byte_is_a_code_of_eight_bits():
    codes = np.arange(-128, 128).astype(np.int8)
    assert np.array_equal(unpack(pack(codes, 8), 8, 256), codes)


@pytest.mark.parametrize("bits", [0, 9, -1, 4.0, "4", True, None])
def test_widths_outside_one_to_eight_are_refused(bits):
    for call in (
        lambda: packed_size(5, bits),
        lambda: pack(np.zeros(5, np.int8), bits),
        lambda: unpack(np.zeros(1, np.int32), bits, 5),
    ):
        with pytest.raises(FormatError, match=r"^num_bits: "):
            call()


@pytest.mark.parametrize("codes", [np.zeros(4, np.int16), np.zeros(4, np.float32), np.zeros(4, bool), [1]])
def test_codes_of_another_type_are_refused(codes):
    with pytest.raises(TensorError, match=r"^codes: expected an int8 or uint8 array, found "):
        pack(codes, 4)


@pytest.mark.parametrize("words", [np.zeros(1, np.int64), np.zeros(1, np.uint8), np.zeros(1, np.float16), 0])
def test_words_of_another_type_are_refused(words):
    with pytest.raises(TensorError, match=r"^words: expected an int32 array, found "):
        unpack(words, 4, 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("surplus", [-1, 1])
def test_a_wrong_number_of_words_is_refused(bits, surplus):
    n = 250
    words = np.zeros((2, packed_size(n, bits) + surplus), np.int32)
    with pytest.raises(TensorError, match=rf"ceil\({n}\*{bits}/32\) = {packed_size(n, bits)} words"):
        unpack(words, bits, n)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_does_not_exist_is_refused(axis):
    with pytest.raises(TensorError, match=rf"^codes: axis {axis} does not exist"):
        pack(np.zeros((2, 3), np.int8), 4, axis)
    with pytest.raises(TensorError, match=rf"^words: axis {axis} does not exist"):
        unpack(np.zeros((2, 3), np.int32), 4, 24, axis)
    with pytest.raises(TensorError, match="axis -1 does not exist"):
        pack(np.array(1, np.int8), 4)


@pytest.mark.parametrize("bits", BITS)
def test_packed_size_is_exact_for_any_size(bits):
    for n in (0, 1, 31, 32, 33, 2**31, 2**53 + 1, 2**60 + 1, 10**30 + 7):
        size = packed_size(n, bits)
        assert isinstance(size, int)
        assert 32 * (size - 1) < n * bits <= 32 * size or n == size == 0
    with pytest.raises(TensorError, match="-1 codes"):
        packed_size(-1, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "n"), [(9001, 33), (9001, 32), (3, 2**18 + 5)])
def test_rows_do_not_depend_on_the_rows_before_them(bits, rows, n):
    """More rows than one block of work, and rows longer than one."""
    codes = uniform(np.random.default_rng(bits), bits, (rows, n))
    words = pack(codes, bits)
    for i in (0, 1, rows // 2, rows - 1):
        assert np.array_equal(words[i], pack(codes[i], bits))
    assert not tail_bits(words, bits, n).any()
    assert np.array_equal(unpack(words, bits, n, signed=False), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_memory_stays_within_three_times_the_codes(bits, axis):
    codes = np.zeros((2048, 2048), np.int8)
    words = pack(codes, bits, axis)

    def peak(call):
        tracemalloc.start()
        try:
            result = call()
            return tracemalloc.get_traced_memory()[1] - result.nbytes
        finally:
            tracemalloc.stop()

    assert peak(lambda: pack(codes, bits, axis)) <= 3 * codes.nbytes
    assert peak(lambda: unpack(words, bits, 2048, axis)) <= 3 * codes.nbytes
