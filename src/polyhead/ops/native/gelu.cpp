// GELU in its tanh form, with 1 + tanh(u / 2) = 2 e / (1 + e) for e = exp(u), which keeps small results exact:
//
//   z = x + bias,   out = z s,   s = e r,   r = 1 / (1 + e),   u = 2 sqrt(2 / pi) (z + 0.044715 z^3)
//   dx = dout (s + z s r du/dz),   dbias = the sum of dx over rows
//
// Hendrycks and Gimpel 2016.

#include "parallel.h"

using namespace polyhead;

extern "C" struct GeluCall {
  int64_t n, width, rows;  // n numbers in rows of `width`; a job has `rows` rows
  const number *x, *bias, *dout;  // no bias: 0; no dout: forward
  number *out, *dbias;            // of each job, its part of dbias; null if that is not wanted
  Pool pool;
  int64_t threads;
};

namespace {

constexpr number ONCE = number(1.5957691216057308), CUBED = number(0.044715 * 1.5957691216057308);
constexpr number FAR = 60;  // of u: from here on s is 1, and r is still a normal number

POLYHEAD_INLINE Vec forward(const Vec& x) {
  Vec u = x * (x * x * CUBED + ONCE), e = exp(smaller(splat(FAR), u));
  return x * (e / (e + 1.0f));
}

POLYHEAD_INLINE Vec backward(const Vec& x, const Vec& dout) {
  Vec square = x * x, u = x * (square * CUBED + ONCE), e = exp(smaller(splat(FAR), u));
  Vec r = splat(1) / (e + 1.0f), s = e * r;
  return dout * choose(u > FAR, splat(1), s + x * s * r * (square * (3 * CUBED) + ONCE));
}

// A vector of the first `count` numbers, and zeros behind them.
POLYHEAD_INLINE Vec some(const number* from, int64_t count) {
  if (from == nullptr) return splat(0);
  if (count >= LANES) return load(from);
  number lane[LANES] = {};
  std::copy(from, from + count, lane);
  return load(lane);
}

POLYHEAD_INLINE void put(number* to, const Vec& x, int64_t count) {
  if (count >= LANES) return store(to, x);
  number lane[LANES];
  store(lane, x);
  std::copy(lane, lane + count, to);
}

void job(const GeluCall& c, int64_t at, int64_t end, number* dbias) {
  for (; at < end; at += c.width)
    for (int64_t i = 0; i < c.width && at + i < end; i += LANES) {
      int64_t count = std::min(c.width - i, end - at - i);
      Vec x = some(c.x + at + i, count);
      if (c.bias != nullptr) x += some(c.bias + i, count);
      Vec y = c.dout == nullptr ? forward(x) : backward(x, some(c.dout + at + i, count));
      put(c.out + at + i, y, count);
      if (dbias != nullptr) put(dbias + i, some(dbias + i, count) + y, count);
    }
}

}  // namespace

// 0, or 1 if there was no memory.
extern "C" int polyhead_gelu(const GeluCall* call) {
  const GeluCall& c = *call;
  const int64_t numbers = c.rows * c.width;
  bool done = each({c.pool, c.threads}, (c.n + numbers - 1) / numbers, 0, [&](int64_t i, Memory&) {
    job(c, i * numbers, std::min(c.n, (i + 1) * numbers), c.dbias == nullptr ? nullptr : c.dbias + i * c.width);
  });
  return done ? 0 : 1;
}
