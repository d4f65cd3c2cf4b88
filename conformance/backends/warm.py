"""Kernels that Triton compiles at their first launch, compiled beforehand: several processes fill its disk cache.

What has been compiled or refused is noted beside that cache, by versions and device: processes and a call a layer would
take most of a minute to find that nothing is left to do.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch

from conformance.backend import Support
from conformance.backends.noted import Noted, refuses
from conformance.backends.torch_weights import TorchWeight
from conformance.cases import Case
from conformance.installed import installed
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
    libraries: tuple[str, ...]

    def supports(self, case: Case) -> Support: ...

    def linear(
        self, weight: TorchWeight, args: Mapping[str, Any] | None, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...


def compiled(
    backend: Warmed, factory: Callable[[], Warmed], cases: Iterable[Case], workers: int
) -> Iterator[str]:
    """Call each layer of the linear cases that the backend claims once, in processes of their own; a line for each.

    factory: a function of a module, which makes the backend. What raises is left to the case. Raises BrokenProcessPool
    where a process dies of a layer: then the rest is left to the cases as well.
    """
    claimed = (case for case in cases if case.operation == "linear" and backend.supports(case).claimed)
    noted = _noted(backend, factory)
    layers = [layer for layer in dict.fromkeys(map(Layer.of, claimed)) if repr(layer) not in noted]
    if not layers:
        return
    # Not forked from here, where the device is in use already, nor each with imports of its own.
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", factory.__module__])
    count = max(1, min(workers, len(layers)))
    with ProcessPoolExecutor(count, context, _begin, (factory,)) as pool:
        calls = {pool.submit(_call, layer): layer for layer in layers}
        for done in as_completed(calls):
            layer, failed = calls[done], done.result()
            if not failed or refuses(failed):
                noted.add(repr(layer))
            yield f"{layer}: left to the case ({failed})" if failed else str(layer)


def _noted(backend: Warmed, factory: Callable[[], Warmed]) -> Noted:
    cache = os.environ.get("TRITON_CACHE_DIR") or Path(
        os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache"
    )
    module = factory.__module__
    name, own = f"{module}:{factory.__qualname__}", inspect.getsource(sys.modules[module])
    device = torch.cuda.get_device_name() if backend.device == "cuda" else backend.device
    libraries = (f"{library} {installed(library)}" for library in backend.libraries)
    return Noted(Path(cache), name, own, device, *libraries)


def _begin(factory: Callable[[], Warmed]) -> None:
    global _backend
    end_with_parent()
    _backend = factory()


def _call(layer: Layer) -> str:
    """What went wrong; empty: nothing."""
    dtype, device = _DTYPES[layer.dtype], _backend.device
    try:
        linear = _backend.linear(blank(layer, device), layer.activation.to_quantization_args(), dtype)
        linear(torch.zeros(layer.m, layer.k, dtype=dtype, device=device))
    except Exception as error:
        return type(error).__name__
    return ""


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
