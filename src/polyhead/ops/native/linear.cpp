// Linear attention, with time and memory that grow with t.
//
//   out_i = scale sum_(j seen by i) (q_i . k_j) v_j
//
// Queries are taken 16 at a time.  A state S has the sum of k_j v_j^T over all keys that every query of such a chunk
// sees; it enters the state itself when it has been read.
//
//   out_i = scale (q_i S + sum_(own chunk, j seen by i) (q_i . k_j) v_j)
//
// The gradients are three such sums, two of them over rows in the reverse order:
//
//   dq_i = scale sum_(j seen by i) (dout_i . v_j) k_j
//   dk_j = scale sum_(i sees j) (v_j . dout_i) q_i        dv_j = scale sum_(i sees j) (k_j . q_i) dout_i
//
// Katharopoulos et al. 2020, eq. 16 to 20; Yang et al. 2024, "Gated linear attention", sec. 2.  Values lie in lanes.

#include "parallel.h"
#include "tiles.h"

using namespace polyhead;

extern "C" struct LinearCall {
  int64_t b, t, s, h, g, d, e;
  Rows q, k, v, dout;
  number *out, *dq, *dk, *dv;  // contiguous
  const int32_t* edges;        // rows edges[n] to edges[n + 1] are a sequence of their own; null if all are one
  int64_t sequences;
  int32_t causal;
  double scale;
  Pool pool;
  int64_t threads;
};

namespace {

// to[r][lane] += sum_i x[i][lane] y[r row + i step], for `rows` rows r.
template <int R>
POLYHEAD_INLINE void add_rows(number* to, const number* x, const number* y, int64_t row, int64_t step, int64_t n) {
  Vec total[R] = {};
  for (int64_t i = 0; i < n; i++) {
    Vec lane = load(x + i * LANES);
    POLYHEAD_UNROLL
    for (int r = 0; r < R; r++) total[r] += lane * y[r * row + i * step];
  }
  POLYHEAD_UNROLL
  for (int r = 0; r < R; r++) store(to + r * LANES, load(to + r * LANES) + total[r]);
}
inline void add_product(number* to, int64_t rows, const number* x, const number* y, int64_t row, int64_t step, int64_t n) {
  steps(rows, [&](auto count, int64_t r) { add_rows<decltype(count)::value>(to + r * LANES, x, y + r * row, row, step, n); });
}

// n rows of a head times a factor, one after the other.
inline void copy(const Rows& x, int64_t head, int64_t row, int64_t n, int64_t width, number factor, number* to) {
  for (int64_t r = 0; r < n; r++) {
    const number* from = x.at + (row + r) * x.n + head * x.h;
    for (int64_t c = 0; c < width; c++) to[r * width + c] = from[c] * factor;
  }
}

// The same by blocks of 16 columns, [block][row][lane], 0 behind the last column.
inline void copy_blocks(const Rows& x, int64_t head, int64_t row, int64_t n, int64_t width, number* to) {
  for (int64_t c0 = 0; c0 < width; c0 += LANES, to += LANES * LANES)
    for (int64_t r = 0; r < n; r++) {
      const number* from = x.at + (row + r) * x.n + head * x.h + c0;
      if (c0 + LANES <= width) {
        store(to + r * LANES, load(from));
      } else {
        store(to + r * LANES, splat(0));
        std::copy(from, from + width - c0, to + r * LANES);
      }
    }
}

// One sum of a group: query i sees keys up to i + offset.  Either several heads read or several are read.
struct Sum {
  Rows q, k, v;  // of the group's first head
  int64_t queries, keys, offset, d, e;
  int readers, senders;
  number factor, *out;
  int64_t out_row, out_head;

  int64_t blocks() const { return (e + LANES - 1) / LANES; }
  int64_t state_size() const { return blocks() * d * LANES; }
  int64_t out_size() const { return blocks() * LANES * LANES; }
  int64_t size() const { return state_size() + (readers + 2) * LANES * d + (readers + 1) * out_size() + LANES * LANES; }

  // n keys from `row` on, which enter the state.
  void enter(const number* k_rows, const number* v_rows, int64_t n, number* state) const {
    for (int64_t i = 0; i < blocks(); i++)
      add_product(state + i * d * LANES, d, v_rows + i * LANES * LANES, k_rows, 1, d, n);
  }

  // Adds the part of n queries' outputs that comes from m keys of their own chunk.
  void own(const number* q_rows, int64_t n, const number* k_lanes, const number* v_rows, int64_t m, number* scores, number* to) const {
    std::fill(scores, scores + LANES * LANES, 0.0f);
    add_product(scores, n, k_lanes, q_rows, d, 1, d);
    for (int64_t r = 0; r < n; r++)
      for (int64_t l = r + 1; l < LANES; l++) scores[r * LANES + l] = 0;
    for (int64_t i = 0; i < blocks(); i++)
      add_product(to + i * LANES * LANES, n, v_rows + i * LANES * LANES, scores, LANES, 1, m);
  }

  void write_out(const number* from, int reader, int64_t row, int64_t n) const {
    for (int64_t c0 = 0; c0 < e; c0 += LANES, from += LANES * LANES)
      for (int64_t r = 0; r < n; r++) {
        number* to = out + (row + r) * out_row + reader * out_head + c0;
        if (c0 + LANES <= e)
          store(to, load(from + r * LANES));
        else
          std::copy(from + r * LANES, from + r * LANES + e - c0, to);
      }
  }

  void run(Memory& memory) const {
    number *state = memory.zeros(state_size()), *q_rows = memory.take(readers * LANES * d);
    number *k_rows = memory.take(LANES * d), *k_lanes = memory.take(LANES * d), *v_rows = memory.take(out_size());
    number *scores = memory.take(LANES * LANES), *read = memory.take(readers * out_size());
    const int64_t first = std::min(queries, std::max<int64_t>(0, -offset));  // the first query that sees a key
    for (int64_t row = 0; row < first; row++)
      for (int h = 0; h < readers; h++) std::fill_n(out + row * out_row + h * out_head, e, 0.0f);
    const int64_t before = std::min(keys, first + offset);  // keys that all of them see
    for (int64_t row = 0; row < before; row += LANES)
      for (int h = 0; h < senders; h++) {
        const int64_t n = std::min<int64_t>(LANES, before - row);
        copy(k, h, row, n, d, 1.0f, k_rows);
        copy_blocks(v, h, row, n, e, v_rows);
        enter(k_rows, v_rows, n, state);
      }
    for (int64_t row = first; row < queries; row += LANES) {
      const int64_t n = std::min<int64_t>(LANES, queries - row), key = row + offset;
      const int64_t m = std::max<int64_t>(0, std::min(n, keys - key));
      std::fill(read, read + readers * out_size(), 0.0f);
      for (int h = 0; h < readers; h++) {
        copy(q, h, row, n, d, factor, q_rows + h * LANES * d);
        for (int64_t i = 0; i < blocks(); i++)
          add_product(read + h * out_size() + i * LANES * LANES, n, state + i * d * LANES, q_rows + h * LANES * d, d, 1, d);
      }
      for (int sender = 0; m > 0 && sender < senders; sender++) {
        copy(k, sender, key, m, d, 1.0f, k_rows);
        copy_blocks(v, sender, key, m, e, v_rows);
        for (int64_t c = 0; c < d; c++)
          for (int64_t l = 0; l < LANES; l++) k_lanes[c * LANES + l] = l < m ? k_rows[l * d + c] : 0.0f;
        for (int h = 0; h < readers; h++) own(q_rows + h * LANES * d, n, k_lanes, v_rows, m, scores, read + h * out_size());
        enter(k_rows, v_rows, m, state);
      }
      for (int h = 0; h < readers; h++) write_out(read + h * out_size(), h, row, n);
    }
  }
};

// Tensors of a sum over all samples, groups and sequences; `backwards`: rows in the reverse order.
struct Whole {
  const LinearCall& c;
  Rows q, k, v;
  number* out;
  int64_t d, e, readers, senders;
  bool backwards;

  Rows from(const Rows& x, int64_t b, int64_t head, const Range& rows) const {
    int64_t row = backwards && rows.to > rows.from ? rows.to - 1 : rows.from;
    return {x.at + b * x.b + row * x.n + head * x.h, 0, backwards ? -x.n : x.n, x.h};
  }

  // Columns of a sequence's rows in a group.
  Sum part(int64_t b, int64_t group, int64_t sequence, const Range& columns) const {
    Range queries = {0, backwards ? c.s : c.t}, keys = {0, backwards ? c.t : c.s};
    if (c.edges) queries = keys = {c.edges[sequence], c.edges[sequence + 1]};
    const int64_t t = queries.to - queries.from, s = keys.to - keys.from, heads = c.g * readers, rows = backwards ? c.s : c.t;
    const int64_t step = heads * e, row = backwards && t > 0 ? queries.to - 1 : queries.from;
    Rows values = from(v, b, group * senders, keys);
    values.at += columns.from;
    number* to = out + (b * rows + row) * step + group * readers * e + columns.from;
    return {from(q, b, group * readers, queries), from(k, b, group * senders, keys), values, t, s,
            !c.causal ? s : backwards ? 0 : s - t, d, columns.to - columns.from, int(readers), int(senders), number(c.scale),
            to, backwards ? -step : step, e};
  }

  // Groups of heads are worked on independently, and blocks of columns where there are more threads than groups.
  bool run() const {
    const int64_t sequences = c.edges ? c.sequences : 1, groups = c.b * c.g * sequences, blocks = (e + LANES - 1) / LANES;
    if (groups == 0 || blocks == 0) return true;
    const int64_t strips = std::min(blocks, std::max<int64_t>(1, c.threads / groups));
    auto columns = [&](int64_t strip) { return Range{strip * blocks / strips * LANES, std::min(e, (strip + 1) * blocks / strips * LANES)}; };
    const int64_t numbers = part(0, 0, 0, {0, e}).size();
    return each({c.pool, c.threads}, groups * strips, numbers, [&](int64_t job, Memory& memory) {
      const int64_t strip = job % strips, item = job / strips, sequence = item % sequences, group = item / sequences;
      part(group / c.g, group % c.g, sequence, columns(strip)).run(memory);
    });
  }
};

}  // namespace

// 0, or 1 if there was no memory.
extern "C" int polyhead_linear(const LinearCall* call, int pass) {
  const LinearCall& c = *call;
  const int64_t share = c.h / c.g;
  if (pass != BACKWARD) return Whole{c, c.q, c.k, c.v, c.out, c.d, c.e, share, 1, false}.run() ? 0 : 1;
  const Whole dq = {c, c.dout, c.v, c.k, c.dq, c.e, c.d, share, 1, false};
  const Whole dk = {c, c.v, c.dout, c.q, c.dk, c.e, c.d, 1, share, true};
  const Whole dv = {c, c.k, c.q, c.dout, c.dv, c.d, c.e, 1, share, true};
  return dq.run() && dk.run() && dv.run() ? 0 : 1;
}
