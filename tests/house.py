"""The files of this checkout and what can be read off them, for tests of the rules of the house."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)  # of a document
# A docstring is a long string with nothing before it on its line.
STRING_OR_COMMENT = re.compile(
    r"""(?P<long>\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3})"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)


@cache
def our_files() -> list[Path]:
    """Return every file that git tracks or would add."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def python_files(*folders: str) -> list[Path]:
    """Return our Python files in these top folders; there must be some."""
    files = [
        file
        for file in our_files()
        if file.suffix == ".py" and file.relative_to(ROOT).parts[0] in folders
    ]
    assert files
    return files


def text_of(file: Path) -> str:
    """Return a file's text, empty for what is not text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@cache
def parts_of_code(source: str) -> tuple[str, list[tuple[int, str]]]:
    """(the code, [(number, text) of each line of a docstring or a comment]) of a source.

    By one regular expression: Python's own tokenizer takes seconds for all files.
    """
    code = []
    found = []
    end = 0
    for match in STRING_OR_COMMENT.finditer(source):
        before = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        is_prose = match["comment"] or (match["long"] and before.strip() in ("", "r"))
        if is_prose:
            code.append(source[end : match.start()])
            end = match.end()
            number = source.count("\n", 0, match.start()) + 1
            found += enumerate(match[0].splitlines(), number)
    code.append(source[end:])
    return "".join(code), found


@cache
def tree_of(file: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(file.read_text(encoding="utf-8"))


def module_of(file: Path) -> str:
    """Return the dotted name of a file; a package's own file has the package's name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(tree: ast.AST) -> set[str]:
    """Return the dotted names of all modules that are imported, and of what is taken from them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def outside_annotations(tree: ast.Module) -> ast.Module:
    """Return a module without what only a type checker reads: its `if TYPE_CHECKING:`."""
    kept = []
    for node in tree.body:
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            kept.append(node)
    return ast.Module(kept, [])


def blocks(language: str, text: str) -> list[str]:
    """Return what a document has in fenced blocks of this language."""
    return [body for name, body in BLOCK.findall(text) if name == language]
