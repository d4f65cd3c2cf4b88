"""Time and fraction of the floor against the number of tokens, one picture a layer, as SVG.

The figures are those of a file that pytest-benchmark wrote for `quantcts bench`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conformance.errors import EnvironmentMissing, RunError

# Told apart without colour as well: a marker and a dash for each (Okabe and Ito's colours)
_STYLES = [
    (colour, marker, dash)
    for dash in ("-", "--", ":")
    for colour, marker in (
        ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"),
    )
]  # fmt: skip


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Layer -> the figures of its workloads (`extra_info`). Raises RunError for a file that is none of ours."""
    try:
        document = json.loads(path.read_text("utf-8"))
        found: dict[str, list[dict[str, Any]]] = {}
        for record in document["benchmarks"]:
            found.setdefault(record["extra_info"]["layer"], []).append(record["extra_info"])
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: it is no file of quantcts bench --benchmark-json: {error!r}") from error
    if not found:
        raise RunError(f"{path}: it holds no figures")
    return found


def draw(path: Path, folder: Path) -> list[Path]:
    """A picture for each layer that was timed with several numbers of tokens; the files written."""
    try:
        import matplotlib as mpl

        mpl.use("svg")
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise EnvironmentMissing("matplotlib is not installed: pip install 'quantcts[bench]'") from error
    mpl.rcParams["svg.hashsalt"] = "quantcts"  # the same figures give the same file
    layers = read(path)
    backends = sorted({info["backend"] for infos in layers.values() for info in infos})
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for layer, infos in layers.items():
        if len({info["tokens"] for info in infos}) < 2:
            continue
        figure, (times, fractions) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        for backend in backends:
            own = sorted((i for i in infos if i["backend"] == backend), key=lambda i: int(i["tokens"]))
            if not own:
                continue
            colour, marker, dash = _STYLES[backends.index(backend) % len(_STYLES)]
            style = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4, "label": backend}
            tokens = [i["tokens"] for i in own]
            times.plot(tokens, [i["median_seconds"] * 1e6 for i in own], **style)
            fractions.plot(tokens, [i["fraction_of_floor"] for i in own], **style)
        floors = sorted({(i["tokens"], i["floor_seconds"] * 1e6) for i in infos})
        times.plot(*zip(*floors, strict=True), color="black", linewidth=1, label="floor of the device")
        for axes, title in ((times, "µs a call"), (fractions, "fraction of the floor")):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("tokens")
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
        times.set_yscale("log")
        fractions.set_ylim(0, 1.05)
        times.legend(fontsize=7)
        figure.suptitle(layer, fontsize=11)
        place = folder / f"{layer.replace('/', '-')}.svg"
        figure.savefig(place, metadata={"Date": None})
        pyplot.close(figure)
        written.append(place)
    return written
