"""Builds tasks from their settings: what `task=gsm8k` on the command line becomes.

    kind           prompts                           held out for evaluation        reward
    addition       "12+34="; needs no files          500 pairs, always the same     exact_match
    questions      name: sum or larger; of numbers   some of the pairs              numeric_match
                   from least to most
    one_prompt     text: that of all tickets;        the same prompt                contains_words
                   words
    jsonl          path: a JSONL file; prompt_key,   eval_path, or some of path     exact_match
                   answer_key
    gsm8k          path: JSONL with "question" and   eval_path, or some of path     numeric_match
                   "answer"
    hf_dataset     path: a dataset directory;        eval_path, its test or valid-  exact_match
                   prompt_key, answer_key            ation split, or some of path
    facts          posts to summarise; needs no      500 posts, always the same     facts:gold
                   files; seed
    reasoning_gym  name: such as chain_sum; seed     questions of another seed      reasoning_gym
                                                                                    _score
    python         fn: module:function that returns  as it says                     as it says
                   a Task; options
    environment    environment: module:Class; path,  as jsonl; of its own prompts   the environ-
                   or prompts of its own             as many of these                ment's
    mixture        parts: by name, each a kind       from each part, by its weight  each part's
                   with its keys, and a weight

"Some of path" is min(num_eval, a tenth) of its prompts, at random but the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarl.config.sections.task import (
    AdditionSettings,
    AnyTaskSettings,
    EnvironmentSettings,
    EvalSetSettings,
    FactsSettings,
    FileSettings,
    GSM8KFileSettings,
    GSM8KSettings,
    MixtureSettings,
    OnePromptSettings,
    PlayedSettings,
    PythonTaskSettings,
    QuestionsSettings,
    ReasoningGymSettings,
    RowsSettings,
    TaskSettings,
)
from llamarl.tasks.base import Example, Examples, PromptMaker, Task, Tokenizer
from llamarl.tasks.environment import GIVEN, DialogueMaker, OwnTask
from llamarl.tasks.facts import Post, facts_posts
from llamarl.tasks.files import GSM8K_INSTRUCTION, read_rows
from llamarl.tasks.list_task import Remembered, here, rows_task, warn_of_shared
from llamarl.tasks.parts import HeldOut, MixtureTask, shares
from llamarl.tasks.procedural import ReasoningGymTask, addition_examples, question_examples
from llamarl.tasks.python_task import own_task
from llamarl.words.choices import OWN

EXACT_MATCH = "llamarl.tasks.rewards:exact_match"
NUMERIC_MATCH = "llamarl.tasks.rewards:numeric_match"


@dataclass(frozen=True, slots=True)
class TaskBuilder:
    """Builds tasks from their settings. Each method's ValueError or FileNotFoundError says what to
    change.

    seed: of the tasks that draw their prompts. remembered: finds which rows of files fit.
    """

    tokenizer: Tokenizer
    seed: int = 0
    remembered: Remembered = here

    def task(self, settings: AnyTaskSettings, num_eval: int) -> Task:
        """Return a task that holds out at most num_eval prompts, unless its kind says how many."""
        if isinstance(settings, MixtureSettings):
            return self._mixture(settings, num_eval)
        return self._single(settings, num_eval=num_eval)

    def held_out(self, task: Task, num_own: int, sets: Mapping[str, EvalSetSettings]) -> HeldOut:
        """Return the held-out prompts of a task, at most num_own, and those of eval.sets."""
        tasks = {}
        counts = {OWN: num_own}
        for name, one in sets.items():
            counts[name] = one.num_prompts
            try:
                tasks[name] = self._single(
                    one.prompts, num_eval=one.num_prompts, keeps_turns=True, trains=False
                )
            except ValueError as error:
                raise ValueError(f"eval.sets.{name}: {error}") from error
            if not tasks[name].num_eval:
                raise ValueError(
                    f"eval.sets.{name}: has no held-out prompts of at most max_prompt_tokens="
                    f"{one.prompts.max_prompt_tokens}; give it other rows, or raise that"
                )
        if tasks:
            trained = {"the task": task}
            if isinstance(task, MixtureTask):
                trained = {f"task.parts.{name}": part for name, part in task.parts.items()}
            asked = {f"eval.sets.{name}": held for name, held in tasks.items()}
            warn_of_shared(trained, asked, self.remembered)
        return HeldOut(task, tasks, counts)

    def prompt_maker(
        self, settings: TaskSettings | MixtureSettings, *, keeps_turns: bool = False
    ) -> PromptMaker:
        """Return what makes the prompts of texts. keeps_turns: see PromptMaker."""
        return PromptMaker(
            self.tokenizer,
            chat=settings.chat,
            system_prompt=settings.system_prompt,
            max_prompt_tokens=settings.max_prompt_tokens,
            instruction=GSM8K_INSTRUCTION if isinstance(settings, GSM8KFileSettings) else "",
            keeps_turns=keeps_turns,
        )

    def _mixture(self, settings: MixtureSettings, num_eval: int) -> MixtureTask:
        if not settings.parts:
            raise ValueError("task.parts is empty; task.parts={a: {kind: addition}, b: {...}}")
        weights = {name: float(part.weight) for name, part in settings.parts.items()}
        held_out = shares(weights, num_eval)
        tasks = {}
        for name, part in settings.parts.items():
            num_part_eval = max(1, held_out[name])
            try:
                tasks[name] = self._single(part.prompts, num_eval=num_part_eval, keeps_turns=True)
            except ValueError as error:
                raise ValueError(f"task.parts.{name}: {error}") from error
        by_key = {f"task.parts.{name}": task for name, task in tasks.items()}
        warn_of_shared(by_key, by_key, self.remembered)
        return MixtureTask(tasks, weights, num_eval)

    def _single(
        self,
        settings: TaskSettings,
        *,
        num_eval: int,
        keeps_turns: bool = False,
        trains: bool = True,
    ) -> Task:
        """Return a task that is no mixture. trains: whether it must have training prompts."""
        maker = self.prompt_maker(settings, keeps_turns=keeps_turns)
        match settings:
            case PythonTaskSettings(fn=fn, options=options):
                return own_task(fn, maker, seed=self.seed, num_eval=num_eval, options=options)
            case ReasoningGymSettings(name=name, options=options):
                return ReasoningGymTask(
                    name, maker, num_eval=num_eval, seed=self.seed, options=options
                )
            case PlayedSettings(environment=environment):
                maker = DialogueMaker(
                    environment,
                    self.tokenizer,
                    chat=settings.chat,
                    system_prompt=settings.system_prompt,
                    max_prompt_tokens=settings.max_prompt_tokens,
                )
                if settings.path is None:
                    num_train = num_eval
                    if isinstance(settings, EnvironmentSettings):
                        num_train = settings.num_prompts
                    return OwnTask(maker.turn_tokens, num_train=num_train, num_eval=num_eval)
        train, held_out, default_reward = self._rows(settings)
        return rows_task(
            settings.kind,
            train,
            held_out,
            maker,
            num_eval=num_eval,
            default_reward=default_reward,
            remembered=self.remembered,
            trains=trains,
        )

    def _rows(self, settings: TaskSettings) -> tuple[Examples, Examples | None, str]:
        """Return (training rows, held-out rows, default reward) of a kind with a list of rows.
        Held-out rows None: some of the training rows are held out.
        """
        match settings:
            case AdditionSettings():
                return *addition_examples(), EXACT_MATCH
            case FactsSettings():
                train, held_out = facts_posts(self.seed)
                return _post_examples(train), _post_examples(held_out), "llamarl.tasks.facts:gold"
            case OnePromptSettings(text=text, words=words):
                rows = [Example(text, {"words": list(words)})]
                return rows, rows, "llamarl.tasks.rewards:contains_words"
            case QuestionsSettings(name=name, least=least, most=most):
                return question_examples(name, least, most), None, NUMERIC_MATCH
            case GSM8KFileSettings():
                halves = read_rows("gsm8k", *_paths_of(settings), ("question", "answer"))
                return *halves, NUMERIC_MATCH
            case FileSettings(kind=kind, prompt_key=prompt_key, answer_key=answer_key):
                halves = read_rows(kind, *_paths_of(settings), (prompt_key, answer_key))
                return *halves, EXACT_MATCH
            case PlayedSettings(prompt_key=prompt_key):
                halves = read_rows("jsonl", *_paths_of(settings), (prompt_key, None))
                return *halves, GIVEN
        raise AssertionError(f"{type(settings).__name__} is no kind of task with rows")


def _paths_of(
    settings: FileSettings | GSM8KFileSettings | PlayedSettings,
) -> tuple[str | None, str | None]:
    """Return the paths of (training rows, held-out rows). A set of held-out prompts has only the
    second.
    """
    if isinstance(settings, RowsSettings | GSM8KSettings | EnvironmentSettings):
        return settings.path, settings.eval_path
    return None, settings.path


def _post_examples(posts: Sequence[Post]) -> list[Example]:
    return [Example(post.text, {"answer": post.summary}) for post in posts]
