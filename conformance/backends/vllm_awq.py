"""AWQ, vLLM's kernels for 4 bits with zero points in fp16, dense.

Fewer than 256 rows are multiplied in eight parts of K, each stored in fp16; with more, as in vLLM's layer, the weight
is dequantized to fp16 and torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from conformance.backend import Checkpoint
from conformance.backends.torch_weights import packed, weight_of
from conformance.backends.vllm_ops import Layer, Operators, first_reason, launched, load
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]

_SPLIT_K = 8
_ROWS_TO_DEQUANTIZE = 256
# The column of each of the eight codes of a word.
_IN_A_WORD = [0, 2, 4, 6, 1, 3, 5, 7]


class VllmAwq(Operators):
    name = "vllm_awq"
    kernels = "vllm::awq::"
    contract = Contract(weights="rounded", partial_sums=_SPLIT_K)

    def declined(self, layer: Layer) -> str:
        (n, k) = layer.shapes[0]
        size = k if layer.group_size < 0 else layer.group_size
        return first_reason(
            (layer.weight.bits != 4, f"awq_gemm takes weights of 4 bits, not {layer.weight.bits}"),
            (layer.weight.symmetric, "AWQ weights have zero points: no symmetric formats"),
            (layer.dtype != "fp16", f"awq_gemm computes in fp16, not in {layer.dtype}"),
            (layer.activation != "a16", f"awq_gemm takes activations of 16 bits, not {layer.activation}"),
            (layer.act_order, "AWQ has no group activation ordering"),
            (n % 64 != 0, f"awq_gemm needs N a multiple of 64, not {n}"),
            (size % 32 != 0, f"awq_gemm needs groups of a multiple of 32 columns, not {size}"),
            (n % size != 0, f"awq_gemm needs N={n} a multiple of the group's {size} columns"),
            (layer.bias, "awq_gemm takes no bias; vLLM adds it to the rounded output"),
        )

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        self.refuse(checkpoint)
        weight = weight_of(checkpoint)
        words, zeros = _in_words(weight.unsigned.T), _in_words(weight.unsigned_zero_point.T)
        scale = weight.scale.T.contiguous()

        def linear(x: torch.Tensor) -> torch.Tensor:
            if len(x) < _ROWS_TO_DEQUANTIZE:
                y = torch.ops._C.awq_gemm(x, words, scale, zeros, _SPLIT_K)
            else:
                y = x @ torch.ops._C.awq_dequantize(words, scale, zeros, 0, 0, 0)
            return launched(y, x.device)

        return linear


def _in_words(codes: torch.Tensor) -> torch.Tensor:
    """int32 words of eight codes (rows, N) each, along N."""
    return packed(codes.reshape(len(codes), -1, 8)[..., _IN_A_WORD].flatten(1), 4, 1)


def backend() -> VllmAwq:
    return VllmAwq(load(("_C.awq_gemm", "_C.awq_dequantize")))
