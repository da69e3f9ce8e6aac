"""Metrics over a `Trace`: values with their coverage and definition."""
