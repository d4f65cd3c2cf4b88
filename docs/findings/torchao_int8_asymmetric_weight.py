"""Int8Tensor.from_hp makes asymmetric weights: the product with what it dequantizes to is expected of its
linear, or a refusal. It leaves the zero points out. CPU or CUDA."""

import torch
from torchao.quantization import Int8Tensor, MappingType, PerRow

torch.manual_seed(0)
w = Int8Tensor.from_hp(torch.rand(4, 64), PerRow(), mapping_type=MappingType.ASYMMETRIC)
x = torch.ones(1, 64)
y = torch.nn.functional.linear(x, w)
print(f"torchao_int8_asymmetric_weight: expected {(x @ w.dequantize().T)[0].tolist()} got {y[0].tolist()}")
