"""The other side of benchmarks/streaming.py: RLOOTrainer with a reward model, run by an interpreter
that has TRL.

Writes RUN_DIR/metrics.jsonl, a row a step with step, step_s, and what TRL it was. A step is what
ours is: all answers of a batch sampled, read by the scorer, and one update.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--run-dir", type=Path, required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--scorer", required=True)
parser.add_argument("--groups", type=int, required=True)
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--answer-tokens", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--dtype", required=True)
parser.add_argument("--threads", type=int, required=True)
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

from llamarl.machine.precision import use_float32_products  # noqa: E402

torch.set_num_threads(args.threads)
use_float32_products(reproducible=True)  # as the main job does where it is synchronous
args.run_dir.mkdir(parents=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(
    args.model, padding_side="left", trust_remote_code=False
)
scorer = transformers.AutoModelForSequenceClassification.from_pretrained(
    args.scorer, dtype=getattr(torch, args.dtype), trust_remote_code=False
)


class Steps(transformers.TrainerCallback):
    """A row a step."""

    def __init__(self):
        self.began = time.perf_counter()

    def on_step_end(self, _, state, control, **kwargs):
        now = time.perf_counter()
        row = {
            "step": state.global_step,
            "step_s": now - self.began,
            "trl": trl.__version__,
            "answer_tokens": args.answer_tokens,
        }
        with (args.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.began = now


prompts = [f"What is {i} + {i + 1}?" for i in range(args.groups * args.steps)]
batch = args.groups * args.group
trainer = trl.RLOOTrainer(
    model=args.model,
    reward_funcs=scorer,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=tokenizer,
    reward_processing_classes=tokenizer,
    callbacks=[Steps()],
    args=trl.RLOOConfig(
        output_dir=str(args.run_dir),
        max_steps=args.steps,
        # The batch: generated, trained on in one piece, one update of it.
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=args.group,
        num_iterations=1,
        max_completion_length=args.answer_tokens,
        generation_kwargs={"min_new_tokens": args.answer_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        # On the CPU, without recomputing activations, which TRL does unless told not to.
        model_init_kwargs={"dtype": args.dtype},
        use_cpu=True,
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=False,
        logging_strategy="no",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    ),
)
trainer.train()
