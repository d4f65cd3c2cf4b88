"""Int8Tensor.from_hp of small numbers: each is expected within a step of the row's own scale. Scales are kept
at or above 1.19e-07. CPU or CUDA."""

import torch
from torchao.quantization import Int8Tensor, PerRow

x = torch.tensor([[1.0, -0.5, 0.25]]) * 2.0**-26
got = Int8Tensor.from_hp(x, PerRow()).dequantize()[0].tolist()
print(f"torchao_int8_small_rows: expected {x[0].tolist()} within a step of 1/255 got {got}")
