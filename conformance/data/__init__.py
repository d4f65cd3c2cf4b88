"""Data recipes: from a case to its inputs, and to what the oracle expects of them.

| recipe     | activations                    | scales                 | judged                                   |
| ---------- | ------------------------------ | ---------------------- | ---------------------------------------- |
| identity   | one column a token             | powers of two          | exactly: reads the matrix element-wise   |
| scales     | one column a token             | full mantissas         | one rounding of (q - z) * s              |
| integers   | +-1, then wider integers       | powers of two          | exactly: any order of summation is exact |
| magnitudes | +-1 times 2^-90 to 2^90        | powers of two          | exactly: ranges and subnormals           |
| random     | normal                         | log-normal             | within the bound                         |
| trained    | some channels 30 times         | log-normal, wide       | within the bound                         |
| zero-scale | normal                         | log-normal, some are 0 | within the bound                         |
| golden     | normal, no code open           | log-normal             | within the bound                         |

Codes are uniform over the whole width and hold both extremes; zero points are uniform; neighbouring groups
and rows never share a zero point or a power-of-two scale. `trained` is what a trained model showed when it
was quantized (`nox -s real`): most codes near zero and the extremes rare, zero points in a narrow band with
rare extremes, scales that spread a hundredfold within a layer. Each recipe draws two batches, so that an
answer kept from the first call is seen. Seeds derive from the case id alone.

Where activations are quantized, the exact recipes have an anchor: one column whose weights are zero holds the
largest magnitude of each token, so that the token's scale is a power of two, by division and by reciprocal
alike; what is on the other columns lies a quarter of a step off the codes, or on a tie, so that a kernel which
does not quantize gives another result. The first batch is exact for scales of amax / 127, the second for
amax / 127.5 (fp8: both). Tokens have scales of their own in every recipe.
"""

from conformance.data.activations import QuantizationProblem, quantization_problem
from conformance.data.defects import codes_in_range, codes_out_of_range, defective_layer
from conformance.data.linear import LinearProblem, checkpoint_of, linear_problem
from conformance.data.moe import MoeProblem, moe_checkpoint_of, moe_problem
from conformance.data.seeds import generator, generators
from conformance.data.swiglu import SwigluProblem, swiglu_problem
from conformance.data.weights import packing_axis, packing_codes, quantized_weight

__all__ = [
    "LinearProblem",
    "MoeProblem",
    "QuantizationProblem",
    "SwigluProblem",
    "checkpoint_of",
    "codes_in_range",
    "codes_out_of_range",
    "defective_layer",
    "generator",
    "generators",
    "linear_problem",
    "moe_checkpoint_of",
    "moe_problem",
    "packing_axis",
    "packing_codes",
    "quantization_problem",
    "quantized_weight",
    "swiglu_problem",
]
