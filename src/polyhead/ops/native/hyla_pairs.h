// HYLA's pairs of a tile and some rows of the other side: codes, hidden layers and their gradients.  Equations are in hyla.cpp.

#pragma once
#include "acts.h"
#include "fused.h"
#include "parallel.h"

namespace polyhead {

constexpr int64_t COLUMNS = 2 * WIDE;  // the most numbers of the hidden layer that are computed at once

template <class Call, int H> struct HylaPairs {
  const Call& c;
  Limits limits;
  int share;  // query heads of a group of keys

  HylaPairs(const Call& c, const Limits& limits) : c(c), limits(limits), share(int(c.h / c.g)) {}
  int heads() const { return H ? H : int(c.h); }
  int groups() const { return H ? H : int(c.g); }
  int shared() const { return H ? 1 : share; }
  bool fused() const { return FUSED<H> && plain(c.act); }

  // n rows of values or of dout, of samples x, in the order in which they are read.
  Rows copied(const Rows& x, int64_t b, int64_t row, int n, int heads, number* to) const {
    return fused() ? by_row(x, b, row, n, heads, c.e, to) : together(x, b, row, n, heads, c.e, 1.0f, to);
  }

  // For n rows of the other side: the code a, the code with dropout u, and w, the sum of u over the heads of a group of keys.
  struct Code {
    number *a, *u, *w, *scale;
  };
  Code code_memory(Memory& memory) const {
    Code code;
    code.a = memory.take(OTHERS * heads() * LANES);
    code.u = limits.keep.at ? memory.take(OTHERS * heads() * LANES) : code.a;
    code.w = shared() > 1 ? memory.take(OTHERS * groups() * LANES) : code.u;
    code.scale = memory.take(OTHERS * LANES);
    return code;
  }
  int64_t code_size() const { return 3 * OTHERS * (heads() + 1) * LANES; }

  void make_code(const Tile& tile, int64_t other, int n, const Stats& stats, const Code& code) const {
    for (int r = 0; r < n; r++) {
      Sight sight(limits, tile, other + r);
      number *a = code.a + r * heads() * LANES, *u = code.u + r * heads() * LANES;
      add_bias(sight, a, heads(), hidden_score(c.normalise));
      store(code.scale + r * LANES, normalise(c.normalise, sight, stats, a, heads(), number(c.eps)));
      if (limits.keep.at) drop(sight, a, u, heads());
      for (int g = 0; shared() > 1 && g < groups(); g++) {
        Vec total = splat(0);
        for (int h = 0; h < shared(); h++) total += load(u + (g * shared() + h) * LANES);
        store(code.w + (r * groups() + g) * LANES, total);
      }
    }
  }

  // Hidden layers y[row][column][lane] of R columns.
  template <int R> POLYHEAD_INLINE void hidden(const Code& code, int r, const number* v, int64_t step, number* y) const {
    Vec z[R] = {};
    combine<R>(z, code.w + r * groups() * LANES, LANES, v, step, groups());
    Vec out[R], slope[R];
    activate<R>(c.act, z, out, slope);
    POLYHEAD_UNROLL
    for (int i = 0; i < R; i++) store(y + i * LANES, out[i]);
  }

  void values(const Rows& rows, int n, const Code& code, number* y, number* out) const {
    if constexpr (FUSED<H>)
      if (fused()) return mix<H>(c.act, code.u, rows, n, c.e, out);
    for (int64_t e0 = 0; e0 < c.e; e0 += COLUMNS) {
      int64_t columns = std::min(COLUMNS, c.e - e0);
      for (int r = 0; r < n; r++) {
        const number* v = rows.at + r * rows.n + e0;
        number* to = y + r * COLUMNS * LANES;
        steps(columns, [&](auto count, int64_t i) { hidden<decltype(count)::value>(code, r, v + i, rows.h, to + i * LANES); });
      }
      outer(out, c.e, e0, code.u, heads(), y, COLUMNS * LANES, columns, n);
    }
  }

  // The gradient of the code, in two sums: over dout (of heads) and over v (of groups of keys); the same memory if
  // there is a group for every head.
  struct CodeGrads {
    number *of_dout, *of_v;
  };

  // R columns of the hidden layer of a pair, with the tile's own rows (of v, or of dout) in lanes and a row of the other.
  //
  //   z = sum_g w_g v_g,  dy = sum_h u_h dout_h,  da_h += dout_h . y,  da_g += dz . v_g
  template <int R, bool KEYS>
  POLYHEAD_INLINE void pair(const Code& code, int r, const number* own, const number* other, int64_t step_other, number* dz, const CodeGrads& grads) const {
    const int mine = KEYS ? groups() : heads(), theirs = KEYS ? heads() : groups();
    const number *w = code.w + r * groups() * LANES, *u = code.u + r * heads() * LANES;
    const int64_t step = c.e * LANES;
    Vec own_sum[R] = {}, other_sum[R] = {};  // z and dy if keys are in lanes, else dy and z
    combine_lanes<R>(own_sum, KEYS ? w : u, own, step, mine);
    combine<R>(other_sum, KEYS ? u : w, LANES, other, step_other, theirs);
    Vec y[R], slope[R], on_own[R], on_other[R];  // the factors of the own and of the other rows in the gradient of the code
    activate<R>(c.act, KEYS ? own_sum : other_sum, y, slope);
    POLYHEAD_UNROLL
    for (int i = 0; i < R; i++) {
      Vec dz_i = (KEYS ? other_sum[i] : own_sum[i]) * slope[i];
      if (KEYS) store(dz + i * LANES, dz_i);
      on_own[i] = KEYS ? dz_i : y[i];
      on_other[i] = KEYS ? y[i] : dz_i;
    }
    number *to_own = (KEYS ? grads.of_v : grads.of_dout) + r * mine * LANES;
    number *to_other = (KEYS ? grads.of_dout : grads.of_v) + r * theirs * LANES;
    for (int h = 0; h < mine; h++) {
      Vec total = load(to_own + h * LANES);
      POLYHEAD_UNROLL
      for (int i = 0; i < R; i++) total += load(own + h * step + i * LANES) * on_own[i];
      store(to_own + h * LANES, total);
    }
    for (int h = 0; h < theirs; h++) {
      Vec total = load(to_other + h * LANES);
      POLYHEAD_UNROLL
      for (int i = 0; i < R; i++) total += on_other[i] * other[h * step_other + i];
      store(to_other + h * LANES, total);
    }
  }

  // da[row][head][lane] of n rows of the other side and, where keys are in lanes, what they add to dv.
  template <bool KEYS>
  void pairs(const Rows& x, int n, const Code& code, const number* own, number* dz, const CodeGrads& grads, number* dv) const {
    if constexpr (FUSED<H> && KEYS)
      if (fused()) return unmix<H>(c.act, code.u, own, x, n, c.e, dz, grads.of_dout, dv);
    std::fill(grads.of_dout, grads.of_dout + n * heads() * LANES, 0.0f);
    std::fill(grads.of_v, grads.of_v + n * groups() * LANES, 0.0f);
    for (int64_t e0 = 0; e0 < c.e; e0 += COLUMNS) {
      int64_t columns = std::min(COLUMNS, c.e - e0);
      for (int r = 0; r < n; r++) {
        const number* row = x.at + r * x.n + e0;
        const number* mine = own + e0 * LANES;
        number* to = dz + r * COLUMNS * LANES;
        int64_t i = 0;
        for (; i + 4 <= columns; i += 4) pair<4, KEYS>(code, r, mine + i * LANES, row + i, x.h, to + i * LANES, grads);
        for (; i + 2 <= columns; i += 2) pair<2, KEYS>(code, r, mine + i * LANES, row + i, x.h, to + i * LANES, grads);
        for (; i < columns; i++) pair<1, KEYS>(code, r, mine + i * LANES, row + i, x.h, to + i * LANES, grads);
      }
      if (KEYS) outer(dv, c.e, e0, code.w, groups(), dz, COLUMNS * LANES, columns, n);
    }
    for (int r = 0; shared() > 1 && r < n; r++)
      for (int h = 0; h < heads(); h++) {
        number* to = grads.of_dout + (r * heads() + h) * LANES;
        store(to, load(to) + load(grads.of_v + (r * groups() + h / shared()) * LANES));
      }
  }

  CodeGrads grad_memory(Memory& memory) const {
    number* of_dout = memory.take(OTHERS * heads() * LANES);
    return {of_dout, shared() > 1 ? memory.take(OTHERS * groups() * LANES) : of_dout};
  }
};

}  // namespace polyhead
