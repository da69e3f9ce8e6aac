"""Which tile runs when, and what it waits for: the one definition of the megakernel's task order in Python.

The kernels take compute tasks and communication units in order, each role by tickets of its own; nothing else decides
the schedule. Simulator, views and tests read this table, and the C++ task decode is compared with it task by task.

A *segment* is the rows of one expert inside one minibatch (for weight gradients: inside one macrobatch). A compute task
is what a cluster of two CTAs takes with one ticket: two adjacent 128-row blocks of one segment times one column tile
(the pair shares the weight tile by multicast), or the segment's odd last row block times two column tiles. Inside a
segment pairs come first, with the column tile as the outer loop, so that a weight tile stays in L2 while the pairs
pass. A weight gradient's row blocks are those of its output matrix. A communication unit is 32 rows times the full
hidden size.

Forward: shared expert first (it needs no dispatched row); macrobatches last to first; minibatches ascending, software
pipelined as GATE_UP(0), then GATE_UP(i), DOWN(i-1) for i = 1, 2, ..., and the last DOWN. Backward: shared expert;
macrobatch 0 as saved, the others replayed ascending; per macrobatch the same pipeline of DGRAD_DOWN and DGRAD_GATE_UP,
then the weight gradients by expert. In-order start, plus dependencies that point backwards only, is the whole deadlock
argument; `check_progress` decides it for a given plan.
"""

from mok.plan.build import backward, forward, recompute
from mok.plan.table import (
    HIDDEN_TILE,
    MODEL_TILE,
    ROW_FLAGS,
    ROWS,
    SHARED_WGRADS,
    UNIT_ROWS,
    WGRADS,
    FlagTable,
    Kind,
    Plan,
    Role,
    check_progress,
)

__all__ = [
    "HIDDEN_TILE",
    "MODEL_TILE",
    "ROWS",
    "ROW_FLAGS",
    "SHARED_WGRADS",
    "UNIT_ROWS",
    "WGRADS",
    "FlagTable",
    "Kind",
    "Plan",
    "Role",
    "backward",
    "check_progress",
    "forward",
    "recompute",
]
