// What host threads have in place of a GPU: waits with an end, tickets, and delays at random. Shared by the protocol tests.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "mok/flags.cuh"

using mok::Wait;
using Clock = std::chrono::steady_clock;

#ifdef MOK_BUG_RELAXED
constexpr auto kAcquire = std::memory_order_relaxed, kRelease = std::memory_order_relaxed;
#else
constexpr auto kAcquire = std::memory_order_acquire, kRelease = std::memory_order_release;
#endif

struct Shared {
  int compute_ticket = 0, comm_ticket = 0;
  Clock::time_point deadline;
};

struct HostEnv {
  Shared& shared;
  std::minstd_rand random;
  void jitter() {
    if (random() % 8 == 0) std::this_thread::yield();
  }
  void wait(const Wait& w, int) {
    if (w.need <= 0) return;
    std::atomic_ref<int> flag(*const_cast<int*>(w.flag));
    while (flag.load(kAcquire) < w.need) {
      std::this_thread::yield();
      if (Clock::now() > shared.deadline) {
        std::printf("HUNG place %d index %d need %d\n", w.place, w.index, w.need);
        std::fflush(stdout);
        std::_Exit(3);
      }
    }
  }
  void add(int* flag, int value) {
    jitter();
    std::atomic_ref<int>(*flag).fetch_add(value, kRelease);
  }
  int ticket(int& counter) { return std::atomic_ref<int>(counter).fetch_add(1, std::memory_order_relaxed); }
};

static int mix(int a, int b) {
  unsigned v = (unsigned)a * 2654435761u ^ ((unsigned)b + 0x9e3779b9u + ((unsigned)a << 6));
  return (int)(v ^ v >> 13);
}
