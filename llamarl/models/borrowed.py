"""What decoders take of torchtune: its TransformerDecoder, without what the package drags in.

    from llamarl.models.borrowed import TransformerDecoder

That class needs PyTorch alone. `import torchtune.modules` loads torchao, PyTorch's compiler
(torch._dynamo, by torchao and by a decorator), and Hugging Face datasets with pandas and pyarrow
besides, of which a decoder uses nothing: more than half of the CPU seconds before a first step.

So one file of torchtune is run, torchtune/modules/transformer.py, while stand-ins are there for the
packages around it. They have the two names that the file asks for, both for annotations. Whatever
else it asks for is an ImportError, and then torchtune is imported as usual, with a warning. Nobody
sees a stand-in: afterwards they are gone, and a program that imports torchtune or torchao gets the
true ones, with the same TransformerDecoder in them.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

_PACKAGE = "torchtune"
_MODULES = f"{_PACKAGE}.modules"
_FILE = f"{_MODULES}.transformer"
# module -> what the file imports of it. They stand in annotations alone.
_STAND_INS: dict[str, dict[str, object]] = {
    _PACKAGE: {},
    _MODULES: {"MultiHeadAttention": nn.Module},
    f"{_MODULES}.attention_utils": {"_MaskType": Tensor},
}

# Where torchao is imported (8-bit Adam): it warns, at import, of kernels that nothing here uses.
logging.getLogger("torchao").setLevel(logging.ERROR)


def transformer_decoder() -> type[nn.Module]:
    """Return torchtune's TransformerDecoder. Warns if it cannot be had without the whole package,
    which is imported then; ImportError if that cannot be imported either.
    """
    if _PACKAGE not in sys.modules:
        try:
            return _decoder_of_file()
        except (ImportError, AttributeError) as error:
            warnings.warn(
                f"torchtune is imported as a whole, which takes seconds: its {_FILE} is not the "
                f"file that llamarl knows ({error}); need torchtune 0.6.1",
                stacklevel=2,
            )
    return importlib.import_module(_MODULES).TransformerDecoder


def _decoder_of_file() -> type[nn.Module]:
    """Return the class of torchtune's one file. ImportError or AttributeError: the file is not
    there, or asks for something that no stand-in has.
    """
    spec = _spec_of_file()
    module = module_from_spec(spec)
    assert spec.loader is not None, "a spec that was found has a loader"
    with _stand_ins(), _compiler_unloaded():
        spec.loader.exec_module(module)
    decoder = module.TransformerDecoder
    sys.meta_path.insert(0, _OnceMore(module))
    return decoder


def _spec_of_file() -> ModuleSpec:
    """Find torchtune's file; the packages around it are not run. ImportError: it is not there."""
    package = find_spec(_PACKAGE)
    for name in (_MODULES, _FILE):
        if package is None or package.submodule_search_locations is None:
            break
        package = PathFinder.find_spec(name, package.submodule_search_locations)
    if package is None or package.name != _FILE or package.loader is None:
        raise ImportError(f"there is no {_FILE}")
    return package


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Have modules of these names and contents in the place of torchtune's."""
    for name, contents in _STAND_INS.items():
        stand_in = ModuleType(name)
        stand_in.__path__ = []  # a package, in which nothing else is found
        vars(stand_in).update(contents)
        sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name in _STAND_INS:
            del sys.modules[name]


@contextmanager
def _compiler_unloaded() -> Iterator[None]:
    """Have torch.compiler.disable load the compiler when the function that it decorates is called,
    and not before.
    """
    true = torch.compiler.disable
    vars(torch.compiler)["disable"] = torch._disable_dynamo  # the same, as torch itself uses it
    try:
        yield
    finally:
        vars(torch.compiler)["disable"] = true


class _OnceMore(MetaPathFinder, Loader):
    """Gives an import of the file, once torchtune itself is imported, the module that is there
    already: so that a decoder is a torchtune.modules.TransformerDecoder for everybody.
    """

    def __init__(self, module: ModuleType):
        self._module = module

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        """Return how to import the file, if it is this one; None for all others."""
        if name != _FILE:
            return None
        return ModuleSpec(name, self, origin=self._module.__file__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that is there."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Replace what the stand-ins gave by what torchtune gives."""
        for source, names in _STAND_INS.items():
            for name in names:
                true = getattr(importlib.import_module(source), name)
                setattr(module, name, true)


if TYPE_CHECKING:
    from torchtune.modules import TransformerDecoder as TransformerDecoder
else:
    TransformerDecoder = transformer_decoder()
