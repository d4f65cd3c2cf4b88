"""The two ways an input can be wrong. Each message names the field, what was found and the remedy."""


class QuantizationError(ValueError):
    """Base of every refusal of the oracle: one precise error, never a guess."""


class FormatError(QuantizationError):
    """A format or a configuration that has no meaning (bits, group size, strategy, layout name)."""


class TensorError(QuantizationError):
    """A tensor that does not hold what its format says (shape, dtype, codes, scales, word count)."""
