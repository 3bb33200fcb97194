// HYLA, hypernetwork linear attention, with memory that grows with t.
//
//   z_ij   = act(sum_h a_hij v_jh)          the pair's hidden layer
//   out_ih = sum_j a_hij z_ij               its output layer
//
// with a_hij the code: scores through their normaliser, times dropout (pairs.h).  Backward, with y = act(z):
//
//   dy_ij  = sum_h a_hij dout_ih            dz = dy act'(z)            da_hij = dout_ih . y_ij + dz_ij . v_jh
//   dv_jh  = sum_i a_hij dz_ij              ds = da through the normaliser
//   dq_ih  = sum_j ds_hij k_jh scale        dk_jh = sum_i ds_hij q_ih scale
//
// Why it is one loop.  A value network belongs to a pair of tokens, so its hidden layer z has as many numbers as there are
// pairs times columns: it must never be in memory.  Here a pair exists only in registers, from its scores to its output.
//
// What lies in which lane.  A vector has 16 lanes.  Forward, lane l is query l of a tile, and the loop takes one key after
// the other: the code of a pair is lane l of `heads` vectors, its hidden layer is lane l of one vector for each column.
// Sums over heads (rms of the code, z, out) add whole vectors.  Backward, lane l is key l, and the loop takes one query
// after the other: dk and dv are sums in lanes, too, and only dq is a sum over lanes.
//
//   forward    q[head][column][lane]   k, v as they lie   scores, code a[key][head][lane]   out[head][column][lane]
//   backward   k, v[head][column][lane]   q, dout as they lie   ds[query][head][lane]   dk, dv[head][column][lane]
//
// What is reused.  A key is read by 8 tiles of queries before the next keys come, so it is read from the first cache.  A
// code is held in a register while all columns of its pair are made (fused.h: up to 8 heads with relu or no activation,
// where 32 registers hold the codes and all sums), and otherwise while 2 WIDE columns are made (hyla_pairs.h).  The
// backward pass computes scores, codes and hidden layers again: reading them would take longer than that.
//
// Normalisers.  rms over heads, and a softmax over heads, need one pair only.  A softmax over keys needs row_max and
// row_sum of a query before its first value is read, because z is not linear in the code: so it has a pass of its own over
// the keys (`sums`), and in a backward pass one more (`stats`) for the sums that its gradient subtracts.
//
// Where to read on: vec.h (16 lanes), tiles.h (products, and why they have their sizes), pairs.h (masks, biases, the code),
// parallel.h (threads), hyla_one.h (one query over a long cache).
//
// Schug et al. 2024, "Attention as a hypernetwork", eq. 6.

#include "hyla_one.h"
#include "hyla_pairs.h"

using namespace polyhead;

extern "C" struct HylaCall {
  int64_t b, t, s, h, g, d, e;
  Rows q, k, v, dout;
  number *out, *dq, *dk, *dv;  // contiguous; dq has one for each part of the keys, and so has out for one query
  Limits limits;               // own: queries
  BiasGrad dbias;
  int64_t sample_parts, key_parts;  // numbers of parts of the batch and of the keys; parts are independent
  double scale, eps;
  int32_t normalise, act;
  Pool pool;
  int64_t threads;
};

namespace {

template <int H> struct Hyla : HylaPairs<HylaCall, H> {
  typedef HylaPairs<HylaCall, H> Of;
  using Of::c, Of::limits, Of::heads, Of::groups, Of::shared, Of::copied, Of::code_memory, Of::code_size, Of::make_code;
  using Of::values, Of::grad_memory, Of::Of;
  using typename Of::Code, typename Of::CodeGrads;

  // ------------------------------------------------------------------------------------------------------- forward
  // The largest score of each query and one over the sum of exponentials, [head][lane]; of a query without a key that is 0.
  void sums(const Tile& tile, const number* q, number* s, const Stats& stats) const {
    number *row_max = stats.row_max + tile.row, *row_sum = stats.inverse_row_sum + tile.row;
    std::fill(row_max, row_max + heads() * LANES, LOWEST);
    std::fill(row_sum, row_sum + heads() * LANES, 0.0f);
    Range range = others(limits, tile);
    for (int64_t at = range.from; at < range.to; at += OTHERS) {
      int n = int(std::min<int64_t>(OTHERS, range.to - at));
      scores<AS_GIVEN>(q, 1, rows_from(c.k, tile.b, at), shared(), n, heads(), c.d, s);
      for (int r = 0; r < n; r++) {
        Sight sight(limits, tile, at + r);
        number* score = s + r * heads() * LANES;
        add_bias(sight, score, heads(), HIDDEN);
        for (int h = 0; h < heads(); h++) {
          Vec x = load(score + h * LANES), old = load(row_max + h * LANES), higher = larger(x, old);
          store(row_sum + h * LANES, load(row_sum + h * LANES) * exp(old - higher) + exp(x - higher));
          store(row_max + h * LANES, higher);
        }
      }
    }
    for (int i = 0; i < heads() * LANES; i++) row_sum[i] = row_sum[i] == 0 ? 0.0f : 1 / row_sum[i];
  }

  int64_t forward_size() const {
    return code_size() + TOGETHER * heads() * LANES * (c.d + c.e + 2) + (OTHERS * COLUMNS + 64) * LANES +
           OTHERS * groups() * (blocked(c.d) + blocked(c.e));
  }

  // Queries from `row` on, in up to TOGETHER tiles, which read the same keys.
  void forward(int64_t b, int64_t row, Memory& memory) const {
    Code code = code_memory(memory);
    number* y = memory.take(OTHERS * COLUMNS * LANES);
    number *q[TOGETHER], *out[TOGETHER];
    Stats stats[TOGETHER];
    Tile tile[TOGETHER];
    Range range[TOGETHER], all = {c.s, 0};
    int tiles = 0;
    for (; tiles < TOGETHER && row < c.t; tiles++, row += LANES) {
      tile[tiles] = tile_at(b, row, c.t);
      q[tiles] = memory.take(heads() * c.d * LANES);
      out[tiles] = memory.zeros(heads() * c.e * LANES);
      stats[tiles] = tile_stats(tile[tiles], memory);
      pack(c.q, tile[tiles], heads(), c.d, number(c.scale), q[tiles]);
      if (over_keys(c.normalise)) sums(tile[tiles], q[tiles], code.a, stats[tiles]);
      range[tiles] = others(limits, tile[tiles]);
      all = {std::min(all.from, range[tiles].from), std::max(all.to, range[tiles].to)};
    }
    number *k_at = memory.take(OTHERS * groups() * blocked(c.d)), *v_at = memory.take(OTHERS * groups() * blocked(c.e));
    for (int64_t at = all.from; at < all.to; at += OTHERS) {
      int taken = int(std::min<int64_t>(OTHERS, all.to - at));
      Rows k = copies(c.k, b, at, taken, groups(), c.d, 1.0f, k_at), v = copied(c.v, b, at, taken, groups(), v_at);
      for (int i = 0; i < tiles; i++) {
        int64_t from = std::max(at, range[i].from), to = std::min(at + OTHERS, range[i].to);
        if (from >= to) continue;
        int n = int(to - from);
        scores<COPIED>(q[i], 1, rows_from(k, 0, from - at), shared(), n, heads(), c.d, code.a);
        make_code(tile[i], from, n, stats[i], code);
        values(rows_from(v, 0, from - at), n, code, y, out[i]);
      }
    }
    for (int i = 0; i < tiles; i++) {
      number* to = c.out + (b * c.t + tile[i].row) * c.h * c.e;
      unpack(out[i], tile[i], heads(), c.e, to, c.h * c.e);
    }
  }

  // ------------------------------------------------------------------------------------------------------ backward
  // Stats of a tile of queries in memory of its own.
  Stats tile_stats(const Tile& tile, Memory& memory) const {
    number *row_max = memory.take(heads() * LANES), *inverse_row_sum = memory.take(heads() * LANES);
    return {row_max - tile.row, inverse_row_sum - tile.row, 0, LANES, 1, 0};
  }

  // All stats of a tile of queries, written to those of a call.
  void stats(int64_t b, int64_t row, Memory& memory, const Stats& to) const {
    Code code = code_memory(memory);
    CodeGrads grads = grad_memory(memory);
    Tile tile = tile_at(b, row, c.t);
    Stats own = tile_stats(tile, memory);
    number *q = memory.take(heads() * c.d * LANES), *dout = memory.take(heads() * c.e * LANES);
    number *total = memory.zeros(heads() * LANES), *rest = memory.zeros(heads() * LANES), *weight = memory.zeros(heads() * LANES);
    pack(c.q, tile, heads(), c.d, number(c.scale), q);
    pack(c.dout, tile, heads(), c.e, 1.0f, dout);
    sums(tile, q, code.a, own);
    Range range = others(limits, tile);
    for (int64_t at = range.from; at < range.to; at += OTHERS) {
      int n = int(std::min<int64_t>(OTHERS, range.to - at));
      scores<AS_GIVEN>(q, 1, rows_from(c.k, b, at), shared(), n, heads(), c.d, code.a);
      make_code(tile, at, n, own, code);
      this->template pairs<false>(rows_from(c.v, b, at), n, code, dout, nullptr, grads, nullptr);
      for (int r = 0; r < n; r++) {
        number *a = code.a + r * heads() * LANES, *da = grads.of_dout + r * heads() * LANES;
        if (limits.keep.at) drop(Sight(limits, tile, at + r), da, da, heads());
        through_heads(c.normalise, load(code.scale + r * LANES), a, da, heads());
        for (int h = 0; h < heads() * LANES; h++) {
          number part = a[h] * da[h];
          total[h] += part;
          rest[h] += a[h] > MOST ? 0.0f : part;
          weight[h] += a[h] > MOST ? 0.0f : a[h];
        }
      }
    }
    for (int h = 0; h < heads(); h++) {
      int64_t at = b * to.b + h * to.h + row;
      store(to.row_max + at, load(own.row_max + row + h * LANES));
      store(to.inverse_row_sum + at, load(own.inverse_row_sum + row + h * LANES));
      store(to.delta + at, load(total + h * LANES));
      store(to.rest + at, load(rest + h * LANES));
      store(to.weight + at, load(weight + h * LANES));
    }
  }

  struct Keys {
    Tile tile;
    Range queries;
    number *k, *v, *dk, *dv;
  };

  int64_t backward_size() const {
    int64_t own = groups() * (2 * c.d + 2 * c.e + padded(c.d)) + OTHERS * heads();
    return 2 * code_size() + (PAIR * own + OTHERS * COLUMNS + 64) * LANES + OTHERS * heads() * (blocked(c.d) + blocked(c.e));
  }

  // A part of the keys, some tiles at a time; dq is that of the part.
  void backward(int64_t b, Range part_keys, Memory& memory, const Stats& stats, number* dq, const BiasGrad& dbias) const {
    Keys own[PAIR];
    for (Keys& x : own) {
      x.k = memory.take(groups() * c.d * LANES), x.dk = memory.take(groups() * c.d * LANES);
      x.v = memory.take(groups() * c.e * LANES), x.dv = memory.take(groups() * c.e * LANES);
    }
    const int64_t of_da = OTHERS * heads() * LANES, of_rows = groups() * LANES * padded(c.d);
    Code code = code_memory(memory);
    number *da = memory.take(PAIR * of_da), *of_v = memory.take(shared() > 1 ? OTHERS * groups() * LANES : 0);
    number *rows = memory.take(PAIR * of_rows), *dz = memory.take(OTHERS * COLUMNS * LANES);
    number *q_at = memory.take(OTHERS * heads() * blocked(c.d)), *dout_at = memory.take(OTHERS * heads() * blocked(c.e));
    for (int64_t row = part_keys.from; row < part_keys.to; row += PAIR * LANES) {
      int tiles = 0;
      Range all = {c.t, 0};
      for (; tiles < PAIR && row + tiles * LANES < part_keys.to; tiles++) {
        Keys& x = own[tiles];
        begin(x, tile_at(b, row + tiles * LANES, c.s), rows + tiles * of_rows);
        all = {std::min(all.from, x.queries.from), std::max(all.to, x.queries.to)};
      }
      for (int64_t at = all.from; at < all.to; at += OTHERS) {
        int n = int(std::min<int64_t>(OTHERS, all.to - at)), first = tiles, end = 0;
        Rows q = copies(c.q, b, at, n, heads(), c.d, number(c.scale), q_at), dout = copied(c.dout, b, at, n, heads(), dout_at);
        for (int i = 0; i < tiles; i++) {
          const Keys& x = own[i];
          if (x.queries.from >= at + n || x.queries.to <= at) continue;
          first = std::min(first, i), end = i + 1;  // queries of later keys come later: no tile between is left out
          number* ds = da + i * of_da;
          scores<COPIED>(x.k, shared(), q, 1, n, heads(), c.d, code.a);
          make_code(x.tile, at, n, stats, code);
          this->template pairs<true>(dout, n, code, x.v, dz, {ds, shared() > 1 ? of_v : ds}, x.dv);
          score_grads(x.tile, at, n, stats, code, ds, dbias);
          own_grads(ds, heads(), shared(), n, q, c.d, x.dk);
        }
        if (first < end)
          other_grads({da + first * of_da, rows + first * of_rows, end - first, of_da, of_rows}, heads(), shared(), n, c.d, dq + at * c.h * c.d);
      }
      for (int i = 0; i < tiles; i++) {
        const Keys& x = own[i];
        int64_t to = b * c.s + x.tile.row;
        unpack(x.dk, x.tile, groups(), c.d, c.dk + to * c.g * c.d, c.g * c.d);
        unpack(x.dv, x.tile, groups(), c.e, c.dv + to * c.g * c.e, c.g * c.e);
      }
    }
  }

  void begin(Keys& x, const Tile& tile, number* rows) const {
    x.tile = tile;
    x.queries = others(limits, tile);
    pack(c.k, tile, groups(), c.d, 1.0f, x.k);
    pack(c.v, tile, groups(), c.e, 1.0f, x.v);
    copy_rows(c.k, tile, groups(), c.d, number(c.scale), rows);
    std::fill(x.dk, x.dk + groups() * c.d * LANES, 0.0f);
    std::fill(x.dv, x.dv + groups() * c.e * LANES, 0.0f);
  }

  // From gradients of a code, with dropout, to those of the scores.
  void score_grads(const Tile& tile, int64_t query, int n, const Stats& stats, const Code& code, number* ds, const BiasGrad& dbias) const {
    for (int r = 0; r < n; r++) {
      Sight sight(limits, tile, query + r);
      number *a = code.a + r * heads() * LANES, *da = ds + r * heads() * LANES;
      if (limits.keep.at) drop(sight, da, da, heads());
      through_heads(c.normalise, load(code.scale + r * LANES), a, da, heads());
      through_keys(c.normalise, sight, stats, a, da, heads());
      if (dbias.at) dbias.add(tile, query + r, da, heads());
    }
  }
};

template <int H> bool forward(const HylaCall& c) {
  Hyla<H> hyla(c, c.limits);
  int64_t jobs = (c.t + LANES * TOGETHER - 1) / (LANES * TOGETHER);
  return each({c.pool, c.threads}, c.b * jobs, hyla.forward_size(), [&](int64_t job, Memory& memory) {
    hyla.forward(job / jobs, job % jobs * LANES * TOGETHER, memory);
  });
}

template <int H> bool backward(const HylaCall& c) {
  Hyla<H> queries(c, c.limits), keys(c, c.limits.turned());
  Team team = {c.pool, c.threads};
  const int64_t tiles = (c.t + LANES - 1) / LANES, rows = tiles * LANES;
  const bool needed = over_keys(c.normalise);
  const int64_t numbers = needed ? c.b * c.h * rows : 0;
  Memory memory(5 * numbers);
  if (memory.failed()) return false;
  number *row_max = memory.take(numbers), *inverse_row_sum = memory.take(numbers), *delta = memory.take(numbers);
  number *rest = memory.take(numbers), *weight = memory.take(numbers);
  Stats stats = {row_max, inverse_row_sum, c.h * rows, rows, 0, 1, delta, rest, weight};
  bool done = !needed || each(team, c.b * tiles, queries.backward_size(), [&](int64_t job, Memory& own) {
    queries.stats(job / tiles, job % tiles * LANES, own, stats);
  });
  return done && each_key_part(team, c.b, c.s, c.sample_parts, c.key_parts, keys.backward_size(),
                            [&](int64_t b, Range keys_of_part, int64_t sample_part, int64_t key_part, Memory& own) {
    keys.backward(b, keys_of_part, own, stats, c.dq + (key_part * c.b + b) * c.t * c.h * c.d, c.dbias.part(sample_part, key_part));
  });
}

template <int H> int run(const HylaCall& c, int pass) { return (pass == BACKWARD ? backward<H>(c) : forward<H>(c)) ? 0 : 1; }

}  // namespace

// 0, or 1 if there was no memory.
extern "C" int polyhead_hyla(const HylaCall* call, int pass) {
  if (pass == ONE_QUERY) return HylaOne<HylaCall>(*call).run() ? 0 : 1;
  switch (call->g == call->h ? call->h : 0) {
    case 1: return run<1>(*call, pass);
    case 2: return run<2>(*call, pass);
    case 4: return run<4>(*call, pass);
    case 8: return run<8>(*call, pass);
    case 16: return run<16>(*call, pass);
    default: return run<0>(*call, pass);
  }
}
