"""Routes: the experts that the routers of a mixture of experts choose for each token. The engine
notes them where it samples, and the trainer replays them where it scores (R3, rollout routing
replay, arXiv 2510.11370).

    engine: taken --> the cache, beside K/V --Completion--> Group --> PackedBatch --> trainer: given

A router of transformers' scores all experts and takes the best by `topk`, within its forward. There
given experts take the place of the best ones. What the router makes of their scores (a softmax, a
norm, a scale) is its own, with gradients. So no family needs code of its own.

Routes are [T, M, K]: for T tokens, by M routers, K experts each, as number + 1. 0: there is no
route, and the router chooses.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_ROUTER = re.compile(r".*(Router|Gate|Gating)")
_NARROW = (torch.bfloat16, torch.float16)


class Routing:
    """The routers of a decoder's layers. model: transformers', with its head. replays: a pass takes
    the routes that are given with its attention context.
    """

    def __init__(self, model: Any, layers: nn.ModuleList):
        self.replays = False
        # Of the newest forward, which may read in several passes: what each router has `own`, the
        # experts [T, K] that it chose, `taken`, those that were, and its `logits` [T, E].
        self.passes: list[dict[tuple[str, int], Tensor]] = []
        self._now: dict[tuple[str, int], Tensor] = {}
        self.routers = [module for module in layers.modules() if _is_router(module)]
        # The class of a router or a layer that cannot be replayed; None: there is none.
        self.unknown = _unknown_of(layers, self.routers)
        self.num_experts = max(map(_experts_of, self.routers), default=0)
        self._model = model
        self.given: Tensor | None = None  # the routes of the pass, to be replayed
        for number, router in enumerate(self.routers):
            router.forward = partial(self._route, number, router)

    @staticmethod
    def of(model: Any, layers: nn.ModuleList) -> Routing | None:
        """Return the routing of a model; None if its layers have no experts."""
        made = Routing(model, layers)
        return made if made.routers or made.unknown else None

    def begin(self, routes_TMK: Tensor | None, num_tokens: int) -> None:
        """Begin a pass of so many tokens. routes: of the first of them, to replay. They stay for
        the backward pass, which may compute layers again.
        """
        self.given = None
        if routes_TMK is not None and self.replays:
            missing = num_tokens - len(routes_TMK)
            self.given = F.pad(routes_TMK, (0, 0, 0, 0, 0, missing))

    def end(self, own: slice) -> None:
        """Note what was chosen in the pass for its `own` tokens."""
        if not self.unknown:
            self.passes.append({key: noted[own] for key, noted in self._now.items()})

    @property
    def taken(self) -> Tensor:
        """The routes [T, M, K] by which the newest forward computed, in the smallest integers."""
        dtype = torch.uint8 if self.num_experts < 256 else torch.int16
        return self._joined("taken").add(1).to(dtype)

    def _joined(self, of: str) -> Tensor:
        of_routers = []
        for number in range(len(self.routers)):
            of_routers.append(torch.cat([one[of, number] for one in self.passes]))
        return torch.stack(of_routers, 1)

    def load_max(self) -> Tensor:
        """Return [] of the newest forward: the tokens of the most loaded expert over those of the
        mean expert, as a mean over routers.
        """
        experts_MN = self._joined("taken").transpose(0, 1).flatten(1)
        counts_ME = experts_MN.new_zeros(len(experts_MN), self.num_experts)
        counts_ME.scatter_add_(1, experts_MN, torch.ones_like(experts_MN))
        loads_M = counts_ME.amax(1) * self.num_experts / experts_MN.shape[1]
        return loads_M.mean()

    def differing(self, rows_R: Tensor) -> Tensor:
        """Return [R]: the share of the routers that would have chosen other experts for the tokens
        in these rows than those that were taken.
        """
        taken_RMK = self._joined("taken")[rows_R].sort(-1).values
        own_RMK = self._joined("own")[rows_R].sort(-1).values
        return (taken_RMK != own_RMK).any(-1).float().mean(-1)

    def balance_loss(self) -> Tensor | None:
        """Return transformers' load-balancing loss [] of the newest forward, times the model's
        factor of it; None where config.json does not ask for it (output_router_logits), or
        transformers has none for the model. ValueError for routers of an unknown kind.
        """
        config = self._model.config.get_text_config()
        factor = getattr(config, "router_aux_loss_coef", None)
        module = sys.modules[type(self._model).__module__]
        formula = getattr(module, "load_balancing_loss_func", None)
        if not (getattr(config, "output_router_logits", False) and factor and formula):
            return None
        if self.unknown:
            raise ValueError(
                f"config.json has output_router_logits=true, and {self.unknown} does not say what "
                "the load-balancing loss needs; set it to false"
            )
        logits_TME = self._joined("logits").float()
        top_k = self.passes[0]["own", 0].shape[1]
        return factor * formula(logits_TME.unbind(1), self.num_experts, top_k)

    def _route(self, number: int, router: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a router's forward with the experts that are given for it."""
        with _Choice(self, number, _experts_of(router)) as choice:
            made = type(router).forward(router, *args, **kwargs)
        if choice.dtype is None:
            return made
        return tuple(t.to(choice.dtype) if t.is_floating_point() else t for t in made)

    def _choose(self, number: int, scores_TE: Tensor, best: Any) -> Any:
        """Return what `topk` gives of a router's scores, with the given experts for the best."""
        self._now["own", number] = self._now["taken", number] = best.indices
        if self.given is None:
            return best
        given_TK = self.given[:, number].long() - 1
        chosen_TK = torch.where(given_TK < 0, best.indices, given_TK)
        self._now["taken", number] = chosen_TK
        return torch.return_types.topk((scores_TE.gather(1, chosen_TK), chosen_TK))


class _Choice(TorchFunctionMode):
    """Makes a router's logits in float32, and its choice that of `routing`. dtype: the narrower one
    that its products would have had; None: they had none.
    """

    def __init__(self, routing: Routing, number: int, num_experts: int):
        super().__init__()
        self.dtype: torch.dtype | None = None
        self._routing = routing
        self._number = number
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            # In bfloat16 many experts would have equal logits, and roundings would choose.
            if args[0].dtype in _NARROW:
                self.dtype = args[0].dtype
                args = [given if given is None else given.float() for given in args]
            made = func(*args, **kwargs)
            self._routing._now["logits", self._number] = made
            return made
        made = func(*args, **kwargs)
        is_choice = getattr(func, "__name__", "") == "topk" and args[0].dim() == 2
        if is_choice and args[0].shape[1] == self._num_experts:  # others choose groups of experts
            return self._routing._choose(self._number, args[0], made)
        return made


def _is_router(module: nn.Module) -> bool:
    """Whether a module chooses experts by topk, and says among how many."""
    if not _ROUTER.fullmatch(type(module).__name__):
        return False
    return "topk(" in _source_of(module) and _experts_of(module) > 0


def _unknown_of(layers: nn.ModuleList, routers: list[nn.Module]) -> str | None:
    """Return the class of a module whose experts are chosen in another way, or whose layers choose
    unlike numbers of experts; None: there is none.
    """
    sizes = {(_experts_of(router), getattr(router, "top_k", None)) for router in routers}
    if len(sizes) > 1:
        return type(routers[0]).__name__
    for router in routers:
        source = _source_of(router)
        # Experts outside of its own groups would weigh 0.
        if "masked_fill" in source and "gather" not in source:
            return type(router).__name__
    known = set(routers)
    for module in layers.modules():
        if isinstance(getattr(module, "experts", None), nn.Module):
            if known.isdisjoint(module.modules()):
                return type(module).__name__
    return None


def _source_of(module: nn.Module) -> str:
    return inspect.getsource(type(module).forward)


def _experts_of(router: nn.Module) -> int:
    config = getattr(router, "config", None)
    return getattr(router, "num_experts", None) or getattr(config, "num_experts", None) or 0
