"""float16, one scale a channel of 2^-10: 512 * 120 * 7 * 2^-10 = 420 is expected. The unscaled sum, 430080,
is rounded to float16 before it meets the scale."""

import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 4, "type": "int"}
n, k, half = 256, 512, torch.float16
layer = HummingLayer(n, k, METHOD | {"symmetric": True, "strategy": "channel"}, None, torch_dtype=half).cuda()
layer.load_from_tensors(
    {
        "weight_packed": torch.full((n, k // 8), -1, dtype=torch.int32),  # codes of 15, weights of 7
        "weight_scale": torch.full((n, 1), 2.0**-10, dtype=half),
        "weight_shape": torch.tensor([n, k]),
    }
)
layer.transform()
x = torch.full((8, k), 120.0, dtype=half, device="cuda")
y = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))
print(f"humming_fp16_channel_scale_inf: expected 420.0, got {y[0, 0].item()}")
