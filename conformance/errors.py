"""Errors of a run, each with the exit code it ends with (see exitcodes)."""

from __future__ import annotations

from conformance.exitcodes import ExitCode


class RunError(Exception):
    """A run that cannot go on: one line for the person who started it."""

    exit_code = ExitCode.BAD_ARGUMENT


class EnvironmentMissing(RunError):
    """Something the run needs is not installed or not there."""

    exit_code = ExitCode.ENVIRONMENT
