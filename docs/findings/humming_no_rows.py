"""A call without rows: a result of shape (0, 256) is expected."""

import torch
from humming.layer import HummingLayer

METHOD = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
WEIGHTS = METHOD | {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
n, k, bf16 = 256, 512, torch.bfloat16
layer = HummingLayer(n, k, WEIGHTS, None, torch_dtype=bf16).cuda()
layer.load_from_tensors(
    {
        "weight_packed": torch.full((n, k // 8), -0x66666667, dtype=torch.int32),
        "weight_scale": torch.ones((n, 4), dtype=bf16),
        "weight_shape": torch.tensor([n, k]),
    }
)
layer.transform()
try:
    got = tuple(layer(torch.ones((0, k), dtype=bf16, device="cuda")).shape)
except Exception as error:
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]!r}"
print(f"humming_no_rows: expected an answer, got {got}")
