"""A worker in the place of llamarl/inference/vllm_worker.py that counts instead of sampling.

Token i of a sample is 10 + i with logprob -i. A prompt that begins with 9 yields nothing in its
first step, one that begins with 8 logprobs that are not finite. To score the prompt [1] ends it,
[2] has no answer and [3] fails. All that it is told is written to the file FAKE_LOG.
"""

import json
import os
import pathlib
import struct
import sys


def note(line):
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(line.strip() + "\n")


def adapters(directory):
    """The settings, and the tensors' dtypes and shapes, of a PEFT directory."""
    folder = pathlib.Path(directory)
    stored = (folder / "adapter_model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", stored[:8])
    tensors = json.loads(stored[8 : 8 + size])
    settings = json.loads((folder / "adapter_config.json").read_text())
    return {"adapter": settings, "mode": folder.stat().st_mode & 0o777, "tensors": tensors}


def sampled(name, state, chunk):
    """The next tokens of a sample, and how it ended."""
    new, count = state
    sampling = new["sampling"]
    end = min(count + chunk, sampling["max_tokens"])
    tokens, ended = [], None
    for token in range(10 + count, 10 + end):
        tokens.append(token)
        if token in sampling["stop_token_ids"]:
            ended = "stop"
            break
    state[1] = count + len(tokens)
    if ended is None and state[1] == sampling["max_tokens"]:
        ended = "length"
    logprobs = [float("nan") if new["prompt_ids"][0] == 8 else 10.0 - token for token in tokens]
    return [name, tokens, logprobs, ended]


def step(command, live, late):
    for new in command["start"]:
        live[new["name"]] = [new, 0]
        if new["prompt_ids"][0] == 9:
            late.add(new["name"])
    samples = []
    for name, state in list(live.items()):
        if name in late:
            late.discard(name)
            continue
        samples.append(sampled(name, state, command["chunk"]))
        if samples[-1][-1] is not None:
            del live[name]
    return {"samples": samples}


def score(command):
    prompt = command["prompt_ids"]
    if prompt == [1]:
        sys.exit(7)
    if prompt == [2]:
        return None
    if prompt == [3]:
        return {"error": "ValueError: no"}
    return {"logprobs": [-0.5] * len(command["token_ids"])}


def main():
    live = {}
    late = set()
    memory = None
    for line in sys.stdin:
        note(line)
        command = json.loads(line)
        answer = {}
        for name in command.get("abort", []):
            del live[name]
        if command["do"] == "begin":
            if "memory" in command:
                memory = open(command["memory"], "rb", buffering=0)
        elif "adapter" in command:
            note(json.dumps(adapters(command["adapter"])))
        elif command["do"] == "load":
            memory.seek(0)
            (first,) = struct.unpack("<f", memory.read(4))
            note(json.dumps({"loaded": first}))
        elif command["do"] == "score":
            answer = score(command)
        else:
            answer = step(command, live, late)
        if answer is not None:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
