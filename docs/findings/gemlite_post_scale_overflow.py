"""A16W4 with post_scale=True in fp16: 4 * 7 * 4096 * 2^-8 = 448 is expected. The unscaled sum is stored in
fp16 before the channel's scale."""

import torch
from gemlite.helper import A16Wn

n, k, m, half = 64, 4096, 64, torch.float16
u = torch.full((n, k), 15, dtype=torch.uint8, device="cuda")
s, z = (torch.full((n, 1), v, dtype=half, device="cuda") for v in (2.0**-8, 8.0))
layer = A16Wn(device="cuda", dtype=half, post_scale=True).from_weights(u, s, z, 4, k)
y = layer(torch.full((m, k), 4.0, dtype=half, device="cuda"))
print(f"gemlite_post_scale_overflow: expected {4 * 7 * k * 2.0**-8} got {y[0, 0].item()}")
