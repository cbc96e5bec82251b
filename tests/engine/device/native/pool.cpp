// Runs parts that run out of memory, on any thread of the pool, and then parts that do not. Prints what is wrong.

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
}
