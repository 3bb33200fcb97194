// HYLA of one query over many keys, as in decoding.  Equations are in hyla.cpp.
//
// A query would fill one of 16 lanes.  Here 16 keys lie in lanes until their codes are known; then the hidden layer of a pair
// has its columns in lanes.  Most time is spent on reading keys and values, so each is read once, as it lies in memory.  A
// softmax over keys would need all scores before the first value: for it, hyla.cpp has the pass of many queries.

#pragma once
#include "acts.h"
#include "parallel.h"
#include "tiles.h"

namespace polyhead {

inline int64_t whole_vectors(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

inline number dot(const number* x, const number* y, int64_t width) {
  part sums = {};
  int64_t c = 0;
  for (; c + WIDTH <= width; c += WIDTH) sums += read<part>(x + c) * read<part>(y + c);
  number total = 0;
  for (int p = 0; p < WIDTH; p++) total += sums[p];
  for (; c < width; c++) total += x[c] * y[c];
  return total;
}

// A row [head][width] in whole vectors: as it lies if it is made of such, else a copy, and 0 behind each head.
inline Rows in_vectors(const number* row, int64_t step, int heads, int64_t width, number* copy) {
  const int64_t wide = whole_vectors(width);
  if (wide == width) return {row, 0, 0, step};
  for (int h = 0; h < heads; h++) {
    std::copy(row + h * step, row + h * step + width, copy + h * wide);
    std::fill(copy + h * wide + width, copy + (h + 1) * wide, 0.0f);
  }
  return {copy, 0, 0, wide};
}

constexpr int64_t NEAR = 32 * LANES;  // keys whose scores are computed before their values are read: memory is read in order

template <class Call> struct HylaOne {
  const Call& c;
  Limits limits;  // own: keys
  int heads, groups, share;
  int64_t wide;  // of values, in whole vectors

  explicit HylaOne(const Call& c)
      : c(c), limits(c.limits.turned()), heads(int(c.h)), groups(int(c.g)), share(int(c.h / c.g)), wide(whole_vectors(c.e)) {}

  // Scores [head][lane] of a tile of keys, 0 where there is no key.
  void scores(const Tile& tile, number* score) const {
    const number* q = c.q.at + tile.b * c.q.b;
    std::fill(score, score + heads * LANES, 0.0f);
    for (int64_t l = 0; l < tile.count; l++) {
      const number* k = c.k.at + tile.b * c.k.b + (tile.row + l) * c.k.n;
      for (int h = 0; h < heads; h++) score[h * LANES + l] = dot(q + h * c.q.h, k + (h / share) * c.k.h, c.d) * number(c.scale);
    }
  }

  // Hidden layer y[column] of a pair, w being the code of its groups.
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

  // out[head][column] += a[head][one lane] y[column].
  void add_to_heads(number* out, const number* a, const number* y) const {
    for (int h = 0; h < heads; h++, out += wide) {
      const number code = a[h * LANES];
      for (int64_t i = 0; i < wide; i += LANES) store(out + i, load(out + i) + load(y + i) * code);
    }
  }

  int64_t size() const { return (NEAR * heads + groups * LANES) + (groups + 1 + heads) * wide + 128; }

  // The output (h e) of a sample's query from some keys.
  void read(int64_t b, Range keys, Memory& memory, number* to) const {
    number *codes = memory.take(NEAR * heads), *w = memory.take(groups * LANES);
    number *copy = memory.take(groups * wide), *y = memory.take(wide), *out = memory.zeros(heads * wide);
    for (int64_t row = keys.from; row < keys.to; row += LANES) {
      const int64_t at = (row - keys.from) % NEAR;
      for (int64_t near = 0; at == 0 && near < std::min(NEAR, keys.to - row); near += LANES)
        scores(tile_at(b, row + near, c.s), codes + near * heads);
      Tile tile = tile_at(b, row, c.s);
      Range seen = others(limits, tile);
      if (seen.from >= seen.to) continue;
      Sight sight(limits, tile, 0);
      number* a = codes + at * heads;
      add_bias(sight, a, heads, hidden_score(c.normalise));
      normalise(c.normalise, sight, Stats(), a, heads, number(c.eps));
      if (limits.keep.at) drop(sight, a, a, heads);
      for (int g = 0; g < groups; g++) {
        Vec total = splat(0);
        for (int h = 0; h < share; h++) total += load(a + (g * share + h) * LANES);
        store(w + g * LANES, total);
      }
      for (int64_t l = 0; l < tile.count; l++) {
        hidden(w + l, in_vectors(c.v.at + b * c.v.b + (row + l) * c.v.n, c.v.h, groups, c.e, copy), y);
        add_to_heads(out, a + l, y);
      }
    }
    for (int h = 0; h < heads; h++) std::copy(out + h * wide, out + h * wide + c.e, to + h * c.e);
  }

  bool run() const {
    return each_key_part({c.pool, c.threads}, c.b, c.s, c.sample_parts, c.key_parts, size(), [&](int64_t b, Range keys, int64_t, int64_t key_part, Memory& memory) {
      read(b, keys, memory, c.out + (key_part * c.b + b) * c.h * c.e);
    });
  }
};

}  // namespace polyhead
