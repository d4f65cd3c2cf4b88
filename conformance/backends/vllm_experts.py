"""Experts by vLLM's operators: the layer around grouped products, and `moe_wna16_gemm`, a kernel for few tokens.

That kernel takes 4 and 8 bits in the order of a checkpoint's own words. Four or eight products at a time are summed in
the dtype of x, then in float32 over a block of K; the blocks are added to the output by atomics in the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from conformance.backend import MoeCheckpoint
from conformance.backends.grouped_experts import GroupedExperts, Projection
from conformance.backends.torch_weights import TorchWeight, experts_of, packed
from conformance.backends.vllm_ops import Layer, Operators, aligned, first_reason, launched, load
from reference.bounds import Contract

# Columns of a block of K where the groups allow it, and of N.
_BLOCK_K, _BLOCK_N = 128, 128
_BLOCK_M = 16
# What one block of threads may hold of x without asking for more shared memory.
_SHARED_BYTES = 48 * 1024


def experts_layer(
    checkpoint: MoeCheckpoint, projection: Callable[[list[TorchWeight]], Projection], act_order: bool = False
) -> GroupedExperts:
    """The layer of a checkpoint, given what makes a projection of the weights of its experts."""

    def both(prefix: str) -> tuple[Projection, Projection]:
        w13, w2 = (experts_of(checkpoint, prefix + which, act_order) for which in ("w13", "w2"))
        return projection(w13), projection(w2)

    shared = both("shared_") if "shared_w13_weight_packed" in checkpoint.tensors else None
    return GroupedExperts(checkpoint, *both(""), shared)


class VllmMoeWna16(Operators):
    name = "vllm_moe_wna16"
    kernels = "moe_wna16_gemm_kernel"
    # weights: (u - u_z) * s in the dtype of x. partial_sums: at most five blocks of K in a case, each stored in that
    # dtype; the short sums inside a block, which are too, are far below what that allows.
    contract = Contract(weights="rounded", intermediates="16-bit", partial_sums=5)
    nondeterministic = "blocks of K are added by atomics in 16 bits, in any order"

    def declined(self, layer: Layer) -> str:
        bits = layer.weight.bits
        return first_reason(
            (
                layer.activation != "a16",
                f"moe_wna16_gemm takes activations of 16 bits, not {layer.activation}",
            ),
            (bits not in (4, 8), f"moe_wna16_gemm takes weights of 4 and 8 bits, not {bits}"),
            (layer.act_order, "moe_wna16_gemm has no group activation ordering"),
            (layer.bias, "moe_wna16_gemm takes no bias"),
            (
                not layer.divides(8 // bits, 128 // bits),
                f"moe_wna16_gemm reads 16 bytes of weights at once: K must be a multiple of {128 // bits}",
            ),
            (
                any(self._block(k, layer.group_size) * _BLOCK_M * 2 > _SHARED_BYTES for _, k in layer.shapes),
                "one scale a row makes one block of all of K, which exceeds the shared memory of moe_wna16_gemm",
            ),
        )

    def load_moe(self, checkpoint: MoeCheckpoint) -> GroupedExperts:
        layer = self.refuse(checkpoint)
        return experts_layer(checkpoint, lambda weights: self._projection(weights, layer.group_size))

    def _projection(self, weights: list[TorchWeight], group_size: int) -> Projection:
        bits, (n, k) = weights[0].bits, weights[0].codes.shape
        words = torch.stack([packed(w.unsigned, bits, 1).view(torch.uint8) for w in weights])
        scale = torch.stack([w.scale for w in weights])
        zero_points = None
        if weights[0].zero_point is not None:
            zero_points = torch.stack([_paired(w.unsigned_zero_point, bits) for w in weights])
        block_k = self._block(k, group_size)

        def project(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            sorted_ids, expert_ids, count = aligned(places, len(weights), _BLOCK_M)
            y = torch.empty((places.numel(), n), dtype=x.dtype, device=x.device)
            torch.ops._moe_C.moe_wna16_gemm(
                x, y, words, scale, zero_points, None, sorted_ids, expert_ids, count, places.shape[1],
                _BLOCK_M, _BLOCK_N, block_k, bits,
            )  # fmt: skip
            return launched(y.reshape(*places.shape, n), x.device)

        return project

    @staticmethod
    def _block(k: int, group_size: int) -> int:
        """Columns of K a block: the largest number of whole groups, at most _BLOCK_K columns unless one group has
        more, that divides K and is 1, 2, 4 or 8 groups."""
        group = k if group_size < 0 else group_size
        fitting = [m for m in (8, 4, 2, 1) if k % (m * group) == 0 and m * group <= max(_BLOCK_K, group)]
        return group * (fitting[0] if fitting else 1)


def _paired(zero_points: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 (N * bits / 8, G): of 4 bits an even row in the low half of a byte, the next row in the high one."""
    if bits == 8:
        return zero_points
    return zero_points[0::2] | zero_points[1::2] << 4


def moe_wna16_backend() -> VllmMoeWna16:
    return VllmMoeWna16(load(("_moe_C.moe_wna16_gemm", "_moe_C.moe_align_block_size")))
