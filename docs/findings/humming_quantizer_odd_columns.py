"""A quantizer of 17 columns: codes are expected, or a refusal that says why."""

import torch
from humming import ops

x = torch.ones((2, 17), dtype=torch.bfloat16, device="cuda")
try:
    got = ops.process_input(x, quant_mode="dynamic_token", quant_dtype="int8")[0][0, 0].item()
except Exception as error:
    got = f"{type(error).__name__}({str(error)!r})"
print(f"humming_quantizer_odd_columns: expected 127 or a message, got {got}")
