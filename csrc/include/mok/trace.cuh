// The kernel seen from inside: one writer lane per role appends 8-byte records to its own slice of a buffer.
//
// Off (MOK_TRACE=0) everything here is an empty inline function, and the SASS equals that of the sources with every
// call of it removed. On, a record costs one %globaltimer read and one streaming store. Record: u32 tag (phase 2 bits, event 6,
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

constexpr int kTraceStateBytes = 32;
constexpr int kTraceLanes = 8;  // slices per CTA: producer and two consumers, or eight communication warps

#if MOK_TRACE

struct alignas(64) TraceSlice {
  unsigned long long start_ns, start_clock, end_ns, end_clock;
  unsigned int count, dropped, role, sm;
};

// A lane's state lives in shared memory: consumers have no registers to give.
struct TraceLane {
  unsigned int state = 0;  // shared address of {count, start, slice (64 bits), capacity}, 0 = not recording

  __device__ __forceinline__ static unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  }
  __device__ __forceinline__ unsigned int get(int at) const {
    unsigned int v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(state + at) : "memory");
    return v;
  }
  __device__ __forceinline__ void set(int at, unsigned int v) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(state + at), "r"(v) : "memory");
  }
  __device__ __forceinline__ TraceSlice* slice() const {
    return (TraceSlice*)(get(8) | (unsigned long long)get(12) << 32);
  }

  // `buffer` holds gridDim.x * kTraceLanes slices of a header and `records` records; nullptr = do not record.
  __device__ __forceinline__ void open(void* buffer, int records, int lane, int role, unsigned int shared) {
    if (buffer == nullptr) return;
    state = shared + lane * kTraceStateBytes;
    unsigned long long to =
        (unsigned long long)buffer + ((long long)blockIdx.x * kTraceLanes + lane) * (sizeof(TraceSlice) + 8ll * records);
    TraceSlice* header = (TraceSlice*)to;
    unsigned int sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    unsigned long long start = now();
    header->start_ns = start;
    header->start_clock = clock64();
    header->role = role;
    header->sm = sm;
    set(0, 0);
    set(4, (unsigned int)start);
    set(8, (unsigned int)to);
    set(12, (unsigned int)(to >> 32));
    set(16, records);
  }

  __device__ __forceinline__ void put(int event, int phase, int mini, int index, unsigned int value) {
    if (state == 0) return;
    unsigned int at = get(0);
    set(0, at + 1);
    if (at >= get(16)) return;
    unsigned int tag = phase | event << 2 | (mini & 255) << 8 | (index & 65535) << 16;
    unsigned int* to = (unsigned int*)(slice() + 1) + 2ll * at;
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(tag), "r"(value) : "memory");
  }
  __device__ __forceinline__ unsigned int tick() const {
    if (state == 0) return 0;
    unsigned int t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
    return t - get(4);
  }
  // The time if `bar` is not in the wanted phase yet, else 0: a wait that does not wait costs no reading of the clock.
  __device__ __forceinline__ unsigned int blocked(unsigned int bar, unsigned int parity) const {
    if (state == 0) return 0;
    unsigned int ready;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(ready)
        : "r"(bar), "r"(parity)
        : "memory");
    return ready ? 0 : tick();
  }
  __device__ __forceinline__ void begin(int event, int mini, int index) { put(event, kBegin, mini, index, tick()); }
  __device__ __forceinline__ void end(int event, int mini, int index) { put(event, kEnd, mini, index, tick()); }
  __device__ __forceinline__ void value(int event, int mini, unsigned int amount) { put(event, kValue, mini, 0, amount); }

  __device__ __forceinline__ void close() {
    if (state == 0) return;
    TraceSlice* header = slice();
    unsigned int count = get(0), most = get(16);
    header->end_ns = now();
    header->end_clock = clock64();
    header->count = count < most ? count : most;
    header->dropped = count < most ? 0 : count - most;
  }
};

#else

struct TraceLane {
  MOK_HD void open(void*, int, int, int, unsigned int) {}
  MOK_HD void begin(int, int, int) {}
  MOK_HD void end(int, int, int) {}
  MOK_HD void value(int, int, unsigned int) {}
  MOK_HD unsigned int tick() const { return 0; }
  MOK_HD unsigned int blocked(unsigned int, unsigned int) const { return 0; }
  MOK_HD void close() {}
};

#endif

}  // namespace mok
