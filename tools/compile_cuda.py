"""Compile every kernel source and every mutant with nvcc, for each architecture that is supported; no GPU is needed.

    python tools/compile_cuda.py [--jobs N] [NAME ...]

NAME: a source (`linear.cu`) or a mutant (`zero_point_plus_one`); all of both by default. A line each; exit code 1 and
nvcc's message where one does not compile, 3 for an unknown name, 4 where there is no nvcc.

Sources are compiled for each architecture from the start. Of a mutant only the source that it is in, and, where that
has no code of its own for an architecture, all of them from one intermediate form: what differs is a line or two.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuda_kernels.mutants import MUTANTS
from cuda_kernels.sources import library

ARCHITECTURES = ("80", "90", "100", "120")
_OF_ONE_ARCHITECTURE = re.compile(r"__CUDA_ARCH__ *[<>=]")


@dataclass(frozen=True)
class Job:
    name: str
    source: str
    macro: str = ""

    def command(self, nvcc: str, output: Path) -> list[str]:
        path = library().root / self.source
        targets = [f"arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
        if self.macro and not _OF_ONE_ARCHITECTURE.search(path.read_text("utf-8")):
            codes = ",".join(f"sm_{a}" for a in ARCHITECTURES)
            targets = [f"arch=compute_{ARCHITECTURES[0]},code=[{codes}]"]
        options = [word for target in targets for word in ("-gencode", target)]
        if self.macro:
            options += ["-Ofc", "max", f"-D{self.macro}"]
        always = ["-std=c++17", "-Werror", "all-warnings", "-fatbin", "-o", str(output)]
        return [nvcc, *always, *options, str(path)]


def jobs() -> list[Job]:
    """The sources, the slowest first, then the mutants."""
    sources = [*library().names, "crashes.cu"]
    sources.sort(key=lambda name: (name != "linear_gemv.cu", name))
    return [Job(s, s) for s in sources] + [Job(m.name, m.source, m.macro) for m in MUTANTS.values()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("nvcc is not installed: the CUDA toolkit has it", file=sys.stderr)
        return 4
    wanted = [job for job in jobs() if not given.names or job.name in given.names]
    unknown = set(given.names) - {job.name for job in wanted}
    if unknown or not wanted:
        print(f"no source and no mutant: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 3
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        done = [
            pool.submit(_compile, job, nvcc, Path(folder) / f"{i}.fatbin") for i, job in enumerate(wanted)
        ]
        failed = [not future.result() for future in done]
    print(f"{len(wanted)} compiled, {sum(failed)} failed, in {time.perf_counter() - start:.0f} s")
    return int(any(failed))


def _compile(job: Job, nvcc: str, output: Path) -> bool:
    start = time.perf_counter()
    done = subprocess.run(job.command(nvcc, output), capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    name = f"{job.name} ({job.source})" if job.macro else job.name
    print(
        f"{'FAILED' if done.returncode else 'ok    '} {name} {time.perf_counter() - start:.1f} s", flush=True
    )
    if done.returncode:
        print(said, flush=True)
    output.unlink(missing_ok=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
