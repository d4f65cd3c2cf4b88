"""272 codes of 3 bits are 816 bits, 26 words. The schema counts 25 and refuses the checkpoint."""

import numpy as np
import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 3, "type": "int"}
n, k, bf16 = 256, 272, torch.bfloat16
bits = np.pad(np.tile([1, 0, 1], k), (0, 16)).astype(np.uint8)  # codes of 5, weights of 1
words = torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4")).repeat(n, 1)
layer = HummingLayer(n, k, METHOD | {"symmetric": True, "strategy": "channel"}, None, torch_dtype=bf16).cuda()
try:
    scale = torch.ones((n, 1), dtype=bf16)
    layer.load_from_tensors(
        {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    )
    layer.transform()
    x = torch.ones((8, k), dtype=bf16, device="cuda")
    got = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))[0, 0].item()
except Exception as error:
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]!r}"
print(f"humming_packed_width_k272: expected an answer, got {got}")
