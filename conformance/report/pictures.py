"""The figures of `quantcts bench` as files, an SVG for each layer: the charts of the page, with a legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from conformance.errors import RunError
from conformance.report.document import put
from conformance.report.plots import FLOOR, HEIGHT, WIDTH, Figure, piece, plots_of

_GAP, _LINE, _LETTER = 20, 18, 6.3


def draw(bench: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the layers that were timed with several numbers of tokens; the files written. Raises RunError where there
    are none, and naming what cannot be written."""
    figures = [figure for figure in plots_of(bench) if len(figure.rows) > 1]
    if not figures:
        raise RunError("no layer was timed with several numbers of tokens: there is nothing to draw")
    devices = {figure.device for figure in figures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: it cannot be written there: {error.strerror}") from error
    written = []
    for figure in figures:
        name = figure.layer if len(devices) == 1 else f"{figure.layer}-{figure.device}"
        written.append(folder / f"{name.replace('/', '-').replace(':', '')}.svg")
        put(written[-1], picture(figure).encode())
    return written


def picture(figure: Figure) -> str:
    """One layer: title, legend, time, fraction of the floor."""
    wide = 2 * WIDTH + _GAP
    legend, tall = [], float(_LINE)
    x = 0.0
    for sign, name in _legend(figure):
        room = 46 + _LETTER * len(name) + _GAP
        if x > 0 and x + room > wide:
            x, tall = 0.0, tall + _LINE
        legend.append(
            Markup('<g transform="translate({} {})">{}<text x="46" y="12">{}</text></g>').format(
                round(x, 1), tall + 4, sign, name
            )
        )
        x += room
    top = tall + _LINE + 12
    style = (files("conformance.report") / "templates" / "style.css").read_text("utf-8")
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {all}" role="img" aria-label="{layer}">'
        "<style>{style} svg {{ font-family: system-ui, sans-serif; background: var(--page); }}</style>"
        '<text x="0" y="14" font-weight="bold">{layer}</text>{legend}'
        '<g transform="translate(0 {top})">{time}</g><g transform="translate({right} {top})">{fraction}</g></svg>\n'
    ).format(
        wide=wide, all=top + HEIGHT, layer=figure.layer, style=Markup(style), legend=Markup("").join(legend),
        top=top, right=WIDTH + _GAP, time=figure.time.parts, fraction=figure.fraction.parts,
    )  # fmt: skip


def _legend(figure: Figure) -> Iterator[tuple[Markup, str]]:
    for number, name in figure.series.items():
        yield piece(number), name
    yield FLOOR, "floor of the device"
