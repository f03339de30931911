"""Prints docs/keys.md, the reference of all keys: `python -m llamarl.config > docs/keys.md`."""

from llamarl.config.command_line import RL, JobKind, default_values
from llamarl.config.evaluation import EVALUATION
from llamarl.config.keys import key_lines
from llamarl.config.preferences import PREFERENCES
from llamarl.config.supervised import REWARD_MODEL, SFT

HEAD = """# Keys

`python -m llamarl.config > docs/keys.md` made this page from the fields in `llamarl/config/`.
Each key has its default and, in parentheses, what it may be and the kinds of its section that have
it. A default in `${...}` follows from other keys. A key that several jobs share is listed once."""
JOBS: dict[str, JobKind] = {
    "recipes/llama_async.py": RL,
    "recipes/evaluate.py": EVALUATION,
    "recipes/preferences.py": PREFERENCES,
    "recipes/sft.py": SFT,
    "recipes/reward_model.py": REWARD_MODEL,
}


def page() -> str:
    """Return the page. A key that means the same in the main job is there alone."""
    lines = [HEAD]
    told: set[str] = set()
    for recipe, kind in JOBS.items():
        items = key_lines(kind.schema, default_values(kind), told)
        lines += ["", f"# `{recipe}`", *items]
        told |= {*items}
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
