"""aten::_weight_int8pack_mm on CUDA: the rows of a transposed x are expected, its weights being the unit
matrix. The kernel reads x as contiguous."""

import torch

x = torch.arange(1, 13, dtype=torch.bfloat16, device="cuda").reshape(4, 3).t()  # (3, 4), column-major
w, s = torch.eye(4, dtype=torch.int8, device="cuda"), torch.ones(4, dtype=torch.bfloat16, device="cuda")
y = torch.ops.aten._weight_int8pack_mm(x, w, s)
print(f"torch_int8pack_noncontiguous: expected {x.tolist()[0]} got {y.tolist()[0]}")
