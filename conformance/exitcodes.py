"""The exit-code contract of every command and session."""

from enum import IntEnum


class ExitCode(IntEnum):
    AS_EXPECTED = 0
    CONFORMANCE = 1
    PERFORMANCE = 2
    BAD_ARGUMENT = 3  # also: nothing was judged
    ENVIRONMENT = 4


# Of several steps the worst counts. A step that could not look is worse than one that saw a fault: nobody knows what
# it would have seen. A wrong answer is worse than a slow one.
_WORST_FIRST = (
    ExitCode.ENVIRONMENT, ExitCode.BAD_ARGUMENT, ExitCode.CONFORMANCE, ExitCode.PERFORMANCE, ExitCode.AS_EXPECTED
)  # fmt: skip


def worst(*codes: ExitCode) -> ExitCode:
    """The worst of some exit codes: 4, 3, 1, 2, 0 in this order."""
    return min(codes, key=_WORST_FIRST.index)
