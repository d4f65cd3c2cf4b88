"""fp8 activations, float16 outputs: 2^-18 and 3 * 2^-18 are expected, numbers of float16. A factor of 2^9 is
multiplied in after the rounding to float16, so that outputs are multiples of 2^-15."""

import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
WEIGHTS = METHOD | {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
INPUTS = METHOD | {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
n, k, half = 256, 512, torch.float16
words = torch.full((n, k // 8), -0x77777778, dtype=torch.int32)  # codes of 8, weights of 0
words[:, 0] += 1  # the first column has weights of 1
words[1, 0] += 2  # and one of 3
layer = HummingLayer(n, k, WEIGHTS, INPUTS, torch_dtype=half).cuda()
scale = torch.full((n, 4), 2.0**-12, dtype=half)
layer.load_from_tensors({"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([n, k])})
layer.transform()
x = torch.full((8, k), 2.0**-6, dtype=half, device="cuda")
y = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))
print(f"humming_fp16_fp8_small: expected {[2.0**-18, 3 * 2.0**-18]}, got {y[0, :2].tolist()}")
