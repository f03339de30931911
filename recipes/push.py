"""Upload the model of a run to the Hugging Face Hub, with a model card.

    llamarl push run_dir=RUN_DIR repo=OWNER/NAME dry_run=true  # look at it first
    llamarl push run_dir=RUN_DIR repo=OWNER/NAME
    llamarl push run_dir=RUN_DIR repo=OWNER/NAME adapters=true base_model=OWNER/BASE

step=N takes checkpoints/step_N in place of the newest. private=false makes a new repository public;
one that exists stays what it is. adapters=true uploads adapter/, for peft, instead of hf/, and
base_model=OWNER/NAME names the model that training started from. dry_run=true writes everything to
RUN_DIR/push, prints the card and uploads nothing.

The card README.md has what was trained and how, the settings that are not defaults, a plot and a
table of results; no path of this machine. It and the weights of an earlier push are replaced. The
token is that of `hf auth login` or of HF_TOKEN. Exit status: 0, or 2 for what cannot be done.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import llamarl
from llamarl.checkpoint.checkpointer import damage, verify
from llamarl.checkpoint.latest import latest_in
from llamarl.config.by_model import is_tiny
from llamarl.config.command_line import RED_TEAM, RL, JobKind, default_config
from llamarl.config.conversion import REQUIRED, ConfigError, flat, is_marked, sections, to_values
from llamarl.config.files import CONF_DIR
from llamarl.config.script import read_script
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.models.peft import CONFIG as ADAPTER_CONFIG
from llamarl.observe.alarms import Columns
from llamarl.observe.plots import LOOK, SUPERVISED, SUPERVISED_PANELS, Panel, draw
from llamarl.observe.rates import EVALUATED, step_of
from llamarl.observe.report import columns_of, facts
from llamarl.observe.rows import FILE_NAME
from llamarl.observe.sinks import read_rows
from llamarl.words.fields import Flag, Natural, Text, settings_dataclass
from llamarl.words.findings import show

TEMPLATE = Path(__file__).with_name("model_card.jinja")
CARD = "README.md"
PLOT = "curve.png"
CURVE = Panel(
    "Reward and held-out score",
    {"reward/mean": "reward of sampled completions", EVALUATED: "score of held-out prompts"},
    from_zero=False,
)
# An earlier push may have had other shards, or adapters: transformers would load what is left.
REPLACED = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
METHODS = {  # by JobKind.file
    RL.file: "by reinforcement learning",
    RED_TEAM.file: "by reinforcement learning, as an attacker of a victim",
    SFT.file: "by supervised fine-tuning",
    REWARD_MODEL.file: "as a reward model, from preferences",
}

Values = dict[str, Any]  # of a config.yaml, by section
TAGS = {SFT.file: ["sft"], REWARD_MODEL.file: ["reward-model"]}


@settings_dataclass
class PushSettings:
    run_dir: Text
    repo: Text
    step: Natural | None
    private: Flag
    adapters: Flag
    base_model: Text | None
    dry_run: Flag


DEFAULTS = {
    "run_dir": REQUIRED,
    "repo": REQUIRED,
    "step": None,
    "private": True,
    "adapters": False,
    "base_model": None,
    "dry_run": False,
}


def parse(words: Sequence[str]) -> PushSettings:
    """Return the settings of a command line. ConfigError, or SystemExit for --help."""
    return read_script(words, PushSettings, DEFAULTS, doc=__doc__)


# --- The run ---


def find_checkpoint(run_dir: Path, step: int | None) -> Path:
    """Return a run's checkpoint of a step, or its newest. FileNotFoundError or ValueError."""
    folder = run_dir / "checkpoints"
    if not (run_dir / "config.yaml").is_file():
        raise FileNotFoundError(
            f"{run_dir}: no run (it has no config.yaml); give the run_dir that the run printed"
        )
    found = latest_in(folder) if step is None else folder / f"step_{step}"
    if found is None or not found.is_dir():
        there = sorted(path.name for path in folder.glob("step_*") if path.suffix == "")
        kept = f"it has {', '.join(there)}" if there else "a run writes one at its end"
        asked = "" if step is None else f" of step {step}"
        raise FileNotFoundError(f"{run_dir}: no checkpoint{asked}; {kept}")
    problems = verify(found)
    if problems:
        raise ValueError(" ".join(damage(found, problems).split()))
    return found


def read_values(run_dir: Path) -> Values:
    """Read a run's config.yaml, of any commit. ValueError if it is damaged."""
    file = run_dir / "config.yaml"
    try:
        composed = OmegaConf.load(file)
        values = sections(composed)
    except (YAMLError, OmegaConfBaseException, TypeError) as error:
        raise ValueError(f"{file}: damaged: {' '.join(str(error).split())}") from error
    return values


def weights_of(checkpoint: Path, adapters: bool) -> Path:
    """Return the directory to upload. FileNotFoundError if the checkpoint has none."""
    name = "adapter" if adapters else "hf"
    if not (checkpoint / name).is_dir():
        remedy = "the run trained all weights: adapters=false" if adapters else "give another step"
        raise FileNotFoundError(f"{checkpoint}: has no {name}/; {remedy}")
    return checkpoint / name


def columns_until(file: Path, step: int) -> Columns:
    """Return the columns of a metrics.jsonl up to a step; {} without rows."""
    rows = read_rows(file) if file.is_file() else []
    kept = [row for row in rows if step_of(row) <= step]
    return columns_of(kept) if kept else {}


# --- The card ---


def kind_of(config: Values) -> JobKind:
    """Return the kind of job that a run's config.yaml is of."""
    if "out" in config:
        loss = config.get("loss")
        return REWARD_MODEL if isinstance(loss, Mapping) and "center_coef" in loss else SFT
    victim = config.get("victim")
    attacks = isinstance(victim, Mapping) and victim.get("kind", "none") != "none"
    return RED_TEAM if attacks else RL


def choices_of(config: Values, kind: JobKind) -> list[str]:
    """Return the words that choose the files of conf/ which a run's config was made of."""
    words = []
    model = config["model"]["path"]
    if model is not None:
        words.append(f"model.path='{model}'")
        if kind in (RL, RED_TEAM) and not is_tiny(model):
            words.append("model=hf")
    for section, values in config.items():
        if section == "model" or not isinstance(values, Mapping):
            continue
        chosen = values.get("kind") or values.get("name")
        if chosen and (CONF_DIR / section / f"{chosen}.yaml").is_file():
            words.append(f"{section}={chosen}")
    return words


def defaults_of(kind: JobKind, words: list[str]) -> dict[str, object]:
    """Return key -> default beside these words; 1 for a key that has none. ConfigError."""
    try:
        return flat(to_values(default_config(kind, words)))
    except ConfigError as error:
        if not all(problem.what.startswith("required") for problem in error.problems):
            raise
        required = [f"++{problem.where}=1" for problem in error.problems]
    return defaults_of(kind, [*words, *required])


def changed_settings(config: Values, kind: JobKind) -> dict[str, str]:
    """Return key -> value of what is not the default of the chosen loss, task and so on, without
    keys that do not change what is learned. {} with a warning for another commit's run.
    """
    try:
        defaults = defaults_of(kind, choices_of(config, kind))
    except ConfigError as error:
        what = " ".join(str(error).split())
        print(f"push: the card lists no settings, for they are another commit's: {what}")
        return {}
    changed = {}
    for key, value in flat(config).items():
        is_outward = key == "format" or is_marked(key, "outward", kind.schema)
        if not is_outward and value != defaults.get(key):
            changed[key] = show(without_folders(value))
    return changed


def without_folders(value: object) -> object:
    """Return a setting with paths and addresses cut down to their last part, so that a card tells
    nothing about this machine.
    """
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    is_path = value.startswith(("/", "~", ".")) or not re.search(r"\s", value)
    return value.rstrip("/").rpartition("/")[2] if is_path else value


def hub_name(path: str | None) -> str | None:
    """Return the OWNER/NAME of a model in the Hub's cache on this machine; None for another."""
    for part in Path(path or "").parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return None


def cell(text: object) -> str:
    """Return a text for a cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def make_card(
    settings: PushSettings, config: Values, columns: Columns, step: int, base_model: str | None
) -> str:
    """Return the text of the model card."""
    kind = kind_of(config)
    scores = kind is REWARD_MODEL
    loss = config.get("loss", {}).get("name")
    tags = ["llamarl", *TAGS.get(kind.file, ["reinforcement-learning", loss])]
    data = ModelCardData(
        base_model=base_model,
        library_name="peft" if settings.adapters else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=[str(tag).lower().replace(":", "-") for tag in tags if tag],
    )
    started = config["model"]["path"]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=settings.repo.partition("/")[2],
        repo=settings.repo,
        method=METHODS[kind.file],
        loss=loss,
        task=config.get("task", {}).get("kind", "rows"),
        data=without_folders(config.get("task", {}).get("path")),
        started=base_model or (without_folders(started) if started else "llamarl's tiny model"),
        base_model=base_model,
        adapters=settings.adapters,
        scores=scores,
        step=step,
        plot=PLOT if columns else None,
        facts=[(cell(name), cell(value)) for name, value in facts(columns)] if columns else [],
        changed={key: cell(value) for key, value in changed_settings(config, kind).items()},
        versions={
            "llamarl": llamarl.__version__,
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
    )
    return str(card)


@matplotlib.rc_context(LOOK | {"legend.loc": "best"})
def draw_curve(columns: Columns, file: Path) -> None:
    """Draw reward and held-out score, or the loss of a supervised run."""
    panel = SUPERVISED_PANELS[0] if SUPERVISED in columns else CURVE
    draw(columns, panel).savefig(file, dpi=150)


# --- The upload ---


def write_folder(folder: Path, settings: PushSettings, weights: Path, step: int) -> None:
    """Fill a folder with what is uploaded: the weights, in a dry run as copies and else as links,
    and the card.
    """
    run_dir = Path(settings.run_dir)
    config = read_values(run_dir)
    columns = columns_until(run_dir / FILE_NAME, step)
    base_model = settings.base_model or hub_name(config["model"]["path"])
    for file in sorted(weights.iterdir()):
        if file.name == ADAPTER_CONFIG:
            fields = json.loads(file.read_text())
            local = str(fields["base_model_name_or_path"])
            fields["base_model_name_or_path"] = base_model or without_folders(local)
            (folder / file.name).write_text(json.dumps(fields, indent=2) + "\n")
        elif settings.dry_run:
            shutil.copyfile(file, folder / file.name)
        else:
            (folder / file.name).symlink_to(file.absolute())
    if columns:
        draw_curve(columns, folder / PLOT)
    (folder / CARD).write_text(make_card(settings, config, columns, step, base_model))


def upload(settings: PushSettings, folder: Path, step: int) -> str:
    """Upload a folder. Return the address of the commit. PermissionError or ConnectionError."""
    api = HfApi(library_name="llamarl", library_version=llamarl.__version__)
    try:
        api.create_repo(settings.repo, private=settings.private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=settings.repo,
            folder_path=folder,
            commit_message=f"Upload step {step}",
            delete_patterns=REPLACED,
        )
    except HfHubHTTPError as error:
        raise PermissionError(refusal(settings.repo, error)) from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        what = " ".join(str(error).split())
        raise ConnectionError(f"{api.endpoint} cannot be reached: {what}") from error
    return commit.commit_url


def refusal(repo: str, error: HfHubHTTPError) -> str:
    """Return why the Hub refused, in one line."""
    status = error.response.status_code
    what = error.server_message or " ".join(str(error).split())
    if status == 401:
        return f"the Hub does not know this token ({what}); run `hf auth login`, or set HF_TOKEN"
    if status in (403, 404):
        return f"this token may not write to {repo} ({what}); use one with write access there"
    return f"the Hub refused ({status}: {what})"


def run(settings: PushSettings) -> None:
    """Upload, or write the folder of a dry run. ValueError or OSError in one line."""
    validate_repo_id(settings.repo)
    if "/" not in settings.repo:
        raise ValueError(f"repo={settings.repo}: write OWNER/NAME")
    if not settings.dry_run and get_token() is None:
        raise PermissionError("no token; run `hf auth login`, or set HF_TOKEN")
    run_dir = Path(settings.run_dir)
    checkpoint = find_checkpoint(run_dir, settings.step)
    weights = weights_of(checkpoint, settings.adapters)
    step = json.loads((checkpoint / "manifest.json").read_text())["step"]
    if settings.dry_run:
        folder = run_dir / "push"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_folder(folder, settings, weights, step)
        print((folder / CARD).read_text())
        for file in sorted(folder.iterdir()):
            print(f"file     {file.name}  {file.stat().st_size:,} bytes")
        print(f"dry run: {folder} would be uploaded to {settings.repo}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        write_folder(Path(temporary), settings, weights, step)
        print(f"pushed   step {step} to {upload(settings, Path(temporary), step)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        run(parse(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError, ConfigError) as error:
        print(f"push: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
