"""How a call of `Study.run` ended: what the driver returns, and the exit code `mok study run` makes of it."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_RESUME = 75  # EX_TEMPFAIL: what is left can be done later by `mok study resume`


@dataclass(frozen=True, slots=True)
class Result:
    """How a call of `run` ended. state: done, failed (all made, some failed), interrupted or budget. made: runs of this call."""

    state: str
    counts: dict[str, int]
    made: int
    wall_s: float
    gpu_s: float
    reason: str = ""
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """0: every run is done; 1: some failed; EXIT_RESUME: something is left to do."""
        return {"done": 0, "failed": 1}.get(self.state, EXIT_RESUME)

    def __repr__(self) -> str:
        """State and counts in one line."""
        counts = ", ".join(f"{count} {state}" for state, count in self.counts.items() if count)
        return (
            f"Result({self.state}: {counts}; {self.made} runs in {self.wall_s:.1f} s{'; ' + self.reason if self.reason else ''})"
        )
