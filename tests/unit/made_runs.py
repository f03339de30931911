"""Directories of runs whose rows are written by hand."""

import json
from dataclasses import replace

from llamarl.config.command_line import compose_config
from llamarl.config.conversion import load_config, save_config

# 4 groups of 4 completions of 10 tokens behind prompts of 6: 184 packed tokens, in two microbatches
# of 1,000 that are filled to 9.2 %. The trainer is busy for 0.4 s, so 0.2 s each.
ROW = {
    "time/step_s": 0.8,
    "time/wait_for_data_s": 0.3,
    "weights/publish_stall_s": 0.1,
    "weights/bytes": 6534912.0,
    "tokens/trained": 160.0,
    "completion/length_mean": 10.0,
    "packing/unused_budget_fraction": 0.908,
    # Half a batch and 2 groups are 16 rows. 160 tokens in 0.3 s are 10 steps of 0.03 s.
    "generator/tokens_per_s": 200.0,
    "generator/idle_fraction": 0.625,
    "reward/idle_fraction": 0.9,
    "tickets/overcommit": 2.0,
}


def made_run(folder, rows, *words):
    """The directory of a run in one process that has these rows."""
    given = ["groups_per_step=4", "group_size=4", "max_new_tokens=40", "eval.every=0"]
    given += ["trainer.microbatch_tokens=1000", *words]
    folder.mkdir()
    save_config(compose_config(given), folder / "config.yaml")
    lines = [json.dumps(row | {"step": step}) + "\n" for step, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def traced(folder, busy, step_s):
    """Write the traces of two ranks: (rank, executor) -> seconds of each of the steps 2 and 3, of
    step_s each. The last ends at second 12.
    """
    for rank in (0, 1):
        events = []
        names = [name for host, name in busy if host == rank]
        for number, name in enumerate(names):
            about = {"ph": "M", "name": "thread_name", "pid": rank, "tid": number}
            events.append(about | {"args": {"name": name}})
            for begin_s in (12.0 - 2 * step_s, 12.0 - step_s):
                took = busy[rank, name] * 1e6
                span = {"ph": "X", "name": "step", "pid": rank, "tid": number}
                events.append(span | {"ts": begin_s * 1e6, "dur": took})
            if name == "trainer":  # the last checkpoint
                events.append(span | {"ts": 12.0 * 1e6, "dur": 5e6})
        trace = {"traceEvents": events, "otherData": {"dropped_spans": 0}}
        (folder / f"trace.rank{rank}.json").write_text(json.dumps(trace))
    return folder


def _let_both_train_and_generate(run):
    """Change a run's placement, which is not accepted in one process."""
    file = run / "config.yaml"
    config = load_config(file)
    both = replace(config.placement, trainer=[0, 1], generator=[0, 1], reward=[1])
    trainer = replace(config.trainer, replicate=2)
    save_config(replace(config, placement=both, trainer=trainer), file)


def two_ranks(
    folder,
    *words,
    groups,
    trainer_s,
    step_s,
    max_lag,
    generator_s=0.25,
    reward_s=0.125,
    trainers=1,
):
    """A run of these seconds, by default trainer | generator and reward. trainers: ranks that train
    on equal shares of a batch.
    """
    row = ROW | {
        "time/step_s": step_s,
        "time/wait_for_data_s": step_s - trainer_s,
        "weights/publish_stall_s": 0.0,
        "tokens/trained": groups * 40.0,
        "packing/unused_budget_fraction": 1 - groups / trainers * 0.046,
    }
    given = [f"groups_per_step={groups}", f"max_lag={max_lag}", *words]
    run = made_run(folder, [{}, {}, row, row], *given)
    if trainers > 1:
        _let_both_train_and_generate(run)
    busy = {(rank, "trainer"): trainer_s for rank in range(trainers)}
    busy |= {(1, "generator"): generator_s, (1, "reward"): reward_s}
    return traced(run, busy, step_s)
