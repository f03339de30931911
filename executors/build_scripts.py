"""What recipes without executors take, from a config: an engine, a scorer, a maker of pairs. Each
runs in one process.
"""

from __future__ import annotations

import dataclasses

import torch

from executors.build import sampling_of
from executors.build_dialogues import dialogue_engine
from llamarl.inference import Engine
from llamarl.inference.protocol import GenerationEngine
from llamarl.launch.inputs import JobInputs
from llamarl.launch.preferences import PreferencesJob
from llamarl.launch.scorers import reward_parts
from llamarl.scoring.pairs import PairMaker, PairRule
from llamarl.scoring.scorer import Scorer, site_alone
from llamarl.scoring.weighted import Weighted


def build_scorer(inputs: JobInputs, device: torch.device) -> Scorer:
    """Build the scorer in this process alone, loaded and not started: for a script."""
    parts = reward_parts(inputs, None)
    scorer = Weighted(parts, site_alone(device), outcomes=inputs.config.reward.outcomes)
    scorer.load()
    return scorer


def answering_engine(inputs: JobInputs, device: torch.device) -> GenerationEngine:
    """Build what answers held-out prompts in a script that is no job: the native engine, or with an
    environment the engine of its dialogues.
    """
    engine = engine_alone(inputs, device)
    return dialogue_engine(engine, inputs) if inputs.config.environments else engine


def engine_alone(inputs: JobInputs, device: torch.device) -> Engine:
    """Build the native engine with the model as it was saved, for a script that is no job."""
    config = inputs.config
    g = config.generator
    assert g.kind == "native", "its recipes have no other engine"
    return Engine.from_hf(
        inputs.model_path,
        dtype=config.model.dtype,
        device=device,
        max_slots=g.max_slots,
        max_len=config.longest_asked,
        cache_tokens=g.cache_tokens,
        prefill_chunk=g.prefill_chunk,
        decode=inputs.decode,
        kept_tokens=config.kept_tokens,
        adapter=config.trainer.lora.path,
    )


def build_pair_maker(job: PreferencesJob, scorer: Scorer) -> PairMaker:
    """Build what makes the pairs of recipes/preferences.py. scorer: one that has been started."""
    config = job.config
    settings = job.inputs.config
    sampling = sampling_of(settings, job.inputs)
    rule = PairRule(
        pairing=config.pairing,
        compares=any(part.settings.compares for part in settings.reward_parts),
        label_noise=config.label_noise,
        margin_coef=config.margin_coef,
        seed=config.seed,
    )
    return PairMaker(
        engine=engine_alone(job.inputs, job.device) if config.samples else None,
        scorer=scorer,
        sampling=dataclasses.replace(sampling, n=max(1, config.samples)),
        chunk_tokens=config.generator.chunk_tokens,
        prompt_of=job.prompt,
        targets_of=job.references,
        tokenizer=job.inputs.tokenizer,
        prompts=job.prompt_maker,
        rule=rule,
        max_error_rate=config.reward.max_error_rate,
    )
