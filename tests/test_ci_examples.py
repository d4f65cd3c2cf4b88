"""The examples for CI: whole YAML, sound shell, and no option that the command line does not have."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from _pytest.config import _prepareconfig
from conftest import ROOT

import conformance.cli
import conformance.suites

FOLDER = ROOT / "docs" / "ci"
GITHUB = yaml.load((FOLDER / "github.yml").read_text(), Loader=yaml.BaseLoader)
GITLAB = yaml.load((FOLDER / "gitlab.yml").read_text(), Loader=yaml.BaseLoader)
SESSIONS = re.findall(
    r'^@nox\.session(?:\(name="([\w-]+)")?.*\ndef (\w+)', (ROOT / "noxfile.py").read_text(), re.M
)
JUDGING = ("conformance", "conformance-cuda")
_KEYWORDS = {
    "stages", "workflow", "variables", "default", "include", "image", "services", "cache",
    "before_script", "after_script",
}  # fmt: skip


def github_scripts():
    return [step["run"] for job in GITHUB["jobs"].values() for step in job["steps"] if "run" in step]


def gitlab_jobs():
    return {name: job for name, job in GITLAB.items() if name not in _KEYWORDS}


def gitlab_scripts():
    return [
        line
        for job in gitlab_jobs().values()
        for part in ("script", "after_script")
        for line in job.get(part, [])
    ]


def commands(scripts):
    """The words of every quantcts and nox command in them."""
    found = []
    for script in scripts:
        for line in script.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:3] == ["python", "-m", "quantcts"]:
                words = words[2:]
            if words and words[0] in ("quantcts", "nox"):
                found.append(words)
    return found


def check(words):
    """Parse the words of a command as it does itself. Raises where it would refuse them."""
    if words[0] == "nox":
        options, _, arguments = " ".join(map(shlex.quote, words[1:])).partition(" -- ")
        before = [word for word in shlex.split(options) if word != "--no-venv"]
        assert before[0] == "-s"
        (session,) = before[1:]
        assert session in [name or function for name, function in SESSIONS], session
        if session in JUDGING:
            check(["quantcts", "run", *shlex.split(arguments)])
        return
    _, name, *arguments = words
    command = typer.main.get_command(conformance.cli.app).commands[name]
    command.make_context(name, list(arguments))
    if name == "run":
        ini = Path(conformance.suites.__file__).parent / "pytest.ini"
        fixed = ["-c", str(ini), "--rootdir", str(ROOT), "-p", "quantcts", "--pyargs", "conformance.suites"]
        config = _prepareconfig([*fixed, *arguments])
        config._ensure_unconfigure()


ALL = [*commands(github_scripts()), *commands(gitlab_scripts())]


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(words[:4]))
def test_every_command_is_one_of_the_command_line(words):
    check(words)


def test_the_examples_judge_and_gate():
    for scripts in (github_scripts(), gitlab_scripts()):
        own = [" ".join(words) for words in commands(scripts)]
        assert any(re.match(r"(quantcts run|nox .*conformance-cuda)", line) for line in own)
        assert any("quantcts gate --baseline" in line for line in own)
    assert any("--gate" in words for words in ALL)


@pytest.mark.parametrize(
    "line",
    [
        "quantcts run --backend x --no-such-option",
        "quantcts gate --baseline a --current b --max-slowness 2",
        "quantcts gate --baseline a",
        "quantcts no-such-command",
        "nox -s no-such-session",
        "nox -s conformance-cuda -- --gated base.json",
    ],
)
def test_the_check_sees_what_does_not_exist(line):
    (words,) = commands([line])
    with pytest.raises((Exception, SystemExit)):
        check(words)


@pytest.mark.parametrize("script", [*github_scripts(), *gitlab_scripts()])
def test_the_shell_is_sound(script):
    filled = re.sub(r"\$\{\{.*?\}\}", "x", script)
    done = subprocess.run(["bash", "-n"], input=filled, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_github_jobs_are_whole():
    assert set(GITHUB) <= {"name", "on", "permissions", "concurrency", "env", "jobs", "defaults"}
    assert set(GITHUB["on"]) == {"push", "pull_request"}
    for name, job in GITHUB["jobs"].items():
        assert set(job) <= {"needs", "if", "runs-on", "permissions", "timeout-minutes", "steps", "env"}, name
        assert job["runs-on"]
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(GITHUB["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert set(step) <= {"name", "uses", "run", "with", "if", "env", "id"}
            assert "with" not in step or "uses" in step
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
    texts = [
        text for text in (FOLDER / "github.yml").read_text().splitlines() if not text.lstrip().startswith("#")
    ]
    contexts = re.findall(r"\$\{\{\s*!?\s*(?:cancelled\(\) && )?(\w+)[.(]", "\n".join(texts))
    assert set(contexts) <= {"github", "runner", "hashFiles", "cancelled"}
    uploaded = {
        s["with"]["name"]
        for j in GITHUB["jobs"].values()
        for s in j["steps"]
        if "upload" in s.get("uses", "")
    }
    fetched = {
        s["with"]["name"]
        for j in GITHUB["jobs"].values()
        for s in j["steps"]
        if "download" in s.get("uses", "")
    }
    assert fetched <= uploaded


def test_gitlab_jobs_are_whole():
    jobs = gitlab_jobs()
    known = {
        "stage", "image", "tags", "timeout", "cache", "artifacts", "extends", "rules", "script", "after_script", "needs"
    }  # fmt: skip
    for name, job in jobs.items():
        assert set(job) <= known, name
        whole = {**jobs.get(job.get("extends", ""), {}), **job}
        assert "extends" not in job or job["extends"] in jobs
        assert whole["stage"] in GITLAB["stages"]
        assert set(job.get("needs", [])) <= set(jobs)
        if not name.startswith("."):
            assert whole["script"]
            assert all(isinstance(line, str) for line in whole["script"])
            assert whole["artifacts"]["paths"]
    # What fetches the baseline names the job that leaves it.
    assert "?job=judge-main" in " ".join(jobs["fetch-baseline"]["script"])
