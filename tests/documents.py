"""What README and the guides tell people to type, as words of a command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from llamarl.__main__ import COMMANDS, num_ranks
from tests.house import BLOCK, ROOT, blocks, text_of

TINY = ROOT / "llamarl" / "models" / "tiny"
README = text_of(ROOT / "README.md")
PAPERS = text_of(ROOT / "docs" / "papers.md")
RLHF = text_of(ROOT / "benchmarks" / "rlhf" / "README.md")
# What users and contributors are told to type, and where they are told to look.
GUIDES = "\n".join(
    text_of(ROOT / name)
    for name in (
        "README.md",
        "AGENTS.md",
        "CONTRIBUTING.md",
        "benchmarks/README.md",
        "docs/architecture.md",
        "docs/data.md",
        "docs/quickstart.md",
        "docs/rewards.md",
        "docs/scaling.md",
        "docs/watching.md",
    )
)
SPAN = re.compile(r"`([^`\n]+)`")
OVERRIDE = re.compile(r"^\+?[a-z_]+(?:\.[a-z_]+)*=[^=]*$")
# What documents call the user's own models, and their rows.
MODELS = ("DIR", "SFT_DIR", "RM_DIR", "GOLD_DIR", "GOLD_SFT_DIR", "GOLD_BASE_DIR", "PYTHIA_DIR")
ROWS = ("FILE", "ROWS.jsonl", "PAIRS.jsonl", "PROMPTS.jsonl", "norobots.jsonl", "pairs.jsonl")
MADE_ROWS = ("train", "valid", "pairs_train", "pairs_valid", "gold_pairs")
# What each stands for in a check.
USERS = dict.fromkeys(MODELS, str(TINY)) | dict.fromkeys(ROWS, "train.jsonl")
CHECKPOINTS = ("RUN_DIR", "runs/figure1/1", "runs/TIME")
USERS |= {f"{run_dir}/checkpoints/latest": str(TINY) for run_dir in CHECKPOINTS}
USERS |= {f"data/{name}.jsonl": "train.jsonl" for name in MADE_ROWS}


def commands(text: str = GUIDES) -> list[list[str]]:
    """Command lines of a document's shell blocks and of its code spans, as words; each once."""
    lines = []
    for body in blocks("bash", text):
        whole = body.replace("\\\n", " ").splitlines()
        lines += [line for line in whole if not line.startswith("#")]
    lines += [span for span in SPAN.findall(BLOCK.sub("", text)) if " " in span]
    found = []
    for line in dict.fromkeys(lines):
        of_parts = [shlex.split(part, comments=True) for part in line.split("&&")]
        found += [as_recipe(words) for words in of_parts if words]
    return found


def as_recipe(words: list[str]) -> list[str]:
    """A command of the console script as the recipe, or the module, that it runs; others as they
    are.
    """
    name = "".join(words[1:2])
    if Path(words[0]).name != "llamarl" or name not in COMMANDS:
        return words
    num, others = num_ranks(words[2:])
    module = COMMANDS[name].module
    if "." in module:
        return ["python", "-m", module, *others]
    return ["torchrun", f"--nproc-per-node={num or 1}", f"recipes/{module}.py", *others]


def hydra_commands(text: str = GUIDES) -> list[tuple[int, list[str]]]:
    """(ranks, overrides) of every run of a recipe under Hydra, and of every code span of overrides
    alone.
    """
    found = []
    spans = dict.fromkeys(SPAN.findall(BLOCK.sub("", text)))
    for words in commands(text) + [[span] for span in spans]:
        recipe = [
            i
            for i, word in enumerate(words)
            if word in ("recipes/llama_async.py", "recipes/custom_executor.py")
        ]
        options = dict(
            word.split("=", 1) for word in words if word.startswith("--n") and "=" in word
        )
        ranks = int(options.get("--nnodes", 1)) * int(options.get("--nproc-per-node", 1))
        if recipe:
            found.append((ranks, words[recipe[0] + 1 :]))
        elif all(OVERRIDE.match(word) for word in words):
            # A dry run of ranks that are not there is one process.
            counts_ranks = any(word.startswith("+ranks=") for word in words)
            found.append((1 if counts_ranks else 8, words))
    return found


def of_the_user(overrides: list[str]) -> list[str]:
    """Overrides with the user's own files."""
    given = []
    for word in overrides:
        key, _, value = word.partition("=")
        given += [f"{key}={USERS.get(value, value)}"] if value else []
    return given


def shell_of(page: str) -> str:
    """Return the shell blocks of a page, given by its path; its code spans also name keys."""
    return "".join(f"```bash\n{body}```\n" for body in blocks("bash", text_of(ROOT / page)))
