"""One query language over case ids, for the command line, waivers, capabilities and shards.

    linear/w3-*            glob over the whole id; `*` and `?` cross slashes, `[...]` is a set
    linear/w{2,3}-*/bf16/* braces are alternatives
    linear/w3-g128-asym    without a wildcard: the id itself or everything below it
    !*/random-*            what it matches is taken away

Queries add up in order: the first that is not a `!` starts from nothing, a leading `!` from everything.
A query that matches nothing is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate

from conformance.cases import Case
from conformance.errors import RunError


def expand_braces(pattern: str) -> list[str]:
    """`w{2,3}-*` -> [`w2-*`, `w3-*`]. Raises RunError for a brace without a partner."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        if "{" in pattern or "}" in pattern:
            raise RunError(f"query {pattern!r}: a brace has no partner")
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    finals = (final for part in match[1].split(",") for final in expand_braces(head + part + tail))
    return list(dict.fromkeys(finals))


def matcher(query: str) -> re.Pattern[str]:
    """The regular expression of one query, without its `!`."""
    parts = []
    for pattern in expand_braces(query.removeprefix("!")):
        wild = any(c in pattern for c in "*?[")
        parts.append(translate(pattern) if wild else re.escape(pattern.rstrip("/")) + r"(/.*)?\Z")
    return re.compile("|".join(f"(?:{part})" for part in parts))


def select(ids: Iterable[str], queries: Sequence[str]) -> list[str]:
    """The ids that the queries select, in the order of ids; all of them when there is no query.

    Raises RunError naming the first query that matches no id at all.
    """
    everything = list(ids)
    if not queries:
        return everything
    chosen = set(everything) if queries[0].startswith("!") else set()
    for query in queries:
        matches = matcher(query).match
        hits = {i for i in everything if matches(i)}
        if not hits:
            raise RunError(f"query {query!r} matches no case; `quantcts list` prints the ids")
        chosen = chosen - hits if query.startswith("!") else chosen | hits
    return [i for i in everything if i in chosen]


def offered(cases: Mapping[str, Case], quick: bool, queries: Sequence[str]) -> dict[str, Case]:
    """What queries choose from: all cases or the quick ones; those on request where the recipe's name is in a query."""
    named = [query for query in queries if not query.startswith("!")]
    return {
        case_id: case
        for case_id, case in cases.items()
        if (any(case.recipe in query for query in named) if case.on_request else case.quick or not quick)
    }


def part(chosen: list[str], shard: str | None) -> list[str]:
    """The I-th of N parts of the cases, every N-th of them. Raises RunError for anything but 1 <= I <= N."""
    if shard is None:
        return chosen
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise RunError(f"--shard {shard}: give I/N with I from 1 to N, such as 1/4")
    return chosen[int(found[1]) - 1 :: int(found[2])]
