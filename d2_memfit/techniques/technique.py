# Copyright (c) the d2_memfit developers.
"""The class of a technique."""

from typing import Any

from detectron2.config import CfgNode
from torch import nn

from ..common.checks import Check, check_bool, check_positive_int, check_strings, or_none, value_of

__all__ = ["Technique"]


class Technique:
    """One way to use less memory: the config key that turns it on, and what it does to a job.

    A subclass says in its docstring what it saves, what it costs, and where that is from. The
    paragraph "Key:" says what the values of its key do.

    Attributes:
        tier: "exact" (the same gradients up to float rounding), "precision" (other number formats)
            or "recipe" (something else is trained).
        part: what :meth:`apply` is given.

            - "config": the config, before anything is made from it
            - "model": the model, before DDP is around it
            - "optimizer": the optimizer, with its model's parameters
            - "loader": the function that makes the training loader of a config
            - "evaluation": the model, before it is evaluated; its forward is put back afterwards
        key: the config key that turns it on; "" if Detectron2's own keys do all of it.
        off: the key's default, which turns it off. True or False, names in a list, or None for a
            positive integer: its type decides which other values are right.
        needs: "gpu" and "ranks" if it saves nothing on a CPU, or on one rank; "float16" if a GPU
            computes in it; "evaluation" if an evaluation needs other memory with it.
        changes: what it changes in training, after "changes"; for the tiers precision and recipe.
    """

    tier: str = "exact"
    part: str = "model"
    key: str = ""
    off: Any = None
    needs: frozenset[str] = frozenset()
    changes: str = ""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def check(self) -> Check:
        """The check of the key's values."""
        checks = {bool: check_bool, list: check_strings}
        return checks.get(type(self.off), or_none(check_positive_int))

    def is_on(self, cfg: CfgNode) -> bool:
        """Whether a config turns it on.

        Raises:
            ConfigError: the key has a value that cannot work.
        """
        value = value_of(cfg, self.key) if self.key else self.off
        self.check(self.key, value)
        return bool(value)

    def suggest(self, job: Any, model: nn.Module) -> Any:
        """The key's value that a plan tries; None if it cannot help, or in no plan.

        Args:
            job: a :class:`~d2_memfit.Job`.
            model: the job's model, which may have no values. It decides, and not the names in a
                config, so that jobs of all kinds are offered the same.
        """
        return None

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        """The config keys, and their values, that a plan tries; none if there is nothing to do."""
        value = self.suggest(job, model)
        return {} if value is None else {self.key: value}

    def apply(self, part: Any, value: Any) -> Any:
        """Apply the technique with a value of its key; return the part to use: the same or another.

        Raises:
            ConfigError: it cannot work on this part. The message names the key.
        """
        return part
