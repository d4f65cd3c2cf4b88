"""What the same call differs by when it is timed once more, in another process on the same machine.

Medians of an H200, of the same code (docs/results/bench-trust-h200.json): calls that a CUDA graph holds differed by up
to 5.4 %, most by less than one; calls that the host launches one by one by up to 67 %, with the host's load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IN_A_GRAPH, LAUNCHED = 0.03, 0.7


def noise_of(info: Mapping[str, Any], seen: float) -> float:
    """The noise, as a fraction, of a figure with this `extra_info`; seen: in its own process. That is all there is
    where the file does not say how calls were launched."""
    graph = info.get("graph")
    if not str(info.get("device", "")).startswith("cuda") or not isinstance(graph, bool):
        return seen
    return max(seen, IN_A_GRAPH if graph else LAUNCHED)
