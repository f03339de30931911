"""How well a model answers a task's held-out prompts, and those of eval.sets: pass@1 greedily,
pass@k sampled as in training; and by a scorer that it was not trained against, how often it wins.
One process.

    # as the run was configured: the accuracy that it reported
    python recipes/evaluate.py model.path=RUN_DIR/checkpoints/latest
    python recipes/evaluate.py model.path=RUN_DIR/checkpoints/step_50 samples=16 temperature=0.8
    python recipes/evaluate.py model.path=PEFT_DIR  # beside the weights that it names
    python recipes/evaluate.py model.path=HF_DIR num_prompts=100 \\
        task=gsm8k task.path=train.jsonl task.eval_path=test.jsonl
    # win rate of its greedy answers over those of the rows, and their perplexity under a model
    python recipes/evaluate.py model.path=RUN_DIR/checkpoints/latest \\
        eval.gold=RM_DIR eval.base=SFT_DIR
    # the same over another model's answers, or those of a file such as `out` makes
    python recipes/evaluate.py model.path=DIR eval.gold=my_module:gold against=OTHER_DIR task=...

Keys of the main job's config say which task, reward and sampling; beside a run's config.yaml they
change what they name. docs/keys.md explains the other keys. Each completion becomes a line of
`out`. The weights are taken as they were saved: not quantised, not split. Gold judges greedy
answers (docs/rewards.md). Exit status: 0, or 2 for a directory, a key, data or an `out` that cannot
be used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
import torch.distributed as dist

from executors.build import sampling_of
from executors.build_scripts import answering_engine, build_scorer
from llamarl.comm.groups import init_world, this_device, threads_per_rank
from llamarl.config.evaluation import EvaluationConfig
from llamarl.evaluation.ask import Answers, complete, score
from llamarl.evaluation.gold import Judged, make_gold
from llamarl.evaluation.judges import find
from llamarl.evaluation.model import check_writable, find_against, read_words
from llamarl.evaluation.perplexity import Likelihood, make_perplexity
from llamarl.evaluation.report import judgement_lines, print_lines, score_lines, write
from llamarl.launch.checks import check_inputs
from llamarl.launch.inputs import JobInputs
from llamarl.observe.console import Progress
from llamarl.scoring.scorer import Item, Site, site_alone
from llamarl.tasks.parts import EvalSet
from llamarl.types import EvalCompletion, Prompt


def complete_prompts(
    device: torch.device, inputs: JobInputs, prompts: Mapping[int, Prompt], num_samples: int
) -> list[EvalCompletion]:
    """Return the completions of these prompts by the inputs' model, which is loaded for them
    alone.
    """
    engine = answering_engine(inputs, device)
    generator = inputs.config.generator
    total = len(prompts) * (1 + num_samples)
    slots = generator.max_slots
    with Progress("answers", total, unit="completions", at_once=slots) as progress:
        return complete(
            engine,
            prompts,
            sampling_of(inputs.config, inputs),
            num_samples=num_samples,
            chunk_tokens=generator.chunk_tokens,
            advance=progress.advance,
        )


def judge(
    inputs: JobInputs, site: Site, answers: Answers, against: Callable[[], list[Item]] | None
) -> tuple[Mapping[EvalSet, Judged], Mapping[EvalSet, Likelihood]]:
    """Return the findings of gold and base, as far as the config has these, by set."""
    judged: Mapping[EvalSet, Judged] = {}
    likelihoods: Mapping[EvalSet, Likelihood] = {}
    if inputs.config.gold is not None:
        references = None if against is None else against()
        judged = find(make_gold(inputs, references)(site), answers)
    if inputs.config.eval.base is not None:
        likelihoods = find(make_perplexity(inputs.config)(site), answers)
    return judged, likelihoods


def run(config: EvaluationConfig) -> None:
    """ValueError or OSError for what cannot be used."""
    device = this_device(config.device)
    threads = threads_per_rank(config.threads, synchronous=config.synchronous, device=device)
    world = init_world(
        threads=threads, timeout_s=config.timeout_s, reproducible=True, device=device
    )
    inputs = JobInputs(config, is_told=world.rank == 0)
    check_inputs(inputs)
    # eval.num_prompts alone decides which prompts are held out, so that none that was trained on is
    # evaluated. num_prompts takes the first of them.
    most = config.num_prompts
    sets = inputs.held_out.sets if most is None else inputs.held_out.first(most)
    if not sets:
        raise ValueError("no held-out prompts: set eval.num_prompts, or task.eval_path=FILE")
    prompts = inputs.held_out.asked(sets)
    out = Path(config.out)
    check_writable(out)
    complete_alone = partial(complete_prompts, world.device)
    against = find_against(config.against, inputs, sets, prompts, complete_alone)
    num_samples = config.eval.num_samples if config.samples is None else config.samples
    with closing(build_scorer(inputs, world.device)) as scorer:
        scorer.start()  # what is wrong with it is told before any work
        completions = complete_alone(inputs, prompts, num_samples)
        answers = score(scorer, sets, prompts, completions, inputs.decode, inputs.decode_raw)
    adapter = config.trainer.lora.path
    beside = "" if adapter is None else f" with the adapters of {adapter}"
    print(f"model    {inputs.model_path}{beside}, {config.task.kind}")
    for one, own in answers.items():
        print_lines(one, sets, score_lines(own, config.temperature))
    judged, likelihoods = judge(inputs, site_alone(world.device), answers, against)
    if judged or likelihoods:
        for one in sets:
            lines = judgement_lines(config, judged.get(one), likelihoods.get(one), config.against)
            print_lines(one, sets, lines)
    write(out, answers, judged, likelihoods)
    print(f"written  {out}")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        run(read_words(words))
    except (ValueError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
