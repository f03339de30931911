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
change what they name. What is asked besides says conf/evaluate.yaml. Each completion becomes a line
of `out`. The weights are taken as they were saved: not quantised, not split. Gold judges greedy
answers (docs/rewards.md). Exit status: 0, or 2 for a directory, a key, data or an `out` that cannot
be used.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch.distributed as dist

from executors.build import answering_engine, build_scorer
from executors.build_evaluation import answer, find_against, judge, score_by_set
from llamarl.comm.groups import init_world, threads_per_rank
from llamarl.config.evaluation import EvaluationConfig
from llamarl.evaluation.judges import Evaluated
from llamarl.evaluation.model import asked_of, check_writable, read_words
from llamarl.evaluation.report import (
    judged_columns,
    judgement_lines,
    print_lines,
    report,
    write,
)
from llamarl.launch.checks import check_inputs
from llamarl.launch.inputs import Inputs
from llamarl.scoring.assembly import item_of


def run(config: EvaluationConfig) -> None:
    """ValueError or OSError for what cannot be used."""
    threads = threads_per_rank(config.threads, synchronous=config.synchronous)
    world = init_world(threads=threads, timeout_s=config.timeout_s, reproducible=True)
    inputs = Inputs(config, is_told=world.rank == 0)
    check_inputs(inputs)
    asked = asked_of(inputs, config.num_prompts)
    if not asked.sets:
        raise ValueError("no held-out prompts: set eval.num_prompts, or task.eval_path=FILE")
    out = Path(config.out)
    check_writable(out)
    against = find_against(config.against, inputs, world.device, asked)
    k = config.eval.num_samples if config.samples is None else config.samples
    engine = answering_engine(inputs, world.device)
    with closing(build_scorer(inputs, world.device)) as scorer:
        scorer.start()  # what is wrong with it is told before any work
        completions = answer(engine, inputs, asked.prompts, k)
        items = [
            item_of(c, asked.prompts[c.prompt_index], inputs.decode, inputs.decode_raw)
            for c in completions
        ]
        outcomes = score_by_set(scorer, asked.sets, completions, items)
    adapter = config.trainer.lora.path
    beside = "" if adapter is None else f" with the adapters of {adapter}"
    print(f"model    {inputs.model_path}{beside}, {config.task.kind}")
    for one in asked.sets:
        print_lines(one, asked.sets, report(config, completions, outcomes, one, k))
    judged: dict[int, dict[str, object]] = {}
    if config.gold is not None or config.eval.base is not None:
        del engine  # the scorers' memory
        answers = [Evaluated(*answer) for answer in zip(completions, items, outcomes)]
        judgements = judge(inputs, world.device, asked.sets, answers, against)
        for one, judgement in zip(asked.sets, judgements):
            print_lines(one, asked.sets, judgement_lines(config, judgement, config.against))
            judged |= judged_columns(one, judgement)
    scored = list(zip([item.text for item in items], outcomes))
    write(out, asked.sets, asked.prompts, completions, scored, judged)
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
