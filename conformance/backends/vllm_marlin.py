"""Marlin, vLLM's kernels for 4 and 8 bits: dense, with activations of 16 bits or int8, with act-order, and for experts.

A weight is repacked by the operator itself. The scales of groups lie in the order in which the threads of a tensor core
need them, those of a channel in the order in which threads write results; zero points in the former, and as the codes
of a word are interleaved. Shapes that no tile divides are padded with zeros, as vLLM does when it loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from conformance.backend import Checkpoint, MoeCheckpoint, Support
from conformance.backends.grouped_experts import GroupedExperts, Projection
from conformance.backends.torch_weights import TorchWeight, packed, weight_of
from conformance.backends.vllm_experts import experts_layer
from conformance.backends.vllm_ops import (
    Layer,
    Operators,
    aligned,
    column_order,
    first_reason,
    launched,
    load,
    multiprocessors,
    padded,
    quantized_int8,
    type_id,
)
from conformance.cases import Case
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]

# The places of 64 columns of group scales and zero points, and of 32 columns of channel scales and biases.
_BY_GROUP = [i + 8 * j for i in range(8) for j in range(8)]
_BY_CHANNEL = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
# The column of each of the eight codes of a word.
_IN_A_WORD = [0, 2, 4, 6, 1, 3, 5, 7]
# Group scales for int8 activations are integers up to this, the largest scale of the layer.
_LARGEST_SCALE = 4096
_MOE_BLOCKS = (8, 16, 32, 48, 64)
_NO_TOKENS = "moe_wna16_marlin_gemm needs at least one token"


@dataclass(frozen=True)
class _Packed:
    """A weight, or a stack of experts, as the operators take it. n: columns of the output that are not padding;
    padded: (N, K) with padding. scale_factor: of int8 activations with groups."""

    bits: int
    symmetric: bool
    n: int
    padded: tuple[int, int]
    words: torch.Tensor
    scale: torch.Tensor
    zero_points: torch.Tensor | None
    bias: torch.Tensor | None
    group: torch.Tensor | None
    order: torch.Tensor | None
    scale_factor: torch.Tensor | None = None

    def activations(self, x: torch.Tensor, int8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (M, K) with its padding, quantized where it is asked for, and the scales."""
        wide = padded(x, len(x), self.padded[1]) if x.shape[1] < self.padded[1] else x
        if not int8:
            return wide, None
        codes, scale = quantized_int8(wide)
        return codes, scale if self.scale_factor is None else scale * self.scale_factor


class VllmMarlin(Operators):
    name = "vllm_marlin"
    kernels = r"marlin\w*::Marlin"
    # weights: rounded to 16 bits where there are groups; codes as they are, where the scale is one a channel. epilogue:
    # of 4 bits by channel, sum, scale and bias are each rounded to 16 bits; of the others, the result and the bias.
    contract = Contract(weights="any", epilogue="any", intermediates="16-bit")

    def supports(self, case: Case) -> Support:
        if case.operation in ("moe", "moe_parallel") and case.m == 0:
            return Support.no(_NO_TOKENS)
        return super().supports(case)

    def declined(self, layer: Layer) -> str:
        bits, int8 = layer.weight.bits, layer.activation == "a-int8"
        moe = len(layer.shapes) == 2
        kind = f"{bits} bits {'without' if layer.weight.symmetric else 'with'} zero points"
        return first_reason(
            (
                bits not in (4, 8) or (bits == 8 and not layer.weight.symmetric),
                f"Marlin has no kernel for {kind}",
            ),
            (layer.group_size not in (-1, 32, 64, 128), f"Marlin has no groups of {layer.group_size}"),
            (
                layer.activation == "a-fp8",
                "Marlin multiplies fp8 activations on sm_89 and sm_12x only, and the adapter has no layer for them",
            ),
            (layer.activation not in ("a16", "a-int8"), f"Marlin has no activations {layer.activation}"),
            (int8 and bits != 4, f"Marlin multiplies int8 activations with 4 bits, not {bits}"),
            (int8 and layer.act_order, "Marlin's repacking for int8 activations knows no act-order"),
            (
                layer.act_order and layer.group_size < 0,
                "act-order is of groups: one scale a row has no order",
            ),
            (
                layer.act_order and not layer.divides(64, 64 if moe else 128),
                "vLLM pads no layer with act-order: N must be a multiple of 64 and K of 128",
            ),
            (moe and layer.shapes[0][1] % 128 != 0, "Marlin's experts need a hidden size that 128 divides"),
        )

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        layer = self.refuse(checkpoint)
        int8 = layer.activation == "a-int8"
        weight = _for_int8(_pack(weight_of(checkpoint, True), layer.group_size, int8), int8)
        n, k = weight.padded
        number = type_id(weight.bits, weight.symmetric)
        device = weight.words.device
        locks = torch.zeros(multiprocessors(device), dtype=torch.int32, device=device)

        def linear(x: torch.Tensor) -> torch.Tensor:
            a, a_scale = weight.activations(x, int8)
            y = torch.ops._C.marlin_gemm(
                a, None, weight.words, weight.bias, weight.scale, a_scale, None, weight.zero_points, weight.group,
                weight.order, locks, number, len(x), n, k, True, False, True, False,
            )  # fmt: skip
            return launched(y[:, : weight.n].contiguous(), device)

        return linear

    def load_moe(self, checkpoint: MoeCheckpoint) -> GroupedExperts:
        layer = self.refuse(checkpoint)
        int8 = layer.activation == "a-int8"
        return experts_layer(checkpoint, lambda each: self._projection(each, layer.group_size, int8), True)

    def _projection(self, weights: list[TorchWeight], group_size: int, int8: bool) -> Projection:
        weight = _for_int8(_stacked([_pack(w, group_size, int8) for w in weights]), int8)
        n, k = weight.padded
        number = type_id(weight.bits, weight.symmetric)
        device = weight.words.device
        locks = torch.zeros(4 * multiprocessors(device), dtype=torch.int32, device=device)

        def project(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            slots, top_k = places.numel(), places.shape[1]
            if not slots:
                raise NotImplementedError(_NO_TOKENS)
            full = (block for block in _MOE_BLOCKS if slots / len(weights) / block < 0.9)
            block = max(next(full, _MOE_BLOCKS[-1]), 16 if int8 else 8)
            sorted_ids, expert_ids, count = aligned(places, len(weights), block)
            a, a_scale = weight.activations(x, int8)
            unused = torch.ones(slots, dtype=torch.float32, device=device)
            y = torch.ops._moe_C.moe_wna16_marlin_gemm(
                a, None, weight.words, weight.bias, weight.scale, a_scale, None, weight.zero_points, weight.group,
                weight.order, locks, sorted_ids, expert_ids, count, unused, block, top_k, False, number, len(x), n, k,
                True, False, True, False, -1, -1, -1,
            )  # fmt: skip
            return launched(y.reshape(*places.shape, n)[..., : weight.n].contiguous(), device)

        return project


def _pack(weight: TorchWeight, group_size: int, int8: bool) -> _Packed:
    """group_size: -1 for one scale a row, whatever K is."""
    n, k = weight.codes.shape
    order = column_order(weight)
    size = _padded(n, k, group_size) if order is None else (n, k)
    group = None if order is None or weight.group is None else weight.group[order].to(torch.int32)
    groups = 1 if group_size < 0 else size[1] // group_size
    none = torch.empty(0, dtype=torch.int32, device=weight.codes.device)
    codes = packed(padded(weight.unsigned, *size).T, weight.bits, 0)
    words = torch.ops._C.gptq_marlin_repack(
        codes, none if order is None else order, size[1], size[0], weight.bits, int8
    )
    scale = _reordered(
        padded(weight.scale.T, groups, size[0]), _BY_GROUP if groups > 1 and not int8 else _BY_CHANNEL
    )
    zero_points = None
    if weight.zero_point is not None:
        values = _reordered(padded(weight.unsigned_zero_point.T, groups, size[0]), _BY_GROUP)
        zero_points = packed(values if int8 else _reordered(values, _IN_A_WORD), weight.bits, 1)
    bias = None
    if weight.bias is not None:
        bias = _reordered(torch.nn.functional.pad(weight.bias, (0, size[0] - n)), _BY_CHANNEL)
    return _Packed(
        weight.bits, weight.zero_point is None, n, size, words, scale, zero_points, bias, group, order
    )  # fmt: skip


def _padded(n: int, k: int, group_size: int) -> tuple[int, int]:
    """The smaller of the two shapes that a tile divides, (N % 64, K % 128) and (N % 128, K % 64), K in whole groups."""

    def up(size: int, unit: int) -> int:
        return -(-size // unit) * unit

    group = max(group_size, 1)
    fitting = (
        (up(n, 64), up(k, math.lcm(128, group))),
        (up(n, 128), up(k, math.lcm(64, group))),
    )
    return min(fitting, key=lambda shape: (math.prod(shape), sum(shape)))


def _reordered(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """The same permutation in each run of so many values of the last dimension."""
    return values.reshape(-1, len(places))[:, list(places)].reshape(values.shape).contiguous()


def _stacked(experts: Sequence[_Packed]) -> _Packed:
    first = experts[0]

    def stack(name: str) -> torch.Tensor | None:
        return None if getattr(first, name) is None else torch.stack([getattr(e, name) for e in experts])

    return _Packed(
        first.bits, first.symmetric, first.n, first.padded, torch.stack([e.words for e in experts]),
        torch.stack([e.scale for e in experts]), stack("zero_points"), stack("bias"), stack("group"), stack("order"),
    )  # fmt: skip


def _for_int8(weight: _Packed, int8: bool) -> _Packed:
    """Group scales as int16, in the place of 16-bit numbers: parts of the largest of all, by which the scales of the
    activations are multiplied instead."""
    if not int8 or weight.scale.shape[-2] == 1:
        return weight
    largest = weight.scale.max()
    parts = (weight.scale / largest * _LARGEST_SCALE).round().to(torch.int16)
    factor = largest.float() / _LARGEST_SCALE
    return replace(weight, scale=parts.view(weight.scale.dtype), scale_factor=factor)


def backend() -> VllmMarlin:
    needed = ("_C.marlin_gemm", "_C.gptq_marlin_repack", "_moe_C.moe_wna16_marlin_gemm")
    return VllmMarlin(load(needed))
