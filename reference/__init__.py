"""The oracle of QuantCTS: what a quantized checkpoint means, in NumPy.

NumPy and ml_dtypes only: no torch, no pytest, no I/O. Every formula is a clause of
docs/specification.md; the docstrings cite the clause (C1, C2, ...).
"""

SPECIFICATION_VERSION = "1.0"  # of docs/specification.md: another number where a clause means something else
