"""Doing at once what many ask for at the same time. Floor 3; the work itself is passed in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST = 256


class Batches(Generic[_Item, _Result]):
    """Hands `work`, in a thread, all items that have come while it was busy with those before.

    `work` returns one result, or the exception to raise, per item and in their order; what it raises itself, all get.
    Used from one event loop only.
    """

    def __init__(self, work: Callable[[Sequence[_Item]], Sequence[_Result | Exception]]) -> None:
        self._work = work
        self._waiting: list[tuple[_Item, asyncio.Future[_Result]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def put(self, item: _Item) -> _Result:
        answer: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work_off())
        return await answer

    async def _work_off(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            for (_, answer), result in zip(batch, await self._results([item for item, _ in batch]), strict=True):
                if answer.cancelled():  # whoever asked has hung up; the work is done all the same
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)
        self._worker = None

    async def _results(self, items: Sequence[_Item]) -> Sequence[_Result | Exception]:
        try:
            return await asyncio.to_thread(self._work, items)
        except Exception as exc:  # noqa: BLE001 - it is raised where the answers are awaited
            return [exc] * len(items)
