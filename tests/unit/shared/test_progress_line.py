"""Progress of commands: on terminals alone, not before its time, and gone at the end."""

from __future__ import annotations

import io
import threading

import pytest

from shared.progress_line import shown


class Terminal(io.StringIO):
    """What a terminal gets; ``drawn`` is set when something stands on it."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        """Return True: that is what it stands for."""
        return True

    def write(self, text: str) -> int:
        """Keep the text."""
        if "prompts" in text:
            self.drawn.set()
        return super().write(text)


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a count and a text of its own, and the line is erased at the end."""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with shown("prompts", 40, after_s=0.0) as bar:
        assert terminal.drawn.wait(30)
        bar.advance(12)
        bar.say("prompts, nearly")

    text = terminal.getvalue()
    assert "12 of 40" in text
    assert "prompts, nearly" in text
    assert text.rstrip().endswith("\x1b[2K")


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is drawn after a time that the block did not take."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with shown("prompts", after_s=3600.0):
        pass

    assert terminal.getvalue() == ""


def test_a_file_or_a_pipe_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """However long it takes, and whatever is said."""
    with shown("prompts", 2, after_s=0.0) as bar:
        bar.update(1)
        bar.say("prompts")

    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_block_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not touched."""
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(KeyError), shown("prompts", after_s=3600.0):
        raise KeyError

    assert [thread.name for thread in threading.enumerate() if "Timer" in thread.name] == []
