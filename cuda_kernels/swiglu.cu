// Gated activations: h = phi(gate) * (up + beta), computed in float32 and rounded once (C80 to C84).
#include "numbers.cuh"

#define SILU 0
#define GELU 1
#define GELU_TANH 2

#define GATE_UP 0
#define UP_GATE 1
#define INTERLEAVED 2

// g * sigmoid(alpha * g); g/2 * (1 + erf(g / sqrt 2)); g/2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))).
QCTS_INLINE float phi(float g, int kind, float alpha) {
#ifdef QCTS_ALPHA_DROPPED
  alpha = 1.0f;
#endif
  if (kind == SILU) return g / (1.0f + expf(-alpha * g));
#ifdef QCTS_GELU_AS_TANH
  if (kind == GELU) kind = GELU_TANH;
#endif
  if (kind == GELU) return 0.5f * g * (1.0f + erff(0.70710678f * g));
  return 0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g)));
}

QCTS_INLINE float at_most(float value, float limit) { return value > limit ? limit : value; }
QCTS_INLINE float at_least(float value, float limit) { return value < limit ? limit : value; }

// One thread an element of h (M, I). x: (M, 2I). limit: infinite where there is none. clamp_after: whether the limit cuts
// phi's value instead of its argument.
extern "C" __global__ void swiglu(const u16* __restrict__ x, u16* __restrict__ h, int dtype, long long rows,
                                  long long units, int kind, float alpha, float beta, float limit, int clamp_after,
                                  int arrangement) {
  long long t = thread_number();
  if (t >= rows * units) return;
  long long row = t / units, unit = t % units;
#ifdef QCTS_INTERLEAVED_READ_AS_HALVES
  if (arrangement == INTERLEAVED) arrangement = GATE_UP;
#endif
#ifdef QCTS_GATE_AND_UP_SWAPPED
  if (arrangement != INTERLEAVED) arrangement = arrangement == GATE_UP ? UP_GATE : GATE_UP;
#endif
  const u16* pair = x + row * 2 * units;
  u16 first = arrangement == INTERLEAVED ? pair[2 * unit] : pair[unit];
  u16 second = arrangement == INTERLEAVED ? pair[2 * unit + 1] : pair[units + unit];
  float gate = to_float(arrangement == UP_GATE ? second : first, dtype);
  float up = to_float(arrangement == UP_GATE ? first : second, dtype);

#ifdef QCTS_LIMIT_DROPPED
  limit = float_of(0x7f800000);
#endif
#ifdef QCTS_BETA_DROPPED
  beta = 0.0f;
#endif
#ifdef QCTS_CLAMP_AFTER_IGNORED
  clamp_after = 0;
#endif
  if (!clamp_after) gate = at_most(gate, limit);  // on that side alone (C83)
#ifdef QCTS_GATE_CLAMPED_ON_BOTH_SIDES
  if (!clamp_after) gate = at_least(gate, -limit);
#endif
  float least_up = -limit;
#ifdef QCTS_UP_CLAMPED_FROM_ABOVE_ALONE
  least_up = float_of(0xff800000);
#endif
  up = at_least(at_most(up, limit), least_up);
  float activated = phi(gate, kind, alpha);
  if (clamp_after) activated = at_most(activated, limit);
#ifdef QCTS_EVERY_STEP_OF_16_BITS
  // As model code computes it, operation by operation in the 16-bit dtype.
  float power = to_float(from_float(expf(-to_float(from_float(alpha * gate, dtype), dtype)), dtype), dtype);
  float sigmoid = to_float(from_float(1.0f / to_float(from_float(1.0f + power, dtype), dtype), dtype), dtype);
  if (kind == SILU && !clamp_after) activated = to_float(from_float(gate * sigmoid, dtype), dtype);
#endif
  h[t] = from_float(activated * (up + beta), dtype);
}
