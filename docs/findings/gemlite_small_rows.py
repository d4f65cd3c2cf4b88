"""scale_activations_per_token: the largest of a row over 127 (448 for fp8) is expected as its scale. Scales
are kept at or above 1e-6, and rows of small numbers lose their bits."""

import torch
from gemlite import quant_utils

x = torch.tensor([[1.0, -0.55, 0.3]], dtype=torch.bfloat16, device="cuda") * 2.0**-22
for kind, largest in ((torch.int8, 127), (torch.float8_e4m3fn, 448)):
    codes, scale = quant_utils.scale_activations_per_token(x, kind)
    print(
        f"gemlite_small_rows {kind}: expected {x[0].tolist()}, scale {float(x.max()) / largest:.2e} "
        f"got {(codes.float() * scale)[0].tolist()}, scale {scale.item():.2e}"
    )
