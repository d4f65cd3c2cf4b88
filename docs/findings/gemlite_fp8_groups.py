"""fp8 activations with grouped weights of 4 bits, as its A8W4 helpers make them: 64 rows of ones times weights of
7 * 0.3 are expected to be 268.8. The sum of codes of 448 times weights is rounded to float16 before it meets the row's
scale."""

import torch
from gemlite.core import DType, GemLiteLinearTriton

n, k, g, m = 64, 128, 32, 64
layer = GemLiteLinearTriton(
    4,
    group_size=g,
    in_features=k,
    out_features=n,
    input_dtype=DType.FP8,
    output_dtype=DType.FP16,
    scaled_activations=True,
)
u = torch.full((n, k), 15, dtype=torch.uint8, device="cuda")
zeros = torch.full((n, k // g), 8.0, dtype=torch.float16, device="cuda")
layer.pack(u, torch.full((n, k // g), 0.3, dtype=torch.float16, device="cuda"), zeros, fma_mode=False)
y = layer(torch.ones(m, k, dtype=torch.float16, device="cuda"))
print(f"gemlite_fp8_groups: expected {k * 7 * 0.30005:.1f} got {y[0, 0].item()}")
