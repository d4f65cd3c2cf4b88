"""What a case is: its fields, its cell, its id, the clauses that it tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from reference.formats import ActivationFormat, WeightFormat
from reference.routing import Routing
from reference.swiglu import VARIANTS, GatedActivation

DTYPES = ("bf16", "fp16")
# Of operations that no weight is part of
NO_WEIGHT = WeightFormat.of(8, -1, True)

# What a backend that claims to validate must refuse -> the clauses that say so
DEFECTS = {
    "code-range": ("C15",),
    "word-count": ("C12", "C13"),
    "zero-words": ("C12", "C17"),
    "scale-nan": ("C25",),
    "scale-inf": ("C25",),
    "scale-shape": ("C21",),
    "group-remainder": ("C21",),
}

# How a backend behaves beside what it computes: the check -> the clauses that say so
CONDUCT = {
    "repeat": ("C110",),
    "inputs": ("C111",),
    "outputs": ("C112",),
    "strided": ("C113",),
    "batch": ("C114",),
    "alternating": ("C115",),
    "empty": ("C116",),
    "stream": ("C117",),
    "graph": ("C118",),
    "device": ("C119",),
    "canary": ("C120",),
    "overflow": ("C121",),
}
# Of small cases of every cell, for golden vectors: they share layers and inputs (see data/seeds.py).
GOLDEN = "golden"
# What takes a whole GPU, and what vectors alone are made of, is judged only where a query names it.
ON_REQUEST = ("overflow", GOLDEN)

_LAYER = ("C1", "C2", "C3", "C4", "C5", "C10", "C20", "C21", "C27")
_CLAUSES = {
    "packing": ("C10", "C11", "C12", "C13", "C14"),
    "dequantize": _LAYER,
    "linear": (*_LAYER, "C40", "C41"),
    "activation_quantization": ("C60", "C61", "C62", "C63"),
    "routing": ("C70", "C71", "C72", "C73"),
    "moe_align": ("C77",),
    "swiglu": ("C80", "C81", "C82", "C84"),
    "moe": (*_LAYER, "C40", "C80", "C81", "C82", "C90", "C91", "C92", "C93", "C95", "C97"),
    "sharding": ("C100", "C101"),
    "moe_parallel": (*_LAYER, "C40", "C80", "C81", "C90", "C91", "C92", "C93", "C97", "C103", "C105"),
}
_RECIPE_CLAUSES = {
    "identity": ("C42",),
    "scales": ("C42", "C43"),
    "integers": ("C42",),
    "magnitudes": ("C42", "C5"),
    "random": ("C44", "C45", "C46", "C54"),
    GOLDEN: ("C44", "C45", "C46", "C54"),
    "trained": ("C44", "C45", "C46", "C54"),
    "zero-scale": ("C28", "C44", "C45", "C46"),
    "empty": ("C47",),
}
_MOE_RECIPE_CLAUSES = {
    "readout": ("C98",),
    "integers": ("C98",),
    "random": ("C44", "C45", "C46", "C54"),
    GOLDEN: ("C44", "C45", "C46", "C54"),
    "one-expert": ("C99",),
    "absent": ("C92", "C104"),
    "unrouted": ("C92",),
    "shared": ("C96",),
    "on-input": ("C95",),
    "empty": ("C99",),
}


@dataclass(frozen=True)
class Case:
    """One test. quick: it belongs to the quick set. Fields that an operation has no use for keep their defaults.
    recipe: of the data; of conduct, the check.

    m, n, k: rows, output and input features; of a mixture of experts tokens, intermediate and hidden size.
    experts: the stack of a packed tensor (0: a matrix), or E. dim: the packed dimension. act_order: a g_idx names
    the group of each column. top_k: experts a token. routing: of a router. variant: name of the gated
    activation. block: rows of a block of aligned token ids. ranks: `tp2`, `ep4`: how a layer is divided.
    """

    operation: str
    weight: WeightFormat
    recipe: str
    n: int = 0
    k: int = 0
    m: int = 0
    dtype: str = "bf16"
    activation: ActivationFormat = field(default_factory=ActivationFormat)
    bias: bool = False
    act_order: bool = False
    experts: int = 0
    dim: int = 1
    seed: int = 0
    quick: bool = False
    top_k: int = 0
    routing: Routing | None = None
    variant: str = "silu"
    block: int = 0
    ranks: str = ""

    @property
    def gated(self) -> GatedActivation:
        """The gated activation of the variant, with the limits of the model."""
        return VARIANTS[self.variant]

    @property
    def plain(self) -> Case:
        """Of conduct, the layer that is watched, as a case of its own: what a backend is asked to claim. Any other case
        is that itself."""
        if self.operation != "conduct":
            return self
        recipe = "empty" if self.m == 0 else "random"
        return replace(self, operation="moe" if self.experts else "linear", recipe=recipe, quick=False)

    @property
    def on_request(self) -> bool:
        """Whether the case is judged only where a query names it."""
        return self.recipe in ON_REQUEST

    @property
    def cell(self) -> str:
        """The format part of the id, in which capability and coverage are counted."""
        weight = self.weight.name + ("-gidx" if self.act_order else "")
        activation = self.activation.name
        parts: tuple[str, ...] = {
            "packing": (f"w{self.weight.bits}",),
            "activation_quantization": (activation, self.dtype),
            "linear": (weight, activation, self.dtype),
            "routing": (self.routing.name if self.routing else "", self.dtype),
            "moe_align": (f"b{self.block}",),
            "swiglu": (self.variant, self.dtype),
            "moe": (weight, activation, self.dtype, self.variant),
            "sharding": (weight, self.ranks),
            "moe_parallel": (weight, activation, self.dtype, self.variant, self.ranks),
            "conduct": (weight, activation, self.dtype, "moe" if self.experts else "linear"),
        }.get(self.operation, (weight, self.dtype))
        return "/".join((self.operation, *parts))

    @cached_property
    def id(self) -> str:
        if self.operation == "validation":
            return f"{self.cell}/{self.recipe}"
        bias = "-bias" if self.bias else ""
        matrix = f"n{self.n}-k{self.k}"
        routed = f"t{self.m}-e{self.experts}-k{self.top_k}"
        linear = f"m{self.m}-{matrix}{bias}"
        moe = f"{routed}-h{self.k}-i{self.n}{bias}"
        stack = f"e{self.experts}-" if self.experts else ""
        shape = {
            "packing": f"dim{self.dim}/{stack}{matrix}",
            "activation_quantization": f"m{self.m}-k{self.k}",
            "linear": linear,
            "routing": routed,
            "moe_align": routed,
            "swiglu": f"m{self.m}-i{self.n}",
            "moe": moe,
            "sharding": f"e{self.experts}-h{self.k}-i{self.n}{bias}",
            "moe_parallel": moe,
            "conduct": moe if self.experts else linear,
        }.get(self.operation, matrix)
        return f"{self.cell}/{shape}/{self.recipe}-{self.seed}"

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses of docs/specification.md that the case tests."""
        if self.operation == "validation":
            return DEFECTS[self.recipe]
        if self.operation == "conduct":
            return CONDUCT[self.recipe]
        found = list(_CLAUSES[self.operation])
        if self.operation == "activation_quantization":
            return tuple(found + _quantizer_clauses(self.activation, self.recipe))
        if self.operation == "routing" and self.routing:
            return tuple(found + _routing_clauses(self.routing, self.recipe))
        layer = self.operation in ("moe", "moe_parallel")
        if self.operation != "dequantize":
            found += (_MOE_RECIPE_CLAUSES if layer else _RECIPE_CLAUSES).get(self.recipe, ())
        if layer or self.operation == "swiglu":
            found += ["C83"] if self.gated.limit is not None else []
        if self.operation == "moe_parallel" or self.operation == "sharding":
            found += ["C104"] if self.ranks.startswith("ep") else ["C100"]
        if self.activation.kind != "a16":
            found += ["C60", "C61", "C62", "C63", *(["C94"] if layer else [])]
        stored = self.operation not in ("packing", "swiglu", "moe_align")
        if not self.weight.symmetric and stored:
            found.append("C17")
        if self.act_order:
            found += ["C29"] if self.operation != "sharding" else ["C29", "C102"]
        return tuple(dict.fromkeys(found))


def _quantizer_clauses(fmt: ActivationFormat, recipe: str) -> list[str]:
    found = []
    if recipe == "zero-tokens":
        found.append("C64")
    if fmt.kind == "fp8" and fmt.dynamic:
        found.append("C65")
    if not fmt.symmetric:
        found.append("C66")
    if not fmt.dynamic or fmt.strategy == "group":
        found.append("C67")
    return found


def _routing_clauses(routing: Routing, recipe: str) -> list[str]:
    found = ["C74"] if routing.bias else []
    if routing.groups > 1:
        found.append("C75")
    if recipe == "poisoned":
        found.append("C76")
    return found
