"""A backend whose layers are compiled at their first launch, as far as `warm` can tell."""

from conformance.backend import Support


class Warmed:
    """It takes up to 4 bits, and its compiler breaks down at 3."""

    device = "cpu"
    libraries = ("torch",)

    def supports(self, case):
        return Support.yes() if case.weight.bits <= 4 else Support.no("too many bits")

    def linear(self, weight, args, dtype):
        if weight.bits == 3:
            raise RuntimeError("the compiler broke down")
        return lambda x: x @ weight.codes.to(dtype).T


def backend():
    return Warmed()
