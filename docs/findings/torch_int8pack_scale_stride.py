"""aten::_weight_int8pack_mm on CUDA: every second of eight float32 scales is expected to be used. They are
read as contiguous, whatever their stride."""

import torch

x, w = torch.ones(1, 4, device="cuda"), torch.eye(4, dtype=torch.int8, device="cuda")
s = torch.arange(8, dtype=torch.float32, device="cuda")[::2]  # 0 2 4 6
y = torch.ops.aten._weight_int8pack_mm(x, w, s)
print(f"torch_int8pack_scale_stride: expected {s.tolist()} got {y[0].tolist()}")
