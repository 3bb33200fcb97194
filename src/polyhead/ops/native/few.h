// Few queries over many keys, as in decoding: 16 keys in lanes, the rows of keys and values as they lie in memory.
//
// Most time is spent on reading keys and values, so each is read once.  The scores of all pairs are kept, as they are few
// compared with the numbers of the keys; so a softmax over keys has its sum before the first value is read.

#pragma once
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

// to[head][lane] = own_head . row_lane,head factor for the rows of a tile, 0 where there is none.
inline void dots(const number* own, int64_t step, const Rows& rows, const Tile& tile, int heads, int share, int64_t width,
                 number factor, number* to) {
  std::fill(to, to + heads * LANES, 0.0f);
  for (int64_t l = 0; l < tile.count; l++) {
    const number* row = rows.at + tile.b * rows.b + (tile.row + l) * rows.n;
    for (int h = 0; h < heads; h++) to[h * LANES + l] = dot(own + h * step, row + (h / share) * rows.h, width) * factor;
  }
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

// to[head][column] += a[head][one lane] row[group of the head][column], `wide` columns in whole vectors.
inline void add_row(number* to, const number* a, const number* row, int64_t step, int heads, int share, int64_t wide) {
  for (int h = 0; h < heads; h++, to += wide) {
    const number code = a[h * LANES], *from = row + (h / share) * step;
    for (int64_t c = 0; c < wide; c += LANES) store(to + c, load(to + c) + load(from + c) * code);
  }
}

struct Few {
  Team team;
  Rows q, k;
  Limits limits;  // own: keys
  int64_t b, t, s, sample_parts, key_parts;
  int heads, share;
  int64_t d;
  number scale;

  int64_t tiles() const { return (s + LANES - 1) / LANES; }
  int64_t all() const { return b * tiles() * t * heads * LANES; }
  // Scores [head][lane] of a query and a tile of keys.
  template <class T> T* of(T* scores, int64_t sample, int64_t key, int64_t query) const {
    return scores + ((sample * tiles() + key / LANES) * t + query) * heads * LANES;
  }

  // Scores with their bias; hidden ones are `hidden`.
  bool scores(number hidden, number* to) const {
    return each_key_part(team, b, s, sample_parts, key_parts, 0, [&](int64_t sample, Range keys, int64_t, int64_t, Memory&) {
      for (int64_t row = keys.from; row < keys.to; row += LANES) {
        Tile tile = tile_at(sample, row, s);
        Range seen = others(limits, tile);
        for (int64_t i = 0; i < t; i++) {
          number* score = of(to, sample, row, i);
          if (i < seen.from || i >= seen.to) {
            std::fill(score, score + heads * LANES, hidden);
            continue;
          }
          dots(q.at + sample * q.b + i * q.n, q.h, k, tile, heads, share, d, scale, score);
          add_bias(Sight(limits, tile, i), score, heads, hidden);
        }
      }
    });
  }

  // Of each query and head, (b h t): the largest score, and one over the sum of e^(score - row_max) over keys; 0 without a key.
  // The logarithm of the sum would not do in their place: a large score would lose its last digits.
  bool sums(const number* scores, number* row_max_of, number* inverse_row_sum_of) const {
    return each(team, b * t, 0, [&](int64_t item, Memory&) {
      const int64_t sample = item / t, i = item % t;
      for (int h = 0; h < heads; h++) {
        Vec tops = splat(LOWEST), total = splat(0);
        for (int64_t row = 0; row < s; row += LANES) tops = larger(load(of(scores, sample, row, i) + h * LANES), tops);
        number lane[LANES], row_max = LOWEST, row_sum = 0;
        store(lane, tops);
        for (number one : lane) row_max = std::max(row_max, one);
        for (int64_t row = 0; row < s; row += LANES) total += exp(load(of(scores, sample, row, i) + h * LANES) + -row_max);
        store(lane, total);
        for (number one : lane) row_sum += one;
        const int64_t at = (sample * heads + h) * t + i;
        row_max_of[at] = row_max, inverse_row_sum_of[at] = row_sum == 0 ? 0 : 1 / row_sum;
      }
    });
  }
};

}  // namespace polyhead
