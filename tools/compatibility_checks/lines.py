# Copyright (c) the d2_memfit developers.
"""The lines that a user writes to use d2_memfit in a project, as Markdown."""

import inspect
import textwrap

from .project import Project

__all__ = ["lines_of"]

_TRAINER = """\
[{tree}]({url}), `{config}`. Add to its `{script}`:

```python
from d2_memfit import MemfitMixin, fit_config


class MemfitTrainer(MemfitMixin, {trainer}):
    pass


trainer = MemfitTrainer(fit_config(cfg, trainer={trainer}))
```
"""

_LOOP = """\
[{tree}]({url}), `{config}`. It has its own training loop: [OWN_LOOP.md](OWN_LOOP.md).
A class with the code before the loop describes the job:

```python
{source}```

The loop then calls the trainer:

```python
trainer = build_trainer(Job.from_trainer({name}, cfg))
for iteration in range(start_iter, max_iter):
    trainer.run_step()
```
"""

_LAZY = """\
[{tree}]({url}), `{config}`. In its `tools/train_net.py`, replace its trainer:

```python
from functools import partial

from d2_memfit import Job
from d2_memfit.engine import build_trainer

clip = partial(torch.nn.utils.clip_grad_norm_, **cfg.train.clip_grad.params)
trainer = build_trainer(Job.from_lazy(cfg), clip_gradients=clip)
```
"""

_SEMI_SUPERVISED = """\
[{tree}]({url}), `{config}`.
Its step has two models: [OWN_LOOP.md](OWN_LOOP.md#semi-supervised-training).

```python
{source}```
"""


def lines_of(project: Project) -> str:
    facts = {"tree": project.tree, "url": project.url, "config": project.config_file}
    module, _, trainer = project.trainer.partition(":")
    if project.kind == "lazy":
        return _LAZY.format(**facts)
    if project.kind == "loop":
        from . import loops

        source = inspect.getsource(getattr(loops, project.trainer).__mro__[0])
        source = source.partition("    @classmethod\n    def train(")[0].rstrip() + "\n"
        return _LOOP.format(**facts, source=source, name=project.trainer)
    if project.memfit_trainer:
        from . import semi_supervised

        source = inspect.getsource(semi_supervised.make_trainer)
        source = "".join(source.partition("    class Trainer")[1:])
        source = textwrap.dedent(source.rpartition("    return Trainer")[0]).rstrip() + "\n"
        return _SEMI_SUPERVISED.format(**facts, source=source)
    folder = "" if project.paths[0] == "." else f"{project.paths[0]}/"
    return _TRAINER.format(**facts, script=f"{folder}{module}.py", trainer=trainer)
