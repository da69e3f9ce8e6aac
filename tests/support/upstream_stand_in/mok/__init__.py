"""A stand-in for upstream's package: its name, its published calls, plain torch inside; one process group of any size."""

__version__ = "stand-in"
