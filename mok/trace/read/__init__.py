"""Readers: one module per tool, each yields a `Trace`."""
