"""What the judge sees of a backend in another process: a subject whose answers come through a socket."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from conformance.backend import Support
from conformance.cases import Case
from conformance.conduct import needs
from conformance.conduct.canary import ask_guarded, canary, unwatchable, unwatched
from conformance.conduct.observed import Question
from conformance.errors import RunError
from conformance.isolation.host import END, seen_first
from conformance.isolation.supervisor import FAILED_STARTS, STARTING_SECONDS, Place, word_left
from conformance.subject import Answer, Check, Subject, needed
from reference.bounds import Contract

# For the start and the imports of a guarded process, beside the limit of its question
LOADING_SECONDS = 60.0
# Of a backend that prepares, between two lines of progress
SILENT_SECONDS = 300.0
# How often a host may die before it takes a question. Deadly questions of others are fewer: only what cannot be sent
# is met so often.
ATTEMPTS = 1000
# By then the supervisor has given a host up.
_GIVEN_UP_SECONDS = (FAILED_STARTS + 1) * STARTING_SECONDS


class RemoteBackend:
    """Stands for a backend that is hosted elsewhere. worker: which of the judges asks; they share the GPUs.

    limit: seconds that one question may take. waiting, asking: seconds of this judge until its questions had their
    turn, and from there until they were answered; moving: what it took to make messages of arrays, and arrays of
    messages. aside: the process to ask what may end one; this one where there is none. seen_gpus: how many the
    process sees.
    """

    arrays = "numpy"

    def __init__(self, place: Place, worker: int, limit: float) -> None:
        description = place.description
        self.name, self.device = description.name, description.device
        self.contract: Contract = description.promises()
        self.description = description
        self.kernels = description.kernels
        self.nondeterministic = description.nondeterministic
        self.seen_gpus = description.gpus
        gpu = worker % len(place.paths)
        self._path = place.paths[gpu]
        # Of another process that is to see the same GPU
        self.variables = {"CUDA_VISIBLE_DEVICES": seen_first(gpu)} if len(place.paths) > 1 else {}
        self.limit = limit
        self.waiting = self.asking = self.moving = 0.0
        self._connection: Connection | None = None
        apart = replace(place, paths=place.aside, aside=())
        self.aside: RemoteBackend = RemoteBackend(apart, worker, limit) if place.aside else self

    def present(self) -> bool:
        """Whether the process has been there, and is or will be again."""
        return Path(self._path).exists() and not Path(f"{self._path}.failed").exists()

    def lacks(self, case: Case) -> str | None:
        """The operation that a case needs and the backend does not have."""
        return next((name for name in needed(case) if name not in self.description.operations), None)

    def supports(self, case: Case) -> Support:
        """Raises RunError with the words of whatever supports() raised there."""
        return self._said(case)[0]

    def contract_for(self, case: Case) -> Contract:
        """Raises as supports()."""
        return self._said(case)[1]

    def _said(self, case: Case) -> Said:
        said, answer = self.ask(case, None, ())
        if said is None:
            raise RunError(str(answer and answer.crash))
        return said

    def ask(
        self, case: Case, operation: str | None, arguments: tuple[Any, ...]
    ) -> tuple[Said | None, Answer | None]:
        """What the backend says beforehand, None where that was lost or raised, and its answer: a crash where the host
        died of the question or did not answer in time."""
        asked, moved = time.monotonic(), self.moving
        try:
            connection, pid = self._turn(("ask", case, operation, arguments, self.limit))
        except _Failed as failed:
            return None, Answer(crash=str(failed))
        start = time.monotonic()
        self.waiting += start - asked - (self.moving - moved)
        moved = self.moving
        try:
            return self._answered(connection, pid, start)
        finally:
            self.asking += time.monotonic() - start - (self.moving - moved)

    def _turn(self, request: Any) -> tuple[Connection, int]:
        for _ in range(ATTEMPTS):
            try:
                return self._begun(request)
            except _Gone:
                continue  # it died of what another judge asked, which has its verdict and is not asked again
        raise _Failed(f"its process ended {ATTEMPTS} times before it took the question")

    def _answered(self, connection: Connection, pid: int, start: float) -> tuple[Said | None, Answer | None]:
        log = _log_size(self._path)
        said: Said | None = None
        try:
            first = self._received(connection, start)
            if isinstance(first, str):
                self._received(connection, start)  # the answer behind it: none
                return None, Answer(crash=f"supports() raised {first}")
            said = first
            return said, self._received(connection, start)
        except TimeoutError as late:
            os.kill(pid, signal.SIGKILL)
            self._close()
            word_left(self._path, pid)
            return said, Answer(crash=str(late), seconds=self.limit)
        except (EOFError, OSError):
            self._close()
            ended = f"its process {word_left(self._path, pid)}{_last_words(self._path, log)}"
            return said, Answer(crash=ended, seconds=time.monotonic() - start)

    def _received(self, connection: Connection, start: float) -> Any:
        if not connection.poll(max(0.0, self.limit - (time.monotonic() - start))):
            raise TimeoutError(f"no answer within {self.limit:.0f} seconds")
        with self._moved():
            return connection.recv()

    def prepare(self, cases: list[Case], workers: int, say: Any) -> str:
        """Have the backend compile what the cases need. Returns what went wrong, in words."""
        try:
            connection, pid = self._begun(("prepare", cases, workers))
            log = _log_size(self._path)
        except _Gone:
            return "its process ended"
        except _Failed as failed:
            return str(failed)
        try:
            while True:
                if not connection.poll(SILENT_SECONDS):
                    os.kill(pid, signal.SIGKILL)
                    self._close()
                    word_left(self._path, pid)
                    return f"it said nothing for {SILENT_SECONDS:.0f} seconds and was ended"
                kind, text = connection.recv()
                if kind == END:
                    return str(text)
                say(text)
        except (EOFError, OSError):
            self._close()
            return f"its process {word_left(self._path, pid)}{_last_words(self._path, log)}"

    def _connected(self) -> Connection:
        if self._connection is not None:
            return self._connection
        deadline = time.monotonic() + _GIVEN_UP_SECONDS
        failed = Path(f"{self._path}.failed")
        while time.monotonic() < deadline:
            if failed.is_file():
                raise _Failed(f"its process cannot be started: {failed.read_text('utf-8')}")
            try:
                self._connection = Client(self._path, "AF_UNIX")
                return self._connection
            except OSError:
                time.sleep(0.05)
        raise _Failed(f"its process does not answer within {_GIVEN_UP_SECONDS:.0f} seconds")

    def _begun(self, request: Any) -> tuple[Connection, int]:
        """Ask, and wait for the question's turn; the pid of the host that works on it."""
        connection = self._connected()
        try:
            with self._moved():
                message = pickle.dumps(request)
            connection.send_bytes(message)
            _, pid = connection.recv()
        except (EOFError, OSError):
            self._close()
            raise _Gone from None
        return connection, int(pid)

    @contextmanager
    def _moved(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.moving += time.monotonic() - start

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


# What a backend says of a case beforehand, and what it promises there
Said = tuple[Support, Contract]


class _Gone(Exception):
    """The host ended before it took the question."""


class _Failed(Exception):
    """There is no host, and there will be none."""


def _log_size(path: str) -> int:
    log = Path(f"{path}.log")
    return log.stat().st_size if log.is_file() else 0


def _last_words(path: str, since: int) -> str:
    """The last line that the process wrote behind so many bytes, where it is of an error."""
    try:
        written = Path(f"{path}.log").read_bytes()[since:]
    except OSError:
        return ""
    lines = written.decode("utf-8", errors="replace").strip().splitlines()
    telling = [line for line in lines[-20:] if any(word in line for word in ("rror", "ssert", "Fatal"))]
    return f": {telling[-1].strip()[:300]}" if telling else ""


class RemoteSubject(Subject):
    """A Subject whose operations are carried out by the host."""

    backend: RemoteBackend
    _contract: Contract | None = None

    @property
    def contract(self) -> Contract:
        return self._contract or self.backend.contract_for(self.case.plain)

    def absent(self) -> str | None:
        return self.backend.lacks(self.case)

    def _forward(self, operation: str, *arguments: Any) -> Answer | None:
        start = time.perf_counter()
        self.making_seconds = self.making_seconds or start - self._made_at
        if self.absent() is not None:
            return None
        said, answer = self._asked.ask(self.case, operation, arguments)
        if said is not None:
            self._support, self._contract = said
        return answer

    @property
    def _asked(self) -> RemoteBackend:
        """Checks of conduct take longest, and a misaligned x or a capture that is refused may cost the process: the
        judges of other cases need not wait for it, or for the next one. While it is not there, nobody does."""
        aside = self.case.operation == "conduct" and self.backend.aside.present()
        return self.backend.aside if aside else self.backend

    pack = partialmethod(_forward, "pack")
    unpack = partialmethod(_forward, "unpack")
    dequantize = partialmethod(_forward, "dequantize")
    quantize_activation = partialmethod(_forward, "quantize_activation")
    linear = partialmethod(_forward, "linear")
    route = partialmethod(_forward, "route")
    align = partialmethod(_forward, "align")
    swiglu = partialmethod(_forward, "swiglu")
    moe = partialmethod(_forward, "moe")
    shard_moe = partialmethod(_forward, "shard_moe")

    def conduct(self, check: Check, questions: Sequence[Question]) -> Answer | None:
        """Whose check makes a process of its own anyway is not made in the host, for which the other judges wait."""
        if check is not canary or self.absent() is not None:
            return self._forward("conduct", check, questions)
        said, answer = self._asked.ask(self.case, None, ())
        if said is None:
            return answer
        self._support, self._contract = said
        if needs.lacking(self.case, self.backend) is not None:
            return None
        limit = LOADING_SECONDS + self.backend.limit
        guarded = ask_guarded(self.spec, self.case, questions, limit, self.backend.variables)
        if not unwatchable(guarded):
            return guarded
        why = guarded.refusal or guarded.crash or ""
        return self._forward("conduct", partial(unwatched, why=why), questions)
