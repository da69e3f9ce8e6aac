// The kernel seen from inside: one writer lane per role appends 8-byte records to its own slice of a buffer.
//
// Off (MOK_TRACE=0) everything here is an empty inline function, and the SASS equals that of a build with an empty
// header. On, a record costs one %globaltimer read and one streaming store. Record: u32 tag (phase 2 bits, event 6,
// minibatch 8, index 16), u32 nanoseconds since the slice's start. `begin` carries the row block as index, `end` the
// column tile; waits carry the flag's index. mok/trace/read/kernel.py is the decoder and shares these numbers.
#pragma once

#include "mok/tasks.cuh"

#ifndef MOK_TRACE
#define MOK_TRACE 0
#endif

namespace mok {

// Events: kLoad, kMma and kEpilogue are followed by one number per GEMM kind (Kind), kWait by one per Place.
enum TraceEvent : int { kLoad = 0, kMma = 4, kEpilogue = 8, kDispatchUnit = 12, kCombineUnit = 13, kQuantize = 14, kStall = 15, kWait = 16 };
enum TracePhase : int { kBegin = 0, kEnd = 1, kValue = 2 };
enum TraceRole : int { kProducerLane = 0, kConsumerLane = 1, kCommLane = 2 };

constexpr int kTraceLanes = 4;  // slices per CTA: producer and two consumers, or four communication warps

#if MOK_TRACE

struct alignas(64) TraceSlice {
  unsigned long long start_ns, start_clock, end_ns, end_clock;
  unsigned int count, dropped, role, sm;
};

struct TraceLane {
  TraceSlice* slice = nullptr;
  unsigned int capacity = 0, count = 0, dropped = 0, start = 0;

  __device__ __forceinline__ static unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  }

  // `buffer` holds gridDim.x * kTraceLanes slices of a header and `records` records; nullptr = do not record.
  __device__ __forceinline__ void open(void* buffer, int records, int lane, int role) {
    if (buffer == nullptr) return;
    slice = (TraceSlice*)((char*)buffer + ((long long)blockIdx.x * kTraceLanes + lane) * (sizeof(TraceSlice) + 8ll * records));
    capacity = records;
    unsigned int sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    slice->start_ns = now();
    slice->start_clock = clock64();
    slice->role = role;
    slice->sm = sm;
    start = (unsigned int)slice->start_ns;
  }

  __device__ __forceinline__ void put(int event, int phase, int mini, int index, unsigned int value) {
    if (slice == nullptr) return;
    if (count >= capacity) {
      ++dropped;
      return;
    }
    unsigned int tag = phase | event << 2 | (mini & 255) << 8 | (index & 65535) << 16;
    unsigned int* to = (unsigned int*)(slice + 1) + 2ll * count++;
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(tag), "r"(value) : "memory");
  }
  __device__ __forceinline__ void begin(int event, int mini, int index) { put(event, kBegin, mini, index, (unsigned int)now() - start); }
  __device__ __forceinline__ void end(int event, int mini, int index) { put(event, kEnd, mini, index, (unsigned int)now() - start); }
  __device__ __forceinline__ void value(int event, int mini, unsigned int amount) { put(event, kValue, mini, 0, amount); }
  __device__ __forceinline__ unsigned int tick() const { return slice == nullptr ? 0 : (unsigned int)now(); }

  __device__ __forceinline__ void close() {
    if (slice == nullptr) return;
    slice->end_ns = now();
    slice->end_clock = clock64();
    slice->count = count;
    slice->dropped = dropped;
  }
};

#else

struct TraceLane {
  MOK_HD void open(void*, int, int, int) {}
  MOK_HD void begin(int, int, int) {}
  MOK_HD void end(int, int, int) {}
  MOK_HD void value(int, int, unsigned int) {}
  MOK_HD unsigned int tick() const { return 0; }
  MOK_HD void close() {}
};

#endif

}  // namespace mok
