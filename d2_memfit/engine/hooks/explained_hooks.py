# Copyright (c) the d2_memfit developers.
"""Out-of-memory errors in hooks, explained."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Optional, TypeVar

from detectron2.engine import HookBase
from detectron2.engine.train_loop import TrainerBase

from ... import compat
from ..attempts import Recovery

__all__ = ["explains_hooks"]

_Class = TypeVar("_Class", bound=type)


def explains_hooks(cls: _Class) -> _Class:
    """Make a trainer class explain out-of-memory errors in hooks, under MEMFIT.OOM.POLICY split.

    Such hooks average weights, evaluate or write checkpoints. This is a decorator and not a base
    class, because a trainer may have two such classes with others between them.
    """
    for name in ("before_train", "after_train", "before_step", "after_step"):
        setattr(cls, name, _explaining(cls, name))
    return cls


def _explaining(cls: type, name: str) -> Callable[[Any], None]:
    own = vars(cls).get(name)

    @wraps(own or getattr(TrainerBase, name))
    def method(self: Any) -> None:
        try:
            if own is not None:
                own(self)
            else:
                getattr(super(cls, self), name)()
        except Exception as e:
            recovery: Optional[Recovery] = getattr(compat.inner_trainer(self), "recovery", None)
            if recovery is None:
                raise
            with recovery.record.explained(f"hook {_hook_of(e)}"):
                raise

    return method


def _hook_of(error: BaseException) -> str:
    """Class name of the outermost hook that an error went through."""
    traceback = error.__traceback__
    while traceback is not None:
        hook = traceback.tb_frame.f_locals.get("self")
        if isinstance(hook, HookBase):
            return type(hook).__name__
        traceback = traceback.tb_next
    return "of an unknown class"
