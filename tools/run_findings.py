"""Run the scripts of docs/findings, each in a process of its own, and write down what they print.

    python tools/run_findings.py [--jobs N] [--limit SECONDS] [--report FILE] [NAME ...]

Each script shows one fault with the library alone; its library must be installed. Each prints lines of
`expected ... got ...`, for people to compare. Exit code 1 where a script ends with an error or prints no such line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "docs" / "findings"


def run(limit: float, script: Path) -> tuple[str, bool]:
    """What a script printed, and whether it came to its end and said what is expected and what it got."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, errors="replace",
            timeout=limit, env=environment, cwd="/",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{script.stem}: no end within {limit:.0f} seconds\n", False
    said = done.stdout.strip()
    seen = done.returncode == 0 and "expected" in said and "got" in said
    if not seen:
        said += f"\n{script.stem}: exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    return said.strip() + "\n", seen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each script")
    parser.add_argument("--report", type=Path, help="write what was printed there")
    parser.add_argument("names", nargs="*", help="scripts (default: all)")
    arguments = parser.parse_args()
    scripts = [SCRIPTS / f"{name}.py" for name in arguments.names] or sorted(SCRIPTS.glob("*.py"))
    missing = [script.stem for script in scripts if not script.is_file()]
    if missing:
        parser.error(f"docs/findings has no {', '.join(missing)}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(partial(run, arguments.limit), scripts))
    text = "".join(said for said, _ in results)
    print(text, end="")
    unseen = [script.stem for script, (_, seen) in zip(scripts, results, strict=True) if not seen]
    print(f"{len(scripts) - len(unseen)} of {len(scripts)} scripts ran; these did not: {unseen}")
    if arguments.report:
        arguments.report.write_text(text, "utf-8")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
