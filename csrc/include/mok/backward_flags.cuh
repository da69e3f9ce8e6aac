// Backward's protocol between tiles and copies; see flags.cuh for what a flag is. Macrobatches ascend here, so the block
// that held a ring place before lies one ring *lower* in the schedule.
//
// What frees a place: x and d_y are read by the weight gradients last (wgrad_done), d_gate, d_up and w*hidden by d_x
// and the weight gradients (dx_ready; the latter are done already, or the new d_y would not be here), d_x by whoever
// sends it (dx_done), gate and up of a replay by d_gate, d_up (done, or the new x would not be here).
#pragma once

#include "mok/backward_tasks.cuh"
#include "mok/flags.cuh"

namespace mok {

// One array of ints, cut by the host: a kernel's argument costs no register until it is used.
struct BackwardFlags {
  int* x_ready;             // [minibatches of the schedule] rows arrived
  int* dy_ready;            // [minibatches of the schedule] rows arrived
  int* d_hidden_shared;     // [token blocks] halves of d_gate, d_up tiles stored
  int* wgrad_ready_shared;  // [1] the same over all of the shared expert's tiles
  int* hidden_ready;        // [row blocks] halves of replayed gate, up tiles stored
  int* d_hidden_ready;      // [row blocks] halves of d_gate, d_up tiles stored
  int* dx_ready;            // [row blocks] halves of d_x tiles stored
  int* dx_done;             // [row blocks] rows of d_x sent
  int* wgrad_ready;         // [segments] halves of d_gate, d_up tiles stored
  int* wgrad_done;          // [segments] halves of weight gradient tiles finished
};

MOK_HD int d_hidden_need(const BackwardProblem& p) { return p.sizes.inner_tiles * kTileWriters; }
MOK_HD int d_x_need(const BackwardProblem& p) { return p.sizes.outer_tiles * kTileWriters; }
MOK_HD int wgrad_need(const BackwardProblem& p) { return (p.sizes.down_tiles + 2 * p.sizes.wide_tiles) * kTileWriters; }
// The row block that used this ring place before `block`, or -1.
MOK_HD int earlier_block(const BackwardProblem& p, int block) { return max_int(-1, block - p.sizes.ring_blocks); }

// Before the operands of a tile are read; `block` is the row block (weight gradients: not used).
template <class Env>
MOK_HD void acquire_input(Env& env, const BackwardProblem& p, const BackwardFlags& f, const BackwardTask& t, int block) {
  int mini = p.mini_index(t.macro, t.mini), kind = routed_kind(t.kind);
  bool shared = is_shared(t.kind);
  Wait w{nullptr, 0, 0, 0};
  if (is_wgrad(kind)) {
    int at = p.segment(t.expert, t.macro);
    w = Wait{shared ? f.wgrad_ready_shared : f.wgrad_ready + at, ceil_div(t.rows, kBlockRows) * d_hidden_need(p),
             kWaitWgradReady, shared ? -1 : at};
  } else if (kind == kDgradGateUp) {
    w = Wait{(shared ? f.d_hidden_shared : f.d_hidden_ready) + block, d_hidden_need(p),
             shared ? kWaitSharedDHidden : kWaitDHiddenReady, block};
  } else if (!shared && p.mode != kComputeOnly) {
    bool replay = kind == kGateUp;
    w = Wait{(replay ? f.x_ready : f.dy_ready) + mini, p.mini_rows(t.macro, t.mini), replay ? kWaitXReady : kWaitDyReady, mini};
  }
  env.wait(w, mini);
}

// Before gate and up of `block` are read by a kDgradDown: a replay wrote them in this launch.
template <class Env>
MOK_HD void acquire_gate_up(Env& env, const BackwardProblem& p, const BackwardFlags& f, const BackwardTask& t, int block) {
  if (t.kind != kDgradDown || t.macro == 0) return;
  env.wait(Wait{f.hidden_ready + block, gate_up_need(p), kWaitHiddenReady, block}, p.mini_index(t.macro, t.mini));
}

// Before accumulators are taken up where the previous macrobatch parked them.
template <class Env>
MOK_HD void acquire_chain(Env& env, const BackwardProblem& p, const BackwardFlags& f, const BackwardTask& t) {
#ifndef MOK_BUG_CHAIN  // planted for a test
  if (!(t.chain & kResume)) return;
  int at = p.segment(t.expert, t.macro - 1);
  env.wait(Wait{f.wgrad_done + at, wgrad_need(p), kWaitWgradDone, at}, p.mini_index(t.macro, 0));
#endif
}

// Before the result of a tile is stored.
template <class Env>
MOK_HD void acquire_output(Env& env, const BackwardProblem& p, const BackwardFlags& f, const BackwardTask& t, int block) {
#ifndef MOK_BUG_RING  // planted for a test: results overwrite a ring place that is still being read
  Wait w{nullptr, 0, 0, 0};
  int old = earlier_block(p, block);
  if (t.kind == kDgradDown && old >= 0) w = Wait{f.dx_ready + old, d_x_need(p), kWaitDHiddenFree, old};
  if (t.kind == kDgradGateUp && old >= 0 && p.combine_by_comm && p.mode != kComputeOnly) {
    w = Wait{f.dx_done + old, kBlockRows, kWaitDxDone, old};
  }
  if (t.before >= 0) w = Wait{f.wgrad_done + t.before, wgrad_need(p), kWaitWgradDone, t.before};
  env.wait(w, p.mini_index(t.macro, t.mini));
#endif
}

// After one writer has stored its part of the tile.
template <class Env>
MOK_HD void publish_tile(Env& env, const BackwardProblem& p, const BackwardFlags& f, const BackwardTask& t, int block) {
  int at = p.segment(t.expert, t.macro);
  if (t.kind == kDgradDown) {
    env.add(f.d_hidden_ready + block, 1);
    env.add(f.wgrad_ready + at, 1);
  } else if (t.kind == kDgradDownShared) {
    env.add(f.d_hidden_shared + block, 1);
    env.add(f.wgrad_ready_shared, 1);
  } else if (t.kind == kGateUp || t.kind == kDgradGateUp) {
    env.add((t.kind == kGateUp ? f.hidden_ready : f.dx_ready) + block, 1);
  } else if (t.kind >= kWgradDown && t.rows > 0) {
    env.add(f.wgrad_done + at, 1);
  }
}

// Before the rows of a unit are copied.
template <class Env>
MOK_HD void acquire_unit(Env& env, const BackwardProblem& p, const BackwardFlags& f, BackwardCommWalker& walker,
                         const CommUnit& u) {
  if (p.mode == kCommOnly) return;
  int block = u.row / kBlockRows;
  Wait w{f.dx_ready + block, d_x_need(p), kWaitDxReady, block};
  if (u.kind != kCombineDx) {
    if (u.row < p.ring) return;
    int old = walker.segment_of(u.row - p.ring);
    w = Wait{f.wgrad_done + old, wgrad_need(p), kWaitRowsFree, old};
  }
  env.wait(w, p.mini_index(u.macro, u.mini));
}

// After the rows of a unit have been copied and the copies are complete.
template <class Env>
MOK_HD void publish_unit(Env& env, const BackwardProblem& p, const BackwardFlags& f, const CommUnit& u) {
  int mini = p.mini_index(u.macro, u.mini);
  if (u.kind == kCombineDx) {
    env.add(f.dx_done + u.row / kBlockRows, kUnitRows);
  } else {
    env.add((u.kind == kDispatch ? f.x_ready : f.dy_ready) + mini, kUnitRows);
  }
}

}  // namespace mok
