"""Claims of pages whose runs were made before there were studies: not announced, and judged since.

Where a set-up could not have shown the opposite, the verdict says so. What is seen is so in all
seeds, without a margin that was named before.
"""

from __future__ import annotations

from dataclasses import dataclass

COULD_NOT_SHOW = "could not show"
SEEN = "seen"


@dataclass(frozen=True, slots=True)
class Earlier:
    """A claim of a page of benchmarks/results/."""

    claim: str
    source: str
    verdict: str
    n: int
    interval: str
    page: str


EARLIER = (
    Earlier(
        claim="REINFORCE falls with lag, AIPO little",
        source="LlamaRL",
        verdict=SEEN,
        n=3,
        interval="-44.5 ± 3.3, -4.7 ± 5.5 points",
        page="offpolicy.md",
    ),
    Earlier(
        claim="A cap of 2 to 10 steadies AIPO",
        source="LlamaRL",
        verdict="not answered",
        n=3,
        interval="-12.1 ± 12.0 points, cap 4",
        page="offpolicy.md",
    ),
    Earlier(
        claim="max_lag 1 learns as 0 does",
        source="Async RLHF",
        verdict="not answered",
        n=3,
        interval="-1.4 ± 4.7 points",
        page="offpolicy.md",
    ),
    Earlier(
        claim="PPO falls with lag",
        source="Async RLHF",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="",
        page="offpolicy.md",
    ),
    Earlier(
        claim="Attackers of TBA are more diverse",
        source="TBA, 5.3",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="",
        page="red_team.md",
    ),
    Earlier(
        claim="Searchers by ranks scale the search",
        source="TBA, 5.5",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="",
        page="red_team.md",
    ),
    Earlier(
        claim="A reset after 20 steps is critical",
        source="TBA, app. D",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="",
        page="red_team.md",
    ),
    Earlier(
        claim="The newest attacks succeed soonest",
        source="TBA, 5.4",
        verdict=SEEN,
        n=3,
        interval="86 % against 52 %, in all seeds",
        page="red_team.md",
    ),
    Earlier(
        claim="A proxy is over-optimised",
        source="Gao et al. 2022",
        verdict=SEEN,
        n=3,
        interval="gold 0.72 to 0.02–0.23",
        page="rlhf.md",
    ),
    Earlier(
        claim="On-policy wins most, N = 1 to 16",
        source="Async RLHF, 3.2",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="",
        page="rlhf.md",
    ),
    Earlier(
        claim="Online DPO is robust to N",
        source="Async RLHF, 3.3",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="",
        page="rlhf.md",
    ),
    Earlier(
        claim="A step behind equals synchronous RLHF",
        source="Async RLHF, 3.5",
        verdict="not answered",
        n=3,
        interval="-1.1 ± 5.6, -0.1 ± 14.1 points",
        page="rlhf.md",
    ),
    Earlier(
        claim="More passes or samples win more",
        source="Async RLHF, 4",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="",
        page="rlhf.md",
    ),
    Earlier(
        claim="T = 2 wins more after 32 steps",
        source="Async RLHF, 4.1",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="-0.1 [-0.9, +0.6] points",
        page="claims/rlhf_passes_2026-11-27.md",
    ),
    Earlier(
        claim="K = 4 after 16 steps wins as K = 2 after 32",
        source="Async RLHF, 4.2",
        verdict=COULD_NOT_SHOW,
        n=3,
        interval="-0.1 [-0.5, +0.3] points",
        page="claims/rlhf_samples_2026-11-27.md",
    ),
    Earlier(
        claim="KL bounds over-optimisation, at a rate of 1e-4",
        source="Async RLHF, 2.1",
        verdict="not answered",
        n=3,
        interval="+0.201 [-0.284, +0.686] gold",
        page="claims/rlhf_kl_2026-11-27.md",
    ),
    Earlier(
        claim="Resetting the reference is critical, at a rate of 1e-4",
        source="TBA, app. D",
        verdict="not answered",
        n=5,
        interval="+20.3 [+6.7, +34.0] points",
        page="claims/tba_reset_2026-11-27.md",
    ),
    Earlier(
        claim="Reading ahead shortens a score's tail",
        source="OPPO, 4.2",
        verdict=SEEN,
        n=1,
        interval="7.472 to 0.358 s",
        page="streaming.md",
    ),
    Earlier(
        claim="Reading ahead shortens steps",
        source="OPPO, fig. 6",
        verdict=COULD_NOT_SHOW,
        n=1,
        interval="",
        page="streaming.md",
    ),
    Earlier(
        claim="SmolLM2 learns four tasks",
        source="README",
        verdict=SEEN,
        n=2,
        interval="12.0–35.0 % to 61.5–98.5 %",
        page="real_model.md",
    ),
)
