"""The files of TL;DR (Stiennon et al. 2020, "Learning to summarize from human feedback") as rows
that the other recipes read.

    python benchmarks/rlhf/tldr.py tokenizer=MODEL_DIR out=DATA \\
        posts=[tldr_3_filtered/train.jsonl,tldr_3_filtered/valid.jsonl] \\
        comparisons=[comparisons/batch*.json]

posts         {"subreddit", "title", "post", "summary"} a line; DATA/NAME.jsonl has for each file of
              that name {"prompt", "answer"}: for recipes/sft.py, and as prompts of a run
comparisons   {"info": {"subreddit", "title", "post"}, "summaries": [{"text"}, {"text"}], "choice",
              "split"} a line; DATA/pairs_train.jsonl and pairs_valid.jsonl have {"prompt",
              "chosen", "rejected"}: for recipes/reward_model.py

A prompt is "SUBREDDIT: r/..", "TITLE: ..", "POST: .." and "TL;DR:", apart by empty lines. Where it
has more than max_prompt_tokens (512), the post loses whole lines at its end until it has not, and
words where one line is too long. An answer begins with one space and ends where its text does.

Left out, and counted: posts that were written down again, comparisons of two equal summaries and
those of news articles (their info has an "article"). Exit status: 0, or 2 for files that cannot be
used; nothing is written then.
"""

from __future__ import annotations

import glob
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llamarl.config.conversion import REQUIRED, ConfigError, Problem
from llamarl.config.script import read_script
from llamarl.disk.files import replace_text
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.files import read_jsonl
from llamarl.words.fields import Count, Text, settings_dataclass

POST_KEYS = ("subreddit", "title", "post")
EQUAL, ARTICLE = "two equal summaries", "of a news article"
REPEATED = "written down again"


class Row(NamedTuple):
    """A line of an output file, or the reason why there is none."""

    file: str
    values: dict[str, str]
    left_out: str = ""


@settings_dataclass
class Settings:
    tokenizer: Text  # whose tokens are counted: a model's directory
    out: Text
    posts: list[Text]  # files, or patterns of them
    comparisons: list[Text]
    max_prompt_tokens: Count


DEFAULTS = {
    "tokenizer": REQUIRED,
    "out": REQUIRED,
    "posts": [],
    "comparisons": [],
    "max_prompt_tokens": 512,
}


def parse(words: Sequence[str]) -> Settings:
    """ConfigError."""
    settings = read_script(words, Settings, DEFAULTS, doc=__doc__)
    if not settings.posts and not settings.comparisons:
        what = "nothing to read; posts=[FILE,...], comparisons=[FILE,...] or both"
        raise ConfigError([Problem("posts, comparisons", what)])
    return settings


def files_of(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match, pattern by pattern. FileNotFoundError if one matches none."""
    files: list[Path] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern))
        if not found:
            raise FileNotFoundError(f"{pattern}: no such file")
        files += map(Path, found)
    return files


def prompt_of(post: dict[str, str], text: str) -> str:
    """Return a post's prompt, with `text` as the post itself."""
    head = f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}"
    return f"{head}\n\nPOST: {text}\n\nTL;DR:"


def shorten(post: dict[str, str], fits: Callable[[str], bool]) -> str:
    """Return a post's longest prompt that fits, of whole lines, or else of words of the first line.

    ValueError where even a prompt without a post does not fit.
    """
    text = post["post"].strip()
    while not fits(prompt_of(post, text)) and "\n" in text:
        text = text[: text.rindex("\n")].rstrip()
    if fits(prompt_of(post, text)):
        return prompt_of(post, text)
    words = text.split(" ")
    least, most = 0, len(words)  # so many words fit; so many do not
    while most - least > 1:
        middle = (least + most) // 2
        if fits(prompt_of(post, " ".join(words[:middle]))):
            least = middle
        else:
            most = middle
    if least == 0:
        raise ValueError("title and first word alone are longer than --max-prompt-tokens")
    return prompt_of(post, " ".join(words[:least]))


def texts_of(row: dict, keys: Iterable[str], where: str) -> dict[str, str]:
    """Return the texts under these keys. ValueError for one that is absent, no text, or blank."""
    texts = {}
    for key in keys:
        value = row.get(key)
        if not isinstance(value, str) or not value.strip():
            shown = json.dumps(value, default=str)[:60]
            raise ValueError(f'{where}"{key}" must be text that is not empty, this is {shown}')
        texts[key] = value
    return texts


def answer_of(summary: str) -> str:
    """Return a summary as what follows "TL;DR:"."""
    return " " + summary.strip()


def post_row(row: dict, file: str, fits: Callable[[str], bool]) -> Row:
    """Return a post with its author's summary. ValueError for what is not one."""
    texts = texts_of(row, (*POST_KEYS, "summary"), where="")
    prompt = shorten(texts, fits)
    return Row(file, {"prompt": prompt, "answer": answer_of(texts["summary"])})


def pair_row(row: dict, fits: Callable[[str], bool]) -> Row:
    """Two summaries of a post, one of which was chosen. ValueError for what is not that."""
    info = row.get("info")
    summaries = row.get("summaries")
    choice = row.get("choice")
    if not isinstance(info, dict):
        raise ValueError('"info" must be an object with subreddit, title and post')
    if "article" in info:
        return Row("", {}, ARTICLE)
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise ValueError('"summaries" must be a list of two objects with a "text"')
    if type(choice) is not int or choice not in (0, 1):
        raise ValueError(f'"choice" must be 0 or 1, this is {json.dumps(choice)[:60]}')
    texts = []
    for i, summary in enumerate(summaries):
        text = summary if isinstance(summary, dict) else {}
        texts.append(answer_of(texts_of(text, ["text"], f"summary {i}: ")["text"]))
    if texts[0] == texts[1]:
        return Row("", {}, EQUAL)
    prompt = shorten(texts_of(info, POST_KEYS, "info: "), fits)
    trained = str(row.get("split", "train")).startswith("train")
    file = "pairs_train.jsonl" if trained else "pairs_valid.jsonl"
    pair = {"prompt": prompt, "chosen": texts[choice], "rejected": texts[1 - choice]}
    return Row(file, pair)


def without_repeated(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, with a reason in place of those that are in the same file already."""
    seen = set()
    kept = []
    for row in rows:
        key = (row.file, *row.values.values())
        again = not row.left_out and key in seen
        seen.add(key)
        kept.append(Row("", {}, REPEATED) if again else row)
    return kept


def run(args: Settings) -> None:
    """ValueError or OSError for what cannot be used."""
    posts = files_of(args.posts)
    comparisons = files_of(args.comparisons)
    out = Path(args.out)
    tokenizer = load_tokenizer(args.tokenizer)

    def fits(prompt: str) -> bool:
        return len(tokenizer.encode(prompt)) <= args.max_prompt_tokens

    rows = []
    for file in posts:
        name = f"{file.stem}.jsonl"
        rows += read_jsonl(file, partial(post_row, file=name, fits=fits))
    rows = without_repeated(rows)
    for file in comparisons:
        rows += read_jsonl(file, lambda row: pair_row(row, fits))
    lines: dict[str, list[str]] = {}
    left_out: Counter[str] = Counter()
    for row in rows:
        if row.left_out:
            left_out[row.left_out] += 1
        else:
            lines.setdefault(row.file, []).append(json.dumps(row.values, ensure_ascii=False))
    if not lines:
        raise ValueError(f"no row is left; left out: {dict(left_out)}")
    read = {file.resolve() for file in (*posts, *comparisons)}
    for name in sorted(lines):
        if (out / name).resolve() in read:
            raise ValueError(f"out={args.out}: {name} there is one that is read; choose another")
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in sorted(lines.items()):
        replace_text(out / name, "\n".join(texts) + "\n")
        print(f"written   {out / name}, {len(texts):,} rows")
    for reason, count in left_out.most_common():
        print(f"left out  {count:,} {reason}")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        run(parse(words))
    except (ValueError, OSError) as error:
        print(f"tldr: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
