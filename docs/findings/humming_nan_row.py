"""NaN (first row) or Inf (second) among the activations of a row that is quantized: NaN is expected in its
place. int8 turns NaN into 0."""

import torch
from humming import ops

x = torch.ones((2, 512), dtype=torch.bfloat16, device="cuda")
x[0, 7], x[1, 7] = torch.nan, torch.inf
found = []
for kind in ("int8", "float8e4m3"):
    codes, _, scales = ops.process_input(x, quant_mode="dynamic_token", quant_dtype=kind)
    values = codes.float() * scales
    found.append(f"{kind} {values[0, 6:9].tolist()} and {values[1, 6:9].tolist()}")
print(f"humming_nan_row: expected NaN at the second of each three, got {'; '.join(found)}")
