// The backward kernel's own task order and flags, run by host threads over plain memory; see protocol.cpp.
//
//   backward fuzz SEED COUNT THREADS
//   backward late SEED COUNT THREADS    one problem, whose parked accumulators are taken up late
//   backward dump H I T has_shared ring minibatch rank ep combine_by_comm experts...
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "host_env.hpp"
#include "mok/backward_flags.cuh"

using namespace mok;

// Buffers of one rank, one int per row, or per (row block half, tile). A gradient's accumulator is one int per tile half:
// a chain over the rows in order, so a lost, doubled or misplaced macrobatch shows.
struct Memory {
  std::vector<int> x, d_y, gate_up, d_hidden, d_x, out, parked, grads;
  std::vector<int> shared_d_hidden, d_x_shared, shared_grads;
  std::vector<int> flags;
};

static int source(int row, int salt) { return mix(row, salt); }
static int saved(int row_half, int tile) { return mix(row_half, 1000 + tile); }  // gate and up of macrobatch 0
static int d_hidden_value(int rows, int gate_up, int expert, int tile) { return mix(mix(rows, gate_up), mix(expert, 31 + tile)); }

struct Worker {
  const BackwardProblem& p;
  Memory& m;
  BackwardFlags flags;
  HostEnv env;
  bool late = false;  // hold back one tile that takes up parked accumulators
  int g = p.gate_up_tiles(), n = p.sizes.inner_tiles, d = p.down_tiles();

  int ring_block(const BackwardTask& t, int block) const { return is_shared(t.kind) ? block : block - t.macro * (p.ring / kBlockRows); }
  int rows_of(const std::vector<int>& from, int ring_block, int half) const {
    int sum = 0;
    for (int r = 0; r < 64; ++r) sum += from[ring_block * kBlockRows + half * 64 + r];
    return sum;
  }
  static int shared_rows_of(int block, int half, int salt) {
    int sum = 0;
    for (int r = 0; r < 64; ++r) sum += source(-1 - (block * kBlockRows + half * 64 + r), salt);
    return sum;
  }

  void replay(const BackwardTask& t, int block, int tile, int half) {
    int at = ring_block(t, block), sum = rows_of(m.x, at, half);
    acquire_output(env, p, flags, t, block);
    m.gate_up[(at * g + tile) * 2 + half] = mix(sum, mix(t.expert, tile));
  }
  void dgrad_down(const BackwardTask& t, int block, int tile, int half) {
    bool shared = is_shared(t.kind);
    int at = ring_block(t, block), rows = shared ? shared_rows_of(block, half, 5) : rows_of(m.d_y, at, half), both = 0;
    for (int i = 2 * tile; i < std::min(2 * tile + 2, g); ++i) {
      both = mix(both, shared ? saved(-1 - (block * 2 + half), i)
                              : t.macro == 0 ? saved(block * 2 + half, i) : m.gate_up[(at * g + i) * 2 + half]);
    }
    acquire_output(env, p, flags, t, block);
    (shared ? m.shared_d_hidden : m.d_hidden)[(at * n + tile) * 2 + half] = d_hidden_value(rows, both, t.expert, tile);
  }
  void dgrad_gate_up(const BackwardTask& t, int block, int tile, int half) {
    bool shared = is_shared(t.kind);
    int at = ring_block(t, block), sum = 0;
    for (int i = 0; i < n; ++i) sum = mix(sum, (shared ? m.shared_d_hidden : m.d_hidden)[(at * n + i) * 2 + half]);
    acquire_output(env, p, flags, t, block);
    int value = mix(sum, mix(t.expert, tile));
    if (shared) {
      m.d_x_shared[(block * d + tile) * 2 + half] = value;
    } else if (p.combine_by_comm) {
      m.d_x[(at * d + tile) * 2 + half] = value;
    } else {
      for (int r = 0; r < 64; ++r) m.out[(block * kBlockRows + half * 64 + r) * d + tile] = mix(value, r);
    }
  }
  // One half of an output tile: both halves read all rows of the segment.
  void wgrad(const BackwardTask& t, int block, int tile, int half) {
    bool shared = is_shared(t.kind);
    int kind = routed_kind(t.kind), tiles = kind == kWgradDown ? n : d, which = kind - kWgradDown;
    int most = std::max(ceil_div(p.hidden, kBlockRows) * n, ceil_div(p.intermediate, kBlockRows) * d);
    int place = (which * most + block * tiles + tile) * 2 + half, sum = 0;
    if (late && t.chain == kResume && kind == kWgradUp && block + tile == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    acquire_chain(env, p, flags, t);
    if (t.chain & kResume) sum = m.parked[place];
    for (int r = t.row; r < t.row + t.rows; r += kBlockRows) {
      int at = shared ? r / kBlockRows : r / kBlockRows - t.macro * (p.ring / kBlockRows);
      int operand = 0;
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < n; ++i) operand = mix(operand, (shared ? m.shared_d_hidden : m.d_hidden)[(at * n + i) * 2 + h]);
        if (kind == kWgradDown) {
          operand += shared ? shared_rows_of(at, h, 5) : rows_of(m.d_y, at, h);
        } else {
          // x of macrobatch 0 is the context's, never in the ring
          int x = 0;
          if (shared || t.macro == 0) {
            for (int i = 0; i < 64; ++i) x += source(shared ? -1 - (at * kBlockRows + h * 64 + i) : r + h * 64 + i, 77);
          } else {
            x = rows_of(m.x, at, h);
          }
          operand += x;
        }
      }
      sum = mix(sum, operand);
    }
    acquire_output(env, p, flags, t, block);
    if (t.chain & kPark) {
      m.parked[place] = sum;
    } else {
      (shared ? m.shared_grads : m.grads)[(shared ? 0 : t.expert) * 3 * most * 2 + place] = sum;
    }
  }

  void compute(Shared& shared) {
    BackwardWalker walker(&p);
    for (;;) {
      BackwardTask t = walker.seek(env.ticket(shared.compute_ticket));
      if (t.kind == kDone) return;
      for (int cta = 0; cta < 2; ++cta) {
        if (!t.has(cta)) continue;
        int block = t.block_of(cta), tile = t.tile_of(cta), kind = routed_kind(t.kind);
        env.jitter();
        acquire_input(env, p, flags, t, block);
        acquire_gate_up(env, p, flags, t, block);
        for (int half = 0; half < 2; ++half) {
          if (kind == kGateUp) replay(t, block, tile, half);
          if (kind == kDgradDown) dgrad_down(t, block, tile, half);
          if (kind == kDgradGateUp) dgrad_gate_up(t, block, tile, half);
          if (kind >= kWgradDown) wgrad(t, block, tile, half);
          publish_tile(env, p, flags, t, block);
        }
      }
    }
  }

  void communicate(Shared& shared) {
    BackwardCommWalker walker(&p);
    for (;;) {
      CommUnit u = walker.seek(env.ticket(shared.comm_ticket));
      if (u.kind == kDone) return;
      acquire_unit(env, p, flags, walker, u);
      for (int r = u.row; r < u.row + kUnitRows; ++r) {
        int at = r - u.macro * p.ring, in_block = at % kBlockRows;
        if (u.kind == kDispatch) m.x[at] = source(r, 77);
        if (u.kind == kDispatchDy) m.d_y[at] = source(r, 5);
        if (u.kind == kCombineDx) {
          for (int i = 0; i < d; ++i)
            m.out[r * d + i] = mix(m.d_x[(at / kBlockRows * d + i) * 2 + in_block / 64], in_block % 64);
        }
      }
      publish_unit(env, p, flags, u);
    }
  }
};

// What everything must hold in the end, computed row block by row block, without order, ring or flags.
static bool check(const BackwardProblem& p, const Memory& m) {
  int g = p.gate_up_tiles(), n = p.sizes.inner_tiles, d = p.down_tiles();
  int most = std::max(ceil_div(p.hidden, kBlockRows) * n, ceil_div(p.intermediate, kBlockRows) * d);
  auto rows = [&](int block, int half, int salt, bool shared) {
    int sum = 0;
    for (int r = 0; r < 64; ++r) {
      int row = block * kBlockRows + half * 64 + r;
      sum += source(shared ? -1 - row : row, salt);
    }
    return sum;
  };
  auto expert = [&](int e, int first, int last, bool shared, int* grads) {
    std::vector<int> chain(3 * most * 2, 0);
    for (int block = first; block < last; ++block) {
      int operand[3] = {0, 0, 0};
      for (int half = 0; half < 2; ++half) {
        std::vector<int> hidden(n);
        for (int tile = 0; tile < n; ++tile) {
          int both = 0;
          for (int i = 2 * tile; i < std::min(2 * tile + 2, g); ++i) {
            int fresh = mix(rows(block, half, 77, shared), mix(e, i));
            int id = block * 2 + half;
            both = mix(both, shared ? saved(-1 - id, i) : block * kBlockRows < p.ring ? saved(id, i) : fresh);
          }
          hidden[tile] = d_hidden_value(rows(block, half, 5, shared), both, e, tile);
        }
        int sum = 0;
        for (int v : hidden) sum = mix(sum, v);
        for (int i = 0; i < d; ++i) {
          int value = mix(sum, mix(e, i));
          if (shared) {
            if (m.d_x_shared[(block * d + i) * 2 + half] != value) return false;
            continue;
          }
          for (int r = 0; r < 64; ++r)
            if (m.out[(block * kBlockRows + half * 64 + r) * d + i] != mix(value, r)) return false;
        }
        for (int which = 0; which < 3; ++which) {
          for (int v : hidden) operand[which] = mix(operand[which], v);
          operand[which] += rows(block, half, which == 0 ? 5 : 77, shared);
        }
      }
      for (int which = 0; which < 3; ++which)
        for (int i = 0; i < most * 2; ++i) chain[which * most * 2 + i] = mix(chain[which * most * 2 + i], operand[which]);
    }
    for (int which = 0; which < 3; ++which) {
      int tiles = which == 0 ? ceil_div(p.hidden, kBlockRows) * n : ceil_div(p.intermediate, kBlockRows) * d;
      for (int i = 0; i < tiles * 2; ++i)
        if (grads[which * most * 2 + i] != chain[which * most * 2 + i]) return false;
    }
    return true;
  };
  int block = 0;
  for (int e = 0; e < p.num_experts; ++e) {
    int blocks = p.tokens_per_expert[e] / kBlockRows;
    if (!expert(e, block, block + blocks, false, const_cast<int*>(m.grads.data()) + e * 3 * most * 2)) return false;
    block += blocks;
  }
  return !p.has_shared ||
         expert(0, 0, ceil_div(p.shared_rows, kBlockRows), true, const_cast<int*>(m.shared_grads.data()));
}

static int fuzz(unsigned seed, int count, int threads, bool late) {
  for (int number = 0; number < count; ++number) {
    std::minstd_rand random(seed + number);
    auto pick = [&](int low, int high) { return low + (int)(random() % (unsigned)(high - low + 1)); };
    std::vector<int> tokens(pick(1, 5));
    for (int& t : tokens) t = pick(0, 2) ? kBlockRows * pick(0, 5) : 0;
    int rows = 0;
    for (int t : tokens) rows += t;
    int mini = kBlockRows * pick(1, 3), ring = kBlockRows * pick(1, std::max(1, rows / kBlockRows + 1)), ep = pick(1, 4);
    int has_shared = pick(0, 1), hidden = 64 * pick(1, 8), intermediate = 64 * pick(1, 8);
    if (late) {
      // the first expert takes up in macrobatch 1 and ends there, nobody takes up in macrobatch 2, the last expert parks
      // there, and none of its rows lies where the first one's lay
      tokens = {3 * kBlockRows, kBlockRows, kBlockRows, 4 * kBlockRows};
      rows = 9 * kBlockRows, ring = 2 * kBlockRows, mini = kBlockRows, has_shared = 0, hidden = intermediate = 64;
    }
    BackwardProblem p{{hidden, intermediate, has_shared ? pick(0, 400) : 0, (int)tokens.size(), rows, ring, mini,
                       pick(0, ep - 1), ep, pick(0, 1), kEverything, tokens.data()}, has_shared, {}};
    p.sizes = BackwardSizes::of(p.hidden, p.intermediate, ring);
    int g = p.gate_up_tiles(), n = p.sizes.inner_tiles, d = p.down_tiles(), blocks = rows / kBlockRows, ring_blocks = ring / kBlockRows;
    int shared_blocks = ceil_div(p.shared_rows, kBlockRows), minis = p.num_macros() * ceil_div(ring, mini) + 1;
    int segments = p.num_experts + p.num_macros();
    int most = std::max(ceil_div(p.hidden, kBlockRows) * n, ceil_div(p.intermediate, kBlockRows) * d);
    Memory m;
    m.x.assign(ring, -1), m.d_y.assign(ring, -1);
    m.gate_up.assign(ring_blocks * g * 2, -1), m.d_hidden.assign(ring_blocks * n * 2, -1), m.d_x.assign(ring_blocks * d * 2, -1);
    m.out.assign(rows * d, -1);
    m.parked.assign(3 * most * 2, -1), m.shared_grads.assign(3 * most * 2, -1), m.grads.assign(p.num_experts * 3 * most * 2, -1);
    m.shared_d_hidden.assign(shared_blocks * n * 2, -1), m.d_x_shared.assign(shared_blocks * d * 2, -1);
    const int sizes[10] = {minis, minis, shared_blocks, 1, blocks, blocks, blocks, blocks, segments, segments};
    int* arrays[10];
    m.flags.assign(std::accumulate(sizes, sizes + 10, 0), 0);
    for (int i = 0, at = 0; i < 10; at += sizes[i++]) arrays[i] = m.flags.data() + at;
    BackwardFlags flags;
    std::memcpy(&flags, arrays, sizeof flags);
    Shared shared;
    shared.deadline = Clock::now() + std::chrono::seconds(2);
    std::vector<std::thread> pool;
    int comm = late ? threads / 2 : 1 + number % std::max(1, threads / 2);
    for (int i = 0; i < threads; ++i) {
      pool.emplace_back([&, i] {
        Worker w{p, m, flags, HostEnv{shared, std::minstd_rand(seed * 31 + number * 7 + i)}, late};
        if (i < comm) w.communicate(shared); else w.compute(shared);
      });
    }
    for (auto& t : pool) t.join();
    if (!check(p, m)) {
      std::printf("WRONG problem %d of seed %u\n", number, seed);
      return 2;
    }
  }
  std::printf("OK %d problems\n", count);
  return 0;
}

static int dump(int n, char** v) {
  int a[9];
  for (int i = 0; i < 9; ++i) a[i] = std::atoi(v[i]);
  std::vector<int> tokens;
  int rows = 0;
  for (int i = 9; i < n; ++i) tokens.push_back(std::atoi(v[i])), rows += tokens.back();
  BackwardProblem p{{a[0], a[1], a[2], (int)tokens.size(), rows, a[4], a[5], a[6], a[7], a[8], kEverything, tokens.data()}, a[3],
                    BackwardSizes::of(a[0], a[1], a[4])};
  BackwardWalker compute(&p);
  for (int ticket = 0;; ++ticket) {
    BackwardTask t = compute.seek(ticket);
    if (t.kind == kDone) break;
    std::printf("task %d %d %d %d %d %d %d %d", t.kind, t.expert, t.block, t.num_blocks, t.tile, t.num_tiles, t.macro, t.mini);
    if (is_wgrad(t.kind)) std::printf(" rows %d %d", t.row, t.row + t.rows);
    std::printf("\n");
  }
  BackwardCommWalker comm(&p);
  for (int ticket = 0;; ++ticket) {
    CommUnit u = comm.seek(ticket);
    if (u.kind == kDone) break;
    std::printf("unit %d %d %d %d\n", u.kind, u.row, u.macro, u.mini);
  }
  return 0;
}

int main(int argc, char** argv) {
  bool late = argc > 1 && !std::strcmp(argv[1], "late");
  if (argc == 5 && (late || !std::strcmp(argv[1], "fuzz"))) {
    return fuzz(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), late);
  }
  if (argc > 11 && !std::strcmp(argv[1], "dump")) return dump(argc - 2, argv + 2);
  std::fprintf(stderr, "usage: backward fuzz|late SEED COUNT THREADS | backward dump H I T has_shared ring minibatch rank ep comm experts...\n");
  return 64;
}
