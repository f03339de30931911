"""A module in the user's own directory, which is the current one and not on sys.path."""

from __future__ import annotations

from pathlib import Path


def write_modules(folder: Path, monkeypatch, **sources: str) -> Path:
    """Write name=source as modules into the folder and make it the current directory.

    write_modules(tmp_path, monkeypatch, my_rewards="def score(prompt, completion, meta): ...")
    """
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    return folder
