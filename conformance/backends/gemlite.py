"""gemlite: Triton kernels for packed weights of 1, 2, 4 and 8 bits, and for operands of int8 and fp8.

Layers are packed as its own loader of compressed-tensors checkpoints packs them, and its dispatcher chooses among its
kernels. In production's setting few rows are summed in parts that atomics add up in 16 bits, and zero points of groups
are scaled and rounded: a wide bound, which hides much. `gemlite_float32` asks for outputs in float32 and zero points in
integers.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from conformance.backend import Checkpoint, Support
from conformance.backends.cuda import require
from conformance.backends.torch_weights import TorchWeight, weight_of
from conformance.backends.warm import compiled
from conformance.cases import Case
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]

_BITS = (1, 2, 4, 8)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK = 128
# e4m3 holds each integer up to here.
_E4M3_INTEGERS = 16

# Splits of its tile shapes for few rows, at most.
_SPLITS = 8


class GemliteBackend:
    device = "cuda"
    libraries: tuple[str, ...] = ("gemlite", "triton", "torch")
    kernels: ClassVar = {"linear": r"gem[mv]\w*INT", "activation_quantization": "scale_activations"}
    nondeterministic = "batches of fewer than 64 rows may be summed in parts that atomics add up in any order"
    # integers: sums in int32. accumulator: tl.dot of fp8 is not promoted on Hopper. quantizer: amax / 127 or 448.
    contract = Contract(integers="int32", accumulator="e8m13")

    def __init__(self, library: Any, production: bool) -> None:
        self._core = library.core
        self._quantizers = sys.modules["gemlite.quant_utils"]
        self._production = production
        self.name = "gemlite" if production else "gemlite_float32"

    def contract_for(self, case: Case) -> Contract:
        weight_only = case.activation.kind == "a16"
        grouped = case.weight.strategy == "group" and case.weight.group_size < case.k
        # (u - z) * s in the dtype of the scales; codes of 8 bits are multiplied as they are.
        own = replace(self.contract, weights="rounded" if weight_only else "exact")
        if not self._production:
            return own
        parts = _parts(case.m, case.k, case.weight.bits if weight_only else 8)
        fused = weight_only and grouped and not case.weight.symmetric  # u * s - RNE(z * s), one rounding
        own = replace(own, partial_sums=parts, zero_point="scaled" if fused else "integer")
        return replace(own, epilogue="16-bit") if case.bias else own

    def supports(self, case: Case) -> Support:
        args = case.activation.to_quantization_args()
        if case.operation == "validation":
            return Support.no("gemlite is not asked about bad data")
        if case.operation == "activation_quantization":
            return _support(_quantizer_reason(args or {}))
        if case.act_order:
            return Support.no("gemlite has no group activation ordering")
        size = case.weight.group_size if case.weight.strategy == "group" else case.k
        return _support(_reason(case.weight.bits, case.weight.symmetric, size, case.k, args))

    def prepare(self, cases: list[Case], workers: int) -> Iterator[str]:
        yield from compiled(self, backend if self._production else float32_backend, cases, workers)

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        return self.linear(weight_of(checkpoint), checkpoint.input_activations, _DTYPES[checkpoint.dtype])

    def linear(self, weight: TorchWeight, args: Mapping[str, Any] | None, dtype: torch.dtype) -> Linear:
        k = weight.codes.shape[1]
        _refuse(_reason(weight.bits, weight.zero_point is None, weight.group_size, k, args))
        layer = self._packed(weight, dtype) if args is None else self._of_8_bits(weight, args, dtype)
        return lambda x: layer(x).to(dtype)

    def quantize_activation(
        self, x: torch.Tensor, args: Mapping[str, Any], input_scale: float | None
    ) -> list[torch.Tensor]:
        _refuse(_quantizer_reason(args))
        kind = torch.float8_e4m3fn if args["type"] == "float" else torch.int8
        if args["strategy"] == "group":
            return list(self._quantizers.scale_activations_per_block(x, kind, args["group_size"]))
        return list(self._quantizers.scale_activations_per_token(x, kind))

    def _packed(self, weight: TorchWeight, dtype: torch.dtype) -> Any:
        """A layer of stored codes."""
        layer = self._layer(weight, weight.bits, self._core.TORCH_TO_DTYPE[dtype], dtype)
        zeros = weight.unsigned_zero_point.to(dtype)
        layer.pack(weight.unsigned, weight.scale, zeros, bias=weight.bias, fma_mode=self._production)
        if (
            weight.group_size >= weight.codes.shape[1]
        ):  # its helpers scale the weights of a channel before the product
            layer.W_group_mode, layer.channel_scale_mode = 3, 0
        return layer

    def _of_8_bits(self, weight: TorchWeight, args: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """A layer of codes less their zero points, with one scale a channel."""
        own = self._core.DType
        operands, kind = (own.INT8, torch.int8) if args["type"] == "int" else (own.FP8, torch.float8_e4m3fn)
        layer = self._layer(weight, 8, operands, dtype)
        layer.pack(weight.centred.to(kind), weight.scale.float(), None, bias=weight.bias)
        layer.W_group_mode, layer.channel_scale_mode = 0, 3
        return layer

    def _layer(self, weight: TorchWeight, bits: int, operands: Any, dtype: torch.dtype) -> Any:
        own, (n, k) = self._core, weight.codes.shape
        output = own.TORCH_TO_DTYPE[dtype] if self._production else own.DType.FP32
        return own.GemLiteLinearTriton(
            bits, group_size=weight.group_size, in_features=k, out_features=n, input_dtype=operands,
            output_dtype=output, scaled_activations=operands in own.FP8_INT8_DTYPES,
        )  # fmt: skip


class _Turns:
    """Takes the place of an autotuner's clock: the candidates of a shape that its pruner lets through, from one on that
    the shape decides, and of these the first that the GPU has room for. The clock may choose any of them; timing all
    of them takes half a minute a shape."""

    def __init__(self, tuner: Any) -> None:
        self._prune = tuner.early_config_prune or (lambda configs, arguments, **others: configs)
        self._found = False
        tuner.early_config_prune, tuner.do_bench = self.candidates, self.bench

    def candidates(self, configs: Sequence[Any], arguments: Mapping[str, Any], **others: Any) -> list[Any]:
        self._found = False
        tiles = list(self._prune(configs, arguments, **others))
        numbers = [value for value in arguments.values() if isinstance(value, int)]
        first = zlib.crc32(repr(numbers).encode()) % max(1, len(tiles))
        return tiles[first:] + tiles[:first]

    def bench(self, call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        if self._found:
            return [float("inf")] * len(quantiles)
        call()
        self._found = True
        return [0.0] * len(quantiles)


def _parts(m: int, k: int, bits: int) -> int:
    """Into how many parts its dispatcher may split a sum of k columns for m rows of packed weights of so many bits."""
    if m >= 64:
        return 1
    if m > (4 if bits < 8 else 2):
        return _SPLITS
    # One row: a part has two tiles, which are 8 columns or what one word holds at least. 8 bits have one part.
    return 1 if bits == 8 else -(-k // (2 * max(8, 32 // bits)))


def _reason(bits: int, symmetric: bool, group_size: int, k: int, args: Mapping[str, Any] | None) -> str:
    """Why a dense layer is declined, or nothing. group_size: columns a scale, K for a channel."""
    if args is None:
        if bits not in _BITS:
            return f"gemlite packs weights of 1, 2, 4 and 8 bits, not {bits} bits"
    else:
        if args["num_bits"] != 8:
            return f"gemlite quantizes activations to int8 and fp8, not to {args['num_bits']} bits"
        if group_size < k and args["type"] == "float":  # what its A8W4 and A8W2 helpers make
            return f"gemlite rounds the weights of groups of {group_size} to e4m3 before it multiplies them"
        if group_size < k:
            return f"gemlite has int8 activations for one scale a channel, not for groups of {group_size}"
        largest = 2 ** (bits - 1) if symmetric else 2**bits - 1
        kind, most = ("int8", 128) if args["type"] == "int" else ("e4m3", _E4M3_INTEGERS)
        if largest > most:
            return f"codes less their zero points reach {largest} and do not fit {kind}"
    return f"gemlite needs K of a multiple of 32, not K={k}" if k % 32 else ""


def _quantizer_reason(args: Mapping[str, Any]) -> str:
    if args["num_bits"] != 8 or not args["symmetric"] or not args["dynamic"]:
        return "gemlite quantizes activations to symmetric int8 and fp8 with dynamic scales alone"
    blocks = args["strategy"] == "group" and args["group_size"] == _BLOCK
    return (
        ""
        if blocks or args["strategy"] == "token"
        else "gemlite has scales per token and per 128 columns alone"
    )


def _support(reason: str) -> Support:
    return Support.no(reason) if reason else Support.yes()


def _refuse(reason: str) -> None:
    if reason:
        raise NotImplementedError(reason)


def _library() -> Any:
    """gemlite without its clock. Raises EnvironmentMissing."""
    library = require("gemlite", "gemlite")
    tuner = require("triton", "triton").runtime.autotuner.Autotuner
    found = [
        v for name, m in list(sys.modules.items()) if name.startswith("gemlite") for v in vars(m).values()
    ]
    for one in {id(value): value for value in found if isinstance(value, tuner)}.values():
        if not isinstance(getattr(vars(one).get("do_bench"), "__self__", None), _Turns):
            _Turns(one)
    return library


def backend() -> GemliteBackend:
    return GemliteBackend(_library(), production=True)


def float32_backend() -> GemliteBackend:
    return GemliteBackend(_library(), production=False)
