"""What embeds texts, as the user gave it: looked at before any weight is read."""

from __future__ import annotations

from pathlib import Path

from llamarl.config.sections.evaluation import START
from llamarl.launch.job import Job, read_tokenizer
from llamarl.scoring.embedding import check_sentence_encoder


def check_embedders(job: Job) -> None:
    """Directory and tokenizer of every encoder. ValueError or OSError naming the key and what is
    wrong.
    """
    for key, given in job.config.embedders.items():
        if given == START:
            continue
        try:
            with job.weights_may_wait():
                check_sentence_encoder(given)
            read_tokenizer(Path(given), chat=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}: {error}") from error
