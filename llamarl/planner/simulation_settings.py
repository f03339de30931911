"""What is simulated: a run's settings, under their names in conf/, and what goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.comm.channel import Channel


class Impossible(ValueError):
    """Settings that cannot go together."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """A run of the main job, as far as its time depends on it. Impossible, with all reasons, for
    one that could not go on.

    A length is log-normal, rounded up and cut at max_new_tokens, or drawn from `lengths`. It
    depends on the seed and the completion alone, so that two settings are compared on the same
    ones.
    """

    max_steps: int = 50
    warmup_steps: int = 0  # first steps, which are in no figure
    seed: int = 0

    max_lag: int = 1  # steps
    overcommit: int | str = "auto"  # groups, or a governor
    on_deadline: str = "wait"  # or truncate
    groups_per_step: int = 64
    group_size: int = 8  # completions a group

    num_generators: int = 1  # replicas, which may be several ranks each
    max_slots: int = 512  # completions decoded at once, a replica
    chunk_tokens: int = 8  # between two looks at new work and new weights
    in_flight_updates: bool | None = None  # None: whenever max_lag allows any lag
    recompute_kv: bool = False  # at a swap, the context of all live rows is read again
    max_seconds: float | None = None  # of a completion, from its ticket's start

    num_rewards: int = 1  # ranks
    num_workers: int = 1  # a reward rank
    score_batch: int = 1  # completions that a worker scores together

    num_trainers: int = 1  # data-parallel ranks
    weight_slots: int = 2  # versions on their way, before a publication has to wait
    publish_every: int = 1  # steps; the last one is always published
    stops_generators: bool = False  # from when a version leaves until it has arrived

    channel_capacity: int = Channel.capacity  # records that an end holds before it pushes back

    prompt_tokens: int = 128
    length_mean: float = 256.0  # tokens of a completion, before the cut
    length_sigma: float = 0.5  # of the logarithm; 0: all are equal
    max_new_tokens: int = 1024
    lengths: tuple[int, ...] = ()  # of completions that were seen; drawn from, if there are any

    # The reward, for governors that follow it: 1 - exp(-step / reward_rise_steps), and noise.
    reward_rise_steps: float = 50.0
    reward_noise: float = 0.05

    straggler_share: float = 0.0  # of completions
    straggler_times: float = 1.0  # so many times as long, and cut at max_new_tokens
    slow_score_share: float = 0.0  # of scores
    slow_score_times: float = 1.0  # so many times the seconds
    slow_factor: float = 1.0  # generator 0 takes so many times as long for everything
    death_at_s: float | None = None  # the last generator dies

    def __post_init__(self) -> None:
        problems = []
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)}: need at least 1")
        for name in _AT_LEAST_ZERO:
            if getattr(self, name) < 0:
                problems.append(f"{name}={getattr(self, name)}: need at least 0")
        if self.groups_per_step % max(1, self.num_trainers):
            problems.append(
                f"groups_per_step={self.groups_per_step}, num_trainers={self.num_trainers}: a "
                "batch is split evenly over the data-parallel ranks"
            )
        if self.max_slots < self.group_size:
            problems.append(
                f"max_slots={self.max_slots}, group_size={self.group_size}: a generator asks for a "
                "ticket once it has room for its whole group"
            )
        if self.warmup_steps >= self.max_steps:
            problems.append(
                f"warmup_steps={self.warmup_steps}, max_steps={self.max_steps}: no step is left"
            )
        if self.max_lag == 0 and self.overcommit not in (0, "auto"):
            problems.append(
                f"overcommit={self.overcommit}, max_lag=0: a synchronous run has none; max_lag=1 "
                "allows a batch"
            )
        if self.publish_every > self.max_lag + 1:
            problems.append(
                f"publish_every={self.publish_every}, max_lag={self.max_lag}: no weights would be "
                "young enough for the last steps before a publication; need publish_every <= "
                "max_lag + 1"
            )
        words = ("auto", "oppo", "window")
        if isinstance(self.overcommit, str) and self.overcommit not in words:
            problems.append(f"overcommit={self.overcommit}: need a number or {', '.join(words)}")
        if self.on_deadline not in ("wait", "truncate"):
            problems.append(f"on_deadline={self.on_deadline}: need wait or truncate")
        if self.death_at_s is not None and self.num_generators < 2:
            problems.append("death_at_s: the last generator dies, so need num_generators >= 2")
        if self.death_at_s is not None and self.max_lag == 0:
            problems.append(
                "death_at_s, max_lag=0: tickets are dealt to generators in turn there, and nobody "
                "else starts those of one that is gone; need max_lag >= 1"
            )
        if problems:
            raise Impossible("cannot be simulated:\n  " + "\n  ".join(problems))

    @property
    def updates_in_flight(self) -> bool:
        """Whether a generator takes weights in while completions run."""
        if self.in_flight_updates is None:
            return self.max_lag > 0
        return self.in_flight_updates


_AT_LEAST_ONE = (
    "max_steps",
    "groups_per_step",
    "group_size",
    "num_generators",
    "max_slots",
    "chunk_tokens",
    "num_rewards",
    "num_workers",
    "score_batch",
    "num_trainers",
    "weight_slots",
    "publish_every",
    "channel_capacity",
    "length_mean",
    "max_new_tokens",
    "straggler_times",
    "slow_score_times",
)
_AT_LEAST_ZERO = (
    "warmup_steps",
    "max_lag",
    "prompt_tokens",
    "length_sigma",
    "straggler_share",
    "slow_score_share",
    "slow_factor",
)
