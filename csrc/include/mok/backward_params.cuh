// Arguments of the backward kernel as one struct: mok/engines/cuda/params.py mirrors it field by field.
#pragma once

#include "mok/backward_flags.cuh"
#include "mok/params.cuh"

namespace mok {

// Tensor maps. "Rows": 2D [rows, N], boxes of 128 rows x 64, the reduction (or what an epilogue reads) along N. "Slabs": 3D
// [experts, lines, N], boxes of 64 lines x 64 columns, the reduction down the lines.
enum BackwardMap : int {
  kRowsDy, kRowsDGate, kRowsDUp, kRowsX,  // A operands; X for the replay
  kRowsGate0, kRowsUp0,                   // gate and up of macrobatch 0, as saved
  kRowsGate, kRowsUp,                     // of the others, as replayed
  kRowsDyShared, kRowsDGateShared, kRowsDUpShared, kRowsGateShared, kRowsUpShared,
  kSlabsDy, kSlabsHidden, kSlabsDGate, kSlabsDUp,
  kSlabsX0, kSlabsX,                      // of macrobatch 0, as saved; of the others
  kSlabsDyShared, kSlabsHiddenShared, kSlabsDGateShared, kSlabsDUpShared, kSlabsXShared,
  kReplayGate, kReplayUp,                 // weights [experts, I, H], boxes of 128 rows x 64
  kWeightDown, kWeightGate, kWeightUp,    // BF16: slabs of the weights; MXFP8: rows of their transposed copies
  kSlabsWeightDownShared, kSlabsWeightGateShared, kSlabsWeightUpShared,
  kGradGate, kGradUp, kGradDown,          // weight gradients on their way out: 3D, boxes of 16 rows x 64
  kGradGateShared, kGradUpShared, kGradDownShared,
  kBackwardMaps,
};

// A weight gradient's way out.
enum GradientMode : int { kStoreBf16 = 0, kAddF32 = 1, kAddBf16 = 2 };

struct BackwardParams {
  TensorMap maps[kBackwardMaps];
  u64 x_peers[kMaxPeers];               // bf16 [Tmax, H] of every rank
  u64 d_y_peers[kMaxPeers];             // bf16 [Tmax, H]
  u64 router_weight_peers[kMaxPeers];   // f32 [Tmax, K]
  u64 d_x_peers[kMaxPeers];             // bf16 [Tmax*K, H]
  u64 d_router_weight_peers[kMaxPeers]; // f32 [Tmax*K]
  const int* peer_rank;                 // schedule, see mok/schedule.py
  const int* peer_token_idx;
  int* num_tokens;
  const int* tokens_per_expert;
  u16* x_ring;         // bf16 [ring, H] of replayed macrobatches (MXFP8: rounded along H)
  u16* x_rows;         // MXFP8 only: the same rounded in blocks of 32 rows
  u16* gate;           // bf16 [ring, I], replayed
  u16* up;
  u16* d_y_ring;       // bf16 [ring, H] (MXFP8: rounded along H)
  u16* d_y_rows;       // MXFP8 only: rounded in blocks of 32 rows
  u16* d_gate;         // bf16 [ring, I] (MXFP8: rounded along I)
  u16* d_up;
  u16* d_gate_rows;    // MXFP8 only: rounded in blocks of 32 rows
  u16* d_up_rows;
  u16* hidden;         // bf16 [ring, I]: w * hidden (MXFP8: rounded in blocks of 32 rows)
  u16* d_x_ring;       // bf16 [ring, H], combine by communication SMs only
  float* partials;     // f32 [ring, ceil(I / 256)]: parts of the router weights' gradients
  float* parked;       // f32 accumulators of the one expert that goes on in the next macrobatch
  u16* d_gate_shared;  // bf16 [T, I]
  u16* d_up_shared;
  u16* hidden_shared;
  u16* d_x_shared;     // bf16 [T, H]
  void* grads[6];      // gradients or accumulators of routed gate, up, down, shared gate, up, down
  int* sync;           // zeroed before launch: tickets, then the arrays of `flags`
  BackwardFlags flags;
  BackwardSizes sizes;
  long long* fault;    // host memory, i64 [8]
  void* trace;
  u64 timeout_ns;
  int grad_modes[6];   // GradientMode
  int hidden_size, intermediate, shared_rows, has_shared, num_experts;
  int ring, minibatch, rank, ep;
  int top_k, num_comm_clusters, mode, trace_records;
  int lost_flag, has_limit;
  float limit;
};

}  // namespace mok
