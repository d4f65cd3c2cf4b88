"""The figures of `quantcts bench` as inline SVG: time, and fraction of the floor, over tokens, a line a backend.

The source is pytest-benchmark's JSON with what the benchmark's plugin adds (extra_info). A line has a colour, a dash
and a mark of its own; the numbers stand in a table below.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from conformance.errors import RunError
from conformance.report.document import read_json

_FIELDS = {
    "layer": str, "backend": str, "tokens": int, "device": str, "median_seconds": float, "floor_seconds": float,
    "fraction_of_floor": float,
}  # fmt: skip
WIDTH, HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 260, 52, 20, 22, 34
COLOURS, DASHES = 6, ("", "6 3", "2 3")
# Marks around the origin: circle, square, triangle, diamond, cross, bar
_MARKS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z", "M-3-3h6v6h-6z", "M0-4l4 7h-8z", "M0-4.5l4 4.5l-4 4.5l-4-4.5z",
    "M-3-3l6 6M3-3l-6 6", "M-4 0h8M0-4v8",
)  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """parts: elements of SVG, WIDTH by HEIGHT; in a page an image of its own."""

    title: str
    parts: Markup

    def __html__(self) -> str:
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
        return f'<svg {box} role="img" aria-label="{self.title} over tokens">{self.parts}</svg>'


@dataclass(frozen=True)
class Figure:
    """One layer. series: number of the line -> backend. rows: tokens, and for each backend its time and fraction."""

    layer: str
    device: str
    series: Mapping[int, str]
    time: Chart
    fraction: Chart
    rows: Sequence[tuple[int, Sequence[str]]]


def read_bench(path: Path) -> dict[str, Any]:
    """The benchmark's JSON. Raises RunError naming the file and what is no figure of the benchmark."""
    document = read_json(path)
    own = document if isinstance(document, dict) else {}
    records, about = own.get("benchmarks"), own.get("quantcts")
    environment = about.get("environment", {}) if isinstance(about, dict) else None
    if not isinstance(records, list) or not isinstance(environment, dict):
        raise RunError(f"{path}: it is not what `quantcts bench --benchmark-json` writes")
    for number, record in enumerate(records):
        info = record.get("extra_info") if isinstance(record, dict) else None
        for name, kind in _FIELDS.items():
            value = info.get(name) if isinstance(info, dict) else None
            number_is_one = kind is not str and isinstance(value, int | float) and value > 0
            if not (isinstance(value, str) if kind is str else number_is_one):
                raise RunError(
                    f"{path}: benchmarks/{number}/extra_info/{name}: missing, or no {kind.__name__}"
                )
    found: dict[str, Any] = document
    return found


def plots_of(bench: Mapping[str, Any]) -> list[Figure]:
    """A figure for each layer and device, in the order in which they were timed."""
    infos = [record["extra_info"] for record in bench["benchmarks"]]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(info["backend"] for info in infos))}
    layers: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for info in infos:
        layers[info["layer"], info["device"]].append(info)
    return [_figure(layer, device, own, numbers) for (layer, device), own in layers.items()]


def _figure(
    layer: str, device: str, infos: Sequence[Mapping[str, Any]], numbers: Mapping[str, int]
) -> Figure:
    lines: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for info in infos:
        lines[info["backend"]][info["tokens"]] = info
    floors = {i["tokens"]: i["floor_seconds"] * 1e6 for i in sorted(infos, key=lambda i: i["tokens"])}
    tokens = list(floors)
    micro = {n: {t: i["median_seconds"] * 1e6 for t, i in own.items()} for n, own in lines.items()}
    share = {n: {t: i["fraction_of_floor"] for t, i in own.items()} for n, own in lines.items()}
    rows = [(t, [_cell(own.get(t)) for own in lines.values()]) for t in tokens]
    return Figure(
        layer,
        device,
        {numbers[name]: name for name in lines},
        _chart("µs", micro, floors, numbers, _decades),
        _chart("fraction of the floor", share, dict.fromkeys(tokens, 1.0), numbers, _fifths),
        rows,
    )


def _cell(info: Mapping[str, Any] | None) -> str:
    if info is None:
        return "–"
    standing = f" {info['standing']}" if info.get("standing") in ("fastest", "ambiguous") else ""
    micro = info["median_seconds"] * 1e6
    return f"{micro:.{4 if micro < 1e4 else 6}g} µs, {info['fraction_of_floor']:.2f}{standing}"


_Axis = tuple[Callable[[float], float], list[tuple[float, str]]]


def _decades(values: Sequence[float]) -> _Axis:
    """A logarithmic axis: value -> 0 to 1, and its ticks."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    ticks = [(10.0**e, f"{10**e:g}" if e >= 0 else f"{10.0**e:g}") for e in range(low, high + 1)]
    return lambda value: (math.log10(value) - low) / (high - low), ticks


def _fifths(values: Sequence[float]) -> _Axis:
    top = max(1.0, *values)
    step = 0.2 if top <= 2 else top / 5
    return lambda value: value / top, [(i * step, f"{i * step:.3g}") for i in range(int(top / step) + 1)]


def _chart(
    title: str,
    lines: Mapping[str, Mapping[int, float]],
    floor: Mapping[int, float],
    numbers: Mapping[str, int],
    axis: Callable[[Sequence[float]], _Axis],
) -> Chart:
    """floor: tokens, in order -> what the device needs. Only numbers and our own words go into the text."""
    tokens = list(floor)
    up, ticks = axis([value for own in (floor, *lines.values()) for value in own.values()])
    low, high = math.log2(tokens[0]), math.log2(tokens[-1])
    wide, tall = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(token: int) -> float:
        return round(_LEFT + wide * ((math.log2(token) - low) / (high - low) if high > low else 0.5), 1)

    def y(value: float) -> float:
        return round(_TOP + tall * (1 - up(value)), 1)

    parts = [
        f'<text x="4" y="12">{title}</text>',
        f'<text class="end" x="{WIDTH - 4}" y="{HEIGHT - 4}">tokens</text>',
    ]
    for value, label in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value)}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 5}" y="{y(value) + 4}">{label}</text>')
    shown = tokens if len(tokens) <= 7 else tokens[::2]
    parts += [f'<text class="middle" x="{x(t)}" y="{HEIGHT - 18}">{t}</text>' for t in shown]
    bottom = "L".join(f"{x(t)} {y(value)}" for t, value in floor.items())
    parts.append(f'<path class="floor" d="M{bottom}"/>')
    for name, own in lines.items():
        number = numbers[name]
        points = [(x(t), y(own[t])) for t in sorted(own)]
        route = "L".join(f"{px} {py}" for px, py in points)
        dash = DASHES[number // COLOURS % len(DASHES)]
        parts.append(f'<path class="line s{number % COLOURS}" stroke-dasharray="{dash}" d="M{route}"/>')
        parts += [_mark(number, px, py) for px, py in points]
    return Chart(title, Markup("".join(parts)))


def _mark(number: int, x: float, y: float) -> str:
    return f'<path class="mark s{number % COLOURS}" transform="translate({x} {y})" d="{_MARKS[number % len(_MARKS)]}"/>'


FLOOR = Markup('<path class="floor" d="M1 8H39"/>')


def piece(number: int) -> Markup:
    """A piece of a line, 40 by 16."""
    dash = DASHES[number // COLOURS % len(DASHES)]
    line = f'<path class="line s{number % COLOURS}" stroke-dasharray="{dash}" d="M1 8H39"/>'
    return Markup(line + _mark(number, 20, 8))


def sample(number: int) -> Markup:
    """The same as an image, for the legend."""
    return Markup('<svg class="sample" viewBox="0 0 40 16" aria-hidden="true">{}</svg>').format(piece(number))
