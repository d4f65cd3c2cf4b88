"""safe_int_mm on CUDA: an exact int32 product is expected of 1 row as of 32. Up to 16 rows _int_mm refuses,
and an except clause multiplies in float32, where integers above 2^24 are rounded."""

import torch
from torchao.kernel.intmm import safe_int_mm

k = 8192
a, b = (torch.full((rows, k), 127, dtype=torch.int8, device="cuda") for rows in (1, 8))
a[0, 0], expected = 126, 127 * 127 * k - 127
y = safe_int_mm(a, b.t())
print(f"torchao_int8_few_rows_cuda: expected {expected} got {y[0, 0].item()} ({y.dtype})")
y = safe_int_mm(a.expand(32, k).contiguous(), b.t())
print(f"torchao_int8_few_rows_cuda 32 rows: expected {expected} got {y[0, 0].item()} ({y.dtype})")
