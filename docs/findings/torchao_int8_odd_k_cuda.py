"""safe_int_mm on CUDA, K or N that 8 does not divide: a product on the device is expected. It is taken on the
CPU: copies are all that the device sees."""

import torch
from torchao.kernel.intmm import safe_int_mm

device = f"cuda:{torch.cuda.device_count() - 1}"
a = torch.randint(-128, 128, (64, 36), dtype=torch.int8, device=device)
b = torch.randint(-128, 128, (24, 36), dtype=torch.int8, device=device)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
    y = safe_int_mm(a, b.t())
names = sorted({e.name for e in seen.events()})
right = torch.equal(y.cpu().long(), a.cpu().long() @ b.cpu().long().T)
print(
    f"torchao_int8_odd_k_cuda: expected a kernel on {device} got device {y.device}, right {right}, launched {names}"
)
