"""Timers and the recorder of ranks."""

import json
import time

import pytest

from colossalai.utils import MultiTimer, Timer
from colossalai.utils.errors import ConfigError
from colossalai.utils.rank_recorder import recorder

pytestmark = pytest.mark.fast


def test_timer():
    timer = Timer()
    assert timer.get_elapsed_time() == 0.0 and not timer.has_history
    timer.start()
    time.sleep(0.02)
    lap = timer.lap()
    time.sleep(0.01)
    second = timer.lap()
    whole = timer.stop(keep_in_history=True)
    assert 0.02 <= lap < 0.5 and 0.01 <= second < 0.5 and whole >= lap + second
    assert timer.get_elapsed_time() == whole == timer.get_history_sum() == timer.get_history_mean()
    timer.start(), timer.stop(keep_in_history=True)
    assert timer.get_history_sum() == pytest.approx(2 * timer.get_history_mean())
    timer.reset()
    assert not timer.has_history and timer.get_elapsed_time() == 0.0
    assert timer.current_time <= timer.current_time


@pytest.mark.parametrize("call", ["stop", "lap", "get_history_mean"])
def test_timer_says_what_is_missing(call):
    with pytest.raises(ConfigError, match=f"Timer.{call}"):
        getattr(Timer(), call)()


def test_multi_timer():
    timers = MultiTimer()
    timers.start("a"), timers.start("b")
    assert timers.stop("a", keep_in_history=True) >= 0.0 and timers.stop("b", keep_in_history=False) >= 0.0
    assert [name for name, _ in timers] == ["a", "b"]
    assert timers.get_timer("a").has_history and not timers.get_timer("b").has_history
    timers.reset("a")
    assert not timers.get_timer("a").has_history
    timers.reset()
    with pytest.raises(ConfigError, match="name='c': no such timer; there are a, b"):
        timers.get_timer("c")
    timers.set_status(False)
    assert timers.is_on() is False and timers.stop("a", keep_in_history=True) is None
    timers.start("c")
    assert [name for name, _ in timers] == ["a", "b"]


def test_recorder(tmp_path):
    recorder.clear()
    with recorder("forward", 3):
        time.sleep(0.01)
    with pytest.raises(ValueError), recorder("backward", 3):
        raise ValueError
    names = [(event.name, event.rank) for event in recorder.get_history()]
    assert names == [("forward", 3), ("backward", 3)]
    recorder.dump(tmp_path / "events.jsonl")
    recorder.dump(tmp_path / "events.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["end"] - rows[0]["start"] >= 0.01
    recorder.clear()
    assert recorder.get_history() == []
