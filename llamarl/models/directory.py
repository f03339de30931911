"""Checks on the files of a model directory, which may be a stranger's. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja


def check_files(directory: Path) -> None:
    """Raise ValueError for a file that lies elsewhere, or that is no regular file.

    A link may lead to another file of the directory. In the cache of the Hugging Face Hub it may
    lead to the model's own blobs:

        models--org--name/snapshots/REVISION/config.json -> ../../blobs/HASH

    Any other link is refused: it would have files of this machine read as the model's, and copied
    into every model that is exported.
    """
    own = directory.resolve()
    root = own
    in_hub_cache = own.parent.name == "snapshots" and own.parents[1].name.startswith("models--")
    if in_hub_cache:
        root = own.parents[1]
    templates = own / NAMED_TEMPLATES
    more = sorted(templates.iterdir()) if templates.is_dir() else []
    for file in (*sorted(own.iterdir()), *more):
        if file.is_dir() and (file != templates or not file.is_symlink()):
            continue  # a folder is not read, except this one
        if not file.exists() and not file.is_dir():  # a link to nothing
            continue
        shown = directory / file.relative_to(own)
        if not file.is_file():
            raise ValueError(f"{shown}: no regular file; fetch the directory again")
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise ValueError(
                f"{shown}: a link to {file.resolve()}, outside of the directory; if it is to be "
                f"used, make a copy without links: cp -rL {directory} COPY"
            )


def read_json(file: Path) -> dict:
    """Return the JSON object that a file holds. ValueError naming it if it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{file}: not JSON: {error}; fetch it again") from error
    except RecursionError as error:
        raise ValueError(
            f"{file}: its JSON is nested too deep to be read; fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{file}: need a JSON object, this is {type(value).__name__}; fetch it again"
        )
    return value


def architecture_in(raw: dict) -> str:
    """Return the first of the architectures that a config.json names; "(none)" if it names none.
    ValueError if they are no names.
    """
    named = raw.get("architectures") or ["(none)"]
    if not (isinstance(named, list) and isinstance(named[0], str)):
        raise ValueError(
            f"architectures={named!r:.80}: need a list of names, such as "
            '["LlamaForCausalLM"]; fetch it again'
        )
    return named[0]
