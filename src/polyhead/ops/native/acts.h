// Pointwise activations and their slopes; numbers in the order of RELATION_ACTS in spec/table.py.

#pragma once
#include "vec.h"

namespace polyhead {

enum Act { IDENTITY, RELU, SIGMOID, TANH, GELU, GELU_TANH, SILU };

inline Vec sigmoid(const Vec& x) { return splat(1) / (exp(splat(0) - x) + 1.0f); }

// Abramowitz and Stegun 7.1.26, as in PyTorch's own gelu on a CPU.
inline Vec erf(const Vec& x) {
  if (EXACT) return each_lane(x, [](number one) { return std::erf(one); });
  Vec size = larger(x, splat(0) - x), t = splat(1) / (size * 0.3275911f + 1.0f);
  Vec p = t * 1.061405429f + -1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t + -0.284496736f;
  p = p * t + 0.254829592f;
  Vec far = 1.0f - p * t * exp(splat(0) - size * size);
  return choose(x > 0.0f, far, splat(0) - far);
}

inline Vec tanh(const Vec& x) {
  if (EXACT) return each_lane(x, [](number one) { return std::tanh(one); });
  Vec size = larger(x, splat(0) - x), square = x * x;
  Vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  Vec far = 1.0f - splat(2) / (exp(size * 2.0f) + 1.0f);
  return choose(size > 0.625f, choose(x > 0.0f, far, splat(0) - far), p * square * x + x);
}

// act(z) and its slope, of one vector, for the activations that are used less often.
__attribute__((noinline)) inline Vec activate_one(int act, const Vec& z, Vec& slope) {
  switch (act) {
    case SIGMOID: {
      Vec y = sigmoid(z);
      slope = y * (1.0f - y);
      return y;
    }
    case TANH: {
      Vec y = tanh(z);
      slope = 1.0f - y * y;
      return y;
    }
    case GELU: {
      Vec below = (erf(z * number(0.70710678118654752)) + 1.0f) * 0.5f;
      slope = below + z * exp(z * z * -0.5f) * number(0.39894228040143268);
      return z * below;
    }
    case GELU_TANH: {  // (1 + tanh(u)) / 2 = sigmoid(2 u)
      Vec square = z * z, share = sigmoid(z * (square * number(0.044715) + 1.0f) * number(1.5957691216057308));
      slope = share + z * share * (1.0f - share) * (square * number(0.134145) + 1.0f) * number(1.5957691216057308);
      return z * share;
    }
    case SILU: {
      Vec share = sigmoid(z);
      slope = share * ((z * (1.0f - share)) + 1.0f);
      return z * share;
    }
    default:
      slope = splat(1);
      return z;
  }
}

// The same of R vectors; for the most frequent activations they stay in registers.
template <int R> POLYHEAD_INLINE void activate(int act, const Vec* z, Vec* y, Vec* slope) {
  if (act == RELU) {
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) {
      y[r] = positive(z[r]);
      slope[r] = choose(z[r] <= 0.0f, splat(0), splat(1));
    }
  } else if (act == IDENTITY) {
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) y[r] = z[r], slope[r] = splat(1);
  } else {
    Vec from[R], to[R], steep[R];
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) from[r] = z[r];
    for (int r = 0; r < R; r++) to[r] = activate_one(act, from[r], steep[r]);
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) y[r] = to[r], slope[r] = steep[r];
  }
}

}  // namespace polyhead
