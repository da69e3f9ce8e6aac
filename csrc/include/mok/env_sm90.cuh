// Waiting and announcing on the GPU, with an end: a wait that lasts too long becomes a fault record, never a hang.
#pragma once

#include "mok/flags.cuh"
#include "mok/tile_sm90.cuh"
#include "mok/trace.cuh"

namespace mok {

enum FaultCode : int { kFaultCapacity = 1, kFaultRouteId = 2, kFaultPeerTimeout = 3, kFaultLocalTimeout = 4 };

// Stores a fault record (i64 [8]: code, rank, place, seen, need, index) unless one is already there. `fault` is host
// memory the device can write; the code goes last, so a host that sees it sees the rest.
__device__ __forceinline__ void record_fault(long long* fault, int code, int rank, int place, int seen, int need, int index) {
  volatile long long* out = fault;
  if (fault == nullptr || out[0] != 0) return;
  out[1] = rank;
  out[2] = place;
  out[3] = seen;
  out[4] = need;
  out[5] = index;
  __threadfence_system();
  out[0] = code;
}

struct DeviceEnv {
  int* abort_word;    // set once by the first wait that gives up; every other wait then returns at once
  int* status;        // num_tokens of the schedule: becomes -kFaultLocalTimeout, so later kernels write NaN
  long long* fault;
  u64 timeout_ns;
  int rank;
  TraceLane* trace;

  __device__ __forceinline__ void wait(const Wait& w, int mini) {
    if (w.need <= 0 || load_acquire(w.flag) >= w.need) return;
    trace->begin(kWait + w.place, mini, w.index);
    u64 start = global_ns();
    for (;;) {
      int seen = load_acquire(w.flag);
      if (seen >= w.need || load_relaxed(abort_word) != 0) break;
      if (global_ns() - start > timeout_ns) {
        if (atomicCAS(abort_word, 0, 1) == 0) {
          *(volatile int*)status = -kFaultLocalTimeout;
          record_fault(fault, kFaultLocalTimeout, rank, w.place, seen, w.need, w.index);
        }
        break;
      }
      __nanosleep(20);
    }
    trace->end(kWait + w.place, mini, w.index);
  }
  __device__ __forceinline__ void add(int* flag, int value) { add_release(flag, value); }
};

}  // namespace mok
