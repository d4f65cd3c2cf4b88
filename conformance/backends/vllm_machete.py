"""Machete, vLLM's kernels for Hopper: 4 and 8 bits with activations of 16 bits, dense."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conformance.backend import Checkpoint
from conformance.backends.torch_weights import packed, weight_of
from conformance.backends.vllm_ops import (
    Layer,
    Operators,
    column_order,
    first_reason,
    launched,
    load,
    type_id,
)
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]


class VllmMachete(Operators):
    name = "vllm_machete"
    kernels = "machete"
    # Codes times scales are rounded to the dtype of x, as is -s * u_z, which is then added there.
    contract = Contract(weights="rounded", zero_point="scaled")

    def declined(self, layer: Layer) -> str:
        bits = layer.weight.bits
        return first_reason(
            (bits not in (4, 8), f"Machete takes weights of 4 and 8 bits, not {bits}"),
            (layer.activation != "a16", f"Machete takes activations of 16 bits, not {layer.activation}"),
            (layer.group_size not in (-1, 64, 128), f"Machete has no groups of {layer.group_size}"),
            (not layer.divides(128, 64), "Machete needs N a multiple of 128 and K of 64"),
            (layer.bias, "machete_mm takes no bias; vLLM adds it to the rounded output"),
        )

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        self.refuse(checkpoint)
        weight = weight_of(checkpoint, True)
        order = column_order(weight)
        codes = weight.unsigned if order is None else weight.unsigned[:, order]
        dtype, number = weight.scale.dtype, type_id(weight.bits, weight.zero_point is None)
        column_major = packed(codes.T, weight.bits, 0).T.contiguous().T
        words = torch.ops._C.machete_prepack_B(column_major, dtype, number, dtype)
        scale = weight.scale.T.contiguous()
        zeros = None
        if weight.zero_point is not None:
            zeros = (-1.0 * scale * weight.unsigned_zero_point.T.to(dtype)).contiguous()
        size = weight.group_size

        def linear(x: torch.Tensor) -> torch.Tensor:
            a = x if order is None else torch.ops._C.permute_cols(x, order)
            y = torch.ops._C.machete_mm(a, words, number, None, scale, zeros, size, None, None, None)
            return launched(y, x.device)

        return linear


def backend() -> VllmMachete:
    return VllmMachete(load(("_C.machete_mm", "_C.machete_prepack_B", "_C.permute_cols"), (9, 0), 9))
