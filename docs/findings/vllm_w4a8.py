"""cutlass_w4a8_mm: code times group scale is expected to the precision of bf16, and weights to be encoded on
the stream of the caller. The product is rounded to e4m3; the encoder runs on the default stream."""

import importlib.util
from pathlib import Path

import torch

place = Path((importlib.util.find_spec("vllm") or importlib.util.find_spec("vllm_ops_sm90")).origin).parent
for path in sorted([*place.glob("_C*.so"), *place.glob("_moe_C*.so")]):
    torch.ops.load_library(str(path))
C, F8, k, n = torch.ops._C, torch.float8_e4m3fn, 256, 128


def one_hot(code, ratios):
    """code times the scale of the second of two groups, `ratios` of the largest; as vLLM does, that is 56 a row."""
    n = len(ratios)
    words = torch.full((n, k // 2), (code & 15) * 17, dtype=torch.uint8, device="cuda").view(torch.int32).T
    scale = torch.stack([torch.ones_like(ratios), ratios]) * 56
    a = torch.zeros((16, k), device="cuda")
    a[:, 128] = 1
    weight, packed = C.cutlass_encode_and_reorder_int4b(words), C.cutlass_pack_scale_fp8(scale.to(F8))
    by_row, by_token = (
        torch.full((size, 1), value, device="cuda") for size, value in ((n, 1 / 56), (16, 1.0))
    )
    return C.cutlass_w4a8_mm(a.to(F8), weight, packed, 128, by_row, by_token, None, None)[0].float()


for code, ratio, name, expected in (
    (7, 52 / 56, "a group scale 52/56 of the largest", 6.5),
    (3, 52 / 56, "a group scale 52/56 of the largest", 2.79688),
    (7, 1.0, "the largest group scale", 7.0),
):
    got = [round(v, 5) for v in one_hot(code, torch.full((n,), ratio, device="cuda"))[:4].tolist()]
    print(f"w4a8 {code} times {name}: expected {[expected] * 4} got {got}")
ratios = torch.rand((2, 1024), generator=torch.Generator().manual_seed(3))[1].cuda() / 2 + 0.5
worst = max(
    float((one_hot(code, ratios) / (code * ratios) - 1).abs().max()) for code in (-8, -7, -5, -3, 3, 5, 7)
)
print(f"w4a8 worst relative error of code * group scale: expected 0.002 (bf16) got {round(worst, 4)}")

torch.manual_seed(4)
words = torch.randint(0, 256, (1024, 2048), dtype=torch.uint8, device="cuda").view(torch.int32).T
right, late = C.cutlass_encode_and_reorder_int4b(words), torch.zeros_like(words)
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda._sleep(100_000_000)
    late.copy_(words)
    got = C.cutlass_encode_and_reorder_int4b(late)
torch.cuda.synchronize()
print(f"w4a8 encode on a side stream: words that differ: expected 0 got {int((got != right).sum())}")
