// Softmax attention, and relational attention, which reads relations by the same code; memory grows with t.
//
//   retrieved_ih = sum_j a_hij symbols_jh        related_ihr = sum_j a_hij rel_rij
//
// with p the softmax of the scores over keys (pairs.h), a = p times dropout, and rel_rij = act(q_rel_ir . k_rel_jr relation_scale).
// Softmax attention has no relations, and its symbols are the values.
// Backward, with row_max M and row_sum Z = sum_j e^(s - M), kept from the forward pass:
//
//   p_hij  = e^(s_hij - M_ih) / Z_ih                     da_hij = dretrieved_ih . symbols_jh + sum_r drelated_ihr rel_rij
//   ds_hij = a_hij da_hij - p_hij delta_ih               delta_ih = dretrieved_ih . retrieved_ih + drelated_ih . related_ih
//   drel_rij = sum_h a_hij drelated_ihr                  du_rij = drel_rij act'
//   dsymbols_jh = sum_i a_hij dretrieved_ih,   then dq, dk from ds and dq_rel, dk_rel from du
//
// Forward, one softmax over all keys without all scores in memory.  A tile of 16 queries goes through the keys, ROWS at a
// time.  Each lane, a query, keeps its row_max and its row_sum so far, and sums that are relative to this row_max.  When a
// larger score comes, everything summed before is multiplied by `rescale` = e^(old row_max - new row_max).  At the end each
// sum is divided by row_sum.  This is the online softmax of FlashAttention (Dao et al. 2022); the scores of ROWS keys stay
// in the first cache, and no other score exists.
//
// Backward, 16 keys in lanes go through the queries.  Row_max and row_sum of a query are known from the forward pass, so
// its p comes from its scores without another pass.  delta, the sum over keys that the gradient of a softmax subtracts, is
// the product of an output and its gradient, which Python computes.  dk and dv are sums in lanes; only dq is a sum over
// lanes (tiles.h).
//
// Relations lie beside heads: rel[relation][lane] has the same layout as the scores, so that a sum over relations is one
// more small product.  Symbols by offset come as (g e columns), because lane l of a tile needs the offset one further
// than lane l - 1: one load then reads the symbols of 16 pairs.
//
// Where to read on: vec.h (16 lanes), tiles.h (products, and why they have their sizes), pairs.h (masks, biases, the code),
// parallel.h (threads).
//
// Vaswani et al. 2017, Altabaa and Lafferty 2024 (arXiv 2405.16727).

#include "acts.h"
#include "parallel.h"
#include "tiles.h"

using namespace polyhead;

extern "C" struct AttentionCall {
  int64_t b, t, s, h, g, d, e, r, p;
  Rows q, k, q_rel, k_rel, symbols, dretrieved, drelated;
  number *retrieved, *related, *stats;      // (b t h e), (b t h r), (b h t 2)
  const number* delta;                      // (b h t)
  number *dq, *dk, *dq_rel, *dk_rel, *dsymbols;  // contiguous; dq and dq_rel have one for each part of the keys
  Limits limits;                            // own: queries
  BiasGrad dbias;
  const number* symbol_columns;             // (g e columns) of symbols by offset, or null; backwards in the forward pass
  int64_t num_columns, dsymbols_part;       // of symbols by offset, else 0; numbers of one part of their gradient
  int64_t sample_parts, key_parts;  // numbers of parts of the batch and of the keys; parts are independent
  double scale, relation_scale;
  int32_t act;
  Pool pool;
  int64_t threads;
};

namespace {

constexpr int ROWS = ONE_EACH ? 32 : 24;  // the most rows of the other side that are computed at once

// From this weight on, a pair has all of its softmax: the gradient of its score is set to 0.  The other keys, with a weight
// of 2 epsilon at most, would add less to it than roundings do.
constexpr number ALONE = 1 - 2 * std::numeric_limits<number>::epsilon();

struct Attention {
  const AttentionCall& c;
  Limits limits;
  int heads, groups, share, relations;  // `share`: query heads of a group of keys

  Attention(const AttentionCall& c, const Limits& limits)
      : c(c), limits(limits), heads(int(c.h)), groups(int(c.g)), share(int(c.h / c.g)), relations(int(c.r)) {}

  // rel[row][relation][lane] of n rows, in place of products; the slopes, too, if they are wanted.
  void relate(number* rel, number* slopes, int n) const {
    steps(int64_t(n) * relations, [&](auto count, int64_t at) {
      constexpr int R = decltype(count)::value;
      Vec z[R], y[R], slope[R];
      for (int i = 0; i < R; i++) z[i] = load(rel + (at + i) * LANES);
      activate<R>(c.act, z, y, slope);
      for (int i = 0; i < R; i++) store(rel + (at + i) * LANES, y[i]);
      for (int i = 0; slopes && i < R; i++) store(slopes + (at + i) * LANES, slope[i]);
    });
  }

  // ------------------------------------------------------------------------------------------------------- forward
  struct Queries {
    Tile tile;
    Range keys;
    number *q, *q_rel, *retrieved, *related, *row_max, *row_sum;
  };

  // From scores s[row][head][lane] to e^(s - row_max), the largest so far; earlier sums must be multiplied by `rescale`.
  void exponentiate(const Queries& own, int64_t key, int n, number* s, number* rescale) const {
    for (int r = 0; r < n; r++) add_bias(Sight(limits, own.tile, key + r), s + r * heads * LANES, heads, HIDDEN);
    for (int h = 0; h < heads; h++) {
      number* score = s + h * LANES;
      Vec old = load(own.row_max + h * LANES), row_max = old, sum = splat(0);
      for (int r = 0; r < n; r++) row_max = larger(load(score + r * heads * LANES), row_max);
      for (int r = 0; r < n; r++) {
        Vec x = exp(load(score + r * heads * LANES) - row_max);
        sum += x;
        store(score + r * heads * LANES, x);
      }
      Vec factor = exp(old - row_max);
      store(rescale + h * LANES, factor);
      store(own.row_max + h * LANES, row_max);
      store(own.row_sum + h * LANES, load(own.row_sum + h * LANES) * factor + sum);
    }
  }

  // Adds the sums of symbols by key, or of columns of symbols by offset, weighted by n codes u[row][head][lane].
  void retrieve(const Queries& own, const number* u, const Rows& symbols, int64_t key, int n, const number* rescale) const {
    for (int h = 0; h < heads; h++) {
      const int64_t g = h / share, step = c.symbol_columns ? c.num_columns : 1;
      const number* from = symbols.at + g * symbols.h;
      if (c.symbol_columns) from = c.symbol_columns + g * c.e * step + c.s - 1 - key + own.tile.row;
      number* to = own.retrieved + h * c.e * LANES;
      const Vec less = load(rescale + h * LANES);
      steps(c.e, [&](auto count, int64_t i) {
        constexpr int R = decltype(count)::value;
        Vec total[R] = {};
        if (c.symbol_columns == nullptr)
          combine<R>(total, u + h * LANES, heads * LANES, from + i, symbols.n, n);
        else
          for (int j = 0; j < n; j++) {
            Vec code = load(u + (j * heads + h) * LANES);
            POLYHEAD_UNROLL
            for (int k = 0; k < R; k++) total[k] += code * load(from + (i + k) * step - j);
          }
        POLYHEAD_UNROLL
        for (int k = 0; k < R; k++) store(to + (i + k) * LANES, load(to + (i + k) * LANES) * less + total[k]);
      });
    }
  }

  int64_t forward_size() const {
    int64_t own = heads * (c.d + c.e + c.r + 2) + c.r * c.p, other = groups * (blocked(c.d) + c.e) + c.r * blocked(c.p);
    return (TOGETHER * own + ROWS * (2 * heads + c.r) + heads) * LANES + ROWS * other + 1024;
  }

  // Queries from `row` on, in up to TOGETHER tiles, which read the same keys.
  void forward(int64_t b, int64_t row, Memory& memory) const {
    Queries own[TOGETHER];
    Range all = {c.s, 0};
    int tiles = 0;
    for (; tiles < TOGETHER && row < c.t; tiles++, row += LANES) {
      Queries& x = own[tiles];
      x.tile = tile_at(b, row, c.t);
      x.keys = others(limits, x.tile);
      x.q = memory.take(heads * c.d * LANES);
      x.q_rel = memory.take(c.r * c.p * LANES);
      x.retrieved = memory.zeros(heads * c.e * LANES);
      x.related = memory.zeros(heads * c.r * LANES);
      x.row_max = memory.take(heads * LANES);
      x.row_sum = memory.zeros(heads * LANES);
      std::fill(x.row_max, x.row_max + heads * LANES, LOWEST);
      pack(c.q, x.tile, heads, c.d, number(c.scale), x.q);
      pack(c.q_rel, x.tile, relations, c.p, number(c.relation_scale), x.q_rel);
      all = {std::min(all.from, x.keys.from), std::max(all.to, x.keys.to)};
    }
    number *s = memory.take(ROWS * heads * LANES), *dropped = memory.take(ROWS * heads * LANES);
    number *rel = memory.take(ROWS * c.r * LANES), *rescale = memory.take(heads * LANES);
    number *k_at = memory.take(ROWS * groups * blocked(c.d)), *k_rel_at = memory.take(ROWS * c.r * blocked(c.p));
    number* symbols_at = memory.take(ROWS * groups * c.e);
    for (int64_t at = all.from; at < all.to; at += ROWS) {
      int n = int(std::min<int64_t>(ROWS, all.to - at));
      Rows k = copies(c.k, b, at, n, groups, c.d, 1.0f, k_at), k_rel = copies(c.k_rel, b, at, n, relations, c.p, 1.0f, k_rel_at);
      Rows symbols = c.symbol_columns ? Rows() : together(c.symbols, b, at, n, groups, c.e, 1.0f, symbols_at);
      for (int i = 0; i < tiles; i++) {
        const Queries& x = own[i];
        if (x.keys.from >= at + n || x.keys.to <= at) continue;
        scores<COPIED>(x.q, 1, k, share, n, heads, c.d, s);
        exponentiate(x, at, n, s, rescale);
        const number* u = s;
        for (int r = 0; limits.keep.at && r < n; r++, u = dropped)
          drop(Sight(limits, x.tile, at + r), s + r * heads * LANES, dropped + r * heads * LANES, heads);
        retrieve(x, u, symbols, at, n, rescale);
        scores<COPIED>(x.q_rel, 1, k_rel, 1, n, relations, c.p, rel);
        relate(rel, nullptr, n);
        for (int h = 0; h < heads; h++)
          for (int r = 0; r < relations; r++) {
            number* to = x.related + (h * relations + r) * LANES;
            store(to, load(to) * load(rescale + h * LANES));
          }
        outer(x.related, c.r, 0, u, heads, rel, c.r * LANES, c.r, n);
      }
    }
    for (int i = 0; i < tiles; i++) finish(own[i]);
  }

  void finish(const Queries& x) const {
    for (int h = 0; h < heads; h++) {
      Vec total = load(x.row_sum + h * LANES);
      Vec inverse_row_sum = choose(total <= 0.0f, splat(0), splat(1) / total);
      for (int64_t i = 0; i < c.e; i++) {
        number* to = x.retrieved + (h * c.e + i) * LANES;
        store(to, load(to) * inverse_row_sum);
      }
      for (int64_t i = 0; i < c.r; i++) {
        number* to = x.related + (h * c.r + i) * LANES;
        store(to, load(to) * inverse_row_sum);
      }
      store(x.row_sum + h * LANES, inverse_row_sum);
      number* stats = c.stats + 2 * ((x.tile.b * c.h + h) * c.t + x.tile.row);
      for (int64_t l = 0; l < x.tile.count; l++) stats[2 * l] = x.row_max[h * LANES + l], stats[2 * l + 1] = x.row_sum[h * LANES + l];
    }
    int64_t at = x.tile.b * c.t + x.tile.row;
    unpack(x.retrieved, x.tile, heads, c.e, c.retrieved + at * c.h * c.e, c.h * c.e);
    unpack(x.related, x.tile, heads, c.r, c.related + at * c.h * c.r, c.h * c.r);
  }

  // ------------------------------------------------------------------------------------------------------ backward
  // The part da[row][head][lane] that comes through symbols by offset; adds their gradient to `to`.
  void by_offset(const Tile& tile, int64_t query, int n, const number* u, const Rows& dretrieved, number* da, number* to) const {
    for (int r = 0; r < n; r++)
      for (int h = 0; h < heads; h++) {
        const number* dout = dretrieved.at + r * dretrieved.n + h * dretrieved.h;
        int64_t at = (h / share) * c.e * c.num_columns + tile.row - (query + r) + c.t - 1;
        Vec code = load(u + (r * heads + h) * LANES), total = splat(0);
        for (int64_t i = 0; i < c.e; i++, at += c.num_columns) {
          total += load(c.symbol_columns + at) * dout[i];
          store(to + at, load(to + at) + code * dout[i]);
        }
        store(da + (r * heads + h) * LANES, total);
      }
  }

  // Adds the part of da that comes through relations; du replaces rel.
  void relations_back(const Tile& tile, int64_t query, int n, const number* u, number* rel, const number* slopes,
                      number* dout_by_relation, number* da) const {
    for (int r = 0; r < n; r++) {
      const number *dout = c.drelated.at + tile.b * c.drelated.b + (query + r) * c.drelated.n, *code = u + r * heads * LANES;
      number *to = da + r * heads * LANES, *own = rel + r * relations * LANES;
      const number* slope = slopes + r * relations * LANES;
      for (int h = 0; h < heads; h++)
        for (int i = 0; i < relations; i++) dout_by_relation[i * heads + h] = dout[h * c.drelated.h + i];
      steps(heads, [&](auto count, int64_t h) {
        constexpr int R = decltype(count)::value;
        Vec total[R] = {};
        combine<R>(total, own, LANES, dout_by_relation + h, heads, relations);
        for (int i = 0; i < R; i++) store(to + (h + i) * LANES, load(to + (h + i) * LANES) + total[i]);
      });
      steps(relations, [&](auto count, int64_t at) {
        constexpr int R = decltype(count)::value;
        Vec total[R] = {};
        combine<R>(total, code, LANES, dout + at, c.drelated.h, heads);
        for (int i = 0; i < R; i++) store(own + (at + i) * LANES, total[i] * load(slope + (at + i) * LANES));
      });
    }
  }

  struct Keys {
    Tile tile;
    Range queries;
    number *k, *v, *k_rel, *dk, *dv, *dk_rel;
  };

  int64_t backward_size() const {
    int64_t own = 2 * groups * (c.d + c.e) + 2 * c.r * c.p, rows = groups * padded(c.d) + c.r * padded(c.p);
    int64_t other = heads * (blocked(c.d) + blocked(c.e)) + c.r * blocked(c.p);
    return (PAIR * (own + rows + ROWS * (heads + c.r)) + ROWS * (2 * heads + c.r)) * LANES + ROWS * other + heads * c.r + 1024 +
           (c.symbol_columns ? groups * c.e * c.num_columns : 0);
  }

  // A part of the keys, some tiles at a time; dq and dq_rel are those of the part.
  void backward(int64_t b, Range part_keys, Memory& memory, number* dq, number* dq_rel, number* dsymbols, const BiasGrad& dbias) const {
    Keys own[PAIR];
    for (Keys& x : own) {
      x.k = memory.take(groups * c.d * LANES), x.dk = memory.take(groups * c.d * LANES);
      x.v = memory.take(groups * c.e * LANES), x.dv = memory.take(groups * c.e * LANES);
      x.k_rel = memory.take(c.r * c.p * LANES), x.dk_rel = memory.take(c.r * c.p * LANES);
    }
    const int64_t of_k = groups * LANES * padded(c.d), of_k_rel = c.r * LANES * padded(c.p);
    number *k_rows = memory.take(PAIR * of_k), *k_rel_rows = memory.take(PAIR * of_k_rel);
    const int64_t of_da = ROWS * heads * LANES, of_rel = ROWS * c.r * LANES;
    number *code = memory.take(of_da), *dropped = memory.take(of_da), *da = memory.take(PAIR * of_da);
    number *rel = memory.take(PAIR * of_rel), *slopes = memory.take(of_rel), *dout_by_relation = memory.take(c.r * heads);
    number *q_at = memory.take(ROWS * heads * blocked(c.d)), *dout_at = memory.take(ROWS * heads * blocked(c.e));
    number* q_rel_at = memory.take(ROWS * c.r * blocked(c.p));
    number* by_column = memory.take(c.symbol_columns ? groups * c.e * c.num_columns : 0);
    for (int64_t row = part_keys.from; row < part_keys.to; row += PAIR * LANES) {
      int tiles = 0;
      Range all = {c.t, 0};
      for (; tiles < PAIR && row + tiles * LANES < part_keys.to; tiles++) {
        Keys& x = own[tiles];
        begin(x, tile_at(b, row + tiles * LANES, c.s), k_rows + tiles * of_k, k_rel_rows + tiles * of_k_rel);
        all = {std::min(all.from, x.queries.from), std::max(all.to, x.queries.to)};
      }
      const Range near = {row - all.to + c.t, std::min(row + PAIR * LANES - all.from + c.t, c.num_columns)};
      for (int64_t i = 0; c.symbol_columns && i < groups * c.e; i++)
        std::fill(by_column + i * c.num_columns + near.from, by_column + i * c.num_columns + near.to, 0.0f);
      for (int64_t at = all.from; at < all.to; at += ROWS) {
        int n = int(std::min<int64_t>(ROWS, all.to - at));
        Rows q = copies(c.q, b, at, n, heads, c.d, number(c.scale), q_at);
        Rows q_rel = copies(c.q_rel, b, at, n, relations, c.p, number(c.relation_scale), q_rel_at);
        Rows dout = (c.symbol_columns ? together : copies)(c.dretrieved, b, at, n, heads, c.e, 1.0f, dout_at);
        for (int i = 0; i < tiles; i++) {
          const Keys& x = own[i];
          number *ds = da + i * of_da, *du = rel + i * of_rel;
          scores<COPIED>(x.k, share, q, 1, n, heads, c.d, code);
          const number* u = codes(x.tile, at, n, code, dropped);
          if (c.symbol_columns) {
            by_offset(x.tile, at, n, u, dout, ds, by_column);
          } else {
            scores<COPIED>(x.v, share, dout, 1, n, heads, c.e, ds);
            own_grads(u, heads, share, n, dout, c.e, x.dv);
          }
          if (relations) {
            scores<COPIED>(x.k_rel, 1, q_rel, 1, n, relations, c.p, du);
            relate(du, slopes, n);
            relations_back(x.tile, at, n, u, du, slopes, dout_by_relation, ds);
          }
          score_grads(x.tile, at, n, code, u, ds);
          for (int r = 0; dbias.at && r < n; r++) dbias.add(x.tile, at + r, ds + r * heads * LANES, heads);
          own_grads(ds, heads, share, n, q, c.d, x.dk);
          own_grads(du, relations, 1, n, q_rel, c.p, x.dk_rel);
        }
        other_grads({da, k_rows, tiles, of_da, of_k}, heads, share, n, c.d, dq + at * c.h * c.d);
        other_grads({rel, k_rel_rows, tiles, of_rel, of_k_rel}, relations, 1, n, c.p, dq_rel + at * c.r * c.p);
      }
      for (int i = 0; i < tiles; i++) finish(own[i]);
      // Sums of few pairs, then of these: with all pairs in one sum, roundings would add up.
      for (int64_t i = 0; c.symbol_columns && i < groups * c.e; i++)
        for (int64_t n = near.from; n < near.to; n++) dsymbols[i * c.num_columns + n] += by_column[i * c.num_columns + n];
    }
  }

  void begin(Keys& x, const Tile& tile, number* k_rows, number* k_rel_rows) const {
    x.tile = tile;
    x.queries = others(limits, tile);
    pack(c.k, tile, groups, c.d, 1.0f, x.k);
    pack(c.k_rel, tile, relations, c.p, 1.0f, x.k_rel);
    if (c.symbol_columns == nullptr) pack(c.symbols, tile, groups, c.e, 1.0f, x.v);
    copy_rows(c.k, tile, groups, c.d, number(c.scale), k_rows);
    copy_rows(c.k_rel, tile, relations, c.p, number(c.relation_scale), k_rel_rows);
    std::fill(x.dk, x.dk + groups * c.d * LANES, 0.0f);
    std::fill(x.dv, x.dv + groups * c.e * LANES, 0.0f);
    std::fill(x.dk_rel, x.dk_rel + c.r * c.p * LANES, 0.0f);
  }

  void finish(const Keys& x) const {
    int64_t at = x.tile.b * c.s + x.tile.row;
    unpack(x.dk, x.tile, groups, c.d, c.dk + at * c.g * c.d, c.g * c.d);
    unpack(x.dk_rel, x.tile, relations, c.p, c.dk_rel + at * c.r * c.p, c.r * c.p);
    if (c.symbol_columns == nullptr) unpack(x.dv, x.tile, groups, c.e, c.dsymbols + at * c.g * c.e, c.g * c.e);
  }

  // From scores [row][head][lane] to p in place; the result is p times dropout.
  const number* codes(const Tile& tile, int64_t query, int n, number* code, number* dropped) const {
    for (int r = 0; r < n; r++) {
      Sight sight(limits, tile, query + r);
      number* p = code + r * heads * LANES;
      add_bias(sight, p, heads, HIDDEN);
      for (int h = 0; h < heads; h++) {
        const number* stats = c.stats + 2 * ((tile.b * c.h + h) * c.t + query + r);
        Vec share = exp(load(p + h * LANES) + -stats[0]) * stats[1];
        store(p + h * LANES, sight.only(h, share));  // a row's statistics may be NaN, and hidden pairs stay 0
      }
      if (limits.keep.at) drop(sight, p, dropped + r * heads * LANES, heads);
    }
    return limits.keep.at ? dropped : code;
  }

  // ds = a da - p delta, in place of da.
  void score_grads(const Tile& tile, int64_t query, int n, const number* p, const number* u, number* da) const {
    for (int r = 0; r < n; r++) {
      Sight sight(limits, tile, query + r);
      for (int h = 0; h < heads; h++) {
        int64_t at = (r * heads + h) * LANES;
        number delta = c.delta[(tile.b * c.h + h) * c.t + query + r];
        Vec mine = load(p + at), grad = load(da + at);
        Vec ds = choose(mine > ALONE, grad - grad, load(u + at) * grad - mine * delta);  // NaN stays NaN
        store(da + at, sight.only(h, ds));
      }
    }
  }
};

bool forward(const AttentionCall& c) {
  Attention run(c, c.limits);
  int64_t jobs = (c.t + LANES * TOGETHER - 1) / (LANES * TOGETHER);
  return each({c.pool, c.threads}, c.b * jobs, run.forward_size(), [&](int64_t job, Memory& memory) {
    run.forward(job / jobs, job % jobs * LANES * TOGETHER, memory);
  });
}

bool backward(const AttentionCall& c) {
  Attention run(c, c.limits.turned());
  return each_key_part({c.pool, c.threads}, c.b, c.s, c.sample_parts, c.key_parts, run.backward_size(), [&](int64_t b, Range keys, int64_t sample_part, int64_t key_part, Memory& memory) {
    int64_t at = (key_part * c.b + b) * c.t;
    number* dsymbols = c.symbol_columns ? c.dsymbols + (sample_part * c.key_parts + key_part) * c.dsymbols_part : nullptr;
    run.backward(b, keys, memory, c.dq + at * c.h * c.d, c.dq_rel + at * c.r * c.p, dsymbols, c.dbias.part(sample_part, key_part));
  });
}

}  // namespace

// 0, or 1 if there was no memory.
extern "C" int polyhead_attention(const AttentionCall* call, int pass) {
  return (pass == BACKWARD ? backward(*call) : forward(*call)) ? 0 : 1;
}
