// Which tile comes next: the one definition of the task order, for the GPU and for host threads.
//
// A ticket is a plain counter; `ComputeWalker` and `CommWalker` turn tickets into tasks. Both only ever walk forward,
// so a caller that draws rising tickets pays for each expert segment once. Every task depends only on tasks of lower
// tickets (its own kind's or the other's, see flags.cuh): that, and clusters that start tickets in order, is the whole
// deadlock argument. The order itself is described in docs/kernel-forward.md and mirrored by mok/plan.py; a test
// compares the two task by task.
//
// No CUDA here: this header also builds with g++ (MOK_HD is empty) and runs under ThreadSanitizer.
#pragma once

#ifndef MOK_HD
#ifdef __CUDACC__
#define MOK_HD __host__ __device__ __forceinline__
#else
#define MOK_HD inline
#endif
#endif

namespace mok {

constexpr int kBlockRows = 128;   // rows of a GEMM tile
constexpr int kGateUpCols = 128;  // gate columns (and as many up columns) of one gate+up tile
constexpr int kDownCols = 256;    // columns of H of one down-projection tile
constexpr int kUnitRows = 32;     // rows of one dispatch or combine unit: one per lane of a warp

enum Kind : int {
  kGateUpShared = 0,
  kDownShared = 1,
  kGateUp = 2,
  kDown = 3,
  kDispatch = 4,
  kCombine = 5,
  kDone = 6,
  // backward (backward_tasks.cuh)
  kDgradDownShared = 7,
  kDgradGateUpShared = 8,
  kWgradDownShared = 9,
  kWgradGateShared = 10,
  kWgradUpShared = 11,
  kDgradDown = 12,
  kDgradGateUp = 13,
  kWgradDown = 14,
  kWgradGate = 15,
  kWgradUp = 16,
  kDispatchDy = 17,
  kCombineDx = 18,
};

// A recompute of the saved context: macrobatch 0's rows and gate+up, the shared expert's gate+up, and nothing else.
#ifndef MOK_RECOMPUTE
#define MOK_RECOMPUTE 0
#endif
constexpr bool kRecompute = MOK_RECOMPUTE;

// Which matrix unit multiplies: wgmma (SM90), mma.sync (any of SM90 and newer), or tcgen05 on a pair of CTAs (SM100).
enum Tile : int { kTileSm90 = 0, kTilePortable = 1, kTileSm100 = 2 };
#ifndef MOK_TILE
#define MOK_TILE 0
#endif
constexpr int kTile = MOK_TILE;
// A pair multiplies two row blocks or none: experts' rows are padded to 256 there, and the shared expert's blocks are even.
constexpr int kBlocksTogether = kTile == kTileSm100 ? 2 : 1;

enum Mode : int { kEverything = 0, kCommOnly = 1, kComputeOnly = 2 };

MOK_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }
MOK_HD int min_int(int a, int b) { return a < b ? a : b; }
MOK_HD int max_int(int a, int b) { return a > b ? a : b; }

// One rank's forward step. Rows are rows of the schedule, pads included (a multiple of kBlockRows).
struct Problem {
  int hidden;                    // H
  int intermediate;              // I
  int shared_rows;               // tokens of the shared expert, 0 = none
  int num_experts;               // local experts
  int num_rows;                  // schedule rows in use
  int ring;                      // rows of the macrobatch ring, a multiple of kBlockRows
  int minibatch;                 // rows of a minibatch, a multiple of kBlockRows
  int rank;
  int ep;
  int combine_by_comm;           // 1: combine units exist; 0: the down projection's epilogue pushes rows home
  int mode;                      // Mode
  const int* tokens_per_expert;  // [num_experts], multiples of kBlockRows

  MOK_HD int num_macros() const { return max_int(1, ceil_div(num_rows, ring)); }
  MOK_HD int macro_rows(int m) const { return max_int(0, min_int(ring, num_rows - m * ring)); }
  MOK_HD int num_minis(int m) const { return ceil_div(macro_rows(m), minibatch); }
  MOK_HD int mini_rows(int m, int i) const { return min_int(minibatch, macro_rows(m) - i * minibatch); }
  MOK_HD int mini_begin(int m, int i) const { return m * ring + i * minibatch; }
  MOK_HD int mini_index(int m, int i) const { return m * ceil_div(ring, minibatch) + i; }
  MOK_HD int gate_up_tiles() const { return ceil_div(intermediate, kGateUpCols); }
  MOK_HD int down_tiles() const { return ceil_div(hidden, kDownCols); }
};

// What one cluster takes with one ticket: two row blocks of one expert x one column tile (a pair: the CTAs share the
// weight tile), or the odd last row block of a segment x two column tiles (a single: no CTA idles).
struct ComputeTask {
  int kind;        // Kind, kDone when the tickets are exhausted
  int expert;      // local expert, 0 for the shared one
  int block;       // first row block; schedule rows (routed) or tokens (shared) / kBlockRows
  int num_blocks;  // 2 pair, 1 single
  int tile;        // first column tile
  int num_tiles;   // 1 pair, 2 single (1 at the end of an odd number of tiles)
  int macro;
  int mini;        // minibatch inside the macrobatch

  // The part of CTA `cta` of the cluster.
  MOK_HD bool has(int cta) const { return num_blocks == 2 || cta < num_tiles; }
  MOK_HD int block_of(int cta) const { return num_blocks == 2 ? block + cta : block; }
  MOK_HD int tile_of(int cta) const { return num_blocks == 2 ? tile : tile + cta; }
};

// State is kept small on purpose: the GPU's scheduler thread lives in 40 registers.
struct ComputeWalker {
  const Problem* problem;
  int macro = 0;
  int step = -2;      // -2 shared gate+up, -1 shared down, then the position in the macrobatch's sequence of phases
  int expert = 0;     // cursor over experts: rows [base, base + tokens_per_expert[expert])
  int base = 0;
  int seg_block = 0;  // first row block of the current segment
  int seg_blocks = 0;
  int first = 0;      // first ticket of the current segment
  int tasks = 0;      // tickets of the current segment

  MOK_HD explicit ComputeWalker(const Problem* p) : problem(p) { open_shared(); }

  // The task of a ticket. Tickets must not fall from call to call.
  MOK_HD ComputeTask seek(int ticket) {
    while (ticket >= first + tasks) {
      first += tasks;
      if (!advance()) return ComputeTask{kDone, 0, 0, 0, 0, 0, 0, 0};
    }
    bool routed = step >= 0;
    int kind = (routed ? kGateUp : kGateUpShared) + (is_down() ? 1 : 0);
    int owner = routed ? expert : 0, mini = routed ? mini_of_step() : 0;
    int pairs = seg_blocks / 2, at = ticket - first, all = tiles();
    if (at < pairs * all) {
      int tile = at / pairs;
      return ComputeTask{kind, owner, seg_block + 2 * (at - tile * pairs), 2, tile, 1, macro, mini};
    }
    int tile = 2 * (at - pairs * all);
    return ComputeTask{kind, owner, seg_block + seg_blocks - 1, 1, tile, min_int(2, all - tile), macro, mini};
  }

 private:
  // Phases of a macrobatch of n minibatches: G(0), then G(i) D(i-1) for i = 1..n-1, then D(n-1). A down projection
  // comes one minibatch late, so it never waits for the tail of its own gate+up phase.
  MOK_HD bool is_last() const { return step == (kRecompute ? 1 : 2) * problem->num_minis(macro) - 1; }
  MOK_HD bool is_down() const {
    if (kRecompute) return false;
#ifdef MOK_BUG_ORDER  // planted for a test: each minibatch's down projection before its gate+up
    return step == -1 || (step >= 0 && step % 2 == 0);
#endif
    return step == -1 || (step > 0 && (step % 2 == 0 || is_last()));
  }
  MOK_HD int mini_of_step() const {
#ifdef MOK_BUG_ORDER
    return step / 2;
#endif
    if (kRecompute) return step;
    if (step == 0) return 0;
    return is_last() ? step / 2 : (step % 2 ? (step + 1) / 2 : step / 2 - 1);
  }

  MOK_HD int tiles() const { return is_down() ? problem->down_tiles() : problem->gate_up_tiles(); }
  MOK_HD void count_tasks() { tasks = seg_blocks / 2 * tiles() + seg_blocks % 2 * ((tiles() + 1) / 2); }

  MOK_HD void open_shared() {
    seg_blocks = ceil_div(problem->shared_rows, kBlockRows * kBlocksTogether) * kBlocksTogether;
    count_tasks();
  }

  MOK_HD bool advance() {
    if (step < 0) {
      if (++step == -1) {
        if (!kRecompute) {
          open_shared();
          return true;
        }
        ++step;
      }
      if (problem->num_rows <= 0) return false;
      macro = kRecompute ? 0 : problem->num_macros() - 1;
      return open_segment();
    }
    int mini = mini_of_step();
    if (base + problem->tokens_per_expert[expert] < problem->mini_begin(macro, mini) + problem->mini_rows(macro, mini)) {
      base += problem->tokens_per_expert[expert++];
      return open_segment();
    }
    if (is_last()) {
      if (--macro < 0) return false;
      step = -1;
    }
    ++step;
    int begin = problem->mini_begin(macro, mini_of_step());
    while (base > begin) base -= problem->tokens_per_expert[--expert];
    return open_segment();
  }

  // Moves the cursor to the expert that holds the phase's next row and opens the rows it has in this minibatch.
  MOK_HD bool open_segment() {
    int mini = mini_of_step();
    int begin = problem->mini_begin(macro, mini);
    int count = problem->tokens_per_expert[expert];
    while (count == 0 || base + count <= begin) {
      base += count;
      count = problem->tokens_per_expert[++expert];
    }
    int low = max_int(base, begin);
    int high = min_int(base + count, begin + problem->mini_rows(macro, mini));
    seg_block = low / kBlockRows;
    seg_blocks = (high - low) / kBlockRows;
    count_tasks();
    return true;
  }
};

// 32 rows on their way from a peer's x into the ring (dispatch), or from the ring to their slot at home (combine).
struct CommUnit {
  int kind;   // kDispatch, kCombine, kDone
  int row;    // first schedule row
  int macro;
  int mini;
};

struct CommWalker {
  const Problem* problem;
  int macro;         // macrobatch whose combine this pass serves; the first pass only dispatches the last macrobatch
  int mini = -1;
  int combine = 0;
  int first = 0;
  int units = 0;
  int done = 0;

  MOK_HD explicit CommWalker(const Problem* p) : problem(p), macro(kRecompute ? 1 : p->num_macros()) {
    combine = 1;
    done = p->num_rows <= 0;
  }

  MOK_HD CommUnit seek(int ticket) {
    while (!done && ticket >= first + units) {
      first += units;
      next_phase();
    }
    if (done) return CommUnit{kDone, 0, 0, 0};
    int unit = ticket - first;
    int m = combine ? macro : macro - 1;
    if (!combine) unit = (unit + (int)((long long)problem->rank * units / problem->ep)) % units;
    return CommUnit{combine ? kCombine : kDispatch, problem->mini_begin(m, mini) + unit * kUnitRows, m, mini};
  }

 private:
  MOK_HD int minis(int m) const { return m < problem->num_macros() && m >= 0 ? problem->num_minis(m) : 0; }

  MOK_HD void next_phase() {
    units = 0;
    if (!combine && mini >= 0) {
      // after combine(macro, mini) comes dispatch(macro - 1, mini), handled below; here the pair is finished
      combine = 1;
      if (++mini >= max_int(kRecompute ? 0 : minis(macro), minis(macro - 1))) {
        mini = 0;
        if (--macro < kRecompute) {
          done = 1;
          return;
        }
      }
      if (problem->combine_by_comm && !kRecompute && mini < minis(macro)) units = problem->mini_rows(macro, mini) / kUnitRows;
      return;
    }
    if (mini < 0) mini = 0;
    combine = 0;
    if (mini < minis(macro - 1)) units = problem->mini_rows(macro - 1, mini) / kUnitRows;
  }
};

}  // namespace mok
