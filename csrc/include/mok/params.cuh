// Arguments of the forward kernel as one struct: mok/engines/cuda/params.py mirrors it field by field.
#pragma once

#include "mok/tasks.cuh"
#include "mok/tile_sm90.cuh"

namespace mok {

constexpr int kMaxPeers = 72;  // an NVL72 rack

enum OperandA : int { kXShared = 0, kHiddenShared = 1, kXRing = 2, kHiddenRing = 3 };
enum OperandB : int { kSharedGate = 0, kSharedUp = 1, kSharedDown = 2, kGate = 3, kUp = 4, kDownWeight = 5 };

struct ForwardParams {
  TensorMap a[4];             // [rows, K] bf16, boxes of 128 rows x 64
  TensorMap b[6];             // [experts, N, K] bf16, boxes of 128 rows x 64
  u64 x_peers[kMaxPeers];     // bf16 [Tmax, H] of every rank
  u64 combine_peers[kMaxPeers];  // bf16 [Tmax*K, H] of every rank
  const int* peer_rank;       // schedule, see mok/schedule.py
  const int* peer_token_idx;
  int* num_tokens;
  const int* tokens_per_expert;
  u16* x_ring;                // bf16 [ring, H]: what the gate+up GEMM reads, and the saved x in BF16
  u16* x_saved;               // MXFP8 only: bf16 [ring, H] before quantisation; nullptr = not kept
  u16* hidden_ring;           // bf16 [ring, I]
  u16* y_ring;                // bf16 [ring, H], combine by communication SMs only
  u16* gate;                  // bf16 [ring, I] of macrobatch 0; nullptr = not kept
  u16* up;
  u16* gate_shared;           // bf16 [T, I]; nullptr = not kept
  u16* up_shared;
  u16* hidden_shared;
  u16* y_shared;              // bf16 [T, H]
  int* sync;                  // zeroed before launch: tickets and flags
  long long* fault;           // host memory, i64 [8]
  void* trace;
  u64 timeout_ns;
  int hidden, intermediate, shared_rows, num_experts;
  int ring, minibatch, rank, ep;
  int top_k, num_comm_clusters, mode, trace_records;
  int max_rows, max_minis, lost_flag;
  float limit;
};

// Places in `sync`: counters on cache lines of their own, then the flag arrays.
constexpr int kComputeTicket = 0;
constexpr int kCommTicket = 32;
constexpr int kStartTicket = 64;
constexpr int kAbortWord = 96;
constexpr int kFlagArrays = 128;

}  // namespace mok
