// The forward kernel's own task order and flags, run by host threads over plain memory.
//
//   protocol fuzz SEED COUNT THREADS   random problems; every result is checked; a hang ends after two seconds
//   protocol dump H I T ring minibatch rank ep combine_by_comm experts...   tasks and units, one per line
//
// Built with -fsanitize=thread, a missing release, acquire or wait is a reported race: the data is plain `int`.
// -DMOK_BUG_RELAXED, -DMOK_BUG_ORDER, -DMOK_BUG_RING plant one protocol bug each.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "host_env.hpp"
#include "mok/flags.cuh"

using namespace mok;

// Buffers of one rank. A tile is two halves of 64 rows, stored by two writers as on the GPU.
struct Memory {
  std::vector<int> x, hidden, y, shared_hidden, y_shared, out;
  std::vector<int> x_ready, hidden_shared, hidden_ready, y_ready, y_done;
};

static int source(int row) { return mix(row, 77); }

struct Worker {
  const Problem& p;
  Memory& m;
  Flags flags;
  HostEnv env;

  void compute_half(const ComputeTask& t, int block, int tile, int half) {
    int g = p.gate_up_tiles(), d = p.down_tiles();
    bool shared = t.kind == kGateUpShared || t.kind == kDownShared;
    int ring_block = shared ? block : block - t.macro * (p.ring / kBlockRows);
    auto& hidden = shared ? m.shared_hidden : m.hidden;
    if (t.kind == kGateUp || t.kind == kGateUpShared) {
      int sum = 0;
      for (int r = 0; r < 64; ++r) {
        int row = ring_block * kBlockRows + half * 64 + r;
        sum += shared ? source(-1 - row) : m.x[row];
      }
      acquire_output(env, p, flags, t, block);
      hidden[(ring_block * g + tile) * 2 + half] = mix(sum, mix(t.expert, tile));
    } else {
      int sum = 0;
      for (int i = 0; i < g; ++i) sum = mix(sum, hidden[(ring_block * g + i) * 2 + half]);
      acquire_output(env, p, flags, t, block);
      int value = mix(sum, mix(t.expert, tile));
      if (shared) {
        m.y_shared[(block * d + tile) * 2 + half] = value;
      } else if (p.combine_by_comm) {
        m.y[(ring_block * d + tile) * 2 + half] = value;
      } else {
        for (int r = 0; r < 64; ++r) m.out[(block * kBlockRows + half * 64 + r) * d + tile] = mix(value, r);
      }
    }
    publish_tile(env, flags, t, block);
  }

  void compute(Shared& shared) {
    ComputeWalker walker(&p);
    for (;;) {
      ComputeTask t = walker.seek(env.ticket(shared.compute_ticket));
      if (t.kind == kDone) return;
      for (int cta = 0; cta < 2; ++cta) {
        if (!t.has(cta)) continue;
        env.jitter();
        acquire_input(env, p, flags, t, t.block_of(cta));
        for (int half = 0; half < 2; ++half) compute_half(t, t.block_of(cta), t.tile_of(cta), half);
      }
    }
  }

  void communicate(Shared& shared) {
    CommWalker walker(&p);
    int d = p.down_tiles();
    for (;;) {
      CommUnit u = walker.seek(env.ticket(shared.comm_ticket));
      if (u.kind == kDone) return;
      acquire_unit(env, p, flags, u);
      for (int r = u.row; r < u.row + kUnitRows; ++r) {
        int at = r - u.macro * p.ring;
        if (u.kind == kDispatch) {
          m.x[at] = source(r);
        } else {
          int in_block = at % kBlockRows;
          for (int i = 0; i < d; ++i)
            m.out[r * d + i] = mix(m.y[(at / kBlockRows * d + i) * 2 + in_block / 64], in_block % 64);
        }
      }
      publish_unit(env, p, flags, u);
    }
  }
};

// What every row must hold in the end, computed without order or flags.
static bool check(const Problem& p, const Memory& m) {
  int g = p.gate_up_tiles(), d = p.down_tiles(), row0 = 0;
  auto expect = [&](int expert, int tile, int first, bool shared) {
    int sum = 0, h = 0;
    for (int r = 0; r < 64; ++r) sum += shared ? source(-1 - (first + r)) : source(first + r);
    for (int i = 0; i < g; ++i) h = mix(h, mix(sum, mix(expert, i)));
    return mix(h, mix(expert, tile));
  };
  for (int e = 0; e < p.num_experts; row0 += p.tokens_per_expert[e++]) {
    for (int first = row0; first < row0 + p.tokens_per_expert[e]; first += 64) {
      for (int i = 0; i < d; ++i) {
        int value = expect(e, i, first, false);
        for (int r = 0; r < 64; ++r)
          if (m.out[(first + r) * d + i] != mix(value, r)) return false;
      }
    }
  }
  for (int block = 0; block < ceil_div(p.shared_rows, kBlockRows); ++block)
    for (int i = 0; i < d; ++i)
      for (int half = 0; half < 2; ++half)
        if (m.y_shared[(block * d + i) * 2 + half] != expect(0, i, block * kBlockRows + half * 64, true)) return false;
  return true;
}

static int fuzz(unsigned seed, int count, int threads) {
  for (int n = 0; n < count; ++n) {
    std::minstd_rand random(seed + n);
    auto pick = [&](int low, int high) { return low + (int)(random() % (unsigned)(high - low + 1)); };
    std::vector<int> tokens(pick(1, 6));
    for (int& t : tokens) t = pick(0, 2) ? kBlockRows * pick(0, 4) : 0;
    int rows = 0;
    for (int t : tokens) rows += t;
    int mini = kBlockRows * pick(1, 3), ring = kBlockRows * pick(1, std::max(1, rows / kBlockRows + 1)), ep = pick(1, 4);
    Problem p{64 * pick(1, 8), 64 * pick(1, 6), pick(0, 2) ? 0 : pick(1, 400), (int)tokens.size(), rows, ring, mini,
              pick(0, ep - 1), ep, pick(0, 1), kEverything, tokens.data()};
    int g = p.gate_up_tiles(), d = p.down_tiles(), blocks = rows / kBlockRows, ring_blocks = ring / kBlockRows;
    int shared_blocks = ceil_div(p.shared_rows, kBlockRows);
    Memory m;
    m.x.assign(ring, -1);
    m.hidden.assign(ring_blocks * g * 2, -1);
    m.y.assign(ring_blocks * d * 2, -1);
    m.shared_hidden.assign(shared_blocks * g * 2, -1);
    m.y_shared.assign(shared_blocks * d * 2, -1);
    m.out.assign(rows * d, -1);
    m.x_ready.assign(p.num_macros() * ceil_div(ring, mini) + 1, 0);
    m.hidden_shared.assign(shared_blocks + 1, 0);
    for (auto* f : {&m.hidden_ready, &m.y_ready, &m.y_done}) f->assign(blocks + 1, 0);
    Flags flags{m.x_ready.data(), m.hidden_shared.data(), m.hidden_ready.data(), m.y_ready.data(), m.y_done.data()};
    Shared shared;
    shared.deadline = Clock::now() + std::chrono::seconds(2);
    std::vector<std::thread> pool;
    int comm = 1 + n % std::max(1, threads / 2);
    for (int i = 0; i < threads; ++i) {
      pool.emplace_back([&, i] {
        Worker w{p, m, flags, HostEnv{shared, std::minstd_rand(seed * 31 + n * 7 + i)}};
        if (i < comm) w.communicate(shared); else w.compute(shared);
      });
    }
    for (auto& t : pool) t.join();
    if (!check(p, m)) {
      std::printf("WRONG problem %d of seed %u\n", n, seed);
      return 2;
    }
  }
  std::printf("OK %d problems\n", count);
  return 0;
}

static int dump(int n, char** v) {
  int a[8];
  for (int i = 0; i < 8; ++i) a[i] = std::atoi(v[i]);
  std::vector<int> tokens;
  int rows = 0;
  for (int i = 8; i < n; ++i) tokens.push_back(std::atoi(v[i])), rows += tokens.back();
  Problem p{a[0], a[1], a[2], (int)tokens.size(), rows, a[3], a[4], a[5], a[6], a[7], kEverything, tokens.data()};
  ComputeWalker compute(&p);
  for (int ticket = 0;; ++ticket) {
    ComputeTask t = compute.seek(ticket);
    if (t.kind == kDone) break;
    std::printf("task %d %d %d %d %d %d %d %d\n", t.kind, t.expert, t.block, t.num_blocks, t.tile, t.num_tiles, t.macro, t.mini);
  }
  CommWalker comm(&p);
  for (int ticket = 0;; ++ticket) {
    CommUnit u = comm.seek(ticket);
    if (u.kind == kDone) break;
    std::printf("unit %d %d %d %d\n", u.kind, u.row, u.macro, u.mini);
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc == 5 && !std::strcmp(argv[1], "fuzz")) return fuzz(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]));
  if (argc > 10 && !std::strcmp(argv[1], "dump")) return dump(argc - 2, argv + 2);
  std::fprintf(stderr, "usage: protocol fuzz SEED COUNT THREADS | protocol dump H I T ring minibatch rank ep comm experts...\n");
  return 64;
}
