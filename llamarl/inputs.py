"""What the user gave, looked at before anything heavy starts: model directory, tokenizer, reward function, data. BadInput."""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

from llamarl.conversion import did_you_mean
from llamarl.inference.quantize import quantize_decoder
from llamarl.models.attention import Rotary
from llamarl.models.build import build_decoder
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.hf import SafetensorsDir, check_weights
from llamarl.models.sharding import parameter_shapes

if TYPE_CHECKING:
    from llamarl.launch import Job

_MAKE_NAMES = {"globals", "vars", "locals", "exec", "eval", "setattr", "modules", "__dict__"}

log = logging.getLogger("llamarl")


class BadInput(ValueError):
    """Something that the user gave cannot be used."""


@contextmanager
def bad_input() -> Iterator[None]:
    """What is raised inside is the user's to mend: BadInput."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(str(error)) from error


def check_inputs(job: Job) -> None:
    """Model directory, tokenizer, reward and data, on every rank, before any weight is read. BadInput."""
    c = job.config
    with bad_input():
        model = read_config(job.model_path)
        _check_model(job, model)
        _check_tokens(job, model.vocab_size)
        if c.reward.fn:
            check_reward_path(c.reward.fn)
        _check_task(job)
        longest = c.task.max_prompt_tokens + c.max_new_tokens
        if longest > model.max_position_embeddings:
            raise ValueError(
                f"task.max_prompt_tokens + max_new_tokens = {longest}, but the model's context is {model.max_position_embeddings}; lower one of them"
            )


def _check_model(job: Job, model: ModelConfig) -> None:
    """By config.json and the headers of the weights."""
    try:
        Rotary(model.head_dim, model.rope_theta, model.rope_scaling)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{job.model_path / 'config.json'}: {error}") from error
    check_weights(SafetensorsDir(job.model_path), parameter_shapes(model))
    g = job.config.generator
    if g.kind == "native" and g.quantize != "none":
        try:
            quantize_decoder(build_decoder(model), g.quantize, tuple(g.quantize_keep))  # on the meta device
        except ValueError as error:
            raise ValueError(f"generator.quantize_keep={g.quantize_keep}: {error}") from error


def _check_tokens(job: Job, vocab_size: int) -> None:
    """The tokenizer's ids and the stop tokens are rows of the embedding."""
    but = f"but config.json says vocab_size={vocab_size}; fetch both again"
    vocabulary = job.tokenizer.get_vocab()
    last = max(vocabulary, key=vocabulary.get, default=None)
    if last is not None and vocabulary[last] >= vocab_size:
        raise ValueError(f"{job.model_path / 'tokenizer.json'}: token {last!r} has id {vocabulary[last]}, {but}")
    if wrong := [i for i in job.stop_token_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"{job.model_path / 'generation_config.json'}: eos_token_id={wrong[0]}, {but}")
    if not job.stop_token_ids and job.world.rank == 0:
        log.warning(
            "%s: no eos token in tokenizer_config.json or generation_config.json; completions take max_new_tokens", job.model_path
        )


def _check_task(job: Job) -> None:
    """The data, and the chat template on a prompt of it."""
    from jinja2 import TemplateError

    try:
        job.task.train_prompt(0)
    except TemplateError as error:
        own = job.model_path / "chat_template.jinja"
        file = own if own.is_file() else job.model_path / "tokenizer_config.json"
        what = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "unset task.system_prompt" if job.config.task.system_prompt else "correct it"
        raise ValueError(f"{file}: its chat template failed ({what}); {remedy}, or set task.chat=false") from error


def check_reward_path(fn: str) -> None:
    """That the module of "module:function" is there and has the name. ValueError if not; silent where only an import can tell.

    Imports nothing: a reward function, unlike a loss, runs in its workers alone.
    """
    where = f"reward.fn={fn}"
    module, _, name = fn.partition(":")
    if not (all(module.split(".")) and name):
        raise ValueError(f'{where}: need an import path "module:function"')
    try:
        spec = _find_module(module, where)
        names = _names_of(spec) if spec and isinstance(spec.loader, SourceFileLoader) else None
    except SyntaxError as error:
        raise ValueError(f"{where}: {error.filename}:{error.lineno}: {error.msg}; correct it") from error
    if names is not None and name not in names:
        shown = ", ".join(sorted(n for n in names if not n.startswith("_"))[:8])
        hint = did_you_mean(name, sorted(names)) or f"; it has {shown or 'no functions'}"
        raise ValueError(f"{where}: {spec.origin} has no function {name}{hint}")


def _find_module(module: str, where: str) -> ModuleSpec | None:
    """Where a reward worker looks: this directory, then sys.path. ValueError if nowhere, None if only an import can tell."""
    path, parent, name = [os.getcwd(), *sys.path], None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        try:
            spec = PathFinder.find_spec(name, path) or (None if parent else importlib.util.find_spec(name))
            path = list(spec and spec.submodule_search_locations or [])
        except (KeyError, ValueError):  # a namespace within another; a module without a spec
            return None
        if spec is None:
            made = _names_of(parent) if parent and isinstance(parent.loader, SourceFileLoader) else set()
            if parent and (parent.submodule_search_locations is None or made is None or "__path__" in made):
                return None
            raise ValueError(f"{where}: no module {name} in {os.getcwd()} or on sys.path; correct the name, or install it")
        parent = spec
    return parent


def _names_of(spec: ModuleSpec) -> set[str] | None:
    """What the statements of a module name, by its source; None where it may make names as it runs."""
    tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    names: set[str] = set()
    for node in ast.walk(tree):
        if {getattr(node, "id", None), getattr(node, "attr", None)} & _MAKE_NAMES:
            return None
        names |= set(node.names) if isinstance(node, ast.Global) else set()
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        stored = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        named = getattr(node, "asname", None) or getattr(node, "name", None) or stored  # an import, a definition, a variable
        names |= {named.split(".")[0]} if named else set()
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__"} else names
