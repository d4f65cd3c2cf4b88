"""A router and block alignment in plain torch: scores in float32, torch.topk, whose ties go to any index."""

from __future__ import annotations

from itertools import pairwise

import torch

from reference.routing import Routing


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = logits.float()
    scores = torch.sigmoid(values) if routing.scoring == "sigmoid" else torch.softmax(values, dim=-1)
    scores = torch.where(torch.isfinite(scores), scores, 0.0)
    keys = scores if bias is None else scores + bias
    if routing.groups > 1:
        members = keys.unflatten(-1, (routing.groups, -1))
        count = 1 if routing.group_score == "max" else 2
        kept = members.topk(count, dim=-1).values.sum(dim=-1).topk(routing.top_groups, dim=-1).indices
        outside = torch.ones(members.shape[:-1], dtype=torch.bool, device=keys.device).scatter(
            -1, kept, False
        )
        keys = members.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    ids = keys.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.normalized:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * routing.scaling, ids.to(torch.int32)


def local_ids(ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """The place of each global id among the experts that are present, -1 for none."""
    slots = ids.long()
    if expert_map is None:
        return slots
    return torch.where(slots < 0, -1, expert_map.long()[slots.clamp(min=0)])


def slots_by_expert(places: torch.Tensor, experts: int) -> list[tuple[int, torch.Tensor]]:
    """Of each expert that has any, its slots: where it stands in `places` (T, k), flattened. The device is waited for
    once, however many experts there are. Raises IndexError for an expert that there is not."""
    flat = places.flatten()
    slots = flat.argsort(stable=True)
    edges = torch.arange(experts + 1, dtype=flat.dtype, device=flat.device)
    ends = torch.searchsorted(flat[slots], edges).tolist()
    if ends[-1] < len(flat):
        raise IndexError(f"an id is beyond the {experts} experts")
    return [(expert, slots[a:b]) for expert, (a, b) in enumerate(pairwise(ends)) if a < b]


def align_block_size(
    ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots = ids.flatten()
    local = local_ids(slots, expert_map)
    if expert_map is not None:
        experts = int(expert_map.max()) + 1
    order = torch.sort(local, stable=True).indices[int((local < 0).sum()) :]
    counts = torch.bincount(local[order], minlength=experts)
    blocks = (counts + block - 1) // block
    starts = (blocks.cumsum(0) - blocks) * block
    firsts = counts.cumsum(0) - counts
    within = torch.arange(len(order), device=ids.device) - firsts[local[order]]
    padded = blocks.sum() * block
    sorted_ids = torch.full((int(padded),), len(slots), dtype=torch.int32, device=ids.device)
    sorted_ids[starts[local[order]] + within] = order.to(torch.int32)
    owners = torch.repeat_interleave(torch.arange(experts, device=ids.device), blocks)
    return sorted_ids, owners.to(torch.int32), padded.reshape(1).to(torch.int32)
