"""The oracle's semantics as a backend: torch is not needed.

Weights are rounded to the scale's dtype, products are summed in float64, the output is rounded once. With
other semantics it is a mutant: the same code with one stage that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.backend import Checkpoint, Support
from conformance.cases import Case
from reference.activations import QuantizedActivations, quantizers
from reference.bounds import Contract
from reference.formats import ActivationFormat, WeightFormat
from reference.layouts import layout
from reference.rounding import FloatFormat, float_format
from reference.semantics import RIGHT, Columns, Operands, Semantics, reload
from reference.weights import QuantizedWeight


class NumpyBackend:
    name = "numpy"
    arrays = "numpy"
    semantics = RIGHT
    contract = Contract(weights="rounded")

    @classmethod
    def of(cls, name: str, semantics: Semantics, contract: Contract | None = None) -> NumpyBackend:
        """The same with other semantics."""
        made = cls()
        made.name, made.semantics, made.contract = name, semantics, contract or cls.contract
        return made

    def supports(self, case: Case) -> Support:
        return Support.yes()

    def pack(self, codes: Any, bits: int, axis: int) -> Any:
        return self.semantics.pack(codes, bits, axis)

    def unpack(self, words: Any, bits: int, size: int, axis: int) -> Any:
        return self.semantics.unpack(words, bits, size, axis)

    def dequantize(self, checkpoint: Checkpoint) -> Any:
        weight = self.decode(checkpoint)
        output = float_format(weight.scale.dtype)
        matrix = self.semantics.matrix(self.semantics.columns(weight, output))
        return self.semantics.store(matrix, output).astype(output.dtype)

    def quantize_activation(self, x: Any, args: Any, input_scale: float | None) -> Sequence[Any]:
        fmt = ActivationFormat.from_quantization_args(args)
        found = self._quantized([x], fmt, input_scale)
        if not isinstance(found, QuantizedActivations):
            raise TypeError("these semantics do not quantize: there are no codes")
        return found.stored(fmt)

    def load_linear(self, checkpoint: Checkpoint) -> Any:
        output = float_format(checkpoint.dtype)
        fmt = ActivationFormat.from_quantization_args(checkpoint.input_activations)
        columns = self.semantics.columns(self.decode(checkpoint), output)
        matrix = self._matrix(columns, output)
        bias = checkpoint.tensors.get("bias")
        offset = None if bias is None else bias.astype(np.float64)
        calls: list[Any] = []  # what is kept from an earlier call is a fault that a mutant may have

        def linear(x: Any) -> Any:
            calls.append(x)
            found = x.astype(np.float64) if fmt.kind == "a16" else self._quantized(calls, fmt, None)
            total = self.semantics.product(Operands.of(found, matrix, columns))
            return self.semantics.finish(total, offset, output).astype(output.dtype)

        return linear

    def decode(self, checkpoint: Checkpoint) -> QuantizedWeight:
        fmt = WeightFormat.from_quantization_args(checkpoint.weights)
        return reload(layout("ct-dense-le-v1").decode(checkpoint.tensors, fmt), self.semantics)

    def _matrix(self, columns: Columns, output: FloatFormat) -> Any:
        matrix = self.semantics.matrix(columns)
        return matrix if self.contract.weights == "exact" else self.semantics.store(matrix, output)

    def _quantized(self, calls: list[Any], fmt: ActivationFormat, input_scale: float | None) -> Any:
        how = next(quantizers(fmt, self.contract.quantizer, float_format(calls[-1].dtype)))
        return self.semantics.quantize(calls, fmt, how, input_scale)[-1]


backend = NumpyBackend
