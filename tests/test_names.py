"""Names in prose are names of something: the paths, dotted names and identifiers of docstrings,
comments and documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import get_type_hints

import pytest

from llamarl.config.command_line import Config
from llamarl.config.conversion import known_keys, schemas_of
from llamarl.config.evaluation import EvaluationConfig
from llamarl.config.preferences import PreferencesConfig
from llamarl.config.supervised import RewardModelConfig, SFTConfig
from tests.house import BLOCK, ROOT, module_of, our_files, parts_of_code, python_files, text_of

CODE = ("llamarl", "executors", "recipes", "benchmarks", "tests")
FOLDERS = "|".join((*CODE, "conf", "docs"))

# This file, whose names are examples.
NOT_READ = ("tests/test_names.py",)
# Names that no code of ours has, by whose they are.
OTHERS = {
    "systems and units": "LaTeX OpenMP KiB TMPDIR ps",
    "models and papers": "YaRN RoPE LoRA NeoX MiniLM DasGupta AlpacaEval",
    "lm-evaluation-harness": "EleutherAI lm_eval arc_challenge arc_easy truthfulqa_mc2 hellaswag "
    "acc_norm",
    "libraries": "TokenType center_rewards_coefficient SentencePiece add_eos_token",
    "torch": "_weight_int8pack_mm model.layers.3.self_attn.q_proj.weight",
    "formulas": "sum_groups trainer_logprobs_t eps_low eps_high Delta_min "
    "Delta_max delta_inc delta_dec D_local D_global",
    "a user's own": "my_module.py worker_pid eval.sets.mine make_judge",
    "files that users name": "tldr_3_filtered judged_sft judged_rl",
    "misspelt in an example": "loss.ratio_kap",
    "an object, named as a section or a room is": "generator.offloadable config.task "
    "config.reward.scorer.path config.reward.max_error_rate trainer.version generator.version "
    "generator.num_free_groups",
    "a package where llamarl is installed": "llamarl.recipes llamarl.recipes.llama_async",
    "models": "DeepSeek DiffLlama MoE",
    "put together of two": "exp_avg_scale hf_ema",
    "Slurm and Kubernetes": "KillWait RequeueExit ReadWriteMany",
}
ALLOWED = set(" ".join(OTHERS.values()).split())

WORD = re.compile(r"[A-Za-z_]\w*")
CAMEL = r"[A-Z]+[a-z0-9]+(?:[A-Z][a-z0-9]*)+"
SNAKE = r"_?[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+"
IDENTIFIER = re.compile(rf"\b(?:{CAMEL}|{SNAKE})\b")
SPAN = re.compile(r"`([A-Za-z_]\w*)(?:\(\))?`")
# A letter with an index, as in A_t, sum_jt and pi_old.
INDEXED = re.compile(r"(?:[A-Za-z]|pi|mu|KL)_[A-Za-z]+|[A-Za-z]+_[gijlt]{1,3}")
# A part of a name that stands for others, as in size_of_NAME.
STANDS_FOR = re.compile(r"(?:^|[_/.])(?:NAME|KEY|KIND|SECTION|STUDY|OUT|DIR|J|N)(?:[_/.]|$)")
FILE = r"[\w-]+\.(?:py|pyi|md|yaml|cfg|toml)"
PATH = re.compile(rf"(?<![\w./{{-])(?:(?:{FOLDERS})/[\w./-]*\w|{FILE})(?![\w*{{])")
DOTTED = re.compile(r"(?<![\w./=-])([a-z_]\w*(?:\.\w+)+)(?![\w/(=*])")
DATA = re.compile(r"\.(?:json|jsonl|safetensors)$")  # what files of a run end in
JOBS = (Config, SFTConfig, RewardModelConfig, PreferencesConfig, EvaluationConfig)


def prose_of_code(source: str) -> list[tuple[int, str]]:
    """(number, text) of each line of a docstring or a comment."""
    return parts_of_code(source)[1]


def prose_of_document(text: str) -> Iterator[tuple[int, str]]:
    """(number, text) of each line outside of blocks, whose commands have tests of their own."""
    without_blocks = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    yield from enumerate(without_blocks.splitlines(), 1)


@cache
def prose() -> list[tuple[str, str]]:
    """("FILE:LINE", text) of all lines that are written for people."""
    readers = {file: prose_of_code for file in python_files(*CODE)}
    readers |= {file: prose_of_document for file in our_files() if file.suffix == ".md"}
    found = []
    for file, read in readers.items():
        name = str(file.relative_to(ROOT))
        if name not in NOT_READ:
            found += [(f"{name}:{number}", line) for number, line in read(text_of(file))]
    return found


def words_of_code(source: str) -> set[str]:
    """Names, and the words of strings that are no docstrings."""
    return set(WORD.findall(parts_of_code(source)[0]))


@cache
def known_words() -> frozenset[str]:
    """Every name that code, values and settings have."""
    words: set[str] = set()
    for file in our_files():
        words.update(WORD.findall(file.stem))
        if str(file.relative_to(ROOT)) in NOT_READ:
            continue
        if file.suffix in (".py", ".pyi"):
            words |= words_of_code(text_of(file))
        elif file.suffix != ".md":
            words.update(WORD.findall(text_of(file)))
    return frozenset(words)


@cache
def is_known(word: str) -> bool:
    forms = {word, word.removesuffix("s"), re.sub(r"_\d+$", "", word)}
    is_free = INDEXED.fullmatch(word) or STANDS_FOR.search(word)
    return bool(is_free or forms & (known_words() | ALLOWED))


def stale_identifiers(line: str) -> list[str]:
    """Words in the form of a name, and single words in backticks, that name nothing."""
    words = IDENTIFIER.findall(line) + SPAN.findall(line)
    return [word for word in words if not is_known(word)]


@cache
def places() -> frozenset[str]:
    """Files by name and by path, and folders."""
    found = set()
    for file in our_files():
        path = file.relative_to(ROOT)
        found |= {path.name, str(path)}
        found |= {str(parent) for parent in path.parents}
    return frozenset(found)


def stale_paths(line: str) -> list[str]:
    """Paths, and names of files, where nothing is."""
    known = places() | ALLOWED
    return [path for path in PATH.findall(line) if not (path in known or STANDS_FOR.search(path))]


@cache
def modules() -> dict[str, frozenset[str]]:
    """Dotted name of each module -> the words of its code; a package has its modules too."""
    found: dict[str, frozenset[str]] = {}
    for file in python_files(*CODE):
        name = module_of(file)
        found[name] = found.get(name, frozenset()) | words_of_code(text_of(file))
        package, _, own = name.rpartition(".")
        found[package] = found.get(package, frozenset()) | {own}
    return found


@cache
def sections() -> frozenset[str]:
    hints = get_type_hints(Config).items()
    return frozenset(name for name, hint in hints if schemas_of(hint))


@cache
def keys() -> frozenset[str]:
    """The keys of all jobs."""
    return frozenset().union(*(known_keys(job) for job in JOBS))


def is_of_module(name: str) -> bool:
    """Whether a module has it, or is it. A room of llamarl may stand without "llamarl."."""
    for whole in (name, f"llamarl.{name}"):
        module, _, attribute = whole.rpartition(".")
        if whole in modules() or attribute in modules().get(module, ()):
            return True
    return False


def stale_dotted(line: str) -> list[str]:
    """Names under a package, a room or a section of the configuration that has no such thing."""
    stale = []
    for name in DOTTED.findall(line):
        top = name.split(".")[0]
        is_ours = top in CODE or f"llamarl.{top}" in modules() or top in sections()
        is_file = PATH.fullmatch(name) or DATA.search(name)
        is_free = name in ALLOWED or STANDS_FOR.search(name)
        # A schedule of loss.schedules has the name of the option that it changes.
        option = name.replace("loss.schedules.", "loss.")
        is_there = option in keys() or is_of_module(name)
        if is_ours and not (is_file or is_free or is_there):
            stale.append(name)
    return stale


@pytest.mark.parametrize(
    "rule, line",
    [
        (stale_identifiers, "what NoSuchRecord and no_such_name say"),
        (stale_identifiers, "set `nosuchword`"),
        (stale_paths, "as llamarl/no_such_file.py and no_such_page.md have it"),
        (stale_dotted, "llamarl.launch.no_such_module, or loss.no_such_key"),
        (stale_dotted, "tickets.NO_SUCH_THING"),
    ],
)
def test_a_name_of_nothing_is_seen(rule, line):
    found = rule(line)
    assert found and all("such" in name.lower() for name in found)


@pytest.mark.parametrize("rule", [stale_identifiers, stale_paths, stale_dotted])
def test_names_in_prose_are_names_of_something(rule: Callable[[str], list[str]]):
    found = []
    for place, line in prose():
        found += [f"{place}: {name}" for name in rule(line)]
    assert not found


def test_what_is_allowed_is_needed():
    """A word that code has by now, or that nobody writes any more, is taken off the list."""
    written = "\n".join(line for _, line in prose())
    assert not [word for word in ALLOWED if word not in written or word in known_words()]
