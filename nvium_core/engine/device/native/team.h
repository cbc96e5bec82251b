// A loop shared by threads. Each free thread takes the next part, the caller too, so a descheduled thread delays only the
// part it has. A thread without work polls for a moment, then sleeps and leaves its core to the rest of the process.
// Where other programs hold the cores, waiting for a descheduled thread costs more than it helps: the caller then works alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nvium {

constexpr int64_t kPartsPerThread = 4;
constexpr std::chrono::microseconds kPatience{20};        // before a thread gives up its core
constexpr std::chrono::milliseconds kAlone{200};          // before a caller that works alone tries the team again
constexpr std::chrono::milliseconds kWaits{10};           // of stalls, after which a caller works alone
constexpr int kWaitShare = 4;                             // a quarter of the time may be stalls

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Polls for kPatience; true if the condition held.
template <typename Condition> bool comes_soon(Condition&& condition) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  do
    for (int i = 0; i < 16; ++i) {
      if (condition()) return true;
      pause();
    }
  while (std::chrono::steady_clock::now() < until);
  return false;
}

class Team {
 public:
  // Never destroyed, as its threads never end.
  static Team& shared() {
    static Team* team = new Team;
    return *team;
  }

  // f(begin, end) over parts of [0, count), each once, on at most num_threads threads. A caller that finds the team busy runs
  // all parts itself.
  template <typename F> void run(int num_threads, int64_t count, F&& f) {
    std::unique_lock lock(busy_, std::defer_lock);
    if (num_threads <= 1 || count <= 1 || !lock.try_lock() || is_alone()) return f(int64_t{0}, count);
    while (size_ < num_threads - 1) std::thread(&Team::wait_for_work, this, size_++).detach();
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
    if (!comes_soon(all_done)) wait_longer(all_done);
  }

 private:
  using Clock = std::chrono::steady_clock;

  bool is_alone() {
    if (waits_ < kWaits) return false;
    if (Clock::now() < last_wait_ + kAlone) return true;
    waits_ = kWaits / 2;  // one more stall is enough
    return false;
  }

  // Adds the stall to those before, less what the time since then makes up for.
  template <typename Condition> void wait_longer(Condition&& condition) {
    const auto start = Clock::now();
    do
      std::this_thread::yield();
    while (!comes_soon(condition));
    const auto end = Clock::now();
    waits_ = std::max(waits_ - (start - last_wait_) / kWaitShare, Clock::duration{0}) + (end - start);
    last_wait_ = end;
  }

  void wait_for_work(int number) {
    for (uint32_t seen = 0;;) {
      const auto is_new = [&] { return job_.load(std::memory_order_acquire) != seen; };
      if (!comes_soon(is_new)) job_.wait(seen, std::memory_order_acquire);
      seen = job_.load(std::memory_order_acquire);
      if (number < helpers_.load(std::memory_order_relaxed)) take_parts(seen);
    }
  }

  // A part that is taken keeps the job from ending, so until it is done what describes the job does not change.
  void take_parts(uint32_t job) {
    uint64_t left = left_.load(std::memory_order_acquire);
    while (left >> 32 == job && (left & 0xFFFFFFFF)) {
      if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      const int64_t part = parts_ - static_cast<int64_t>(left & 0xFFFFFFFF);
      call_(work_, count_ * part / parts_, count_ * (part + 1) / parts_);
      done_.fetch_add(1, std::memory_order_release);
      left = left_.load(std::memory_order_acquire);
    }
  }

  std::mutex busy_;
  Clock::duration waits_{0};  // recent stalls
  Clock::time_point last_wait_{};
  int size_ = 0;
  void (*call_)(void*, int64_t, int64_t) = nullptr;
  void* work_ = nullptr;
  int64_t count_ = 0, parts_ = 0;
  std::atomic<int> helpers_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<uint32_t> job_{0};
  std::atomic<uint64_t> left_{0};  // the job's number, and how many of its parts are not taken yet
};

}  // namespace nvium
