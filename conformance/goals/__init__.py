"""What an answer is held against, one class an operation: the comparison, and on failure the diagnosis."""

from conformance.goals.dense import (
    ArrayGoal,
    ExpectedGoal,
    Goal,
    LinearGoal,
    QuantizationGoal,
    dequantize_goal,
    pack_goal,
    traits_of,
    unpack_goal,
)

__all__ = [
    "ArrayGoal",
    "ExpectedGoal",
    "Goal",
    "LinearGoal",
    "QuantizationGoal",
    "dequantize_goal",
    "pack_goal",
    "traits_of",
    "unpack_goal",
]
