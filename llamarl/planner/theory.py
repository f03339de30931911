"""Section 7 of LlamaRL (arXiv 2505.24034) as functions: the step of a synchronous and of an
asynchronous job, the split between them, and theorem 7.5.

Symbols, as in the paper:

    B0      completions of a step            G0      GPUs
    m       GPUs that hold one replica of a model; m_t of the trainer, m_g of the generator
    b       completions that a replica works on at once; b_t, b_g
    eta(b)  seconds a completion on one replica that works on b at once
    theta   the trainer's share of the GPUs

A replica does B0 m / G0 completions of a step where all GPUs work on one thing (definition 7.4):

    T_sync  = (B0 m / G0) (eta_t(b_t) + eta_g(b_g))
    T_async = max(B0 m_t eta_t(b_t) / (theta G0), B0 m_g eta_g(b_g) / ((1 - theta) G0))

The first side falls with theta and the second rises, so the maximum is least where both are equal:

    theta*  = m_t eta_t / (m_t eta_t + m_g eta_g)
    T*      = (B0 / G0) (m_t eta_t + m_g eta_g)

Theorem 7.5. Assume that eta_t and eta_g do not rise with b (assumption 7.1; figure 5), and that a
synchronous job holds both on each replica of m GPUs, within a memory M a GPU,

    (W_t + W_g + A_t b_t + A_g b_g) / m <= M,

while an asynchronous one holds each alone, (W_t + A_t b_t) / m_t <= M and (W_g + A_g b_g) / m_g <=
M. Then T* <= T_sync: with m_t = m_g = m and the same b both sides are equal, so overlap alone gains
nothing on a fixed number of GPUs; and what the other side no longer takes leaves room for a larger
b, at which eta is lower, or for a smaller m. So the gain is that of b and m of one's own.

It takes theta G0 / m_t and (1 - theta) G0 / m_g for any numbers: a job has whole replicas, and
search.py counts in these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Eta = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a job, the trainer's or the generator's.

    gpus: m. eta: seconds a completion at a concurrency. weights, sample: bytes of a replica at
    concurrency 0, and of each completion more.
    """

    gpus: float
    eta: Eta
    weights: float = 0.0
    sample: float = 1.0

    def most_at_once(self, memory: float, taken: float = 0.0) -> float:
        """Return the largest b in a memory of so many bytes a GPU, `taken` of the replica's being
        another's; below 0 where not even the weights fit.
        """
        return (memory * self.gpus - self.weights - taken) / self.sample


def t_sync(batch: float, total: float, gpus: float, eta_t: float, eta_g: float) -> float:
    """Return seconds of a synchronous step. batch: B0. total: G0. gpus: m. eta_t, eta_g: seconds a
    completion.
    """
    return batch * gpus / total * (eta_t + eta_g)


def t_async(
    batch: float, total: float, theta: float, trainer: tuple[float, float], generator: tuple
) -> float:
    """Return seconds of an asynchronous step at a split. trainer, generator: (m, eta)."""
    gpus_t, eta_t = trainer
    gpus_g, eta_g = generator
    training = batch * gpus_t * eta_t / (theta * total)
    generating = batch * gpus_g * eta_g / ((1 - theta) * total)
    return max(training, generating)


def best_split(trainer: tuple[float, float], generator: tuple[float, float]) -> float:
    """Return theta*, the trainer's share at which both sides take equally long."""
    gpus_t, eta_t = trainer
    gpus_g, eta_g = generator
    return gpus_t * eta_t / (gpus_t * eta_t + gpus_g * eta_g)


def t_best(
    batch: float, total: float, trainer: tuple[float, float], generator: tuple[float, float]
) -> float:
    """Return T*, seconds of an asynchronous step at theta*."""
    gpus_t, eta_t = trainer
    gpus_g, eta_g = generator
    return batch / total * (gpus_t * eta_t + gpus_g * eta_g)


@dataclass(frozen=True, slots=True)
class Both:
    """The two step times of theorem 7.5 in a memory, each at concurrencies that fit.

    synchronous: with the given b_t, and the b_g that is left. asynchronous: each side alone, at
    theta.
    """

    synchronous: float
    asynchronous: float
    theta: float


def compared(
    batch: float, total: float, memory: float, trainer: Side, generator: Side, share: float
) -> Both:
    """Return both step times of sides whose m is equal, where the synchronous one has given `share`
    of what the weights leave, 0 to 1, to the trainer's b. ValueError where the weights do not fit.
    """
    if trainer.gpus != generator.gpus:
        raise ValueError("a synchronous job has one m for both sides")
    gpus = trainer.gpus
    left = memory * gpus - trainer.weights - generator.weights
    if left <= 0:
        raise ValueError(f"the weights of both sides leave nothing of {memory} bytes a GPU")
    together = t_sync(
        batch,
        total,
        gpus,
        trainer.eta(share * left / trainer.sample),
        generator.eta((1 - share) * left / generator.sample),
    )
    alone_t = (gpus, trainer.eta(trainer.most_at_once(memory)))
    alone_g = (gpus, generator.eta(generator.most_at_once(memory)))
    return Both(
        synchronous=together,
        asynchronous=t_best(batch, total, alone_t, alone_g),
        theta=best_split(alone_t, alone_g),
    )
