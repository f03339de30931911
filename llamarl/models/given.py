"""Reads a model directory that the user gave: config.json, tokenizer, chat template. Any of them
may be wrong; errors name the file.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from llamarl.models.attention import rotary_of
from llamarl.models.build import config_of
from llamarl.models.config import (
    ModelConfig,
    check_as_transformers_reads,
    check_sizes,
    read_config,
    tiny_directory,
)
from llamarl.models.directory import TOKENIZER_JSON, check_files, read_json, weights_digest
from llamarl.models.hf import load_tokenizer
from llamarl.models.shape import AUTO
from llamarl.words.names import did_you_mean

# Parts of a model: a digest, a list of numbers, or the fields of its config.json.
ModelParts = Mapping[str, object]

# CPU seconds for a conversation in a chat template, which takes a millisecond if it ends.
LIMIT_S = 10.0

_ASKED = {"role": "user", "content": "1+1?"}
# A template may branch on a system prompt, and on an earlier reply.
_TRIALS = (
    [_ASKED],
    [{"role": "system", "content": "Add."}, _ASKED],
    [_ASKED, {"role": "assistant", "content": "2"}, _ASKED],
)
# What a conversation, the tokenizer and transformers give a template: no option may replace it.
_GIVEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "raise_exception", "strftime_now"),
}
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag of transformers' own
_TRUTHS = ("yes", "no", "on", "off", "true", "false")
# Fields of a ModelConfig that follow from the others.
_FOLLOWING = (
    *("shapes", "linears", "buffers", "carried"),
    *("plan", "split_heads", "unsplit", "builder"),
)
# What a template raises if it refuses a conversation.
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def read_tokenizer(path: Path, *, chat: bool, options: Mapping[str, object] | None = None):
    """Return transformers' tokenizer of a model directory. chat: try its chat template, because it
    will be used. options: values of variables that the template reads, for all that it shows.
    FileNotFoundError or ValueError names the file that is wrong.
    """
    tokenizer = _loaded_tokenizer(path)
    if options:
        template = getattr(tokenizer, "chat_template", None)
        tokenizer.chat_template = with_options(template, options, template_file(path))
    if chat:
        check_template_ends(tokenizer, path)
    return tokenizer


def _loaded_tokenizer(path: Path):
    try:
        return load_tokenizer(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # transformers and tokenizers raise anything, and name no file
        check_files(path)
        for name in TOKENIZER_JSON:
            file = path / name
            if file.is_file():
                read_json(file)  # raises, with the reason, if the file is no JSON
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{path / 'tokenizer_config.json'}: the tokenizer is code in this directory "
                "(auto_map), which is never run; need a tokenizer.json that transformers reads"
            ) from error
        file = path / "tokenizer.json"
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{file}: transformers makes no tokenizer from it ({what}); fetch it again"
        ) from error


def read_model(path: str | Path, made_by: str = AUTO) -> ModelConfig:
    """Read a model directory's config.json, for a decoder that will be computed, and compare it
    with what transformers reads. made_by: of config_of. ValueError or FileNotFoundError names
    the file.
    """
    model = config_of(path, made_by)
    if model.implementation == "transformers":
        return model
    try:
        check_sizes(model)
        rotary_of(model)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{Path(path) / 'config.json'}: {error}") from error
    if Path(path) != tiny_directory():  # which a test compares: transformers takes a second to load
        check_as_transformers_reads(Path(path), model)
    return model


def architecture_of(model: ModelConfig) -> dict[str, object]:
    """Return the fields of a decoder's config.json, as JSON values."""
    fields = {**dataclasses.asdict(model), "labels": list(model.labels)}
    for name in _FOLLOWING:
        del fields[name]
    return fields


def parts_of(path: str | Path) -> ModelParts:
    """Return the parts that tell a decoder from others, wherever it lies."""
    return {"config.json": architecture_of(read_config(path)), "weights": weights_digest(path)}


# --- Chat templates ---


class _TooLong(Exception):
    """A template has taken longer than LIMIT_S."""


def template_file(path: Path) -> Path:
    """Return the file of a model directory that has its chat template."""
    own = path / "chat_template.jinja"
    return own if own.is_file() else path / "tokenizer_config.json"


def with_options(template: object, options: Mapping[str, object], file: Path) -> str:
    """Return a chat template that sets these variables itself, so that no caller has to. ValueError
    names a variable that it does not read, or a value that it would misread. file: where it is.
    """
    if not isinstance(template, str):
        what = "there is none"
        if isinstance(template, dict):
            what = f"there are several: {', '.join(template)}"
        raise ValueError(f"{file}: model.template_options need one chat template, and {what}")
    read = _variables_of(template, file) - _GIVEN
    set_first = ""
    for name, value in options.items():
        option = f"model.template_options.{name}"
        if name not in read:
            near = did_you_mean(name, read)
            raise ValueError(f"{file}: {option}: it reads no variable of that name{near}")
        if isinstance(value, str) and value.lower() in _TRUTHS:
            raise ValueError(f"{option}={value}: a text, which is true; write true or false")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{option}={value}: need a finite number")
        set_first += f"{{% set {name} = {value!r} %}}"
    # The newline belongs to the last tag: transformers' templates are read with trim_blocks.
    return f"{set_first}\n{template}"


def _variables_of(template: str, file: Path) -> set[str]:
    """Return the variables that a chat template reads and does not set itself."""
    from jinja2 import Environment, TemplateError, meta

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _GENERATION.sub("", template)
        )
    except TemplateError as error:
        raise ValueError(f"{file}: {error}") from error
    return meta.find_undeclared_variables(parsed)


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
