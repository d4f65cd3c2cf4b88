"""The pytest plugin: options, parametrization over cases and backends, the ledger, the report.

It is registered only for runs that name conformance.suites (see quantcts.py); it has no effect on others.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.backend import Backend
from conformance.cases import Case, all_cases
from conformance.cases.conduct import SLOW
from conformance.errors import RunError
from conformance.exitcodes import ExitCode, worst
from conformance.gate.decision import decide, read_baseline
from conformance.gate.shown import text_of
from conformance.interrupts import BROKEN_DOWN
from conformance.isolation.remote import RemoteBackend, RemoteSubject
from conformance.judge import Judge
from conformance.ledger import Ledger
from conformance.order import in_turns, mixed, spread
from conformance.query import offered, part, select
from conformance.replay.kept import DEFAULT_LIMIT as DEFAULT_BUNDLES
from conformance.replay.kept import DEFAULT_SECONDS, Keeping, clear, default_folder
from conformance.report.document import ANSWERS, WAITING, Report, environment, is_device, place_to_write, put
from conformance.report.journal import Begun, part_of, read_journal
from conformance.report.markdown import report_markdown
from conformance.report.page import report_page
from conformance.report.progress import Progress, compile_first
from conformance.report.terminal import print_report
from conformance.roster import Roster
from conformance.sources import Computed, Source
from conformance.subject import Subject
from conformance.vectors.document import open_set
from conformance.vectors.stored import Stored
from conformance.verdict import Outcome, Verdict
from conformance.waivers import read_waivers

DEFAULT_BACKEND = "compressed_tensors"
LIMIT = 60.0
_SUITES = "conformance.suites"
_OUTPUTS = ("--report", "--report-html", "--report-markdown")
_HOME = Path(__file__).resolve().parent / "suites"
EXIT_CODE = pytest.StashKey[ExitCode]()
_JUDGE = pytest.StashKey[Judge]()


def judges(operation: str) -> Callable[[Any], Any]:
    """Mark a test as judging every case of an operation. It takes `case`, `subject` and `judge`."""
    return pytest.mark.quantcts(operation)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("quantcts", "QuantCTS: conformance of quantized kernels")
    group.addoption(
        "--backend", action="append", metavar="NAME",
        help="backend to judge: a name, module:attribute or file.py:attribute; may be repeated "
        f"(default: {DEFAULT_BACKEND})",
    )  # fmt: skip
    size = group.addoption
    size("--quick", action="store_true", help="judge the quick set: every cell at least once")
    size("--full", action="store_true", help="judge every case (the default)")
    size("--cases", action="append", metavar="QUERY", help="judge the cases that the query selects")
    size("--waivers", metavar="FILE", help="known faults, with reason, link and expiry date (TOML)")
    size("--report", metavar="FILE", help="write report.json there; compressed where the name ends in .gz")
    size("--report-html", metavar="FILE", help="write a page of the report there that works offline")
    size("--report-markdown", metavar="FILE", help="write what fits a comment on a pull request there")
    size("--shard", metavar="I/N", help="judge the I-th of N equal parts of the cases (1 to N)")
    size("--isolate", action="store_true", help="a process of its own for each backend, as GPU backends have")
    size(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help="for one question to an isolated backend",
    )
    size("--vectors", metavar="DIR", help="judge from the golden vectors in DIR instead of the oracle")
    size(
        "--gate", metavar="FILE", help="compare with this report.json when all is judged: see `quantcts gate`"
    )
    size(
        "--subset",
        action="store_true",
        help="with --gate: what is judged is a part of the baseline, on purpose",
    )
    size(
        "--resume",
        action="store_true",
        help="go on with the run of the same --report that was cut off: judge what it has not judged",
    )
    size("--bundles", metavar="DIR", help="leave a bundle of failing cases there (default: beside --report)")
    size(
        "--bundle-limit",
        type=int,
        default=DEFAULT_BUNDLES,
        metavar="N",
        help="bundles of one finding; 0 for none",
    )
    size(
        "--shrink",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help="to look for smaller cases that fail alike, when all is judged; 0 to look for none",
    )
    size("--no-kernels", action="store_true", help="do not record which GPU kernels ran")


class Plugin:
    """Shared state of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        if config.option.quick and config.option.full:
            raise RunError("--quick and --full exclude each other")
        if config.option.subset and not config.option.gate:
            raise RunError("--subset says how to compare with a baseline; give --gate as well")
        _check_places(config)
        if not 0 < config.option.limit < float("inf"):
            raise RunError(f"--limit {config.option.limit}: give a number of seconds above 0")
        worker = getattr(config, "workerinput", None)
        self.vectors = _vectors(config.option.vectors, worker)
        self.source: Source = self.vectors or Computed()
        if self.vectors:
            cases = {i: c for i, c in self.vectors.cases.items() if c.quick or not config.option.quick}
        else:
            cases = offered(all_cases(), config.option.quick, config.option.cases or [])
        chosen = part(select(cases, config.option.cases or []), config.option.shard)
        self.cases: dict[str, list[Case]] = {}
        for case_id in chosen:
            self.cases.setdefault(cases[case_id].operation, []).append(cases[case_id])
        option = config.option
        self.begun = _begun(option, worker)
        self.done = self.begun.done if self.begun else set()
        if worker is not None:
            number = int(worker["workerid"].removeprefix("gw"))
            self.roster = Roster.in_worker(worker["quantcts"], number, option.limit)
        else:
            asked = option.backend or [DEFAULT_BACKEND]
            aside = "conduct" in self.cases and not option.keyword
            self.roster = Roster.of(asked, option.isolate, option.limit, not option.no_kernels, aside)
        self.backends = self.roster.backends
        self.keeping = _keeping(option, self.roster.specs)
        self.bundling = 0.0
        self.keyword = bool(option.keyword)
        self.unheld = self._without_expectation()

    @pytest.hookimpl
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marker = metafunc.definition.get_closest_marker("quantcts")
        if marker is None:
            return
        operation = marker.args[0]
        metafunc.parametrize(("case", "_backend"), self._pairs(operation), ids=self.ids(operation))

    def _pairs(self, operation: str) -> list[tuple[Case, Backend]]:
        pairs = in_turns(self.cases.get(operation, []), list(self.backends.values()))
        left_out = self.unheld | self.done
        return [(c, b) for c, b in pairs if not self._answered(c, b) and (c.id, b.name) not in left_out]

    def _without_expectation(self) -> set[tuple[str, str]]:
        """Case and backend where the vector has no expectation under what the backend promises."""
        if self.vectors is None:
            return set()
        return {
            (case.id, backend.name)
            for cases in self.cases.values()
            for case in cases
            for backend in self.backends.values()
            if not self._answered(case, backend) and not self.vectors.holds(case, backend)
        }

    def _answered(self, case: Case, backend: Backend) -> bool:
        """Whether an isolated backend has nothing that could be asked: with many backends that is most of the matrix,
        and no worker has to hear of it. With -k, which selects tests, it is a test like others."""
        return isinstance(backend, RemoteBackend) and not self.keyword and backend.lacks(case) is not None

    def declined(self) -> list[Verdict]:
        """The verdicts of the cases that need an operation which the backend does not have."""
        return [
            Verdict(c.id, b.name, Outcome.DECLINES, f"the backend has no {b.lacks(c)}")
            for cases in self.cases.values()
            for c in cases
            for b in self.backends.values()
            if isinstance(b, RemoteBackend) and self._answered(c, b) and (c.id, b.name) not in self.done
        ]

    def ids(self, operation: str) -> list[str]:
        """The ids of an operation's cases, with the backend's name where there are several."""
        several = len(self.backends) > 1
        return [f"{c.id}@{b.name}" if several else c.id for c, b in self._pairs(operation)]

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop what pytest puts in the place of an operation without a selected case. Mix the cases where hosts answer:
        the operation that one host is slow at would make all judges wait for it, and the others for all. And lay what
        takes seconds evenly among the others: one case of all backends would keep one worker for minutes."""
        kept = [i for i in items if not i.get_closest_marker("quantcts") or _case_of(i)]
        conduct = ((i, c) for i in kept if (c := _case_of(i)) and c.operation == "conduct")
        slow = dict.fromkeys(i for i, c in conduct if c.recipe in SLOW)
        others = [i for i in kept if i not in slow]
        if len(self.roster.places) > 1:
            others = mixed(others, _case_of)
        items[:] = spread(list(slow), others)

    @pytest.fixture(name="source")
    def _source(self) -> Source:
        return self.source

    @pytest.fixture
    def subject(self, case: Case, _backend: Backend) -> Subject:
        kind = RemoteSubject if isinstance(_backend, RemoteBackend) else Subject
        return kind(_backend, case, self.roster.specs[_backend.name])

    @pytest.fixture
    def judge(self, subject: Subject, request: pytest.FixtureRequest) -> Judge:
        def fail(verdict: Verdict) -> None:
            pytest.fail(f"{verdict.outcome}: {verdict.case}: {verdict.detail}", pytrace=False)

        judge = request.node.stash[_JUDGE] = Judge(subject, fail)
        return judge

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Carry the verdict with the report, to the process that keeps the ledger."""
        report = yield
        judge = item.stash.get(_JUDGE, None)
        verdict = judge.verdict if judge is not None else None
        # A case that broke off after a good first step has no verdict: it is accounted for as a failure.
        if report.when == "call" and verdict is not None and (report.passed or verdict.fails):
            report.quantcts = verdict.to_json()
            if judge is not None and verdict.fails and self.keeping:
                start = time.monotonic()
                report.unkept = self.keeping.keep(judge)
                self.bundling += time.monotonic() - start
        return report

    def spent(self) -> dict[str, float]:
        """What this judge of isolated backends did, in seconds."""
        remote = [b for b in self.backends.values() if isinstance(b, RemoteBackend)]
        if not remote:
            return {}
        hosts = {b.aside: f"{b.name} (conduct)" for b in remote} | {b: b.name for b in remote}
        return {
            "judges": 1,
            "bundles": self.bundling,
            "transfers": sum(host.moving for host in hosts),
            **{f"{WAITING} {name}": host.waiting for host, name in hosts.items()},
            **{f"{ANSWERS} {name}": host.asking for host, name in hosts.items()},
        }

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["quantcts"] = self.spent()


class Keeper:
    """Keeps the ledger, in the one process that sees every report: pytest itself, or xdist's controller."""

    def __init__(self, config: pytest.Config, plugin: Plugin) -> None:
        self.config = config
        self.roster, self.backends = plugin.roster, plugin.backends
        self.cases = [case for cases in plugin.cases.values() for case in cases]
        self.declined = plugin.declined()
        self.selected = [i for operation in plugin.cases for i in plugin.ids(operation)]
        self.ledger = Ledger()
        self.started = time.monotonic()
        path = config.option.waivers
        self.waivers = read_waivers(Path(path), all_cases(), plugin.backends) if path else []
        found = environment(plugin.backends.values(), plugin.roster.absent)
        self.vectors, self.unheld = plugin.vectors, plugin.unheld
        chosen = selection(config)
        if self.vectors:
            counts = Counter(name for _, name in self.unheld)
            chosen["vectors"] = {
                "version": self.vectors.set.version,
                "sha256": self.vectors.set.digest,
                "without_expectation": {name: counts[name] for name in self.backends if counts[name]},
            }
        self.begun = plugin.begun
        self.report = Report(found, chosen, sys.argv, plugin.roster.specs)
        self.progress: Progress | None = None
        self.pages = {
            place_to_write(option, given): page
            for option, page in (("--report-html", report_page), ("--report-markdown", report_markdown))
            if (given := config.getoption(option))
        }
        # Read before the report takes its place: both may be one file.
        path = config.option.gate
        self.baseline = read_baseline(Path(path)) if path else None
        self.gate = ""
        self.keeping = plugin.keeping
        self.kept: list[str] = []  # of bundles, for a person
        self.plugin, self.spent = plugin, Counter[str]()
        path, option = config.option.report, config.option
        asked = {"limit": option.limit, "isolate": option.isolate, "kernels": not option.no_kernels}
        self.journal = self.report.open(path, self.begun, asked) if path else None
        if self.keeping and not self.begun:
            clear(self.keeping.folder)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Compile before anything is judged, on all cores, while workers collect; with -k as the cases come."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        write = reporter.write if reporter else lambda text: None
        for name, reason in self.roster.absent.items():
            write(f"absent: {name}: {reason}\n")
        if self.roster.places:
            write(
                f"loaded {len(self.roster.places)} in processes of their own, {self.roster.loading:.0f} s\n"
            )
        if self.vectors:
            write(f"{self.vectors.summary(len(self.cases))}\n")
            for name, count in Counter(name for _, name in self.unheld).items():
                write(
                    f"{count} of them hold no expectation under what {name} promises and are not judged: "
                    "`quantcts run` without --vectors judges those cases\n"
                )
        if self.begun:
            write(f"{len(self.begun.verdicts)} verdicts of {self.begun.path} stand\n")
            for verdict in self.begun.verdicts:
                self._stands(verdict)
        for verdict in self.declined:
            self.ledger.plan([key := f"{verdict.case}@{verdict.backend}"])
            self._enter(key, verdict)
        remote = [
            b for b in self.backends.values() if isinstance(b, RemoteBackend) and b.description.prepares
        ]
        if remote and self.config.option.keyword:
            write("with -k nothing is compiled beforehand, with --cases it is\n")
        elif remote:
            try:
                compile_first(remote, self.cases, write)
            except BaseException:
                self.roster.close()
                raise
        self.started = time.monotonic()
        self.progress = Progress(write, len(self.ledger.verdicts))
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["quantcts"] = self.roster.to_json()
        node.workerinput["begun"] = self.begun.length if self.begun else 0
        node.workerinput["vectors"] = self.vectors.set.digest if self.vectors else ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not _distributes(self.config):
            self.ledger.plan(item.nodeid for item in session.items if item.get_closest_marker("quantcts"))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended, by itself or not."""
        self.spent.update(getattr(node, "workeroutput", {}).get("quantcts", {}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.ledger.plan(ids)

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No dots: the progress line and the matrix say it all."""
        record = getattr(report, "quantcts", None)
        if record is None:
            return ("", "", "") if report.passed and report.when != "call" else None
        return record["outcome"], "", ""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        record = getattr(report, "quantcts", None)
        if record is not None:
            self._enter(report.nodeid, Verdict.from_json(record))
            self.kept += [report.unkept] if getattr(report, "unkept", "") else []
        elif report.skipped:
            self.ledger.faults.append(f"{report.nodeid}: skipped, and no verdict says why")
        elif report.failed and report.nodeid in self.ledger.planned:
            self._failed_without_verdict(report)
        elif report.failed:
            self.ledger.faults.append(f"{report.nodeid}: {_last_line(report)}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.ledger.faults.append(f"{report.nodeid}: {_last_line(report)}")

    def _failed_without_verdict(self, report: Any) -> None:
        """The worker died (xdist reports it for the case), or the suite itself raised."""
        case_id = report.nodeid.partition("[")[2].rstrip("]")
        case_id, _, name = case_id.partition("@")
        name = name or next(iter(self.backends))
        if case_id not in all_cases():
            self.ledger.faults.append(f"{report.nodeid}: {_last_line(report)}")
            return
        verdict = Verdict(case_id, name, Outcome.CRASHES, _last_line(report))
        if self.keeping:
            self.kept += filter(None, [self.keeping.keep_lost(verdict, self.backends[name])])
        self._enter(report.nodeid, verdict)

    def _enter(self, key: str, verdict: Verdict) -> None:
        self.report.wall = time.monotonic() - self.started
        if self.journal:
            self.journal.write(verdict)
        self.ledger.enter(key, self._waived(verdict))
        if self.progress:
            self.progress.show(self.ledger)

    def _stands(self, verdict: Verdict) -> None:
        """A verdict of the run that goes on."""
        self.ledger.plan([key := f"{verdict.case}@{verdict.backend}"])
        self.ledger.enter(key, self._waived(verdict))

    def _waived(self, verdict: Verdict) -> Verdict:
        waiver = next((w for w in self.waivers if w.covers(verdict)), None)
        if waiver is None:
            return verdict
        if verdict.fails:
            return waiver.waive(verdict)
        self.ledger.faults.append(f"{verdict.backend} {verdict.case}: {waiver.outlived_by(verdict)}")
        return verdict

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._compare_with_selection()
        if exitstatus in BROKEN_DOWN:
            on = "; with --resume it goes on" if self.journal else ""
            self.ledger.faults.append(f"the run was interrupted or broke down{on}")
            code = ExitCode.ENVIRONMENT
        else:
            code = self.ledger.exit_code
        self.report.judging = dict(self.spent) or ({} if _distributes(self.config) else self.plugin.spent())
        self.report.finish(self.ledger, code)
        code = worst(code, self._gated())
        session.exitstatus = code
        session.config.stash[EXIT_CODE] = code
        document = self.report.document() if self.pages else {}
        for path, page in self.pages.items():
            put(path, page(document).encode())
        if self.journal:
            whole = exitstatus not in BROKEN_DOWN and self.ledger.planned <= self.ledger.verdicts.keys()
            self.journal.close(served=whole)
        if self.keeping and exitstatus not in BROKEN_DOWN:
            verdicts = list(self.ledger.verdicts.values())
            try:
                self.kept += self.keeping.finish(verdicts, self.roster.places, self.config.option.shrink)
            except Exception as error:  # the verdicts stand
                self.kept.append(f"bundles: {type(error).__name__}: {error}")
            except KeyboardInterrupt:  # whoever still waits for a host waits no longer
                self.roster.close()
                raise
        self.roster.close()

    def _gated(self) -> ExitCode:
        """The gate's exit code, and in self.gate what it says."""
        if self.baseline is None or not self.ledger.judged:
            return ExitCode.AS_EXPECTED
        try:
            decision = decide(self.baseline, self.report.document(), subset=self.config.option.subset)
        except RunError as error:
            self.gate = f"gate: {error}  exit code {int(error.exit_code)}"
            return error.exit_code
        self.gate = text_of(decision)
        return decision.exit_code

    def _compare_with_selection(self) -> None:
        """What pytest collected must be what was selected, or an option took cases away in silence."""
        option = self.config.option
        whole = _SUITES in self.config.args or any(Path(a).resolve() == _HOME for a in self.config.args)
        if option.keyword or option.markexpr or not whole:
            return
        collected = {key.partition("[")[2].removesuffix("]") for key in self.ledger.planned}
        missing = [i for i in self.selected if i not in collected]
        if missing:
            self.ledger.faults.append(
                f"{missing[0]} and {len(missing) - 1} more: selected, but pytest was told to leave them out"
            )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.progress:
            self.progress.close()
        print_report(self.report, terminalreporter._tw._file)
        for line in self.kept:
            terminalreporter.write_line(line)
        if self.gate:
            terminalreporter.write_line(self.gate)


def _case_of(item: pytest.Item) -> Case | None:
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return case if isinstance(case, Case) else None


def _check_places(config: pytest.Config) -> None:
    """Raises RunError for an option that names no file, as a variable of CI that is not set makes it, and for two
    outputs of the same name."""
    for name in ("--gate", "--waivers", "--bundles", "--vectors", *_OUTPUTS):
        if config.getoption(name) == "":
            raise RunError(f"{name}: the name is empty; name a file, or leave the option out")
    report = config.option.report
    if report and is_device(Path(report)):
        raise RunError(f"--report {report}: a report is written beside its journal; name a file")
    given = {name: Path(place) for name in _OUTPUTS if (place := config.getoption(name))}
    places: dict[Path, str] = {}
    for name, place in given.items():
        other = places.setdefault(place.resolve(), name)
        if other != name and not is_device(place):
            raise RunError(f"{name} {config.getoption(name)}: {other} is written there; name another file")


def _keeping(option: Any, specs: Mapping[str, str]) -> Keeping | None:
    """What keeps bundles of failing cases, None where there is no place for them or none are wanted."""
    if option.bundle_limit < 0 or not 0 <= option.shrink < float("inf"):
        raise RunError("--bundle-limit and --shrink take numbers from 0")
    if option.vectors and option.bundles:
        raise RunError("--bundles: a vector can be asked again by itself, with --vectors and --cases")
    if option.bundle_limit == 0 or option.vectors or not (option.bundles or option.report):
        return None
    folder = Path(option.bundles) if option.bundles else default_folder(option.report)
    return Keeping(folder, option.bundle_limit, specs)


def _begun(option: Any, worker: Mapping[str, Any] | None) -> Begun | None:
    """The run that goes on. A worker reads what the controller has read, which writes behind it."""
    if not option.resume:
        return None
    if not option.report:
        raise RunError("--resume: name the --report of the run that was cut off")
    if option.gate and Path(option.gate).resolve() == Path(option.report).resolve():
        raise RunError(
            "--gate: the run that was cut off has taken the place of this baseline; name another file"
        )
    length = int(worker["begun"]) if worker is not None else None
    return read_journal(part_of(Path(option.report)), length)


def selection(config: pytest.Config) -> dict[str, Any]:
    """What was asked for, as the report states it."""
    return {
        "set": "quick" if config.option.quick else "full",
        "shard": config.option.shard or "1/1",
        "queries": config.option.cases or [],
        "keyword": config.option.keyword,
    }


def _vectors(folder: str | None, worker: Mapping[str, Any] | None) -> Stored | None:
    """The vectors to judge from. A worker reads those that the run began with, or none."""
    if folder is None:
        return None
    checked = str(worker["vectors"]) if worker is not None else ""
    found = open_set(Path(folder), checked)
    if checked and found.digest != checked:
        raise RunError(f"{folder}: the manifest changed while the run went on; start again")
    return Stored(found)


def configure(config: pytest.Config) -> None:
    """Register the plugin, or end the run with one clear line."""
    config.addinivalue_line("markers", "quantcts(operation): judges every case of an operation")
    worker = hasattr(config, "workerinput")
    if hasattr(config.option, "maxworkerrestart") and config.option.maxworkerrestart is None:
        config.option.maxworkerrestart = str(2 * len(all_cases()))  # one a crash, but not for ever
    if _distributes(config):
        _one_thread()
    try:
        plugin = Plugin(config)
        config.add_cleanup(plugin.roster.close)
        config.pluginmanager.register(plugin, "quantcts-plugin")
        if not worker:
            config.pluginmanager.register(Keeper(config, plugin), "quantcts-keeper")
    except RunError as error:
        config.stash[EXIT_CODE] = error.exit_code
        pytest.exit(f"quantcts: {error}", returncode=error.exit_code)


def _distributes(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "dist", "no") != "no" and getattr(config.option, "tx", None))


def _one_thread() -> None:
    """Workers share the cores: each keeps to one thread, as far as libraries read it from the environment."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def _last_line(report: Any) -> str:
    text = str(report.longrepr).strip().splitlines()
    return text[-1].strip() if text else "failed without a message"
