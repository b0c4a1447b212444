"""What the loggers write, where, and on which ranks."""

import logging
import sys

import pytest

from colossalai.logging import DistributedLogger, disable_existing_loggers, get_dist_logger

pytestmark = pytest.mark.fast


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_one_logger_a_name():
    logger = get_dist_logger("one")
    assert get_dist_logger("one") is logger is DistributedLogger.get_instance("one")
    assert get_dist_logger("another") is not logger
    assert get_dist_logger() is get_dist_logger("colossalai")
    with pytest.raises(Exception, match="exists already"):
        DistributedLogger("one")


def test_each_message_is_two_records_caller_first(capsys):
    get_dist_logger("two").info("all is [well] 100%")
    place, message = lines(capsys)
    assert place.startswith(f"colossalai - two - INFO: {__file__}:") and place.endswith(
        "test_each_message_is_two_records_caller_first"
    )
    assert message == "colossalai - two - INFO: all is [well] 100%"


def test_levels(capsys):
    logger = get_dist_logger("levels")
    logger.debug("hidden")
    assert lines(capsys) == []
    logger.set_level("DEBUG")
    logger.debug("shown")
    assert lines(capsys)[1].endswith("DEBUG: shown")
    logger.set_level("ERROR")
    logger.warning("hidden")
    logger.error("bad")
    assert lines(capsys)[1].endswith("ERROR: bad")
    with pytest.raises(AssertionError, match="level='LOUD'"):
        logger.set_level("LOUD")
    with pytest.raises(AssertionError, match="level='LOUD'"):
        logger.log_to_file(".", level="LOUD")


def test_ranks_without_a_world_mean_rank_0(capsys):
    logger = get_dist_logger("ranks")
    logger.info("no", ranks=[1])
    logger.info("yes", ranks=[0, 1])
    assert [line.rsplit(": ")[-1] for line in lines(capsys)][1:] == ["yes"]


def test_it_does_not_propagate():
    assert get_dist_logger("alone")._logger.propagate is False


def test_log_to_file(tmp_path):
    logger = get_dist_logger("file")
    logger.log_to_file(tmp_path / "new" / "folder", suffix="run")
    logger.log_to_file(tmp_path, level="ERROR")
    logger.info("märchen")
    text = (tmp_path / "new" / "folder" / "rank_0_run.log").read_text(encoding="utf-8").splitlines()
    assert len(text) == 2 and text[1] == "colossalai - file - INFO: märchen"
    assert (tmp_path / "rank_0.log").read_text() == ""


def log_where(rank, world_size, folder):
    logger = get_dist_logger("parallel")
    logger.log_to_file(folder)
    logger.info("all")
    logger.info("last", ranks=[world_size - 1])


def test_ranks_of_a_world(workers, tmp_path):
    workers(2).run(log_where, folder=str(tmp_path))
    messages = [
        [line.rsplit(": ")[-1] for line in (tmp_path / f"rank_{rank}.log").read_text().splitlines()[1::2]] for rank in (0, 1)
    ]
    assert messages == [["all"], ["all", "last"]]


def test_rich_only_on_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    from rich.logging import RichHandler

    from colossalai.logging.logger import ScreenHandler, _PlainHandler

    class Terminal:
        def __init__(self, answer):
            self.isatty = lambda: answer

        def write(self, text):
            return len(text)

        def flush(self):
            pass

    for answer, kind in ((True, RichHandler), (False, _PlainHandler)):
        monkeypatch.setattr(sys, "stderr", Terminal(answer))
        assert type(ScreenHandler()._choose()) is kind


def test_disable_existing_loggers():
    names = ("noisy", "other", "colossalai")
    loggers = {name: logging.getLogger(name) for name in names}
    get_dist_logger().set_level("INFO")
    before = {name: logger.level for name, logger in logging.root.manager.loggerDict.items() if hasattr(logger, "level")}
    try:
        loggers["noisy"].setLevel(logging.DEBUG), loggers["other"].setLevel(logging.DEBUG)
        disable_existing_loggers(include=["noisy"])
        assert [loggers[name].level for name in names] == [logging.WARNING, logging.DEBUG, logging.INFO]
        disable_existing_loggers()
        assert [loggers[name].level for name in names] == [logging.WARNING, logging.WARNING, logging.INFO]
        loggers["noisy"].setLevel(logging.DEBUG)
        disable_existing_loggers(exclude=["noisy", "colossalai"])
        assert loggers["noisy"].level == logging.DEBUG
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
