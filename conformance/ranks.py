"""Rank processes: a layer of experts divided over torch.distributed, as a server runs it.

A pool is started once in a pytest process, at the first case that needs it. Each rank loads the backend from the
spec that the user gave, makes the case's data itself, takes its slices of the packed tensors as a loader does, and
asks the backend as the judge would. When all ranks have an answer, they add their outputs up in float32 with an
all-reduce: gloo for backends on the CPU, nccl on CUDA devices.

A rank that raises costs that case. One that dies, or keeps the others waiting longer than the limit, costs that case
and the pool, which is replaced at the next one.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.backend import Backend, device_of, load_backend
from conformance.cases import Case

if TYPE_CHECKING:
    from conformance.subject import Answer

RANKS = 4
SECONDS = 60.0  # for a case
STARTING_SECONDS = 180.0  # for imports, and whatever a backend compiles when it is loaded


def unavailable(backend: Backend, count: int) -> str | None:
    """Why so many ranks of a backend cannot run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return (
            "torch is not installed, and ranks talk through torch.distributed: pip install 'quantcts[torch]'"
        )
    if device_of(backend).split(":")[0] != "cuda":
        return None
    devices = _gpus(backend)
    return f"{count} ranks need as many GPUs; this machine has {devices}" if devices < count else None


def _gpus(backend: Backend) -> int:
    """How many GPUs there are. The process of a backend that is hosted elsewhere has said it: only for that its judges
    would import torch."""
    said = getattr(backend, "seen_gpus", None)
    return _cuda_devices() if said is None else int(said)


@cache
def _cuda_devices() -> int:
    import torch

    return int(torch.cuda.device_count())


def answer_of(backend: Backend, spec: str, case: Case, count: int) -> Answer:
    """What `count` ranks of a backend answer together. arrays: the float32 sum (sum of T, H).

    The first rank with another answer speaks for all, with its number. Only the pool of the backend that was asked
    last is kept.
    """
    cuda = device_of(backend).split(":")[0] == "cuda"
    size = min(RANKS, _gpus(backend)) if cuda else RANKS
    key = (spec, size)
    if key not in _pools:
        close()
        _pools[key] = Pool(spec, size, "nccl" if cuda else "gloo")
    pool = _pools[key]
    answer = pool.ask(case, count)
    if not pool.usable:
        _pools.pop(key).kill()
    return answer


def close() -> None:
    """End the ranks."""
    for pool in _pools.values():
        pool.kill()
    _pools.clear()


_pools: dict[tuple[str, int], Pool] = {}


@dataclass
class _Rank:
    process: Any
    connection: Connection


class Pool:
    """Rank processes of one backend. usable: whether it can be asked again."""

    def __init__(self, spec: str, size: int, transport: str, seconds: float = SECONDS) -> None:
        self.usable = True
        self._seconds = seconds
        self._started = False
        # One process imports torch and is forked for each rank: four imports would take as many times as long.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch.distributed", "conformance.data.sharding", "conformance.subject"]
        )
        self._folder = tempfile.TemporaryDirectory(prefix="quantcts-ranks-")
        store = (Path(self._folder.name) / "store").as_uri()
        self._ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, spec, rank, size, transport, store)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))

    def ask(self, case: Case, count: int) -> Answer:
        """The answer of the first `count` ranks to a case."""
        from conformance.subject import Answer

        asked = self._ranks[:count]
        start = time.monotonic()
        try:
            if not self._started:
                self._replies(self._ranks, STARTING_SECONDS)
                self._started = True
            for rank in asked:
                rank.connection.send((case, count, self._seconds))
            answers = self._replies(asked, self._seconds)
            failed = [n for n, answer in enumerate(answers) if answer.arrays is None]
            for number, rank in enumerate(asked):
                if number not in failed:
                    rank.connection.send(not failed)
            if failed:
                answer = answers[failed[0]]
                # After an error of its own a device answers nothing any more.
                self.usable = "CUDA error" not in (answer.crash or "")
                return _said_by(failed[0], answer)
            answer = self._replies(asked, self._seconds)[0]
        except _Lost as lost:
            self.usable = False
            return Answer(crash=str(lost), seconds=time.monotonic() - start)
        except OSError:
            self.usable = False
            return Answer(crash="the process of a rank ended between two cases")
        return replace(answer, seconds=max(a.seconds for a in answers))

    def _replies(self, asked: list[_Rank], seconds: float) -> list[Answer]:
        """One reply of each rank; its first says that it has started. Raises _Lost for a rank that died or is silent
        for so long."""
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(asked):
            waiting = {rank.connection: n for n, rank in enumerate(asked) if n not in found}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(str(n) for n in waiting.values())
                raise _Lost(f"rank {silent}: no answer within {seconds:.0f} seconds")
            for connection in ready:
                number = waiting[connection]  # type: ignore[index]
                try:
                    reply = asked[number].connection.recv()
                except (EOFError, OSError):
                    asked[number].process.join(5)
                    code = asked[number].process.exitcode
                    raise _Lost(f"rank {number}: its process ended with exit code {code}") from None
                if isinstance(reply, str):
                    raise _Lost(f"rank {number}: {reply}")
                found[number] = reply
        return [found[n] for n in range(len(asked))]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._folder.cleanup()


class _Lost(Exception):
    """A rank does not answer."""


def _said_by(rank: int, answer: Answer) -> Answer:
    def prefixed(text: str | None) -> str | None:
        return None if text is None else f"rank {rank}: {text}"

    return replace(
        answer,
        refusal=prefixed(answer.refusal),
        wrong=prefixed(answer.wrong),
        crash=prefixed(answer.crash),
    )


# ---- in a rank's process


def _serve(connection: Connection, spec: str, rank: int, size: int, transport: str, store: str) -> None:
    """Answer cases until the other end is closed; what keeps the rank from starting is said in words."""
    from conformance.subject import Answer, describe

    try:
        served = _Served(spec, rank, size, transport, store)
    except (Exception, SystemExit) as error:
        connection.send(f"it could not be started: {describe(error)}")
        return
    connection.send(Answer())
    while True:
        try:
            case, count, limit = connection.recv()
        except EOFError:
            return
        # The judge kills a silent rank; if the judge itself is gone, nobody would.
        faulthandler.dump_traceback_later(limit + 10, exit=True, file=served.silence)
        answer = served.answer(case)
        connection.send(replace(answer, arrays=None if answer.arrays is None else ()))
        if answer.arrays is not None and connection.recv():
            connection.send(served.reduced(answer, count))
        faulthandler.cancel_dump_traceback_later()


class _Served:
    """The backend and the groups of one rank."""

    def __init__(self, spec: str, rank: int, size: int, transport: str, store: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank = rank
        self.silence = os.open(os.devnull, os.O_WRONLY)
        torch.set_num_threads(1)
        self.device = "cpu"
        if transport == "nccl":
            torch.cuda.set_device(rank)
            self.device = f"cuda:{rank}"
        self.backend = load_backend(spec)
        dist.init_process_group(transport, init_method=store, rank=rank, world_size=size)
        self.groups = {count: dist.new_group(list(range(count))) for count in (2, 4) if count <= size}

    def answer(self, case: Case) -> Answer:
        """The rank's own outputs of all calls, in 16 bits."""
        from conformance.data.sharding import parallel_problem, shard
        from conformance.subject import Answer, Subject, describe

        subject = Subject(self.backend, case)
        try:
            problem = parallel_problem(case).whole
            held = shard(problem.checkpoint, case.ranks, self.rank)
            answer = subject.moe(held, problem.calls)
        except Exception as error:
            return Answer(crash=describe(error))
        return answer or Answer(refusal=f"it did not run: {subject.support().reason}")

    def reduced(self, answer: Answer, count: int) -> Answer:
        """The float32 sum of all ranks' outputs."""
        import torch
        import torch.distributed as dist

        assert answer.arrays is not None
        total = torch.from_numpy(answer.arrays[0].astype(np.float32)).to(self.device)
        dist.all_reduce(total, group=self.groups[count])
        return replace(answer, arrays=(total.cpu().numpy(),))
