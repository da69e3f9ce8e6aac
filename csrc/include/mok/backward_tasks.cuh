// Which tile comes next in backward: the order of mok/plan's `backward`, for the GPU and for host threads.
//
// Shared expert first; then macrobatches ascending, 0 as forward saved it, the others replayed (gate+up again). Per
// macrobatch: data gradients, pipelined over minibatches as in forward, then the weight gradients by expert. An expert
// that straddles macrobatches has one chain of additions per gradient, parked in f32 where a macrobatch ends.
// No CUDA here, as in tasks.cuh.
#pragma once

#include "mok/tasks.cuh"

namespace mok {

constexpr int kWideCols = 256;  // columns of every backward tile but the replay's

// Numbers that follow from the sizes, worked out by the host: a kernel has no registers to keep them in.
struct BackwardSizes {
  int inner_tiles;  // tiles of 256 columns of I
  int outer_tiles;  // and of H
  int down_tiles;   // output tiles of 128 x 256 of W_down's gradient
  int wide_tiles;   // of W_gate's, and of W_up's
  int ring_blocks;  // row blocks of the ring

  MOK_HD static BackwardSizes of(int hidden, int intermediate, int ring) {
    int inner = ceil_div(intermediate, kWideCols), outer = ceil_div(hidden, kWideCols);
    return BackwardSizes{inner, outer, ceil_div(hidden, kBlockRows) * inner, ceil_div(intermediate, kBlockRows) * outer,
                         ring / kBlockRows};
  }
};

struct BackwardProblem : Problem {
  int has_shared;  // 1: the shared expert's weight gradients are due, tokens or not
  BackwardSizes sizes;

  // (expert, macrobatch) segments of the schedule: expert + macro never takes one value twice, since walking down the
  // rows raises one or both
  MOK_HD int segment(int expert, int macro) const { return expert + macro; }
};

MOK_HD bool is_shared(int kind) { return kind <= kDownShared || (kind >= kDgradDownShared && kind <= kWgradUpShared); }
MOK_HD bool is_wgrad(int kind) { return (kind >= kWgradDownShared && kind <= kWgradUpShared) || kind >= kWgradDown; }
// The routed kind with the same shape of work.
MOK_HD int routed_kind(int kind) { return kind >= kDgradDownShared && kind <= kWgradUpShared ? kind + 5 : kind; }

// As ComputeTask; of a weight gradient `block` and `tile` are those of the output matrix.
struct BackwardTask : ComputeTask {
  int row;     // weight gradients: first row of the reduction, of the schedule (routed) or of the tokens (shared)
  int rows;    // and how many; 0 = an expert nobody chose, whose gradient is zero
  int chain;   // Chain bits
  int before;  // kPark: segment whose parked accumulators must have been taken up, -1 = none
};
enum Chain : int {
  kResume = 1,  // accumulators start where the previous macrobatch parked them
  kPark = 2,    // the expert goes on in the next macrobatch: park them
};

struct BackwardWalker {
  const BackwardProblem* problem;
  int macro = 0;
  int stage = 0;      // 0 shared expert, 1 replay, 2 data gradients, 3 weight gradients
  int step = -1;      // inside the stage: kind, minibatch, position in the sequence of phases, kind
  int expert = 0;     // cursor over experts: rows [base, base + tokens_per_expert[expert])
  int base = 0;
  int seg_block = 0;  // first row block of the current segment
  int seg_blocks = 0;
  int first = 0;      // first ticket of the current segment
  int tasks = 0;      // tickets of the current segment

  MOK_HD explicit BackwardWalker(const BackwardProblem* p) : problem(p) {}

  // The task of a ticket. Tickets must not fall from call to call.
  MOK_HD BackwardTask seek(int ticket) {
    while (ticket >= first + tasks) {
      first += tasks;
      if (!advance()) return BackwardTask{{kDone, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0, -1};
      tasks = seg_blocks / 2 * tiles() + seg_blocks % 2 * ((tiles() + 1) / 2);
    }
    int pairs = seg_blocks / 2, at = ticket - first, all = tiles();
    bool pair = at < pairs * all;
    int tile = pair ? at / pairs : 2 * (at - pairs * all);
    BackwardTask t{{kind(), stage ? expert : 0, seg_block + (pair ? 2 * (at - tile * pairs) : seg_blocks - 1), pair ? 2 : 1, tile,
                    pair ? 1 : min_int(2, all - tile), macro, stage == 1 || stage == 2 ? mini() : 0},
                   0, 0, 0, -1};
    if (is_wgrad(t.kind)) reduction(t);
    return t;
  }

 private:
  MOK_HD int kind() const {
    if (stage == 0) return kDgradDownShared + step;
    if (stage == 1) return kGateUp;
    if (stage == 3) return kWgradDown + step;
    return is_second() ? kDgradGateUp : kDgradDown;
  }
  MOK_HD int tiles() const {
    int k = routed_kind(kind());
    if (k == kGateUp) return problem->gate_up_tiles();
    return k == kDgradDown || k == kWgradDown ? problem->sizes.inner_tiles : problem->sizes.outer_tiles;
  }
  // Data gradients of n minibatches: A(0), then A(i) B(i-1) for i = 1..n-1, then B(n-1).
  MOK_HD bool is_last() const { return step == 2 * problem->num_minis(macro) - 1; }
  MOK_HD bool is_second() const {
#ifdef MOK_BUG_ORDER  // planted for a test: each minibatch's second gradient before its first
    return step % 2 == 0;
#endif
    return step > 0 && (step % 2 == 0 || is_last());
  }
  MOK_HD int mini() const {
    if (stage == 1) return step;
#ifdef MOK_BUG_ORDER
    return step / 2;
#endif
    if (step == 0) return 0;
    return is_last() ? step / 2 : (step % 2 ? (step + 1) / 2 : step / 2 - 1);
  }
  MOK_HD int count() const { return problem->tokens_per_expert[expert]; }
  MOK_HD int macro_begin() const { return macro * problem->ring; }
  MOK_HD int macro_end() const { return macro_begin() + problem->macro_rows(macro); }
  MOK_HD int output_blocks() const {
    return ceil_div(routed_kind(kind()) == kWgradDown ? problem->hidden : problem->intermediate, kBlockRows);
  }

  // The rows a weight gradient sums over, and where its chain comes from and goes.
  MOK_HD void reduction(BackwardTask& t) const {
    if (stage == 0) {
      t.rows = problem->shared_rows;
      return;
    }
    if (count() == 0) return;
    t.row = max_int(base, macro_begin());
    t.rows = min_int(base + count(), macro_end()) - t.row;
    if (base < macro_begin()) t.chain |= kResume;
    if (base + count() <= macro_end()) return;
    t.chain |= kPark;
    if (t.chain & kResume) return;  // takes up its own before it parks
    // there is one parking place: whoever resumed there last, in this macrobatch or before, must have done so
    int other = expert, row = base;
    for (int at = macro; at > 0 && t.before < 0; --at) {
      while (row > at * problem->ring) row -= problem->tokens_per_expert[--other];
      if (row < at * problem->ring) t.before = problem->segment(other, at);
#ifdef MOK_BUG_PARK  // planted for a test: only who resumed in this macrobatch
      break;
#endif
    }
  }

  MOK_HD bool advance() {
    if (stage == 0) {
      if (!problem->has_shared || ++step == 5) {
        stage = 2;
        step = 0;
        return problem->num_rows > 0 ? open_phase() : open_gradients();
      }
      seg_blocks = is_wgrad(kind()) ? output_blocks() : ceil_div(problem->shared_rows, kBlockRows);
      return true;
    }
    if (stage == 3) {
      if (++step < 3) {
        seg_blocks = output_blocks();
        return true;
      }
      step = 0;
      base += count(), ++expert;
      return find_gradient();
    }
    if (base + count() < problem->mini_begin(macro, mini()) + problem->mini_rows(macro, mini())) {
      base += count(), ++expert;
      return open_segment();
    }
    ++step;
    if (stage == 1 && step == problem->num_minis(macro)) stage = 2, step = 0;
    return stage == 2 && step == 2 * problem->num_minis(macro) ? open_gradients() : open_phase();
  }

  MOK_HD void rewind(int row) {
    while (base > row) base -= problem->tokens_per_expert[--expert];
  }
  MOK_HD bool open_phase() {
    rewind(problem->mini_begin(macro, mini()));
    return open_segment();
  }
  // Moves the cursor to the expert that holds the phase's next row and opens the rows it has in this minibatch.
  MOK_HD bool open_segment() {
    int begin = problem->mini_begin(macro, mini());
    while (base + count() <= begin || count() == 0) base += count(), ++expert;
    int low = max_int(base, begin), high = min_int(base + count(), begin + problem->mini_rows(macro, mini()));
    seg_block = low / kBlockRows;
    seg_blocks = (high - low) / kBlockRows;
    return true;
  }

  MOK_HD bool open_gradients() {
    stage = 3;
    step = 0;
    rewind(macro_begin());
    if (macro == 0) expert = 0;
    return find_gradient();
  }
  // The next expert, from the cursor on, with rows in this macrobatch; in macrobatch 0 also those without any row.
  MOK_HD bool find_gradient() {
    for (; expert < problem->num_experts; base += count(), ++expert) {
      bool here = count() == 0 ? macro == 0 : base < macro_end() && base + count() > macro_begin();
      if (!here) continue;
      seg_block = 0;
      seg_blocks = output_blocks();
      return true;
    }
    if (++macro >= problem->num_macros()) return false;
    stage = 1;
    step = 0;
    return open_phase();
  }
};

// 32 rows of d_y, or of x for a replay, on their way into the ring, or of d_x on their way home. The order of need:
// d_y(0), then for each macrobatch its d_x, the next one's x, the next one's d_y.
struct BackwardCommWalker {
  const BackwardProblem* problem;
  int macro = 0;
  int phase = 1;   // 0 x, 1 d_y, 2 d_x
  int mini = -1;
  int first = 0;
  int units = 0;
  int expert = 0;  // cursor of `segment_of`
  int base = 0;

  MOK_HD explicit BackwardCommWalker(const BackwardProblem* p) : problem(p) {}

  MOK_HD CommUnit seek(int ticket) {
    while (ticket >= first + units) {
      first += units;
      if (!advance()) return CommUnit{kDone, 0, 0, 0};
    }
    int unit = ticket - first;
    if (phase < 2) unit = (unit + (int)((long long)problem->rank * units / problem->ep)) % units;
    int kind = phase == 0 ? kDispatch : phase == 1 ? kDispatchDy : kCombineDx;
    return CommUnit{kind, problem->mini_begin(macro, mini) + unit * kUnitRows, macro, mini};
  }

  // The segment a schedule row belongs to.
  MOK_HD int segment_of(int row) {
    while (base > row) base -= problem->tokens_per_expert[--expert];
    while (base + problem->tokens_per_expert[expert] <= row) base += problem->tokens_per_expert[expert++];
    return problem->segment(expert, row / problem->ring);
  }

 private:
  MOK_HD bool advance() {
    units = 0;
    if (problem->num_rows <= 0 || macro >= problem->num_macros()) return false;
    if (++mini >= problem->num_minis(macro)) {
      mini = 0;
      if (++phase == 3) {
        phase = 0;
        if (++macro >= problem->num_macros()) return false;
      }
    }
    if (phase < 2 || problem->combine_by_comm) units = problem->mini_rows(macro, mini) / kUnitRows;
    return true;
  }
};

}  // namespace mok
