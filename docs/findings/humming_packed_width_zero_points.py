"""72 zero points of 3 bits are 216 bits, 7 words. The schema counts 6 and refuses the checkpoint."""

import numpy as np
import torch
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 3, "type": "int"}
WEIGHTS = METHOD | {"symmetric": False, "strategy": "group", "group_size": 128}
n, k, bf16 = 72, 512, torch.bfloat16


def words(code, count):
    """`count` equal codes of 3 bits."""
    bits = np.tile([code & 1, code >> 1 & 1, code >> 2], count).astype(np.uint8)
    return torch.from_numpy(np.packbits(np.pad(bits, (0, -len(bits) % 32)), bitorder="little").view("<i4"))


layer = HummingLayer(n, k, WEIGHTS, None, torch_dtype=bf16).cuda()
try:
    layer.load_from_tensors(
        {
            "weight_packed": words(5, k).repeat(n, 1),
            "weight_zero_point": words(4, n)[:, None].repeat(1, 4),
            "weight_scale": torch.ones((n, 4), dtype=bf16),
            "weight_shape": torch.tensor([n, k]),
        }
    )
    layer.transform()
    x = torch.ones((8, k), dtype=bf16, device="cuda")
    got = layer(x, tuning_config=get_heuristics_config(layer.humming_config, shape_m=8))[0, 0].item()
except Exception as error:
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]!r}"
print(f"humming_packed_width_zero_points: expected an answer, got {got}")
