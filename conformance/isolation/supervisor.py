"""Starts the processes of backends, replaces those that die, ends them all.

One process imports what all need and is forked for each host: a replacement is there as soon as it has imported its
library, which takes from one second to six.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from conformance.errors import EnvironmentMissing, RunError
from conformance.isolation.host import ASKED, Description, serve

STARTING_SECONDS = 300.0  # imports of large libraries, on a cold disk
# Of the folder of temporary files: sockets lie in it, whose whole path may have 107 bytes.
LONGEST_FOLDER = 70
# The part of a GPU's memory that is free when all hosts are loaded, for another of each: contexts take half a GiB each.
ROOM = 0.75
# A host that dies so often before it is asked anything will not do better the next time.
FAILED_STARTS = 3


@dataclass(frozen=True)
class Place:
    """Where a backend can be asked: its socket, one a GPU. description: of the backend there. aside: the sockets of
    other processes of it, one a GPU, for what may end one; none: there are no such."""

    spec: str
    paths: tuple[str, ...]
    description: Description
    aside: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        record = json.loads(text)
        description = {**record["description"]}
        description["operations"] = tuple(description["operations"])
        return cls(record["spec"], tuple(record["paths"]), Description(**description), tuple(record["aside"]))


@dataclass
class _Hosted:
    """One process. ready: it can be asked; asked: it was; both end with the process. since: when it was started.
    ended: how often in a row it died before it was asked; reason: what it said of that."""

    spec: str
    path: str
    gpu: int | None
    process: Any = None
    lifeline: Any = None
    since: float = 0.0
    ended: int = 0
    ready: bool = False
    asked: bool = False
    reason: str = ""


class Supervisor:
    """Hosts of several backends. profiled: they record the kernels of each call."""

    def __init__(self, profiled: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quantcts-hosts-")
        self._profiled = profiled
        self._context = multiprocessing.get_context("forkserver")
        self._hosted: list[_Hosted] = []
        self._closing = threading.Event()
        self._wakes, self._waker = multiprocessing.Pipe(duplex=False)
        self._thread: threading.Thread | None = None

    def preload(self, cuda: bool) -> None:
        """Start the process that hosts are forked from, unless it was; it imports what they need, by and by. cuda:
        they are on GPUs. Raises EnvironmentMissing where sockets have no room."""
        folder = tempfile.gettempdir()
        if len(os.fsencode(folder)) > LONGEST_FOLDER:
            raise EnvironmentMissing(
                f"{folder}: this path is too long for the sockets of the backends' processes; let TMPDIR name a "
                f"folder of at most {LONGEST_FOLDER} bytes"
            )
        modules = ["conformance.isolation.host", "conformance.data"]
        if cuda:
            # What looks for a GPU while it is imported is to ask NVML: a CUDA that was begun cannot be forked.
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
            modules.append("torch")
            if self._profiled:  # torch's profiler imports its compilers, which takes seconds
                modules += ["torch._dynamo", "torch._inductor.config"]
        self._context.set_forkserver_preload(modules)
        forkserver.ensure_running()

    def start(
        self, specs: list[str], gpus: int, every: bool = True, aside: bool = False
    ) -> dict[str, Place | RunError]:
        """Start a host for each spec and GPU (0: one each, for backends on the CPU), all at once. every: on each of
        the GPUs, else on the first alone. aside: then another for each, which is not waited for, where the GPUs have
        room for both.

        What cannot be loaded is a RunError with the reason, in place of the Place. Raises as preload().
        """
        atexit.register(self.close)  # or multiprocessing would wait for hosts that wait for us
        self.preload(gpus > 0)
        for number, spec in enumerate(specs):
            for gpu in range(gpus if every else 1) if gpus else [None]:
                self._host(spec, str(Path(self._folder.name) / f"{number}-{gpu or 0}"), gpu)
        found: dict[str, Place | RunError] = {}
        free = 1.0
        for spec in specs:
            own = [h for h in self._hosted if h.spec == spec]
            said = [self._first_word(h) for h in own]
            wrong = next((s for s in said if isinstance(s, RunError)), None)
            if wrong is not None:
                self._drop(own)
                found[spec] = wrong
                continue
            descriptions = [s for s in said if isinstance(s, Description)]
            found[spec] = Place(spec, tuple(h.path for h in own), descriptions[0])
            free = min(free, *(d.free for d in descriptions))
        if aside and free >= ROOM:
            found = {spec: self._doubled(place) for spec, place in found.items()}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="quantcts-supervisor")
        self._thread.start()
        return found

    def close(self) -> None:
        """End the hosts."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.send(None)
        if self._thread is not None:
            self._thread.join()
        self._drop(list(self._hosted))
        self._folder.cleanup()

    def _doubled(self, place: Place | RunError) -> Place | RunError:
        """With other hosts, unless there is none or what it has compiled may be its own."""
        if isinstance(place, RunError) or place.description.prepares:
            return place
        own = [h for h in self._hosted if h.path in place.paths]
        return replace(place, aside=tuple(self._host(h.spec, f"{h.path}-aside", h.gpu) for h in own))

    def _host(self, spec: str, path: str, gpu: int | None) -> str:
        """Start one; returns its path."""
        hosted = _Hosted(spec, path, gpu)
        self._launch(hosted)
        self._hosted.append(hosted)
        return path

    def _launch(self, hosted: _Hosted) -> None:
        ours, theirs = self._context.Pipe()
        arguments = (hosted.spec, hosted.path, hosted.gpu, theirs, self._profiled)
        hosted.process = self._context.Process(target=serve, args=arguments, daemon=False)
        hosted.process.start()
        theirs.close()
        hosted.lifeline, hosted.ready, hosted.asked = ours, False, False
        hosted.since, hosted.reason = time.monotonic(), ""

    def _first_word(self, hosted: _Hosted) -> Description | RunError:
        """What a host says when it has loaded its backend, or why it says nothing."""
        try:
            if not hosted.lifeline.poll(STARTING_SECONDS):
                late = f"backend {hosted.spec!r}: not loaded within {STARTING_SECONDS:.0f} seconds"
                return EnvironmentMissing(late)
            said: Description | RunError = hosted.lifeline.recv()
        except (EOFError, OSError):
            hosted.process.join(10)
            ended = how_it_ended(hosted.process.exitcode)
            return EnvironmentMissing(f"backend {hosted.spec!r}: its process {ended} while it was loaded")
        hosted.ready = True
        return said

    def _drop(self, hosted: list[_Hosted]) -> None:
        for one in hosted:
            one.lifeline.close()
            one.process.kill()
        for one in hosted:
            one.process.join()
            self._hosted.remove(one)

    def _watch(self) -> None:
        """In a thread: notice dead hosts, say how they ended, start others."""
        while not self._closing.is_set():
            sentinels: dict[Any, _Hosted] = {}
            for hosted in self._hosted:
                sentinels[hosted.process.sentinel] = hosted
                if not hosted.asked:
                    sentinels[hosted.lifeline] = hosted
            found = wait([*sentinels, self._wakes], self._patience())
            # What a host has said comes before how it ended.
            for ready in sorted(found, key=lambda r: not isinstance(r, Connection)):
                if ready is self._wakes:
                    continue
                hosted = sentinels[ready]
                if isinstance(ready, Connection):
                    self._hear(hosted)
                elif hosted.process.exitcode is not None:
                    self._replace(hosted)
            for hosted in self._loading():
                if time.monotonic() - hosted.since >= STARTING_SECONDS:
                    hosted.reason = f": not loaded within {STARTING_SECONDS:.0f} seconds"
                    hosted.process.kill()

    def _loading(self) -> list[_Hosted]:
        return [hosted for hosted in self._hosted if not hosted.ready]

    def _patience(self) -> float | None:
        """Seconds until the first of those that are being loaded has taken too long."""
        starts = [hosted.since for hosted in self._loading()]
        return max(0.0, min(starts) + STARTING_SECONDS - time.monotonic()) if starts else None

    def _hear(self, hosted: _Hosted) -> None:
        """All that a host has said."""
        try:
            while hosted.lifeline.poll():
                said = hosted.lifeline.recv()
                if said == ASKED:
                    hosted.asked, hosted.ended = True, 0
                elif isinstance(said, Description):
                    hosted.ready = True
                else:
                    hosted.reason = f": {said}"
        except (EOFError, OSError):
            return  # it died: its sentinel says so

    def _replace(self, hosted: _Hosted) -> None:
        process = hosted.process
        self._hear(hosted)
        leave_word(hosted.path, process.pid, how_it_ended(process.exitcode))
        hosted.ended += 0 if hosted.asked else 1
        hosted.lifeline.close()
        process.join()
        if hosted.ended >= FAILED_STARTS:
            said = (
                f"it {how_it_ended(process.exitcode)} each of {FAILED_STARTS} times that it was started, "
                f"before it was asked anything{hosted.reason}"
            )
            Path(f"{hosted.path}.failed").write_text(said, "utf-8")
            self._hosted.remove(hosted)
            return
        self._launch(hosted)


def how_it_ended(exitcode: int | None) -> str:
    """In words."""
    if exitcode is not None and exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def leave_word(path: str, pid: int, said: str) -> None:
    """Whoever asked a host that died finds here how it ended."""
    beside = Path(f"{path}.{pid}.tmp")
    beside.write_text(said, "utf-8")
    os.replace(beside, f"{path}.{pid}.ended")


def word_left(path: str, pid: int, seconds: float = 10.0) -> str:
    """How a host ended; waits until the supervisor has noticed."""
    place = Path(f"{path}.{pid}.ended")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if place.is_file():
            return place.read_text("utf-8")
        time.sleep(0.02)
    return "ended"
