"""int8 activations with grouped weights of 0.5: 64 is expected, or a refusal. Constructor and pack() take
them, and the scaled weights are cut to int8."""

import torch
from gemlite.core import DType, GemLiteLinearTriton

n, k, g, m = 64, 128, 64, 16
layer = GemLiteLinearTriton(
    4,
    group_size=g,
    in_features=k,
    out_features=n,
    input_dtype=DType.INT8,
    output_dtype=DType.FP16,
    scaled_activations=True,
)
u = torch.full((n, k), 9, dtype=torch.uint8, device="cuda")
layer.pack(u, torch.full((n, k // g), 0.5, dtype=torch.float16, device="cuda"), 8, fma_mode=False)
y = layer(torch.ones(m, k, dtype=torch.float16, device="cuda"))
print(f"gemlite_int8_grouped: expected {k * 0.5} or a refusal got {y[0, 0].item()}")
