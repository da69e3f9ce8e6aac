"""The widget that follows a study, without a browser: what it shows, when it asks, what its buttons call."""

import time
from collections.abc import Callable

import pytest

from mok.errors import InputError
from mok.views.watch import Glance, watch


class Job:
    """Something long: every look finds one more of `total` steps done, while it runs."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.running, self.asked = total, 0, True, []
        self.broken = False

    def look(self) -> Glance:
        if self.broken:
            raise InputError("run.json is <torn>")
        self.done = min(self.total, self.done + self.running)
        finished = self.done == self.total
        line = f"{self.done} of {self.total}"
        return Glance(self.done / self.total, line, f"<p>{line}</p>", self.running and not finished, finished)

    def stop(self) -> None:
        self.asked.append("stop")
        self.running = False

    def resume(self) -> None:
        self.asked.append("resume")
        self.running = True


def parts(box):
    head, body = box.children
    name, bar, line, halt, again = head.children
    return name, bar, line, halt, again, body


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mok.views.watch.RUNNING_S", 0.02)
    monkeypatch.setattr("mok.views.watch.WAITING_S", 0.05)


def test_it_fills_to_the_end_and_then_asks_no_more() -> None:
    job = Job(6)
    box = watch(job.look, job.stop, job.resume, "a <b> c")
    name, bar, line, halt, again, body = parts(box)
    assert name.value == "<b>a &lt;b&gt; c</b>"
    assert bar.value == pytest.approx(1 / 6)
    assert (halt.disabled, again.disabled) == (False, True)
    box.watcher.join(20)
    assert not box.watcher.is_alive()
    assert (bar.value, line.value) == (1.0, "6 of 6")
    assert "<p>6 of 6</p>" in body.value
    assert (halt.disabled, again.disabled) == (True, True)
    assert job.done == 6


def test_stop_and_resume() -> None:
    job = Job(10_000)
    box = watch(job.look, job.stop, job.resume, "job")
    _, _, line, halt, again, _ = parts(box)
    halt.click()
    assert job.asked == ["stop"]
    until(lambda: not again.disabled)
    assert halt.disabled
    stood = job.done
    time.sleep(0.2)
    assert job.done == stood
    again.click()
    until(lambda: not halt.disabled)
    assert again.disabled
    assert job.asked == ["stop", "resume"]
    assert line.value.endswith("of 10000")
    box.close()
    box.watcher.join(20)
    assert not box.watcher.is_alive()


def test_until_the_driver_has_stopped_it_says_stopping() -> None:
    job = Job(10_000)
    box = watch(job.look, lambda: job.asked.append("stop"), job.resume, "job")
    _, _, line, halt, _, _ = parts(box)
    halt.click()
    until(lambda: line.value.startswith("stopping; "))
    assert halt.disabled
    job.running = False
    until(lambda: not line.value.startswith("stopping; "))
    box.close()


def test_a_torn_record_is_shown_and_asked_about_again() -> None:
    job = Job(10_000)
    box = watch(job.look, job.stop, job.resume, "job")
    _, _, line, _, _, _ = parts(box)
    job.broken = True
    until(lambda: "run.json is &lt;torn&gt;" in line.value)
    job.broken = False
    until(lambda: line.value.endswith("of 10000"))
    box.close()


def test_a_button_that_is_refused_says_why() -> None:
    job = Job(10_000)

    def refuse() -> None:
        raise InputError("another driver holds it")

    box = watch(job.look, job.stop, refuse, "job")
    _, _, line, halt, again, _ = parts(box)
    halt.click()
    until(lambda: not again.disabled)
    seen = []
    line.observe(lambda change: seen.append(change["new"]), names="value")
    again.click()
    assert any("another driver holds it" in text for text in seen)
    until(lambda: not again.disabled)
    box.close()


def test_the_first_error_is_the_callers() -> None:
    job = Job(3)
    job.broken = True
    with pytest.raises(InputError, match="torn"):
        watch(job.look, job.stop, job.resume, "job")


def test_a_finished_job_is_looked_at_once() -> None:
    job = Job(1)
    box = watch(job.look, job.stop, job.resume, "job")
    assert not box.watcher.is_alive()
    assert job.done == 1
