"""A Workload on its way through a pool, in a thread of its own: what a widget looks at while the notebook stays responsive."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mok.errors import PoolError
from mok.measurement import Measurement
from mok.workload import Workload

if TYPE_CHECKING:
    from mok.session.pool import RankPool


class RankRun:
    """One Workload on its way in a pool. share, text: how far it is; `result` waits for its Measurement."""

    def __init__(self, pool: RankPool, workload: Workload, options: dict[str, Any]) -> None:
        self.pool, self.workload = pool, workload
        self.share, self.text = 0.0, "starting"
        self._measurement: Measurement | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(options,), name="mok-pool-run", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What the run ended with, None for a good end and while it runs."""
        return self._error

    def result(self, timeout_s: float | None = None) -> Measurement:
        """The Measurement, or the error of the run. Raises PoolError when it is not there within `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise PoolError(f"the Workload has not ended within {timeout_s} s; wait longer, or stop the pool.")
        if self._error is not None:
            raise self._error
        assert self._measurement is not None
        return self._measurement

    def _run(self, options: dict[str, Any]) -> None:
        try:
            self._measurement = self.pool.run(self.workload, progress=self._progress, **options)
        except BaseException as error:  # noqa: BLE001  # kept for `result`, in the thread that asks
            self._error = error

    def _progress(self, share: float, text: str) -> None:
        self.share, self.text = share, text
