"""The oracle's semantics as a backend: torch is not needed.

Weights are rounded to the scale's dtype, products are summed in float64, the output is rounded once. With
other semantics it is a mutant: the same code with one stage that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.cases import Case
from conformance.data.sharding import shard
from reference.activations import QuantizedActivations, quantizers
from reference.bounds import Contract
from reference.formats import ActivationFormat, WeightFormat
from reference.layouts import layout
from reference.moe import MOE_RIGHT, Expert, MoeLayer, MoeSemantics, moe_centres, moe_semantics
from reference.rounding import FloatFormat, float_format, round_to
from reference.routing import ROUTING_RIGHT, Routing, RoutingSemantics, route
from reference.semantics import RIGHT, Columns, Operands, Semantics, reload
from reference.sharding import SHARDING_RIGHT, ShardingSemantics
from reference.swiglu import GatedActivation, GatedSemantics, swiglu
from reference.weights import QuantizedWeight


class NumpyBackend:
    name = "numpy"
    arrays = "numpy"
    semantics = RIGHT
    routing = ROUTING_RIGHT
    sharding = SHARDING_RIGHT
    layer = MOE_RIGHT
    contract = Contract(weights="rounded", intermediates="fp32")

    @classmethod
    def of(
        cls,
        name: str,
        semantics: Semantics | RoutingSemantics | ShardingSemantics | MoeSemantics | GatedSemantics,
        contract: Contract | None = None,
    ) -> NumpyBackend:
        """The same with other semantics of one kind."""
        made = cls()
        made.name, made.contract = name, contract or cls.contract
        if isinstance(semantics, RoutingSemantics):
            made.routing = semantics
        elif isinstance(semantics, ShardingSemantics):
            made.sharding = semantics
        else:
            made.layer = moe_semantics(semantics)
            made.semantics = made.layer.linear
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

    def route(self, logits: Any, routing: Routing, bias: Any) -> Sequence[Any]:
        weights, ids = route(logits, routing, bias, self.routing)
        return weights.astype(np.float32), ids.astype(np.int32)

    def align_block_size(self, ids: Any, experts: int, block: int, expert_map: Any) -> Sequence[Any]:
        return self.routing.align(ids, experts, block, expert_map).arrays

    def swiglu(self, x: Any, activation: GatedActivation) -> Any:
        expected = swiglu(x, activation, self.contract, self.layer.gated)
        return round_to(expected.value, expected.output).astype(expected.output.dtype)

    def load_moe(self, checkpoint: MoeCheckpoint) -> Any:
        output = float_format(checkpoint.dtype)
        layer = self.decode_experts(checkpoint)
        calls: list[Any] = []

        def moe(x: Any, weights: Any, ids: Any) -> Any:
            calls.append((x, weights, ids))
            if self.layer is MOE_RIGHT:
                del calls[:-1]  # only a mutant keeps anything of earlier calls
            centres = moe_centres(calls, layer, output, self.contract, self.layer)
            y = next(iter(centres.values()))
            return round_to(y[len(y) - len(x) :], output).astype(output.dtype)

        return moe

    def decode_experts(self, checkpoint: MoeCheckpoint) -> MoeLayer:
        fmt = WeightFormat.from_quantization_args(checkpoint.weights)
        h, i = checkpoint.hidden, checkpoint.intermediate

        def stack(prefix: str) -> tuple[Expert, ...]:
            found: dict[str, list[Any]] = {}
            for which, shape in (("w13", (2 * i, h)), ("w2", (h, i))):
                start = f"{prefix}{which}_"
                names = [n for n in checkpoint.tensors if n.startswith(f"{start}weight")]
                count = len(checkpoint.tensors[f"{start}weight_packed"])
                for e in range(count):
                    tensors = {n.removeprefix(start): checkpoint.tensors[n][e] for n in names}
                    tensors["weight_shape"] = np.array(shape, np.int64)
                    found.setdefault(which, []).append(layout("ct-dense-le-v1").decode(tensors, fmt))
                found[f"b{which}"] = list(checkpoint.tensors.get(f"{start}bias", [None] * count))
            parts = (found[name] for name in ("w13", "w2", "bw13", "bw2"))
            return tuple(Expert(*part) for part in zip(*parts, strict=True))

        return MoeLayer(
            stack(""),
            checkpoint.activation,
            ActivationFormat.from_quantization_args(checkpoint.input_activations),
            checkpoint.top_k,
            checkpoint.expert_map,
            checkpoint.weights_on_input,
            checkpoint.routed_scaling_factor,
            stack("shared_")[0] if "shared_w13_weight_packed" in checkpoint.tensors else None,
        )

    def shard_moe(self, checkpoint: MoeCheckpoint, ranks: str, rank: int) -> MoeCheckpoint:
        return shard(checkpoint, ranks, rank, self.sharding)

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
