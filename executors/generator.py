"""Generator: tickets in, completions out, new weights between decode chunks.

    loop step    consumes                 waits for                           unblocked by
    weights      the staged version       -                                   the trainer's publish
    tickets      grants                   room under max_lag and overcommit   the trainer's takes
    truncate     orders; the clock        -                                   -
    decode       one chunk of tokens      room in the completions channel     the reward

A version marked for evaluation is pinned: the held-out prompts run beside the tickets, and no newer
version is taken in until they are done. Those that come meanwhile overtake each other, so that no
other replica waits for this one.

A checkpoint holds the completions of groups that are not whole: on resume partial ones go on and
ended ones are sent again, if the ledger then counts their ticket as in work. Otherwise their ticket
starts again.

With tensor_parallel > 1 that many ranks share a copy of the model. The first of them does all of
this; the others do what it tells them, in its order, and send nothing (llamarl.comm.lockstep).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from llamarl.comm.lockstep import LAST, Lockstep
from llamarl.executor import POLL_S, Executor
from llamarl.inference import Engine, SamplingParams, evaluation
from llamarl.inference.partials import Sample, pack, unpack
from llamarl.inference.rows import Partial
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import named_parameters_hf
from llamarl.models.parity import Canary, check_canary, check_quantized
from llamarl.models.quantize import quantize_decoder
from llamarl.models.tp import TensorParallel
from llamarl.tickets.prompts import PromptStream
from llamarl.types import Completion, Prompt

TRAIN = 0  # stream of the engine; the others are evaluation's
END_S = 15.0  # a peer waits no longer for its leader's last command

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Begun:
    """A ticket in the engine."""

    since_s: float
    unfinished: int  # completions


class Generator(Executor):
    """One engine a replica. Sampling is a function of (seed, ticket, sample_index, position), not
    of the rank or the batch.

    prompts[ticket] is the ticket's prompt; eval_prompts the held-out ones, each answered greedily
    and eval_samples times by `sampling`. max_len, max_slots, cache_tokens, prefill_chunk: see
    Engine. chunk_tokens: tokens a row between two looks at weights, tickets and stop requests.
    parity_tolerance: nats that the canary of a version may differ from the trainer's; for a
    quantised generator max_quantization_kl bounds their mean KL instead. max_seconds: what has not
    ended so long after its ticket's start ends there, aborted, as at the ledger's order to
    truncate. None: no limit. reproducible: see Engine.
    """

    name = "generator"
    state_is_optional = True  # its tickets start again

    def __init__(
        self,
        *,
        model_path: str,
        model_dtype: str,
        prompts: PromptStream,
        eval_prompts: list[Prompt],
        sampling: SamplingParams,
        max_slots: int,
        max_len: int,
        chunk_tokens: int,
        in_flight_updates: bool,
        parity_tolerance: float,
        recompute_kv: bool = False,
        cache_tokens: int | None = None,
        prefill_chunk: int = 512,
        eval_samples: int = 0,
        tensor_parallel: int = 1,
        quantize: str = "none",
        quantize_exclude: tuple[str, ...] = (),
        max_quantization_kl: float = math.inf,
        max_seconds: float | None = None,
        reproducible: bool = True,
    ):
        self.model_path, self.model_dtype = model_path, model_dtype
        self.prompts, self.eval_prompts = prompts, eval_prompts
        self.sampling, self.eval_samples = sampling, eval_samples
        self.max_slots, self.max_len, self.chunk_tokens = max_slots, max_len, chunk_tokens
        self.cache_tokens, self.prefill_chunk, self.recompute_kv = (
            cache_tokens,
            prefill_chunk,
            recompute_kv,
        )
        self.in_flight_updates, self.parity_tolerance = in_flight_updates, parity_tolerance
        self.quantize, self.quantize_exclude, self.max_quantization_kl = (
            quantize,
            quantize_exclude,
            max_quantization_kl,
        )
        self.tensor_parallel, self.max_seconds = (
            tensor_parallel,
            math.inf if max_seconds is None else max_seconds,
        )
        self.reproducible = reproducible
        self.version = -1
        self._sampled = 0  # tokens
        self._torn = False
        self._commands = {"swap": self._swap, "skip": self._skip, "decode": self._decode}
        self._evaluating = 0  # completions of held-out prompts still to finish
        self._open: dict[
            int, list[Completion]
        ] = {}  # ticket -> those sent, while its group is not whole
        self._send_again: list[Completion] = []  # what a resumed run had sent
        self._begun: dict[int, _Begun] = {}

    def setup(self) -> None:
        dtype, g = getattr(torch, self.model_dtype), self.group
        self.replica = Lockstep(g, self.control)
        tp = (
            TensorParallel(g.tensor_index, g.tensor_parallel, g.tensor_group)
            if g.tensor_parallel > 1
            else None
        )
        decoder = build_decoder(read_config(self.model_path), dtype=dtype, tensor_parallel=tp)
        if self.quantize != "none":
            quantize_decoder(decoder, self.quantize, self.quantize_exclude)
        decoder = decoder.to_empty(device=g.device).eval().requires_grad_(False)
        self.weights = self.inputs["policy"]
        self.weights.bind(decoder.config, list(named_parameters_hf(decoder)))
        self.engine = Engine(
            decoder,
            max_slots=self.max_slots,
            max_len=self.max_len,
            cache_tokens=self.cache_tokens,
            prefill_chunk=self.prefill_chunk,
            device=self.group.device,
            reproducible=self.reproducible,
        )

    @property
    def finishes_on_stop(self) -> bool:
        """A follower takes part to the end in what the first rank of its replica has begun."""
        return self.follows

    @property
    def follows(self) -> bool:
        return self.group.tensor_index > 0

    def step(self) -> bool:
        return self._follow() if self.follows else self._lead()

    def _lead(self) -> bool:
        swapped = self._swap_weights()
        if self.version < 0 or not (
            self.outputs["completions"].has_room() and self.outputs["evaluations"].has_room()
        ):
            return swapped
        while self._send_again:
            self.outputs["completions"].put(self._send_again.pop())
        # Before the grants: an order comes after its ticket's grant, which is so taken by then.
        ended = self.tickets.to_truncate() + self._expired()
        tickets = self._choose_tickets()
        if not (tickets or self.engine.num_live or self.engine.num_waiting):
            return swapped
        sampled = self._together("decode", tickets=tickets, ended=ended, chunk=self.chunk_tokens)
        return swapped or sampled

    def _together(self, do: str, **what) -> bool:
        """Do it, with every rank of the replica. `sampled` shows a rank that has come apart from
        the others.
        """
        self.replica.tell(do, sampled=self._sampled, **what)
        return self._commands[do](**what)

    def _follow(self) -> bool:
        self.replica.report(self.weights)
        command = self.replica.next()
        if command is None:
            return False
        do, sampled = command.pop("do"), command.pop("sampled")
        if sampled != self._sampled:
            raise RuntimeError(
                f"generator ranks {self.replica.leader} and {self.group.rank} share a model but have sampled {sampled} and "
                f"{self._sampled} tokens: their logits were not the same; are their machines and libraries alike?"
            )
        self._torn = True  # until it is done: after a failure in it nothing can follow
        self._commands[do](**command)
        self._torn = False
        return True

    def waiting_for(self) -> str | None:
        if self.follows:
            return None  # its leader waits for what both need
        if self.version < 0:
            return "weights: the first version from the trainer"
        if not self.outputs["completions"].has_room():
            return "room: in channel completions, which the reward empties"
        if self.engine.num_live == 0:
            return f"tickets: the ledger grants none at version {self.version} until the trainer takes a batch"
        return None

    def _swap_weights(self) -> bool:
        if self._evaluating or (not self.in_flight_updates and self.engine.num_live):
            version = self.replica.skippable(self.weights)
            return version is not None and self._together("skip", version=version)
        version = self.replica.agreed(self.weights)
        return version is not None and self._together("swap", version=version)

    # -- what every rank of a replica does, when its leader does
    # -----------------------------------------------------------

    def _swap(self, version: int) -> bool:
        self.claim_device()
        began = time.monotonic()
        taken = self.weights.swap()
        assert not self.replica.peers or (taken and taken.version == version), (
            f"rank {self.group.rank} swaps {taken}, not {version}"
        )
        if taken is None:
            return False  # a newer version is just overtaking it
        self.version = taken.version
        self.engine.weights_changed(self.version, recompute_kv=self.recompute_kv)
        self._count("weights/swap_stall_s", time.monotonic() - began)
        if taken.canary:
            self._check_canary(Canary.from_json(taken.canary))
        if taken.evaluate:
            self._start_evaluation()
        return True

    def _skip(self, version: int) -> bool:
        self.weights.skip(version)
        return False

    def _decode(self, tickets: list[int], ended: list[int], chunk: int) -> bool:
        """Start tickets, end others where they are, and sample a chunk."""
        for ticket in tickets:
            self._begun[ticket] = _Begun(time.monotonic(), self.sampling.n)
            self.engine.submit(
                ticket, self.prompts[ticket].prompt_ids.tolist(), self.sampling, stream=TRAIN
            )
        self.claim_device()
        for ticket in ended:
            self.engine.abort(ticket, stream=TRAIN)
        sampled = self.engine.step(chunk)
        self._sampled += sampled
        self._count("generator/tokens", sampled)
        finished = self.engine.pop_finished()
        for stream, completion in finished:
            if stream == TRAIN:
                self._ended_one(completion.ticket)
            else:
                self._evaluating -= 1
            if self.follows:
                continue
            if stream == TRAIN:
                self._note_sent(completion)
                self.outputs["completions"].put(completion)
            else:
                self.outputs["evaluations"].put(evaluation.eval_completion(stream, completion))
        return sampled > 0 or bool(finished)

    def _ended_one(self, ticket: int) -> None:
        self._begun[ticket].unfinished -= 1
        if not self._begun[ticket].unfinished:
            del self._begun[ticket]

    def _expired(self) -> list[int]:
        """Tickets that have been at it for longer than max_seconds."""
        now = time.monotonic()
        return [
            ticket
            for ticket, begun in self._begun.items()
            if now - begun.since_s > self.max_seconds
        ]

    def _count(self, name: str, amount: float) -> None:
        """Once a replica."""
        if not self.follows:
            self.metrics.add(name, amount)

    def _check_canary(self, canary: Canary) -> None:
        """What was swapped in, against what the trainer says of it. ParityError."""
        where = {"version": self.version, "rank": self.group.rank}
        if self.quantize != "none":
            kl = check_quantized(
                canary,
                self._scored(self.engine.score_all, canary),
                **where,
                most=self.max_quantization_kl,
            )
            self.metrics.add_mean("weights/quantization_kl", kl)
            return
        worst = check_canary(
            canary,
            self._scored(self.engine.score, canary),
            **where,
            tolerance=self.parity_tolerance,
        )
        self.metrics.add_mean("parity/canary_diff_max", worst)

    def _scored(self, score: Callable[..., torch.Tensor], canary: Canary) -> torch.Tensor:
        """What one of the engine's ways to score says of all scored tokens, sequence after
        sequence, on the CPU.
        """
        temperature = self.sampling.temperature
        return torch.cat(
            [
                score(s.token_ids[: s.given], s.token_ids[s.given :], temperature)
                for s in canary.sequences
            ]
        ).cpu()

    def _start_evaluation(self) -> None:
        """Completions of this replica's share of the held-out prompts."""
        for j in range(self.group.data_index, len(self.eval_prompts), self.group.data_size):
            self._evaluating += evaluation.submit(
                self.engine, j, self.eval_prompts[j], self.sampling, self.eval_samples
            )

    # -- tickets
    # ------------------------------------------------------------------------------------------------------

    def _choose_tickets(self) -> list[int]:
        """What was granted; ask for as many groups as there is room for, one chunk ahead of need."""
        # In step with the trainer, evaluation runs alone: what is batched together must not depend
        # on timing.
        is_blocked = self.tickets.synchronous and self._evaluating > 0
        room = (self.engine.free_slots - self.engine.num_waiting) // self.sampling.n
        if room > 0 and not is_blocked:
            granted = self.tickets.ask(self.group.data_index, room, self.version)
        else:
            granted = self.tickets.granted()
        return [ticket.index for ticket in granted]

    # -- checkpoints
    # --------------------------------------------------------------------------------------------------

    def _note_sent(self, completion: Completion) -> None:
        group = self._open.setdefault(completion.ticket, [])
        group.append(completion)
        if len(group) == self.sampling.n:
            del self._open[completion.ticket]

    def state_dict(self) -> dict:
        """Completions of groups that are not whole; of each replica its first rank saves them."""
        if self.follows:
            return pack([])
        partials = [partial for partial in self.engine.export_partials() if partial.stream == TRAIN]
        return pack(
            [*partials, *(completion for group in self._open.values() for completion in group)]
        )

    def load_state_dict(self, parts: Iterable[dict]) -> None:
        """This replica's share of the tickets that are in work: any replica can go on with any."""
        share = sorted(self.tickets.in_work())[self.group.data_index :: self.group.data_size]
        for sample in (s for part in parts for s in unpack(part, newest=self.tickets.resumed_step)):
            if sample.ticket in share:
                self._go_on(sample)
        if share and not self.follows:
            self.tickets.go_on(share)
            tokens, ended = (
                sum(p.token_ids.numel() for p in self.engine.export_partials()),
                len(self._send_again),
            )
            log.info(
                "%d completions go on after %d tokens, %d had ended",
                self.engine.num_waiting,
                tokens,
                ended,
            )

    def _go_on(self, sample: Sample) -> None:
        name = sample.ticket, sample.sample_index, sample.prompt_ids
        # Those of other prompts were left out when the checkpoint was opened.
        same = torch.equal(sample.prompt_ids, self.prompts[sample.ticket].prompt_ids)
        assert same, (
            f"ticket {sample.ticket}: a saved completion is of another prompt than the stream's"
        )
        done = sample.token_ids, sample.generator_logprobs, sample.policy_versions
        if sample.finish_reason is None:
            self._begun.setdefault(sample.ticket, _Begun(time.monotonic(), 0)).unfinished += 1
            self.engine.submit_partial(Partial(TRAIN, *name, *done, self.sampling))
        elif not self.follows:
            completion = Completion(*name, *done, sample.finish_reason)
            self._note_sent(completion)
            self._send_again.append(completion)

    # -- ending
    # -------------------------------------------------------------------------------------------------------

    def offloadable(self) -> list[torch.Tensor]:
        # On a CPU the parameters are views of the weights' buffers, which other threads write.
        parameters = (
            list(self.engine.decoder.parameters()) if self.group.device.type == "cuda" else []
        )
        return [*parameters, *self.engine.cache_tensors()]

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self._part()
        if hasattr(self, "weights"):
            self.weights.close()

    def _part(self) -> None:
        """The leader says that it begins nothing more; a peer first takes part in what it has
        begun.
        """
        until = time.monotonic() + END_S
        try:
            if not self.follows:
                self.replica.tell(LAST)
            while (
                self.follows
                and not (self.replica.ended or self._torn or self.control.failure)
                and time.monotonic() < until
            ):
                if not self._follow():
                    self.control.wait(POLL_S)
        except RuntimeError:
            pass  # the others have left already, and say why
