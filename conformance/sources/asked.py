"""What a suite asks about a case, an operation a class: the inputs of the backend, and the goal of its answer.

A `Source` makes them from a case. A goal is made when the backend has answered, and of what it promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conformance.backend import Checkpoint, MoeCheckpoint
from conformance.cases import Case
from conformance.goals import Goal
from reference.bounds import Contract

Array = npt.NDArray[Any]
GoalOf = Callable[[Contract], Goal]


@dataclass(frozen=True)
class PackingAsked:
    """codes int8 (N, K) or (E, N, K), packed along axis; words int32: what they are packed to."""

    codes: Array
    axis: int
    words: Array
    pack: Callable[[], Goal]
    unpack: Callable[[], Goal]


@dataclass(frozen=True)
class DequantizeAsked:
    checkpoint: Checkpoint
    goal: GoalOf


@dataclass(frozen=True)
class QuantizationAsked:
    """x (M, K) in 16 bits; input_scale: of a static format."""

    x: Array
    input_scale: float | None
    goal: GoalOf


@dataclass(frozen=True)
class LinearAsked:
    """A layer, and x (M, K) of each call; the goal is that of the outputs one below the other."""

    checkpoint: Checkpoint
    batches: list[Array]
    goal: GoalOf


@dataclass(frozen=True)
class SwigluAsked:
    """x (M, 2I)."""

    x: Array
    goal: GoalOf


@dataclass(frozen=True)
class MoeAsked:
    """A layer, and (x, weights, ids) of each call."""

    checkpoint: MoeCheckpoint
    calls: Sequence[tuple[Array, Array, Array]]
    goal: GoalOf


@dataclass(frozen=True)
class RoutingAsked:
    """logits (T, E); bias float32 (E) or None."""

    logits: Array
    bias: Array | None
    goal: GoalOf


@dataclass(frozen=True)
class AlignAsked:
    """ids int32 (T, k); expert_map int32 (E) or None."""

    ids: Array
    expert_map: Array | None
    goal: GoalOf


@dataclass(frozen=True)
class Shard:
    """What a rank has to hold: names, shapes and dtypes of its tensors, and the goal."""

    rank: int
    right: MoeCheckpoint
    goal: GoalOf


@dataclass(frozen=True)
class ShardingAsked:
    """control: set where the cut is illegal: a layer of the same format that as many ranks can cut. shards: else."""

    layer: MoeCheckpoint
    control: MoeCheckpoint | None
    shards: Sequence[Shard]


@dataclass(frozen=True)
class BadCodes:
    """Codes one of which is out of range, the same in range, and the shape of the words (C15)."""

    bad: npt.NDArray[np.int8]
    good: npt.NDArray[np.int8]
    axis: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class BadLayer:
    """A checkpoint with one defect, the same without it, and x (M, K)."""

    bad: Checkpoint
    good: Checkpoint
    x: Array


class Source(Protocol):
    def packing(self, case: Case) -> PackingAsked: ...

    def dequantize(self, case: Case) -> DequantizeAsked: ...

    def activation_quantization(self, case: Case) -> QuantizationAsked: ...

    def linear(self, case: Case) -> LinearAsked: ...

    def validation(self, case: Case) -> BadCodes | BadLayer: ...

    def routing(self, case: Case) -> RoutingAsked: ...

    def moe_align(self, case: Case) -> AlignAsked: ...

    def swiglu(self, case: Case) -> SwigluAsked: ...

    def moe(self, case: Case) -> MoeAsked: ...

    def sharding(self, case: Case) -> ShardingAsked: ...
