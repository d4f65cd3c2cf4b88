"""Calls of equal work on different memory, one behind another, so that no call finds in a cache what it reads.

On a GPU they are captured in a CUDA graph, where the library permits it: then launches cost what a server pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.arrays import Array, to_backend
from conformance.backend import Backend, device_of
from conformance.subject import describe

# How much other memory lies between two uses of the same, in sizes of the cache
APART = 3
MOST, MOST_ON_CPU = 48, 2
# Where memory lies changes a time by a few percent: it is the mean of several places, as far as so many bytes and so
# many seconds of a round go.
PLACES, BYTES_OF_PLACES, SECONDS_OF_PLACES = 8, 4 << 30, 0.02


def copies(bytes_of_a_call: int, bytes_of_a_layer: int, seconds_of_a_call: float, device: str) -> int:
    """How many calls a round needs. On a CPU, where calls are slow, few have to do."""
    if not device.startswith("cuda"):
        return MOST_ON_CPU
    cold = 1 + APART * _cache(device) // max(bytes_of_a_call, 1)
    in_bytes = BYTES_OF_PLACES // max(bytes_of_a_layer, 1)
    in_time = int(SECONDS_OF_PLACES / max(seconds_of_a_call, 1e-9))
    return min(MOST, max(cold, min(PLACES, in_bytes, in_time)))


def kept_by_the_cache(bytes_of_a_round: int, device: str) -> int:
    """How many bytes to overwrite before a round, which otherwise reads what the round before left in the cache; none
    where a round is larger than that."""
    between = APART * _cache(device) if device.startswith("cuda") else 0
    return 0 if bytes_of_a_round > between else between


def _cache(device: str) -> int:
    """Bytes."""
    import torch

    return int(torch.cuda.get_device_properties(device).L2_cache_size)


class Rotation:
    """functions: of a call, each made for memory of its own. inputs: its arrays, all of the same values; `refresh` puts
    others there. overwritten: bytes, by `clear`. ungraphed: why no graph is replayed, empty where one is."""

    def __init__(
        self,
        backend: Backend,
        functions: Sequence[Callable[..., Any]],
        inputs: Sequence[Array],
        overwritten: int = 0,
    ) -> None:
        self._backend = backend
        self._functions = functions
        self._inputs = [[to_backend(array, backend) for array in inputs] for _ in functions]
        self._cuda = device_of(backend).startswith("cuda")
        self._overwritten = _bytes(overwritten, device_of(backend)) if overwritten else None
        self.outputs: list[Any] = []
        self._graph: Any = None
        self.ungraphed = "" if self._cuda else "not on a GPU"
        self._call()  # loads and tunes what is loaded and tuned late
        if self._cuda:
            self._capture()

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._call()

    def clear(self) -> None:
        """Let no call of the next round find in the cache what it reads, where the round is too small for that by
        itself. It is no part of the round."""
        if self._overwritten is not None:
            self._overwritten.zero_()

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

    def _capture(self) -> None:
        import torch

        try:
            self._graph = captured(self._call)
            self._graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            # It synchronizes, or allocates where a capture forbids it: servers call it without a graph.
            self._graph, self.ungraphed = None, describe(error)
            torch.cuda.synchronize()
            self._call()


def _bytes(count: int, device: str) -> Any:
    import torch

    return torch.empty(count, dtype=torch.uint8, device=device)


def captured(call: Callable[[], Any]) -> Any:
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
