"""aten::_weight_int8pack_mm on the CPU, bf16: zeros are expected wherever x lies and whatever K is. Where K %
16 != 0, or x does not begin at a multiple of 32 bytes, the process ends."""

import subprocess
import sys

CODE = """
import torch
m, n, k, offset = (int(v) for v in {args!r}.split())
memory = torch.zeros(m * k * 2 + 128, dtype=torch.uint8)
start = -memory.data_ptr() % 64 + offset
x = memory[start : start + m * k * 2].view(torch.bfloat16).view(m, k)
w, s = torch.ones(n, k, dtype=torch.int8), torch.ones(n, dtype=torch.bfloat16)
print(torch.ops.aten._weight_int8pack_mm(x, w, s).sum().item())
"""
got = []
for args in ("5 64 64 0", "5 64 64 4", "5 64 64 16", "5 64 40 0", "5 64 33 0"):
    done = subprocess.run([sys.executable, "-c", CODE.format(args=args)], capture_output=True, text=True)
    got.append(f"M N K offset {args}: {done.stdout.strip() or 'exit code ' + str(done.returncode)}")
print("torch_int8pack_unaligned_cpu: expected 0.0 each time got " + "; ".join(got))
