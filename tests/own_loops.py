# Copyright (c) the d2_memfit developers.
"""Methods ``train`` as public projects write them, for trainers that are a DefaultTrainer too."""

from detectron2.utils.events import EventStorage


class StopsEarly:
    """It may stop early, as detectree2's."""

    stops_after = -1  # an iteration

    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            try:
                self.before_train()
                for iteration in range(self.start_iter, self.max_iter):
                    self.iter = iteration
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    if iteration == self.stops_after:
                        break
                self.iter += 1
            finally:
                self.after_train()


class OnlySteps:
    """It calls no hooks."""

    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            for iteration in range(self.start_iter, self.max_iter):
                self.iter = iteration
                self.train_iteration()
                self.storage.step()

    def train_iteration(self):
        self.run_step()


class StepsItself(OnlySteps):
    """It has its own forward and backward, too."""

    def train_iteration(self):
        losses = self.model(next(self._trainer._data_loader_iter))
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self.optimizer.step()
