"""aten::_weight_int4pack_mm of no rows: a result of shape (0, 64) is expected, as of other products."""

import torch

p = torch.ops.aten._convert_weight_to_int4pack(torch.zeros(64, 32, dtype=torch.uint8, device="cuda"), 2)
sz = torch.ones(2, 64, 2, dtype=torch.bfloat16, device="cuda")
try:
    y = torch.ops.aten._weight_int4pack_mm(torch.ones(0, 64, dtype=torch.bfloat16, device="cuda"), p, 32, sz)
    got = f"shape {list(y.shape)}"
except Exception as e:
    got = f"{type(e).__name__}: {str(e).splitlines()[0][:100]}"
got += f"; next kernel {float(torch.ones(1, device='cuda') + 1)}"
print(f"torch_tinygemm_empty: expected shape [0, 64]; next kernel 2.0 got {got}")
