"""Benchmarks: named cases, baselines in the same process, records that others can check.

`python -m mok bench forward` is the command; `mok.bench.forward.run` the same from Python. Importing this package
loads nothing heavy.
"""
