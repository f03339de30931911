"""Generator: tickets in, completions out, new weights between decode chunks.

    loop step    consumes                 waits for                           unblocked by
    weights      the staged version       -                                   the trainer's publish
    tickets      grants                   room under max_lag and overcommit   the trainer's takes;
                                                                              without max_lag what
                                                                              arrives there
    truncate     orders; the clock        -                                   -
    decode       one chunk of tokens      room in the completions channel     the reward
                 environments' answers    - (dialogues wait, others go on)    their workers
    stretches    what was sampled in it   - (left out without room)           -

An evaluation pins its version: held-out prompts run beside the tickets, and the generator swaps no
newer version in until they are done. It keeps only the newest of the versions that arrive
meanwhile, so that no other replica waits for this one.

A checkpoint holds the completions of incomplete groups. On resume, if the ledger counts their
ticket as in work, partial completions go on and ended ones are sent again. Otherwise the ticket
starts again.

With tensor_parallel > 1 several ranks share a copy of the model. The first of them decides. The
others repeat its commands in its order and send nothing (llamarl.comm.together).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from llamarl.comm.together import Lockstep
from llamarl.ddma.channel import receiver_of
from llamarl.evaluation.ask import eval_completion, submit
from llamarl.executor import Executor, WeightsForm
from llamarl.inference import SamplingParams, TemperatureRange
from llamarl.inference.canaries import CanaryCheck
from llamarl.inference.partials import pack, unpack
from llamarl.inference.protocol import (
    BuildEngine,
    GenerationEngine,
    can_resume,
    can_talk,
)
from llamarl.inference.requests import Partial
from llamarl.inference.stretches import StretchSender
from llamarl.models.build import Decoder
from llamarl.models.parity import Canary, ParityLimits
from llamarl.observe.console import Progress
from llamarl.tickets.prompts import AnyPrompts, chosen, note
from llamarl.types import Columns, Completion, EvalCompletion, Policy, Prompt, Stretch

TRAIN = 0  # stream of the engine; the other streams are evaluations'

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class Generator(Executor):
    """Samples completions, with one engine a replica. Sampling is a function of (seed, ticket,
    sample_index, position), not of the rank or the batch.

    build_engine: builds the replica's engine at set-up.
    prompts: prompts[ticket] is the ticket's prompt.
    eval_prompts: held-out prompts by number. Each gets a greedy completion, and eval_samples more
    that are sampled by `sampling`.
    temperatures: what tickets are sampled at. None: at sampling's temperature, at which the trainer
    scores them in any case.
    chunk_tokens: tokens a row between two looks at weights, tickets and stop requests.
    in_flight_updates: swap weights while completions run; otherwise only when none runs.
    recompute_kv: after a swap, recompute the K/V cache of running completions.
    parity: how far a version's canary may differ from the trainer's. max_quantization_kl: in its
    place for an engine that quantises; see CanaryCheck.
    max_seconds: a completion that has not ended this long after its ticket's start is aborted, as
    if the ledger had ordered to truncate it. None: no limit.
    """

    name = "generator"
    consumes = (Policy,)
    produces = (Completion, EvalCompletion)
    offers = (Stretch,)
    state_is_optional = True  # without it, tickets start again

    build_engine: BuildEngine
    prompts: AnyPrompts
    eval_prompts: Mapping[int, Prompt]
    sampling: SamplingParams
    chunk_tokens: int
    in_flight_updates: bool
    parity: ParityLimits
    recompute_kv: bool = False
    eval_samples: int = 0
    tensor_parallel: int = 1
    max_quantization_kl: float | None = None
    max_seconds: float | None = None
    temperatures: TemperatureRange | None = None
    weights_form: WeightsForm = WeightsForm()

    def __post_init__(self):
        self.version = -1
        # Columns about the current version, such as its canary. Every completion that ends under
        # it carries them, so that a row describes the versions that sampled its groups.
        self._of_version: Columns = {}
        self._sampled = 0  # tokens
        self._evaluating = 0  # unfinished completions of held-out prompts
        self._progress: Progress | None = None  # of the evaluation, on one rank
        self._to_evaluate: deque[int] = deque()  # held-out prompts that the engine has not got yet
        # The tickets whose groups are not whole. Only the first rank of a replica keeps them.
        self._begun: dict[int, float] = {}  # when each began here, seconds
        self._open: dict[int, list[Completion]] = {}  # the completions that were sent
        self._send_again: list[Completion] = []  # sent before the run was interrupted

    @staticmethod
    def adapt_decoder(decoder: Decoder) -> None:
        """Override this to change the forward of the native engine's decoder, as the trainer's own
        `FSDPTrainer.adapt_decoder` does. Called before the engine is built around it.
        """

    def setup(self) -> None:
        """Build the engine and bind it to the incoming weights."""
        self.replica = Lockstep(self.group, self.control)
        self.weights = receiver_of(self.inputs)
        self._commands: dict[str, Callable[..., object]] = {
            "swap": self._swap,
            "skip": self.weights.skip,
            "decode": self._decode,
        }
        self.engine: GenerationEngine = self.build_engine(self.group, self.weights.bind)
        self._canaries = CanaryCheck(
            self.engine,
            self.parity,
            max_quantization_kl=self.max_quantization_kl,
            temperature=self.sampling.temperature,
        )
        self._num_slots = self.engine.free_slots
        self._completions = self.outputs.of(Completion)
        self._evaluations = self.outputs.of(EvalCompletion)
        self._stretches = StretchSender(
            self.outputs.all_of(Stretch), self.engine, self.prompts, stream=TRAIN
        )
        if can_talk(self.engine):
            self.engine.when_answered(self.control.wake)

    @property
    def follows(self) -> bool:
        """Whether another rank of the replica decides what this one does."""
        return self.group.tensor_index > 0

    def step(self) -> bool:
        """Take weights and tickets in, and sample a chunk. True if anything was done."""
        return self._follow() if self.follows else self._lead()

    def _lead(self) -> bool:
        """Decide for the replica: swap weights, start and end tickets, sample a chunk."""
        swapped = self._swap_weights()
        has_room = self._completions.has_room() and self._evaluations.has_room()
        if self.version < 0 or not has_room:
            return swapped
        while self._send_again:
            self._completions.put(self._with_prompt(self._send_again.pop()))
        # Take orders before grants. The ledger sends an order after its ticket's grant, so this
        # rank has taken that grant already.
        ended = self.tickets.to_truncate() + self._expired()
        # In a synchronous run an evaluation runs alone, because batches must not depend on timing.
        is_pinned = self._evaluating > 0
        is_blocked = self.tickets.synchronous and is_pinned
        # Ask a chunk before the groups are needed, because the answer takes time.
        evaluate = self._next_to_evaluate()
        free = self.engine.free_slots - self.engine.num_waiting
        room = (free - len(evaluate) * self._answers_each) // self.sampling.n
        if not (self.tickets.synchronous or is_pinned) and self.tickets.has_batch:
            # The trainer on this rank is about to publish: a ticket started now would be one
            # version older than necessary. A pinned version does not wait for that.
            granted = []
        elif room > 0 and not is_blocked:
            is_idle = not (self.engine.num_live or self.engine.num_waiting)
            granted = self.tickets.ask(self.group.data_index, room, self.version, is_idle=is_idle)
        else:
            granted = self.tickets.granted()
        tickets = [ticket.index for ticket in granted]
        prompts = [ticket.prompt for ticket in granted]
        self._begun |= dict.fromkeys(tickets, time.monotonic())
        if not (tickets or evaluate or self.engine.num_live or self.engine.num_waiting):
            return swapped
        sampled = self._together(
            "decode",
            tickets=tickets,
            prompts=prompts,
            evaluate=evaluate,
            ended=ended,
            chunk=self.chunk_tokens,
        )
        return swapped or sampled

    @property
    def _answers_each(self) -> int:
        """How many completions a held-out prompt gets."""
        return 1 + self.eval_samples

    def _next_to_evaluate(self) -> list[int]:
        """Return the held-out prompts to submit now.

        They get at most half of the slots while tickets are in work or may be granted, because the
        trainer waits for tickets. Otherwise they get all slots.
        """
        waiting = list(self._to_evaluate)
        is_alone = self.tickets.is_refused and not self._begun
        if self.tickets.synchronous or is_alone:
            return waiting
        started = self._evaluating - len(waiting) * self._answers_each
        room = self._num_slots // 2 - started
        if not started:
            room = max(room, self._answers_each)  # one, however few slots there are
        return waiting[: max(0, room) // self._answers_each]

    def _together(self, do: str, **what) -> bool:
        """Run a command on every rank of the replica, this one included. The number of sampled
        tokens goes with it, so that a rank with other tokens is noticed.
        """
        self.replica.tell(do, sampled=self._sampled, **what)
        return bool(self._commands[do](**what))

    def _follow(self) -> bool:
        """Do the leader's next command, if one has come."""
        self.replica.report(self.weights.staged)
        command = self.replica.next()
        if command is None:
            return False
        do, sampled = command.pop("do"), command.pop("sampled")
        if sampled != self._sampled:
            raise RuntimeError(
                f"generator ranks {self.replica.leader} and {self.group.rank} share a model but "
                f"have sampled {sampled} and {self._sampled} tokens, so their logits differed; "
                "give them equal machines and libraries"
            )
        with self.replica.taking_part():
            self._commands[do](**command)
        return True

    def partners(self, version: int) -> Sequence[int]:
        """Return the other ranks of the replica that this one leads. Empty once it holds the run's
        last version and has no work.
        """
        if self.follows:
            return ()
        has_work = self._evaluating or self.engine.num_live or self.engine.num_waiting
        return self.replica.peers if has_work or self.version < version else ()

    def waiting_for(self) -> str | None:
        """Return the cause of the wait (weights, room, environment or tickets) and its details."""
        if self.follows:
            return None  # its leader waits for both
        if self.version < 0:
            return "weights: the first version from the trainer"
        if not self._completions.has_room():
            return f"room: in channel {self._completions.name}, which the reward empties"
        if can_talk(self.engine) and self.engine.num_acting:
            return f"environment: {self.engine.num_acting} answers from its workers"
        if self.engine.num_live == 0:
            return self.tickets.ungranted(self.version)
        return None

    def _swap_weights(self) -> bool:
        """Swap the version in that is staged on all ranks of the replica, unless the current one
        is pinned. Return whether one was swapped in.
        """
        must_drain = not self.in_flight_updates and self.engine.num_live > 0
        is_pinned = self._evaluating > 0 or must_drain
        if is_pinned and not self.weights.overtakable:
            return False
        if not is_pinned:
            # The trainer on this rank may just have published: start tickets with that version.
            self.weights.wait_for_local()
        version = self.replica.agreed(self.weights.staged)
        if version is None:
            return False
        return self._together("skip" if is_pinned else "swap", version=version)

    # --- Commands: every rank of a replica runs them ---

    def _swap(self, version: int) -> bool:
        """Swap the staged version in, check its canary, and start its evaluation if it is due."""
        self.claim_device()
        began = time.monotonic()
        taken = self.weights.swap()
        assert not self.replica.peers or (taken and taken.version == version), (
            f"rank {self.group.rank} swaps {taken}, not {version}"
        )
        if taken is None:
            return False  # a newer version is just replacing it
        self.version = taken.version
        self.engine.weights_changed(self.version, recompute_kv=self.recompute_kv)
        if not self.follows:  # the replica's other ranks do the same work
            self.metrics.add("weights/swap_stall_s", time.monotonic() - began)
        self._of_version = {}
        if taken.canary:
            self._of_version = self._canaries.check(
                Canary.from_json(taken.canary),
                self.weights.held(),
                version=self.version,
                rank=self.group.rank,
            )
        if taken.evaluate:
            # This replica's share of the held-out prompts.
            share = list(self.eval_prompts)[self.group.data_index :: self.group.data_size]
            self._to_evaluate.extend(share)
            num_answers = len(share) * self._answers_each
            self._evaluating += num_answers
            if self.group.data_index == 0 and not self.follows:
                what = f"evaluation of version {self.version}"
                self._progress = Progress(what, num_answers, unit="answers", is_bar=False)
        return True

    def _decode(
        self,
        tickets: list[int],
        prompts: list[int | None],
        evaluate: list[int],
        ended: list[int],
        chunk: int,
    ) -> bool:
        """Start tickets and held-out prompts, end stragglers where they are, and sample a chunk.

        prompts: the sampler's choice for each ticket; None: the stream's prompt.
        """
        for number in evaluate:
            self._to_evaluate.remove(number)
            submit(self.engine, number, self.eval_prompts[number], self.sampling, self.eval_samples)
        for ticket, prompt in zip(tickets, prompts, strict=True):
            note(self.prompts, ticket, prompt)
            prompt_ids = self.prompts[ticket].prompt_ids
            self.engine.submit(ticket, prompt_ids, self._sampling_of(ticket), stream=TRAIN)
        self.claim_device()
        for ticket in ended:
            self.engine.abort(ticket, stream=TRAIN)
        sampled = self.engine.step(chunk)
        self._sampled += sampled
        if not self.follows:
            self.metrics.add("generator/tokens", sampled)
        finished = self.engine.pop_finished()
        for stream, completion in finished:
            if stream != TRAIN:
                self._evaluating -= 1
            if self.follows:
                continue
            if stream == TRAIN:
                columns = {**completion.columns, **self._of_version}
                completion = dataclasses.replace(completion, columns=columns)
                self._stretches.end(completion)
                self._note_sent(completion)
                self._completions.put(self._with_prompt(completion))
            else:
                if self._progress is not None:
                    self._progress.advance()
                answer = eval_completion(stream, completion)
                self._evaluations.put(answer)
        if not self.follows:
            self._stretches.send()
        return sampled > 0 or bool(finished)

    def _with_prompt(self, completion: Completion) -> Completion:
        """Return the completion with the prompt that a sampler chose, if one did."""
        prompt = chosen(self.prompts, completion.ticket)
        return completion if prompt is None else dataclasses.replace(completion, prompt=prompt)

    def _sampling_of(self, ticket: int) -> SamplingParams:
        """Return a ticket's sampling parameters: a pure function of the ticket."""
        if self.temperatures is None:
            return self.sampling
        return dataclasses.replace(self.sampling, temperature=self.temperatures.of(ticket))

    def _expired(self) -> list[int]:
        """Return the tickets that have been in work for longer than max_seconds."""
        if self.max_seconds is None:
            return []
        now = time.monotonic()
        return [ticket for ticket, began in self._begun.items() if now - began > self.max_seconds]

    # --- Checkpoints ---

    def _note_sent(self, completion: Completion) -> None:
        """Keep a completion that was sent until its group is whole."""
        group = self._open.setdefault(completion.ticket, [])
        group.append(completion)
        if len(group) == self.sampling.n:
            del self._open[completion.ticket]
            del self._begun[completion.ticket]

    def state_dict(self) -> dict:
        """Return the completions of incomplete groups, on the first rank of each replica."""
        if self.follows or not can_resume(self.engine):
            return pack([])
        partials = [partial for partial in self.engine.export_partials() if partial.stream == TRAIN]
        return pack([*partials, *chain.from_iterable(self._open.values())])

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Take this replica's share of the tickets that are in work. Any replica can go on with any
        ticket, because sampling does not depend on the rank.
        """
        if not can_resume(self.engine):
            return
        for ticket, prompt in self.tickets.resumed_choices().items():
            note(self.prompts, ticket, prompt)
        share = sorted(self.tickets.in_work())[self.group.data_index :: self.group.data_size]
        if not self.follows:
            self._begun |= dict.fromkeys(share, time.monotonic())
        num_partials = num_tokens = 0
        for part in parts:
            for sample in unpack(part, self.tickets.resumed_step, TRAIN, self._sampling_of):
                if sample.ticket not in share:
                    continue
                # Completions of other prompts were left out when the checkpoint was opened.
                same = torch.equal(sample.prompt_ids, self.prompts[sample.ticket].prompt_ids)
                assert same, (
                    f"ticket {sample.ticket}: a saved completion is of another prompt than the "
                    "stream's"
                )
                if isinstance(sample, Partial):
                    self.engine.submit_partial(sample)
                    num_partials += 1
                    num_tokens += sample.token_ids.numel()
                elif not self.follows:
                    self._note_sent(sample)
                    self._send_again.append(sample)
        if share and not self.follows:
            self.tickets.go_on(share)
            log.info(
                "%d completions go on after %d tokens, %d had ended",
                num_partials,
                num_tokens,
                len(self._send_again),
            )

    # --- Ending ---

    def offloadable(self) -> list[torch.Tensor]:
        """Return the tensors that may leave the device while others use it."""
        return self.engine.offloadable()

    def teardown(self) -> None:
        """Let the replica's ranks leave together, then close weights and engine."""
        if hasattr(self, "engine"):
            self.replica.leave(self._follow)
        if hasattr(self, "weights"):
            self.weights.close()
        if hasattr(self, "engine"):
            self.engine.close()
