"""aten::_weight_int8pack_mm of no rows: an empty result is expected. The launch of an empty grid fails,
nobody looks, and the next kernel of the process gets the blame."""

import torch

w, s = torch.eye(4, dtype=torch.int8, device="cuda"), torch.ones(4, device="cuda")
y = torch.ops.aten._weight_int8pack_mm(torch.ones(0, 4, device="cuda"), w, s)
got = [f"shape {list(y.shape)}"]
for step in ("next kernel", "the one after"):
    try:
        got.append(f"{step} {float(torch.ones(1, device='cuda') + 1)}")
    except Exception as e:
        got.append(f"{step} {type(e).__name__}: {str(e).splitlines()[0][:80]}")
print(f"torch_int8pack_empty: expected shape [0, 4], then 2.0, 2.0 got {'; '.join(got)}")
