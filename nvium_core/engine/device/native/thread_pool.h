// A thread pool for parallel loops. A loop is split into parts, and each free thread (the caller too) takes the next
// part. So a descheduled thread delays only one part. Idle threads poll briefly, then sleep. If other programs occupy
// the cores, waiting for descheduled threads would cost time. The caller then runs all loops alone for a while.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nvium {

constexpr int64_t kPartsPerThread = 4;
constexpr std::chrono::microseconds kPollTime{20};    // a thread polls for this time before it gives up its core
constexpr std::chrono::milliseconds kAloneTime{200};  // a caller that runs alone uses the pool again after this time
constexpr std::chrono::milliseconds kMaxStalls{10};   // a caller runs alone after stalls of this total time
constexpr int kStallShare = 4;                        // `stalls_` grows only if stalls take more than 1/4 of the time

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Poll a condition for up to kPollTime. Return true as soon as it holds, else false.
template <typename Condition> bool poll(Condition&& condition) {
  const auto until = std::chrono::steady_clock::now() + kPollTime;
  do
    for (int i = 0; i < 16; ++i) {
      if (condition()) return true;
      pause();
    }
  while (std::chrono::steady_clock::now() < until);
  return false;
}

class ThreadPool {
 public:
  // The pool is never destroyed, because its threads never end.
  static ThreadPool& shared() {
    static ThreadPool* pool = new ThreadPool;
    return *pool;
  }

  // Call f(begin, end) once for each part of [0, count), on at most num_threads threads. If another caller is using the
  // pool, call f for the whole range on this thread. Throw `std::bad_alloc` if a call of f did, and `std::system_error`
  // if a thread cannot start.
  template <typename F> void run(int num_threads, int64_t count, F&& f) {
    std::unique_lock lock(busy_, std::defer_lock);
    if (num_threads <= 1 || count <= 1 || !lock.try_lock()) return f(int64_t{0}, count);
    if (is_alone()) {
      const auto start = Clock::now();
      f(int64_t{0}, count);
      alone_.fetch_add(std::chrono::nanoseconds(Clock::now() - start).count(), std::memory_order_relaxed);
      return;
    }
    for (; size_ < num_threads - 1; ++size_) std::thread(&ThreadPool::wait_for_work, this, size_).detach();
    const int64_t parts = std::min(count, num_threads * kPartsPerThread);
    call_ = [](void* work, int64_t begin, int64_t end) { (*static_cast<std::remove_reference_t<F>*>(work))(begin, end); };
    work_ = &f, count_ = count, parts_ = parts;
    helpers_.store(num_threads - 1, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    left_.store(uint64_t{job} << 32 | parts, std::memory_order_release);
    job_.store(job, std::memory_order_release);
    job_.notify_all();
    take_parts(job);
    const auto all_done = [&] { return done_.load(std::memory_order_acquire) == parts; };
    if (!poll(all_done)) wait_longer(all_done);
    if (is_out_of_memory_.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
  }

  // Return how many nanoseconds callers have run alone because other threads were held up.
  int64_t alone_nanoseconds() const { return alone_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  bool is_alone() {
    if (stalls_ < kMaxStalls) return false;
    if (Clock::now() < last_stall_ + kAloneTime) return true;
    stalls_ = kMaxStalls / 2;  // the next long stall makes the caller run alone again
    return false;
  }

  // Wait for a condition, and add the time to `stalls_`. First subtract 1/kStallShare of the time since the last stall.
  template <typename Condition> void wait_longer(Condition&& condition) {
    const auto start = Clock::now();
    do
      std::this_thread::yield();
    while (!poll(condition));
    const auto end = Clock::now();
    stalls_ = std::max(stalls_ - (start - last_stall_) / kStallShare, Clock::duration{0}) + (end - start);
    last_stall_ = end;
  }

  void wait_for_work(int number) {
    for (uint32_t seen = 0;;) {
      const auto is_new = [&] { return job_.load(std::memory_order_acquire) != seen; };
      if (!poll(is_new)) job_.wait(seen, std::memory_order_acquire);
      seen = job_.load(std::memory_order_acquire);
      if (number < helpers_.load(std::memory_order_relaxed)) take_parts(seen);
    }
  }

  // Run parts of this job until none is left. The job's fields stay valid, because `run` waits until all are done.
  void take_parts(uint32_t job) {
    uint64_t left = left_.load(std::memory_order_acquire);
    while (left >> 32 == job && (left & 0xFFFFFFFF)) {
      if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      const int64_t part = parts_ - static_cast<int64_t>(left & 0xFFFFFFFF);
      try {
        call_(work_, count_ * part / parts_, count_ * (part + 1) / parts_);
      } catch (const std::bad_alloc&) {
        is_out_of_memory_.store(true, std::memory_order_relaxed);
      }
      done_.fetch_add(1, std::memory_order_release);
      left = left_.load(std::memory_order_acquire);
    }
  }

  std::mutex busy_;
  Clock::duration stalls_{0};
  Clock::time_point last_stall_{};
  int size_ = 0;
  void (*call_)(void*, int64_t, int64_t) = nullptr;
  void* work_ = nullptr;
  int64_t count_ = 0, parts_ = 0;
  std::atomic<int64_t> alone_{0};
  std::atomic<int> helpers_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> is_out_of_memory_{false};
  std::atomic<uint32_t> job_{0};
  std::atomic<uint64_t> left_{0};  // upper half: the job's number; lower half: how many parts no thread has taken
};

}  // namespace nvium
