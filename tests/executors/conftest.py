"""Executors that several files of this folder step alone."""

import pytest
import torch
from safetensors.torch import save_file

from executors.reward import Reward
from llamarl.executor import ExecutorGroup
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import named_parameters_hf
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.routing import InTurn
from llamarl.types import Group
from tests.evaluated import own_set
from tests.executors.fakes import FakeControl, FakeMetrics, FakeReceiver, FakeSender, FakeStream
from tests.executors.pooled import FN, USER_MODULE, WORDS, make_prompt, train_prompt
from tests.executors.references import CONFIG


@pytest.fixture
def build_reward(tmp_path, monkeypatch):
    """Builds rewards whose pool has one worker, in the folder of USER_MODULE."""
    (tmp_path / "scoring.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    built = []

    def build(**options):
        fn = options.pop("fn", FN)
        name = options.pop("output", "scored")
        settings = {"group_size": 2, "eval_sets": own_set(3)} | options
        executor = Reward(
            prompts=FakeStream(train_prompt),
            eval_prompts=lambda j: make_prompt(f"eval {j}"),
            decode=lambda ids: WORDS[ids[0]] if ids else "",
            make_scorer=lambda site: InTurn(RewardPool(fn, on_result=site.on_result)),
            **settings,
        )
        group = ExecutorGroup("reward", (0,), 0, torch.device("cpu"))
        inputs = [(record, FakeReceiver()) for record in executor.consumes]
        outputs = [(Group, FakeSender(name))]
        executor.attach(group, inputs, outputs, FakeControl(), FakeMetrics())
        built.append(executor)
        executor.setup()
        return executor

    yield build
    for executor in built:
        executor.teardown()


@pytest.fixture(scope="module")
def reference_model(tmp_path_factory):
    """A directory with a random model whose next-token distributions are far from uniform."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(CONFIG)
    decoder = build_decoder(read_config(path), device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.4 + (
            parameter.dim() == 1
        )
    save_file(
        {name: p.detach().contiguous() for name, p in named_parameters_hf(decoder)},
        path / "model.safetensors",
    )
    return path
