"""gelu_tanh_and_mul in fp16 and bf16: the gated activation is expected. It does not compile, for
libdevice.tanh takes float32 and float64 alone."""

import torch
from conch.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul

for dtype in (torch.float16, torch.bfloat16):
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device="cuda").to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    expected = (torch.nn.functional.gelu(gate, approximate="tanh") * up)[0].tolist()
    try:
        got = gelu_tanh_and_mul(x)[0].tolist()
    except Exception as e:
        got = f"{type(e).__name__}: {str(e).splitlines()[-1][:100]}"
    print(f"conch_gelu_16bit {dtype}: expected {expected} got {got}")
