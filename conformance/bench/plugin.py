"""The pytest plugin of the benchmark: options, parametrization over workloads and backends, what came of each.

The figures are pytest-benchmark's, with its options and its JSON; this adds what it takes to compare them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from time import monotonic
from typing import Any, cast

import pytest

from conformance.backend import (
    EVERY_CUDA,
    Backend,
    Support,
    contract_of,
    cuda_backends,
    device_of,
    load_backend,
)
from conformance.bench.ahead import Ahead
from conformance.bench.clocks import Clock
from conformance.bench.peers import compare
from conformance.bench.stand import Stand, Untimed
from conformance.bench.subjects import SUBJECTS, Subject
from conformance.bench.workloads import Workload, workloads
from conformance.errors import EnvironmentMissing, RunError
from conformance.exitcodes import ExitCode
from conformance.interrupts import BROKEN_DOWN
from conformance.query import select
from conformance.report.document import environment, place_to_write, put

EXIT_CODE = pytest.StashKey[ExitCode]()
STATES = ("timed", "declines", "slow", "wrong", "crashes", "invalid")
# What says nothing against a backend
HARMLESS = ("declines", "slow")


def benches(operation: str) -> Callable[[Any], Any]:
    """Mark a function as timing every workload of an operation. It takes `subject` and `time`."""
    return pytest.mark.quantcts(operation)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("quantcts", "QuantCTS: the benchmark")
    group.addoption("--backend", action="append", metavar="NAME", help="backend to time; may be repeated")
    group.addoption("--quick", action="store_true", help="one layer of each kind, four numbers of tokens")
    group.addoption("--cases", action="append", metavar="QUERY", help="time the workloads that it selects")
    group.addoption(
        "--do-bench", action="store_true", help="let triton.testing.do_bench time the same rounds too"
    )


class Plugin:
    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.stand = Stand(do_bench=option.do_bench)
        self.backends, self.absent = _backends(option.backend or [])
        if option.do_bench and importlib.util.find_spec("triton") is None:
            raise EnvironmentMissing("--do-bench: triton is not installed")
        self.clocks = {name: Clock(device_of(backend)) for name, backend in self.backends.items()}
        every = {w.id: w for operation in SUBJECTS for w in workloads(operation)}
        offered = {i: w for i, w in every.items() if w.quick or not option.quick}
        chosen = select(offered, option.cases or [])
        if not chosen:
            raise RunError("the queries together leave no workload")
        self.workloads = [offered[i] for i in chosen]
        self.ahead = Ahead()
        self.states: Counter[str] = Counter()
        self.untimed: list[dict[str, str]] = []  # which workloads have no figure, and why
        if option.benchmark_disable:
            raise RunError("--benchmark-disable: then nothing is timed")
        given = option.benchmark_json
        self.json = place_to_write("--benchmark-json", given) if given else None
        self.compiling = self.timing = 0.0  # seconds
        self.config = config

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marker = metafunc.definition.get_closest_marker("quantcts")
        if marker is None:
            return
        own = [w for w in self.workloads if w.case.operation == marker.args[0]]
        layers = list(dict.fromkeys(w.layer for w in own))
        # All numbers of tokens of a layer that a backend has loaded, then the next backend.
        pairs = [(w, b) for layer in layers for b in self.backends.values() for w in own if w.layer == layer]
        marks = [pytest.param(w, b, id=f"{w.id}@{b.name}", marks=self._marks(w, b)) for w, b in pairs]
        metafunc.parametrize(("workload", "_backend"), marks)

    def _marks(self, workload: Workload, backend: Backend) -> list[pytest.MarkDecorator]:
        return [pytest.mark.benchmark(group=workload.id, timer=self.clocks[backend.name])]

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [i for i in items if not i.get_closest_marker("quantcts") or hasattr(i, "callspec")]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Compile what is compiled, on all cores; meanwhile the oracle answers for what takes it long."""
        if session.config.option.collectonly:
            return
        start = monotonic()
        claimed: dict[str, list[Workload]] = {name: [] for name in self.backends}
        for item in session.items:
            params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            workload, backend = params.get("workload"), cast(Any, params.get("_backend"))
            if isinstance(workload, Workload) and _says(backend, workload).claimed:
                claimed[backend.name].append(workload)
        self.ahead.begin(
            (w, contract_of(self.backends[name], w.case)) for name, own in claimed.items() for w in own
        )
        for name, backend in self.backends.items():
            prepare = getattr(backend, "prepare", None)
            cases = [w.case for w in claimed[name]] if prepare else []
            lines = prepare(cases, os.cpu_count() or 1) if prepare and cases else ()
            for number, line in enumerate(lines, 1):
                print(f"\rcompiling {name}: {number} kernels, {str(line)[:80]}", end="", file=sys.stderr)
        self.ahead.end()
        self.compiling = monotonic() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        start = monotonic()
        try:
            return (yield)
        finally:
            self.timing = monotonic() - start

    @pytest.fixture
    def subject(self, workload: Workload) -> Subject:
        return SUBJECTS[workload.case.operation](workload)

    @pytest.fixture
    def time(self, workload: Workload, _backend: Backend, benchmark: Any) -> Callable[[Subject], None]:
        def time(subject: Subject) -> None:
            said = _says(_backend, workload)
            if not said.claimed:
                self._left(workload, _backend, Untimed("declines", said.reason))
            print(f"\rtiming {workload.id}@{_backend.name}".ljust(100), end="", file=sys.stderr)
            self.ahead.hand(subject, contract_of(_backend, workload.case))
            found: Untimed | None = None
            try:
                self.stand.time(subject, _backend, benchmark, self.clocks[_backend.name])
                self.states["timed"] += 1
            except Untimed as untimed:
                found = untimed
            if found:
                self._left(workload, _backend, found)

        return time

    def _left(self, workload: Workload, backend: Backend, untimed: Untimed) -> None:
        """Account for a workload without a figure, and end its test."""
        self.states[untimed.state] += 1
        record = {"workload": workload.id, "backend": backend.name, "device": device_of(backend)}
        self.untimed.append({**record, "state": untimed.state, "reason": untimed.why})
        end = pytest.skip if untimed.state in HARMLESS else partial(pytest.fail, pytrace=False)
        end(f"{workload.id}: {untimed}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, config: pytest.Config, benchmarks: Any, output_json: Any) -> None:
        output_json["quantcts"] = self._about()
        compare(output_json["benchmarks"])

    def _about(self) -> dict[str, Any]:
        return {
            "environment": environment(self.backends.values(), self.absent),
            "limits": {device: limits.to_json() for device, limits in self.stand.limits.items()},
            "states": {state: self.states[state] for state in STATES},
            "untimed": self.untimed,
            "seconds": {"compiling": round(self.compiling, 1), "timing": round(self.timing, 1)},
        }

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.json and self.untimed and not self.json.exists():
            # pytest-benchmark writes nothing where nothing was timed.
            document = {"machine_info": {}, "benchmarks": [], "quantcts": self._about()}
            put(self.json, f"{json.dumps(document, indent=1)}\n".encode())
        code = ExitCode.AS_EXPECTED
        ours = self.states["wrong"] + self.states["crashes"] + self.states["invalid"]
        if exitstatus in BROKEN_DOWN or session.testsfailed > ours:
            code = ExitCode.ENVIRONMENT  # it did not come to its end, or the stand itself broke
        elif self.states["wrong"] or self.states["crashes"]:
            code = ExitCode.CONFORMANCE
        elif self.states["invalid"]:
            code = ExitCode.PERFORMANCE
        elif not self.states["timed"]:
            code = ExitCode.BAD_ARGUMENT
        session.config.stash[EXIT_CODE] = code
        session.exitstatus = code

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name, reason in self.absent.items():
            terminalreporter.write_line(f"absent: {name}: {reason}")
        account = " + ".join(f"{state} {self.states[state]}" for state in STATES if self.states[state])
        terminalreporter.write_line(f"asked {sum(self.states.values())} = {account or 'nothing'}")
        terminalreporter.write_line(f"compiled in {self.compiling:.1f} s, timed in {self.timing:.1f} s")


def _says(backend: Backend, workload: Workload) -> Support:
    names = {"linear": "load_linear", "moe": "load_moe"}
    needed = names.get(workload.case.operation, "quantize_activation")
    if not callable(getattr(backend, needed, None)):
        return Support.no(f"the backend has no {needed}")
    return backend.supports(workload.case)


def _backends(asked: list[str]) -> tuple[dict[str, Backend], dict[str, str]]:
    """Loaded here, by name, and why others are not there: a time is taken in the process that computes."""
    if not asked:
        raise RunError("--backend is missing: name what is to be timed")
    optional = set(cuda_backends()) if EVERY_CUDA in asked else set()
    found: dict[str, Backend] = {}
    absent: dict[str, str] = {}
    for spec in dict.fromkeys(n for s in asked for n in (cuda_backends() if s == EVERY_CUDA else [s])):
        try:
            backend = load_backend(spec)
        except EnvironmentMissing as error:
            if spec not in optional:
                raise
            absent[spec] = str(error)
            continue
        found[backend.name] = backend
    if not found:
        raise EnvironmentMissing("none of the CUDA backends is there: " + "; ".join(absent.values()))
    return found, absent


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quantcts(operation): times every workload of an operation")
    try:
        config.pluginmanager.register(Plugin(config), "quantcts-bench")
    except RunError as error:
        config.stash[EXIT_CODE] = error.exit_code
        pytest.exit(f"quantcts: {error}", returncode=error.exit_code)
