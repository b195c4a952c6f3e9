"""What a start says on stderr: warnings in lines, progress in one line that goes away."""

import io
import logging
import sys

import pytest

from vllm_metal_lite.cli import log

logger = logging.getLogger("vllm_metal_lite.somewhere")


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch, stream) -> str:
    """What the stream gets.  The log is as it was afterwards."""
    monkeypatch.setattr(sys, "stderr", stream)
    package = logging.getLogger("vllm_metal_lite")
    before = package.level, list(package.handlers)
    with log.shown():
        for i in (1, 2):
            logger.info(f"checking, {i} of 2", extra={"transient": True})
        logger.info("took 2 s")
        logger.info("trying", extra={"transient": True})
        logger.warning("a kernel hangs")
        logger.info("timing", extra={"transient": True})
    assert (package.level, package.handlers) == before
    return stream.getvalue()


def test_a_terminal_shows_progress_in_one_line(monkeypatch):
    clear = "\r\x1b[K"
    assert shown(monkeypatch, Screen()) == (
        f"{clear}checking, 1 of 2 ...{clear}checking, 2 of 2 ...{clear}"
        f"{clear}trying ...{clear}warning: a kernel hangs\n"
        f"{clear}timing ...{clear}"
    )


def test_a_file_gets_warnings_only(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == "warning: a kernel hangs\n"


def test_the_exception_of_an_error_is_printed(capsys):
    with log.shown():
        logger.error("a request failed", exc_info=ValueError("why"))
    assert capsys.readouterr().err == "error: a request failed\nValueError: why\n"


def test_information_that_is_marked_is_printed(capsys):
    with log.shown():
        logger.info("a model is loaded", extra={"shown": True})
        logger.info("a detail", extra={"shown": False})
    assert capsys.readouterr().err == "a model is loaded\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_line_of_progress_fits_the_terminal_and_goes_with_an_error(monkeypatch, error):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with pytest.raises(error), log.shown():  # noqa: PT012
        log.progress("word " * 20)
        raise error
    *_, line, end = screen.getvalue().split("\r\x1b[K")
    assert 0 < len(line) < 20
    assert end == ""
