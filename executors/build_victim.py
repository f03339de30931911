"""The victim of recipes/red_team.py from a config."""

from __future__ import annotations

import torch

from executors.victim import Victim
from llamarl.config.command_line import Config
from llamarl.config.sections.victim import placed_victim
from llamarl.inference import Engine, SamplingParams
from llamarl.launch.job import Job
from llamarl.tasks.special import stop_tokens


def build_victim(config: Config, job: Job) -> Victim:
    """Build the victim, which replies to the completions."""
    v = placed_victim(config.victim)
    path = job.inputs.victim_path
    assert path is not None, "a victim's config has the directory of its model"

    def build_engine(device: torch.device) -> Engine:
        return Engine.from_hf(
            path,
            device=device,
            dtype=v.dtype,
            max_slots=v.max_slots,
            max_len=v.longest,
            reproducible=config.reproducible,
        )

    sampling = SamplingParams(
        max_new_tokens=v.max_new_tokens,
        temperature=v.temperature,
        top_p=v.top_p,
        stop_token_ids=stop_tokens(path, job.inputs.victim_tokenizer, chat=v.chat),
        n=v.replies,
        seed=config.seed,
    )
    return Victim(
        build_engine=build_engine,
        decode=job.inputs.decode,
        read=job.inputs.victim_prompt_ids,
        sampling=sampling,
        max_prompt_tokens=v.max_prompt_tokens,
        chunk_tokens=v.chunk_tokens,
        group_size=config.group_size,
        num_eval_attacks=len(job.inputs.eval_prompts) * (1 + config.eval.num_samples),
        reproducible=config.reproducible,
    )
