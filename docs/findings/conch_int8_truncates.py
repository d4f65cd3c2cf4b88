"""scaled_int8_quant with a scale of 1: the nearest integers are expected, ties to even. It truncates toward
zero."""

import torch
from conch.ops.quantization.int8 import scaled_int8_quant

x = torch.tensor([[0.5, 0.9, 1.5, -0.9, -1.5, 2.6]], dtype=torch.float16, device="cuda")
codes, _ = scaled_int8_quant(x, torch.ones(1, device="cuda"))
print(f"conch_int8_truncates: expected {x.float().round()[0].int().tolist()} got {codes[0].tolist()}")
