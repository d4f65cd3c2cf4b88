"""What is timed: layers of real models, by name, for 1 to 8192 tokens.

Sizes come from the models' published config.json: hidden_size, intermediate_size, num_attention_heads,
num_key_value_heads, head_dim; of experts moe_intermediate_size, num_experts (n_routed_experts), num_experts_per_tok.
Projections that servers run as one product are one layer here: q, k and v; gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.cases import Case
from reference.formats import ActivationFormat, WeightFormat

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_TOKENS = (1, 16, 256, 4096)

# name -> N, K
LINEAR = {
    "llama-3.1-8b.qkv": (6144, 4096),
    "llama-3.1-8b.o": (4096, 4096),
    "llama-3.1-8b.gate_up": (28672, 4096),
    "llama-3.1-8b.down": (4096, 14336),
    "llama-3.1-70b.qkv": (10240, 8192),
    "llama-3.1-70b.gate_up": (57344, 8192),
    "llama-3.1-70b.down": (8192, 28672),
    "deepseek-v3.o": (7168, 16384),
}
QUICK_LINEAR = ("llama-3.1-8b.gate_up",)


@dataclass(frozen=True)
class Experts:
    """hidden and intermediate size, experts in all, experts a token, gated activation, columns a scale."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    variant: str = "silu"
    group_size: int = 128


MOE = {
    "qwen3-30b-a3b.experts": Experts(2048, 768, 128, 8),
    "gpt-oss-20b.experts": Experts(2880, 2880, 32, 4, "swigluoai", 32),
    "gpt-oss-120b.experts": Experts(2880, 2880, 128, 4, "swigluoai", 32),
    "deepseek-v3.experts": Experts(7168, 2048, 256, 8),
}
QUICK_MOE = ("qwen3-30b-a3b.experts",)

A16, INT8, FP8 = ActivationFormat(), ActivationFormat(kind="int8"), ActivationFormat(kind="fp8")
LINEAR_FORMATS = (
    (WeightFormat.of(4, 128, True), A16),
    (WeightFormat.of(4, 128, False), A16),
    (WeightFormat.of(3, 128, True), A16),
    (WeightFormat.of(8, -1, True), A16),
    (WeightFormat.of(8, -1, True), INT8),
    (WeightFormat.of(8, -1, True), FP8),
    (WeightFormat.of(4, 128, True), INT8),
    (WeightFormat.of(4, 128, True), FP8),
)
QUICK_LINEAR_FORMATS = (LINEAR_FORMATS[0], LINEAR_FORMATS[4], LINEAR_FORMATS[7])
# bits of the weights, activations; how many columns share a scale is the model's
MOE_FORMATS = ((4, A16), (8, INT8), (4, FP8))
QUICK_MOE_FORMATS = MOE_FORMATS[:2]


@dataclass(frozen=True)
class Workload:
    """A case of full size under the name of a model's layer. It is not of the matrix: nothing enumerates it there."""

    name: str
    case: Case
    quick: bool

    @property
    def layer(self) -> str:
        """What is loaded, whatever the number of tokens."""
        case = self.case
        return f"{case.operation}/{self.name}/{case.weight.name}/{case.activation.name}/{case.dtype}"

    @property
    def id(self) -> str:
        return f"{self.layer}/m{self.case.m}"


def workloads(operation: str) -> list[Workload]:
    """Those of `linear`, `moe` or `activation_quantization`, all tokens of a layer one behind the other."""
    return list({"linear": _linear, "moe": _moe, "activation_quantization": _quantizers}[operation]())


def _linear() -> Iterator[Workload]:
    for name, (n, k) in LINEAR.items():
        for weight, activation in LINEAR_FORMATS:
            quick = name in QUICK_LINEAR and (weight, activation) in QUICK_LINEAR_FORMATS
            for m in TOKENS:
                case = Case("linear", weight, "random", n, k, m, activation=activation)
                yield Workload(name, case, quick and m in QUICK_TOKENS)


def _moe() -> Iterator[Workload]:
    for name, of in MOE.items():
        for bits, activation in MOE_FORMATS:
            # Integers are multiplied before scales: a scale a row is what servers use with them.
            group_size = -1 if activation.kind == "int8" else of.group_size
            weight = WeightFormat.of(bits, group_size, True)
            quick = name in QUICK_MOE and (bits, activation) in QUICK_MOE_FORMATS
            for m in TOKENS:
                case = Case(
                    "moe", weight, "random", of.intermediate, of.hidden, m, activation=activation,
                    experts=of.experts, top_k=of.top_k, variant=of.variant,
                )  # fmt: skip
                yield Workload(name, case, quick and m in QUICK_TOKENS)


def _quantizers() -> Iterator[Workload]:
    plain = WeightFormat.of(8, -1, True)  # an operation without a weight
    for k, quick in ((4096, True), (14336, False)):
        for activation in (INT8, FP8, ActivationFormat(kind="int4")):
            for m in TOKENS:
                case = Case("activation_quantization", plain, "random", k=k, m=m, activation=activation)
                yield Workload(f"k{k}", case, quick and m in QUICK_TOKENS and activation.kind != "int4")
