"""From the names that a run was given to backends that can be asked: here, or each in a process of its own."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.backend import (
    EVERY_CUDA,
    Backend,
    cuda_backends,
    device_of,
    load_backend,
)
from conformance.errors import EnvironmentMissing, RunError
from conformance.isolation.remote import RemoteBackend
from conformance.isolation.supervisor import Place, Supervisor

NO_GPU = "torch finds no CUDA device"


@dataclass
class Roster:
    """backends, specs (as they were asked for) by name. absent: name -> why it is not there. places: spec -> Place of
    those that have a process of their own; loading: seconds until all of these could be asked."""

    backends: dict[str, Backend] = field(default_factory=dict)
    specs: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    loading: float = 0.0
    supervisor: Supervisor | None = None

    @classmethod
    def of(
        cls, asked: Sequence[str], isolate: bool, limit: float, profiled: bool, aside: bool = False
    ) -> Roster:
        """Load the backends. Those on a GPU, and with `isolate` all, are started in processes of their own; aside: in
        another each, for what may end one.

        Raises RunError and EnvironmentMissing as load_backend does; of `cuda` those that are not present are left out,
        and it is an error only if none is.
        """
        made = cls()
        try:
            made._fill(asked, isolate, limit, profiled, aside)
        except BaseException:
            made.close()
            raise
        return made

    def _fill(self, asked: Sequence[str], isolate: bool, limit: float, profiled: bool, aside: bool) -> None:
        start = time.monotonic()
        if {EVERY_CUDA, *cuda_backends()}.intersection(asked) and has_driver():
            self.supervisor = Supervisor(profiled)
            self.supervisor.preload(cuda=True)  # while torch is imported here to count the GPUs
        if EVERY_CUDA in asked and gpu_count() == 0:
            raise EnvironmentMissing(f"--backend {EVERY_CUDA}: {NO_GPU}")
        optional = {name for name in cuda_backends() if EVERY_CUDA in asked}
        specs = dict.fromkeys(n for s in asked for n in (cuda_backends() if s == EVERY_CUDA else [s]))
        here = {} if isolate else {s: load_backend(s) for s in specs if s not in cuda_backends()}
        elsewhere = [s for s in specs if s not in here or device_of(here[s]).startswith("cuda")]
        if elsewhere:
            self.supervisor = self.supervisor or Supervisor(profiled)
            found = self.supervisor.start(elsewhere, gpu_count(), aside=aside)
            for spec, place in found.items():
                if isinstance(place, Place):
                    self.places[spec] = place
                elif spec in optional:
                    self.absent[spec] = str(place)
                else:
                    raise place
            self.loading = time.monotonic() - start
        for spec in specs:
            if spec in self.places:
                self._add(spec, RemoteBackend(self.places[spec], 0, limit))
            elif spec in here:
                self._add(spec, here[spec])
        if not self.backends:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.absent.items())
            raise EnvironmentMissing(f"none of the CUDA backends is there: {reasons}")

    def to_json(self) -> str:
        """What a worker needs to ask the same backends."""
        places = {spec: place.to_json() for spec, place in self.places.items()}
        return json.dumps({"specs": self.specs, "absent": self.absent, "places": places})

    @classmethod
    def in_worker(cls, text: str, worker: int, limit: float) -> Roster:
        """The same backends, asked from another process."""
        record = json.loads(text)
        made = cls(absent=record["absent"])
        made.places = {spec: Place.from_json(place) for spec, place in record["places"].items()}
        for spec in record["specs"].values():
            place = made.places.get(spec)
            made._add(spec, RemoteBackend(place, worker, limit) if place else load_backend(spec))
        return made

    def close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()

    def _add(self, spec: str, backend: Any) -> None:
        if backend.name in self.backends:
            raise RunError(f"two backends are named {backend.name!r}; give each a name of its own")
        self.backends[backend.name] = backend
        self.specs[backend.name] = spec


def has_driver() -> bool:
    """Whether the driver of GPUs is there; the answer takes no import."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def gpu_count() -> int:
    """How many CUDA devices torch sees; none without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())
