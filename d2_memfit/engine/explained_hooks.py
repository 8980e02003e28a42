"""Hooks in which memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional

from detectron2.engine import HookBase

from .recovery import Recovery

__all__ = ["ExplainedHooks"]

if TYPE_CHECKING:  # it is no trainer by itself, and stands before one
    from detectron2.engine.train_loop import TrainerBase as _Trainer
else:
    _Trainer = object


class ExplainedHooks(_Trainer):
    """Under MEMFIT.OOM.POLICY split, says what is known when memory runs out in a hook.

    The hook may be any: one that averages weights, evaluates, or writes checkpoints.
    """

    def before_train(self) -> None:
        with _explained(self):
            super().before_train()

    def after_train(self) -> None:
        with _explained(self):
            super().after_train()

    def before_step(self) -> None:
        with _explained(self):
            super().before_step()

    def after_step(self) -> None:
        with _explained(self):
            super().after_step()


@contextmanager
def _explained(trainer: Any) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        recovery: Optional[Recovery] = getattr(
            getattr(trainer, "_trainer", trainer), "recovery", None
        )
        if recovery is None:
            raise
        with recovery.explained(f"hook {_hook_of(e)}", [], trainer.iter):
            raise


def _hook_of(error: BaseException) -> str:
    """The class of the outermost hook that an error went through."""
    traceback = error.__traceback__
    while traceback is not None:
        hook = traceback.tb_frame.f_locals.get("self")
        if isinstance(hook, HookBase):
            return type(hook).__name__
        traceback = traceback.tb_next
    return "of an unknown class"
