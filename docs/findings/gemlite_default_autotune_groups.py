"""set_autotune("default"), 8 bits in groups of 32, one row: 32 * (1 + 2 + 4 + 8) is expected. The one tile
shape left is used without asking what fits it to the groups: one scale for 128 columns."""

import gemlite
import torch
from gemlite.helper import A16W8_HQQ_INT

gemlite.core.set_autotune("default")
n, k, half = 64, 128, torch.float16
u = torch.full((n, k), 129, dtype=torch.uint8, device="cuda")
s = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=half, device="cuda").expand(n, 4).contiguous()
z = torch.full((n, 4), 128.0, dtype=half, device="cuda")
layer = A16W8_HQQ_INT(device="cuda", dtype=half).from_weights(u, s, z)
y = layer(torch.ones(1, k, dtype=half, device="cuda"))
print(f"gemlite_default_autotune_groups M=1: expected {32 * 15} got {y[0, 0].item()}")
