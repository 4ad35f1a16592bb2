"""Coroutines that a thread runs."""

import asyncio

import pytest

from rl_train.engines.event_loop import EventLoop


async def after(seconds: float, error: Exception | None = None) -> float:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return seconds


async def both() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(after(0.001, ValueError("the first")))
        group.create_task(after(60.0))


def test_results_and_the_first_error_of_a_group() -> None:
    loop = EventLoop("test")
    assert loop.run(after(0.0)) == 0.0
    with pytest.raises(ValueError, match="the first"):
        loop.run(both())
    loop.close()
