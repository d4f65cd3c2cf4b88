"""Int8Tensor.from_hp per row of a matrix with one column: one scale a row is expected. CPU or CUDA."""

import torch
from torchao.quantization import Int8Tensor, PerRow

try:
    got = Int8Tensor.from_hp(torch.tensor([[1.0], [2.0], [4.0]]), PerRow()).scale.numel()
except Exception as e:
    got = f"{type(e).__name__}: {str(e)[:120]}"
print(f"torchao_int8_one_column: expected 3 scales got {got}")
