"""Exllama, vLLM's kernels for GPTQ weights of 2, 3, 4 and 8 bits in fp16, dense, with act-order.

Up to 50 rows (24 of 8 bits) a kernel multiplies: blocks of 128 columns are added to the output by atomics in fp16.
With more, the weight is dequantized to fp16 and cublasHgemm multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from conformance.backend import Checkpoint
from conformance.backends.torch_weights import packed, weight_of
from conformance.backends.vllm_ops import Layer, Operators, column_order, first_reason, launched, load
from reference.bounds import Contract

Linear = Callable[[torch.Tensor], torch.Tensor]


class VllmExllama(Operators):
    name = "vllm_exllama"
    kernels = "vllm::gptq::"
    # partial_sums: five blocks of 128 columns in the widest case. Sums inside a block, of 8 to 32 products in fp16, and
    # those of cublasHgemm are of zero mean and far below what eight whole parts may be off by.
    contract = Contract(weights="any", partial_sums=8)
    nondeterministic = "blocks of 128 columns are added by atomics in fp16, in any order"

    def declined(self, layer: Layer) -> str:
        bits = layer.weight.bits
        columns = 32 if bits == 3 else 32 // bits
        return first_reason(
            (bits not in (2, 3, 4, 8), f"gptq_gemm takes weights of 2, 3, 4 and 8 bits, not {bits}"),
            (layer.dtype != "fp16", f"gptq_gemm computes in fp16, not in {layer.dtype}"),
            (layer.activation != "a16", f"gptq_gemm takes activations of 16 bits, not {layer.activation}"),
            (
                not layer.divides(columns, 32),
                f"gptq_gemm reads 32 columns at once and zero points in whole words: K must be a multiple of 32, N of "
                f"{columns}",
            ),
            (layer.bias, "gptq_gemm takes no bias; vLLM adds it to the rounded output"),
        )

    def load_linear(self, checkpoint: Checkpoint) -> Linear:
        self.refuse(checkpoint)
        weight = weight_of(checkpoint, True)
        bits = weight.bits
        order = column_order(weight)
        if order is None:
            order = torch.empty(0, dtype=torch.int32, device=weight.codes.device)
        words = packed(weight.unsigned.T, bits, 0)
        torch.ops._C.gptq_shuffle(words, order, bits)
        zeros = packed(weight.unsigned_zero_point.T, bits, 1)
        scale = weight.scale.T.contiguous()

        def linear(x: torch.Tensor) -> torch.Tensor:
            # use_v2_format: zero points as they are; the first format stores them less one, so that it has no zero
            y = torch.ops._C.gptq_gemm(x, words, zeros, scale, order, True, True, bits)
            return launched(y, x.device)

        return linear


def backend() -> VllmExllama:
    return VllmExllama(load(("_C.gptq_gemm", "_C.gptq_shuffle")))
