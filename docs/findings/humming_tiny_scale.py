"""A row of zeros, and one of 2^-120: the largest of a row is expected to have code 127. Scales are kept at or
above 1e-30."""

import torch
from humming import ops

x = torch.zeros((2, 128), dtype=torch.bfloat16, device="cuda")
x[1] = 2.0**-120
codes, _, scales = ops.process_input(x, quant_mode="dynamic_token", quant_dtype="int8")
print(
    f"humming_tiny_scale: expected codes [0, 127], got {codes[:, 0].tolist()}, scales {scales.flatten().tolist()}"
)
