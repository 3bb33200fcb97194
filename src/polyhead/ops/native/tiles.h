// Products of a tile: 16 rows of one side in lanes, some rows of the other side as they lie in memory.
//
// Lanes.  A vector has 16 lanes, and lane l belongs to row l of the tile: queries in a forward pass, keys in a backward
// pass (the "own" side).  Own rows are packed [head][width][lane], so that one load brings a number of all 16 rows.  The
// other side stays as it is.  A score then is a sum over the width of (vector of own numbers) x (single number of the
// other row), which the machine broadcasts while it multiplies.  No sum runs across lanes: each lane ends with the scores
// of its own row.  For that reason heads, too, can be mixed in registers: the codes of a pair over all heads are the same
// lane of different vectors, so rms over heads and HYLA's value network are arithmetic on whole vectors.  A matrix library
// would have to write the codes of all pairs to memory between its products, which costs more than the products.
//
// Reuse.  A core multiplies two vectors for each vector that it loads, so a number must be used several times while it is
// in a register.  Every product below is therefore a small block: R rows of the other side (or R columns, or A heads
// times C columns) with R sums in registers; a vector of own numbers is loaded once and multiplied R times.  R is WIDE, as
// many sums as there are registers: 8 with the 32 registers of AVX-512, 6 or 4 with 16.  `steps` cuts any length into
// blocks of WIDE, 4, 2 and 1, whose sizes the compiler knows and unrolls.
//
// Caches.  The next level of reuse is the first cache, 32 to 48 KB.  OTHERS rows of the other side are taken at once;
// TOGETHER tiles of queries (PAIR tiles of keys) go through them before the next rows are read.  Rows of a head that lie
// a power of two apart fall into the same few lines of the cache, so they are copied together (`together`, `in_blocks`)
// before they are read 8 times.  The copy also has fixed distances: an address that is one register plus a constant costs
// nothing, while an address of two registers costs an instruction for each load.
//
// Sums.  The gradient of an own row is a sum in lanes again (`own_grads`).  The gradient of a row of the other side is
// the only sum over lanes; `other_grads` turns it around: it keeps own rows as they lie in memory (`copy_rows`), puts the
// width into the vectors and multiplies by the 16 single numbers of a row of score gradients.  Each thread adds to memory
// of its own (the parts of samples and of keys in parallel.h), and parts are added in a fixed order.  So there is no atomic
// addition, and the result of a given number of threads is the same every time.
//
// Registers.  Compilers like to read a vector from memory again for each product instead of keeping it, as if a load
// were free.  `hold` in vec.h makes them keep it, with an empty assembler instruction; see there.

#pragma once
#include <algorithm>
#include <utility>

#include "pairs.h"

namespace polyhead {

constexpr int OTHERS = 16;  // rows of the other side that are taken at once, at most
constexpr int WIDE = WIDTH == 16 ? 8 : WIDTH == 8 ? 6 : 4;  // sums of vectors that are held in registers
constexpr bool ONE_EACH = PARTS == 1 && MANY_REGISTERS;     // a vector of lanes is one register, of which there are 32
constexpr int TOGETHER = ONE_EACH ? 8 : 4;  // tiles of queries that read the same keys in a forward pass
constexpr int PAIR = 4;                     // tiles of keys that read the same queries in a backward pass

// f(count, i) for all i below n: WIDE of them at a time, then 4, 2 and 1.
template <int R, class F> POLYHEAD_INLINE int64_t steps_of(int64_t i, int64_t n, const F& f) {
  for (; i + R <= n; i += R) f(std::integral_constant<int, R>(), i);
  return i;
}
template <class F> POLYHEAD_INLINE void steps(int64_t n, const F& f, int64_t i = 0) {
  i = steps_of<WIDE>(i, n, f);
  if (WIDE > 4) i = steps_of<4>(i, n, f);
  steps_of<1>(steps_of<2>(i, n, f), n, f);
}

// One step of a transpose: the lanes of x with bit S change places with the lanes of y without it, S lanes apart.
//   new x_l = bit S of l ? y_(l - S) : x_l          new y_l = bit S of l ? y_l : x_(l + S)
template <int S, size_t... LANE> POLYHEAD_INLINE void swap_lanes(part& x, part& y, std::index_sequence<LANE...>) {
  part first = __builtin_shufflevector(x, y, (LANE & S ? WIDTH + LANE - S : LANE)...);
  y = __builtin_shufflevector(x, y, (LANE & S ? WIDTH + LANE : LANE + S)...);
  x = first;
}

// Rows become columns.
template <int S = WIDTH / 2> POLYHEAD_INLINE void turn(part* x) {
  if constexpr (S > 0) {
    POLYHEAD_UNROLL
    for (int i = 0; i < WIDTH; i++)
      if ((i & S) == 0) swap_lanes<S>(x[i], x[i + S], std::make_index_sequence<WIDTH>());
    turn<S / 2>(x);
  }
}

// Rows of a tile, packed [head][width][lane], times `factor`; rows that do not exist are 0.
inline void pack(const Rows& x, const Tile& tile, int heads, int64_t width, number factor, number* to) {
  if (x.h == width) width *= heads, heads = 1;  // they lie together: narrow heads fill vectors
  for (int h = 0; h < heads; h++) {
    const number* from = x.at + tile.b * x.b + tile.row * x.n + h * x.h;
    int64_t c = 0;
    for (; c + WIDTH <= width; c += WIDTH, to += WIDTH * LANES)
      for (int p = 0; p < LANES; p += WIDTH) {
        part square[WIDTH];
        POLYHEAD_UNROLL
        for (int i = 0; i < WIDTH; i++) square[i] = p + i < tile.count ? read<part>(from + (p + i) * x.n + c) * factor : part{};
        turn(square);
        POLYHEAD_UNROLL
        for (int i = 0; i < WIDTH; i++) write(to + i * LANES + p, square[i]);
      }
    for (; c < width; c++, to += LANES)
      for (int64_t l = 0; l < LANES; l++) to[l] = l < tile.count ? from[l * x.n + c] * factor : 0.0f;
  }
}

// The reverse.
inline void unpack(const number* from, const Tile& tile, int heads, int64_t width, number* to, int64_t step) {
  int64_t c = 0;
  for (; c + WIDTH <= heads * width; c += WIDTH)
    for (int p = 0; p < tile.count; p += WIDTH) {
      part square[WIDTH];
      POLYHEAD_UNROLL
      for (int i = 0; i < WIDTH; i++) square[i] = read<part>(from + (c + i) * LANES + p);
      turn(square);
      POLYHEAD_UNROLL
      for (int i = 0; i < WIDTH; i++)
        if (p + i < tile.count) write(to + (p + i) * step + c, square[i]);
    }
  for (; c < heads * width; c++)
    for (int64_t l = 0; l < tile.count; l++) to[l * step + c] = from[c * LANES + l];
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

// Rows of the other side as they lie in memory, or a copy (`copies`).  Where there are registers for many sums, a copy has
// BLOCK columns of a row together, so that the compiler knows how far it is to the next row: an address made of two
// registers would cost an instruction of its own.
constexpr int64_t BLOCK = LANES;
inline int64_t blocked(int64_t width) { return (width + BLOCK - 1) / BLOCK * BLOCK; }
enum Lie { AS_GIVEN, COPIED };
template <Lie HOW> constexpr bool IN_BLOCKS = HOW == COPIED && ONE_EACH;

// to[lane] = sum_c own[c][lane] row_r[c] for R rows of the other side.
template <int R, Lie HOW>
POLYHEAD_INLINE void products(const number* own, const number* row, const Rows& x, int64_t width, number* to, int64_t step_to) {
  const int64_t step = IN_BLOCKS<HOW> ? BLOCK : x.n;
  Vec total[R] = {};
  for (int64_t left = width; left > 0; left -= BLOCK, row += x.b) {
    const int64_t columns = IN_BLOCKS<HOW> ? std::min(BLOCK, left) : width;
    for (int64_t c = 0; c < columns; c++, own += LANES) {
      Vec lane = load(own);
      POLYHEAD_UNROLL
      for (int r = 0; r < R; r++) total[r] += lane * row[r * step + c];
    }
    if (!IN_BLOCKS<HOW>) break;
  }
  POLYHEAD_UNROLL
  for (int r = 0; r < R; r++) store(to + r * step_to, total[r]);
}

// s[row][head][lane] of n rows of the other side; heads of either side may be shared by several (grouped keys).
template <Lie HOW>
void scores(const number* own, int share_own, const Rows& x, int share, int n, int heads, int64_t width, number* s) {
  for (int h = 0; h < heads; h++) {
    const number* mine = own + (h / share_own) * width * LANES;
    const number* from = x.at + (h / share) * x.h;
    auto some = [&](auto count, int64_t r) {
      products<decltype(count)::value, HOW>(mine, from + r * x.n, x, width, s + (r * heads + h) * LANES, heads * LANES);
    };
    steps(n, some, IN_BLOCKS<HOW> ? steps_of<2 * WIDE>(0, n, some) : 0);
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

// Gradients ds[row][head][lane] of some tiles of own rows, and those rows by `copy_rows`, with the distances between tiles.
struct Grads {
  const number *ds, *rows;
  int tiles;
  int64_t next_ds, next_rows;
};

inline void get(const number* from, Vec& x) { x = load(from); }
inline void get(const number* from, quad& x) { x = read<quad>(from); }
inline void put(number* to, const Vec& x) { store(to, x); }
inline void put(number* to, const quad& x) { write(to, x); }
// to_r[c] += sum_tiles sum_l ds_r[l] rows[l][c] for R rows of the other side, C times the columns of V, of which `some` are written.
template <class V, int C, int R>
POLYHEAD_INLINE void add_block(const Grads& x, int64_t step, int64_t wide, number* to, int64_t next, int64_t some) {
  constexpr int64_t all = sizeof(V) / sizeof(number);
  V total[R][C] = {};
  for (int tile = 0; tile < x.tiles; tile++) {
    const number *s = x.ds + tile * x.next_ds, *rows = x.rows + tile * x.next_rows;
    for (int l = 0; l < LANES; l++) {
      V row[C];
      POLYHEAD_UNROLL
      for (int c = 0; c < C; c++) get(rows + l * wide + c * all, row[c]);
      POLYHEAD_UNROLL
      for (int r = 0; r < R; r++)
        POLYHEAD_UNROLL
        for (int c = 0; c < C; c++) total[r][c] += row[c] * s[r * step + l];
    }
  }
  POLYHEAD_UNROLL
  for (int r = 0; r < R; r++)
    POLYHEAD_UNROLL
    for (int c = 0; c < C; c++) {
      V old;
      if (some == C * all) {
        get(to + r * next + c * all, old);
        put(to + r * next + c * all, old + total[r][c]);
      } else {
        number column[all];
        put(column, total[r][c]);
        for (int64_t i = 0; i < some; i++) to[r * next + i] += column[i];
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
      auto some = [&](auto what, auto count_of, int64_t columns, int64_t written) {
        add_block<decltype(what), decltype(count_of)::value, R>(own, step, wide, grad + c, next, written);
        c += columns, own.rows += columns;
      };
      while (ONE_EACH && c + 2 * LANES <= width) some(Vec(), std::integral_constant<int, 2>(), 2 * LANES, 2 * LANES);
      while (c + LANES <= width) some(Vec(), std::integral_constant<int, 1>(), LANES, LANES);
      while (c < width) some(quad(), std::integral_constant<int, 1>(), 4, std::min<int64_t>(4, width - c));
    });
}

// Rows of a sample, the first being `row`.
inline Rows rows_from(const Rows& x, int64_t b, int64_t row) { return {x.at + b * x.b + row * x.n, x.b, x.n, x.h}; }

// n rows of the other side, [head][row][width]: those of a head lie together, which avoids cache conflicts.
// Queries are multiplied by the scale here, as in the forward pass.  Otherwise a score would be rounded differently, and a
// sharp softmax would make an equally large error of its code.
inline Rows together(const Rows& x, int64_t b, int64_t row, int n, int heads, int64_t width, number factor, number* to) {
  const Rows from_row = rows_from(x, b, row);
  for (int r = 0; r < n; r++)
    for (int h = 0; h < heads; h++) {
      const number* from = from_row.at + r * x.n + h * x.h;
      for (int64_t c = 0; c < width; c++) to[(h * n + r) * width + c] = from[c] * factor;
    }
  return {to, 0, width, n * width};
}

// The same in blocks of columns, at the distances of `place`: its "samples" are blocks.
inline Rows in_blocks(const Rows& x, int64_t b, int64_t row, int n, int heads, int64_t width, number factor, number* to, const Rows& place) {
  const Rows from_row = rows_from(x, b, row);
  for (int r = 0; r < n; r++)
    for (int h = 0; h < heads; h++) {
      const number* from = from_row.at + r * x.n + h * x.h;
      number* block = to + r * place.n + h * place.h;
      int64_t c = 0;
      for (; c + BLOCK <= width; c += BLOCK, block += place.b) store(block, load(from + c) * factor);
      for (; c + 4 <= width; c += 4) write(block + c % BLOCK, read<quad>(from + c) * factor);
      for (; c < width; c++) block[c % BLOCK] = from[c] * factor;
    }
  return {to, place.b, place.n, place.h};
}

// Copies for `scores` and `own_grads`, [head][block][row][BLOCK]; `to` has room for blocked(width) columns.
inline Rows copies(const Rows& x, int64_t b, int64_t row, int n, int heads, int64_t width, number factor, number* to) {
  if (!ONE_EACH) return together(x, b, row, n, heads, width, factor, to);
  return in_blocks(x, b, row, n, heads, width, factor, to, {nullptr, n * BLOCK, BLOCK, n * blocked(width)});
}

// own[group][column][lane] += sum_r a[row r][head][lane] row_r[head][column], for n copied rows of the other side.
inline void own_grads(const number* a, int heads, int share, int n, const Rows& x, int64_t width, number* own) {
  const int64_t step = ONE_EACH ? BLOCK : x.n, block = ONE_EACH ? BLOCK : std::max<int64_t>(width, 1);
  for (int h = 0; h < heads; h++) {
    const number *mine = a + h * LANES, *from = x.at + h * x.h;
    number* to = own + (h / share) * width * LANES;
    for (int64_t first = 0; first < width; first += block, from += x.b, to += block * LANES)
      steps(std::min(block, width - first), [&](auto count, int64_t i) {
        constexpr int R = decltype(count)::value;
        Vec total[R] = {};
        combine<R>(total, mine, heads * LANES, from + i, step, n);
        POLYHEAD_UNROLL
        for (int c = 0; c < R; c++) store(to + (i + c) * LANES, load(to + (i + c) * LANES) + total[c]);
      });
  }
}

}  // namespace polyhead
