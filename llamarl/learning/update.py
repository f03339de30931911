"""One optimizer step on taken groups: pack, forward and backward over microbatches, check, step.

Nothing changes before the check: a step that is aborted (a stop request) or not finite leaves weights and optimizer as they were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.advantages import ADVANTAGES
from llamarl.learning.logprobs import make_head
from llamarl.learning.losses.common import Completions, needs_entropy_gradient, needs_whole_groups, takes
from llamarl.learning.optim import clip_grad_norm, lr_at, set_lr, share_gradients
from llamarl.learning.packing import filler, pack, to_device
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.models.fsdp import is_split
from llamarl.models.hf import named_parameters_hf
from llamarl.parity import Canary, ParityError, Sequence
from llamarl.types import Group, PackedBatch


class StepAborted(Exception):
    """A stop request ended the step before it changed anything."""


class NotFinite(RuntimeError):
    """The loss or the gradient is NaN or infinite; the weights were not touched."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Plain values of an optimizer step. lr per step, tokens per microbatch."""

    lr: float
    schedule: str
    warmup_steps: int
    max_steps: int
    microbatch_tokens: int
    max_grad_norm: float
    temperature: float
    advantages: str
    skip_zero_advantage: bool
    parity_tolerance: float | None  # None: do not compare (the generator truncates its distribution)


class PolicyUpdate:
    """Runs optimizer steps. Collective over `group` (the trainer's ranks), None for a single rank.

    Ranks that share a tensor-parallel decoder are given the same groups; in sums over ranks they count once.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable,
        settings: UpdateSettings,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self.decoder, self.optimizer, self.loss_fn, self.settings = decoder, optimizer, loss_fn, settings
        self._group, self._device = group, device
        self._num_ranks = group.size() if group is not None else 1
        tp = decoder.tensor_parallel
        self._num_data_ranks = self._num_ranks // (tp.size if tp else 1)
        self._is_counted = tp is None or tp.rank == 0
        split = [tp is not None and is_split(decoder, name) for name, _ in named_parameters_hf(decoder)]
        self._tensor_groups = [tp.group if s else None for s in split]
        self._copied = [p for p, s in zip(decoder.parameters(), split, strict=True) if tp and not s]
        self._advantages = ADVANTAGES[settings.advantages]

    def run(self, groups: list[Group], version: int, stop: Callable[[], bool]) -> dict[str, float | None]:
        """Step `version` -> version + 1 on this rank's groups. Returns the step's metrics, the same on every rank.

        StepAborted if any rank's stop() is true at a microbatch boundary; NotFinite; ParityError.
        """
        s = self.settings
        packing = pack(
            groups,
            [self._advantages(g.rewards) for g in groups],
            budget_tokens=s.microbatch_tokens,
            drop_zero_advantage=s.skip_zero_advantage,
        )
        sums = {**_batch_sums(groups, version), "tokens/trained": float(packing.num_loss_tokens)}
        sums["_trained"] = float(packing.num_completions)
        budget = len(packing.microbatches) * s.microbatch_tokens
        sums |= {"_budget": float(budget), "_unused": packing.padding_fraction * budget}
        maxima = {"lag/max": float(max((version - g.oldest_version for g in groups if g.token_ids.numel()), default=0))}
        maxima |= {"_microbatches": float(len(packing.microbatches)), "_reference": float(packing.has_reference)}
        totals, maxima = self._reduce(sums, maxima)
        num_loss_tokens, has_reference = totals["tokens/trained"], maxima.pop("_reference") > 0

        self.optimizer.zero_grad(set_to_none=True)
        step_sums: dict[str, Tensor] = {}
        step_maxima: dict[str, Tensor] = {}
        for i in range(int(maxima.pop("_microbatches"))):
            self._agree_to_go_on(stop)
            # A rank with fewer microbatches than its peers takes part in their collectives with an empty one.
            batch = packing.microbatches[i] if i < len(packing.microbatches) else None
            completions = completions_of(
                groups, packing.completions[i] if batch else [], num_completions=totals["_trained"], num_groups=totals["_groups"]
            )
            if needs_whole_groups(self.loss_fn):
                _check_whole(groups, packing.completions[i] if batch else [])
            self._forward_backward(batch, completions, version, num_loss_tokens, has_reference, step_sums, step_maxima)
        self._agree_to_go_on(stop)
        norm = self._checked_norm(step_sums, version, groups)
        local_sums = {name: float(v) for name, v in step_sums.items()}
        step_totals, step_max = self._reduce(local_sums, {name: float(v) for name, v in step_maxima.items()})
        self._check_parity(step_max, version)
        set_lr(self.optimizer, lr_at(version, lr=s.lr, schedule=s.schedule, warmup_steps=s.warmup_steps, max_steps=s.max_steps))
        self.optimizer.step()
        return _metrics({**totals, **step_totals}, {**maxima, **step_max}, norm)

    @torch.no_grad()
    def canary(self, sequences: list[Sequence], *, top: int = 0) -> Canary:
        """Collective: what the weights, as they are, say of these sequences. top: likeliest tokens to keep at each place."""
        sizes = torch.tensor([len(s.token_ids) - 1 for s in sequences])
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        positions = torch.cat([torch.arange(int(n)) for n in sizes]).to(self._device)
        ids = torch.cat([torch.tensor(s.token_ids[:-1]) for s in sequences]).to(self._device)
        labels = torch.cat([torch.tensor(s.token_ids[s.given :]) for s in sequences]).to(self._device)
        places = torch.cat(
            [positions.new_tensor(range(s.given - 1, len(s.token_ids) - 1)) + int(a) for s, a in zip(sequences, cu_seqlens)]
        )
        logits_SV = self.decoder(
            ids, positions, PackedAttention(cu_seqlens.to(self._device)), lambda h_TD, w_VD: F.linear(h_TD[places], w_VD)
        )
        logprobs_SV = (logits_SV.float() / (self.settings.temperature or 1.0)).log_softmax(1)
        likeliest = logprobs_SV.topk(min(top, logprobs_SV.shape[1]), dim=1)
        scored = logprobs_SV.gather(1, labels[:, None]).squeeze(1)
        top_ids, top_logprobs = (x.tolist() if top else [] for x in (likeliest.indices, likeliest.values))
        return Canary(sequences, scored.tolist(), top_ids, top_logprobs)

    def _forward_backward(
        self, batch: PackedBatch | None, completions: Completions, version: int, num_loss_tokens: float, has_reference: bool,
        sums: dict, maxima: dict,
    ) -> None:  # fmt: skip
        batch, fn = to_device(batch or filler(), self._device), self.loss_fn
        head = make_head(batch.labels, batch.rows, temperature=self.settings.temperature, entropy_grad=needs_entropy_gradient(fn))
        attention = PackedAttention(batch.cu_seqlens, batch.parents)
        logprobs, entropy = self.decoder(batch.input_ids, batch.positions, attention, head)
        given = {"completions": completions.to(self._device), "entropy": entropy}
        loss, stats = fn(
            logprobs,
            batch.generator_logprobs,
            batch.ref_logprobs if has_reference else None,
            batch.advantages,
            torch.ones_like(batch.labels, dtype=torch.bool),
            num_loss_tokens=num_loss_tokens,
            **{name: value for name, value in given.items() if takes(fn, name)},
        )
        # FSDP averages gradients over data-parallel ranks; the denominator is global already.
        (loss * self._num_data_ranks).backward()
        stats = {
            **stats,
            "loss/value": loss.detach(),
            "entropy": entropy.detach().sum(),
            "_rows": torch.tensor(float(logprobs.numel())),
        }
        fresh = batch.policy_versions == version
        difference = (logprobs.detach() - batch.generator_logprobs).abs().masked_fill(~fresh, -1.0)
        stats["parity/max"] = difference.max() if logprobs.numel() else torch.tensor(-1.0)
        for name, value in stats.items():
            if name.endswith("/max"):
                maxima[name] = torch.maximum(maxima.get(name, value), value)
            else:
                sums[name] = sums.get(name, 0) + value

    def _agree_to_go_on(self, stop: Callable[[], bool]) -> None:
        """Collective. StepAborted on all ranks if one wants to stop."""
        wanted = stop()
        if self._num_ranks > 1:
            flag = torch.tensor([float(wanted)], device=self._device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
            wanted = bool(flag)
        if wanted:
            self.optimizer.zero_grad(set_to_none=True)
            raise StepAborted

    def _checked_norm(self, sums: dict[str, Tensor], version: int, groups: list[Group]) -> float:
        if self._copied:
            share_gradients(self._copied, self.decoder.tensor_parallel.group)
        norm = float(clip_grad_norm(self.decoder.parameters(), self.settings.max_grad_norm, tensor_groups=self._tensor_groups))
        loss, _ = self._reduce({"loss": float(sums.get("loss/value", 0.0))}, {})
        if not (math.isfinite(norm) and math.isfinite(loss["loss"])):
            self.optimizer.zero_grad(set_to_none=True)
            tickets = [g.ticket for g in groups]
            raise NotFinite(
                f"trainer, step {version}: loss {loss['loss']}, gradient norm {norm}; the weights are those of version {version}. "
                f"Tickets on this rank: {tickets[:8]}. Lower lr, or loss.ratio_cap, or look at these groups' logprobs"
            )
        return norm

    def _check_parity(self, maxima: dict[str, float], version: int) -> None:
        worst, allowed = maxima.get("parity/max", -1.0), self.settings.parity_tolerance
        if allowed is not None and not worst <= allowed:  # NaN too
            raise ParityError(
                f"trainer, step {version}: on tokens sampled from version {version} itself, trainer and generator logprobs differ by "
                f"{worst:.4g}, more than {allowed:g}. The generator's weights or its sampling (temperature, top-k, top-p) are not the "
                "trainer's; raise trainer.parity_tolerance only if the dtype explains it"
            )

    def _reduce(self, sums: dict[str, float], maxima: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Collective over the trainer's ranks, which may know different keys when a rank had no microbatch."""
        if self._num_ranks == 1:
            return dict(sums), dict(maxima)
        out = []
        for values, op, neutral in ((sums, dist.ReduceOp.SUM, 0.0), (maxima, dist.ReduceOp.MAX, -math.inf)):
            names = self._all_names(sorted(values))
            values = values if self._is_counted or op == dist.ReduceOp.MAX else {}
            packed = torch.tensor([values.get(n, neutral) for n in names], dtype=torch.float64, device=self._device)
            if names:
                dist.all_reduce(packed, op, group=self._group)
            out.append(dict(zip(names, packed.tolist())))
        return out[0], out[1]

    def _all_names(self, names: list[str]) -> list[str]:
        """Collective: the union of every rank's metric names."""
        text = ",".join(names).encode()
        longest = torch.tensor([len(text)], device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        mine = torch.zeros(int(longest), dtype=torch.uint8, device=self._device)
        if text:
            mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        dist.all_gather(parts, mine, group=self._group)
        joined = [bytes(p.tolist()).rstrip(b"\0").decode() for p in parts]
        return sorted({n for part in joined for n in part.split(",") if n})


def is_trained(group: Group) -> Tensor:
    """[G] bool: completions that are trained on: with tokens and a reward, and not aborted."""
    whole = torch.tensor([reason != "aborted" for reason in group.finish_reasons], dtype=torch.bool)
    return whole & ~group.rewards.isnan() & (group.lengths > 0)


def completions_of(groups: list[Group], numbers: list[int], *, num_completions: float, num_groups: float) -> Completions:
    """Of a microbatch that holds these completions (numbered over all groups, in the order of their labels)."""
    sizes = torch.tensor([g.lengths.numel() for g in groups], dtype=torch.int64)
    group_of = torch.arange(len(groups)).repeat_interleave(sizes)
    chosen, none = torch.tensor(numbers, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    lengths = torch.cat([none, *(g.lengths for g in groups)])[chosen]
    return Completions(
        index=torch.arange(chosen.numel()).repeat_interleave(lengths),
        groups=group_of[chosen].unique(return_inverse=True)[1],
        rewards=torch.cat([torch.zeros(0), *(g.rewards for g in groups)])[chosen],
        num_completions=num_completions,
        num_groups=num_groups,
    )


def _check_whole(groups: list[Group], numbers: list[int]) -> None:
    """ValueError if a group is in this microbatch and in another one."""
    sizes = torch.tensor([g.lengths.numel() for g in groups], dtype=torch.int64)
    trained = torch.cat([is_trained(g) for g in groups]) if groups else torch.zeros(0, dtype=torch.bool)
    group_of = torch.arange(len(groups)).repeat_interleave(sizes)
    here = group_of[torch.tensor(numbers, dtype=torch.int64)].unique()
    if int((trained & torch.isin(group_of, here)).sum()) != len(numbers):
        raise ValueError("the loss couples a group's completions, and a group does not fit: raise trainer.microbatch_tokens")


def _batch_sums(groups: list[Group], version: int) -> dict[str, float]:
    """Sums over this rank's groups, from which the batch's means are made."""
    rewards = torch.cat([g.rewards for g in groups]) if groups else torch.empty(0)
    lengths = torch.cat([g.lengths for g in groups]).double() if groups else torch.empty(0)
    outcomes = [o for g in groups for o in g.outcomes]
    reasons = [r for g in groups for r in g.finish_reasons]
    valid = rewards[~rewards.isnan()].double()
    aborted = [n for g in groups for n, r in zip(g.lengths.tolist(), g.finish_reasons) if r == "aborted"]
    oldest = [v for g in groups for v in _oldest_per_completion(g)]
    return {
        "_completions": float(len(outcomes)),
        "_valid": float(valid.numel()),
        "_reward": float(valid.sum()),
        "_reward_squared": float(valid.square().sum()),
        "_errors": float(outcomes.count("error")),
        "_truncated": float(reasons.count("length")),
        "_aborted": float(len(aborted)),
        "_aborted_tokens": float(sum(aborted)),
        "_length": float(lengths.sum()),
        "_begun": float(len(oldest)),
        "_groups": float(sum(int(is_trained(g).sum()) >= 2 for g in groups)),
        "_lag": float(sum(version - v for v in oldest)),
    }


def _oldest_per_completion(group: Group) -> list[int]:
    """Of each completion that has tokens. Versions never fall within one, so its first token is its oldest."""
    starts = group.lengths.cumsum(0) - group.lengths
    return group.policy_versions[starts[group.lengths > 0]].tolist()


def _metrics(totals: dict[str, float], maxima: dict[str, float], norm: float) -> dict[str, float | None]:
    """The row's names from sums and maxima over all ranks."""
    n, valid, rows = totals["_completions"], max(1.0, totals["_valid"]), max(1.0, totals.get("_rows", 0.0))
    mean = totals["_reward"] / valid
    fresh = maxima.get("parity/max", -1.0)
    out = {
        "loss/value": totals.get("loss/value", 0.0),
        "grad_norm": norm,
        "reward/mean": mean,
        "reward/std": math.sqrt(max(0.0, totals["_reward_squared"] / valid - mean * mean)),
        "reward/error_rate": totals["_errors"] / n,
        "entropy": totals.get("entropy", 0.0) / rows,
        "kl/ref": totals.get("kl/ref", 0.0) / rows,
        "ratio/mean": totals.get("ratio/sum", rows) / rows,
        "ratio/max": maxima.get("ratio/max", 1.0),
        "ratio/capped_fraction": totals.get("ratio/capped", 0.0) / rows,
        "lag/mean": totals["_lag"] / max(1.0, totals["_begun"]),
        "lag/max": maxima["lag/max"],
        "tokens/trained": totals["tokens/trained"],
        "tokens/generated": totals["_length"],
        "tokens/deadline_truncated": totals["_aborted_tokens"],
        "completion/length_mean": totals["_length"] / n,
        "completion/truncated_fraction": totals["_truncated"] / n,
        "completion/deadline_truncated_fraction": totals["_aborted"] / n,
        "packing/padding_fraction": totals["_unused"] / max(1.0, totals["_budget"]),
        "parity/logprob_diff_max": fresh if fresh >= 0 else None,  # no fresh token in the batch
    }
    known = {"loss/value", "entropy", "kl/ref", "ratio/sum", "ratio/capped", "tokens/trained", "tokens"}
    extra = {k: v / rows for k, v in totals.items() if k not in known and not k.startswith("_")}
    ending, trained = "/completions", max(1.0, totals.get("_trained", 0.0))
    extra = {k.removesuffix(ending): totals[k] / trained if k.endswith(ending) else v for k, v in extra.items()}
    extra |= {k: v for k, v in maxima.items() if k not in {"parity/max", "ratio/max", "lag/max"}}
    return {**extra, **out}
