"""Write the tables of benchmarks/results/claims.md: a row per claim, from the results of studies
and from the pages of runs that are older than the studies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from running import ROOT
from studies import STUDIES
from studies.earlier import EARLIER
from study_pages import PAGES, read_entry, runs_of, said, telling, worded
from study_terms import NOT_RUN, Study
from study_verdicts import outcome

PAGE = ROOT / "benchmarks" / "results" / "claims.md"
STUDIES_HEAD = ("claim", "source", "verdict", "n", "margin", "difference, 95 % interval")
EARLIER_HEAD = ("claim", "source", "verdict", "n", "difference, 95 % interval")


@dataclass(frozen=True, slots=True)
class Claim:
    """A row. interval: of the telling question's difference, 95 %, or "" where there is none.
    margin: where that interval was to lie; None for earlier runs, which had none.
    """

    claim: str
    source: str
    verdict: str
    n: str
    interval: str
    page: Path
    margin: str | None = None

    @property
    def cells(self) -> list[str]:
        margin = [] if self.margin is None else [self.margin]
        return [f"[{self.claim}]", self.source, self.verdict, self.n, *margin, self.interval]

    @property
    def link(self) -> str:
        """What the claim's name leads to: a table's line has no room for it."""
        return f"[{self.claim}]: {self.page.relative_to(PAGE.parent)}"


def of_study(study: Study, folder: Path = PAGES) -> Claim:
    """Return the row of a study, from its kept results."""
    kept = read_entry(study, folder)
    verdict = NOT_RUN
    num_seeds = 0
    interval = ""
    margin = ""
    if kept is not None:
        by_seed = runs_of(kept)
        found = outcome(study, by_seed)
        verdict = worded(study, found)
        num_seeds = sum(len(of_seed) == len(study.arms) for of_seed in by_seed.values())
        question, answer = telling(study, found)
        if answer.mean is not None:
            interval = said(question, answer)
        margin = question.bound
    source = f"{study.paper}, {study.section}"
    title = study.title
    if study.review is not None:
        source = study.review.source or source
        title = study.review.title or title
    is_whole = num_seeds == len(study.seeds)
    counted = str(num_seeds) if is_whole else f"{num_seeds} of {len(study.seeds)}"
    was_announced_before = any(folder.glob(f"{study.name}_2*.md"))  # those are put aside
    if was_announced_before:
        counted += ", anew"
    page = PAGES / f"{study.name}.md"
    return Claim(title, source, verdict, counted, interval, page, margin)


def claims() -> Iterator[Claim]:
    """All rows, those of studies first."""
    for study in STUDIES.values():
        yield of_study(study)
    for claim in EARLIER:
        yield Claim(
            claim=claim.claim,
            source=claim.source,
            verdict=claim.verdict,
            n=str(claim.n),
            interval=claim.interval,
            page=ROOT / "benchmarks" / "results" / claim.page,
        )


def table(head: tuple[str, ...], rows: list[Claim]) -> str:
    """Return a table, and below it what its names lead to."""
    lines = [list(head), ["---"] * len(head), *(row.cells for row in rows)]
    drawn = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*drawn, "", *(row.link for row in rows)])


def tables() -> dict[str, str]:
    """Return the page's tables by the name of their markers."""
    every = list(claims())
    num_studies = len(STUDIES)
    return {
        "studies": table(STUDIES_HEAD, every[:num_studies]),
        "earlier": table(EARLIER_HEAD, every[num_studies:]),
    }


def refreshed(text: str) -> str:
    """Return a page with its tables written anew. ValueError if it has no place for one."""
    for name, fresh in tables().items():
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda found: f"{found[1]}{fresh}\n{found[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{PAGE} has {count} places for the table {name}; it needs one")
    return text


def write_claims() -> None:
    PAGE.write_text(refreshed(PAGE.read_text()))
