// Softmax and relational attention of few queries (few.h).  Equations are in attention.cpp.

#pragma once
#include "acts.h"
#include "few.h"

namespace polyhead {

template <class Call> struct AttentionFew {
  const Call& c;
  Few few;
  int heads, groups, share, relations;
  int64_t wide;  // of symbols, in whole vectors

  explicit AttentionFew(const Call& c)
      : c(c), few{{c.pool, c.threads}, c.q, c.k, c.limits.turned(), c.b, c.t, c.s, c.sample_parts, c.key_parts,
                  int(c.h), int(c.h / c.g), c.d, number(c.scale)},
        heads(int(c.h)), groups(int(c.g)), share(int(c.h / c.g)), relations(int(c.r)), wide(whole_vectors(c.e)) {}

  int64_t size() const {
    return (heads + relations) * LANES + groups * wide + c.t * heads * (wide + relations * LANES) + 128;
  }

  // rel[relation][lane] of a query and a tile of keys.
  void relate(const Tile& tile, int64_t query, number* rel) const {
    const number* own = c.q_rel.at + tile.b * c.q_rel.b + query * c.q_rel.n;
    dots(own, c.q_rel.h, c.k_rel, tile, relations, 1, c.p, number(c.factor), rel);
    for (int r = 0; r < relations; r++) {
      Vec z = load(rel + r * LANES), y, slope;
      activate<1>(c.act, &z, &y, &slope);
      store(rel + r * LANES, y);
    }
  }

  // The sums of a sample's queries over some keys: of symbols (t h e) and of relations (t h r).
  void read(int64_t b, Range keys, const number* scores, const Stats& stats, Memory& memory, number* retrieved, number* related) const {
    number *u = memory.take(heads * LANES), *rel = memory.take(relations * LANES), *copy = memory.take(groups * wide);
    number *symbols = memory.zeros(c.t * heads * wide), *sums = memory.zeros(c.t * heads * relations * LANES);
    for (int64_t row = keys.from; row < keys.to; row += LANES) {
      Tile tile = tile_at(b, row, c.s);
      Range seen = others(few.limits, tile);
      for (int64_t i = seen.from; i < seen.to; i++) {
        const number* score = few.of(scores, b, row, i);
        Sight sight(few.limits, tile, i);
        std::copy(score, score + heads * LANES, u);
        normalise(SOFTMAX, sight, stats, u, heads, 0.0f);
        if (few.limits.keep.at) drop(sight, u, u, heads);
        for (int64_t l = 0; l < tile.count; l++) {
          int64_t n = row + l + (c.columns ? c.t - 1 - i : 0);
          const number* at = c.symbols.at + (c.columns ? 0 : b * c.symbols.b) + n * c.symbols.n;
          Rows symbol = in_vectors(at, c.symbols.h, groups, c.e, copy);
          add_row(symbols + i * heads * wide, u + l, symbol.at, symbol.h, heads, share, wide);
        }
        relate(tile, i, rel);
        outer(sums + i * heads * relations * LANES, relations, 0, u, heads, rel, 0, relations, 1);
      }
    }
    for (int64_t n = 0; n < c.t * heads; n++) std::copy(symbols + n * wide, symbols + n * wide + c.e, retrieved + n * c.e);
    for (int64_t n = 0; n < c.t * heads * relations; n++) {
      related[n] = 0;
      for (int l = 0; l < LANES; l++) related[n] += sums[n * LANES + l];
    }
  }

  bool run() const {
    const int64_t rows = c.b * heads * c.t;
    Memory memory(few.all() + 2 * rows + 64);
    if (memory.failed()) return false;
    number *scores = memory.take(few.all()), *row_max = memory.take(rows), *inverse_row_sum = memory.take(rows);
    if (!few.scores(HIDDEN, scores) || !few.sums(scores, row_max, inverse_row_sum)) return false;
    for (int64_t n = 0; n < rows; n++) c.stats[2 * n] = row_max[n], c.stats[2 * n + 1] = inverse_row_sum[n];
    Stats stats = {row_max, inverse_row_sum, heads * c.t, c.t, 0, 1};
    return each_key_part(few.team, c.b, c.s, c.sample_parts, c.key_parts, size(), [&](int64_t b, Range keys, int64_t, int64_t strip, Memory& own) {
             int64_t at = (strip * c.b + b) * c.t * c.h;
             read(b, keys, scores, stats, own, c.retrieved + at * c.e, c.related + at * c.r);
           });
  }
};

}  // namespace polyhead
