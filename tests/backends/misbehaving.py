"""Backends that compute what is right and do what they must not: the oracle's own backend, misbehaving in one way each.

`MISBEHAVING` names them; `misbehaving.py:<name>` makes one.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from conformance.backends.numpy import NumpyBackend
from reference.bounds import Contract
from reference.rounding import float_format, round_to

MISBEHAVING = {}


def misbehaves(cls):
    MISBEHAVING[cls.__name__] = cls
    cls.name = cls.__name__
    return cls


class Layers(NumpyBackend):
    """Where a layer can misbehave: `called(layer, x, *rest)` in the place of each call."""

    def load_linear(self, checkpoint):
        layer = super().load_linear(checkpoint)
        return lambda *inputs: self.called(layer, *inputs)

    def load_moe(self, checkpoint):
        layer = super().load_moe(checkpoint)
        return lambda *inputs: self.called(layer, *inputs)

    def called(self, layer, *inputs):
        return layer(*inputs)


@misbehaves
class behaves(Layers):
    pass


# ---- the same call, other bits


class OtherOrder(NumpyBackend):
    """Sums in float32, as a kernel does whose thread blocks finish in another order each time."""

    contract = Contract(weights="rounded")

    def load_linear(self, checkpoint):
        matrix = self.dequantize(checkpoint).astype(np.float32)
        output = float_format(checkpoint.dtype)
        calls = []

        def linear(x):
            calls.append(x)
            first = 97 * len(calls) % matrix.shape[1]
            parts = [
                x[:, s].astype(np.float32) @ matrix[:, s].T for s in (slice(first, None), slice(0, first))
            ]
            return round_to((parts[0] + parts[1]).astype(np.float64), output).astype(output.dtype)

        return linear


@misbehaves
class sums_in_another_order(OtherOrder):
    pass


@misbehaves
class sums_in_another_order_and_says_so(OtherOrder):
    nondeterministic = "thread blocks add up as they finish"


# ---- what is handed over


@misbehaves
class scales_x_in_place(Layers):
    def called(self, layer, x, *rest):
        y = layer(x.copy(), *rest)
        x *= 2
        return y


@misbehaves
class repacks_in_place(Layers):
    def load_linear(self, checkpoint):
        layer = super().load_linear(checkpoint)
        checkpoint.tensors["weight_packed"][...] ^= 0x08080808
        return layer


@misbehaves
class scales_router_weights_in_place(Layers):
    def load_moe(self, checkpoint):
        layer = super().load_moe(checkpoint)

        def moe(x, weights, ids):
            y = layer(x, weights.copy(), ids)
            weights *= 2.5
            return y

        return moe


# ---- what comes back


@misbehaves
class keeps_one_output(Layers):
    """One buffer a layer, as large as the largest call so far."""

    def __init__(self):
        self.buffers = {}

    def called(self, layer, *inputs):
        y = layer(*inputs)
        buffer = self.buffers.get(id(layer))
        if buffer is None or len(buffer) < len(y):
            buffer = self.buffers[id(layer)] = np.empty_like(y)
        buffer[: len(y)] = y
        return buffer[: len(y)]


@misbehaves
class keeps_two_outputs_in_turn(Layers):
    def __init__(self):
        self.kept = []

    def called(self, layer, *inputs):
        y = layer(*inputs)
        self.kept.append(y)
        if len(self.kept) < 3 or self.kept[-3].shape != y.shape:
            return y
        self.kept[-1] = self.kept[-3]
        self.kept[-1][...] = y
        return self.kept[-1]


@misbehaves
class remembers_its_answers(Layers):
    def __init__(self):
        self.known = {}

    def called(self, layer, *inputs):
        key = (id(layer), *(array.tobytes() for array in inputs))
        if key not in self.known:
            self.known[key] = layer(*inputs)
        return self.known[key]


@misbehaves
class returns_what_cannot_be_written(Layers):
    def called(self, layer, *inputs):
        y = layer(*inputs)
        y.flags.writeable = False
        return y


@misbehaves
class leaves_a_column_unwritten(Layers):
    def load_linear(self, checkpoint):
        layer = super().load_linear(checkpoint)
        n = int(checkpoint.tensors["weight_shape"][0])

        def linear(x):
            y = np.empty((len(x), n), x.dtype)
            y[:, :-1] = layer(x)[:, :-1]
            return y

        return linear


# ---- how x lies


@misbehaves
class takes_x_for_contiguous(Layers):
    def called(self, layer, x, *rest):
        return layer(as_strided(x, x.shape, (x.shape[1] * x.itemsize, x.itemsize)), *rest)


@misbehaves
class loads_whole_vectors_of_x(Layers):
    """From the multiple of 16 bytes below x."""

    def called(self, layer, x, *rest):
        below = x.ctypes.data % 16 // x.itemsize
        if below and x.flags.c_contiguous:
            x = x.base[: x.size].reshape(x.shape)
        return layer(x, *rest)


@misbehaves
class takes_ids_for_contiguous(Layers):
    def called(self, layer, x, *rest):
        rows = [as_strided(a, a.shape, (a.shape[1] * a.itemsize, a.itemsize)) for a in rest]
        return layer(x, *rows)


@misbehaves
class refuses_strides(Layers):
    said = ("x must be contiguous and aligned to 16 bytes",)

    def called(self, layer, *inputs):
        if any(not array.flags.c_contiguous or array.ctypes.data % 16 for array in inputs):
            raise ValueError(*self.said)
        return super().called(layer, *inputs)


@misbehaves
class refuses_strides_in_silence(refuses_strides):
    said = ()


@misbehaves
class keeps_one_output_and_refuses_strides(refuses_strides, keeps_one_output):
    pass


# ---- rows


@misbehaves
class drops_a_column_of_a_row_alone(Layers):
    def called(self, layer, x, *rest):
        y = layer(x, *rest)
        if len(x) == 1:
            y[:, -1] = 0
        return y


@misbehaves
class rounds_a_row_alone_in_another_way(NumpyBackend):
    """Either way is legal under its contract."""

    contract = Contract(weights="any")

    def load_linear(self, checkpoint):
        ways = []
        for weights in ("rounded", "exact"):
            self.contract = Contract(weights=weights)
            ways.append(super().load_linear(checkpoint))
        self.contract = type(self).contract
        return lambda x: ways[len(x) == 1](x)


@misbehaves
class refuses_no_rows(Layers):
    def called(self, layer, x, *rest):
        if len(x) == 0:
            raise RuntimeError("invalid configuration argument")
        return layer(x, *rest)


@misbehaves
class is_spoiled_by_no_rows(Layers):
    """A launch without thread blocks fails, and every later one finds the error."""

    def __init__(self):
        self.spoiled = set()

    def called(self, layer, x, *rest):
        y = layer(x, *rest)
        if len(x) == 0:
            self.spoiled.add(id(layer))
        if id(layer) in self.spoiled:
            y[...] = np.nan
        return y


# ---- layers


@misbehaves
class repacks_into_one_workspace(NumpyBackend):
    """One workspace a shape: the layer that was loaded last answers for all of them."""

    def __init__(self):
        self.workspaces = {}

    def load_linear(self, checkpoint):
        key = tuple(checkpoint.tensors["weight_packed"].shape)
        self.workspaces[key] = super().load_linear(checkpoint)
        return lambda x: self.workspaces[key](x)

    def load_moe(self, checkpoint):
        key = tuple(checkpoint.tensors["w13_weight_packed"].shape)
        self.workspaces[key] = super().load_moe(checkpoint)
        return lambda *inputs: self.workspaces[key](*inputs)


globals().update(MISBEHAVING)
