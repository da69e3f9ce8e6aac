"""Generated traces of any size for the reader's benchmark: the shape of a training step, not a recording of one.

One operator is six Kineto events as torch.profiler writes them (an outer and an inner cpu_op, the launch call, the
kernel, both ends of the arrow between them); every eighth kernel is a collective on a stream of its own that overlaps
the next computation. The nsys file has the same kernels and calls, and a stream synchronisation after every 500.
"""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from mok.parquet import replacing

EVENTS_PER_OPERATOR = 6
_STEP_OPERATORS = 2000
_COLLECTIVE_EVERY = 8
_SYNC_EVERY = 500
_PERIOD_NS = 20_000
_PID, _TID, _BASE_NS = 4242, 4242, 1_790_000_000_000_000_000
_HOST = f'"pid": {_PID}, "tid": {_TID}'
_KERNELS = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, ...)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2> > > >",
    "triton_poi_fused_add_mul_silu_7",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, 4> >",
)
_OPERATORS = ("aten::add", "aten::linear", "aten::scaled_dot_product_attention", "aten::silu_", "aten::mean")
_COLLECTIVE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kineto(path: Path, num_events: int) -> None:
    """Write a gzip Kineto trace of about `num_events` events (a whole number of operators) to `path`."""
    with replacing(path) as temporary, gzip.open(temporary, "wt", compresslevel=4, encoding="utf-8") as stream:
        stream.write(
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320,'
            ' "computeMajor": 9, "computeMinor": 0, "numSms": 132}],\n  "distributedInfo": {"backend": "nccl", "rank": 0,'
            f' "world_size": 1}},\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {_BASE_NS},\n  "traceEvents": [\n'
        )
        for number, text in enumerate(_operators(num_events // EVENTS_PER_OPERATOR)):
            stream.write(text if number == 0 else f",\n{text}")
        stream.write('\n  ],\n  "traceName": "trace.json"\n}\n')


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _length(i: int) -> int:
    return 25_000 + i % 11 * 1000 if i % _COLLECTIVE_EVERY == 0 else 6_000 + i % 5 * 1000


def _event(head: str, ts: int, dur: int | None, args: str) -> str:
    times = f'"ts": {_us(ts)}' + (f', "dur": {_us(dur)}' if dur is not None else "")
    return f'  {{\n    {head},\n    {times},\n    "args": {{\n      {args}\n    }}\n  }}'


def _operators(count: int) -> Iterator[str]:
    for i in range(count):
        begin = 1_000_000_000 + i * _PERIOD_NS
        if i % _STEP_OPERATORS == 0:
            length = min(_STEP_OPERATORS, count - i) * _PERIOD_NS - 1000
            head = f'"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{i // _STEP_OPERATORS}", {_HOST}'
            yield _event(head, begin, length, f'"External id": {3 * i + 1},"Record function id": 0, "Ev Idx": {i}')
        yield _operator(i, begin)


def _operator(i: int, begin: int) -> str:
    collective = i % _COLLECTIVE_EVERY == 0
    kind, stream, start = i % len(_KERNELS), 20 if collective else 7, begin + 9000 + i % 7 * 1000
    name = _COLLECTIVE if collective else _KERNELS[kind]
    length = _length(i)
    events = []
    for depth, (tail, ts, dur) in enumerate((("", begin, 8000), ("_out", begin + 500, 7000))):
        args = f'"External id": {3 * i + 2 + depth},"Record function id": 0, "Sequence number": {i}, "Fwd thread id": 0, '
        head = f'"ph": "X", "cat": "cpu_op", "name": "{_OPERATORS[kind]}{tail}", {_HOST}'
        events.append(_event(head, ts, dur, args + f'"Ev Idx": {2 * i + depth}'))
    head = f'"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", {_HOST}'
    events.append(_event(head, begin + 1500, 4000, f'"External id": {3 * i + 3}, "cbid": 211, "correlation": {i + 1}'))
    args = (
        f'"External id": {3 * i + 3}, "queued": 0, "device": 0, "context": 1,\n      "stream": {stream}, "correlation": {i + 1},'
        '\n      "registers per thread": 168,\n      "shared memory": 213248,\n      "blocks per SM": 1.000000,'
        '\n      "warps per SM": 12.000000,\n      "grid": [132, 1, 1],\n      "block": [384, 1, 1],'
        '\n      "est. achieved occupancy %": 19'
    )
    events.append(_event(f'"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream}', start, length, args))
    arrow = '  {{\n    "ph": "{}", "id": {}, {}, "ts": {},\n    "cat": "ac2g", "name": "ac2g"{}\n  }}'
    events.append(arrow.format("s", i + 1, _HOST, _us(begin + 1500), ""))
    events.append(arrow.format("f", i + 1, f'"pid": 0, "tid": {stream}', _us(start), ', "bp": "e"'))
    return ",\n".join(events)


def nsys(path: Path, num_kernels: int) -> None:
    """Write an nsys SQLite export (schema 3.25.0's columns) with `num_kernels` kernels and as many API calls to `path`."""
    process = (1 << 56) | (_PID << 24)
    tables = {
        "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
        "META_DATA_EXPORT": "name TEXT, value TEXT",
        "CUPTI_ACTIVITY_KIND_KERNEL": _columns(
            "start end deviceId contextId greenContextId streamId correlationId globalPid demangledName shortName mangledName "
            "launchType cacheConfig registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory "
            "dynamicSharedMemory localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId graphId clusterX "
            "clusterY clusterZ"
        ),
        "CUPTI_ACTIVITY_KIND_RUNTIME": _columns("start end eventClass globalTid correlationId nameId returnValue callchainId"),
    }
    names = [*_KERNELS, _COLLECTIVE, "cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020"]
    with replacing(path) as temporary:
        opened = sqlite3.connect(temporary)
        opened.execute("PRAGMA journal_mode = OFF")
        opened.execute("PRAGMA synchronous = OFF")
        for table, columns in tables.items():
            opened.execute(f"CREATE TABLE {table} ({columns})")
        opened.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names, 1))
        facts = [("EXPORT_PRODUCT_VERSION", "2026.2.1.210"), ("EXPORT_SCHEMA_VERSION", "3.25.0")]
        opened.executemany("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", facts)
        opened.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({_marks(31)})", _kernel_rows(num_kernels, process))
        opened.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({_marks(8)})", _call_rows(num_kernels, process))
        opened.commit()
        opened.close()


def _columns(names: str) -> str:
    return ", ".join(f'"{name}" INTEGER' for name in names.split())


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _kernel_rows(count: int, process: int) -> Iterator[tuple[int | None, ...]]:
    for i in range(count):
        collective = i % _COLLECTIVE_EVERY == 0
        start, length = i * _PERIOD_NS + 9000 + i % 7 * 1000, _length(i)
        name = len(_KERNELS) + 1 if collective else i % len(_KERNELS) + 1
        stream = 20 if collective else 7
        head = (start, start + length, 0, 1, None, stream, i + 1, process, name, name, name, 1, 0, 168, 132, 1, 1, 384, 1, 1)
        yield (*head, 1024, 213248, 0, 0, i, 233472, None, None, 2, 1, 1)


def _call_rows(count: int, process: int) -> Iterator[tuple[int | None, ...]]:
    launch, sync = len(_KERNELS) + 2, len(_KERNELS) + 3
    for i in range(count):
        start = i * _PERIOD_NS + 1500
        if i % _SYNC_EVERY == _SYNC_EVERY - 1:  # waits for the kernels before it, so that it does harm
            yield (start, start + 18_000, 0, process | _TID, count + i + 1, sync, 0, None)
        else:
            yield (start, start + 4000, 0, process | _TID, i + 1, launch, 0, None)
