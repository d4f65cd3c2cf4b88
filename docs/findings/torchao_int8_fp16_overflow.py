"""Weight-only Int8Tensor in fp16: the product of codes is expected to meet the channel's scale before 16
bits. CPU or CUDA."""

import torch
from torchao.quantization import Int8Tensor, PerRow

k, half = 1024, torch.float16
x = torch.ones(1, k, dtype=half)
w = Int8Tensor(
    torch.full((8, k), 127, dtype=torch.int8), torch.full((8, 1), 2.0**-10, dtype=half), [1, k], half
)
y = torch.nn.functional.linear(x, w)
print(f"torchao_int8_fp16_overflow: expected {127 * k * 2.0**-10} got {y[0, 0].item()}")
y = torch.nn.functional.linear(x, Int8Tensor.from_hp(torch.full((8, k), 0.125, dtype=half), PerRow()))
print(f"torchao_int8_fp16_overflow from_hp: expected {0.125 * k} got {y[0, 0].item()}")
