"""The decoder of the in-kernel trace and its accounting, on records written by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mok.errors import InputError
from mok.trace.metrics import kernel as metrics
from mok.trace.metrics.tensor import tensor_pipe
from mok.trace.model import NO_VALUE
from mok.trace.read import kernel as reader

RECORDS = 16
BEGIN, END, VALUE = 0, 1, 2
PRODUCER, CONSUMER, COMM = 0, 1, 2


def event(name: str) -> int:
    return reader.EVENTS.index(name)


class Dump:
    """Slices filled as the kernel does."""

    def __init__(self, grid: int = 2) -> None:
        self.grid = grid
        self.size = reader.SLICE.itemsize + 8 * RECORDS
        self.data = np.zeros(grid * reader.LANES_PER_CTA * self.size, np.uint8)

    def lane(self, slot, role, sm, start, end, records, dropped=0):
        head = np.zeros(1, reader.SLICE)
        head["start_ns"], head["end_ns"], head["count"], head["role"], head["sm"] = start, end, len(records), role, sm
        head["dropped"] = dropped
        rows = np.zeros(len(records), reader.RECORD)
        for i, (phase, name, mini, index, value) in enumerate(records):
            number = name if isinstance(name, int) else event(name)
            rows[i] = (phase | number << 2 | mini << 8 | index << 16, value)
        raw = np.concatenate([head.view(np.uint8), rows.view(np.uint8)])
        self.data[slot * self.size : slot * self.size + len(raw)] = raw
        return self

    def bytes(self, **more) -> bytes:
        header = {"grid": self.grid, "records": RECORDS, "rank": 0, "launch": 0, "num_comm_sms": 1, **more}
        return reader.pack(self.data, header)


def typical() -> Dump:
    """One computing SM (0.1 us exposed, 0.45 us of multiplying with 0.05 stalled, 0.1 epilogue) and one communicating."""
    dump = Dump()
    wait = [(BEGIN, "wait x_ready", 0, 0, 0), (END, "wait x_ready", 0, 0, 100)]
    dump.lane(0, PRODUCER, 5, 1000, 2000, [*wait, (BEGIN, "load gate_up", 0, 3, 100), (END, "load gate_up", 0, 7, 500)])
    for slot in (1, 2):
        mma = [(BEGIN, "mma gate_up", 0, 3, 150), (END, "mma gate_up", 0, 7, 600), (VALUE, "stall", 0, 0, 50)]
        dump.lane(
            slot, CONSUMER, 5, 1000, 2000, [*mma, (BEGIN, "epilogue gate_up", 0, 3, 600), (END, "epilogue gate_up", 0, 7, 700)]
        )
    return dump.lane(reader.LANES_PER_CTA, COMM, 6, 1000, 1900, [(BEGIN, "dispatch", 0, 0, 0), (END, "dispatch", 0, 1, 400)])


def test_spans_lanes_and_arguments():
    trace = reader.read(typical().bytes(), [256, 512])
    spans = trace.spans
    assert [label for *_, label in trace.lanes.rows()] == [
        "SM 005 producer",
        "SM 005 consumer 0",
        "SM 005 consumer 1",
        "SM 006 comm 0",
        "SM 005",
        "SM 006",
    ]
    row = int(np.flatnonzero(spans.name.where("mma gate_up"))[0])
    assert (spans.start_ns[row], spans.dur_ns[row]) == (1150, 450)
    assert (spans.args["block"][row], spans.args["tile"][row], spans.args["stall_ns"][row], spans.args["expert"][row]) == (
        3,
        7,
        50,
        1,
    )
    row = int(np.flatnonzero(spans.name.where("wait x_ready"))[0])
    assert (spans.args["index"][row], spans.args["block"][row], spans.category[row]) == (0, NO_VALUE, "wait")
    assert trace.meta.diagnostics == ()
    assert trace.meta.clock == "globaltimer"


def test_accounting_gives_every_nanosecond_to_one_class():
    result = metrics.account(reader.read(typical().bytes()))
    assert sum(result.shares.values()) == pytest.approx(1)
    assert result.shares == pytest.approx(
        {
            "tensor": 0.2,
            "stall": 0.05,  # 50 ns recorded in mma, 50 ns of pipeline fill
            "exposed communication": 0.05,
            "epilogue": 0.05,
            "communication": 0.45,
            "other": 0.15,  # nothing is recorded after the epilogue
            "idle": 0.05,
        }
    )
    assert (result.kernel_ns, result.num_sms, result.num_comm_sms, result.comm_sm_share) == (1000, 2, 1, 0.5)
    assert result.cost_of_communication == pytest.approx(0.55)
    assert result.by_minibatch == pytest.approx({0: 0.05})
    assert result.by_expert == {}  # no table of tokens was given
    # the wait was for the tile loaded next: block 3, expert 1's
    assert metrics.account(reader.read(typical().bytes(), [256, 512])).by_expert == pytest.approx({1: 0.05})


def test_the_tensor_pipe_idles_only_where_both_warpgroups_wait():
    found = tensor_pipe(reader.read(typical().bytes(), [256, 512]))
    # both multiply from 1150 to 1600 and wait a ninth of it; the other SM communicates; 2 SMs x 1000 ns
    assert found.value == pytest.approx(450 * (1 - (50 / 450) ** 2) / 2000)
    assert found.coverage == 1
    dump = Dump()
    mma = [(BEGIN, "mma gate_up", 0, 3, 0), (END, "mma gate_up", 0, 7, 400), (VALUE, "stall", 0, 0, 100)]
    later = [(BEGIN, "mma gate_up", 0, 3, 300), (END, "mma gate_up", 0, 7, 700), (VALUE, "stall", 0, 0, 200)]
    dump.lane(1, CONSUMER, 5, 1000, 2000, mma).lane(2, CONSUMER, 5, 1000, 2000, later)
    alone = 300 * 3 / 4 + 300 / 2
    assert tensor_pipe(reader.read(dump.bytes())).value == pytest.approx((alone + 100 * (1 - 1 / 8)) / 1000)
    assert "no multiplication" in tensor_pipe(reader.read(Dump().lane(0, PRODUCER, 5, 1000, 2000, []).bytes())).reason


TURN = 1 << 32


def long_wait(end, records):
    return Dump().lane(0, PRODUCER, 5, 1000, 1000 + end, records)


def durations(trace, name):
    return trace.spans.dur_ns[trace.spans.name.where(name)].tolist()


def test_ticks_that_turned_over_are_unwound_when_the_end_confirms_it():
    wait = [(BEGIN, "wait x_ready", 0, 0, TURN - 100), (END, "wait x_ready", 0, 0, 50)]
    load = [(BEGIN, "load gate_up", 0, 3, TURN - 10), (END, "load gate_up", 0, 7, 300)]
    trace = reader.read(long_wait(2 * TURN + 400, wait + load).bytes())
    assert durations(trace, "wait x_ready") == [150]
    assert durations(trace, "load gate_up") == [310]
    assert trace.spans.start_ns[trace.spans.name.where("load gate_up")].tolist() == [1000 + 2 * TURN - 10]
    assert any("unwound" in text for text in trace.meta.diagnostics)


@pytest.mark.parametrize("begin, end", [(100, 2_000_000_000), (2_000_000_000, 100)])
def test_a_wait_longer_than_a_turn_is_never_a_short_one(begin, end):
    life = 10_000_000_000 + 3000  # the local time-out: two turns, of which the ticks show none or one
    trace = reader.read(long_wait(life, [(BEGIN, "wait x_ready", 0, 0, begin), (END, "wait x_ready", 0, 0, end)]).bytes())
    assert durations(trace, "wait x_ready") == []
    assert durations(trace, "compute CTA") == [life]
    assert [text for text in trace.meta.diagnostics if "ambiguous" in text and text.startswith("1 lanes")]
    assert metrics.account(trace).shares["other"] == pytest.approx(1)


def test_a_short_lane_needs_no_unwinding():
    assert (
        reader.read(long_wait(TURN - 1, [(BEGIN, "combine", 0, 0, 5), (END, "combine", 0, 0, 9)]).bytes()).meta.diagnostics == ()
    )


def test_more_minibatches_than_a_tag_names_make_the_metric_abstain():
    sizes = {"minibatch": 128, "ring_rows": 1 << 20}
    fits = reader.read(typical().bytes(**sizes), [256 * 128])
    assert fits.meta.diagnostics == ()
    assert metrics.account(fits).by_minibatch_unknown == ""
    assert metrics.account(fits).by_minibatch == pytest.approx({0: 0.05})
    for changes, rows in ((sizes, 257 * 128), (sizes | {"minibatch": 512, "ring_rows": 128}, 257 * 128)):
        trace = reader.read(typical().bytes(**changes), [rows])
        assert [text for text in trace.meta.diagnostics if "257 minibatches" in text]
        assert set(trace.spans.args["minibatch"].tolist()) == {NO_VALUE}
        result = metrics.account(trace)
        assert result.by_minibatch == {}
        assert "257 minibatches" in result.by_minibatch_unknown
        assert result.exposed == pytest.approx(0.05)  # the sum over all of them needs no number
    assert (
        "257 minibatches"
        in reader.read_launches([typical().bytes(**sizes)] * 2, [[257 * 128]] * 2).meta.coverage["minibatch_unknown"]
    )


def test_a_row_flag_beyond_the_tag_gives_the_turn_away_without_sizes():
    dump = typical()
    dump.lane(0, PRODUCER, 5, 1000, 2000, [(BEGIN, "wait x_ready", 44, 300, 0), (END, "wait x_ready", 44, 300, 100)])
    trace = reader.read(dump.bytes())
    assert [text for text in trace.meta.diagnostics if "301 minibatches" in text]
    assert metrics.account(trace).by_minibatch == {}


def test_more_blocks_than_a_tag_names_leave_blocks_and_experts_out():
    rows = ((1 << 16) + 1) * 128
    trace = reader.read(typical().bytes(), [rows - 128, 128])
    assert [text for text in trace.meta.diagnostics if "65537 row blocks" in text]
    for name in ("block", "expert", "index"):
        assert set(trace.spans.args[name].tolist()) == {NO_VALUE}
    assert not reader.read(typical().bytes(), [rows - 128]).meta.diagnostics


def test_other_flags_are_not_exposed_communication():
    dump = typical()
    dump.lane(0, PRODUCER, 5, 1000, 2000, [(BEGIN, "wait hidden_ready", 0, 9, 0), (END, "wait hidden_ready", 0, 9, 100)])
    shares = metrics.account(reader.read(dump.bytes())).shares
    assert shares["exposed communication"] == 0
    assert shares["stall"] == pytest.approx(0.025)  # no load is recorded: only what mma itself states
    assert shares["other"] == pytest.approx(0.225)


@pytest.mark.parametrize("lost", ["records", "lanes", "stall", "tile"])
def test_what_no_record_explains_is_other(lost):
    whole = metrics.account(reader.read(typical().bytes())).shares
    dump = typical()
    for slot in (1, 2):
        if lost == "records":  # the producer's loads must not explain the time of consumers that say nothing
            dump.lane(slot, CONSUMER, 5, 1000, 2000, [])
        elif lost == "lanes":
            dump.lane(slot, CONSUMER, 5, 0, 0, [])
        elif lost == "stall":
            dump.lane(slot, CONSUMER, 5, 1000, 2000, [(BEGIN, "mma gate_up", 0, 3, 150), (END, "mma gate_up", 0, 7, 600)])
        else:  # the load was for another tile
            dump.lane(slot, CONSUMER, 5, 1000, 2000, [(BEGIN, "mma gate_up", 0, 3, 150), (END, "mma gate_up", 0, 8, 600)])
    shares = metrics.account(reader.read(dump.bytes())).shares
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["tensor"] == 0
    if lost == "records":
        assert shares["stall"] == 0
        assert shares["other"] == pytest.approx(0.45)  # all of the SM but the 0.05 its producer waited for rows
    elif lost == "lanes":
        assert shares["other"] == pytest.approx(0.5)
    elif lost == "stall":
        assert shares["stall"] == pytest.approx(0.025)
        assert shares["other"] == pytest.approx(whole["other"] + 0.225 + 0.05)
    else:
        assert shares["stall"] == 0


def test_drops_unknown_events_and_lost_ends_are_said():
    dump = typical()
    dump.lane(reader.LANES_PER_CTA + 1, COMM, 6, 1000, 1900, [(BEGIN, "combine", 0, 0, 10), (BEGIN, 60, 0, 0, 20)], dropped=7)
    trace = reader.read(dump.bytes())
    assert any("7 records dropped" in text for text in trace.meta.diagnostics)
    assert any("unknown events" in text for text in trace.meta.diagnostics)
    assert any("without a partner" in text for text in trace.meta.diagnostics)
    assert not trace.spans.name.where("combine").any()
    assert metrics.account(trace).coverage == 0


def test_a_cut_off_dump_gives_what_is_whole():
    whole = typical().bytes()
    trace = reader.read(whole[: -reader.LANES_PER_CTA * (reader.SLICE.itemsize + 8 * RECORDS)])
    assert any("cut off" in text for text in trace.meta.diagnostics)
    assert not trace.spans.name.where("dispatch").any()
    assert trace.spans.name.where("mma gate_up").sum() == 2


@pytest.mark.parametrize(
    "dump, message",
    [
        (b"", "not an in-kernel trace"),
        (b"MOKTRACE\x01", "cut off"),
        (b"MOKTRACE" + np.array([9, 0], "<u4").tobytes(), "version 9"),
        (b"MOKTRACE" + np.array([1, 4], "<u4").tobytes() + b"{{{{", "not JSON"),
        (b"MOKTRACE" + np.array([1, 2], "<u4").tobytes() + b"{}", "lacks the integer 'grid'"),
        (reader.pack(np.zeros(8, np.uint8), {"grid": 1, "records": 0, "rank": 0, "launch": 0, "num_comm_sms": 0}), "damaged"),
    ],
)
def test_damaged_dumps_are_refused_by_name(dump, message):
    with pytest.raises(InputError, match=message):
        reader.read(dump)


def test_a_dump_without_records_is_an_empty_trace():
    trace = reader.read(Dump().bytes())
    assert len(trace.spans) == 0
    assert trace.meta.diagnostics == ("no lane recorded anything",)
    with pytest.raises(InputError, match="no computing SM"):
        metrics.account(trace)


def test_the_header_carries_the_event_table():
    _, header = reader.unpack(typical().bytes(device="NVIDIA H200"))
    assert header["events"] == list(reader.EVENTS)
    assert json.dumps(header)


def test_overlap_efficiency():
    assert metrics.overlap_efficiency(10, 4, 10) == 1
    assert metrics.overlap_efficiency(14, 4, 10) == 0
    with pytest.raises(InputError):
        metrics.overlap_efficiency(0, 1, 1)


def test_launches_of_several_ranks_become_one_trace_with_their_lanes_apart():
    dumps = [typical().bytes(rank=rank) for rank in (0, 1)]
    trace = reader.read_launches(dumps, [[128], [128]])
    parts = [reader.read(dump, [128]) for dump in dumps]
    assert len(trace.spans) == sum(len(part.spans) for part in parts)
    assert {row[0] for row in trace.lanes.rows()} == {0, 1}
    second = trace.lanes.rows()[len(parts[0].lanes) :]
    assert second == parts[1].lanes.rows()
    own = trace.spans.take(trace.spans.lane >= len(parts[0].lanes))
    assert np.array_equal(own.lane - len(parts[0].lanes), parts[1].spans.lane)
    assert own.name.decode().tolist() == parts[1].spans.name.decode().tolist()
    assert np.array_equal(own.args["block"], parts[1].spans.args["block"])
    assert trace.meta.coverage["records"] == sum(part.meta.coverage["records"] for part in parts)
    with pytest.raises(InputError, match="no launch"):
        reader.read_launches([], [])
