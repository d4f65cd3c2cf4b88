"""fp8 activations, one scale a channel: 448 * 7 + 4095 * 2^-4 is expected to the precision of bfloat16. The
tensor core's 14 bits are never added up in float32."""

import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
WEIGHTS = METHOD | {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
INPUTS = METHOD | {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
n, k, bf16 = 256, 4096, torch.bfloat16
words = torch.full((n, k // 8), -0x66666667, dtype=torch.int32)  # codes of 9, weights of 1
words[:, 0] += 6  # the first column has weights of 7
layer = HummingLayer(n, k, WEIGHTS, INPUTS, torch_dtype=bf16).cuda()
scale = torch.ones((n, 1), dtype=bf16)
layer.load_from_tensors({"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([n, k])})
layer.transform()
x = torch.full((8, k), 0.0625, dtype=bf16, device="cuda")
x[:, 0] = 448
y = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))
print(
    f"humming_fp8_channel_accumulator: expected {448 * 7 + 4095 * 0.0625} (3392.0 in bfloat16), "
    f"got {y[0, 0].item()}"
)
