"""What a mutant is, and how one is declared.

A mutant is a function with the signature of one stage of `reference.semantics` and a name that says what it
gets wrong. Declared with `mutant`, it becomes RIGHT with that stage replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from reference.formats import ActivationFormat, WeightFormat
from reference.semantics import RIGHT

KINDS = (
    "packing",
    "zero points",
    "scales",
    "groups",
    "tails",
    "activation quantization",
    "accumulation",
    "rounding",
    "bias",
    "dtype",
    "routing",
    "gated activation",
    "experts",
    "router weights",
    "sharding",
)


@dataclass(frozen=True)
class Traits:
    """What a mutant needs to know of a call to tell whether it is wrong there at all.

    m: rows of one call; dtype: bf16 or fp16; convention: of the activation scales; calls: how often the layer is
    called.
    """

    weight: WeightFormat
    activation: ActivationFormat
    m: int
    n: int
    k: int
    dtype: str
    bias: bool = False
    act_order: bool = False
    convention: str = "kernel"
    calls: int = 2

    @property
    def groups(self) -> int:
        return self.weight.groups(self.k)

    @property
    def straddles(self) -> bool:
        """Whether any code lies in two words."""
        bits = self.weight.bits
        return 32 % bits != 0 and self.k * bits > 32


@dataclass(frozen=True)
class Mutant:
    """kind: one of KINDS. computes: what it computes instead, to follow "it computes". stage: the stage it
    replaces, in semantics: those of the linear, of routing, of the experts or of sharding. applies: whether it
    differs from the right semantics for such a call at all."""

    name: str
    kind: str
    computes: str
    stage: str
    semantics: Any
    applies: Callable[[Any], bool]


Registry = dict[str, Mutant]


def registrar(registry: Registry, right: Any = RIGHT) -> Callable[..., Callable[[Any], Any]]:
    """A decorator that enters mutants of one kind and stage into a registry. right: the stages to replace one of."""

    def mutant(
        kind: str, stage: str, computes: str, when: Callable[[Any], bool] = lambda t: True
    ) -> Callable[[Any], Any]:
        def enter(function: Any) -> Any:
            name = function.__name__
            if kind not in KINDS or name in registry:
                raise AssertionError(f"mutant {name}: unknown kind or second declaration")
            registry[name] = Mutant(name, kind, computes, stage, replace(right, **{stage: function}), when)
            return function

        return enter

    return mutant
