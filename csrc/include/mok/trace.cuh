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
enum TraceRole : int { kProducerLane = 0, kConsumerLane = 1, kCommLane = 2, kMmaLane = 3 };

constexpr int kTraceStateBytes = 32;
constexpr int kTraceLanes = 8;  // slices per CTA: producer and two consumers, or eight communication warps

#if MOK_TRACE

struct alignas(64) TraceSlice {
  unsigned long long start_ns, start_clock, end_ns, end_clock;
  unsigned int count, dropped, role, sm;
};

// A lane's state lives in shared memory, for consumers have no registers to give: {next record (64 bits), records left,
// start} are one load, then {header (64 bits), capacity} for the end.
struct TraceLane {
  unsigned int state = 0;  // shared address, 0 = not recording

  struct Cursor {
    unsigned int low, high;
    int left;  // below zero: records dropped
    unsigned int start;

    __device__ __forceinline__ void add(int event, int phase, int mini, int index, unsigned int value) {
      if (left-- <= 0) return;
      unsigned int tag = phase | event << 2 | (mini & 255) << 8 | (index & 65535) << 16;
      unsigned long long to = low | (unsigned long long)high << 32;
      asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(tag), "r"(value) : "memory");
      to += 8;
      low = (unsigned int)to;
      high = (unsigned int)(to >> 32);
    }
  };

  __device__ __forceinline__ static unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  }
  __device__ __forceinline__ static unsigned int now_low() {
    unsigned int t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
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
  __device__ __forceinline__ Cursor cursor() const {
    Cursor c;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.low), "=r"(c.high), "=r"(c.left), "=r"(c.start)
                 : "r"(state)
                 : "memory");
    return c;
  }
  __device__ __forceinline__ void keep(const Cursor& c) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(state), "r"(c.low), "r"(c.high), "r"(c.left), "r"(c.start)
                 : "memory");
  }
  __device__ __forceinline__ TraceSlice* slice() const {
    return (TraceSlice*)(get(16) | (unsigned long long)get(20) << 32);
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
    unsigned long long start = now(), first = to + sizeof(TraceSlice);
    header->start_ns = start;
    header->start_clock = clock64();
    header->role = role;
    header->sm = sm;
    keep(Cursor{(unsigned int)first, (unsigned int)(first >> 32), records, (unsigned int)start});
    set(16, (unsigned int)to);
    set(20, (unsigned int)(to >> 32));
    set(24, records);
  }

  __device__ __forceinline__ void put(int event, int phase, int mini, int index) const {
    if (state == 0) return;
    Cursor c = cursor();
    c.add(event, phase, mini, index, now_low() - c.start);
    keep(c);
  }
  __device__ __forceinline__ unsigned int tick() const { return state == 0 ? 0 : now_low() - get(12); }
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
  __device__ __forceinline__ void begin(int event, int mini, int index) const { put(event, kBegin, mini, index); }
  __device__ __forceinline__ void end(int event, int mini, int index) const { put(event, kEnd, mini, index); }
  // A multiplication ends, with the time it stalled, and its epilogue begins: one reading of the clock.
  __device__ __forceinline__ void turn(int kind, int mini, int block, int tile, unsigned int stall) const {
    if (state == 0) return;
    Cursor c = cursor();
    unsigned int at = now_low() - c.start;
    c.add(kMma + kind, kEnd, mini, tile, at);
    c.add(kStall, kValue, mini, 0, stall);
    c.add(kEpilogue + kind, kBegin, mini, block, at);
    keep(c);
  }

  // The same where another lane has the epilogue.
  __device__ __forceinline__ void finish(int kind, int mini, int tile, unsigned int stall) const {
    if (state == 0) return;
    Cursor c = cursor();
    c.add(kMma + kind, kEnd, mini, tile, now_low() - c.start);
    c.add(kStall, kValue, mini, 0, stall);
    keep(c);
  }

  __device__ __forceinline__ void close() const {
    if (state == 0) return;
    TraceSlice* header = slice();
    int left = cursor().left, most = (int)get(24);
    header->end_ns = now();
    header->end_clock = clock64();
    header->count = left > 0 ? most - left : most;
    header->dropped = left > 0 ? 0 : -left;
  }
};

#else

struct TraceLane {
  MOK_HD void open(void*, int, int, int, unsigned int) {}
  MOK_HD void begin(int, int, int) {}
  MOK_HD void end(int, int, int) {}
  MOK_HD void turn(int, int, int, int, unsigned int) {}
  MOK_HD void finish(int, int, int, unsigned int) {}
  MOK_HD unsigned int tick() const { return 0; }
  MOK_HD unsigned int blocked(unsigned int, unsigned int) const { return 0; }
  MOK_HD void close() {}
};

#endif

}  // namespace mok
