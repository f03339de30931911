"""The process in which vLLM runs for llamarl.inference.vllm_engine. Started by its path; the only
file that imports vllm.

    stdin    one JSON object a line       {"do": "step", "chunk": 8, "start": [...], "abort": [...]}
    stdout   one line in answer to each   {"samples": [["3", [504, 7042], [-0.27, -1.06], null]]}
                                          or {"error": "..."}

vLLM changes its whole process: the default process group, threads, functions of torch. So it runs
in one of its own, and its output goes to stderr. Weights are read from shared memory under their
Hugging Face names, adapters from a PEFT directory. The process ends when stdin is closed.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Sequence, Set
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.sampling_params import RequestOutputKind

EMBEDDING = "embed_tokens.weight"  # the end of its name
HEAD = "lm_head.weight"
ADAPTER = 1  # vLLM's number of every version's adapters


class Worker:
    """Samples between two commands; each answer holds what was sampled since the one before.

    memory, tensors: where the weights lie. Without them adapters come, beside weights that vLLM
    reads itself.
    """

    def __init__(
        self,
        engine: dict,
        memory: str | None = None,
        tensors: Sequence[tuple[str, str, list[int], int]] = (),
    ):
        self.weights = {} if memory is None else _map_weights(memory, tensors)
        self.lora: LoRARequest | None = None
        on_cpu = not torch.cuda.is_available()
        if memory is None:
            LRUCacheWorkerLoRAManager._manager_cls = SideBySide
            if on_cpu:
                UnquantizedLinearMethod.process_weights_after_loading = _leave_unpacked
        arguments = EngineArgs(
            **engine,
            skip_tokenizer_init=True,
            generation_config="vllm",
            distributed_executor_backend="uni",
            enable_prefix_caching=True,
            enforce_eager=on_cpu,
            max_logprobs=1,
            # Logprobs of what was sampled from; and one step at a time, or tokens would come a
            # version late.
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
            disable_log_stats=True,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        # By name: the name, new tokens, their logprobs, how it ended.
        self.samples: dict[str, list] = {}

    def load(self, abort: list[str], adapter: str | None = None) -> dict:
        """Take the weights that now lie in shared memory, or the adapters of a PEFT directory.
        Running samples keep their K/V.
        """
        self.engine.abort_request(abort)
        if adapter is None:
            weights = iter(self.weights.items())
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not torch.cuda.is_available():
                self.engine.collective_rpc(_repack)
        else:
            # Under one number, so that running samples go on with the new adapters.
            self.engine.add_lora(LoRARequest("policy", ADAPTER, adapter, load_inplace=True))
            self.lora = LoRARequest("policy", ADAPTER, adapter)
        if not self.engine.has_unfinished_requests():
            self.engine.reset_prefix_cache()
        return {}

    def step(self, chunk: int, start: list[dict], abort: list[str]) -> dict:
        """Start these samples and sample up to `chunk` tokens of each that runs."""
        self.engine.abort_request(abort)
        for new in start:
            sampling = new["sampling"] | {"logit_bias": _by_id(new["sampling"]["logit_bias"])}
            params = SamplingParams(
                **sampling, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
            )
            prompt = tokens_input(new["prompt_ids"], cache_salt=new["salt"])
            self.engine.add_request(new["name"], prompt, params, lora_request=self.lora)
        for _ in range(chunk):
            if not self.engine.has_unfinished_requests():
                break
            self._advance()
        samples = list(self.samples.values())
        self.samples = {}
        return {"samples": samples}

    def score(
        self,
        prompt_ids: list[int],
        token_ids: list[int],
        temperature: float,
        logit_bias: dict[str, float] | None,
        salt: str,
    ) -> dict:
        """Logprobs of given tokens; what runs goes on meanwhile."""
        ids, given = prompt_ids + token_ids, len(prompt_ids)
        plain = {
            "max_tokens": 1,
            "temperature": temperature,
            "logit_bias": _by_id(logit_bias),
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        if temperature == 1 and not logit_bias:  # vLLM's logprobs of a prompt know no others
            wanted = SamplingParams(**plain, prompt_logprobs=0)
            prompt = tokens_input(ids, cache_salt=salt)
            self.engine.add_request("score", prompt, wanted, lora_request=self.lora)
            found = self._until({"score"})["score"].prompt_logprobs[given:]
        else:
            names = [f"score {i}" for i in range(len(token_ids))]
            for i, name in enumerate(names):
                wanted = SamplingParams(**plain, logprobs=1, logprob_token_ids=[token_ids[i]])
                before = tokens_input(ids[: given + i], cache_salt=salt)
                self.engine.add_request(name, before, wanted, lora_request=self.lora)
            outputs = self._until(set(names))
            found = []
            for name in names:
                completion = outputs[name].outputs[0]
                found.append(completion.logprobs[0])
        return {"logprobs": _logprobs(token_ids, found)}

    def _until(self, names: set[str]) -> dict[str, RequestOutput]:
        """Step until these requests have ended."""
        outputs: dict[str, RequestOutput] = {}
        while names - outputs.keys():
            outputs |= {output.request_id: output for output in self._advance(names)}
        return outputs

    def _advance(self, others: Set[str] = frozenset()) -> list[RequestOutput]:
        """Make one step of vLLM; returns the outputs of `others`, which are no samples."""
        found = []
        for output in self.engine.step():
            name = output.request_id
            if name in others:
                if output.finished:
                    found.append(output)
                continue
            new = output.outputs[0]
            record = self.samples.setdefault(name, [name, [], [], None])
            record[1] += new.token_ids
            record[2] += _logprobs(new.token_ids, new.logprobs or [])
            if output.finished:
                record[3] = new.finish_reason
        return found


class SideBySide(LRUCacheLoRAModelManager):
    """Holds the adapters in the rows of the weights' own matrices:

        y = [W | s B] [x; A x]    W [O, I], B [O, R], A [R, I]; q, k, v have an A and R columns each

    One product sums both in float32 and rounds once. vLLM's own layers round W x to bfloat16 before
    they add s B A x, and a small one is swallowed. They also serve several adapters; here every
    request has the one in slot 0.
    """

    def _create_lora_modules(self) -> None:
        super()._create_lora_modules()
        for layer in self.modules.values():
            _lay_side_by_side(layer)


def _lay_side_by_side(layer: BaseLinearLayerWithLoRA) -> None:
    """Put the memory that vLLM copies a version's A and B into where one product reads it."""
    weight = layer.base_layer.weight
    outs, ins = weight.shape
    rank = layer.lora_b_stacked[0].shape[-1]
    low = weight.new_zeros(layer.n_slices * rank, ins)
    both = weight.new_zeros(outs, ins + layer.n_slices * rank)
    both[:, :ins] = weight
    weight.data = both[:, :ins]
    a_slots, b_slots = [], []
    row = 0
    for i, count in enumerate(layer.output_slices):
        first = i * rank
        a_slots.append(low[None, None, first : first + rank])
        columns = both[row : row + count, ins + first : ins + first + rank]
        b_slots.append(columns[None, None])
        row += count
    layer.lora_a_stacked, layer.lora_b_stacked = tuple(a_slots), tuple(b_slots)

    def apply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(torch.cat([x, F.linear(x, low)], -1), both, bias)

    layer.apply = apply


def _leave_unpacked(method: UnquantizedLinearMethod, layer: LinearBase) -> None:
    """Keep the weight, which vLLM would lay out for its own kernel on a CPU and drop."""
    layer.cpu_linear = F.linear


def _repack(worker: Any) -> None:
    """Lay experts and heads out for vLLM's kernels on a CPU, which vLLM does for its first weights
    alone, or, of a tied head, not for every family. Which kernels these are depends on the CPU.
    """
    for layer in worker.model_runner.get_model().modules():
        method: Any = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead) and not layer.weight.is_meta:
            method.process_weights_after_loading(layer)


def _by_id(biases: dict[str, float] | None) -> dict[int, float] | None:
    """Return biases by token id, which is a text in JSON."""
    return None if biases is None else {int(name): bias for name, bias in biases.items()}


def _logprobs(token_ids: list[int], found: list[dict]) -> list[float]:
    """Return the logprobs of the tokens, from what vLLM says at the place of each."""
    logprobs = []
    for token, entry in zip(token_ids, found, strict=True):
        logprobs.append(entry[token].logprob)
    return logprobs


def _map_weights(
    memory: str, tensors: Sequence[tuple[str, str, list[int], int]]
) -> dict[str, torch.Tensor]:
    """Return a view of the shared memory by name, for each (name, dtype, shape, first byte)."""
    size = os.path.getsize(memory)
    flat = torch.from_file(memory, shared=True, size=size, dtype=torch.uint8)
    weights = {}
    for name, dtype, shape, start in tensors:
        dtype = getattr(torch, dtype)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        part = flat[start : start + num_bytes]
        weights[name] = part.view(dtype).view(shape)
    # On a CPU vLLM packs a tied head by itself: without a weight of its own it would stay the one
    # of an older version.
    embedding = next((name for name in weights if name.endswith(EMBEDDING)), None)
    if embedding is not None:
        weights.setdefault(HEAD, weights[embedding])
    return weights


def _read(lines: queue.Queue) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # in the middle of a step too: nobody is left to hear of it


def main(answers: TextIO) -> None:
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        command = json.loads(lines.get())
        do = command.pop("do")
        try:
            if do == "begin":
                worker = Worker(**command)
                answer = {}
            else:
                answer = getattr(worker, do)(**command)
        except Exception as error:  # told on the other side, where it ends the run
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(own)
