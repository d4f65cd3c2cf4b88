"""scale_activations_per_token to int8 with a scale of 1: ties to even are expected, as of the library's own
torch version. The kernel rounds half away from zero."""

import torch
from gemlite import quant_utils

x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -2.5]], dtype=torch.float16, device="cuda")
codes, _ = quant_utils.scale_activations_per_token(x, torch.int8)
print(f"gemlite_int8_ties: expected {x.float().round()[0].int().tolist()} got {codes[0].tolist()}")
