"""Inside the process of a backend: it is loaded from its spec and asked one thing at a time.

Any number of judges connect to a socket. A request is answered by "started" when its turn has come. A question about
a case is then answered by what the backend says and promises beforehand and by its answer, a preparation by lines of
progress and an end. A device that has met an error of its own answers nothing right any more: the process says what
happened and ends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from conformance.backend import (
    Backend,
    contract_of,
    device_of,
    libraries_of,
    load_backend,
    nondeterminism_of,
)
from conformance.cases import Case
from conformance.cases.conduct import called
from conformance.errors import EnvironmentMissing, RunError
from conformance.installed import installed
from conformance.isolation.kernels import launched, start_profiler
from conformance.orphans import end_with
from conformance.subject import OPERATIONS, Answer, Subject, describe, hide_pytest
from reference.bounds import Contract

STARTED = "started"
# What a host says while it prepares: a line of progress; that it has ended, with what went wrong.
LINE, END = "line", "end"
# To the supervisor, once: it has been asked something, so what it dies of from here on may be a question.
ASKED = "asked"
# A judge that asked may be gone: past its limit and this the host ends itself.
GRACE_SECONDS = 10.0
# For a host to end by itself when its run has ended.
LINGER_SECONDS = 2.0


@dataclass(frozen=True)
class Description:
    """What the judge has to know of a backend without loading it. libraries: distribution -> version; gpus: how many
    its process sees, 0 of a backend on the CPU; free: the part of its GPU's memory that was free when it was loaded."""

    name: str
    device: str
    contract: dict[str, Any]
    operations: tuple[str, ...]
    libraries: dict[str, str]
    kernels: dict[str, str]
    nondeterministic: str
    prepares: bool
    gpus: int
    free: float

    @classmethod
    def of(cls, backend: Backend) -> Description:
        needed = sorted({name for names in OPERATIONS.values() for name in names})
        kernels = getattr(backend, "kernels", "")
        return cls(
            backend.name,
            device_of(backend),
            asdict(contract_of(backend)),
            tuple(name for name in needed if callable(getattr(backend, name, None))),
            {name: installed(name) or "unknown" for name in libraries_of(backend)},
            dict(kernels) if not isinstance(kernels, str) else dict.fromkeys(OPERATIONS, kernels),
            nondeterminism_of(backend),
            callable(getattr(backend, "prepare", None)),
            *_gpus_and_free(device_of(backend)),
        )

    def promises(self) -> Contract:
        return Contract(**self.contract)


class Ended(Exception):
    """The device answers nothing any more."""


def serve(spec: str, path: str, gpu: int | None, lifeline: Connection, profiled: bool) -> None:
    """Load the backend, then answer until the supervisor's end of the lifeline is closed.

    The first message through the lifeline is the Description, or the RunError that says why there is none; the second
    is ASKED. An interrupt is for those who ask: they close the lifeline.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hide_pytest(os.environ)
    log = open(f"{path}.log", "a", buffering=1)  # noqa: SIM115 - as long as the process lives
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = seen_first(gpu)
    # A killed run closes nothing but its files, and whoever loads, compiles or waits does not look.
    end_with([lifeline], LINGER_SECONDS)
    try:
        backend = load_backend(spec)
        description = Description.of(backend)
    except RunError as error:
        lifeline.send(error)
        return
    except (Exception, SystemExit) as error:
        lifeline.send(EnvironmentMissing(f"backend {spec!r} could not be loaded: {describe(error)}"))
        return
    server = socket.socket(socket.AF_UNIX)
    Path(path).unlink(missing_ok=True)
    server.bind(path)
    server.listen(128)
    lifeline.send(description)
    host = _Host(backend, spec, profiled)
    try:
        if not description.prepares:
            host.start_profiler()
        _answer_all(host, server, lifeline)
    except Ended:
        sys.stdout.flush()
        os._exit(1)  # a destroyed context can hang in its destructors


def seen_first(gpu: int) -> str:
    """CUDA_VISIBLE_DEVICES for a process that sees this GPU first, and the others behind it."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if shown == [""]:
        import torch

        shown = [str(i) for i in range(torch.cuda.device_count())]
    return ",".join([shown[gpu], *shown[:gpu], *shown[gpu + 1 :]])


def _gpus_and_free(device: str) -> tuple[int, float]:
    if not device.startswith("cuda"):
        return 0, 1.0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(torch.cuda.device_count()), free / total


def _answer_all(host: _Host, server: socket.socket, lifeline: Connection) -> None:
    judges: list[Connection] = []
    asked = False
    while True:
        for ready in wait([server, lifeline, *judges]):
            if ready is lifeline:
                return
            if ready is server:
                judges.append(Connection(server.accept()[0].detach()))
                continue
            assert isinstance(ready, Connection)
            try:
                request = ready.recv()
                if not asked:
                    lifeline.send(ASKED)
                asked = True
                ready.send((STARTED, os.getpid()))
            except (EOFError, OSError):
                judges.remove(ready)
                continue
            reply, usable = host.reply(request, ready.send)
            ready.send(reply)
            if not usable:
                raise Ended


class _Host:
    def __init__(self, backend: Backend, spec: str, profiled: bool) -> None:
        self.backend, self.spec = backend, spec
        self._cuda = device_of(backend).startswith("cuda")
        self._profiled = profiled and self._cuda

    def reply(self, request: Any, say: Callable[[Any], None]) -> tuple[Any, bool]:
        """The answer to a request, and whether the process can be asked again."""
        kind, *rest = request
        if kind == "prepare":
            cases, workers = rest
            return (END, self._prepare(cases, workers, say)), self._usable()
        case, operation, arguments, limit = rest
        faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True)
        try:
            return self._ask(case, operation, arguments, say)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _ask(
        self, case: Case, operation: str | None, arguments: tuple[Any, ...], say: Callable[[Any], None]
    ) -> tuple[Answer | None, bool]:
        subject = Subject(self.backend, case, self.spec, keep=self._profiled)
        try:
            say((subject.support(), subject.contract))
        except Exception as error:
            say(describe(error))
            return None, self._usable()
        if operation is None:
            return None, True
        answer = getattr(subject, operation)(*arguments)
        failure = self._left_behind()
        if answer is None:
            return None, failure is None or self._usable()
        if failure is not None:
            if answer.crash is None:
                answer = Answer(crash=f"after it had answered, the device failed: {failure}")
            return answer, self._usable()
        if answer.observed is not None and answer.observed.spent:
            return answer, False
        if self._profiled and answer.arrays is not None and subject.repeat is not None:
            kernels = launched(subject.repeat)
            # A call that was recorded to its end has been waited for.
            return replace(answer, kernels=kernels), kernels is not None or self._usable()
        return answer, True

    def _prepare(self, cases: list[Case], workers: int, say: Callable[[Any], None]) -> str:
        """Compile for the cases that will be asked; the error that ended it, or nothing."""
        try:
            present = [case for case in cases if Subject(self.backend, case).absent() is None]
            asked = list(dict.fromkeys(plain for case in present for plain in called(case)))
            for line in self.backend.prepare(asked, workers):  # type: ignore[attr-defined]
                say((LINE, str(line)))
        except Exception as error:
            return describe(error)
        self.start_profiler()
        return ""

    def start_profiler(self) -> None:
        """Before the judges come: all hosts at once rather than one behind the other."""
        if self._profiled:
            start_profiler()

    def _usable(self) -> bool:
        """Whether the device answers: an error of a kernel stays with its process for good, one of a launch that
        nobody looked at is met once, by whatever is launched next."""
        return self._left_behind() is None or self._left_behind() is None

    def _left_behind(self) -> str | None:
        """What the device says of what was launched before."""
        if not self._cuda:
            return None
        import torch

        try:
            torch.cuda.synchronize()
            # Only to be told of a launch that failed: nobody waits for it, on a GPU that many processes share.
            torch.ones(1, device="cuda")
        except Exception as error:
            return describe(error)
        return None
