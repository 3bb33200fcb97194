// Work on PyTorch's own threads, those of the OpenMP library that it has loaded; Python passes the address of its GOMP_parallel.

#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "pairs.h"

namespace polyhead {

typedef void (*Pool)(void (*)(void*), void*, unsigned threads, unsigned flags);  // GOMP_parallel

struct Team {
  Pool pool;
  int64_t threads;
};

// Memory of one thread or of one call: allocated once, then handed out in pieces.
class Memory {
 public:
  explicit Memory(int64_t numbers) {
    size_t bytes = (size_t(numbers) * sizeof(number) / 64 + 64) * 64;
    start_ = next_ = static_cast<number*>(std::aligned_alloc(64, bytes));
  }
  ~Memory() { std::free(start_); }
  Memory(const Memory&) = delete;
  bool failed() const { return start_ == nullptr; }
  static int64_t rounded(int64_t numbers) { return (numbers + 15) / 16 * 16; }
  number* take(int64_t numbers) {
    number* piece = next_;
    next_ += rounded(numbers);
    return piece;
  }
  number* zeros(int64_t numbers) {
    number* piece = take(numbers);
    std::fill(piece, piece + numbers, 0.0f);
    return piece;
  }
  void again() { next_ = start_; }

 private:
  number *start_, *next_;
};

// work(item, memory) for every item, each once, on any thread; false if there was no memory.
template <class Work> bool each(const Team& team, int64_t items, int64_t numbers, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next;
    std::atomic<bool> failed;
    int64_t items, numbers;
    const Work& work;
  } shared{{0}, {false}, items, numbers, work};
  auto run = [](void* given) {
    Shared& all = *static_cast<Shared*>(given);
    Memory memory(all.numbers);
    if (memory.failed()) all.failed = true;
    while (!all.failed) {
      int64_t item = all.next.fetch_add(1);
      if (item >= all.items) break;
      memory.again();
      all.work(item, memory);
    }
  };
  unsigned threads = unsigned(std::min(team.threads, items));
  if (team.pool != nullptr && threads > 1)
    team.pool(run, &shared, threads, 0);
  else
    run(&shared);
  return !shared.failed;
}

// work(sample, range of keys, sample_part, key_part, memory) for all samples and keys.  Samples are cut into sample_parts
// and keys into key_parts of whole tiles; one thread computes a pair of parts.
template <class Work> bool each_key_part(const Team& team, int64_t b, int64_t keys, int64_t sample_parts, int64_t key_parts, int64_t numbers, const Work& work) {
  const int64_t tiles = (keys + LANES - 1) / LANES;
  return each(team, sample_parts * key_parts, numbers, [&](int64_t job, Memory& memory) {
    const int64_t sample_part = job / key_parts, key_part = job % key_parts;
    const int64_t first = key_part * tiles / key_parts * LANES, end = (key_part + 1) * tiles / key_parts * LANES;
    for (int64_t sample = sample_part * b / sample_parts; sample < (sample_part + 1) * b / sample_parts; sample++) {
      memory.again();
      work(sample, Range{first, std::min(end, keys)}, sample_part, key_part, memory);
    }
  });
}

}  // namespace polyhead
