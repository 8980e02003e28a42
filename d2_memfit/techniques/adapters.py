# Copyright (c) the d2_memfit developers.
"""Where models handle all objects of a batch at once, and how they handle a few at a time."""

from collections.abc import Iterable
from typing import Any

from detectron2.config import CfgNode
from fvcore.common.registry import Registry
from torch import nn

from ..common.checks import value_of
from ..errors import ConfigError
from .registry import KeyTechnique
from .support import add_mixin

__all__ = ["ADAPTERS", "Adapter", "AdapterTechnique"]

ADAPTERS: Registry = Registry("ADAPTER")  # of subclasses of Adapter


class Adapter(nn.Module):
    """A mixin that makes a module handle a few objects at a time.

    A subclass is registered in ``ADAPTERS``, by a project too. It overrides the method that handles
    all objects at once; ``super()`` is the module's own class.

    Attributes:
        technique: the name of the technique that applies it.
        attribute: the name under which its methods find the value of the technique's key.
    """

    technique: str
    attribute: str

    @classmethod
    def find_in(cls, model: nn.Module, key: str) -> Iterable[nn.Module]:
        """The modules of a model that it extends.

        Args:
            key: the technique's key, for messages.

        Raises:
            ConfigError: a project's class overrides what it relies on.
        """
        raise NotImplementedError

    @classmethod
    def add_to(cls, module: nn.Module, value: Any) -> None:
        """Extend one of these modules by the adapter, with the value of the technique's key."""
        add_mixin(module, cls, **{cls.attribute: value})


class AdapterTechnique(KeyTechnique):
    """An exact technique that adapters apply.

    Attributes:
        what: what a model must have, for the error of one that has nothing of it.
    """

    tier = "exact"
    part = "model"
    what: str

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        own = [adapter for _, adapter in ADAPTERS if adapter.technique == cls.__name__]
        found = [(module, adapter) for adapter in own for module in adapter.find_in(model, cls.key)]
        if not found:
            raise ConfigError(
                f"{cls.key}: the model has no {cls.what}, so nothing would change. Set it {cls.off}"
            )
        for module, adapter in found:
            adapter.add_to(module, value_of(cfg, cls.key))
        return model
