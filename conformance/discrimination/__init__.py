"""Whether a case tells a mutant from the right answer, and by how much: what judges the judge."""

from conformance.discrimination.bench import OPERATIONS, bench, concerns
from conformance.discrimination.dense import CONTRACT
from conformance.discrimination.promises import ALWAYS, broken_promises, promises

__all__ = [
    "ALWAYS",
    "CONTRACT",
    "OPERATIONS",
    "bench",
    "broken_promises",
    "concerns",
    "promises",
]
