// Vectors of 16 numbers, one per lane, made of as many of the machine's own as that takes (the compiler's vector
// extensions, so one source serves AVX-512, AVX2, NEON and machines without any).

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

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

namespace polyhead {

constexpr int WIDTH = POLYHEAD_WIDTH, LANES = 16, PARTS = LANES / WIDTH;
constexpr bool MANY_REGISTERS = WIDTH == 16 || WIDTH == 4;  // 32 of them, not 16

typedef float part __attribute__((vector_size(4 * WIDTH)));
typedef int32_t whole __attribute__((vector_size(4 * WIDTH)));
typedef float quad __attribute__((vector_size(16)));

template <class T> inline T read(const float* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
template <class T> inline void write(float* to, const T& x) { std::memcpy(to, &x, sizeof x); }

struct Mask {
  whole of[PARTS];
};
struct Vec {
  part of[PARTS];
};

template <class F> inline Vec each_part(F f) {
  Vec r;
  POLYHEAD_UNROLL
  for (int p = 0; p < PARTS; p++) r.of[p] = f(p);
  return r;
}
template <class F> inline Mask each_mask(F f) {
  Mask r;
  POLYHEAD_UNROLL
  for (int p = 0; p < PARTS; p++) r.of[p] = f(p);
  return r;
}

inline Vec load(const float* from) {
  return each_part([&](int p) { return read<part>(from + p * WIDTH); });
}
inline void store(float* to, const Vec& x) {
  POLYHEAD_UNROLL
  for (int p = 0; p < PARTS; p++) write(to + p * WIDTH, x.of[p]);
}
inline Vec splat(float x) {
  return each_part([&](int) { return x - part{}; });
}
inline Vec operator+(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] + y.of[p]; });
}
inline Vec operator-(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] - y.of[p]; });
}
inline Vec operator*(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] * y.of[p]; });
}
inline Vec operator/(const Vec& x, const Vec& y) {
  return each_part([&](int p) { return x.of[p] / y.of[p]; });
}
inline Vec operator*(const Vec& x, float y) {
  return each_part([&](int p) { return x.of[p] * y; });
}
inline Vec operator+(const Vec& x, float y) {
  return each_part([&](int p) { return x.of[p] + y; });
}
inline Vec operator-(float x, const Vec& y) {
  return each_part([&](int p) { return x - y.of[p]; });
}
inline Vec& operator+=(Vec& x, const Vec& y) { return x = x + y; }

inline Mask operator&(const Mask& x, const Mask& y) {
  return each_mask([&](int p) { return x.of[p] & y.of[p]; });
}
inline Mask operator>(const Vec& x, float y) {
  return each_mask([&](int p) { return x.of[p] > y; });
}
inline Mask operator>(const Vec& x, const Vec& y) {
  return each_mask([&](int p) { return x.of[p] > y.of[p]; });
}
// Where the mask is set x, elsewhere y.
inline Vec choose(const Mask& mask, const Vec& x, const Vec& y) {
  return each_part([&](int p) { return mask.of[p] ? x.of[p] : y.of[p]; });
}
inline Vec larger(const Vec& x, const Vec& y) { return choose(x > y, x, y); }

inline float sum(const Vec& x) {
  float lane[LANES], total = 0;
  store(lane, x);
  for (float one : lane) total += one;
  return total;
}

// Lanes from `first` to `end`, end excluded.
inline Mask between(int64_t first, int64_t end) {
  int32_t lane[LANES];
  for (int l = 0; l < LANES; l++) lane[l] = -int32_t(l >= first && l < end);
  Mask m;
  std::memcpy(&m, lane, sizeof m);
  return m;
}

inline Vec root(const Vec& x) {
  float lane[LANES];
  store(lane, x);
  for (float& one : lane) one = std::sqrt(one);
  return load(lane);
}

// e^x: 2^n e^r with |r| <= log(2) / 2, where a polynomial is exact to a rounding; 0 below -87, as at -inf.
inline Vec exp(const Vec& x) {
  return each_part([&](int p) {
    part low = -87.0f - part{}, high = 88.5f - part{};
    part y = x.of[p] > low ? x.of[p] : low;
    y = y < high ? y : high;
    part n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
    part r = y - n * 0.693359375f + n * 2.12194440e-4f;
    part q = 1.9875691500e-4f - part{};
    q = q * r + 1.3981999507e-3f;
    q = q * r + 8.3334519073e-3f;
    q = q * r + 4.1665795894e-2f;
    q = q * r + 1.6666665459e-1f;
    q = q * r + 5.0000001201e-1f;
    q = q * r * r + r + 1.0f;
    whole power = (__builtin_convertvector(n, whole) + 127) << 23;
    part two;
    std::memcpy(&two, &power, sizeof two);
    return x.of[p] > low ? q * two : part{};
  });
}

}  // namespace polyhead
