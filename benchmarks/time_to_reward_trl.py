"""The other side of benchmarks/time_to_reward.py: GRPOTrainer, run by an interpreter that has TRL.

Writes what a run of ours writes: RUN_DIR/metrics.jsonl, a row an evaluation with step,
eval/accuracy and time/evaluated_s. Seconds are counted once everything is imported, before the
model is loaded, as ours are. Ends at the target or after --steps.
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
parser.add_argument("--examples", type=Path, required=True, help="lists of [prompt, answer]")
parser.add_argument(
    "--settings", type=json.loads, required=True, help="those that both sides have, by name"
)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--target", type=float, required=True)
parser.add_argument("--eval-every", type=int, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--threads", type=int, required=True)
args = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Before torch: it says how torch's threads wait, here as on the other side.
import llamarl  # noqa: E402, F401

# isort: split
import accelerate  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402

from llamarl.machine.precision import use_float32_products  # noqa: E402

torch.set_num_threads(args.threads)
products = use_float32_products(reproducible=False)  # as the main job does where it is asynchronous
about = {
    "trl": trl.__version__,
    "transformers": transformers.__version__,
    "accelerate": accelerate.__version__,
}
print(json.dumps({**about, "torch": torch.__version__, "float32": str(products)}), flush=True)

examples = json.loads(args.examples.read_text())
settings = args.settings
tokenizer = transformers.AutoTokenizer.from_pretrained(
    args.model, padding_side="left", trust_remote_code=False
)
args.run_dir.mkdir(parents=True)


def right(completions: list[str], answers: list[str]) -> list[float]:
    return [float(text.strip() == answer) for text, answer in zip(completions, answers)]


def reward(completions, answer, **_):
    return right(completions, answer)


@torch.no_grad()
def accuracy(model) -> float:
    """The share of held-out prompts that are answered rightly, greedily, all in one batch."""
    prompts, answers = zip(*examples["held_out"])
    was_training = model.training
    model.eval()
    asked = tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False)
    made = model.generate(**asked, max_new_tokens=settings["max_new_tokens"], do_sample=False)
    model.train(was_training)
    texts = tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(right(texts, answers)) / len(prompts)


class Evaluate(transformers.TrainerCallback):
    """Every so many steps, and after the last: the held-out accuracy, into a row."""

    def __init__(self):
        self.started = time.perf_counter()
        self.evaluating_s = 0.0

    def evaluate(self, step: int, model) -> float:
        began = time.perf_counter()
        found = accuracy(model)
        now = time.perf_counter()
        self.evaluating_s += now - began
        row = {"step": step, "eval/accuracy": found, "time/evaluated_s": now - self.started}
        with (args.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**row, "time/evaluating_s": self.evaluating_s}) + "\n")
        return found

    def on_step_end(self, _, state, control, model=None, **kwargs):
        step = state.global_step
        if step % args.eval_every and step != args.steps:
            return
        if self.evaluate(step, model) >= args.target:
            control.should_training_stop = True


train_prompts, train_answers = zip(*examples["train"])
batch = settings["groups"] * settings["group_size"]
evaluation = Evaluate()
trainer = trl.GRPOTrainer(
    model=args.model,
    reward_funcs=reward,
    train_dataset=Dataset.from_dict({"prompt": train_prompts, "answer": train_answers}),
    processing_class=tokenizer,
    callbacks=[evaluation],
    args=trl.GRPOConfig(
        output_dir=str(args.run_dir),
        seed=args.seed,
        max_steps=args.steps,
        # The batch: generated, trained on in one piece, one update of it.
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=settings["group_size"],
        num_iterations=1,
        max_completion_length=settings["max_new_tokens"],
        temperature=settings["temperature"],
        # The loss.
        loss_type="dapo",  # a mean over the batch's tokens: ours with normalize=tokens
        epsilon=settings["clip"],
        epsilon_high=settings["clip"],
        beta=0.0,
        scale_rewards="group",
        # The optimizer.
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        adam_epsilon=settings["eps"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        # float32, on the CPU, without recomputing activations, which TRL does unless told not to.
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    ),
)
if evaluation.evaluate(0, trainer.model) < args.target:
    trainer.train()
