"""A library that hands what it does not do to plain torch and says nothing: its answers are right."""

from __future__ import annotations

from conformance.backends.torch_baseline import backend as plain


def handed_on():
    made = plain()
    made.name = "handed_on"
    made.kernels = "marlin|Marlin"
    return made
