"""K = 96, no multiple of the tile of 64: the sum of 96 ones is expected. Neither operand is masked along K,
so that a row is multiplied on into what lies behind it. strict=True passes."""

import torch
from conch.ops.quantization.gemm import mixed_precision_gemm, scaled_gemm

n, k, half = 64, 96, torch.float16
x = torch.ones(16, k, dtype=half, device="cuda")
words = torch.full((2 * k // 8, n), 0x11111111, dtype=torch.int32, device="cuda")[
    : k // 8
]  # ones go on behind
y = mixed_precision_gemm(x, words, torch.ones(1, n, dtype=half, device="cuda"), None, 4, 0, k, strict=True)
print(f"conch_k_tail packed: expected {k} got {y[0, 0].item()}")
a, b = (torch.ones(rows, k, dtype=torch.int8, device="cuda") for rows in (16, n))
one = torch.ones(n, 1, device="cuda")
y = scaled_gemm(a, b.t(), one[:16], one, torch.float32, strict=True)
print(f"conch_k_tail scaled: expected {k} got {y[0, 0].item()}")
