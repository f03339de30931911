"""Whether a chat template comes to an end. It is a program in the model's directory, which may
loop.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 10.0  # CPU time, for work that takes a millisecond

_ASKED = {"role": "user", "content": "1+1?"}
_TRIALS = (
    [_ASKED],
    [{"role": "system", "content": "Add."}, _ASKED],
    [_ASKED, {"role": "assistant", "content": "2"}, _ASKED],
)
# What a template raises if it refuses a conversation.
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _TooLong(Exception):
    """A template has taken longer than LIMIT_S."""


def template_file(path: Path) -> Path:
    """Return the file of a model directory that has its chat template."""
    own = path / "chat_template.jinja"
    return own if own.is_file() else path / "tokenizer_config.json"


def check_template_ends(tokenizer, path: Path) -> None:
    """Raise ValueError, naming the file, if the chat template does not show a short conversation
    within LIMIT_S. A conversation that it refuses is reported where one is needed.

    This does not find loops that depend on a row's text. Outside of the main thread nothing is
    tried, because only the main thread gets signals.
    """
    from jinja2 import TemplateError

    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and getattr(tokenizer, "chat_template", None)):
        return
    for turns in _TRIALS:
        try:
            with _limited(LIMIT_S):
                tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, *_REFUSALS):
            continue
        except _TooLong:
            raise ValueError(
                f"{template_file(path)}: chat_template did not show a conversation of {len(turns)} "
                f"turns within {LIMIT_S:g} s of CPU time; it may loop for ever. Correct it, or "
                "fetch the directory again"
            ) from None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the body after this many seconds of the process's CPU time, however busy
    the machine is.
    """

    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
