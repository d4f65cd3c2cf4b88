"""gptq_gemm (Exllama), 4 bits: one answer of equal calls, errors of about half an ulp, and a slice of columns
read as such are expected. Sums are fp16 atomics over blocks of 128 columns; strides are not asked for."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
NONE, half = torch.empty(0, dtype=torch.int32, device="cuda"), torch.float16
k, n = 4096, 512


def data(rows):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((rows, k), generator=generator).to("cuda", half)
    q = torch.randint(-8, 8, (k, n), generator=generator).cuda()
    return x, q, (torch.rand((k // 128, n), generator=generator) / 256).to("cuda", half)


def layer(q, s):
    words = ((q + 8).view(-1, 8, n) << 4 * torch.arange(8, device="cuda")[:, None]).sum(1).to(torch.int32)
    torch.ops._C.gptq_shuffle(words, NONE, 4)
    zeros = torch.full((len(s), n // 8), -0x77777778, dtype=torch.int32, device="cuda")  # 8, as they are (v2)
    return lambda x: torch.ops._C.gptq_gemm(x, words, zeros, s, NONE, True, True, 4)


def ulps(rows):
    """The largest error, of numbers above 1 in their last place."""
    x, q, s = data(rows)
    right = x.double() @ (q.double() * s.double().repeat_interleave(128, 0))
    unit = torch.exp2(torch.floor(torch.log2(right.abs().clamp(min=1))) - 10)
    return round(float(((layer(q, s)(x).double() - right).abs() / unit).max()), 1)


x, q, s = data(1)
call = layer(q, s)
answers = {call(x).cpu().numpy().tobytes() for _ in range(200)}
print(f"exllama distinct answers of 200 equal calls: expected 1 got {len(answers)}")
for rows in (50, 51):
    print(
        f"exllama largest error of random data in ulps, {rows} rows: expected 0.5 or little more got {ulps(rows)}"
    )
x, q, s = data(2)
call = layer(q, s)
wide = torch.full((2, k + 16), float("nan"), dtype=half, device="cuda")
wide[:, 8:-8] = x
difference = float((call(wide[:, 8:-8]) - call(x)).abs().max())
print(f"exllama x as a slice of columns: difference from the same rows: expected 0.0 got {difference}")
