"""How much memory a simulation takes, estimated before it starts: a plan of a million tasks is a gigabyte."""

from __future__ import annotations

import math

from mok.memory import require_bytes
from mok.plan.table import HIDDEN_TILE, MODEL_TILE, ROWS, UNIT_ROWS
from mok.simulate.routes import Loads
from mok.workload import Workload

# Peak over plan, costs, events and trace: 583 to 881 bytes measured on six workloads of 37,000 to 710,000 tasks.
BYTES_PER_TASK = 900
# Tasks of backward over those of forward: 1.0 to 1.5 measured on the same; most where rows are replayed.
BACKWARD_SHARE = 1.5


def num_tasks(job: Workload, rows: int, tokens: int) -> int:
    """About how many tasks the kernels of a rank with `rows` routed and `tokens` shared rows have, rounded up.

    Forward is counted: a tile per 256 rows and 128 intermediate (gate, up) or 256 hidden (down) columns, two units per
    32 rows; backward and recompute are shares of it.
    """
    shape = job.shape
    columns = math.ceil(shape.intermediate / HIDDEN_TILE) + math.ceil(shape.hidden / MODEL_TILE)
    forward = (rows + tokens * shape.shared) / (2 * ROWS) * columns + 2 * rows / UNIT_ROWS
    return math.ceil(forward * (1 if job.direction == "forward" else 1 + BACKWARD_SHARE + job.recompute))


def check_memory(job: Workload, routing: Loads) -> None:
    """Raise InputError before a plan that does not fit is built; see `num_tasks`."""
    tasks = num_tasks(job, int(routing.rank_rows(job.config).max()), max(job.token_counts))
    require_bytes(
        f"a simulation of {tasks:,} tasks",
        tasks * BYTES_PER_TASK,
        "use fewer tokens; from some thousand rows per expert on, times grow in proportion to them",
    )
