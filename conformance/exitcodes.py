"""The exit-code contract of every command and session."""

from enum import IntEnum


class ExitCode(IntEnum):
    AS_EXPECTED = 0
    CONFORMANCE = 1
    PERFORMANCE = 2
    BAD_ARGUMENT = 3  # also: nothing was judged
    ENVIRONMENT = 4
