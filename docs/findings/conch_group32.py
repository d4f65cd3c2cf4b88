"""mixed_precision_gemm with groups of 32: 32 * (1 + 2 + 4 + 8) is expected. Its tile of 64 columns takes the
scale of every second group. strict=True passes."""

import torch
from conch.ops.quantization.gemm import mixed_precision_gemm

n, k, g, half = 64, 128, 32, torch.float16
words = torch.full((k // 8, n), 0x11111111, dtype=torch.int32, device="cuda")  # codes of 1
scales = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=half, device="cuda")[:, None].expand(4, n).contiguous()
x = torch.ones(16, k, dtype=half, device="cuda")
y = mixed_precision_gemm(x, words, scales, None, 4, 0, g, strict=True)
print(f"conch_group32: expected {32 * (1 + 2 + 4 + 8)} got {y[0, 0].item()}")
