"""Work that is done at once for all who ask at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from pennypod.orchestrator.batching import Batches


def test_what_comes_during_the_work_is_done_together_afterwards() -> None:
    seen: list[list[int]] = []
    begun, all_have_come = threading.Event(), threading.Event()

    def work(items: Sequence[int]) -> list[int | Exception]:
        seen.append(list(items))
        begun.set()
        assert all_have_come.wait(10)
        return [item * 10 for item in items]

    async def ask() -> list[int]:
        batches = Batches(work)
        first = asyncio.create_task(batches.put(1))
        assert await asyncio.to_thread(begun.wait, 10)
        others = [asyncio.create_task(batches.put(item)) for item in (2, 3, 4)]
        await asyncio.sleep(0)
        all_have_come.set()
        return [await task for task in (first, *others)]

    assert asyncio.run(ask()) == [10, 20, 30, 40]
    assert seen == [[1], [2, 3, 4]]


def test_each_gets_its_own_refusal_and_all_get_a_failure() -> None:
    def work(items: Sequence[str]) -> list[str | Exception]:
        if "disk full" in items:
            raise OSError("no space left")
        return [KeyError(item) if item == "bad" else item for item in items]

    async def ask(*items: str) -> list[str | BaseException]:
        batches = Batches(work)
        return await asyncio.gather(*(batches.put(item) for item in items), return_exceptions=True)

    good, bad = asyncio.run(ask("good", "bad"))
    assert good == "good"
    assert isinstance(bad, KeyError)
    assert all(isinstance(answer, OSError) for answer in asyncio.run(ask("disk full", "other")))


def test_one_who_hangs_up_holds_up_nobody() -> None:
    done: list[int] = []

    def work(items: Sequence[int]) -> list[int | Exception]:
        done.extend(items)
        return list(items)

    async def ask() -> int:
        batches = Batches(work)
        gone = asyncio.create_task(batches.put(1))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await batches.put(2)

    assert asyncio.run(ask()) == 2
    assert done == [1, 2]
