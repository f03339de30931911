"""For recipes/evaluate.py: finds the model of a command line and the run that made it, reads the
config of the evaluation, and finds the completions to compare with.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from llamarl.checkpoint.checkpointer import MANIFEST, damage, verify
from llamarl.checkpoint.latest import LATEST, latest_in
from llamarl.config.command_line import compose_config, words_from
from llamarl.config.conversion import (
    ConfigError,
    Problem,
    escaped,
    flat,
    is_marked,
    keys_of,
    load_config,
    to_config,
    to_values,
    value_differences,
)
from llamarl.config.evaluation import EVALUATION, REFERENCES, EvaluationConfig
from llamarl.config.evaluation import check as check_evaluation
from llamarl.config.files import EVAL_SETS
from llamarl.config.supervised import is_of_a_supervised_job
from llamarl.errors import CheckpointError
from llamarl.evaluation.gold import reference_items
from llamarl.launch.checks import check_inputs
from llamarl.launch.inputs import JobInputs
from llamarl.models.peft import CONFIG as ADAPTER_CONFIG
from llamarl.models.peft import lora_in
from llamarl.scoring.assembly import item_of
from llamarl.scoring.scorer import Item
from llamarl.scoring.sharded import same_tokens
from llamarl.tasks.files import read_jsonl
from llamarl.tasks.parts import EvalSet, reference_texts, set_of
from llamarl.types import EvalCompletion, Prompt
from llamarl.words.choices import OWN

# An evaluation has the native engine on one rank, whatever the generator of the run was.
OUR_OWN = (
    "generator.kind",
    "generator.tensor_parallel",
    "generator.quantize",
    "generator.quantize_exclude",
    "generator.gpu_memory_utilization",
)


def read_words(words: list[str]) -> EvaluationConfig:
    """Return the config of a command line, with the Hugging Face directory that its model.path
    leads to. ConfigError lists everything that is wrong.
    """
    problems: list[Problem] = []
    given = [value for key, _, value in map(_split, words) if key == "model.path"]
    others = [word for word in words if _split(word)[0] != "model.path"]
    if not given:
        return config_of([], None, others)
    model, made_by = Path(given[-1]), None
    asked = [f"model.path='{model}'"]
    try:
        model, made_by = find_model(given[-1].strip("'\""))
        asked = words_of(model)
    except (OSError, ValueError) as error:
        problems.append(Problem(f"model.path={model}", str(error), ("model.path",)))
    try:
        config = config_of(asked, made_by, others)
    except ConfigError as error:
        # A directory that is not there has its problem already: do not report it twice.
        seen = keys_of(problems)
        problems += [problem for problem in error.problems if seen.isdisjoint(problem.keys)]
    if problems:
        raise ConfigError(problems)
    return config


def _split(word: str) -> tuple[str, str, str]:
    key, sign, value = word.partition("=")
    return key.lstrip("+"), sign, value


def config_of(model: list[str], run: Path | None, overrides: list[str]) -> EvaluationConfig:
    """Return the config of an evaluation. If there is a run, its values hold for the keys that the
    schema marks ANSWERS; the command line overrides them. model: the words that `words_of` returns
    for the directory. ConfigError.
    """
    given = [*overrides, *_implied(overrides), *model]
    file = None if run is None else run / "config.yaml"
    if file is None or not file.is_file() or is_of_a_supervised_job(file):
        return compose_config(given, EVALUATION)
    named = {_split(word)[0] for word in given}
    old = to_values(load_config(file))
    if old["victim"]["kind"] != "none":
        what = (
            "its completions are attacks, and only a victim's replies to them are scored; read "
            "eval/success of the run's own evaluations, or give the model directory alone"
        )
        raise ConfigError([Problem(f"victim.kind={old['victim']['kind']}", what)])
    # If the command line chooses another kind for a section, the run's keys mean nothing in it.
    # Otherwise they are what the command line changes.
    of_kinds = {section: old.pop(section) for section in ("task", "reward")}
    kept = {section: values for section, values in of_kinds.items() if section not in named}
    sets = old["eval"].pop("sets")
    # The file of another task has its own length.
    lengths = [f"max_new_tokens={old['max_new_tokens']}"] if "task" in kept else []
    of_run = words_from({section: escaped(one) for section, one in kept.items()}, EVALUATION)
    values = to_values(compose_config([*of_run, *lengths, *given], EVALUATION))
    if not any(f"{name}.".startswith(f"{EVAL_SETS}.") for name in named):
        values["eval"]["sets"] = sets
    default = compose_config(model, EVALUATION)
    named |= set(value_differences(to_values(default), values))
    for key, was in flat(old).items():
        section, _, name = key.rpartition(".")
        names = {section, key}
        if is_marked(key, "answers") and key not in OUR_OWN and not names & named:
            place = values[section] if section else values
            place[name] = was
    config = to_config(values, EvaluationConfig)
    problems = check_evaluation(config, 1)
    if problems:
        raise ConfigError(problems)
    return config


def _implied(overrides: list[str]) -> list[str]:
    """Return the words that the words of a command line imply."""
    words = []
    for key, _, value in map(_split, overrides):
        if key in ("eval.gold", "eval.base"):
            words.append("eval.every=1")  # the run may have evaluated nothing
        if key == "against" and value != REFERENCES:
            words.append("eval.reference_key=null")  # the rows need no answers then
    return list(dict.fromkeys(words))


def find_model(given: str | Path) -> tuple[Path, Path | None]:
    """Return the Hugging Face or PEFT directory to evaluate, and its run_dir or None.

    given: such a directory, RUN_DIR/checkpoints/step_N, RUN_DIR/checkpoints/latest, or RUN_DIR for
    its latest checkpoint. FileNotFoundError or CheckpointError says what to give instead.
    """
    path = Path(given)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints" / LATEST
    if path.name == LATEST:
        newest = latest_in(path.parent)
        if newest is None:
            raise FileNotFoundError(
                f"{path}: no such file; a run writes it with its first checkpoint"
            )
        path = newest
    asked = None
    if path.name in ("hf", "adapter") and (path.parent / MANIFEST).is_file():
        asked, path = path, path.parent
    if (path / MANIFEST).is_file():
        problems = verify(path)
        if problems:
            raise CheckpointError(damage(path, problems))
        # hf/ holds the sum of weights and adapters, rounded; adapter/ is exact.
        adapter = path / "adapter"
        weights = adapter if adapter.is_dir() else path / "hf"
        return asked or weights, path.absolute().parents[1]
    if not any((path / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        raise FileNotFoundError(
            f"{path}: neither a Hugging Face directory (it has no config.json), nor one of PEFT's "
            f"(no {ADAPTER_CONFIG}), nor a checkpoint (no {MANIFEST}); give one of these, such as "
            "RUN_DIR/checkpoints/step_N or RUN_DIR/checkpoints/latest"
        )
    return path, None


def words_of(model: Path) -> list[str]:
    """Return the words of a command line that evaluates a directory. For a PEFT directory they name
    its adapters and the base model of its adapter_config.json.

    FileNotFoundError if the base model is not here; ValueError for adapters that cannot be used.
    """
    if not (model / ADAPTER_CONFIG).is_file():
        return [f"model.path='{model}'"]
    lora, base = lora_in(model)
    if base is None or not Path(base, "config.json").is_file():
        raise FileNotFoundError(
            f"{model / ADAPTER_CONFIG}: base_model_name_or_path={base} is no directory here; write "
            "there where the weights are that these adapters belong to"
        )
    return [
        f"model.path='{base}'",
        f"trainer.lora.path='{model}'",
        f"trainer.lora.rank={lora.rank}",
        f"trainer.lora.alpha={lora.alpha}",
        f"trainer.lora.targets=[{','.join(lora.targets)}]",
    ]


def find_against(
    given: str,
    inputs: JobInputs,
    sets: Sequence[EvalSet],
    prompts: Mapping[int, Prompt],
    complete: Callable[[JobInputs, Mapping[int, Prompt], int], list[EvalCompletion]],
) -> Callable[[], list[Item]] | None:
    """Return a function that finds the completions to compare with, one to each prompt of the sets;
    None without any. ValueError or OSError at once if they cannot be had.

    complete: returns the completions of prompts, with so many samples each, by the model of inputs.
    """
    config = inputs.config
    if config.gold is None:
        return None
    if given == REFERENCES:
        texts = reference_texts(sets, prompts, config.eval.reference_key)
        return None if texts is None else partial(reference_items, inputs, prompts.values(), texts)
    if Path(given).is_file():
        texts = _read_answers(Path(given), sets, prompts)
        return partial(reference_items, inputs, prompts.values(), texts)
    model, _ = find_model(given)
    its = compose_config(words_of(model), EVALUATION)
    own = dataclasses.replace(config.model, path=its.model.path)
    adapted = dataclasses.replace(config.trainer, lora=its.trainer.lora)
    # The other model is not judged itself: its completions are only compared with.
    unjudged = dataclasses.replace(config.eval, gold=None, gold_label=None, base=None)
    changed = dataclasses.replace(config, model=own, trainer=adapted, eval=unjudged)
    other = JobInputs(changed, is_told=inputs.is_told)
    check_inputs(other)

    def completions() -> list[Item]:
        most = max(one.count for one in sets)
        every = other.held_out.asked(other.held_out.first(most))
        theirs = {number: prompt for number, prompt in every.items() if number in prompts}
        if [one.text for one in theirs.values()] != [one.text for one in prompts.values()]:
            raise ValueError(
                f"against={other.model_path}: not all held-out prompts fit task.max_prompt_tokens "
                "in its tokens; raise it"
            )
        items = []
        for completion, prompt in zip(complete(other, theirs, 0), prompts.values()):
            items.append(item_of(completion, prompt, other.decode, other.decode_raw))
        if same_tokens(other.tokenizer, inputs.tokenizer):
            return items
        # Gold reads the tokens of the evaluated model.
        return reference_items(inputs, prompts.values(), [item.text for item in items])

    return completions


def _read_answers(file: Path, sets: Sequence[EvalSet], prompts: Mapping[int, Prompt]) -> list[str]:
    """Return a file's greedy completion of each of these prompts. ValueError that names FILE:LINE
    of a bad line, or the first prompt without a completion.
    """

    def answer_of(row: dict) -> tuple[tuple[str, str], str] | None:
        prompt, completion = row.get("prompt"), row.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError('need "prompt" and "completion", both texts')
        return None if row.get("sample") else ((row.get("set", OWN), prompt), completion)

    rows = read_jsonl(file, answer_of)
    answers = dict(row for row in rows if row is not None)
    texts = []
    for number, prompt in prompts.items():
        one = set_of(sets, number)
        if (one.name, prompt.text) not in answers:
            raise ValueError(
                f"against={file}: has no greedy completion of held-out prompt "
                f"{number - one.first}{one.place}, {prompt.text[:40]!r}; make it from the same "
                "rows"
            )
        texts.append(answers[one.name, prompt.text])
    return texts


def check_writable(out: Path) -> None:
    """Make the file's directory. ValueError if the file cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("a") if out.exists() else tempfile.TemporaryFile(dir=out.parent)
        file.close()
    except OSError as error:
        raise ValueError(f"out={out}: cannot be written: {error}") from error
