// Products of a tile: 16 rows of one side in lanes, some rows of the other side as they lie in memory.
//
// Own rows are packed [head][width][lane].  Every inner loop multiplies vectors of lanes by single numbers of a row
// of the other side, or by vectors of lanes; only `add_rows` has the width in its vectors.

#pragma once
#include <algorithm>

#include "pairs.h"

namespace polyhead {

constexpr int OTHERS = 16;  // rows of the other side that are taken at once, at most
constexpr int WIDE = WIDTH == 16 ? 8 : WIDTH == 8 ? 6 : 4;  // sums of vectors that are held in registers

// f(count, i) for all i below n: WIDE of them at a time, then 4, 2 and 1.
template <int R, class F> POLYHEAD_INLINE int64_t steps_of(int64_t i, int64_t n, const F& f) {
  for (; i + R <= n; i += R) f(std::integral_constant<int, R>(), i);
  return i;
}
template <class F> POLYHEAD_INLINE void steps(int64_t n, const F& f) {
  int64_t i = steps_of<WIDE>(0, n, f);
  if (WIDE > 4) i = steps_of<4>(i, n, f);
  steps_of<1>(steps_of<2>(i, n, f), n, f);
}

// Rows of a tile, packed [head][width][lane], times `factor`; rows that do not exist are 0.
inline void pack(const Rows& x, const Tile& tile, int heads, int64_t width, number factor, number* to) {
  for (int h = 0; h < heads; h++)
    for (int64_t c = 0; c < width; c++) {
      const number* from = x.at + tile.b * x.b + tile.row * x.n + h * x.h + c;
      number* lane = to + (h * width + c) * LANES;
      for (int64_t l = 0; l < LANES; l++) lane[l] = l < tile.count ? from[l * x.n] * factor : 0.0f;
    }
}

// The reverse.
inline void unpack(const number* from, const Tile& tile, int heads, int64_t width, number factor, number* to, int64_t step) {
  for (int64_t l = 0; l < tile.count; l++)
    for (int64_t c = 0; c < heads * width; c++) to[l * step + c] = from[c * LANES + l] * factor;
}

// total[r] += sum_i x[i] row_i[r], vectors of lanes times R numbers of each row.
template <int R> POLYHEAD_INLINE void combine(Vec* total, const number* x, int64_t step_x, const number* row, int64_t step, int n) {
  for (int i = 0; i < n; i++, x += step_x, row += step) {
    Vec lane = load(x);
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) total[r] += lane * row[r];
  }
}

// The same with vectors of lanes in place of numbers.
template <int R> POLYHEAD_INLINE void combine_lanes(Vec* total, const number* x, const number* own, int64_t step, int n) {
  for (int i = 0; i < n; i++, x += LANES, own += step) {
    Vec lane = load(x);
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) total[r] += lane * load(own + r * LANES);
  }
}

// to[lane] = sum_c own[c][lane] row_r[c] for R rows of the other side.
template <int R>
POLYHEAD_INLINE void products(const number* own, const number* row, int64_t step, int64_t width, number* to, int64_t step_to) {
  Vec total[R] = {};
  for (int64_t c = 0; c < width; c++) {
    Vec lane = load(own + c * LANES);
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) total[r] += lane * row[r * step + c];
  }
  POLYHEAD_UNROLL
  for (int r = 0; r < R; r++) store(to + r * step_to, total[r]);
}

// s[row][head][lane] of n rows of the other side; heads of either side may be shared by several (grouped keys).
inline void scores(const number* own, int share_own, const Rows& x, int share, int n, int heads, int64_t width, number* s) {
  for (int h = 0; h < heads; h++) {
    const number* mine = own + (h / share_own) * width * LANES;
    const number* from = x.at + (h / share) * x.h;
    steps(n, [&](auto count, int64_t r) {
      products<decltype(count)::value>(mine, from + r * x.n, x.n, width, s + (r * heads + h) * LANES, heads * LANES);
    });
  }
}

// own[head][column][lane] += sum_n a[n][head][lane] y[n][column][lane], A heads and C columns in registers.
template <int A, int C>
POLYHEAD_INLINE void outer_block(number* own, int64_t step_own, const number* a, int64_t step_a, const number* y, int64_t step_y, int n) {
  POLYHEAD_UNROLL
  for (int p = 0; p < PARTS; p++) {
    part total[A][C] = {};
    for (int i = 0; i < n; i++) {
      part column[C];
      POLYHEAD_UNROLL
      for (int c = 0; c < C; c++) column[c] = read<part>(y + i * step_y + c * LANES + p * WIDTH);
      POLYHEAD_UNROLL
      for (int h = 0; h < A; h++) {
        part code = read<part>(a + i * step_a + h * LANES + p * WIDTH);
        POLYHEAD_UNROLL
        for (int c = 0; c < C; c++) total[h][c] += code * column[c];
      }
    }
    POLYHEAD_UNROLL
    for (int h = 0; h < A; h++)
      POLYHEAD_UNROLL
      for (int c = 0; c < C; c++) {
        number* to = own + h * step_own + c * LANES + p * WIDTH;
        write(to, read<part>(to) + total[h][c]);
      }
  }
}

// The same for all heads, and `columns` columns from `first` on.
inline void outer(number* own, int64_t width, int64_t first, const number* a, int heads, const number* y, int64_t step_y,
                  int64_t columns, int n) {
  constexpr int C = MANY_REGISTERS ? 4 : 3;
  const int64_t step_own = width * LANES, step_a = heads * LANES;
  auto some_heads = [&](auto count, int64_t h) {
    constexpr int A = decltype(count)::value;
    auto some = [&](auto number_of, int64_t c) {
      outer_block<A, decltype(number_of)::value>(own + h * step_own + (first + c) * LANES, step_own, a + h * LANES, step_a,
                                                 y + c * LANES, step_y, n);
    };
    steps_of<1>(steps_of<C>(0, columns, some), columns, some);
  };
  steps_of<1>(steps_of<4>(0, heads, some_heads), heads, some_heads);
}

// Rows of a tile as they are, [head][lane][width padded to quads], 0 where there is none.
inline int64_t padded(int64_t width) { return (width + 3) / 4 * 4; }
inline void copy_rows(const Rows& x, const Tile& tile, int heads, int64_t width, number factor, number* to) {
  int64_t wide = padded(width);
  std::memset(to, 0, size_t(heads * LANES * wide) * sizeof(number));
  for (int h = 0; h < heads; h++)
    for (int64_t l = 0; l < tile.count; l++)
      for (int64_t c = 0; c < width; c++)
        to[(h * LANES + l) * wide + c] = x.at[tile.b * x.b + (tile.row + l) * x.n + h * x.h + c] * factor;
}

// Gradients ds[row][head][lane] of some tiles of own rows, and those rows by `copy_rows`; so far apart are the tiles.
struct Grads {
  const number *ds, *rows;
  int tiles;
  int64_t next_ds, next_rows;
};

// to_r[c] += sum_tiles sum_l ds_r[l] rows[l][c] for R rows of the other side, V columns at once, of which `some` are written.
inline void get(const number* from, Vec& x) { x = load(from); }
inline void get(const number* from, quad& x) { x = read<quad>(from); }
inline void put(number* to, const Vec& x) { store(to, x); }
inline void put(number* to, const quad& x) { write(to, x); }
template <class V, int R>
POLYHEAD_INLINE void add_block(const Grads& x, int64_t step, int64_t wide, number* to, int64_t next, int64_t some) {
  constexpr int64_t all = sizeof(V) / sizeof(number);
  V total[R] = {};
  for (int tile = 0; tile < x.tiles; tile++) {
    const number *s = x.ds + tile * x.next_ds, *rows = x.rows + tile * x.next_rows;
    for (int l = 0; l < LANES; l++) {
      V row;
      get(rows + l * wide, row);
      POLYHEAD_UNROLL
      for (int r = 0; r < R; r++) total[r] += row * s[r * step + l];
    }
  }
  POLYHEAD_UNROLL
  for (int r = 0; r < R; r++) {
    V old;
    if (some == all) {
      get(to + r * next, old);
      put(to + r * next, old + total[r]);
    } else {
      number column[all];
      put(column, total[r]);
      for (int64_t c = 0; c < some; c++) to[r * next + c] += column[c];
    }
  }
}

// From gradients of products to those of n rows of the other side, `to` (n head width).
inline void other_grads(const Grads& x, int heads, int share, int n, int64_t width, number* to) {
  const int64_t step = heads * LANES, next = heads * width, wide = padded(width);
  for (int h = 0; h < heads; h++)
    steps(n, [&](auto count, int64_t r) {
      constexpr int R = decltype(count)::value;
      Grads own = {x.ds + (r * heads + h) * LANES, x.rows + (h / share) * LANES * wide, x.tiles, x.next_ds, x.next_rows};
      number* grad = to + r * next + h * width;
      int64_t c = 0;
      for (; c + LANES <= width; c += LANES, own.rows += LANES) add_block<Vec, R>(own, step, wide, grad + c, next, LANES);
      for (; c < width; c += 4, own.rows += 4) add_block<quad, R>(own, step, wide, grad + c, next, std::min<int64_t>(4, width - c));
    });
}

// Rows of a sample, the first being `row`.
inline Rows rows_from(const Rows& x, int64_t b, int64_t row) { return {x.at + b * x.b + row * x.n, 0, x.n, x.h}; }

// n rows of the other side, [head][row][width]: those of a head lie together, at no distance that a cache dislikes.
// Queries come times the scale, as in the forward pass: a score that is rounded in another way is off by so much of itself,
// and a sharp softmax makes of it as large an error of its code.
inline Rows together(const Rows& x, int64_t b, int64_t row, int n, int heads, int64_t width, number factor, number* to) {
  const Rows from_row = rows_from(x, b, row);
  for (int r = 0; r < n; r++)
    for (int h = 0; h < heads; h++) {
      const number* from = from_row.at + r * x.n + h * x.h;
      for (int64_t c = 0; c < width; c++) to[(h * n + r) * width + c] = from[c] * factor;
    }
  return {to, 0, width, n * width};
}

// own[group][column][lane] += sum_r a[row r][head][lane] row_r[head][column], for n rows of the other side.
inline void own_grads(const number* a, int heads, int share, int n, const Rows& x, int64_t width, number* own) {
  for (int h = 0; h < heads; h++) {
    const number *mine = a + h * LANES, *from = x.at + h * x.h;
    number* to = own + (h / share) * width * LANES;
    steps(width, [&](auto count, int64_t i) {
      constexpr int R = decltype(count)::value;
      Vec total[R] = {};
      combine<R>(total, mine, heads * LANES, from + i, x.n, n);
      POLYHEAD_UNROLL
      for (int c = 0; c < R; c++) store(to + (i + c) * LANES, load(to + (i + c) * LANES) + total[c]);
    });
  }
}

}  // namespace polyhead
