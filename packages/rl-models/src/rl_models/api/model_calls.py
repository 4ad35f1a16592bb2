"""`ModelCalls`: the methods of an actor or a critic, for classes that bring the calls to the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from parallel_models import Grid
from rl_models.api.actor import Actor
from rl_models.api.critic import Critic
from rl_models.api.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class Called(Generic[P, R]):
    """A method with the arguments and the result of a model's method, which `ModelCalls.call` brings there."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self.__doc__ = method.__doc__
        self._name = method.__name__

    def __get__(self, instance: ModelCalls, owner: type[ModelCalls]) -> Callable[P, R]:
        return partial(instance.call, self._name)


class ModelCalls(ABC):
    """An actor or a critic whose methods are calls: with whole batches, on other ranks, or after a swap of models.

    Methods take, return and raise the same as in `Actor` and `Critic`. A method that a subclass of them declares by
    `dispatched` is called by its name, `call("method", ...)`.

    Attributes:
        worker_class: The class of the model: `Actor`, `Critic`, or a subclass.
        grid: The ranks that make the calls; every rank makes each call.
    """

    worker_class: type[Worker]
    grid: Grid

    @abstractmethod
    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model, and return its result."""

    predict = Called(Worker.predict)
    log_probs = Called(Actor.log_probs)
    token_statistics = Called(Actor.token_statistics)
    states = Called(Actor.states)
    load_teacher_head = Called(Actor.load_teacher_head)
    generate = Called(Actor.generate)
    values = Called(Critic.values)
    rewards = Called(Critic.rewards)
    update = Called(Worker.update)
    forward_backward = Called(Worker.forward_backward)
    optimizer_step = Called(Worker.optimizer_step)
    save_pretrained = Called(Worker.save_pretrained)
    save_adapter = Called(Worker.save_adapter)
    save_training = Called(Worker.save_training)
    wait_for_save = Called(Worker.wait_for_save)
    load_training = Called(Worker.load_training)
    stream_weights = Called(Worker.stream_weights)
    held_weights = Called(Worker.held_weights)
    offload = Called(Worker.offload)
    onload = Called(Worker.onload)


# An actor for training loops and engines: in this process, of whole batches, or on other ranks.
Policy = Actor | ModelCalls
