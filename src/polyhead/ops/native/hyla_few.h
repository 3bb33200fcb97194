// HYLA of few queries (few.h): the hidden layer of a pair has its columns in lanes.  Equations are in hyla.cpp.

#pragma once
#include "acts.h"
#include "few.h"

namespace polyhead {

template <class Call> struct HylaFew {
  const Call& c;
  Few few;
  int heads, groups, share;
  int64_t wide;  // of values, in whole vectors

  explicit HylaFew(const Call& c)
      : c(c), few{{c.pool, c.threads}, c.q, c.k, c.limits.turned(), c.b, c.t, c.s, c.sample_parts, c.key_parts,
                  int(c.h), int(c.h / c.g), c.d, number(c.scale)},
        heads(int(c.h)), groups(int(c.g)), share(int(c.h / c.g)), wide(whole_vectors(c.e)) {}

  // y[column] of a pair, w being the code of its groups.
  void hidden(const number* w, const Rows& v, number* y) const {
    steps(wide / LANES, [&](auto count, int64_t i) {
      constexpr int R = decltype(count)::value;
      Vec z[R] = {}, out[R], slope[R];
      for (int g = 0; g < groups; g++) {
        POLYHEAD_UNROLL
        for (int r = 0; r < R; r++) z[r] += load(v.at + g * v.h + (i + r) * LANES) * w[g * LANES];
      }
      activate<R>(c.act, z, out, slope);
      for (int r = 0; r < R; r++) store(y + (i + r) * LANES, out[r]);
    });
  }

  int64_t size() const { return (2 * heads + groups) * LANES + (groups + 1 + c.t * heads) * wide + 128; }

  // The outputs of a sample's queries from some keys; `to` is (t h e).
  void read(int64_t b, Range keys, const number* scores, const Stats& stats, Memory& memory, number* to) const {
    number *a = memory.take(heads * LANES), *u = memory.take(heads * LANES), *w = memory.take(groups * LANES);
    number *copy = memory.take(groups * wide), *y = memory.take(wide), *out = memory.zeros(c.t * heads * wide);
    for (int64_t row = keys.from; row < keys.to; row += LANES) {
      Tile tile = tile_at(b, row, c.s);
      Range seen = others(few.limits, tile);
      for (int64_t i = seen.from; i < seen.to; i++) {
        Sight sight(few.limits, tile, i);
        const number* score = few.of(scores, b, row, i);
        std::copy(score, score + heads * LANES, a);
        normalise(c.normalise, sight, stats, a, heads, number(c.eps));
        if (few.limits.keep.at) drop(sight, a, u, heads);
        const number* code = few.limits.keep.at ? u : a;
        for (int g = 0; g < groups; g++) {
          Vec total = splat(0);
          for (int h = 0; h < share; h++) total += load(code + (g * share + h) * LANES);
          store(w + g * LANES, total);
        }
        for (int64_t l = 0; l < tile.count; l++) {
          hidden(w + l, in_vectors(c.v.at + b * c.v.b + (row + l) * c.v.n, c.v.h, groups, c.e, copy), y);
          add_row(out + i * heads * wide, code + l, y, 0, heads, 1, wide);
        }
      }
    }
    for (int64_t n = 0; n < c.t * heads; n++) std::copy(out + n * wide, out + n * wide + c.e, to + n * c.e);
  }

  bool run() const {
    const int64_t rows = over_keys(c.normalise) ? c.b * heads * c.t : 0;
    Memory memory(few.all() + 2 * rows + 64);
    if (memory.failed()) return false;
    number *scores = memory.take(few.all()), *row_max = memory.take(rows), *inverse_row_sum = memory.take(rows);
    Stats stats = {row_max, inverse_row_sum, heads * c.t, c.t, 0, 1};
    const bool nothing = c.normalise == RMS_HEADS || c.normalise == NONE;
    return few.scores(nothing ? 0.0f : HIDDEN, scores) && (!over_keys(c.normalise) || few.sums(scores, row_max, inverse_row_sum)) &&
           each_key_part(few.team, c.b, c.s, c.sample_parts, c.key_parts, size(), [&](int64_t b, Range keys, int64_t, int64_t strip, Memory& own) {
             read(b, keys, scores, stats, own, c.out + (strip * c.b + b) * c.t * c.h * c.e);
           });
  }
};

}  // namespace polyhead
