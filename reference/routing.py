"""Routing: from logits to the experts of each token and their weights (C70-C77)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from reference.errors import FormatError

Scoring = Literal["softmax", "sigmoid", "softmax-selected"]
GroupScore = Literal["max", "sum-of-two"]


@dataclass(frozen=True)
class Routing:
    """How a model routes.

    experts, top_k: E and k. scoring: `softmax` over all experts, `sigmoid` of each, or `softmax-selected`: the
    logits select, the softmax is taken over the selected. renormalize: weights divided by their sum. bias: a
    float32 correction (E) is added to the scores for the selection, never to the weights. groups, top_groups,
    group_score: experts in equal runs of E / groups; only experts of the top_groups best groups are eligible
    (1 and 1: no grouping). scaling: the routed scaling factor, multiplied into the weights at the end.
    Raises FormatError for counts that do not fit.
    """

    experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in get_args(Scoring) or self.group_score not in get_args(GroupScore):
            raise FormatError(f"routing: unknown scoring {self.scoring!r} or group score {self.group_score!r}")
        if self.experts % self.groups:
            raise FormatError(f"routing: {self.groups} groups do not divide {self.experts} experts")
        if not 1 <= self.top_groups <= self.groups:
            raise FormatError(f"routing: top_groups {self.top_groups} is outside 1..{self.groups}")
        eligible = self.experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= eligible:
            raise FormatError(f"routing: top_k {self.top_k} is outside 1..{eligible}, the eligible experts")
        if self.group_score == "sum-of-two" and self.experts // self.groups < 2:
            raise FormatError("routing: a sum of two needs groups of two experts or more")

    @property
    def name(self) -> str:
        """As case ids spell it: `sigmoid-renorm-bias-g8-top4-sum-scaled`."""
        parts = [self.scoring, *(["renorm"] if self.renormalize else []), *(["bias"] if self.bias else [])]
        if self.groups > 1:
            score = "sum" if self.group_score == "sum-of-two" else "max"
            parts += [f"g{self.groups}", f"top{self.top_groups}", score]
        return "-".join([*parts, *(["scaled"] if self.scaling != 1 else [])])
