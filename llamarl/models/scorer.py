"""Models that score sequences: a language model's trunk and one linear head, as transformers'
...ForSequenceClassification.

    decoder = load_scorer(DIR, device=device, dtype=torch.bfloat16)  # llamarl.models.loading
    scores_NC = decoder(tokens_T, positions_T, attention, scores_at(last_N))

A scorer is a Decoder whose config has labels; `score.weight` [labels, D] stands in the place of the
head over the vocabulary. So it is sharded, loaded, saved and travels like any other decoder.

Shapes: T tokens, N sequences, C labels, D model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.build import Decoder
from llamarl.models.config import ModelConfig
from llamarl.models.directory import read_json
from llamarl.models.fsdp import fill
from llamarl.models.hf import stored_tokenizer

SCORE = "score.weight"  # the head's Hugging Face name

log = logging.getLogger(__name__)


def scores_at(rows_N: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a head for Decoder.forward: the scores [N, C] of the hidden states at these places of
    T, in float32.
    """

    def head(hidden_TD: Tensor, weight_CD: Tensor) -> Tensor:
        return F.linear(hidden_TD.index_select(0, rows_N).float(), weight_CD.float())

    return head


@torch.no_grad()
def draw_score_head(decoder: Decoder, *, seed: int) -> None:
    """Draw the head's first values, of which each rank takes its own part: normal, with standard
    deviation 1 / sqrt(D + 1) (Stiennon et al. 2020, B.1).
    """
    shape = (len(decoder.config.labels), decoder.config.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    whole_CD = torch.randn(shape, generator=generator) / (shape[1] + 1) ** 0.5
    fill(decoder, SCORE, decoder.output_weight, whole_CD)


def settle_pad_token(path: str | Path) -> None:
    """Make sure that a scorer's directory does not pad with the token that ends completions.

    transformers scores a row at its last token that is not the pad token, so it would pass over
    that end, at which ours scores. Another special token that completions do not hold becomes the
    pad token, of the model and of the tokenizer. Warns if there is none.
    """
    path = Path(path)
    file = path / "config.json"
    raw = read_json(file)
    tokenizer = stored_tokenizer(path)
    pad = raw["pad_token_id"]
    if pad is not None and pad != tokenizer.eos_token_id and pad == tokenizer.pad_token_id:
        return
    special = set(tokenizer.all_special_tokens)
    special |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    others = sorted(special - {tokenizer.eos_token})
    if not others:
        log.warning(
            "%s: the tokenizer has no special token but its end, so transformers pads with that "
            "and scores the token before it; add a pad token to it, to compare scores",
            path,
        )
        return
    tokenizer.pad_token = min(others, key=lambda token: ("pad" not in token, token))
    tokenizer.save_pretrained(path)
    raw["pad_token_id"] = tokenizer.pad_token_id
    file.write_text(json.dumps(raw, indent=2))


def label_of(labels: Sequence[str], name: str | None) -> int:
    """Return the number of the label with this name; None: of the only label. ValueError naming all
    of them.
    """
    if name is None and len(labels) == 1:
        return 0
    if name in labels:
        return labels.index(name)
    if name is None:
        raise ValueError(f"gives {len(labels)} scores; name one of {', '.join(labels)}")
    raise ValueError(f"has no label {name}; name one of {', '.join(labels)}")


def scorer_fields(config: ModelConfig, like: str | Path) -> dict[str, object]:
    """Return the fields that config.json of an exported scorer has in place of those of the model
    it began as.

    transformers finds the last token of a padded row by pad_token_id: where `like` has none, its
    end token is taken.
    """
    raw = read_json(Path(like) / "config.json")
    pad = raw.get("pad_token_id")
    if pad is None:
        end = raw.get("eos_token_id")
        pad = end[0] if isinstance(end, list) else end
    return {
        "architectures": [config.architecture],
        "id2label": {str(i): label for i, label in enumerate(config.labels)},
        "label2id": {label: i for i, label in enumerate(config.labels)},
        "pad_token_id": pad,
        "tie_word_embeddings": False,
    }
