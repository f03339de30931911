"""From a config to a job that can run. Prints what users read at its start and its end.

with launch(config) as job:
    ...  # build executors from job
    job.run(executors, channels)
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from llamarl.comm.groups import (
    SHOWN_HOSTS,
    World,
    init_world,
    this_device,
    threads_per_rank,
)
from llamarl.config.by_model import told
from llamarl.config.command_line import Config
from llamarl.config.preferences import PreferencesConfig
from llamarl.config.supervised import SupervisedConfig
from llamarl.ending import remembered_stops
from llamarl.errors import (
    BadInput,
    BadNetwork,
    BadWeights,
    CheckpointError,
    LagExceeded,
    MetricsError,
    NotFinite,
    ParityError,
    PeerDied,
    RewardError,
    RunDirectoryError,
    TimedOut,
    WeightsError,
)
from llamarl.launch.checks import bad_input, check_inputs
from llamarl.launch.dry_run import dry_run
from llamarl.launch.environments import try_environments
from llamarl.launch.identity import identity_of
from llamarl.launch.job import Job, told_epochs
from llamarl.launch.memory import announce_memory, warn_of_disk
from llamarl.launch.placement import planned_placement
from llamarl.launch.reading import SharedReading
from llamarl.launch.run_directory import RunDirectory, open_run
from llamarl.launch.sources import check_sources, try_gold
from llamarl.tasks.parts import shown_sets
from llamarl.words.texts import first_of

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1

# Errors that explain themselves, so that users see the message and no traceback.
RUN_ENDS = (
    PeerDied,
    TimedOut,
    ParityError,
    NotFinite,
    LagExceeded,
    RewardError,
    WeightsError,
    CheckpointError,
    MetricsError,
)


@contextmanager
def launch(config: Config) -> Iterator[Job]:
    """Join the world, open the run directory, and yield the job. Afterwards print how it ended. A
    dry run ends here with SystemExit.

    Bad input (data, model, run directory) is one clear message and exit code 2; a failure of the
    run is exit code 1.
    """
    with explained() as ending:
        world = joined_world(config, reproducible=config.reproducible)
        reading = SharedReading(world, _earlier_starts(config), config.timeout_s)
        directory = RunDirectory(Path(config.run_dir or "runs/(new)"), None)
        if config.ranks is not None:
            world = world.imagined(config.ranks)
        with bad_input():
            config, planned = planned_placement(config, world.size)
            job = Job(config, world, directory, reading)
        check_inputs(job.inputs)
        with bad_input():  # check what the user gave before there is a directory
            if config.dry_run:
                dry_run(job)
                raise SystemExit(0)
            if world.rank == 0:  # rank 0 makes the directory
                try_environments(job.inputs)
                check_sources(job.inputs)
                try_gold(job.inputs)
            # Read here, so that errors in the data are bad input.
            fingerprints = job.inputs.prompt_fingerprints
            identity = identity_of(job.inputs) if world.rank == 0 else None
        job.files.directory = open_run(config, world, fingerprints, identity, job.inputs.prompts)
        ending.callback(job.files.directory.release)
        ending.enter_context(remembered_stops())
        if world.rank == 0:
            reading.save(job.files.directory.path)
            _announce(job)
            if planned:
                print(f"planned  {planned}", flush=True)
            announce_memory(job)
            warn_of_disk(job)
        yield job
        job.files.conclude()


def joined_world(
    config: Config | SupervisedConfig | PreferencesConfig, *, reproducible: bool
) -> World:
    """Join the world of the job's ranks, with the device and the threads of one rank, and seed
    torch. BadInput for a device that is not there.
    """
    device = this_device(config.device)
    threads = threads_per_rank(config.threads, synchronous=reproducible, device=device)
    world = init_world(
        threads=threads, timeout_s=config.timeout_s, reproducible=reproducible, device=device
    )
    torch.manual_seed(config.seed)
    return world


def _announce(job: Job) -> None:
    """Print what runs where; on rank 0, when the run's directory is open."""
    c = job.config
    overcommit = "synchronous" if c.synchronous else f"overcommit {c.overcommit}"
    if c.max_lag is None:
        overcommit = f"at most {job.placement.num_on_their_way} groups on their way"
    if c.buffer.kind == "replay":
        overcommit += f", replay of the newest {c.buffer.max_size:,} completions"
        if job.placement.replay_lag is not None:
            overcommit += f", at most {job.placement.replay_lag:,} steps old"
    completions = f"{c.groups_per_step} x {c.group_size} completions a step"
    print(f"llamarl  {job.inputs.model_path.name} on {c.task.kind}, {completions}, {c.loss.name}")
    for line in [*told(c, job.inputs.model_path), *told_epochs(job)]:
        print(line)
    announce_world(job.world, job.placement.hosts)
    ends = ", stragglers end at their deadline" if c.on_deadline == "truncate" else ""
    print(f"async    max_lag {'none' if c.max_lag is None else c.max_lag}, {overcommit}{ends}")
    if c.samples_otherwise:
        print(
            f"parity   {c.samples_otherwise}: fixed prompts of each version are compared with the "
            "trainer, fresh tokens are not"
        )
    if c.eval.sets and c.is_evaluated:
        print(f"held out {shown_sets(job.inputs.eval_sets)}")
    print(f"run      {job.files.directory}")
    num_asked = len(job.inputs.eval_prompts)
    evaluates = f", {num_asked} held-out prompts answered" if num_asked else ""
    print(f"next     weights are read{evaluates}, and the first step made", flush=True)


def announce_world(world: World, ranks: object) -> None:
    """Print what the ranks run on. ranks: how many there are, or what each of them runs."""
    device = f"{world.device.type}, {torch.get_num_threads()} thread(s) each"
    print(f"ranks    {ranks}  ({device})")
    if world.network:
        print(f"network  {', '.join(first_of(world.network, SHOWN_HOSTS))}")
    print(f"float32  {world.products}")


def _earlier_starts(config: Config) -> list[Path]:
    """Return the directories of this run's earlier start, or of the run that it resumes."""
    folders = []
    if config.run_dir is not None:
        folders.append(Path(config.run_dir))
    if config.resume not in ("auto", "never"):
        folders += Path(config.resume).absolute().parents[1:2]  # RUN_DIR/checkpoints/step_N
    return folders


@contextmanager
def explained() -> Iterator[ExitStack]:
    """Run the body of a job's process. An error that explains itself is printed and ends the
    process with its exit code. Yield a stack of what is to be released at any end.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s", force=True
    )
    rank = int(os.environ.get("RANK", 0))
    code = 0
    ended_well = False
    ending = ExitStack()
    try:
        yield ending
        ended_well = True
    except SystemExit as end:  # a dry run ends so, on every rank
        ended_well = not end.code
        raise
    except (RunDirectoryError, BadInput, BadNetwork) as error:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # all ranks know: once a host
            _complain(f"llamarl: {error}")
        code = EXIT_BAD_INPUT
    except BadWeights as error:  # only the ranks that hold these weights find them
        _complain(f"llamarl: rank {rank}: {error}")
        code = EXIT_BAD_INPUT
    except RUN_ENDS as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        _complain(f"llamarl: rank {rank}: {said}")
        code = EXIT_FAILED
    except dist.DistError as error:
        why = (
            "the store through which the ranks talk did not answer; the launcher or another rank "
            "was probably stopped, see their output"
        )
        _complain(f"llamarl: rank {rank}: {why} ({str(error).splitlines()[0]})")
        code = EXIT_FAILED
    except Exception:
        # Contained, whatever it is: with other ranks this process has to end at once, further down,
        # since an orderly end would wait for them. So its traceback is printed here.
        if not _has_peers():
            raise
        traceback.print_exc()
        code = EXIT_FAILED
    finally:
        ending.close()
        # After a failure the ranks cannot end together in order, so this process exits at once and
        # waits for nobody.
        if dist.is_initialized() and (ended_well or not _has_peers()):
            dist.destroy_process_group()
    if code:
        sys.stdout.flush()
        os._exit(code)


def _has_peers() -> bool:
    """Whether there are other ranks, for which an orderly end would wait."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
