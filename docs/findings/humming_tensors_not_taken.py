"""A checkpoint whose weight_scale is misspelt: an error is expected that names the tensor. The layer computes
with uninitialised memory."""

import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 4, "type": "int"}
n, k, bf16 = 256, 512, torch.bfloat16
layer = HummingLayer(n, k, METHOD | {"symmetric": True, "strategy": "channel"}, None, torch_dtype=bf16).cuda()
words = torch.full((n, k // 8), -0x66666667, dtype=torch.int32)  # codes of 9, weights of 1
layer.load_from_tensors({"weight_packed": words, "weight_scales": torch.ones(n, 1)})
layer.transform()
x = torch.ones((8, k), dtype=bf16, device="cuda")
y = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))
print(
    "humming_tensors_not_taken: expected an error that names weight_scale or weight_scales, "
    f"got {y[0, :3].tolist()} of uninitialised scales"
)
