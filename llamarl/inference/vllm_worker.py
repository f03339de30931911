"""The process in which vLLM runs for llamarl.inference.vllm_engine. Started by its path; the only
file that imports vllm.

    stdin    one JSON object a line       {"do": "step", "chunk": 8, "start": [...], "abort": [...]}
    stdout   one line in answer to each   {"samples": [["3", [504, 7042], [-0.27, -1.06], null]]}
                                          or {"error": "..."}

vLLM takes a process over: the default process group, the threads, functions of torch. So it has one
of its own, and what it prints goes to stderr. Weights lie in shared memory under their Hugging Face
names. The end of stdin ends it, at any time.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Set
from typing import TextIO

import torch
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Worker:
    """Samples between two commands; each answer holds what was sampled since the one before."""

    def __init__(self, engine: dict, memory: str, tensors: list[tuple[str, str, list[int], int]]):
        self.weights = _map_weights(memory, tensors)
        on_cpu = not torch.cuda.is_available()
        arguments = EngineArgs(
            **engine,
            load_format="dummy",
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

    def load(self, abort: list[str]) -> dict:
        """Take the weights that now lie in shared memory. Running samples keep their K/V."""
        self.engine.abort_request(abort)
        weights = iter(self.weights.items())
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
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
            self.engine.add_request(new["name"], prompt, params)
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
            self.engine.add_request("score", tokens_input(ids, cache_salt=salt), wanted)
            found = self._until({"score"})["score"].prompt_logprobs[given:]
        else:
            names = [f"score {i}" for i in range(len(token_ids))]
            for i, name in enumerate(names):
                wanted = SamplingParams(**plain, logprobs=1, logprob_token_ids=[token_ids[i]])
                before = tokens_input(ids[: given + i], cache_salt=salt)
                self.engine.add_request(name, before, wanted)
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
    memory: str, tensors: list[tuple[str, str, list[int], int]]
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
    weights.setdefault(HEAD, weights[EMBEDDING])
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
