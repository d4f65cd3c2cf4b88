"""torch._scaled_mm of 256 * 256 and 8191 times 1 * 1, float32 outputs: 73727 is expected. Tensor cores of
sm_90 keep 14 bits of a sum, added up in float32 every 128 columns, or never with use_fast_accum."""

import torch

k = 8192
x = torch.ones(16, k, device="cuda")
x[:, 0] = 256.0
x = w = x.to(torch.float8_e4m3fn)
one = torch.ones(16, 1, device="cuda")
for fast in (False, True):
    y = torch._scaled_mm(x, w.t(), one, one.T.contiguous(), out_dtype=torch.float32, use_fast_accum=fast)
    print(f"torch_scaled_mm fast accumulation {fast}: expected {65536 + k - 1} got {y[0, 0].item()}")
