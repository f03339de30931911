"""Checks what the user gave before anything heavy starts: model directory, tokenizer, data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from llamarl.config.sections.victim import placed_victim
from llamarl.errors import BadInput
from llamarl.launch.environments import check_environments
from llamarl.launch.inputs import JobInputs
from llamarl.launch.placement import ranges
from llamarl.launch.scorers import gold_kind, reward_kinds
from llamarl.models.build import build_decoder
from llamarl.models.config import ModelConfig, as_scorer, read_config
from llamarl.models.given import read_model
from llamarl.models.hf import absent_ids
from llamarl.models.peft import check_adapter
from llamarl.models.quantize import quantize_decoder
from llamarl.models.scorer import SCORE
from llamarl.models.shape import AUTO
from llamarl.models.sharding import adapter_shapes
from llamarl.tasks.parts import MixtureTask, reference_texts
from llamarl.tasks.special import end_tokens_file, stop_tokens

_OTHER_VOCABULARY = "but config.json says vocab_size={}; fetch both again"
_LOOKED_AT = 32  # prompts
_MOST_UNKNOWN = 0.1  # of their tokens

log = logging.getLogger("llamarl")


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn errors that are raised inside into BadInput, because the user can mend them."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(str(error)) from error


def check_inputs(inputs: JobInputs) -> None:
    """Check model directory, tokenizer and data, on every rank, before any weight is read.
    BadInput.
    """
    c = inputs.config
    with bad_input():
        file = inputs.model_path / "config.json"
        needs = "model.path is the policy, so it needs a language model"
        model = _read_language_model(inputs.model_path, str(file), needs, c.model.made_by)
        _check_model(inputs, model)
        _check_tokens(inputs, model.vocab_size)
        check_environments(inputs)
        _check_task(inputs)
        if inputs.victim_path is not None:
            _check_victim(inputs)
        for kind in reward_kinds(inputs):
            kind.check()
        _check_judges(inputs)
        if c.trainer.critic.path:
            _check_critic(inputs, Path(c.trainer.critic.path))
        for key, path in c.reference.given.items():
            _check_reader(inputs, key, Path(path))
        context = model.max_position_embeddings
        if c.longest_asked > context:
            raise ValueError(
                f"{c.longest_keys} = {c.longest_asked}, but the model's context "
                f"is {context}; lower one of them"
            )


def _read_language_model(path: Path, given: str, needs: str, made_by: str = AUTO) -> ModelConfig:
    """Read the config.json of a model that gives tokens. ValueError for one that gives scores.

    given: how the user named it. needs: why it has to be a language model. made_by: of config_of.
    """
    model = read_model(path, made_by)
    if model.labels:
        raise ValueError(f"{given}: {model.architecture} gives scores and no tokens; {needs}")
    return model


def _check_vocabulary_of_policy(inputs: JobInputs, path: Path, given: str, reads: str) -> None:
    """Raise ValueError for a model that has other tokens than the policy. reads: which of the
    policy's tokens it reads.
    """
    lacking = inputs.lacking(path, read_config(path).vocab_size)
    if lacking:
        raise ValueError(
            f"{given}: its vocabulary is not that of the policy, {inputs.model_path}, {reads}: "
            f"{lacking}; need a model with the same tokenizer"
        )


def _check_model(inputs: JobInputs, model: ModelConfig) -> None:
    """Check the model by its config.json and the headers of its weights."""
    g = inputs.config.generator
    if model.implementation == "transformers":
        _check_transformers_model(inputs, model)
    if inputs.config.trainer.routing_replay:
        _check_routes(inputs, model)
    inputs.check_weights(inputs.model_path, model)
    _check_adapters(inputs, model)
    if g.kind == "native" and g.quantize != "none":
        decoder = build_decoder(model)  # on the meta device
        try:
            quantize_decoder(decoder, g.quantize, tuple(g.quantize_exclude))
        except ValueError as error:
            raise ValueError(f"generator.quantize_exclude={g.quantize_exclude}: {error}") from error


def _check_transformers_model(inputs: JobInputs, model: ModelConfig) -> None:
    """Check that nothing is asked of a model which only our own modules do."""
    if inputs.config.generator.quantize != "none":
        raise ValueError(
            f"{inputs.model_path / 'config.json'}: transformers' modules compute "
            f"{model.architecture}, and they are not quantised: set generator.quantize=none"
        )


def _check_routes(inputs: JobInputs, model: ModelConfig) -> None:
    """Check that the model has experts, and that its routers take those that are given."""
    routing = build_decoder(model).routing  # on the meta device
    what = f"trainer.routing_replay=true: {inputs.model_path / 'config.json'}: {model.architecture}"
    if routing is None:
        raise ValueError(f"{what} has no experts; set trainer.routing_replay=false")
    if routing.unknown:
        raise ValueError(
            f"{what} chooses experts in {routing.unknown} otherwise than by one topk of scores, "
            "which cannot be replayed; set trainer.routing_replay=false"
        )


def _check_adapters(inputs: JobInputs, model: ModelConfig) -> None:
    """Check that the model has the projections that get adapters, and that a directory of adapters
    fits them.
    """
    adapted = dataclasses.replace(model, lora=inputs.lora)
    try:
        adapter_shapes(adapted)
    except ValueError as error:
        raise ValueError(f"trainer.lora.targets: {error}") from error
    path = inputs.config.trainer.lora.path
    if path is not None:
        check_adapter(path, adapted)


def _check_victim(inputs: JobInputs) -> None:
    """Check that the victim is a language model with a tokenizer, and can read an attack."""
    path = inputs.victim_path
    assert path is not None, "called only with a victim"
    given = f"victim.path={path}"
    model = _read_language_model(path, given, "the victim needs a language model")
    inputs.check_weights(path, model)
    check_vocabulary(inputs.victim_tokenizer, model.vocab_size, path)
    if inputs.is_told:
        _say_absent(inputs.victim_tokenizer, model.vocab_size, path)
    inputs.scored.check_context(model, given)
    try:
        with inputs.chat_template_of(path):
            empty = len(inputs.victim_prompt_ids(""))
    except ValueError as error:
        words = str(error).replace("task.system_prompt", "victim.system_prompt")
        raise ValueError(f"{given}: {words.replace('task.chat', 'victim.chat')}") from error
    most = placed_victim(inputs.config.victim).max_prompt_tokens
    if empty >= most:
        raise ValueError(
            f"victim.max_prompt_tokens={most}: {empty} tokens stand around every attack, so no "
            "attack fits; raise it"
        )


def _check_judges(inputs: JobInputs) -> None:
    """Check what judges evaluations: the gold scorer, a text to compare with in each held-out row,
    the base model and the embedder.
    """
    c = inputs.config.eval
    gold = gold_kind(inputs)
    if gold is not None:
        gold.check()
        reference_texts(inputs.eval_sets, inputs.eval_prompts, c.reference_key)
    if c.base is not None:
        _check_reader(inputs, "eval.base", Path(c.base))
    if c.embedder is not None:
        inputs.check_embedder(c.embedder, "eval.embedder")


def _check_reader(inputs: JobInputs, key: str, path: Path) -> None:
    """Check that a key names a language model that can score the policy's tokens."""
    given = f"{key}={path}"
    model = _read_language_model(path, given, "need a language model")
    _check_vocabulary_of_policy(inputs, path, given, "whose tokens it scores")
    inputs.sampled.check_context(model, given)
    inputs.check_weights(path, model)


def _check_critic(inputs: JobInputs, path: Path) -> None:
    """Check that a value model reads the policy's tokens and gives one number for each."""
    file = path / "config.json"
    model = read_model(path)
    if len(model.labels) > 1:
        labels = ", ".join(model.labels)
        raise ValueError(
            f"{file}: a head of {len(model.labels)} labels ({labels}); a value model "
            "(trainer.critic.path) gives one number; need num_labels=1"
        )
    reads = "whose tokens a value model (trainer.critic.path) reads"
    _check_vocabulary_of_policy(inputs, path, str(path), reads)
    if inputs.config.longest > model.max_position_embeddings:
        raise ValueError(
            f"{file}: the value model's context is {model.max_position_embeddings}, but "
            f"task.max_prompt_tokens + max_new_tokens = {inputs.config.longest}; lower one of them"
        )
    if model.labels:
        inputs.check_weights(path, model)
        _warn_of_rescaled_scores(inputs)
    else:
        inputs.check_weights(path, as_scorer(model), may_lack=(SCORE,))


def _warn_of_rescaled_scores(inputs: JobInputs) -> None:
    """Warn that a value model starts from raw scores of its head, if the reward rescales such
    scores.
    """
    if not inputs.is_told:
        return
    for part in inputs.config.reward_parts:
        scale, shift = part.settings.rescaling
        if scale != 1 or shift != 0:
            log.warning(
                "trainer.critic.path: its values start as raw scores, but rewards are rescaled: "
                "(score - %s=%g) * %s=%g; so the first advantages are wrong by that",
                part.key("shift"),
                shift,
                part.key("scale"),
                scale,
            )


def _check_tokens(inputs: JobInputs, vocab_size: int) -> None:
    """Check that the tokenizer's ids and the stop tokens are rows of the embedding."""
    check_vocabulary(inputs.tokenizer, vocab_size, inputs.model_path)
    if inputs.is_told:
        _say_absent(inputs.tokenizer, vocab_size, inputs.model_path)
    but = _OTHER_VOCABULARY.format(vocab_size)
    for token in inputs.stop_token_ids:
        if not 0 <= token < vocab_size:
            file = end_tokens_file(inputs.model_path)
            raise ValueError(f"{file}: eos_token_id={token}, {but}")
    if not inputs.stop_token_ids and inputs.is_told:
        log.warning(
            "%s: no eos token in tokenizer_config.json or %s, so every completion runs to "
            "max_new_tokens",
            inputs.model_path,
            end_tokens_file(inputs.model_path).name,
        )
    own = stop_tokens(inputs.model_path, inputs.tokenizer, chat=False)
    added = [inputs.decode_raw([token]) for token in inputs.stop_token_ids if token not in own]
    if added and inputs.is_told:
        log.warning(
            "%s: the chat template ends a reply with %s, which is no end token of the directory; "
            "it ends completions too",
            inputs.model_path,
            added[0],
        )


def _warn_of_unread_prompts(inputs: JobInputs) -> None:
    """Warn of prompts that the model cannot read as they are meant: turns without a template, and
    text for which the tokenizer has no tokens.
    """
    tokenizer = inputs.tokenizer
    if (
        inputs.config.model.path
        and inputs.config.task.chat
        and not inputs.sampled.conversation["chat"]
    ):
        log.warning(
            "%s has no chat template, so with task.chat=true prompts are plain text all the same; "
            "take an instruct model, or set task.chat=false",
            inputs.model_path,
        )
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown == tokenizer.eos_token_id:
        return
    count = min(_LOOKED_AT, inputs.task.num_train)
    ids = torch.cat([inputs.task.train_prompt(i).prompt_ids for i in range(count)])
    num_unknown = int((ids == unknown).sum())
    if num_unknown > _MOST_UNKNOWN * ids.numel():
        log.warning(
            "%s: %d of the %d tokens of the first %d prompts are %s: this tokenizer cannot write "
            "them; it may be another model's, or the model cannot read this task",
            inputs.model_path / "tokenizer.json",
            num_unknown,
            ids.numel(),
            count,
            tokenizer.unk_token,
        )


def check_vocabulary(tokenizer, vocab_size: int, path: Path) -> None:
    """Raise ValueError if a model directory's tokenizer has ids that the model lacks."""
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary, key=vocabulary.get, default=None)
    if last is not None and vocabulary[last] >= vocab_size:
        file = path / "tokenizer.json"
        but = _OTHER_VOCABULARY.format(vocab_size)
        raise ValueError(f"{file}: token {last!r} has id {vocabulary[last]}, {but}")


def _say_absent(tokenizer, vocab_size: int, path: Path) -> None:
    """Say which rows of the model's vocabulary have no token, if there are any."""
    absent = absent_ids(tokenizer, vocab_size)
    if absent:
        log.warning(
            "%s: %d of its %d vocabulary rows have no token in the tokenizer (ids %s); they are "
            "never sampled, and no softmax counts them",
            path,
            len(absent),
            vocab_size,
            ranges(absent),
        )


def _check_task(inputs: JobInputs) -> None:
    """Check the data, and the chat template on one prompt of it, of each part of a mixture, and of
    each held-out set.
    """
    with inputs.chat_template_of(inputs.model_path):
        firsts = inputs.task.firsts if isinstance(inputs.task, MixtureTask) else [0]
        for number in firsts:
            inputs.task.train_prompt(number)
        if inputs.is_told:
            _warn_of_unread_prompts(inputs)
        for one in inputs.held_out.sets:
            inputs.held_out.prompt(one.first)
    reads_turns = inputs.victim_path is None and inputs.scored.conversation["chat"]
    for name, asked in inputs.config.eval.sets.items():
        if reads_turns and not asked.prompts.chat:
            raise ValueError(
                f"eval.sets.{name}.chat=false task.chat=true: the scorer would read its prompts "
                "as turns of the chat template, which the policy does not; "
                f"eval.sets.{name}.chat=true"
            )
