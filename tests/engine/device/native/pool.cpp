// Runs parts that run out of memory, on any thread of the pool, and then parts that do not. Then holds up the other
// threads until the caller runs alone. Prints what is wrong.

#include <cstdio>

#include "thread_pool.h"

int main() {
  for (int64_t failing = 0; failing < 16; ++failing) {
    std::atomic<int64_t> sum{0}, caught{0};
    try {
      nvium::ThreadPool::shared().run(4, 16, [&](int64_t begin, int64_t end) {
        sum += end - begin;
        if (begin <= failing && failing < end) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      ++caught;
    }
    nvium::ThreadPool::shared().run(4, 16, [&](int64_t begin, int64_t end) { sum += end - begin; });
    if (caught != 1 || sum != 32) std::printf("part %d: caught %d, sum %d\n", int(failing), int(caught), int(sum));
  }
  const auto caller = std::this_thread::get_id();
  auto& pool = nvium::ThreadPool::shared();
  auto hold_up = [&](int64_t, int64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::this_thread::get_id() == caller ? 1 : 30));
  };
  for (int turn = 0; turn < 1000 && !pool.alone_nanoseconds(); ++turn) pool.run(2, 8, hold_up);
  if (pool.alone_nanoseconds() < 1000000) std::printf("alone for %ld ns\n", long(pool.alone_nanoseconds()));
}
