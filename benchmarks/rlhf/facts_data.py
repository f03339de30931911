"""What RLHF on the task `facts` begins with: a small model that has learned nothing, and summaries
by a sloppy teacher for it to learn from.

    python benchmarks/rlhf/facts_data.py out=DIR seed=0 rows=20000 width=128

Writes DIR/start, a Llama with random weights whose tokens are the task's words, of 0.8 M parameters
(3.1 M with width=256); DIR/teacher.jsonl and DIR/teacher_held_out.jsonl, a post and its sloppy
summary a line, of the task's training and held-out posts (llamarl/tasks/facts.py).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch

from llamarl.config.conversion import REQUIRED
from llamarl.config.script import read_script
from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.hf import export, named_parameters_hf
from llamarl.tasks.facts import (
    CHATTER,
    DOES,
    GREETINGS,
    LEADS,
    NUM_TRAIN,
    WHAT,
    WHO,
    Fact,
    Post,
    facts_of,
    facts_posts,
    gold,
)
from llamarl.words.fields import Count, Natural, Text, settings_dataclass

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3; the words follow
CONTEXT = 256  # tokens
HEAD = 32  # channels
CONFIG = {  # of config.json, but for the vocabulary and what follows from the width
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
# Deviation of the random weights of this width, which falls with its root. With it so narrow a
# model learns to copy words within 300 steps, with the usual 0.02 within 2,000.
DEVIATION, OF_WIDTH = 0.09, 128
# A sloppy teacher's, with how often: the first is likelier than to begin with a fact, so that a
# model of his begins with it greedily too.
OPENINGS = {"to sum it all up ,": 0.45, "so basically ,": 0.1, "well , in short ,": 0.1, "": 0.35}
STOPS = 0.6  # how often he leaves it at that, after each fact but the first
DEFAULTS = {"out": REQUIRED, "seed": 0, "rows": 20_000, "width": 128}


@settings_dataclass
class FactsDataSettings:
    out: Text
    seed: Natural
    rows: Count  # of teacher.jsonl
    width: Count  # of the model, in channels: a multiple of a head's


def sloppy_summary(post: Post, draw: random.Random) -> str:
    """Write the summary of a teacher who opens with chatter, mostly stops after two facts, gets one
    in ten wrong, repeats himself, and forgets marks.

    A model that learns from him opens with chatter and stops after two facts greedily too; all of a
    good summary is among what it samples.
    """
    stated: list[Fact] = []
    for who, does, what in facts_of(post.text):
        if len(stated) >= 2 and draw.random() < STOPS:
            break
        if draw.random() < 0.1:
            what = draw.choice(WHAT)
        stated.append((who, does, what))
    if draw.random() < 0.25:
        stated.append(draw.choice(stated))
    (opening,) = draw.choices(list(OPENINGS), weights=list(OPENINGS.values()))
    words = [opening] if opening else []
    for number, fact in enumerate(stated):
        if number:
            words.append("and" if draw.random() < 0.2 else ";")
        words += fact
    if draw.random() < 0.8:
        words.append(".")
    return " " + " ".join(words)


def vocabulary() -> list[str]:
    """Return all words of posts and summaries, those of a sloppy teacher too, in alphabetical
    order.
    """
    words = {"post:", "tl;dr:", ".", ";", "and", *WHO, *DOES, *WHAT}
    for phrase in (*GREETINGS, *LEADS, *CHATTER, *OPENINGS):
        words.update(phrase.split())
    return sorted(words)


def tokens() -> list[str]:
    """Return the vocabulary, by id: a word has the space before it, so that texts put end to end
    are tokens put end to end.
    """
    first = "post:"
    others = [f" {word}" for word in vocabulary() if word != first]
    return [*SPECIAL_TOKENS, first, *others]


def config_of(width: int) -> dict[str, object]:
    """Return the config.json of a model of so many channels, a multiple of a head's."""
    return {
        **CONFIG,
        "vocab_size": len(tokens()),
        "hidden_size": width,
        "intermediate_size": width * 21 // 8,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD,
    }


def write_start(out: Path, seed: int, width: int) -> int:
    """Write the model directory. Returns the number of parameters."""
    config = config_of(width)
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder)
        _write_tokenizer(shape)
        ids = {name: config[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        _write_json(shape / "config.json", config)
        _write_json(shape / "generation_config.json", ids)
        decoder = build_decoder(read_config(shape))
        _draw_weights(decoder, seed, deviation=DEVIATION * (OF_WIDTH / width) ** 0.5)
        export(named_parameters_hf(decoder), shape, out, dtype=torch.float32)
    return sum(parameter.numel() for parameter in decoder.parameters())


def _draw_weights(decoder: Decoder, seed: int, deviation: float) -> None:
    decoder.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:  # the scale of a norm
                parameter.fill_(1)
            else:
                parameter.normal_(std=deviation, generator=generator)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = {token: number for number, token in enumerate(tokens())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[^ ]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    settings |= {f"{token[1:-1]}_token": token for token in SPECIAL_TOKENS}
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(file: Path, contents: dict[str, object]) -> None:
    file.write_text(json.dumps(contents, indent=2) + "\n")


def write_teacher(file: Path, posts: list[Post], draw: random.Random) -> float:
    """Write a row for each post. Returns the mean gold of the summaries."""
    lines = []
    total = 0.0
    for post in posts:
        summary = sloppy_summary(post, draw)
        total += gold(post.text, summary, {})
        lines.append(json.dumps({"prompt": post.text, "completion": summary}) + "\n")
    file.write_text("".join(lines))
    return total / len(posts)


def parse(words: Sequence[str]) -> FactsDataSettings:
    """ConfigError; ValueError for more rows than there are, or for a width that makes no heads."""
    settings = read_script(words, FactsDataSettings, DEFAULTS, doc=__doc__)
    if settings.rows > NUM_TRAIN:
        raise ValueError(f"rows={settings.rows}: there are {NUM_TRAIN} posts")
    if settings.width % HEAD:
        nearest = max(1, round(settings.width / HEAD)) * HEAD
        raise ValueError(
            f"width={settings.width}: need whole heads of {HEAD} channels, such as {nearest}"
        )
    return settings


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        settings = parse(words)
        out = Path(settings.out)
        train, held_out = facts_posts(settings.seed)
        draw = random.Random(f"a sloppy teacher, {settings.seed}")
        out.mkdir(parents=True, exist_ok=True)
        num_parameters = write_start(out / "start", settings.seed, settings.width)
        worth = write_teacher(out / "teacher.jsonl", train[: settings.rows], draw)
        write_teacher(out / "teacher_held_out.jsonl", held_out, draw)
    except (ValueError, OSError) as error:
        print(f"facts_data: {error}", file=sys.stderr)
        return 2
    print(f"model    {out / 'start'}, {num_parameters:,} parameters, random")
    print(f"teacher  {out / 'teacher.jsonl'}, {settings.rows:,} summaries, mean gold {worth:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
