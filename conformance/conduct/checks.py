"""The checks by name. Each is a function of a module, so that it can be sent to the process of a backend."""

from __future__ import annotations

from conformance.conduct.calls import alternating, empty, inputs, outputs, repeat
from conformance.conduct.canary import canary
from conformance.conduct.cuda import device, graph, stream
from conformance.conduct.large import overflow
from conformance.conduct.layouts import batch, strided
from conformance.subject import Check

CHECKS: dict[str, Check] = {
    "repeat": repeat,
    "inputs": inputs,
    "outputs": outputs,
    "strided": strided,
    "batch": batch,
    "alternating": alternating,
    "empty": empty,
    "stream": stream,
    "graph": graph,
    "canary": canary,
    "device": device,
    "overflow": overflow,
}
