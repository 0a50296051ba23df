"""The orchestrator's pure parts: who is let in, what is spent, how fast, who may press buttons, how it is set up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import InputError
from pennypod.ledger import AttemptRecord, AttemptState
from pennypod.orchestrator.config import load_config
from pennypod.orchestrator.limits import Buckets, Rate
from pennypod.orchestrator.scheduling import Limits, Place, choose
from pennypod.orchestrator.sessions import SESSION_S, Sessions
from pennypod.orchestrator.spend import month_start, spend
from pennypod.orchestrator.views import duration

NOON = 1_764_590_400.0  # 2025-12-01 12:00 UTC


# --- letting in -------------------------------------------------------------------------------------------------------


def place(run: str, job: str = "demo", provider: str = "auto", priority: int = 5, received: float = 0.0) -> Place:
    return Place(run, job, provider, priority, received)


def names(places: list[Place]) -> list[str]:
    return [item.run for item in places]


def test_the_highest_priority_goes_first_then_who_came_first() -> None:
    waiting = [place("c", received=3), place("a", received=1), place("urgent", priority=9, received=9)]
    assert names(choose(waiting, [], Limits(running=2))) == ["urgent", "a"]


def test_a_job_at_its_limit_holds_up_nobody_behind_it() -> None:
    running = [place("r1"), place("r2")]
    waiting = [place("same", received=1), place("other", job="fdi", received=2)]
    assert names(choose(waiting, running, Limits(running=8, per_job=2))) == ["other"]


def test_a_provider_at_its_limit_takes_no_more() -> None:
    limits = Limits(running=8, per_job=8, per_provider={"vast": 1})
    waiting = [place("v1", provider="vast"), place("v2", provider="vast"), place("l1", provider="local")]
    assert sorted(names(choose(waiting, [], limits))) == ["l1", "v1"]


PLACES = st.lists(
    st.builds(
        Place,
        run=st.uuids().map(str),
        job=st.sampled_from(["a", "b", "c"]),
        provider=st.sampled_from(["vast", "local"]),
        priority=st.integers(0, 9),
        received=st.floats(0, 100),
    ),
    max_size=20,
)


@given(PLACES, PLACES, st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
def test_no_limit_is_ever_exceeded_and_no_room_is_left_unused(
    waiting: list[Place], running: list[Place], most: int, per_job: int, vast: int
) -> None:
    limits = Limits(running=most, per_job=per_job, per_provider={"vast": vast})
    chosen = choose(waiting, running, limits)
    assert len(set(names(chosen))) == len(chosen)
    after = running + chosen

    def fits(item: Place, among: list[Place]) -> bool:
        same_job = sum(other.job == item.job for other in among)
        same_provider = sum(other.provider == item.provider for other in among)
        return len(among) < most and same_job < per_job and same_provider < limits.for_provider(item.provider)

    for number, item in enumerate(chosen):
        assert fits(item, running + chosen[:number])
    left = [item for item in waiting if item not in chosen]
    assert not any(fits(item, after) for item in left)


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    buckets = Buckets(Rate(burst=3, per_second=0.5))
    assert [buckets.take("a", 0) for _ in range(4)] == [0, 0, 0, 2]
    assert buckets.take("a", 2.1) == 0
    assert buckets.take("b", 2.1) == 0, "callers do not share"


def test_buckets_forget_the_longest_unused_caller() -> None:
    buckets = Buckets(Rate(burst=1, per_second=0.001), most_callers=2)
    for caller in ("a", "b", "c"):
        assert buckets.take(caller, 0) == 0
    assert buckets.take("c", 0) > 0
    assert buckets.take("a", 0) == 0, "forgotten, so it starts anew"


# --- money ------------------------------------------------------------------------------------------------------------


def attempt(began: float, hours: float | None, price: int = 1_000_000) -> AttemptRecord:
    """One that computed from the create on for so many hours, or that still does."""
    return AttemptRecord(
        id=1,
        run="demo-1201-abcde",
        attempt=1,
        lease_name="pennypod-demo-1201-abcde-a1-t1-nabcde",
        provider="fake",
        offer_id="o",
        machine_id="m",
        gpu="CPU",
        gpu_count=1,
        price_micros_per_h=price,
        renter="1:1",
        state=AttemptState.READY if hours is None else AttemptState.GONE,
        intended=began,
        pod_id="p",
        rented=began,
        computing_from=began,
        computing_seen=began,
        gone=None if hours is None else began + hours * 3600,
    )


def test_what_was_spent_and_what_leaving_it_on_would_have_cost() -> None:
    now = month_start(NOON) + 10 * 86_400 + 6 * 3600
    spent = spend([attempt(now - 86_400 * 3, 4), attempt(now - 3600, None), attempt(now - 8 * 3600, 4)], now)
    assert spent.month == pytest.approx(9_000_000, abs=3)
    assert spent.today == pytest.approx(3_000_000, abs=3), "since midnight: one hour, and two of the four"
    assert spent.burn_per_h == 1_000_000
    assert spent.always_on == 246_000_000
    assert spent.saved == spent.always_on - spent.month
    assert spent.saved_share == pytest.approx(1 - 9 / 246)


def test_a_month_that_begins_in_the_midst_of_a_run_counts_its_own_part() -> None:
    began = month_start(NOON)
    spent = spend([attempt(began - 2 * 3600, 3)], began + 7200)
    assert spent.month == pytest.approx(1_000_000, abs=3)


def test_without_anything_rented_nothing_is_claimed_to_be_saved() -> None:
    spent = spend([], NOON)
    assert (spent.month, spent.always_on, spent.saved, spent.saved_share) == (0, None, None, None)


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (-5, 12, 187, 7500)] == ["0s", "12s", "3m07s", "2h05m"]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_is_good_until_it_expires_and_only_under_its_token() -> None:
    sessions = Sessions("admin")
    cookie = sessions.new(NOON)
    assert sessions.is_good(cookie, NOON)
    assert not sessions.is_good(cookie, NOON + SESSION_S + 1)
    assert not Sessions("changed").is_good(cookie, NOON)
    for forged in (None, "", "x", "9999999999.abc.def", cookie[:-1] + ("0" if cookie[-1] != "0" else "1")):
        assert not sessions.is_good(forged, NOON)


def test_a_form_belongs_to_its_session() -> None:
    sessions = Sessions("admin")
    mine, yours = sessions.new(NOON), sessions.new(NOON)
    assert sessions.form_fits(mine, sessions.form_token(mine))
    assert not sessions.form_fits(mine, sessions.form_token(yours))


def test_without_an_admin_token_nobody_can_log_in() -> None:
    sessions = Sessions(None)
    assert not sessions.can_log_in
    assert not sessions.token_fits("")
    assert not sessions.is_good(sessions.new(NOON), NOON)


# --- set-up -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "group_vars").mkdir()
    for name in ("train.yml", "ansible.cfg"):
        (tmp_path / name).touch()
    return tmp_path


def test_keys_are_taken_out_of_the_environment(root: Path) -> None:
    (root / "serve.yml").write_text("sources: {hub: {kind: github, secret_env: HUB, job: demo}}")
    environment = {
        "PENNYPOD_WEBHOOK_SECRET": "one, two\nthree",
        "PENNYPOD_ADMIN_TOKEN": "admin",
        "PENNYPOD_SERVE_CONFIG": str(root / "serve.yml"),
        "HUB": "hub",
        "VAST_API_KEY": "stays, since playbooks need it",
    }
    config = load_config(environment, root)
    assert config.secrets == ("one", "two", "three")
    assert config.source_secrets == {"hub": ("hub",)}
    assert set(environment) == {"PENNYPOD_SERVE_CONFIG", "VAST_API_KEY"}
    for key in ("three", "admin", "'hub',"):
        assert key not in repr(config)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("limits: {running: 0}", "limits.running"),
        ("unheard: 1", "unheard"),
        ("- a list", "the file"),
        ("{", "not valid YAML"),
        ("sources: {hub: {kind: github, secret_env: HUB, job: demo}}", "HUB is not set"),
        ("notify: {ops: {kind: slack, url_env: SLACK}}", "SLACK is not set"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_line(root: Path, file: str, said: str) -> None:
    (root / "serve.yml").write_text(file)
    environment = {"PENNYPOD_WEBHOOK_SECRET": "x", "PENNYPOD_SERVE_CONFIG": str(root / "serve.yml")}
    with pytest.raises(InputError, match=said):
        load_config(environment, root)


def test_without_a_secret_nothing_is_served(root: Path) -> None:
    with pytest.raises(InputError, match="set PENNYPOD_WEBHOOK_SECRET"):
        load_config({"PENNYPOD_WEBHOOK_SECRET": " , "}, root)


def test_outside_the_repository_nothing_is_served(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no train.yml"):
        load_config({"PENNYPOD_WEBHOOK_SECRET": "x"}, tmp_path)
