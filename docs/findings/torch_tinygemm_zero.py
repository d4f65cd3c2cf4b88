"""A weight whose code is its zero point is expected to be 0. tinygemm is handed -z * s in bf16, and gets what
that lost."""

import torch

s, z = 1.0078125, 7  # 1 + 2^-7: z * s has one bit more than bf16 holds
u = torch.full((8, 64), 8 + z, dtype=torch.uint8, device="cuda")
p = torch.ops.aten._convert_weight_to_int4pack((u[:, ::2] << 4 | u[:, 1::2]).contiguous(), 2)
sz = torch.tensor([s, -z * s], dtype=torch.bfloat16, device="cuda").expand(2, 8, 2).contiguous()
y = torch.ops.aten._weight_int4pack_mm(torch.ones(1, 64, dtype=torch.bfloat16, device="cuda"), p, 32, sz)
print(f"torch_tinygemm_zero: expected 0.0 got {y[0, 0].item()} (the sum of 64 weights of zero)")
