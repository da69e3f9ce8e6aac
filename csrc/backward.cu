// The backward megakernel: d_y in, data gradients, weight gradients and d_x out, in one launch, on Hopper.
//
// Roles, queue, stages and rings are the forward kernel's. Three forms of one multiplication: replay (rows by rows), data
// gradients (d_y, d_gate | d_up by the weights as they lie, whose columns are contiguous) and weight gradients (both operands
// with rows as the reduction); wgmma reads each layout as it is, so nothing is ever transposed in memory.
//
// d_y arrives unscaled. The epilogue of d_y W_down knows gate and up of its tile and makes of it the router weight's gradient
// (s . hidden, exact for every weight), d_gate and d_up (of w s), and w * hidden, the operand of W_down's gradient.
// A weight gradient is one chain of f32 additions over the expert's rows in order, whatever the macrobatches.
// Compile-time: MOK_COMBINE_COMM (who sends d_x home), MOK_MXFP8, MOK_TRACE.
#include "mok/backward_consumer.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(mok::kThreads, 1)
    mok_backward(const __grid_constant__ mok::BackwardParams p) {
  using namespace mok;
  extern __shared__ __align__(1024) unsigned char raw[];
  u32 smem = smem_address(raw);
  u32 cta = cluster_rank();
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  Start start = start_cluster(smem, cta, thread, p.sync, p.num_tokens);
  if (start.num_rows < 0) return;  // a faulty schedule: mok_seal fills the results with NaN
  BackwardProblem problem{{p.hidden_size, p.intermediate, p.shared_rows, p.num_experts, start.num_rows, p.ring, p.minibatch, p.rank,
                           p.ep, MOK_COMBINE_COMM, p.mode, p.tokens_per_expert},
                          p.has_shared, p.sizes};
  const BackwardFlags& flags = p.flags;
  TraceLane trace;
  DeviceEnv env{p.sync + kAbortWord, p.num_tokens, p.fault, p.timeout_ns, p.rank, &trace};

  if (start.ticket < p.num_comm_clusters) {
    if (p.mode == kComputeOnly || warp >= kCommWarps) return;
    if (lane == 0) {
      for (int i = 0; i < kCommSlots; ++i) mbar_init(smem + kCommBarriers + (warp * kCommSlots + i) * 8, 1);
      mbar_init_fence();
      trace.open(p.trace, p.trace_records, warp, kCommLane, smem + kTraceState);
    }
    __syncwarp();
    fetch_first_dy<MOK_MXFP8>(p, problem, flags, env, smem + kFirstTicket, thread);
    backward_comm_warp<MOK_MXFP8>(p, problem, flags, env, smem + warp * kCommPoolBytes,
                                  smem + kCommBarriers + warp * kCommSlots * 8, lane);
    trace.close();
    return;
  }
  if (p.mode == kCommOnly) return;

  if (warp < 4) {
    registers_drop<56>();
    if (warp == 0 && lane == 0) {
      for (int i = 0; i < kBackwardMaps; ++i) prefetch_map(&p.maps[i]);
      trace.open(p.trace, p.trace_records, 0, kProducerLane, smem + kTraceState);
      producer_thread(p, problem, flags, env, smem, cta);
      trace.close();
    } else if (warp == 1 && lane == 0 && cta == 0) {
      scheduler_thread<BackwardWalker>(p.sync + kComputeTicket, problem, smem);
    }
  } else {
    registers_raise<224>();
    int group = (warp - 4) / 4;
    if (warp % 4 == 0 && lane == 0) trace.open(p.trace, p.trace_records, 1 + group, kConsumerLane, smem + kTraceState);
    Consumer consumer{{env, smem, cta, group, warp % 4, lane, RingPlace<kStages>{}}, p, problem, flags};
    fetch_first_dy<MOK_MXFP8>(p, problem, flags, env, smem + kFirstTicket, thread - 128);
    consumer.run();
    trace.close();
  }
  // nobody leaves while the other CTA may still write to its shared memory
  cluster_sync();
}
