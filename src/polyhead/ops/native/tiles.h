// Products of a tile: 16 rows of one side in lanes, some rows of the other side as they lie in memory.
//
// Own rows are packed [head][width][lane].  Every inner loop multiplies vectors of lanes by single numbers of a row
// of the other side, or by vectors of lanes; only `add_rows` has the width in its vectors.

#pragma once
#include "pairs.h"

namespace polyhead {

constexpr int OTHERS = 16;  // rows of the other side that are taken at once, at most
constexpr int WIDE = WIDTH == 16 ? 8 : 4;  // sums that are held in registers

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
inline void scores(const number* own, int share_own, const Rows& x, int share, int64_t b, int64_t row, int n, int heads,
                   int64_t width, number* s) {
  for (int h = 0; h < heads; h++) {
    const number* mine = own + (h / share_own) * width * LANES;
    const number* from = x.at + b * x.b + row * x.n + (h / share) * x.h;
    int r = 0;
    for (; r + WIDE <= n; r += WIDE)
      products<WIDE>(mine, from + r * x.n, x.n, width, s + (r * heads + h) * LANES, heads * LANES);
    for (; r < n; r++) products<1>(mine, from + r * x.n, x.n, width, s + (r * heads + h) * LANES, 0);
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
  constexpr int C = MANY_REGISTERS ? 4 : 2;
  int64_t step_own = width * LANES, step_a = heads * LANES;
  int h = 0;
  for (; h + 4 <= heads; h += 4) {
    int64_t c = 0;
    for (; c + C <= columns; c += C)
      outer_block<4, C>(own + h * step_own + (first + c) * LANES, step_own, a + h * LANES, step_a, y + c * LANES, step_y, n);
    for (; c < columns; c++)
      outer_block<4, 1>(own + h * step_own + (first + c) * LANES, step_own, a + h * LANES, step_a, y + c * LANES, step_y, n);
  }
  for (; h < heads; h++) {
    int64_t c = 0;
    for (; c + C <= columns; c += C)
      outer_block<1, C>(own + h * step_own + (first + c) * LANES, step_own, a + h * LANES, step_a, y + c * LANES, step_y, n);
    for (; c < columns; c++)
      outer_block<1, 1>(own + h * step_own + (first + c) * LANES, step_own, a + h * LANES, step_a, y + c * LANES, step_y, n);
  }
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

// to_r[c] += sum_l s_r[l] rows[l][c] for R rows of the other side, V columns at once, of which `some` are written.
inline void get(const number* from, Vec& x) { x = load(from); }
inline void get(const number* from, quad& x) { x = read<quad>(from); }
inline void put(number* to, const Vec& x) { store(to, x); }
inline void put(number* to, const quad& x) { write(to, x); }
template <class V, int R>
POLYHEAD_INLINE void add_block(const number* s, int64_t step_s, const number* rows, int64_t wide, number* to, int64_t step, int64_t some) {
  V total[R] = {};
  for (int l = 0; l < LANES; l++) {
    V row;
    get(rows + l * wide, row);
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) total[r] += row * s[r * step_s + l];
  }
  POLYHEAD_UNROLL
  for (int r = 0; r < R; r++) {
    number column[sizeof(V) / sizeof(number)];
    put(column, total[r]);
    for (int64_t c = 0; c < some; c++) to[r * step + c] += column[c];
  }
}

template <int R>
inline void add_rows(const number* s, int64_t step_s, const number* rows, int64_t width, number* to, int64_t step) {
  int64_t wide = padded(width), c = 0;
  for (; c + LANES <= width; c += LANES) add_block<Vec, R>(s, step_s, rows + c, wide, to + c, step, LANES);
  for (; c < width; c += 4)
    add_block<quad, R>(s, step_s, rows + c, wide, to + c, step, width - c < 4 ? width - c : 4);
}

}  // namespace polyhead
