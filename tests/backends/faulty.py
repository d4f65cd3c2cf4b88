"""Deliberately wrong backends: the oracle's own backend with one fault each.

`FAULTS` names them; `faulty.py:<name>` makes one. Each is a fault that released kernels have had.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest

from conformance.backend import Support
from conformance.backends.numpy import NumpyBackend
from reference.bounds import Contract
from reference.formats import ActivationFormat, WeightFormat
from reference.layouts import layout
from reference.linear import linear as oracle_linear
from reference.packing import pack, unpack
from reference.rounding import float_format, round_to
from reference.weights import dequantize

FAULTS = {}


def fault(cls):
    FAULTS[cls.__name__] = cls
    cls.name = cls.__name__
    return cls


class Wrong(NumpyBackend):
    """Where a fault can be put: the decoded weight, its matrix, the activations, the bias."""

    def weight(self, weight):
        return weight

    def matrix(self, matrix):
        return matrix

    def activations(self, x):
        return x

    def bias(self, bias):
        return bias

    def decode(self, checkpoint):
        fmt = WeightFormat.from_quantization_args(checkpoint.weights)
        return self.weight(layout("ct-dense-le-v1").decode(checkpoint.tensors, fmt))

    def dequantize(self, checkpoint):
        return self.matrix(dequantize(self.decode(checkpoint)))

    def load_linear(self, checkpoint):
        matrix = self.dequantize(checkpoint).astype(np.float32)
        bias = self.bias(checkpoint.tensors.get("bias"))
        output = float_format(checkpoint.dtype)
        fmt = ActivationFormat.from_quantization_args(checkpoint.input_activations)

        def linear(x):
            values = x.astype(np.float32)
            if fmt.kind != "a16":
                values = self._quantized([x], fmt, None).dequantized().astype(np.float32)
            y = self.activations(values) @ matrix.T
            if bias is not None:
                y = y + bias.astype(np.float32)
            return round_to(y, output).astype(output.dtype)

        return linear


@fault
class no_fault(Wrong):
    pass


# ---- packing


@fault
class floor_words(Wrong):
    def pack(self, codes, bits, axis):
        words = pack(codes, bits, axis)
        return np.take(words, range(codes.shape[axis] * bits // 32), axis=axis)


@fault
class last_partial_word_unread(Wrong):
    """What a loader that floors the word count sees: zero bits beyond the whole words."""

    def weight(self, weight):
        bits = weight.format.bits
        whole = weight.k * bits // 32
        words = pack(weight.codes, bits)
        words[:, whole:] = 0
        return replace(weight, codes=unpack(words, bits, weight.k))


@fault
class straddling_bits_dropped_for_3_bits(Wrong):
    def weight(self, weight):
        if weight.format.bits != 3:
            return weight
        codes = weight.codes.copy()
        for column in range(weight.k):
            kept = 32 - column * 3 % 32
            if kept < 3:
                unsigned = codes[:, column].astype(np.int16) + 4
                codes[:, column] = (unsigned & ((1 << kept) - 1)) - 4
        return replace(weight, codes=codes)


@fault
class aligned_words(Wrong):
    """Packs and unpacks the older layout: a round trip sees nothing."""

    def pack(self, codes, bits, axis):
        if codes.ndim != 2:
            raise NotImplementedError("matrices only")
        from reference.layouts import _pack_aligned

        return _pack_aligned(codes, bits, axis)

    def unpack(self, words, bits, size, axis):
        from reference.layouts import _unpack_aligned

        return _unpack_aligned(words, bits, size, axis)


# ---- zero points, scales, groups


@fault
class zero_point_ignored(Wrong):
    def weight(self, weight):
        if weight.zero_point is None:
            return weight
        return replace(weight, zero_point=np.zeros_like(weight.zero_point))


@fault
class zero_point_plus_one(Wrong):
    def weight(self, weight):
        if weight.zero_point is None:
            return weight
        return replace(weight, zero_point=np.minimum(weight.zero_point + 1, weight.format.code_range[1]))


@fault
class group_index_shifted(Wrong):
    def weight(self, weight):
        if weight.scale.shape[1] == 1:
            return weight
        return replace(weight, scale=np.roll(weight.scale, 1, axis=1))


@fault
class scale_of_group_0(Wrong):
    def weight(self, weight):
        return replace(weight, scale=np.repeat(weight.scale[:, :1], weight.scale.shape[1], axis=1))


@fault
class channel_read_as_group_size_1(Wrong):
    """Scales of a channel, indexed as if there were one a column: row n reads on into its neighbours."""

    def matrix(self, matrix):
        return matrix

    def decode(self, checkpoint):
        weight = super().decode(checkpoint)
        if weight.format.strategy != "channel":
            return weight
        index = np.minimum(np.arange(weight.n)[:, None] + np.arange(weight.k)[None, :], weight.n - 1)
        fmt = WeightFormat.of(weight.format.bits, 1, weight.format.symmetric)
        zeros = weight.zero_point
        return replace(
            weight,
            format=fmt,
            scale=weight.scale[index, 0],
            zero_point=None if zeros is None else zeros[index, 0],
        )


@fault
class scale_truncated_to_bf16(Wrong):
    def weight(self, weight):
        bits = weight.scale.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return replace(weight, scale=bits.view(np.float32).astype(weight.scale.dtype))


# ---- shapes, bias, single elements


@fault
class last_column_dropped(Wrong):
    def activations(self, x):
        x = x.copy()
        x[:, -1:] = 0
        return x


@fault
class bias_dropped(Wrong):
    def bias(self, bias):
        return None


@fault
class one_code_of_a_matrix_wrong_by_one(Wrong):
    def weight(self, weight):
        codes = weight.codes.copy()
        place = 1234 % codes.size
        codes.flat[place] += -1 if codes.flat[place] == weight.format.code_range[1] else 1
        return replace(weight, codes=codes)


@fault
class output_truncated(Wrong):
    def load_linear(self, checkpoint):
        exact = super().load_linear(replace(checkpoint, dtype="fp32"))
        output = float_format(checkpoint.dtype)

        def linear(x):
            y = exact(x)
            rounded = round_to(y, output)
            away = np.abs(rounded) > np.abs(y)
            smaller = np.nextafter(np.abs(rounded).astype(output.dtype), output.dtype.type(0))
            return np.where(away, np.copysign(smaller.astype(np.float64), y), rounded).astype(output.dtype)

        return linear


# ---- what it says and what it does


@fault
class claims_and_raises(Wrong):
    def load_linear(self, checkpoint):
        if checkpoint.weights["num_bits"] == 5:
            raise NotImplementedError("5 bits are not there yet")
        return super().load_linear(checkpoint)


@fault
class declines_and_computes(Wrong):
    def supports(self, case):
        return Support.no("6 bits are not supported") if case.weight.bits == 6 else Support.yes()


@fault
class declines_and_computes_garbage(Wrong):
    def supports(self, case):
        return Support.no("6 bits are not supported") if case.weight.bits == 6 else Support.yes()

    def matrix(self, matrix):
        return -matrix


@fault
class declines_everything(Wrong):
    def supports(self, case):
        return Support.no("nothing is supported")

    def load_linear(self, checkpoint):
        raise NotImplementedError("nothing is supported")


@fault
class claims_to_validate_and_computes(Wrong):
    def decode(self, checkpoint):
        tensors = dict(checkpoint.tensors)
        tensors["weight_scale"] = np.nan_to_num(tensors["weight_scale"].astype(np.float32)).astype(
            tensors["weight_scale"].dtype
        )
        return super().decode(replace(checkpoint, tensors=tensors))


@fault
class refuses_everything_as_bad_data(Wrong):
    def supports(self, case):
        return Support.yes() if case.operation == "validation" else Support.no("only validates")

    def pack(self, codes, bits, axis):
        raise TypeError("'NoneType' object is not subscriptable")

    def load_linear(self, checkpoint):
        raise RuntimeError("kernel failed to compile")


@fault
class second_step_is_skipped(Wrong):
    def unpack(self, words, bits, size, axis):
        pytest.skip("not today")


@fault
class second_step_is_cancelled(Wrong):
    def unpack(self, words, bits, size, axis):
        raise asyncio.CancelledError


@fault
class changes_its_mind(Wrong):
    """Declines and refuses to pack, then claims to unpack."""

    asked = 0

    def supports(self, case):
        self.asked += 1
        return Support.yes() if self.asked % 2 == 0 else Support.no("not now")

    def pack(self, codes, bits, axis):
        raise NotImplementedError("no packing")


@fault
class wrong_neighbour_within_the_bound(Wrong):
    """Every element that the bound lets tip is tipped: each is allowed, all of them are not."""

    contract = Contract(weights="exact")

    def load_linear(self, checkpoint):
        weight = self.decode(checkpoint)
        bias = checkpoint.tensors.get("bias")
        output = float_format(checkpoint.dtype)

        def linear(x):
            fmt = ActivationFormat.from_quantization_args(checkpoint.input_activations)
            expected = oracle_linear(x, weight, bias, output, self.contract, fmt)
            right = round_to(expected.value, output)
            low, high = expected.interval(expected.hypotheses["exact weights"])
            return np.where(high != right, high, low).astype(output.dtype)

        return linear


@fault
class declines_after_the_fact(Wrong):
    """Says no only once it has seen that it fails."""

    failed = False

    def supports(self, case):
        return Support.no("it did not work") if self.failed else Support.yes()

    def load_linear(self, checkpoint):
        self.failed = True
        raise NotImplementedError("it did not work")


@fault
class supports_raises(Wrong):
    def supports(self, case):
        raise KeyError("sm_90")


# ---- answers that are no answers


@fault
class wrong_shape(Wrong):
    def load_linear(self, checkpoint):
        linear = super().load_linear(checkpoint)
        return lambda x: linear(x)[:, :-1]


@fault
class wrong_dtype(Wrong):
    def load_linear(self, checkpoint):
        linear = super().load_linear(checkpoint)
        return lambda x: linear(x).astype(np.float32)


@fault
class wrong_kind(Wrong):
    def load_linear(self, checkpoint):
        linear = super().load_linear(checkpoint)
        return lambda x: linear(x).tolist()


@fault
class one_nan(Wrong):
    def load_linear(self, checkpoint):
        linear = super().load_linear(checkpoint)

        def spoiled(x):
            y = linear(x)
            y[-1:, -1:] = np.nan
            return y

        return spoiled


@fault
class output_never_written(Wrong):
    def load_linear(self, checkpoint):
        n = checkpoint.tensors["weight_shape"][0]
        return lambda x: np.empty((x.shape[0], n), float_format(checkpoint.dtype).dtype)


@fault
class first_answer_kept(Wrong):
    def load_linear(self, checkpoint):
        linear = super().load_linear(checkpoint)
        kept = []

        def stale(x):
            kept.append(linear(x))
            return kept[0]

        return stale


@fault
class skips(Wrong):
    def load_linear(self, checkpoint):
        pytest.skip("flaky")


@fault
class exits(Wrong):
    def load_linear(self, checkpoint):
        raise SystemExit(0)


@fault
class kills_its_process(Wrong):
    def load_linear(self, checkpoint):
        if checkpoint.weights["num_bits"] == 4:
            os._exit(0)
        return super().load_linear(checkpoint)


globals().update(FAULTS)
