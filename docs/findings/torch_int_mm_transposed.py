"""aten::_int_mm on CUDA of two transposed views: their product is expected, or a refusal that names the layout."""

import torch

a = torch.ones((256, 33), dtype=torch.int8, device="cuda").t()
b = torch.ones((256, 256), dtype=torch.int8, device="cuda").t()
try:
    got = torch._int_mm(a, b)[0, 0].item()
except RuntimeError as error:
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
print(f"torch_int_mm_transposed (33, 256) x (256, 256): expected 256 got {got}")
