"""Kernels that a library compiles at their first launch, compiled beforehand: several processes fill its disk cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol

import torch

from conformance.backends.torch_weights import TorchWeight
from conformance.cases import Case
from conformance.orphans import end_with_parent
from reference.formats import ActivationFormat

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_backend: Warmed  # of a worker


@dataclass(frozen=True)
class Layer:
    """What decides which kernels a dense layer launches for m rows. group_size: columns a scale, K for a channel."""

    bits: int
    symmetric: bool
    group_size: int
    activation: ActivationFormat
    dtype: str
    m: int
    n: int
    k: int
    bias: bool

    @classmethod
    def of(cls, case: Case) -> Layer:
        size = case.weight.group_size if case.weight.strategy == "group" else case.k
        weight, sizes = case.weight, (case.m, case.n, case.k)
        return cls(weight.bits, weight.symmetric, size, case.activation, case.dtype, *sizes, case.bias)

    def __str__(self) -> str:
        symmetry = "sym" if self.symmetric else "asym"
        shape = f"m{self.m}-n{self.n}-k{self.k}"
        return f"w{self.bits}-g{self.group_size}-{symmetry}/{self.activation.name}/{self.dtype}/{shape}"


class Warmed(Protocol):
    """A backend whose layers are made of a decoded weight."""

    device: str

    def linear(
        self, weight: TorchWeight, args: Mapping[str, Any] | None, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...


def compiled(factory: str, cases: Iterable[Case], workers: int) -> Iterator[str]:
    """Call each layer of the linear cases once, in processes of their own; a line for each.

    factory: `module:function` of the backend. What raises is left to the case.
    """
    layers = list(dict.fromkeys(Layer.of(case) for case in cases if case.operation == "linear"))
    if not layers:
        return
    count = max(1, min(workers, len(layers)))
    with ProcessPoolExecutor(count, get_context("spawn"), _begin, (factory,)) as pool:
        for done in as_completed([pool.submit(_call, layer) for layer in layers]):
            yield done.result()


def _begin(factory: str) -> None:
    global _backend
    end_with_parent()
    module, _, name = factory.partition(":")
    _backend = getattr(importlib.import_module(module), name)()


def _call(layer: Layer) -> str:
    dtype, device = _DTYPES[layer.dtype], _backend.device
    try:
        linear = _backend.linear(blank(layer, device), layer.activation.to_quantization_args(), dtype)
        linear(torch.zeros(layer.m, layer.k, dtype=dtype, device=device))
    except Exception as error:
        return f"{layer}: left to the case ({type(error).__name__})"
    return str(layer)


def blank(layer: Layer, device: str) -> TorchWeight:
    """A weight of zeros."""
    scales = (layer.n, layer.k // layer.group_size)
    dtype = _DTYPES[layer.dtype]
    return TorchWeight(
        layer.bits,
        torch.zeros((layer.n, layer.k), dtype=torch.int8, device=device),
        torch.ones(scales, dtype=dtype, device=device),
        None if layer.symmetric else torch.zeros(scales, dtype=torch.int8, device=device),
        layer.group_size,
        torch.zeros(layer.n, dtype=dtype, device=device) if layer.bias else None,
    )
