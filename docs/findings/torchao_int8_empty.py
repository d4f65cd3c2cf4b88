"""Int8Tensor with dynamic activations, no rows: a result of shape (0, 8) is expected. An empty zero point is
taken for none. CPU or CUDA."""

import torch
from torchao.quantization import PerRow
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor, QuantizeTensorToInt8Kwargs

kwargs = QuantizeTensorToInt8Kwargs(granularity=PerRow())
w = Int8Tensor.from_hp(torch.randn(8, 16), PerRow(), act_quant_kwargs=kwargs)
try:
    got = list(torch.nn.functional.linear(torch.randn(0, 16), w).shape)
except Exception as e:
    got = f"{type(e).__name__}: {e}"
print(f"torchao_int8_empty: expected shape [0, 8] got {got}")
