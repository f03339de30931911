"""The worker of benchmarks/train.py in TRL's interpreter: GRPOTrainer's step on given tokens.

It reads a word a line and answers with a JSON object:

step       one optimizer step, padded as TRL pads a generation batch    -> {"s": seconds}
trimmed    the same, each microbatch cut to its longest                 -> {"s": seconds}
peak       the largest resident set so far                              -> {"mib": size}
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--rows", required=True)
parser.add_argument("--dtype", required=True, choices=["float32", "bfloat16"])
parser.add_argument("--micro", type=int, required=True)
parser.add_argument("--threads", type=int, required=True)
parser.add_argument("--cpu-time", action="store_true")
args = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Before torch: it says how torch's threads wait, here as on the other side.
import llamarl  # noqa: E402, F401

# isort: split
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from llamarl.machine.precision import use_float32_products  # noqa: E402

torch.set_num_threads(args.threads)
products = use_float32_products(reproducible=True)  # as benchmarks/train.py multiplies
clock = time.process_time if args.cpu_time else time.perf_counter
rows = json.load(open(args.rows))
tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
out = tempfile.TemporaryDirectory()
count = len(rows)
config = trl.GRPOConfig(
    output_dir=out.name,
    use_cpu=True,
    bf16=args.dtype == "bfloat16",
    gradient_checkpointing=False,
    learning_rate=1e-6,
    beta=0.0,
    per_device_train_batch_size=args.micro,
    gradient_accumulation_steps=count // args.micro,
    num_generations=args.micro,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    loss_type="dapo",
    model_init_kwargs={"dtype": "float32"},
)
trainer = trl.GRPOTrainer(
    model=args.model,
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
    args=config,
    train_dataset=Dataset.from_dict({"prompt": ["x"]}),
    processing_class=tokenizer,
)
model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
trainer.optimizer, trainer.model_wrapped = optimizer, model
trainer.current_gradient_accumulation_steps = count // args.micro
model.train()


def padded(lists, left):
    longest = max(map(len, lists))
    ids = torch.full((len(lists), longest), tokenizer.pad_token_id)
    mask = torch.zeros(len(lists), longest, dtype=torch.long)
    for i, values in enumerate(lists):
        place = slice(longest - len(values), None) if left else slice(0, len(values))
        ids[i, place], mask[i, place] = torch.tensor(values), 1
    return ids, mask


prompt_ids, prompt_mask = padded([r["prompt"] for r in rows], left=True)
completion_ids, completion_mask = padded([r["completion"] for r in rows], left=False)
advantages = torch.tensor([r["advantage"] for r in rows])
order = torch.randperm(
    count, generator=torch.Generator().manual_seed(0)
)  # TRL shuffles a generation batch
microbatches = [
    {
        "prompt_ids": prompt_ids[part],
        "prompt_mask": prompt_mask[part],
        "completion_ids": completion_ids[part],
        "completion_mask": completion_mask[part],
        "advantages": advantages[part],
        "num_items_in_batch": completion_mask.sum(),
    }
    for part in order.split(args.micro)
]


def trimmed(batch):
    longest = int(batch["completion_mask"].sum(1).max())
    return {**batch, **{k: batch[k][:, :longest] for k in ("completion_ids", "completion_mask")}}


def step(batches):
    began = clock()
    for batch in batches:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, batch)
        trainer.accelerator.backward(loss)
    trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    return clock() - began


versions = {
    "trl": trl.__version__,
    "transformers": transformers.__version__,
    "torch": torch.__version__,
}
print(json.dumps({**versions, "float32": str(products)}), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "peak":
        answer = {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    else:
        answer = {
            "s": step(
                microbatches if word == "step" else [trimmed(batch) for batch in microbatches]
            )
        }
    print(json.dumps(answer), flush=True)
