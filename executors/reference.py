"""Reference: adds the logprobs of a language model to groups. The model is the one that training
started from, another such as a teacher, or the policy as it was at the last reset.

    groups    --> Batched, or Streamed --logprobs--> on to the trainer
    stretches --> Streamed, if it has a stream

The ranks of a reference hold its model together, sharded (FSDP2) or split (tensor parallelism), or
several copies of it, and act as one. The first takes all groups and tells the others what to score
next, and all do their share.

    loop step    consumes              waits for              unblocked by
    first rank   a staged version      word from the trainer  the same
                 stretches             -                      the generator
                 a batch of groups     groups                 the reward
                                       the version they need  the trainer
                                       the others' share      the others
    another      the first's calls     -                      the first rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llamarl.comm.together import RankCalls
from llamarl.ddma.channel import receiver_of
from llamarl.errors import NotFinite
from llamarl.executor import Executor, State, WeightsForm
from llamarl.learning.logprobs import LateEnds
from llamarl.models.build import Decoder
from llamarl.models.fsdp import local
from llamarl.models.shape import AUTO, Lora
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.reference import Batched, Resets, Streamed, newest_version
from llamarl.scoring.scorer import Site
from llamarl.scoring.sharded import ShardedReference
from llamarl.tickets.prompts import AnyPrompts, note, part_of
from llamarl.types import Group, ReferencePolicy, Stretch

# Most stretches that are taken at once; more wait in their channel.
MAX_STRETCHES = 4096


@dataclass(kw_only=True, eq=False, repr=False)
class Reference(Executor):
    """Adds log pi_ref of every completion token, at the temperature that the policy is sampled and
    trained at.

    model_path: a Hugging Face directory. model_dtype: a name in torch, such as "bfloat16".
    made_by: of config_of. teachers: directories of the models that score the groups of these parts
    of a mixture, whose `prompts` say the part; other groups are scored by the model of model_path.
    replicate: copies of the model, each sharded over an equal share of the ranks. tensor_parallel:
    ranks, one after another, that share each layer. groups_per_batch: the most groups that one step
    scores, per data-parallel rank. reproducible: a group's logprobs do not depend on which groups
    came at the same time.
    reset_every: steps after which it becomes the policy (TBA's rho); None: it stays as it was
    loaded. timeout_s: how long a checkpoint waits for such a version. stream: how it reads
    completions while these are sampled; None: it does not. prompts: by ticket, needed with a
    stream or teachers.
    lora: adapters that are reset, beside weights that stay. weights_form: how a new version's
    weights travel. late_ends: see ShardedReference.
    """

    name = "reference"
    produces = (Group,)
    split_vocabulary = False  # a token's logprob needs the whole head
    first_takes = True

    model_path: str
    model_dtype: str
    temperature: float
    microbatch_tokens: int
    replicate: int = 1
    tensor_parallel: int = 1
    groups_per_batch: int = 8
    reproducible: bool = False
    reset_every: int | None = None
    timeout_s: float = 60.0
    stream: StreamSettings | None = None
    prompts: AnyPrompts | None = None
    lora: Lora | None = None
    weights_form: WeightsForm = WeightsForm()
    late_ends: LateEnds | None = None
    made_by: str = AUTO
    teachers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self._early: list[Group] = []  # groups that need a later version of the reference
        self._resets: Resets | None = None

    @property
    def consumes(self) -> tuple[type, ...]:
        """Groups; with a stream also Stretches; weights if it is reset."""
        ahead = (Stretch,) if self.stream is not None else ()
        weights = (ReferencePolicy,) if self.reset_every is not None else ()
        return (Group, *ahead, *weights)

    @property
    def follows(self) -> bool:
        """Whether this rank only does its share of what the first one begins."""
        return self._ranks.follows

    @staticmethod
    def adapt_decoder(decoder: Decoder) -> None:
        """Override this to change the decoder's forward, as `FSDPTrainer.adapt_decoder` does."""

    def setup(self) -> None:
        """Load the model, each rank its own part."""
        self._ranks = RankCalls(self)
        site = Site(
            group=self.group,
            together=self._ranks,
            metrics=self.metrics,
            reproducible=self.reproducible,
        )
        model = self._loaded(self.model_path, self.made_by)
        self.decoder = model.decoder
        models = {self.model_path: model}
        for path in self.teachers.values():
            if path not in models:
                models[path] = self._loaded(path, AUTO)
        self._decoders = [one.decoder for one in models.values()]
        for decoder in self._decoders:
            self.adapt_decoder(decoder)
        self._logprobs: Batched | Streamed
        if self.stream is None:
            self._logprobs = Batched(models, site, path_of=self._path_of)
        else:
            self._logprobs = Streamed(
                model,
                self.stream,
                site,
                temperature=self.temperature,
                microbatch_tokens=self.microbatch_tokens,
                late_ends=self.late_ends,
            )
        if self.reset_every is not None:
            self._resets = Resets(
                self,
                self._ranks,
                self.decoder,
                receiver_of(self.inputs, ReferencePolicy),
                every=self.reset_every,
                timeout_s=self.timeout_s,
            )
        self._source = self.inputs.of(Group)
        self._sink = self.outputs.of(Group)

    def _loaded(self, path: str, made_by: str) -> ShardedReference:
        """Load the model of a directory, sharded over this executor's ranks."""
        return ShardedReference(
            path,
            dtype=getattr(torch, self.model_dtype),
            temperature=self.temperature,
            microbatch_tokens=self.microbatch_tokens,
            group=self.group,
            late_ends=self.late_ends,
            lora=self.lora,
            made_by=made_by,
        )

    def _path_of(self, group: Group) -> str:
        """Return the directory of the model that scores a group."""
        if not self.teachers:
            return self.model_path
        assert self.prompts is not None, "teachers are by part, which the prompts say"
        part = part_of(self.prompts[group.ticket])
        if part is None:
            return self.model_path
        return self.teachers.get(part, self.model_path)

    def step(self) -> bool:
        """Take in a version that has come, then score the groups that need no newer one, if there
        is room for them. Ranks other than the first take part in what it begins. True if there was
        work.
        """
        has_swapped = False
        if self._resets is not None:
            self._resets.begin_step()
            if self.follows:
                self._resets.report()
            else:
                has_swapped = self._resets.swap_next()
        if self.follows:
            return self._ranks.follow()
        has_led = self._lead()
        return has_swapped or has_led

    def _lead(self) -> bool:
        """Take stretches and groups, compute a piece, and send the groups that are done."""
        self._hear()
        if self._sink.has_room():
            self._logprobs.submit(self._next_groups())
        has_worked = self._logprobs.work()
        has_sent = False
        while self._sink.has_room():
            done = self._logprobs.next_done()
            if done is None:
                break
            group, logprobs = done
            self._check_finite(group, logprobs)
            self._sink.put(replace(group, ref_logprobs=logprobs, ref_version=self.version))
            has_sent = True
        return has_worked or has_sent

    def _hear(self) -> None:
        """Hand new tokens of running completions to the stream, if there is one."""
        if self.stream is None:
            return
        assert self.prompts is not None, "a reference that reads ahead needs the prompts"
        for stretch in self.inputs.of(Stretch).take(MAX_STRETCHES):
            note(self.prompts, stretch.ticket, stretch.prompt)
            self._logprobs.hear(stretch, self.prompts[stretch.ticket].prompt_ids)

    def _next_groups(self) -> list[Group]:
        """Return the groups that have come and may be scored now."""
        room = self.groups_per_batch * self.group.data_size - self._logprobs.num_waiting
        if room <= 0:
            return []
        groups = self._early or self._source.take(room)
        if self._resets is not None:
            resets = self._resets
            self._early = [group for group in groups if resets.needs(group) > self.version]
            groups = [group for group in groups if resets.needs(group) <= self.version]
        for group in groups:
            self.note_version(newest_version(group))
        return groups

    def _check_finite(self, group: Group, logprobs: Tensor) -> None:
        """Raise NotFinite if not all of a group's logprobs [T] are finite."""
        if not logprobs.isfinite().all():
            raise NotFinite(
                f"reference on rank {self.group.rank}, ticket {group.ticket}: its logprobs sum to "
                f"{float(logprobs.sum())}. The weights of version {self.version} (version 0 is "
                f"{self._path_of(group)}), or values computed with them, are not finite"
            )

    def waiting_for(self) -> str | None:
        """Return what it waits for, in words: the version that its oldest group needs, or room.
        None while it waits for groups, which may come at any time.
        """
        if self._early and self._resets is not None:
            first = self._early[0]
            version = f"version {self._resets.needs(first)} from the trainer"
            return f"weights: {version}, to score ticket {first.ticket} with"
        if self.follows or self._sink.has_room():
            return None
        return f"room: in channel {self._sink.name}, which the trainer empties"

    def offloadable(self) -> Iterable[Tensor]:
        """Return the tensors that may leave the device while others use it."""
        if self._resets is None or self.group.device.type == "cuda":
            # Otherwise the parameters are views of the buffers for new versions, and other threads
            # write these.
            for decoder in self._decoders:
                yield from map(local, decoder.parameters())
        yield from self._logprobs.tensors()

    def teardown(self) -> None:
        """Finish what was begun with the other ranks, then close the weights' channel, if it was
        opened.
        """
        if hasattr(self, "_logprobs"):
            self._ranks.leave()
        if self._resets is not None:
            self._resets.close()

    def may_checkpoint(self, step: int) -> bool:
        """Whether the versions that were sent up to that step have been taken in."""
        return self._resets is None or self._resets.may_checkpoint(step)

    def has_state(self) -> bool:
        """Whether checkpoints hold its weights. One that is never reset is loaded anew."""
        return self.reset_every is not None

    def state_dict(self) -> State:
        """Return its version and this rank's shard of it."""
        assert self._resets is not None, "has_state says that there is none"
        return self._resets.state_dict()

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Go on from a checkpoint of any number of ranks."""
        assert self._resets is not None, "has_state says that there is none"
        self._resets.load_state_dict(parts)
