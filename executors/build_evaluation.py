"""Completions of a model outside of its run, and judgements of gold and base about them, from a
configuration. For recipes/evaluate.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from executors.build import answering_engine, base_settings, gold_items, gold_settings, sampling_of
from llamarl.config.command_line import compose_config
from llamarl.config.evaluation import EVALUATION, REFERENCES
from llamarl.evaluation.ask import eval_completion, submit
from llamarl.evaluation.gold import Gold
from llamarl.evaluation.judges import Evaluated, find, spans_of
from llamarl.evaluation.metrics import number_of
from llamarl.evaluation.model import Asked, asked_of, find_model, read_answers, words_of
from llamarl.evaluation.perplexity import Likelihood, Perplexity
from llamarl.evaluation.report import Judgement
from llamarl.evaluation.win_rate import Judged
from llamarl.inference.offline import completions_of
from llamarl.inference.protocol import GenerationEngine
from llamarl.launch.checks import check_inputs
from llamarl.launch.gold import gold_texts
from llamarl.launch.inputs import Inputs
from llamarl.observe.console import Progress
from llamarl.scoring.assembly import item_of
from llamarl.scoring.scorer import Item, Scorer, score_all, site_alone
from llamarl.scoring.transcript import same_tokens
from llamarl.tasks.held_out import EvalSet
from llamarl.types import EvalCompletion, Outcome, Prompt


def answer(
    engine: GenerationEngine, inputs: Inputs, prompts: Mapping[int, Prompt], num_samples: int
) -> list[EvalCompletion]:
    """Return the completions of all prompts in order: for each its greedy one, then its samples."""
    sampling = sampling_of(inputs.config, inputs)
    for number, prompt in prompts.items():
        submit(engine, number, prompt, sampling, num_samples)
    completions = []
    total = len(prompts) * (1 + num_samples)
    generator = inputs.config.generator
    slots = generator.max_slots
    with Progress("answers", total, unit="completions", at_once=slots) as progress:
        for finished in completions_of(engine, generator.chunk_tokens):
            completions += [eval_completion(stream, c) for stream, c in finished]
            progress.advance(len(finished))
    return sorted(completions, key=lambda c: (c.prompt_index, number_of(c)))


def score_by_set(
    scorer: Scorer, sets: Sequence[EvalSet], completions: list[EvalCompletion], items: list[Item]
) -> list[Outcome]:
    """Return the outcomes of items, in order. Each set is scored alone, because a scorer that
    compares completions must not compare across sets.
    """
    outcomes: list[Outcome] = []
    for one in sets:
        own = [item for c, item in zip(completions, items) if c.prompt_index in one.numbers]
        outcomes += score_all(scorer, own)
    return outcomes


def find_against(
    given: str, inputs: Inputs, device: torch.device, asked: Asked
) -> Callable[[], list[Item]] | None:
    """Return a function that finds the completions to compare with, one to each prompt; None
    without any. ValueError or OSError at once if they cannot be had.
    """
    prompts = list(asked.prompts.values())
    config = inputs.config
    if config.gold is None:
        return None
    if given == REFERENCES:
        texts = gold_texts(*asked, config.eval.reference_key)
        return None if texts is None else partial(_references, inputs, prompts, texts)
    if Path(given).is_file():
        texts = read_answers(Path(given), asked)
        return partial(_references, inputs, prompts, texts)
    model, _ = find_model(given)
    its = compose_config(words_of(model), EVALUATION)
    own = dataclasses.replace(config.model, path=its.model.path)
    adapted = dataclasses.replace(config.trainer, lora=its.trainer.lora)
    # The other model is never judged itself; its completions only serve as what is compared with.
    unjudged = dataclasses.replace(config.eval, gold=None, gold_label=None, base=None)
    changed = dataclasses.replace(config, model=own, trainer=adapted, eval=unjudged)
    other = Inputs(changed, is_told=inputs.is_told)
    check_inputs(other)
    return partial(answers_of, other, inputs, device, asked)


def answers_of(other: Inputs, inputs: Inputs, device: torch.device, asked: Asked) -> list[Item]:
    """Return the greedy completions of another model, in the tokens of the evaluated model."""
    prompts = list(asked.prompts.values())
    most = max(one.count for one in asked.sets)
    every = asked_of(other, most).prompts
    theirs = {number: prompt for number, prompt in every.items() if number in asked.prompts}
    if [prompt.text for prompt in theirs.values()] != [prompt.text for prompt in prompts]:
        raise ValueError(
            f"against={other.model_path}: not all held-out prompts fit task.max_prompt_tokens in "
            "its tokens; raise it"
        )
    completions = answer(answering_engine(other, device), other, theirs, 0)
    items = [item_of(c, p, other.decode, other.decode_raw) for c, p in zip(completions, prompts)]
    if same_tokens(other.tokenizer, inputs.tokenizer):
        return items
    return _references(inputs, prompts, [item.text for item in items])


def _references(inputs: Inputs, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Item]:
    items = gold_items(inputs, prompts, texts)
    assert items is not None, "references were given"
    return items


def judge(
    inputs: Inputs,
    device: torch.device,
    sets: Sequence[EvalSet],
    answers: Sequence[Evaluated],
    against: Callable[[], list[Item]] | None,
) -> list[Judgement]:
    """Return the judgements of gold and base about greedy completions, one to each prompt, in
    order. Each set is judged alone.
    """
    others = None if against is None else against()
    site = site_alone(device)
    judged: Sequence[Judged | None] = [None] * len(sets)
    if inputs.config.gold is not None:
        judged = find(Gold(gold_settings(inputs.config, inputs, others, sets), site), answers)
    likely: Sequence[Likelihood | None] = [None] * len(sets)
    base = base_settings(inputs.config, sets)
    if base is not None:
        likely = find(Perplexity(base, site), answers)
    against_by_set = [others and others[begin:end] for begin, end in spans_of(sets)]
    return [Judgement(*said) for said in zip(judged, likely, against_by_set)]
