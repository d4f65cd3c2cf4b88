"""The oracle judged by itself, with the 16-bit roundings of a real kernel: torch is not needed.

Weights are rounded to the scale's dtype, products are summed in float32, the output is rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.backend import Checkpoint, Support
from conformance.cases import Case
from reference.bounds import Contract
from reference.errors import FormatError
from reference.formats import ActivationFormat, WeightFormat
from reference.layouts import layout
from reference.packing import pack, unpack
from reference.rounding import float_format, round_to
from reference.weights import QuantizedWeight, dequantize


class NumpyBackend:
    name = "numpy"
    arrays = "numpy"
    contract = Contract(weights="rounded")

    def supports(self, case: Case) -> Support:
        if case.activation.kind != "a16":
            return Support.no("activations are not quantized")
        return Support.yes()

    def pack(self, codes: Any, bits: int, axis: int) -> Any:
        return pack(codes, bits, axis)

    def unpack(self, words: Any, bits: int, size: int, axis: int) -> Any:
        return unpack(words, bits, size, axis)

    def dequantize(self, checkpoint: Checkpoint) -> Any:
        return dequantize(_weight(checkpoint))

    def load_linear(self, checkpoint: Checkpoint) -> Any:
        if ActivationFormat.from_quantization_args(checkpoint.input_activations).kind != "a16":
            raise FormatError("input_activations: this backend does not quantize activations")
        matrix = dequantize(_weight(checkpoint)).astype(np.float32)
        bias = checkpoint.tensors.get("bias")
        output = float_format(checkpoint.dtype)

        def linear(x: Any) -> Any:
            y = x.astype(np.float32) @ matrix.T
            if bias is not None:
                y += bias.astype(np.float32)
            return round_to(y, output).astype(output.dtype)

        return linear


def _weight(checkpoint: Checkpoint) -> QuantizedWeight:
    fmt = WeightFormat.from_quantization_args(checkpoint.weights)
    return layout("ct-dense-le-v1").decode(checkpoint.tensors, fmt)


backend = NumpyBackend
