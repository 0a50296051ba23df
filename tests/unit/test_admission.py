"""A pod is rented only when its worst case keeps every cap, beside all that is spent and committed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from hypothesis import given, settings
from hypothesis import strategies as st
from pennypod.errors import BudgetError, InputError, LadderExhaustedError, TransientError
from pennypod.ledger import Ledger, Outcome, RunRecord, open_ledger
from pennypod.model.admission import Asked, Caps, Committed, admit
from pennypod.model.money import cost_micros
from pennypod.planning import caps_from
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.settings import Settings

NOW = 1_764_600_000.0
HOUR = 3600
DEAR = 1_000_000  # a dollar per hour


@pytest.mark.parametrize(
    ("caps", "committed", "named"),
    [
        (Caps(run=999_999), Committed(), "max_cost_usd "),
        (Caps(run=1_499_999), Committed(run=500_000), "max_cost_usd "),
        (Caps(job=1_999_999), Committed(run=400_000, job=600_000), "max_cost_usd_per_job"),
        (Caps(day=1_499_999), Committed(day=500_000), "max_cost_usd_per_day"),
        (Caps(account=1_499_999), Committed(run=999, account=500_000), "max_cost_usd_account"),
    ],
)
def test_a_cap_that_would_break_is_named_with_what_is_committed_and_what_to_do(
    caps: Caps, committed: Committed, named: str
) -> None:
    with pytest.raises(BudgetError) as caught:
        admit(Asked(1_000_000, caps), committed)
    assert f"it would break {named}" in caught.value.message
    assert "raise it" in caught.value.message
    details = caught.value.details
    assert details["committed_micros"] + details["worst_case_micros"] > details["cap_micros"]


def test_the_balance_is_a_cap_that_nobody_has_to_set() -> None:
    with pytest.raises(BudgetError, match=r"the balance .* add credit"):
        admit(Asked(1_000_000, balance_micros=1_200_000), Committed(balance=300_000))
    assert admit(Asked(1_000_000, balance_micros=1_300_000), Committed(balance=300_000)) == 1_000_000


def test_what_a_run_may_cost_in_all_is_the_least_that_any_cap_leaves() -> None:
    caps = Caps(run=5_000_000, job=4_000_000, day=9_000_000, account=2_000_000)
    assert admit(Asked(1_000_000, caps), Committed(run=300_000, job=500_000, account=100_000)) == 2_200_000
    assert admit(Asked(1_000_000, Caps(price=1)), Committed()) is None


amounts = st.integers(0, 5_000_000)
caps_drawn = st.builds(
    Caps, run=st.none() | amounts, job=st.none() | amounts, day=st.none() | amounts, account=st.none() | amounts
)


@given(caps_drawn, amounts, st.builds(Committed, amounts, amounts, amounts, amounts, amounts), st.none() | amounts)
def test_whoever_is_admitted_may_spend_the_worst_case_and_no_more_than_the_allowance(
    caps: Caps, worst: int, committed: Committed, balance: int | None
) -> None:
    try:
        allowance = admit(Asked(worst, caps, balance), committed)
    except BudgetError as exc:
        broken = exc.details["committed_micros"] + worst - exc.details["cap_micros"]
    else:
        broken = None
    if broken is not None:
        assert broken > 0
        return
    assert allowance is None or allowance >= committed.run + worst
    if allowance is not None:
        assert caps.run is None or allowance <= caps.run
        assert caps.job is None or committed.job + allowance <= caps.job
        assert caps.day is None or committed.day + allowance <= caps.day
        assert balance is None or committed.balance + allowance - committed.run <= balance


# --- against a ledger -------------------------------------------------------------------------------------------------


class World:
    """Runs of two jobs at two providers, on one ledger."""

    def __init__(self, home: Path) -> None:
        self.clock = FakeClock(NOW)
        self.providers = {name: FakeProvider(self.clock, name) for name in ("one", "two")}
        self.settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
        self.ledger: Ledger = open_ledger(self.settings)
        self.rental = Rental(self.providers, self.ledger, self.clock)
        self.made = 0

    def open_run(self, job: str = "demo", worst_micros: int = 0) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz"
        run = f"{job}-1201-{letters[self.made // 26]}{letters[self.made % 26]}aaa"
        self.made += 1
        self.ledger.open_run(RunRecord(run, job, "1:1", self.clock.now(), "/nowhere"))
        self.ledger.set_plan(run, deadline=self.clock.now() + HOUR, worst_case_micros=worst_micros)
        return run

    def rent(self, run: str, caps: Caps = Caps(), provider: str = "one", price: int = DEAR, **more: Any) -> Tenancy:  # noqa: B008
        deadline = self.ledger.run(run).deadline
        assert deadline is not None
        request = RentRequest(
            run,
            more.pop("offers", [offer(1, price, provider)]),
            {},
            20,
            deadline,
            "key",
            renter="1:1",
            caps=caps,
            **more,
        )
        return self.rental.rent(request, FakeLogin(), lambda *_a, **_k: None, lambda: None)

    def end(self, run: str) -> None:
        for attempt in self.ledger.attempts(run):
            self.rental.destroy(attempt, outcome="done", reason="over", report=lambda *_a, **_k: None)
        self.ledger.close_run(run, Outcome.SUCCEEDED, "over", self.clock.now())

    def created(self) -> int:
        return sum(len(provider.created) for provider in self.providers.values())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


def refused(world: World, run: str, caps: Caps, **more: Any) -> str:
    """Why nothing was rented."""
    before = world.created()
    with pytest.raises(LadderExhaustedError) as caught:
        world.rent(run, caps, **more)
    assert world.created() == before
    assert {rung["code"] for rung in caught.value.details["attempts"]} == {"over_budget"}
    assert [record.code for record in world.ledger.passed_over(run)] == ["over_budget"]
    return caught.value.message


def test_open_runs_of_the_job_count_with_their_worst_case_and_closed_ones_with_their_cost(world: World) -> None:
    caps = Caps(job=1_500_000)
    first = world.open_run()
    world.rent(first, caps)
    assert "max_cost_usd_per_job ($1.5000): runs of this job have cost or may cost $1.0000" in refused(
        world, world.open_run(), caps
    )
    world.rent(world.open_run("other"), caps)
    world.clock.sleep(HOUR / 4)
    world.end(first)
    assert world.rent(world.open_run(), caps).created


def test_the_day_covers_all_jobs_and_ends_after_24_hours(world: World) -> None:
    caps = Caps(day=1_000_000)
    first = world.open_run()
    world.rent(first, caps)
    world.clock.sleep(HOUR - 60)
    world.end(first)
    assert "max_cost_usd_per_day" in refused(world, world.open_run("other"), caps)
    world.clock.sleep(24 * HOUR)
    assert world.rent(world.open_run("other"), caps).created


def test_an_account_is_one_providers_open_pods(world: World) -> None:
    caps = Caps(account=1_500_000)
    first = world.open_run()
    world.rent(first, caps)
    second = world.open_run()
    assert "max_cost_usd_account" in refused(world, second, caps)
    assert world.rent(second, caps, provider="two").created
    world.end(first)
    assert world.rent(world.open_run(), caps).created


def test_the_next_offer_may_fit_where_one_does_not(world: World) -> None:
    run = world.open_run()
    offers = [offer(1, 3 * DEAR, "one"), offer(2, DEAR, "two")]
    assert world.rent(run, Caps(run=1_000_000), offers=offers).attempt.provider == "two"
    (passed,) = world.ledger.passed_over(run)
    assert (passed.provider, passed.code) == ("one", "over_budget")


def test_a_balance_that_open_pods_will_eat_up_is_not_there_for_another(world: World) -> None:
    world.providers["one"].balance = 1_800_000
    world.rent(world.open_run())
    assert "the balance ($1.8000): open pods there may still take $1.0000" in refused(world, world.open_run(), Caps())


def test_a_balance_that_cannot_be_read_keeps_nobody_from_renting(world: World) -> None:
    world.providers["one"].balance_faults = [TransientError("502")]
    assert world.rent(world.open_run()).created


def test_a_run_keeps_its_claim_between_two_attempts(world: World) -> None:
    caps = Caps(day=1_600_000)
    first = world.open_run(worst_micros=1_000_000)
    world.rent(first, caps)
    attempt = world.ledger.attempts(first)[0]
    world.rental.destroy(attempt, outcome="gate_failed", reason="bad", report=lambda *_a, **_k: None)
    assert "max_cost_usd_per_day" in refused(world, world.open_run(), caps)
    assert world.rent(first, caps).created


def test_a_pod_that_turns_out_dearer_than_the_price_cap_is_given_back(world: World) -> None:
    world.providers["one"].dearer = 1.5
    run = world.open_run()
    with pytest.raises(LadderExhaustedError, match=r"asks \$1.5000/h now, over max_price_usd_per_h"):
        world.rent(run, Caps(price=1_200_000))
    assert world.providers["one"].live == {}
    (attempt,) = world.ledger.attempts(run)
    assert (attempt.outcome, attempt.price_now) == ("over_budget", 1_500_000)


def test_a_pod_that_turns_out_too_dear_for_the_runs_cap_is_given_back(world: World) -> None:
    world.providers["one"].dearer = 1.5
    with pytest.raises(LadderExhaustedError, match="its caps leave"):
        world.rent(world.open_run(), Caps(run=1_200_000))
    assert world.providers["one"].live == {}
    world.providers["one"].dearer = 1.1
    assert world.rent(world.open_run(), Caps(run=1_200_000)).created


steps = st.lists(
    st.tuples(
        st.sampled_from(["rent", "rent", "rent", "end", "wait"]),
        st.sampled_from(["demo", "other"]),
        st.sampled_from(["one", "two"]),
        st.integers(1, 3 * DEAR),
    ),
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(steps, st.integers(DEAR, 4 * DEAR), st.integers(DEAR, 6 * DEAR), st.integers(DEAR, 4 * DEAR))
def test_whatever_is_rented_in_whatever_order_no_cap_is_ever_broken(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, str, str, int]],
    job: int,
    day: int,
    account: int,
) -> None:
    world = World(tmp_path_factory.mktemp("admission"))
    caps = Caps(job=job, day=day, account=account)
    live: list[str] = []
    for what, name, provider, amount in steps:
        if what == "rent":
            run = world.open_run(name)
            try:
                world.rent(run, caps, provider, amount)
            except LadderExhaustedError:
                assert world.ledger.attempts(run) == []
            else:
                live.append(run)
        elif what == "end" and live:
            world.end(live.pop(0))
        else:
            world.clock.sleep(amount / DEAR * 600)
        # At worst, every open pod lives to its deadline.
        worst: dict[tuple[str, str], int] = {}
        for record in world.ledger.runs():
            for attempt in world.ledger.attempts(record.run):
                full = attempt.cost_micros(0) if attempt.final else cost_micros(attempt.price_now, HOUR)
                for key in (
                    ("job", record.job),
                    ("day", ""),
                    *((("account", attempt.provider),) * (not attempt.final)),
                ):
                    worst[key] = worst.get(key, 0) + full
        limits = {"job": job, "day": day, "account": account}
        assert all(amount <= limits[kind] for (kind, _), amount in worst.items()), worst
    world.ledger.close()


ASK = """
import sys
from pathlib import Path
from fakes import offer
from pennypod.errors import BudgetError
from pennypod.ledger import open_ledger
from pennypod.model.admission import Asked, Caps
from pennypod.model.ids import Lease
from pennypod.settings import Settings

home, run = sys.argv[1:]
ledger = open_ledger(Settings(home=Path(home), database_url=f"sqlite:///{home}/ledger.sqlite3"))
ledger.run(run)
print("ready", flush=True)
sys.stdin.readline()
lease, asked = Lease(run, 1, 1_764_603_600, "aaaaa"), Asked(600_000, Caps(day=1_000_000))
try:
    ledger.open_attempt(lease, offer(1), renter="1:1", at=1_764_600_000.0, asked=asked)
except BudgetError:
    print("refused")
else:
    print("admitted")
"""


def test_of_several_that_ask_at_once_only_as_many_are_admitted_as_the_cap_allows(world: World) -> None:
    runs = [world.open_run() for _ in range(4)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    asking = [subprocess.Popen([sys.executable, "-c", ASK, str(world.settings.home), run], **pipes) for run in runs]  # type: ignore[call-overload]
    assert [process.stdout.readline() for process in asking] == ["ready\n"] * len(runs)
    for process in asking:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(process.communicate(timeout=60)[0].strip() for process in asking)
    assert said == ["admitted", "refused", "refused", "refused"]


def test_a_cap_in_dollars_is_not_negative() -> None:
    assert caps_from({"max_cost_usd": 0.5, "max_price_usd_per_h": 2}) == Caps(run=500_000, price=2_000_000)
    with pytest.raises(InputError, match="max_cost_usd_per_day is -1"):
        caps_from({"max_cost_usd_per_day": -1.0})
    with pytest.raises(InputError, match="max_cost_usd is nan: give"):
        caps_from({"max_cost_usd": float("nan")})
