// Where ranks meet: the only kernels that wait for another rank, and they do not wait for ever.
//
// A rank that gives up tells the others through their abort words before it leaves, and a rank whose launch was drained
// tells them before it arrives: either way nobody goes on with rows that never came, and nobody waits a second time.
//
// Each rank owns a counter that every rank of the group raises by one per meeting; a rank leaves when its own counter
// has reached (meetings so far) x EP. Where the machine offers NVLink multicast (address != 0) one reduction reaches
// all counters, elsewhere a loop over peers does; both give the same counters. The top-k gather writes this rank's
// routes and token count into every peer's copy the same two ways, and must be followed by the barrier.
#include "mok/env_sm90.cuh"
#include "mok/params.cuh"

namespace mok {

struct BarrierParams {
  u64 counters[kMaxPeers];  // int [1] of every rank
  u64 aborts[kMaxPeers];    // int [1] of every rank: 0, or what made a rank give up (see `told`); 0 = no abort words
  u64 multicast;            // multicast address of the counters, 0 = none
  int* target;              // int [1] of this rank: meetings x EP so far
  int* lost;                // int [1] of this rank: 0, or minus the code of the fault that ended the group; nullptr = none
  int* status;              // num_tokens of this rank's schedule, minus a fault code after a drained launch or a failed
                            // meeting; nullptr = none
  long long* fault;
  u64 timeout_ns;
  int rank, ep;
};

struct GatherParams {
  u64 buffers[kMaxPeers];   // i32 [EP, Tmax, K] of every rank
  u64 counts[kMaxPeers];    // i32 [EP] of every rank
  u64 multicast_buffer, multicast_counts;  // 0 = none
  const int* top_experts;   // i32 [T, K] of this rank
  int tokens, max_tokens, top_k, rank, ep;
};

constexpr int kPlaceBarrier = 8;

__device__ __forceinline__ void store_system(u64 to, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_multicast(u64 to, int value) {
  asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// An abort word: fault code, then the rank that gave up, then how many ranks it had seen.
__device__ __forceinline__ int told(int code, int rank, int seen) { return code | rank << 4 | seen << 16; }

// Tells all ranks, this one included; whoever acquires a counter that was released later sees it.
__device__ __forceinline__ void tell(const BarrierParams& p, int word) {
  if (p.aborts[p.rank] == 0) return;
  for (int r = 0; r < p.ep; ++r) store_system(p.aborts[r], word);
  __threadfence_system();
}

// What another rank told this one, 0 if nothing.
__device__ __forceinline__ int heard(const BarrierParams& p) {
  if (p.aborts[p.rank] == 0) return 0;
  int word;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(word) : "l"(p.aborts[p.rank]) : "memory");
  return word;
}

__device__ __forceinline__ void leave(const BarrierParams& p, int word, int meeting) {
  int code = word & 15;
  if (p.lost != nullptr) *(volatile int*)p.lost = -code;
  if (p.status != nullptr && *(volatile int*)p.status >= 0) *(volatile int*)p.status = -code;
  record_fault(p.fault, code, word >> 4 & 4095, kPlaceBarrier, word >> 16, p.ep, meeting);
}

}  // namespace mok

extern "C" __global__ void mok_barrier(const __grid_constant__ mok::BarrierParams p) {
  using namespace mok;
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  if (p.lost != nullptr && *(volatile int*)p.lost != 0) {  // this rank has left: no second time-out
    if (p.status != nullptr && *(volatile int*)p.status >= 0) *(volatile int*)p.status = *(volatile int*)p.lost;
    return;
  }
  int target = *p.target + p.ep;
  *p.target = target;
  if (int word = heard(p)) return leave(p, word, target / p.ep);
  if (p.status != nullptr && *(volatile int*)p.status == -kFaultLocalTimeout) {
    tell(p, told(kFaultLocalTimeout, p.rank, 0));
    if (p.lost != nullptr) *(volatile int*)p.lost = -kFaultLocalTimeout;  // the launch recorded its own fault
  }
  __threadfence_system();
  if (p.multicast != 0) {
    asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" ::"l"(p.multicast), "r"(1) : "memory");
    asm volatile("fence.proxy.alias;" ::: "memory");
  } else {
    for (int r = 0; r < p.ep; ++r) {
      asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p.counters[r]), "r"(1) : "memory");
    }
  }
  u64 start = global_ns();
  for (;;) {
    int seen;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(seen) : "l"(p.counters[p.rank]) : "memory");
    int word = heard(p);
    if (word != 0) {
      if (p.lost == nullptr || *(volatile int*)p.lost == 0) leave(p, word, target / p.ep);
      return;
    }
    // a difference, so that the counter may wrap
    if (seen - target >= 0) return;
    if (global_ns() - start > p.timeout_ns) {
      word = told(kFaultPeerTimeout, p.rank, seen - (target - p.ep));
      tell(p, word);
      return leave(p, word, target / p.ep);
    }
    __nanosleep(100);
  }
}

extern "C" __global__ void __launch_bounds__(256) mok_gather_routes(const __grid_constant__ mok::GatherParams p) {
  using namespace mok;
  int index = blockIdx.x * 256 + threadIdx.x;
  int all = p.max_tokens * p.top_k, mine = p.tokens * p.top_k;
  if (index > all) return;
  bool is_count = index == all;
  int value = is_count ? p.tokens : (index < mine ? p.top_experts[index] : -1);
  u64 at = 4ull * (is_count ? p.rank : (u64)p.rank * all + index);
  if (p.multicast_buffer != 0) {
    store_multicast((is_count ? p.multicast_counts : p.multicast_buffer) + at, value);
    return;
  }
  for (int i = 0; i < p.ep; ++i) {
    int r = (p.rank + i) % p.ep;  // every rank starts with itself, so that no peer is everybody's first
    store_system((is_count ? p.counts[r] : p.buffers[r]) + at, value);
  }
}
