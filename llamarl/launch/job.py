"""Job: everything that the executors of one run are built from, and the way to run their graph."""

from __future__ import annotations

import dataclasses
import math

from llamarl.comm.channel import Channel
from llamarl.comm.groups import World
from llamarl.config.command_line import Config
from llamarl.config.supervised import SupervisedConfig
from llamarl.controller import ExecutorController
from llamarl.ending import RunLimits
from llamarl.executor import Executor
from llamarl.launch.graph import channels_between
from llamarl.launch.inputs import JobInputs
from llamarl.launch.placement import Placement
from llamarl.launch.run_directory import RunDirectory
from llamarl.launch.run_files import RunFiles, has_finished, recorded
from llamarl.tasks.list_task import Remembered, here
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.sampler import DifficultySampler, PromptSampler


class Job:
    """The job of a run: what its executors share. It is the same on every rank, except for
    `world.rank`.

    inputs: what it reads. placement: who works where. files: what it writes.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        directory: RunDirectory,
        remembered: Remembered = here,
    ):
        self.inputs = JobInputs(config, remembered, is_told=world.rank == 0)
        if config.num_epochs is not None:
            config = in_steps(config, self.inputs.task.num_train)
            self.inputs.config = config
        self.config = config
        self.world = world
        self.placement = Placement(config, world.size)
        self.files = RunFiles(self.inputs, self.placement, directory)

    def run(
        self,
        executors: list[Executor],
        channels: list[Channel] | None = None,
    ) -> None:
        """Run the graph to its end. ValueError if executors do not fit together.

        executors: in flow order; `placement` gives the ranks of each by name, also for one that the
        config does not place. channels: those between them; None: derive them from the records that
        executors consume and produce.
        """
        if channels is None:
            channels = channels_between(executors)
        c = self.config
        directory = self.files.directory
        initial_groups = c.groups_per_step
        if c.buffer.kind == "replay" and c.buffer.initial_completions is not None:
            initial_groups = math.ceil(c.buffer.initial_completions / c.group_size)
        ledger = TicketLedger(
            groups_per_step=c.groups_per_step,
            max_lag=c.max_lag,
            overcommit=c.overcommit,
            governor=c.governor,
            num_pools=self.placement.num_buffers,
            num_generators=self.placement.num_generators,
            resume_in_work=c.resumes_partials,
            initial_groups=initial_groups,
            sync_period=self.placement.sync_period,
            max_steps=c.max_steps,
            max_refill=c.tickets.max_refill if c.tickets.informative else 0,
            sampler=self._sampler(),
        )
        settings = dataclasses.replace(
            limits_of(c, directory),
            offload=tuple(c.placement.colocate or ()) if c.offload else (),
            eval_target=c.eval.target,
            truncate=c.on_deadline == "truncate",
            straggler_factor=c.straggler_factor,
            stale_tickets=directory.stale_tickets,
        )
        controller = ExecutorController(
            executors=executors,
            channels=channels,
            placement=self.placement,
            ledger=ledger,
            world=self.world,
            settings=settings,
            make_writer=self.files.writer,
        )
        with recorded(controller, directory.path, max_steps=c.max_steps):
            controller.run()
        if not has_finished(controller, c.max_steps):
            self.files.stopped_after = controller.step

    def _sampler(self) -> PromptSampler | None:
        """Return what chooses prompts; None where they come in the stream's order."""
        c = self.config
        if c.tickets.sampler == "uniform":
            return None
        return DifficultySampler(
            num_prompts=self.inputs.task.num_train,
            group_size=c.group_size,
            seed=c.seed,
            half_life=c.tickets.half_life,
        )


def in_steps(config: Config, num_rows: int) -> Config:
    """Return the config with the max_steps of num_epochs over so many rows. ValueError if the
    learning rate's warm-up and decay take longer.
    """
    assert config.num_epochs is not None, "max_steps is as given"
    max_steps = math.ceil(config.num_epochs * num_rows / config.groups_per_step)
    t = config.trainer
    if t.warmup_steps + max(t.decay_steps or 0, 1) > max_steps:
        raise ValueError(
            f"num_epochs={config.num_epochs:g} of {num_rows:,} rows is {max_steps} steps, which "
            f"leaves no room for trainer.warmup_steps={t.warmup_steps} and trainer.decay_steps="
            f"{t.decay_steps}; lower these, or groups_per_step, or raise num_epochs"
        )
    return dataclasses.replace(config, max_steps=max_steps)


def told_epochs(job: Job) -> list[str]:
    """Return the line about the steps of num_epochs, for a run's first lines; none without."""
    c = job.config
    if c.num_epochs is None:
        return []
    passes = f"{c.num_epochs:g} passes over {job.inputs.task.num_train:,} rows"
    return [f"steps    {c.max_steps:,}: {passes}, {c.groups_per_step} a step"]


def limits_of(config: Config | SupervisedConfig, directory: RunDirectory) -> RunLimits:
    """Return what every kind of job tells its controller."""
    return RunLimits(
        run_dir=directory.path,
        resume_from=directory.resume_from,
        keep_checkpoints=config.checkpoint.keep,
        timeout_s=config.timeout_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        stop_s=config.stop_s,
        trace=config.metrics.trace,
        identity=directory.identity,
    )
