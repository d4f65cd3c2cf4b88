"""Calls of equal work on different memory, one behind another, so that no call finds in a cache what it reads.

On a GPU they are captured in a CUDA graph, where the library permits it: then launches cost what a server pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.arrays import Array, to_backend
from conformance.backend import Backend, device_of

# How much other memory lies between two uses of the same, in sizes of the cache
APART = 3
MOST, MOST_ON_CPU = 48, 2


def copies(bytes_of_a_call: int, device: str) -> int:
    """How many calls a round needs. On a CPU, where calls are slow, few have to do."""
    if not device.startswith("cuda"):
        return MOST_ON_CPU
    import torch

    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return min(MOST, 1 + APART * cache // max(bytes_of_a_call, 1))


class Rotation:
    """functions: of a call, each made for memory of its own. inputs: its arrays, all of the same values; `refresh` puts
    others there. graph: whether a graph is replayed."""

    def __init__(
        self, backend: Backend, functions: Sequence[Callable[..., Any]], inputs: Sequence[Array]
    ) -> None:
        self._backend = backend
        self._functions = functions
        self._inputs = [[to_backend(array, backend) for array in inputs] for _ in functions]
        self._cuda = device_of(backend).startswith("cuda")
        self.outputs: list[Any] = []
        self._graph: Any = None
        self._call()  # loads and tunes what is loaded and tuned late
        if self._cuda:
            self._capture()

    @property
    def graph(self) -> bool:
        return self._graph is not None

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._call()

    def refresh(self, inputs: Sequence[Array]) -> None:
        """Other values in the same memory."""
        for own in self._inputs:
            for there, array in zip(own, inputs, strict=True):
                if isinstance(there, np.ndarray):
                    there[...] = array
                else:
                    there.copy_(to_backend(array, self._backend))

    def _call(self) -> None:
        pairs = zip(self._functions, self._inputs, strict=True)
        self.outputs = [function(*inputs) for function, inputs in pairs]

    def alone(self) -> Callable[[], Any]:
        """The first call by itself, replayed where the round is replayed: the caller sees to its cache."""
        function, inputs = self._functions[0], self._inputs[0]
        if self._graph is None:
            return lambda: function(*inputs)
        graph = _captured(lambda: function(*inputs))
        return lambda: graph.replay()

    def _capture(self) -> None:
        import torch

        try:
            self._graph = _captured(self._call)
            self._graph.replay()
            torch.cuda.synchronize()
        except Exception:
            # It synchronizes, or allocates where a capture forbids it: servers call it without a graph.
            self._graph = None
            torch.cuda.synchronize()
            self._call()


def _captured(call: Callable[[], Any]) -> Any:
    """A CUDA graph of it, captured after a call on the same stream."""
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # Around torch's own change of stream, which a capture that fails does not undo.
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    return graph
