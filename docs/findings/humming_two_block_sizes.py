"""Experts as vLLM 0.26.0 calls them: rows aligned to the tile of the first projection, the second one with a
tuning config of its own. Every row is expected from its own expert; shapes of Mixtral 8x7B, 64 tokens."""

import numpy as np
import torch
from humming.layer import HummingLayer
from humming.schema import BaseWeightSchema
from humming.transform import prepare_layer_config
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
WEIGHTS = METHOD | {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
hidden, inner, experts, slots, bf16 = 4096, 14336, 8, 128, torch.bfloat16

layer = HummingLayer(hidden, inner, WEIGHTS, None, num_experts=experts, torch_dtype=bf16).cuda()
words = torch.tensor([0x11111111 * (9 + e % 7) - 2**32 for e in range(experts)], dtype=torch.int32)
layer.load_from_tensors(
    {  # weights of 1, 2, ..., 7, 1
        "weight_packed": words.view(-1, 1, 1).expand(-1, hidden, inner // 8).contiguous(),
        "weight_scale": torch.full((experts, hidden, inner // 128), 2.0**-10, dtype=bf16),
    }
)
layer.transform()
schema = BaseWeightSchema.from_config(WEIGHTS).to_humming_schema(bf16)
config = prepare_layer_config(2 * inner, hidden, schema, None, num_experts=experts, torch_dtype=bf16)
first = get_heuristics_config(config, shape_m=slots, gemm_type="indexed")["block_shape"][0]
tuning = get_heuristics_config(layer.humming_config, shape_m=slots, gemm_type="indexed")
second = tuning["block_shape"][0]

ids = np.random.default_rng(0).integers(0, experts, slots)
right = torch.tensor([14.0 * (1 + e % 7) for e in ids])
found = []
for block in (second, first):
    order, owners = [], []  # as moe_align_block_size makes them
    for e in range(experts):
        rows = np.flatnonzero(ids == e)
        order.append(np.pad(rows, (0, -len(rows) % block), constant_values=slots))
        owners += [e] * (len(order[-1]) // block)
    order = np.concatenate(order)
    order, owners, padded = (
        torch.tensor(a, dtype=torch.int32, device="cuda") for a in (order, owners, [len(order)])
    )
    y = layer(
        torch.ones((slots, inner), dtype=bf16, device="cuda"),
        outputs=torch.zeros((slots, hidden), dtype=bf16, device="cuda"),
        tuning_config=tuning,
        compute_config={"gemm_type": "indexed"},
        top_k=1,
        valid_shape_m=slots,
        sorted_ids=order,
        expert_ids=owners,
        num_tokens_padded=padded,
    )
    found.append(f"aligned to {block}: {int((y[:, 0].float().cpu() == right).sum())}")
print(
    f"humming_two_block_sizes: expected {slots} rows from their own expert; kernel with tiles of {second}, "
    f"got {'; '.join(found)}"
)
