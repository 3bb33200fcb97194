// The pairs of a query and a key: which are visible, their biases, dropout, and the code.
//
// A tile holds 16 rows of one side in lanes (its own: queries in the forward pass, keys in the backward pass) and goes
// through the other side row by row.  The functions of this file serve both passes.

#pragma once
#include <algorithm>
#include <limits>

#include "vec.h"

namespace polyhead {

// (b n h width), in numbers from one to the next; the width is contiguous.
struct Rows {
  const number* at;
  int64_t b, n, h;
};

// (b h own other): a mask, bias or dropout; a stride of 0 says it is the same for all.
template <class T> struct Pairs {
  T* at;
  int64_t b, h, own, other;
  Pairs turned() const { return {at, b, h, other, own}; }
};

struct Limits {
  const int32_t *first, *end;  // for each own row, the visible rows of the other side; null if all are
  const int32_t *low, *high;   // for each other row, the visible own ones
  Pairs<const number> bias, keep;
  Pairs<const uint8_t> mask;
  int64_t owns, others, hides;  // may the bias be -inf?
  Limits turned() const {
    return {low, high, first, end, bias.turned(), keep.turned(), mask.turned(), others, owns, hides};
  }
};

// Own rows `row` to `row` + 16 of sample b, of which `count` exist.
struct Tile {
  int64_t b, row, count;
};

struct Range {
  int64_t from, to;
};

inline Tile tile_at(int64_t b, int64_t row, int64_t owns) { return {b, row, owns - row < LANES ? owns - row : LANES}; }

// The rows of the other side that any row of a tile sees.
inline Range others(const Limits& limits, const Tile& tile) {
  if (limits.first == nullptr) return {0, limits.others};
  return {limits.first[tile.row], limits.end[tile.row + tile.count - 1]};
}

// The own rows of a tile, in one head and with one other row, whose first number is at `from`.
template <class T> POLYHEAD_INLINE Vec lanes_from(const T* from, int64_t own, int64_t count) {
  number lane[LANES];
  if (own == 1 && count == LANES) {
    for (int l = 0; l < LANES; l++) lane[l] = number(from[l]);
  } else if (own == -1 && count == LANES) {  // a bias by offset, of queries
    for (int l = 0; l < LANES; l++) lane[l] = number((from - (LANES - 1))[LANES - 1 - l]);
  } else {
    std::fill(lane, lane + LANES, number(0));
    for (int64_t l = 0; l < count; l++) lane[l] = number(from[l * own]);
  }
  return load(lane);
}

template <class T> inline Vec lanes_of(const Pairs<T>& x, const Tile& tile, int64_t h, int64_t other) {
  return lanes_from(x.at + tile.b * x.b + h * x.h + tile.row * x.own + other * x.other, x.own, tile.count);
}

// Which rows of a tile see (or are seen by) another row, in each head: by range, mask, and -inf in the bias.
struct Sight {
  const Limits& limits;
  const Tile& tile;
  int64_t other;
  Mask all;    // what holds for all heads
  bool whole;  // nothing is hidden

  Sight(const Limits& limits, const Tile& tile, int64_t other) : limits(limits), tile(tile), other(other) {
    int64_t from = limits.low ? limits.low[other] - tile.row : 0, to = limits.high ? limits.high[other] - tile.row : LANES;
    to = to < tile.count ? to : tile.count;
    whole = from <= 0 && to >= LANES && limits.mask.at == nullptr && !limits.hides;
    if (whole) return;
    all = between(from, to);
    if (limits.mask.at && limits.mask.h == 0) all = all & (lanes_of(limits.mask, tile, 0, other) > 0.0f);
  }
  // ... in one head, of which `bias` is the bias.
  Mask of(int64_t h, const Vec& bias) const {
    Mask seen = all;
    if (limits.mask.at && limits.mask.h != 0) seen = seen & (lanes_of(limits.mask, tile, h, other) > 0.0f);
    return limits.hides ? seen & ~(bias <= HIDDEN) : seen;  // NaN is not hidden
  }
  Vec bias(int64_t h) const { return limits.bias.at ? lanes_of(limits.bias, tile, h, other) : splat(0); }
  // x, 0 at hidden pairs.
  Vec only(int64_t h, const Vec& x) const { return whole ? x : choose(of(h, bias(h)), x, splat(0)); }
};

enum Pass { FORWARD, BACKWARD, ONE_QUERY };  // as in structs.py; the last one is a forward pass of HYLA
enum Normalise { SOFTMAX, RMS_HEADS, NONE, SOFTMAX_RMS_HEADS, SOFTMAX_HEADS };  // as in spec/table.py

inline bool over_keys(int normalise) { return normalise == SOFTMAX || normalise == SOFTMAX_RMS_HEADS; }
// The score of a hidden pair before its normaliser.
inline number hidden_score(int normalise) { return normalise == RMS_HEADS || normalise == NONE ? 0.0f : HIDDEN; }
inline bool root_of_heads(int normalise) { return normalise == RMS_HEADS || normalise == SOFTMAX_RMS_HEADS; }

// Of each query and head, for a softmax over keys: the largest score, one over the sum of e^(score - row_max) over keys,
// and the sum over keys of p dp; of all keys but one with more than MOST of the weight, that sum and the sum of p.
struct Stats {
  number *row_max, *inverse_row_sum;
  int64_t b, h, own, other;
  number *delta = nullptr, *rest = nullptr, *weight = nullptr;
  Vec of(const number* at, const Tile& tile, int64_t head, int64_t row) const {
    const number* from = at + tile.b * b + head * h + tile.row * own + row * other;
    return own == 1 ? load(from) : splat(*from);
  }
};

// Add the bias to products [head][lane] of a pair; hidden scores become `hidden`.
inline void add_bias(const Sight& sight, number* s, int heads, number hidden) {
  const Pairs<const number>& bias = sight.limits.bias;
  if (sight.whole && bias.at != nullptr) {
    const number* from = bias.at + sight.tile.b * bias.b + sight.tile.row * bias.own + sight.other * bias.other;
    for (int h = 0; h < heads; h++, from += bias.h)
      store(s + h * LANES, load(s + h * LANES) + lanes_from(from, bias.own, sight.tile.count));
  }
  for (int h = 0; !sight.whole && h < heads; h++) {
    const Vec own = sight.bias(h);
    store(s + h * LANES, choose(sight.of(h, own), load(s + h * LANES) + own, splat(hidden)));
  }
}

// From scores [head][lane] of a pair to its code, in place; the result is one over the root of its mean square over heads.
//
//   a = s | e^s / sum_keys e^s | e^s / sum_h e^s,  then for rms  a / sqrt(mean_h a^2 + eps)
inline Vec normalise(int how, const Sight& sight, const Stats& stats, number* s, int heads, number eps) {
  Vec scale = splat(1);
  for (int h = 0; over_keys(how) && h < heads; h++) {
    Vec less = load(s + h * LANES) - stats.of(stats.row_max, sight.tile, h, sight.other);
    store(s + h * LANES, sight.only(h, exp(less) * stats.of(stats.inverse_row_sum, sight.tile, h, sight.other)));
  }
  if (how == SOFTMAX_HEADS) {
    Vec top = splat(LOWEST), total = splat(0);
    for (int h = 0; h < heads; h++) top = larger(load(s + h * LANES), top);
    for (int h = 0; h < heads; h++) {
      Vec x = exp(load(s + h * LANES) - top);
      total += x;
      store(s + h * LANES, x);
    }
    Vec share = choose(total <= 0.0f, splat(0), splat(1) / total);
    for (int h = 0; h < heads; h++) store(s + h * LANES, load(s + h * LANES) * share);
  }
  if (root_of_heads(how)) {
    Vec square = splat(0);
    for (int h = 0; h < heads; h++) square += load(s + h * LANES) * load(s + h * LANES);
    scale = splat(1) / root(square * (1.0f / number(heads)) + eps);
    for (int h = 0; h < heads; h++) store(s + h * LANES, load(s + h * LANES) * scale);
  }
  return scale;
}

// From the gradient of a code [head][lane], without dropout, to that of what its first softmax gave, or of the scores.
//
//   through rms  scale (da - a mean_h(a da));  through a softmax over heads  a (da - sum_h a da)
// and, for a softmax over keys, p, which the code is made of, in place of a.
inline void through_heads(int how, const Vec& scale, number* a, number* da, int heads) {
  if (how == NONE || how == SOFTMAX) return;
  Vec inner = splat(0);
  for (int h = 0; h < heads; h++) inner += load(a + h * LANES) * load(da + h * LANES);
  if (root_of_heads(how)) inner = inner * (1.0f / number(heads));
  for (int h = 0; h < heads; h++) {
    Vec code = load(a + h * LANES), grad = load(da + h * LANES);
    if (how == SOFTMAX_HEADS)
      store(da + h * LANES, code * (grad - inner));
    else
      store(da + h * LANES, scale * (grad - code * inner));
    if (how == SOFTMAX_RMS_HEADS) store(a + h * LANES, code / scale);
  }
}

// At most one key of a query has more of the weight, even if roundings differ from one pass to the other.
constexpr number MOST = 0.75f;

// ... and on to the scores: p (dp - delta), and 0 where the pair is hidden.  With nearly all of the weight, dp and delta
// are nearly the same; sums over the other keys then give the difference without cancellation:
//
//   dp - delta = dp weight - rest,  weight = sum_others p,  rest = sum_others p dp
inline void through_keys(int how, const Sight& sight, const Stats& stats, const number* p, number* da, int heads) {
  if (over_keys(how))
    for (int h = 0; h < heads; h++) {
      Vec mine = load(p + h * LANES), grad = load(da + h * LANES);
      Vec less = grad - stats.of(stats.delta, sight.tile, h, sight.other);
      Vec apart = grad * stats.of(stats.weight, sight.tile, h, sight.other) - stats.of(stats.rest, sight.tile, h, sight.other);
      store(da + h * LANES, mine * choose(mine > MOST, apart, less));
    }
  if (sight.whole) return;
  for (int h = 0; h < heads; h++) store(da + h * LANES, choose(sight.of(h, sight.bias(h)), load(da + h * LANES), splat(0)));
}

// a times its dropout, for one pair; `from` and `to` may be the same.
inline void drop(const Sight& sight, const number* from, number* to, int heads) {
  for (int h = 0; h < heads; h++)
    store(to + h * LANES, load(from + h * LANES) * lanes_of(sight.limits.keep, sight.tile, h, sight.other));
}

// The gradient of a bias, if it is wanted; each part of the samples and of the keys has one of its own.  A bias by offset,
// or of all samples, is added to thousands of times: in `number` the sum would lose more than its terms did.
struct BiasGrad {
  double* at;
  int64_t b, h, query, key, sample_part, key_part;  // strides; the last two lead from one part to the next
  // The gradient that part i of the samples and part j of the keys add to.
  BiasGrad part(int64_t i, int64_t j) const {
    return {at ? at + i * sample_part + j * key_part : nullptr, b, h, query, key, sample_part, key_part};
  }
  // Add ds[head][lane] of a tile of keys and a query.
  void add(const Tile& tile, int64_t row, const number* ds, int heads) const {
    for (int head = 0; head < heads; head++) {
      double* to = at + tile.b * b + head * h + row * query + tile.row * key;
      if (key == 1 && tile.count == LANES)
        for (int l = 0; l < LANES; l++) to[l] += ds[head * LANES + l];
      else
        for (int64_t l = 0; l < tile.count; l++) to[l * key] += ds[head * LANES + l];
    }
  }
};

}  // namespace polyhead
