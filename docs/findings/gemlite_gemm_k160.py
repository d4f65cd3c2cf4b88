"""One scale a channel, K = 160, 64 rows: 160 is expected. A tile of 160 columns is offered, and tl.arange
wants a power of two."""

import torch
from gemlite.helper import A16W4_HQQ_INT

n, k, m, half = 64, 160, 64, torch.float16
u = torch.full((n, k), 9, dtype=torch.uint8, device="cuda")
s, z = (torch.full((n, 1), v, dtype=half, device="cuda") for v in (1.0, 8.0))
layer = A16W4_HQQ_INT(device="cuda", dtype=half).from_weights(u, s, z)
try:
    got = layer(torch.ones(m, k, dtype=half, device="cuda"))[0, 0].item()
except Exception as e:
    got = f"{type(e).__name__}: {str(e).strip().splitlines()[-1][:120]}"
print(f"gemlite_gemm_k160 K={k}: expected {k} got {got}")
