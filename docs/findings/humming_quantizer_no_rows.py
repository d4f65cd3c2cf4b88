"""process_input of no rows: empty codes are expected. It takes the empty tensors for one and the same."""

import torch
from humming import ops

for kind in ("int8", "float8e4m3"):
    x = torch.zeros((0, 512), dtype=torch.bfloat16, device="cuda")
    try:
        codes, *_ = ops.process_input(x, quant_mode="dynamic_token", quant_dtype=kind)
        got = tuple(codes.shape)
    except Exception as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[-60:]!r}"
    print(f"humming_quantizer_no_rows {kind}: expected (0, 512) got {got}")
