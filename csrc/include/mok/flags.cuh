// What a task waits for and what it announces: the protocol between tiles and copies, once for GPU and host threads.
//
// All flags are local int counters, zero at launch, only ever added to. `Env` supplies `wait(Wait, mini)`
// (returns after an acquire, or at once after an abort; the minibatch only names the wait) and `add(flag, value)` (release). Two rules make a ring of
// buffers safe: a writer waits until the readers of the block that held the place one macrobatch later in the
// schedule (and so earlier in time: macrobatches run last to first) are complete, and readers announce completion
// only after their last read.
#pragma once

#include "mok/tasks.cuh"

namespace mok {

// Names of the waits: in fault records, in the trace and in `mok.errors`.
enum Place : int {
  kWaitXReady = 1,       // rows of a minibatch have arrived
  kWaitHiddenReady = 2,  // all gate+up tiles of a row block are stored
  kWaitYReady = 3,       // all down tiles of a row block are stored
  kWaitYDone = 4,        // rows of a ring place have been combined
  kWaitXFree = 5,        // gate+up of the block that held this ring place is complete
  kWaitHiddenFree = 6,   // down of the block that held this ring place is complete
  kWaitSharedHidden = 7, // all gate+up tiles of a block of shared-expert tokens are stored
  // 8 is the barrier between ranks (barrier.cu); the rest is backward's (backward_flags.cuh)
  kWaitDyReady = 9,       // rows of d_y of a minibatch have arrived
  kWaitDHiddenReady = 10, // all d_gate, d_up tiles of a row block are stored
  kWaitDxReady = 11,      // all d_x tiles of a row block are stored
  kWaitDxDone = 12,       // rows of d_x of a ring place have been sent
  kWaitWgradReady = 13,   // a segment's operands of the weight gradients are there (-1: the shared expert's)
  kWaitWgradDone = 14,    // a segment's weight gradients are finished or parked
  kWaitRowsFree = 15,     // the segment that held this ring place needs its x and d_y no more
  kWaitDHiddenFree = 16,  // d_x of the block that held this ring place is complete
  kWaitSharedDHidden = 17,// all d_gate, d_up tiles of a block of shared-expert tokens are stored
};

// A tile is stored by this many writers (consumer warpgroups), each of which announces its half.
constexpr int kTileWriters = 2;

struct Flags {
  int* x_ready;        // [minibatches of the schedule] rows arrived
  int* hidden_shared;  // [token blocks] gate+up halves stored
  int* hidden_ready;   // [row blocks] gate+up halves stored
  int* y_ready;        // [row blocks] down halves stored
  int* y_done;         // [row blocks] rows combined
};

MOK_HD int gate_up_need(const Problem& p) { return p.gate_up_tiles() * kTileWriters; }
MOK_HD int down_need(const Problem& p) { return p.down_tiles() * kTileWriters; }

// The row block that used this ring place before `block`, or -1.
MOK_HD int previous_block(const Problem& p, int block) {
  int old = block + p.ring / kBlockRows;
  return old * kBlockRows < p.num_rows ? old : -1;
}

// A flag to wait for; `need` 0 means no wait. One call site per role keeps the polling code (and registers) single.
struct Wait {
  const int* flag;
  int need;
  int place;  // Place
  int index;  // of the flag in its array
};

// Before the operand rows of `block` are read.
template <class Env>
MOK_HD void acquire_input(Env& env, const Problem& p, const Flags& f, const ComputeTask& t, int block) {
  int mini = p.mini_index(t.macro, t.mini);
  Wait w{f.x_ready + mini, p.mini_rows(t.macro, t.mini), kWaitXReady, mini};
  if (t.kind == kDown) w = Wait{f.hidden_ready + block, gate_up_need(p), kWaitHiddenReady, block};
  if (t.kind == kDownShared) w = Wait{f.hidden_shared + block, gate_up_need(p), kWaitSharedHidden, block};
  if (t.kind == kGateUpShared || (t.kind == kGateUp && p.mode == kComputeOnly)) w.need = 0;
  env.wait(w, mini);
}

// Before the result of `block` is stored into the ring.
template <class Env>
MOK_HD void acquire_output(Env& env, const Problem& p, const Flags& f, const ComputeTask& t, int block) {
#ifndef MOK_BUG_RING  // planted for a test: results overwrite a ring place that is still being read
  if (kRecompute || (t.kind != kGateUp && t.kind != kDown)) return;
  int old = previous_block(p, block);
  if (old < 0) return;
  Wait w{f.y_ready + old, down_need(p), kWaitHiddenFree, old};
  if (t.kind == kDown) {
    w = Wait{f.y_done + old, p.combine_by_comm && p.mode != kComputeOnly ? kBlockRows : 0, kWaitYDone, old};
  }
  env.wait(w, p.mini_index(t.macro, t.mini));
#endif
}

// After one writer has stored its part of the tile.
template <class Env>
MOK_HD void publish_tile(Env& env, const Flags& f, const ComputeTask& t, int block) {
  if (t.kind == kDownShared) return;  // nobody in this kernel reads y_shared
  env.add((t.kind == kGateUp ? f.hidden_ready : t.kind == kDown ? f.y_ready : f.hidden_shared) + block, 1);
}

// Before the rows of a unit are copied.
template <class Env>
MOK_HD void acquire_unit(Env& env, const Problem& p, const Flags& f, const CommUnit& u) {
  if (p.mode == kCommOnly) return;
  int block = u.row / kBlockRows;
  Wait w{f.y_ready + block, down_need(p), kWaitYReady, block};
  if (u.kind == kDispatch) {
    int old = previous_block(p, block);
    if (kRecompute) old = -1;
    w = Wait{f.hidden_ready + max_int(0, old), old < 0 ? 0 : gate_up_need(p), kWaitXFree, old};
  }
  env.wait(w, p.mini_index(u.macro, u.mini));
}

// After the rows of a unit have been copied and the copies are complete.
template <class Env>
MOK_HD void publish_unit(Env& env, const Problem& p, const Flags& f, const CommUnit& u) {
  if (u.kind == kCombine) {
    env.add(f.y_done + u.row / kBlockRows, kUnitRows);
  } else {
    env.add(f.x_ready + p.mini_index(u.macro, u.mini), kUnitRows);
  }
}

}  // namespace mok
