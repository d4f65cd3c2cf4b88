"""Where a suite takes what it asks and what answers are held against: the oracle, or stored vectors."""

from conformance.sources.asked import Source
from conformance.sources.computed import Computed

__all__ = ["Computed", "Source"]
