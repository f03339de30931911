"""What an update allocates, beside what a dry run predicts of it.

    python benchmarks/memory.py [--rss] [--json]

A random decoder, its optimizer, and what the case has besides (adapters, a critic, a reference)
make two updates of random groups in this process. PyTorch's profiler tells of each allocation and
release of a tensor, so that the peak is counted to the byte, whatever the machine does meanwhile.
It is of the second update: the first has no moments until its end. --rss: each case once more in a
process of its own, for its resident memory at the peak, which has what malloc keeps besides.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from random_weights import random_weights
from running import machine
from torch.profiler import ProfilerActivity, profile

from llamarl.learning.logprobs import _spare
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.optim import build_optimizer
from llamarl.learning.update import PolicyUpdate, UpdateSettings
from llamarl.learning.values import Critic, CriticSettings, OwnCritic, SharedCritic
from llamarl.memory import Training, longest_microbatch, update_bytes
from llamarl.models.build import Decoder, build_decoder
from llamarl.models.config import ModelConfig, as_scorer, read_config, tiny_directory
from llamarl.models.lora import reset_lora
from llamarl.models.masters import Masters
from llamarl.models.shape import Lora
from llamarl.models.sharding import num_parameters
from llamarl.types import Group

MIB = 1 << 20
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its training and the sequences of an update.

    shape: D, F, layers, H, J, K and V, as a decoder has them. fitted: looked at while the formula
    was written.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    checkpointing: bool = False
    prompt: int = 600
    completion: int = 100
    group: int = 2
    groups: int = 2
    budget: int = 800
    tied: bool = True
    lora: int = 0
    critic: str = "none"
    reference: str = "none"
    whole_groups: bool = False
    fitted: bool = False

    @property
    def config(self) -> ModelConfig:
        """The tiny model's with these shapes."""
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "head_dim", "vocab_size")
        fields = dict(zip(names, self.shape))
        fields |= {"max_position_embeddings": 1 << 16, "tie_word_embeddings": self.tied}
        return dataclasses.replace(read_config(tiny_directory()), **fields)


S = (128, 384, 6, 4, 2, 32, 4096)
WIDE = (256, 512, 3, 8, 8, 32, 1000)
TALL = (64, 192, 16, 4, 2, 16, 512)
WORDY = (96, 256, 3, 3, 1, 32, 24000)
OTHER = (192, 640, 5, 6, 3, 32, 6000)
DEEP = (80, 240, 24, 5, 1, 16, 900)
LARGE = (320, 900, 2, 5, 5, 64, 12000)


def cases() -> list[Case]:
    """The fitted ones first."""
    found = []
    for dtype in ("float32", "bfloat16"):
        for checkpointing in (False, True):
            common = {"dtype": dtype, "checkpointing": checkpointing}
            seen = common | {"fitted": True}
            found.append(Case(S, prompt=500, groups=1, budget=700, **seen))
            found.append(Case(S, prompt=500, groups=3, budget=700, **seen))
            found.append(Case(WIDE, tied=False, **seen))
            found.append(Case(WORDY, **seen))
            found.append(Case(OTHER, prompt=900, completion=40, groups=3, **common))
            found.append(Case(DEEP, prompt=300, completion=300, groups=1, budget=1000, **common))
            found.append(Case(LARGE, prompt=1500, completion=20, tied=False, **common))
            found.append(Case(LARGE, prompt=60, completion=50, group=4, groups=3, **common))
            found.append(Case(OTHER, lora=8, **common))
            found.append(Case(TALL, lora=4, reference="adapters_off", groups=1, **common))
            found.append(Case(OTHER, critic="own", **common))
            found.append(Case(OTHER, critic="own", groups=1, tied=False, **common))
            found.append(Case(TALL, critic="shared", **common))
            found.append(Case(OTHER, reference="sharded", **common))
            found.append(Case(DEEP, group=6, whole_groups=True, **common))
    return sorted(found, key=lambda case: not case.fitted)


# --- The prediction ---


def predicted(case: Case) -> int:
    """Bytes at the peak of the second update, by the shapes alone."""
    config = case.config
    itemsize = getattr(torch, case.dtype).itemsize
    size = longest_microbatch(
        prompt_tokens=case.prompt,
        completion_tokens=case.completion,
        group_size=case.group,
        budget_tokens=case.budget,
        whole_groups=case.whole_groups,
        num_groups=case.groups,
    )
    training = Training(
        itemsize=itemsize,
        checkpointing=case.checkpointing,
        several=case.groups * case.group > size.completions,
        lora_rank=case.lora,
        lora_targets=TARGETS,
    )
    policy = update_bytes(config, size, training)
    held = policy.held
    working = policy.working
    if case.critic == "own":
        of_critic = dataclasses.replace(training, lora_rank=0)
        critic = update_bytes(as_scorer(config), size, of_critic)
        held += critic.held
        before = critic.gradients + critic.copies if training.several else 0
        working = max(working + before, policy.gradients + policy.copies + critic.working)
    if case.reference == "sharded":
        held += num_parameters(config) * itemsize
    return held + working


# --- What is measured ---


class Counter:
    """Bytes of live tensors, of what is called under it: now and at the peak of the last call."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0

    def __call__(self, call: Callable[[], object]) -> object:
        """Call it, and count what it allocates and releases."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            found = call()
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        self.peak = self.live
        for event in events:
            self.live += event.nbytes()
            self.peak = max(self.peak, self.live)
        return found


def decoder_of(case: Case, config: ModelConfig, lora: Lora | None = None) -> Decoder:
    """As llamarl.models.loading makes one on a single rank, with random weights."""
    decoder = build_decoder(dataclasses.replace(config, lora=lora))
    decoder.activation_checkpointing = case.checkpointing
    if case.dtype != "float32":
        decoder.masters = Masters(decoder, decoder.layers, getattr(torch, case.dtype))
    random_weights(decoder, seed=0)
    if lora:
        reset_lora(decoder, lora.seed)
    return decoder.train()


def update_of(case: Case) -> PolicyUpdate:
    config = case.config
    lora = None
    if case.lora:
        lora = Lora(rank=case.lora, alpha=16.0, targets=TARGETS)
    decoder = decoder_of(case, config, lora)
    reference = None
    if case.reference == "adapters_off":
        reference = decoder
    elif case.reference == "sharded":
        held = build_decoder(config, dtype=getattr(torch, case.dtype))
        reference = random_weights(held, seed=0).eval().requires_grad_(False)
    settings = UpdateSettings(
        lr=1e-6,
        schedule="constant",
        warmup_steps=0,
        max_steps=10,
        microbatch_tokens=case.budget,
        max_grad_norm=1.0,
        temperature=1.0,
        advantages="group_mean" if case.critic == "none" else "gae",
        skip_zero_advantage=False,
        parity=None,
        whole_groups=case.whole_groups,
    )
    return PolicyUpdate(
        decoder,
        build_optimizer(decoder.parameters(), lr=1e-6, **ADAM),
        regularised(policy_gradient),
        settings,
        group=None,
        device=CPU,
        critic=critic_of(case),
        reference=reference,
    )


def critic_of(case: Case) -> Critic | None:
    """A head on the policy's trunk, or a model of its own."""
    settings = CriticSettings(lr=1e-6, coef=0.1, clip=0.2, gamma=1.0, gae_lambda=0.95)
    if case.critic == "shared":
        width = case.config.hidden_size
        betas, eps = ADAM["betas"], ADAM["eps"]
        return SharedCritic(width, settings, betas=betas, eps=eps, mesh=None, device=CPU)
    if case.critic == "own":
        trunk = decoder_of(case, as_scorer(case.config))
        return OwnCritic(trunk, settings, build_optimizer(trunk.parameters(), lr=1e-6, **ADAM))
    return None


def groups_of(case: Case) -> list[Group]:
    """Random tokens, as long as the case says."""
    vocabulary = case.config.vocab_size
    random = torch.Generator().manual_seed(0)
    tokens = case.completion * case.group
    found = []
    for ticket in range(case.groups):
        group = Group(
            ticket=ticket,
            prompt_ids=torch.randint(0, vocabulary, (case.prompt,), generator=random),
            lengths=torch.full((case.group,), case.completion),
            token_ids=torch.randint(0, vocabulary, (tokens,), generator=random),
            generator_logprobs=torch.full((tokens,), -3.0),
            policy_versions=torch.zeros(tokens, dtype=torch.int64),
            ref_logprobs=torch.empty(0),
            rewards=torch.arange(case.group).float(),
            finish_reasons=("stop",) * case.group,
            outcomes=("score",) * case.group,
        )
        found.append(group)
    return found


def counted(case: Case) -> tuple[int, int]:
    """Bytes at the peaks of the first update and of the second."""
    gc.collect()
    _spare.clear()  # room for logits that an earlier case left
    count = Counter()
    update = count(lambda: update_of(case))
    groups = groups_of(case)
    peaks = []
    for version in range(2):
        count(lambda: update.run(groups, version, lambda: False))
        peaks.append(count.peak)
    return peaks[0], peaks[1]


def resident(case: Case) -> int:
    """Bytes that the updates add to this process's resident memory at its peak. Of a process of its
    own, once.
    """
    small = Case((32, 64, 1, 2, 2, 16, 64), dtype=case.dtype, prompt=8, completion=4)
    _run(small)  # which loads and compiles whatever is used
    pages = Path("/proc/self/statm").read_text().split()[1]
    before = int(pages) * resource.getpagesize()
    _run(case)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def _run(case: Case) -> None:
    update = update_of(case)
    groups = groups_of(case)
    for version in range(2):
        update.run(groups, version, lambda: False)


def resident_alone(case: Case) -> int:
    """The same in a process that does nothing else."""
    given = json.dumps(dataclasses.asdict(case))
    command = [sys.executable, __file__, "--one", given]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rss", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        given = json.loads(args.one)
        print(resident(Case(**given | {"shape": tuple(given["shape"])})))
        return
    rows = []
    for case in cases():
        first, second = counted(case)
        row = dataclasses.asdict(case) | {"first": first, "second": second}
        row |= {"predicted": predicted(case), "ratio": predicted(case) / second}
        if args.rss:
            row["resident"] = resident_alone(case)
        rows.append(row)
        if not args.json:
            print(line_of(row), flush=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if args.json:
        found = {"benchmark": "memory", "rows": rows, "versions": versions, "machine": machine()}
        print(json.dumps(found))
        return
    print(f"machine {machine()}, {versions}")


def line_of(row: dict) -> str:
    """A case in words, its peaks in MiB and the ratio of what was predicted."""
    words = ["fitted  " if row["fitted"] else "held out", str(row["shape"]), row["dtype"]]
    if row["checkpointing"]:
        words.append("checkpointing")
    words.append(f"{row['groups']} x ({row['prompt']} + {row['group']} x {row['completion']})")
    for name in ("critic", "reference"):
        if row[name] != "none":
            words.append(f"{name}={row[name]}")
    if row["lora"]:
        words.append(f"lora={row['lora']}")
    if row["whole_groups"]:
        words.append("whole groups")
    figures = f"first {row['first'] / MIB:.1f}, then {row['second'] / MIB:.1f}"
    figures += f", predicted {row['predicted'] / MIB:.1f}, ratio {row['ratio']:.3f}"
    if "resident" in row:
        figures += f", resident {row['resident'] / MIB:.1f}"
    return f"{' '.join(words)}: {figures}"


if __name__ == "__main__":
    main()
