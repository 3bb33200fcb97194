// HYLA's pairs in registers: few heads, and a hidden layer with no function to call.  Equations are in hyla.cpp.
//
// A code, the columns made of it and their sums fit into 32 vectors together, so no hidden layer is ever written, only
// its gradient.  Rows of the other side are copied in an order in which the compiler knows all distances: an address of
// two registers would cost an instruction of its own.

#pragma once
#include "acts.h"
#include "tiles.h"

namespace polyhead {

// Can H heads be fused, with such an act?
template <int H> constexpr bool FUSED = ONE_EACH && H > 0 && H <= 8;
inline bool plain(int act) { return act == RELU || act == IDENTITY; }

// Copies in the order that is read here, [block][row][head][column].
inline Rows by_row(const Rows& x, int64_t b, int64_t row, int n, int heads, int64_t width, number* to) {
  return in_blocks(x, b, row, n, heads, width, 1.0f, to, {nullptr, n * heads * BLOCK, heads * BLOCK, BLOCK});
}

// f(count, column, the column's place in the first row) for all columns, C or 1 of them at a time.
template <int C, class F> POLYHEAD_INLINE void each_column(const Rows& x, int64_t width, const F& f) {
  for (int64_t from = 0; from < width; from += BLOCK) {
    auto some = [&](auto count, int64_t c) { f(count, from + c, x.at + from / BLOCK * x.b + c); };
    int64_t columns = std::min(BLOCK, width - from);
    steps_of<1>(steps_of<C>(0, columns, some), columns, some);
  }
}

// out_h += sum_r w_rh act(sum_g w_rg v_rg), C columns of n rows; codes are w[row][head][lane].
template <int H, int C, bool CUT> POLYHEAD_INLINE void mix_columns(const number* w, const number* v, int n, number* out, int64_t step) {
  Vec total[H][C] = {};
  for (int r = 0; r < n; r++, w += H * LANES, v += H * BLOCK) {
    Vec code[H], half[2][C] = {}, z[C];  // two sums, so that neither waits for long
    POLYHEAD_UNROLL
    for (int h = 0; h < H; h++) {
      code[h] = hold(w + h * LANES);
      POLYHEAD_UNROLL
      for (int c = 0; c < C; c++) half[h % 2][c] += code[h] * v[h * BLOCK + c];
    }
    POLYHEAD_UNROLL
    for (int c = 0; c < C; c++) z[c] = half[0][c] + half[1][c];
    POLYHEAD_UNROLL
    for (int c = 0; c < C; c++) z[c] = CUT ? positive(z[c]) : z[c];
    POLYHEAD_UNROLL
    for (int h = 0; h < H; h++)
      POLYHEAD_UNROLL
      for (int c = 0; c < C; c++) total[h][c] += code[h] * z[c];
  }
  POLYHEAD_UNROLL
  for (int h = 0; h < H; h++)
    POLYHEAD_UNROLL
    for (int c = 0; c < C; c++) store(out + h * step + c * LANES, load(out + h * step + c * LANES) + total[h][c]);
}
template <int H> void mix(int act, const number* w, const Rows& v, int n, int64_t width, number* out) {
  each_column<(H > 2 ? 16 / H : 8)>(v, width, [&](auto count, int64_t at, const number* column) {
    constexpr int C = decltype(count)::value;
    if (act == RELU)
      mix_columns<H, C, true>(w, column, n, out + at * LANES, width * LANES);
    else
      mix_columns<H, C, false>(w, column, n, out + at * LANES, width * LANES);
  });
}

// The backward pass of C columns, with keys in lanes: da_rh += dout_rh . y_r + dz_r . v_h,  dv_h += sum_r w_rh dz_r.
template <int H, int C, bool CUT>
POLYHEAD_INLINE void unmix_columns(const number* w, const number* v, const number* dout, int n, int64_t step, number* dz, number* da) {
  for (int r = 0; r < n; r++, w += H * LANES, da += H * LANES, dout += H * BLOCK, dz += C * LANES) {
    Vec code[H], total[H];
    POLYHEAD_UNROLL
    for (int h = 0; h < H; h++) code[h] = hold(w + h * LANES), total[h] = load(da + h * LANES);
    for (int c = 0; c < C; c++) {
      Vec own[H], z = splat(0), dy = splat(0);
      POLYHEAD_UNROLL
      for (int h = 0; h < H; h++) {
        own[h] = hold(v + h * step + c * LANES);
        z += code[h] * own[h];
        dy += code[h] * dout[h * BLOCK + c];
      }
      Vec y = CUT ? positive(z) : z, grad = CUT ? choose(z <= 0.0f, splat(0), dy) : dy;
      store(dz + c * LANES, grad);
      POLYHEAD_UNROLL
      for (int h = 0; h < H; h++) total[h] = total[h] + y * dout[h * BLOCK + c] + grad * own[h];
    }
    POLYHEAD_UNROLL
    for (int h = 0; h < H; h++) store(da + h * LANES, total[h]);
  }
}
template <int H>
void unmix(int act, const number* w, const number* v, const Rows& dout, int n, int64_t width, number* dz, number* da, number* dv) {
  std::fill(da, da + n * H * LANES, 0.0f);
  each_column<8>(dout, width, [&](auto count, int64_t at, const number* column) {
    constexpr int C = decltype(count)::value;
    if (act == RELU)
      unmix_columns<H, C, true>(w, v + at * LANES, column, n, width * LANES, dz, da);
    else
      unmix_columns<H, C, false>(w, v + at * LANES, column, n, width * LANES, dz, da);
    outer(dv, width, at, w, H, dz, C * LANES, C, n);
  });
}

}  // namespace polyhead
