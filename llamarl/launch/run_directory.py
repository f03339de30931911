"""A run's directory: where it is, whether it may be used, and which checkpoint the run goes on
from.

RUN_DIR/config.yaml      the resolved config, for people and for recipes that read a run
        metrics.jsonl    one row a step
        checkpoints/     step_N/, and latest, a link to the newest
        samples/         step_N.jsonl: completions of held-out prompts, with eval.save_samples
        prompts.json     which of the task's rows have prompts that fit (llamarl/launch/reading.py)
        trace.rank*.json
        outcome.json     how it ended (run_files.py)
        lock             held by the job that uses it now

Rank 0 decides; all ranks verify a checkpoint together, each a share of its files:

    word        from -> to         meaning
    prompts/R   rank R -> rank 0   fingerprints of the prompts, as rank R reads them
    order/I     rank 0 -> all      the I-th thing to do: verify a checkpoint, or what was decided
    found/I/R   rank R -> rank 0   what is wrong with rank R's share of it, or what its host does
                                   not see of it

In the launcher's own store, which outlives restarted workers and belongs to this launch alone:

    llamarl/run/J   rank 0         the directory that the J-th job of this launch has opened; a
                                   restarted rank 0 goes on there
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from llamarl.checkpoint.checkpointer import find, verify
from llamarl.checkpoint.manifest import SEEN_S, digest_of, read_manifest, wait_until_seen
from llamarl.checkpoint.parts import load_part, ranks_of
from llamarl.checkpoint.service import CONTROLLER
from llamarl.comm.groups import World
from llamarl.comm.meeting import Exchange, reaching
from llamarl.config.conversion import save_config
from llamarl.config.schema import Config
from llamarl.config.supervised import SupervisedConfig
from llamarl.disk.files import LOCK, RUNS, DirectoryLock, new_directory
from llamarl.errors import RunDirectoryError, TimedOut
from llamarl.inference.partials import of_other_prompts
from llamarl.launch.identity import Identity, differences
from llamarl.observe.ended import FILE_NAME as OUTCOME
from llamarl.tickets.choices import choices_of
from llamarl.tickets.prompts import AnyPrompts, note
from llamarl.words.texts import first_of

_SHOWN = 5  # files that a message names
# Counts this process's jobs. --multirun has several, and a restarted process counts from 0 again.
_jobs = itertools.count()

log = logging.getLogger("llamarl")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory where a run writes, and the checkpoint that it goes on from."""

    path: Path
    resume_from: Path | None  # a checkpoint's directory
    # The values of the run's Identity, which its checkpoints hold. Rank 0 has made it.
    identity: Mapping[str, object] = field(default_factory=dict)
    # Tickets whose unfinished completions in that checkpoint belong to other prompts now.
    stale_tickets: frozenset[int] = frozenset()
    lock: DirectoryLock | None = None  # on rank 0

    def __str__(self) -> str:
        checkpoint = self.resume_from
        return f"{self.path}, resumed from {checkpoint.name}" if checkpoint else str(self.path)

    def release(self) -> None:
        """Release the directory, because this process is done with it."""
        if self.lock is not None:
            self.lock.release()


def open_run(
    config: Config | SupervisedConfig,
    world: World,
    fingerprints: Mapping[str, str],
    identity: Identity | None,
    prompts: AnyPrompts | None = None,
) -> RunDirectory:
    """Open the run's directory. Collective over the world: rank 0 decides, the others help.

    RunDirectoryError on every rank. fingerprints: of the prompts or rows, as this rank reads them.
    identity: of the run that is to start or to go on; on rank 0, None elsewhere. prompts: None
    where nothing is generated. PeerDied or TimedOut names a rank that does not answer.
    """
    store = world.store() or dist.HashStore()
    exchange = Exchange(store, rank=world.rank, timeout_s=config.timeout_s)
    with reaching("the other ranks, to open the run's directory", rank=world.rank):
        exchange.tell(f"prompts/{world.rank}", dict(fingerprints))
        if world.rank > 0:
            return _follow(exchange, world)
        assert identity is not None, "rank 0 has the run's identity"
        opening = _Opening(
            config=config, world=world, identity=identity, prompts=prompts, exchange=exchange
        )
        return opening.decide()


def _follow(exchange: Exchange, world: World) -> RunDirectory:
    """On every rank but 0."""
    for number in itertools.count():
        order = exchange.hear(
            f"order/{number}",
            source=0,
            what="which checkpoint to verify or which directory this run has",
        )
        if "error" in order:
            raise RunDirectoryError(order["error"])
        if "verify" not in order:
            return RunDirectory(
                path=Path(order["path"]),
                resume_from=Path(order["resume_from"]) if order["resume_from"] else None,
                identity=order["identity"],
                stale_tickets=frozenset(order["stale_tickets"]),
            )
        checkpoint = Path(order["verify"])
        absent = wait_until_seen(
            checkpoint,
            order["manifest"],
            patience_s=order["seen_s"],
            waiting=exchange.progress,
        )
        problems = [] if absent else _share_of(checkpoint, exchange, world)
        found = {"problems": problems, "unseen": absent, "host": socket.gethostname()}
        exchange.tell(f"found/{number}/{world.rank}", found)
    raise AssertionError("rank 0 ends the loop above with a decision")


def _share_of(checkpoint: Path, exchange: Exchange, world: World) -> list[str]:
    """Return what is wrong with this rank's share of a checkpoint, a line a file."""
    try:
        return verify(checkpoint, share=(world.rank, world.size), progress=exchange.progress)
    except OSError as error:
        return [str(error)]


@dataclass
class _Opening:
    """Rank 0's side of open_run."""

    config: Config | SupervisedConfig
    world: World
    identity: Identity
    prompts: AnyPrompts | None
    exchange: Exchange
    num_orders: int = 0
    lock: DirectoryLock | None = None

    def decide(self) -> RunDirectory:
        try:
            ours = self.identity.prompts
            for rank in range(1, self.world.size):
                what = "which prompts it reads"
                theirs = self.exchange.hear(f"prompts/{rank}", source=rank, what=what)
                others = [name for name in ours if theirs.get(name) != ours[name]]
                if others:
                    raise RunDirectoryError(
                        f"rank {rank} reads other {' and '.join(others)} than rank 0; give all "
                        "hosts the same data and model files"
                    )
            run = self._open()
        except (ValueError, OSError) as error:
            # The checkpoint is damaged, or the directory is in use or cannot be made.
            if self.lock is not None:
                self.lock.release()
            self._order({"error": str(error)})
            if isinstance(error, TimedOut):
                raise
            raise RunDirectoryError(str(error)) from error
        self._order(
            {
                "path": str(run.path),
                "resume_from": str(run.resume_from or ""),
                "identity": run.identity,
                "stale_tickets": sorted(run.stale_tickets),
            }
        )
        return run

    def _order(self, order: dict) -> int:
        number = self.num_orders
        self.num_orders += 1
        self.exchange.tell(f"order/{number}", order)
        return number

    def _open(self) -> RunDirectory:
        """Open the directory. ValueError or OSError if no run may start here."""
        config = self.config
        launcher = self.world.launcher
        key = f"llamarl/run/{next(_jobs)}"
        own: Path | None = None  # what this job opened before a restart
        if launcher is not None and launcher.check([key]):
            own = Path(launcher.get(key).decode())
        path = Path(config.run_dir).absolute() if config.run_dir else own
        # A restarted rank 0 goes on in the directory that it opened before.
        goes_on_here = path is not None and path == own
        resume = "auto" if config.resume == "never" and goes_on_here else config.resume
        if path is not None and resume == "never":
            _refuse_used(path)
        if path is not None and resume == "auto":
            path.mkdir(parents=True, exist_ok=True)  # another job may make it too
        if path is not None and path.is_dir():
            # Lock before looking at its checkpoints, because whoever holds it may be writing them.
            self._lock_directory(path)
        resume_from: Path | None = None
        if resume != "never":
            resume_from = find(resume, path, check=self._verify_together)
        stale: set[int] = set()
        if resume_from is not None:
            resume_from = resume_from.absolute()
            stale = self._check_same_run(resume_from)
        path = path or new_directory(RUNS)
        path.mkdir(parents=True, exist_ok=True)
        if self.lock is None:
            self._lock_directory(path)
        if resume == "never":
            _refuse_used(path)  # again, because another job may have held it until just now
        if launcher is not None:
            launcher.set(key, str(path))
        (path / OUTCOME).unlink(missing_ok=True)  # that of an earlier start
        save_config(config, path / "config.yaml")
        return RunDirectory(
            path,
            resume_from,
            identity=asdict(self.identity),
            stale_tickets=frozenset(stale),
            lock=self.lock,
        )

    def _lock_directory(self, path: Path) -> None:
        # A job that was told to stop may still take stop_s to end.
        self.lock = DirectoryLock(
            path, patience_s=self.config.stop_s, waiting=self.exchange.progress
        )

    def _verify_together(self, checkpoint: Path) -> list[str]:
        """Return what is wrong with a checkpoint. Each rank checks its share.

        RunDirectoryError names the ranks that do not see it as this one does.
        """
        problems = verify(checkpoint, hashes=False)
        if problems:
            return problems  # here already, so that no rank need wait until it sees more
        order = {
            "verify": str(checkpoint.absolute()),
            "manifest": digest_of(read_manifest(checkpoint)),
            "seen_s": min(SEEN_S, self.config.timeout_s),
        }
        number = self._order(order)
        problems = _share_of(checkpoint, self.exchange, self.world)
        blind: list[str] = []
        for rank in range(1, self.world.size):
            what = f"whether its share of {checkpoint} is whole"
            told = self.exchange.hear(f"found/{number}/{rank}", source=rank, what=what)
            problems += [problem for problem in told["problems"] if problem not in problems]
            if told["unseen"]:
                blind.append(
                    f"rank {rank} on {told['host']} does not see "
                    f"{', '.join(first_of(told['unseen'], _SHOWN))}"
                )
        if blind and not problems:
            lines = "\n".join(blind)
            raise RunDirectoryError(
                f"{checkpoint} is whole where rank 0 runs, but after {order['seen_s']:g} s\n"
                f"{lines}\nPut the run's directory where all hosts see the same files. If their "
                "file system only shows them late, start again"
            )
        return problems

    def _check_same_run(self, checkpoint: Path) -> set[int]:
        """Check that the checkpoint is this run's. Return the tickets whose unfinished completions
        belong to other prompts now.

        RunDirectoryError if it is another run's.
        """
        controller = load_part(checkpoint, CONTROLLER, ranks_of(checkpoint, CONTROLLER)[0])
        model = "model=hf model.path" if isinstance(self.config, Config) else "model.path"
        instead = (
            f"start a run of its own from the checkpoint's weights: {model}={checkpoint / 'hf'}"
        )
        old = Identity(**controller["identity"])
        found = differences(old, self.identity, type(self.config))
        permitted = self.config.resume_with_other
        refused = [one for one in found if one.refuses and one.permit not in permitted]
        if refused:
            lines = "\n".join(f"  {difference.what}" for difference in refused)
            permits = [one.permit for one in refused if one.permit is not None]
            way = ""
            if len(permits) == len(refused):
                words = ",".join(dict.fromkeys(permits))
                way = f"go on with the difference by resume_with_other=[{words}], "
            raise RunDirectoryError(
                f"{checkpoint}: this would be another run, not the same one "
                f"resumed:\n{lines}\nGive the values that it was begun with, {way}or {instead}"
            )
        for difference in found:
            log.warning("%s goes on with %s", checkpoint.name, difference.what)
        stale: set[int] = set()
        if self.prompts is None:
            return stale
        for ticket, prompt in choices_of(controller["ledger"]).items():
            note(self.prompts, ticket, prompt)
        for rank in ranks_of(checkpoint, "generator"):
            part = load_part(checkpoint, "generator", rank)
            stale.update(of_other_prompts(part, self.prompts))
        if stale:
            log.warning(
                "unfinished completions of %d tickets were sampled for other prompts, so they "
                "are dropped and the tickets start again",
                len(stale),
            )
        return stale


def _refuse_used(path: Path) -> None:
    if path.is_dir() and any(file.name != LOCK for file in path.iterdir()):
        raise RunDirectoryError(
            f"{path} holds a run already; go on with resume=auto, or choose another run_dir"
        )
