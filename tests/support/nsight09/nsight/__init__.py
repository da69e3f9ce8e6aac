"""nsight-python 0.9 as seen from outside: `analyze.kernel` starts the running script again under ncu and reads its report."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import ncu_report
import numpy
import pandas

__version__ = "0.9.6"


class ProfilerError(Exception):
    pass


@contextlib.contextmanager
def annotate(name: str):
    yield


def _kernel(*, metrics, runs, output_prefix, clock_control, cache_control, replay_mode, thermal_mode, combine_kernel_metrics):
    def decorate(function):
        def call():
            if "NSPY_NCU_PROFILE" in os.environ:
                for _ in range(runs):
                    function()
                os._exit(0)
            report = f"{output_prefix}ncu-output-{function.__name__}-0.ncu-rep"
            log = report.removesuffix(".ncu-rep") + ".log"
            command = (
                f"ncu --log-file {log} --cache-control {cache_control} --clock-control {clock_control} "
                f"--replay-mode {replay_mode} "
                f'--nvtx --nvtx-include "regex:nsight-python@.+/" --metrics {",".join(metrics)} -f -o {report} '
                f"{sys.executable} {os.path.abspath(sys.argv[0])} {' '.join(sys.argv[1:])}"
            )
            done = subprocess.run(command, shell=True, env={**os.environ, "NSPY_NCU_PROFILE": "signature"}, check=False)
            if done.returncode:
                raise ProfilerError(f"ncu failed, see {log}")
            rows: dict[tuple[str, str], list[float]] = {}
            kernels: dict[str, str] = {}
            found: dict[str, list[numpy.ndarray]] = {}
            for action in ncu_report.load_report(report).range_by_idx(0).actions:
                kernels[action["part"]] = action["kernel"]
                found.setdefault(action["part"], []).append(numpy.array([action["metrics"][metric] for metric in metrics]))
            for part, values in found.items():
                size = len(values) // runs
                for run in range(runs):
                    whole = functools.reduce(combine_kernel_metrics, values[run * size : (run + 1) * size])
                    for metric, value in zip(metrics, whole, strict=True):
                        rows.setdefault((part, metric), []).append(float(value))
            table = [
                {
                    "Annotation": part, "Kernel": kernels[part], "Metric": metric, "AvgValue": sum(values) / len(values),
                    "StdDev": math.nan, "NumRuns": len(values), "GPU": "NVIDIA H200", "Host": "node-17",
                }
                for (part, metric), values in rows.items()
            ]  # fmt: skip
            columns = ["Annotation", "Kernel", "Metric", "AvgValue", "StdDev", "NumRuns", "GPU", "Host"]
            return SimpleNamespace(to_dataframe=lambda: pandas.DataFrame(table, columns=columns))

        return call

    return decorate


analyze = SimpleNamespace(kernel=_kernel)
