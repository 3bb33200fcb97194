// GELU in its tanh form, with 1 + tanh(u / 2) = 2 e / (1 + e) for e = exp(u), which keeps small results exact:
//
//   out = x s,   s = e r,   r = 1 / (1 + e),   u = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//   dx = dout (s + x s r du/dx)
//
// Hendrycks and Gimpel 2016.

#include "parallel.h"

using namespace polyhead;

extern "C" struct GeluCall {
  int64_t n;
  const number *x, *dout;  // no dout: forward
  number* out;
  Pool pool;
  int64_t threads;
};

namespace {

constexpr int64_t CHUNK = 1 << 14;  // numbers of a job
constexpr number ONCE = number(1.5957691216057308), CUBED = number(0.044715 * 1.5957691216057308);
constexpr number FAR = 60;  // of u: from here on s is 1, and r is still a normal number

POLYHEAD_INLINE Vec forward(const Vec& x) {
  Vec u = x * (x * x * CUBED + ONCE), e = exp(choose(u > FAR, splat(FAR), u));
  return x * (e / (e + 1.0f));
}

POLYHEAD_INLINE Vec backward(const Vec& x, const Vec& dout) {
  Vec square = x * x, u = x * (square * CUBED + ONCE), e = exp(choose(u > FAR, splat(FAR), u));
  Vec r = splat(1) / (e + 1.0f), s = e * r;
  return dout * choose(u > FAR, splat(1), s + x * s * r * (square * (3 * CUBED) + ONCE));
}

// Numbers `at` to `end`; behind the last whole vector by copies with zeros.
void compute(const GeluCall& c, int64_t at, int64_t end) {
  for (; at + LANES <= end; at += LANES) {
    Vec x = load(c.x + at);
    store(c.out + at, c.dout == nullptr ? forward(x) : backward(x, load(c.dout + at)));
  }
  if (at == end) return;
  number x[LANES] = {}, dout[LANES] = {}, out[LANES];
  std::copy(c.x + at, c.x + end, x);
  if (c.dout != nullptr) std::copy(c.dout + at, c.dout + end, dout);
  store(out, c.dout == nullptr ? forward(load(x)) : backward(load(x), load(dout)));
  std::copy(out, out + (end - at), c.out + at);
}

}  // namespace

// 0, or 1 if there was no memory.
extern "C" int polyhead_gelu(const GeluCall* call) {
  const GeluCall& c = *call;
  bool done = each({c.pool, c.threads}, (c.n + CHUNK - 1) / CHUNK, 0, [&](int64_t job, Memory&) {
    compute(c, job * CHUNK, std::min(c.n, (job + 1) * CHUNK));
  });
  return done ? 0 : 1;
}
