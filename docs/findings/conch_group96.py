"""mixed_precision_gemm with groups of 96, no multiple of its tile of 64: 96 * (1 + 2) is expected. A tile
across two groups takes the scale of the first. strict=True passes."""

import torch
from conch.ops.quantization.gemm import mixed_precision_gemm

n, k, g, half = 64, 192, 96, torch.float16
words = torch.full((k // 8, n), 0x11111111, dtype=torch.int32, device="cuda")  # codes of 1
scales = torch.tensor([1.0, 2.0], dtype=half, device="cuda")[:, None].expand(2, n).contiguous()
x = torch.ones(16, k, dtype=half, device="cuda")
y = mixed_precision_gemm(x, words, scales, None, 4, 0, g, strict=True)
print(f"conch_group96: expected {96 * 3} got {y[0, 0].item()}")
