"""From what came back to what is kept: an outcome becomes the record of a run."""

from __future__ import annotations

from typing import Any

from mok.ablate import failures
from mok.ablate.job import Job, Outcome
from mok.ablate.ledger import Ledger
from mok.ablate.planning import Planned
from mok.ablate.record import Run

PROVENANCE = ("notebook", "package", "csrc", "csrc_baseline", "device")


def to_run(
    entry: Planned, job: Job, outcome: Outcome, ledger: Ledger, commit: str, executor: str, cold: dict[str, Any] | None
) -> Run:
    """The record of an attempt. A done run fails by a cold check that failed, or found other bits."""
    payload, failure, status = outcome.payload, outcome.failure, outcome.status
    if status == "done" and cold is not None and cold.get("same_bits") is False:
        failure = failures.made("wrong answer", "a fresh kernel gives other bits: the warm one was not clean")
        status = "failed"
    if status == "done" and cold is not None and cold["status"] == "failed":
        failure = failures.made(cold["kind"], f"done in a warm kernel, but not in a fresh one: {cold['message']}")
        status = "failed"
    sources = {
        ("device_class" if name == "device" else name): entry.sources[name] for name in PROVENANCE if name in entry.sources
    }
    kernel = dict(outcome.kernel)
    notes = [str(note) for note in payload.get("notes", [])]
    if kernel.get("dirty"):
        notes.append(f"kernel thrown away after this run: {'; '.join(kernel['dirty'])}")
    return Run(
        study=job.study,
        key=entry.key,
        status=status,
        parameters=entry.parameters,
        factors=dict(entry.factors),
        strata=dict(entry.strata),
        baseline=dict(entry.baseline),
        control=entry.control,
        failure=failure,
        metrics=payload.get("metrics", {}) if status == "done" else {},
        baseline_metrics=payload.get("baseline_metrics", {}) if status == "done" else {},
        digests=payload.get("digests", {}),
        baseline_digests=payload.get("baseline_digests", {}),
        same_bits=payload.get("same_bits"),
        first_difference=payload.get("first_difference"),
        num_blocks=int(payload.get("num_blocks", 0)),
        attempt=job.attempt,
        history=ledger.history(entry.key, job.attempt),
        started=outcome.started,
        ended=outcome.ended,
        wall_s=outcome.wall_s,
        measure_s=outcome.measure_s,
        device_s=outcome.wall_s if outcome.gpu else 0.0,
        kernel=kernel,
        executor=executor,
        provenance={"commit": commit, **sources, "device": payload.get("device", {})},
        files=dict(outcome.files),
        cold_check=cold,
        notes=tuple(notes),
    )
