"""Experts by Humming's three forms of GEMM, each as a projection of the layer around it.

`indexed` gathers the rows of each expert by itself, `grouped_contiguous` wants them one expert after the other,
`grouped_masked` in as many rows for each. The library has no kernel that sorts them: torch does, without waiting for
the device. What belongs to no expert is left as it was, and not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from conformance.backends.grouped_experts import Projection
from conformance.backends.humming_layers import DENSE, Matrix
from conformance.cases import Case

INDEXED, CONTIGUOUS, MASKED = "indexed", "grouped_contiguous", "grouped_masked"


class Sorted:
    """What was made of the places of a layer's last call: its second projection mostly asks for the same as its first.

    Places are told by where they lie: every call has a tensor of its own, and nobody changes it.
    """

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._slots: torch.Tensor | None = None  # kept, so that no others come to lie in its memory
        self._found: tuple[torch.Tensor, ...] = ()

    def of(
        self, places: torch.Tensor, block: int, make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """make(places (S)). block: what else it depends on."""
        slots = places.flatten()
        key = slots.data_ptr(), slots.numel(), block
        if key != self._key:
            self._key, self._slots, self._found = key, slots, make(slots)
        return self._found


def indexed(matrix: Matrix, experts: int, known: Sorted) -> Projection:
    """experts: of the router, of which some may be absent. known: of the layer."""
    present = matrix.layer.experts

    def project(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = reckoned(places.numel(), present, experts)
        block = matrix.tuning(rows)["block_shape"][0]
        sorted_ids, owners, padded = known.of(places, block, lambda slots: aligned(slots, present, block))
        outputs = matrix(
            x, rows, top_k=places.shape[1], sorted_ids=sorted_ids, expert_ids=owners, num_tokens_padded=padded
        )
        return outputs.unflatten(0, places.shape)

    return project


def contiguous(matrix: Matrix, experts: int, known: Sorted) -> Projection:
    """experts, known: as above."""
    present = matrix.layer.experts

    def in_order(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots by expert, those of none behind, and where each expert's begin."""
        order = torch.sort(torch.where(slots < 0, present, slots), stable=True).indices
        return order, torch.nn.functional.pad(_counted(slots, present)[0].cumsum(0), (1, 0))

    def project(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        order, layout = known.of(places, 0, in_order)
        rows = reckoned(len(order), present, experts)
        found = matrix(x[order // places.shape[1]], rows, expert_layout=layout)
        outputs = torch.empty_like(found)
        outputs[order] = found
        return outputs.unflatten(0, places.shape)

    return project


def masked(matrix: Matrix, experts: int, known: Sorted) -> Projection:
    """experts, known: as above. An expert has room for every token, as it can be named by each of them once."""
    present = matrix.layer.experts

    def in_rooms(slots: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of each slot, behind all rooms for those of none, and how many rows each expert has."""
        counts, within = _counted(slots, present)
        return torch.where(slots < 0, present * room, slots.long() * room + within), counts.to(torch.int32)

    def project(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        count, room = places.numel(), len(places)
        at, counts = known.of(places, room, lambda slots: in_rooms(slots, room))
        last = present * room
        inputs = x.new_empty((last + 1, x.shape[1]))
        inputs[at] = x[torch.arange(count, device=x.device) // places.shape[1]]
        outputs = matrix(inputs[:last], reckoned(count, present, experts), expert_layout=counts)
        return outputs[at.clamp(max=last - 1)].unflatten(0, places.shape)

    return project


PROJECTIONS: dict[str, Callable[[Matrix, int, Sorted], Projection]] = {
    INDEXED: indexed,
    CONTIGUOUS: contiguous,
    MASKED: masked,
}


def everyone(matrix: Matrix) -> Projection:
    """A dense layer that every token meets, asked with one place a token."""
    return lambda x, places: matrix(x)[:, None]


def reckoned(slots: int, present: int, experts: int) -> int:
    """How many rows serving libraries tell the heuristics: the share of the experts that are present."""
    return math.ceil(slots * present / experts)


def aligned(slots: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sorted_ids and expert_ids, as long as the worst case needs, and num_tokens_padded of the experts of slots (S),
    -1 for none (C77)."""
    counts, within = _counted(slots, experts)
    blocks = (counts + block - 1) // block
    ends = blocks.cumsum(0)
    firsts = (ends - blocks) * block
    most = (len(slots) // block + experts) * block
    at = torch.where(slots < 0, most, firsts[slots.clamp(min=0).long()] + within)
    sorted_ids = torch.full((most + 1,), len(slots), dtype=torch.int32, device=slots.device)
    sorted_ids[at] = torch.arange(len(slots), dtype=torch.int32, device=slots.device)  # the last: of none
    owners = torch.searchsorted(ends, torch.arange(most // block, device=slots.device), right=True)
    return (
        sorted_ids[:most],
        owners.clamp(max=experts - 1).to(torch.int32),
        (ends[-1:] * block).to(torch.int32),
    )


def _counted(slots: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many slots (S) each expert has, and how many of its own come before each slot."""
    owners = slots.long() + 1  # 0: none
    counts = owners.new_zeros(experts + 1).scatter_add_(0, owners, torch.ones_like(owners))
    order = torch.sort(owners, stable=True).indices
    firsts = counts.cumsum(0) - counts
    within = torch.empty_like(owners)
    within[order] = torch.arange(len(slots), device=slots.device) - firsts[owners[order]]
    return counts[1:], within


def calls_of(case: Case, gemm: str) -> Iterator[tuple[str, tuple[int, int], int, str, tuple[int, int]]]:
    """The GEMMs that a case of experts calls: projection, (N, K), number of experts (0: dense), form, M and rows."""
    present = case.experts // 2 if case.recipe == "absent" else case.experts
    tokens, slots = case.m, case.m * case.top_k
    rows = reckoned(slots, present, case.experts)
    sides = {"w13": (2 * case.n, case.k), "w2": (case.k, case.n)}
    for which, m in (("w13", tokens), ("w2", slots)):
        given = {INDEXED: m, CONTIGUOUS: slots, MASKED: present * m}[gemm]
        yield which, sides[which], present, gemm, (given, rows)
        if case.recipe == "shared":
            yield which, sides[which], 0, DENSE, (tokens, tokens)
