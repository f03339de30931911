"""Directories of runs whose rows are written by hand."""

import json

from llamarl.config.command_line import compose_config
from llamarl.config.conversion import save_config

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


def made_run(folder, rows, *words, num_ranks=1):
    """The directory of a run of so many ranks that has these rows."""
    given = ["groups_per_step=4", "group_size=4", "max_new_tokens=40", "eval.every=0"]
    given += ["trainer.microbatch_tokens=1000", *words]
    if num_ranks > 1:  # composed in one process
        given += [f"ranks={num_ranks}", "dry_run=true"]
    folder.mkdir()
    save_config(compose_config(given), folder / "config.yaml")
    lines = [json.dumps(row | {"step": step}) + "\n" for step, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for rank in range(num_ranks):
        (folder / f"trace.rank{rank}.json").write_text("[]")
    return folder
