"""What an answer is held against, one class an operation: the comparison, and on failure the diagnosis."""

from conformance.goals.dense import (
    ArrayGoal,
    LinearGoal,
    QuantizationGoal,
    dequantize_goal,
    pack_goal,
    traits_of,
    unpack_goal,
)
from conformance.goals.expected import ExpectedGoal, Goal
from conformance.goals.moe import MoeGoal, SwigluGoal

__all__ = [
    "ArrayGoal",
    "ExpectedGoal",
    "Goal",
    "LinearGoal",
    "MoeGoal",
    "QuantizationGoal",
    "SwigluGoal",
    "dequantize_goal",
    "pack_goal",
    "traits_of",
    "unpack_goal",
]
