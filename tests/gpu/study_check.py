"""The statistics of a study against planted changes on this GPU: 100 products of matrices beside 100, 101, 105 and 95.

How long 101 take against 100 is known beforehand, on any GPU, whatever its clocks do meanwhile: +1 %. Run it on a GPU that
nobody else uses; `python tests/gpu/study_check.py [OUT.json]`.
"""

from __future__ import annotations

import collections
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from checks import Checks

from mok.ablate.guards import Guards, health
from mok.ablate.looks import Looks
from mok.ablate.pairs import compare
from mok.ablate.verdict import decide

SIZE, PRODUCTS, BURST = 2048, 100, 5
PLANTED = {100: "SAME", 101: "SAME", 105: "SLOWER", 95: "FASTER"}
REPEATS = 5
MIN_BLOCKS, MAX_BLOCKS = 8, 40


def burst_of(products: int) -> Callable[[], dict[str, list[float]]]:
    """Milliseconds of five replays of `products` matrix products, captured as one graph."""
    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    for _ in range(3):
        torch.matmul(left, right, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(products):
            torch.matmul(left, right, out=out)

    def burst() -> dict[str, list[float]]:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(BURST)]
        for begin, end in marks:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return {"ms": [begin.elapsed_time(end) for begin, end in marks]}

    return burst


def main() -> None:
    checks = Checks("study")
    guards = Guards("cuda")
    guards.read()
    took = []
    for _ in range(50):
        start = time.perf_counter()
        reading = guards.read()
        took.append((time.perf_counter() - start) * 1e3)
    print(dict(reading))
    checks.check(all(value is not None for value in reading.values()), "every guard is read")
    checks.check(statistics.median(took) < 5, f"guards are read in {statistics.median(took):.2f} ms (median), under 5 ms")
    bursts = {products: burst_of(products) for products in PLANTED}
    rows = []
    for repeat in range(REPEATS):
        for products, expected in PLANTED.items():
            pairs = compare(
                bursts[products],
                burst_of(100) if products == 100 else bursts[100],  # the baseline against itself: its own tensors
                metric="ms",
                guards=guards.read,
                min_blocks=MIN_BLOCKS,
                max_blocks=MAX_BLOCKS,
                seed=repeat * 1000 + products,
            )
            (effect,) = decide({str(products): pairs.log_ratios["ms"]}, looks=Looks.between(MIN_BLOCKS, MAX_BLOCKS))
            kept = health(pairs.guards, 0.02)
            rows.append({
                "products": products, "expected": expected, "verdict": effect.verdict, "ratio": effect.ratio, "low": effect.low,
                "high": effect.high, "blocks": effect.num_blocks, "canary_change": kept.canary_change, "drifted": kept.drifted,
                "sm_clock_mhz": kept.sm_clock_mhz, "power_w": kept.power_w, "temperature_c": kept.temperature_c,
                "reasons": kept.reasons,
            })  # fmt: skip
    for products, expected in PLANTED.items():
        mine = [row for row in rows if row["products"] == products]
        said = collections.Counter(row["verdict"] for row in mine)
        covered = sum(row["low"] <= products / 100 <= row["high"] for row in mine)
        mean = statistics.median(row["ratio"] for row in mine)
        blocks = statistics.mean(row["blocks"] for row in mine)
        print(
            f"{products}/100: {dict(said)}, median ratio {mean:.4f}, {blocks:.1f} blocks, planted inside {covered} of {len(mine)}"
        )
        checks.check(said[expected] >= 0.9 * len(mine), f"{products} products against 100 are {expected}")
        checks.check(covered >= 0.8 * len(mine), f"intervals of {products} against 100 hold {products / 100}")
    print({name: rows[-1][name] for name in ("sm_clock_mhz", "power_w", "temperature_c", "reasons")})
    print("drifted:", sum(row["drifted"] for row in rows), "of", len(rows))
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))
    sys.exit(checks.finish())


if __name__ == "__main__":
    main()
