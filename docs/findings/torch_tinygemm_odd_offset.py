"""aten::_weight_int4pack_mm of an x that begins at an odd element of its memory: an answer or a refusal is expected.
Alignment is not asked for, and the context is lost."""

import torch

p = torch.ops.aten._convert_weight_to_int4pack(torch.zeros(64, 32, dtype=torch.uint8, device="cuda"), 2)
sz = torch.ones(2, 64, 2, dtype=torch.bfloat16, device="cuda")
x = torch.ones(4 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(4, 64)
try:
    y = torch.ops.aten._weight_int4pack_mm(x, p, 32, sz)
    torch.cuda.synchronize()
    got = f"{y[0, 0].item()}"
except Exception as e:
    got = f"{type(e).__name__}: {str(e).splitlines()[0][:100]}"
print(f"torch_tinygemm_odd_offset: expected an answer or a refusal got {got}")
