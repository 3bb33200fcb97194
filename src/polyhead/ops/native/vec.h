// Vectors of 16 numbers, one per lane; each consists of one or more vectors of the machine (by the compiler's vector
// extensions, so one source serves AVX-512, AVX2, NEON and machines without any).

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#ifndef POLYHEAD_NUMBER  // tests take double
#define POLYHEAD_NUMBER float
#endif
#ifndef POLYHEAD_WIDTH  // float32 numbers in a vector of the machine
#if defined(__AVX512F__)
#define POLYHEAD_WIDTH 16
#elif defined(__AVX__)
#define POLYHEAD_WIDTH 8
#else
#define POLYHEAD_WIDTH 4
#endif
#endif

// Before a loop over what is held in registers.
#define POLYHEAD_UNROLL _Pragma("GCC unroll 16")

// What is called in an inner loop, so that its sums stay in registers.
#define POLYHEAD_INLINE inline __attribute__((always_inline))

namespace polyhead {

typedef POLYHEAD_NUMBER number;
constexpr bool EXACT = sizeof(number) > 4;  // functions then come from the C library
constexpr int WIDTH = POLYHEAD_WIDTH, LANES = 16, PARTS = LANES / WIDTH;
constexpr number HIDDEN = -INFINITY, LOWEST = std::numeric_limits<number>::lowest();  // the score of a hidden pair; no other is less
constexpr bool MANY_REGISTERS = WIDTH == 16 || WIDTH == 4;  // 32 of them, not 16

typedef std::conditional<EXACT, int64_t, int32_t>::type integer;
typedef number part __attribute__((vector_size(sizeof(number) * WIDTH)));
typedef integer whole __attribute__((vector_size(sizeof(number) * WIDTH)));
typedef number quad __attribute__((vector_size(sizeof(number) * 4)));

template <class T> inline T read(const number* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <class T> inline void write(number* to, const T& x) { std::memcpy(to, &x, sizeof x); }

struct Mask {
  whole of[PARTS];
};
struct Vec {
  part of[PARTS];
};

template <class F> POLYHEAD_INLINE Vec each_part(F f) {
  Vec r;
  POLYHEAD_UNROLL
  for (int p = 0; p < PARTS; p++) r.of[p] = f(p);
  return r;
}
template <class F> POLYHEAD_INLINE Mask each_mask(F f) {
  Mask r;
  POLYHEAD_UNROLL
  for (int p = 0; p < PARTS; p++) r.of[p] = f(p);
  return r;
}

POLYHEAD_INLINE Vec load(const number* from) {
  return each_part([&](int p) { return read<part>(from + p * WIDTH); });
}
POLYHEAD_INLINE void store(number* to, const Vec& x) {
  POLYHEAD_UNROLL
  for (int p = 0; p < PARTS; p++) write(to + p * WIDTH, x.of[p]);
}
POLYHEAD_INLINE Vec splat(number x) {
  return each_part([&](int) { return x - part{}; });
}
POLYHEAD_INLINE Vec operator+(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] + y.of[p]; });
}
POLYHEAD_INLINE Vec operator-(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] - y.of[p]; });
}
POLYHEAD_INLINE Vec operator*(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] * y.of[p]; });
}
POLYHEAD_INLINE Vec operator/(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] / y.of[p]; });
}
POLYHEAD_INLINE Vec operator*(const Vec& x, number y) {
  return each_part([&](int p) { return x.of[p] * y; });
}
POLYHEAD_INLINE Vec operator+(const Vec& x, number y) {
  return each_part([&](int p) { return x.of[p] + y; });
}
POLYHEAD_INLINE Vec operator-(number x, const Vec& y) {
  return each_part([&](int p) { return x - y.of[p]; });
}
POLYHEAD_INLINE Vec& operator+=(Vec& x, const Vec& y) { return x = x + y; }

POLYHEAD_INLINE Mask operator&(const Mask& x, const Mask& y) {
  return each_mask([&](int p) { return x.of[p] & y.of[p]; });
}
POLYHEAD_INLINE Mask operator~(const Mask& x) {
  return each_mask([&](int p) { return ~x.of[p]; });
}
POLYHEAD_INLINE Mask operator>(const Vec& x, number y) {
  return each_mask([&](int p) { return x.of[p] > y; });
}
POLYHEAD_INLINE Mask operator<=(const Vec& x, number y) {
  return each_mask([&](int p) { return x.of[p] <= y; });
}
// Where the mask is set x, elsewhere y.
POLYHEAD_INLINE Vec choose(const Mask& mask, const Vec& x, const Vec& y) {
  return each_part([&](int p) { return mask.of[p] ? x.of[p] : y.of[p]; });
}

// The larger and the smaller of two, and y where one of them is NaN: one instruction, which compilers do not find.
template <class T> POLYHEAD_INLINE T larger(const T& x, const T& y) { return x > y ? x : y; }
template <class T> POLYHEAD_INLINE T smaller(const T& x, const T& y) { return x < y ? x : y; }
#if defined(__AVX512F__)
typedef float real16 __attribute__((vector_size(64)));
POLYHEAD_INLINE real16 larger(const real16& x, const real16& y) { return real16(_mm512_max_ps(__m512(x), __m512(y))); }
POLYHEAD_INLINE real16 smaller(const real16& x, const real16& y) { return real16(_mm512_min_ps(__m512(x), __m512(y))); }
#endif
#if defined(__AVX__)
typedef float real8 __attribute__((vector_size(32)));
POLYHEAD_INLINE real8 larger(const real8& x, const real8& y) { return real8(_mm256_max_ps(__m256(x), __m256(y))); }
POLYHEAD_INLINE real8 smaller(const real8& x, const real8& y) { return real8(_mm256_min_ps(__m256(x), __m256(y))); }
#endif
POLYHEAD_INLINE Vec larger(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return larger(x.of[p], y.of[p]); });
}

// A load whose result stays in a register.  Compilers would read memory again for every product, as if that cost nothing;
// but a core reads no more vectors at once than it multiplies, and the products of a pair have to read its rows as well.
//
// The assembler text is empty, so it computes nothing.  Its operand "+v"(x) says that it reads and writes x, in a vector
// register: after it the compiler no longer knows that x equals what is in memory, so it cannot replace x by a load.
//
// Measured, in ms of one core: HYLA, 8 heads of width 64, causal, forward (with its backward pass in brackets), g++, AVX-512.
//
//   this load                   t 512   3.2 (11.5)     t 1,024   10.0 (39.4)
//   a plain load                t 512   3.9 (11.9)     t 1,024   12.2 (41.6)
//   a load through `volatile`   t 512   3.1 (11.8)     t 1,024   10.0 (39.5)
//
// `volatile` is as fast, but also forbids the compiler to move one such load before another.
template <class T> POLYHEAD_INLINE void settle(T&) {}
#if defined(__AVX512F__)
POLYHEAD_INLINE void settle(real16& x) { asm("" : "+v"(x)); }
#endif
POLYHEAD_INLINE Vec hold(const number* from) {
  return each_part([&](int p) {
    part x = read<part>(from + p * WIDTH);
    settle(x);
    return x;
  });
}

// relu(x); NaN stays NaN.
POLYHEAD_INLINE Vec positive(const Vec& x) { return larger(splat(0), x); }

// Lanes from `first` to `end`, end excluded.
inline Mask between(int64_t first, int64_t end) {
  integer lane[LANES];
  for (int l = 0; l < LANES; l++) lane[l] = -integer(l >= first && l < end);
  Mask m;
  std::memcpy(&m, lane, sizeof m);
  return m;
}

// A function of the C library, lane by lane.
template <class F> inline Vec each_lane(const Vec& x, F f) {
  number lane[LANES];
  store(lane, x);
  for (number& one : lane) one = f(one);
  return load(lane);
}
inline Vec root(const Vec& x) {
  return each_lane(x, [](number one) { return std::sqrt(one); });
}

// e^x = 2^n e^r with |r| <= log(2) / 2, where a polynomial is exact to a rounding; 0 below -87.7, as at -inf.
// Floats near ROUND are 1 apart, so y log2(e) + ROUND is rounded to n + ROUND, and its last bits are those of n + 127, the
// exponent of 2^n; for n = -127 they are those of 0.
inline Vec fast_exp(const Vec& x) {
  typedef float real __attribute__((vector_size(4 * WIDTH)));
  typedef int32_t power __attribute__((vector_size(4 * WIDTH)));
  constexpr float ROUND = 12582912.0f + 127;
  Vec to;
  for (int p = 0; p < PARTS; p++) {
    const real y = smaller(88.5f - real{}, larger(-88.0f - real{}, __builtin_convertvector(x.of[p], real)));
    real sum = y * 1.44269504f + ROUND, n = sum - ROUND;
    real r = y - n * 0.693359375f + n * 2.12194440e-4f;
    real q = 1.9875691500e-4f - real{};
    q = q * r + 1.3981999507e-3f;
    q = q * r + 8.3334519073e-3f;
    q = q * r + 4.1665795894e-2f;
    q = q * r + 1.6666665459e-1f;
    q = q * r + 5.0000001201e-1f;
    q = q * r * r + r + 1.0f;
    power bits;
    std::memcpy(&bits, &sum, sizeof bits);
    bits <<= 23;
    real two;
    std::memcpy(&two, &bits, sizeof two);
    to.of[p] = __builtin_convertvector(q * two, part);
  }
  return to;
}
inline Vec exp(const Vec& x) {
  if (!EXACT) return fast_exp(x);
  return each_lane(x, [](number one) { return std::exp(one); });
}

}  // namespace polyhead
