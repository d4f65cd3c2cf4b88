"""Which config group a layer falls under, and what that group says.

A target is a module name, `re:` with a regular expression that is matched from the start of the name, or a
class. Classes are not stored in a checkpoint; a layer with packed weights counts as a Linear. The more
specific target wins: name, then expression, then class; among equals the first group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from conformance.checkpoint.folder import CONFIG, Folder
from reference.errors import FormatError
from reference.formats import ActivationFormat, WeightFormat

PACKED = "pack-quantized"
_CLASSES = ("Linear", "LinearBase")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Scheme:
    """One config group that quantizes weights. weight and activation are None where the group does not say
    them rightly, which has been reported, or where its storage is no packed one. weights and
    input_activations: the group's own words, as a loader gets them."""

    group: str
    storage: str
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None
    weight: WeightFormat | None
    activation: ActivationFormat | None

    @property
    def packed(self) -> bool:
        return self.storage == PACKED


class Targets(Generic[_T]):
    """Targets and what each stands for."""

    def __init__(self) -> None:
        self._names: dict[str, _T] = {}
        self._expressions: list[tuple[re.Pattern[str], _T]] = []
        self._classes: list[tuple[str, _T]] = []

    def add(self, target: str, value: _T) -> None:
        """Raises re.error for an expression that is none."""
        if target.startswith("re:"):
            self._expressions.append((re.compile(target.removeprefix("re:")), value))
        elif target in _CLASSES:
            self._classes.append((target, value))
        else:
            self._names.setdefault(target, value)

    def named(self, layer: str) -> _T | None:
        """What a name or an expression says of a layer; classes are left aside."""
        if layer in self._names:
            return self._names[layer]
        return next((value for pattern, value in self._expressions if pattern.match(layer)), None)

    def of(self, layer: str) -> _T | None:
        """What the most specific target says of a packed layer."""
        found = self.named(layer)
        return self._classes[0][1] if found is None and self._classes else found

    def idle(self, layers: Iterable[str]) -> list[str]:
        """The targets that match none of the layers."""
        names = set(layers)
        idle = [target for target in self._names if target not in names]
        idle += [f"re:{p.pattern}" for p, _ in self._expressions if not any(map(p.match, names))]
        return idle + [target for target, _ in self._classes if not names]


class Schemes:
    """The config groups and the ignore list of a checkpoint; faults go to the folder's problems.

    targets: the scheme of a layer. ignore: the entry of the ignore list that covers it. by_group: the targets
    of each group alone.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.targets: Targets[Scheme] = Targets()
        self.ignore: Targets[str] = Targets()
        self.by_group: dict[str, Targets[str]] = {}
        for entry in self._words("ignore", folder.config.get("ignore") or []):
            self.ignore.add(entry, entry)
        for name, group in folder.config.get("config_groups", {}).items():
            self._read(name, group)

    def _read(self, name: str, group: Any) -> None:
        place = f"config_groups.{name}"
        if not isinstance(group, dict):
            self._fault(place, "an object with targets and weights", repr(group))
            return
        weights = group.get("weights")
        if weights is None:  # it quantizes activations or the cache alone
            return
        storage = group.get("format") or self._folder.config.get("format")
        if not isinstance(storage, str):
            self._fault(f"{place}.format", f"a format such as {PACKED!r}", repr(storage))
            storage = PACKED
        inputs = group.get("input_activations")
        weight = activation = None
        if storage == PACKED:
            weight = self._parse(f"{place}.weights", WeightFormat.from_quantization_args, weights)
            activation = self._parse(
                f"{place}.input_activations", ActivationFormat.from_quantization_args, inputs
            )
        scheme = Scheme(name, storage, weights, inputs, weight, activation)
        self.by_group[name] = Targets()
        for target in self._words(f"{place}.targets", group.get("targets")):
            self.targets.add(target, scheme)
            self.by_group[name].add(target, target)

    def _parse(self, place: str, read: Callable[[Any], _T], args: Any) -> _T | None:
        try:
            return read(args)
        except (FormatError, TypeError) as error:
            self._fault(place, "arguments that have a meaning", str(error))
            return None

    def _words(self, place: str, words: Any) -> list[str]:
        """A list of targets; entries that are none are reported and left out."""
        if not isinstance(words, list):
            self._fault(place, "a list of layers", repr(words))
            return []
        good = []
        for word in words:
            try:
                Targets[str]().add(word, word)
                good.append(word)
            except (re.error, AttributeError) as error:
                self._fault(place, "names, classes or re: with an expression", f"{word!r}: {error}")
        return good

    def _fault(self, place: str, expected: str, found: str) -> None:
        self._folder.fault(CONFIG, f"quantization_config.{place}", expected, found)
