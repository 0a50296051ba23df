"""The lease in a pod's name: what survives the loss of everything else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import InputError
from pennypod.model.ids import Lease, check_job_name, is_run_id, job_of_run, new_run_id, parse_lease, random_base32

BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
jobs = st.from_regex(r"[a-z][a-z0-9_]{0,39}", fullmatch=True)
runs = st.builds("{}-{:04d}-{}".format, jobs, st.integers(0, 9999), st.text(alphabet=BASE32, min_size=5, max_size=5))
leases = st.builds(
    Lease,
    run=runs,
    attempt=st.integers(0, 9999),
    deadline=st.integers(0, 36**12 - 1),
    nonce=st.text(alphabet=BASE32, min_size=5, max_size=5),
)


@given(leases)
def test_a_lease_survives_its_own_name(lease: Lease) -> None:
    assert parse_lease(lease.name) == lease


@given(leases)
def test_a_name_with_anything_around_it_is_not_ours(lease: Lease) -> None:
    for strange in (lease.name + "x", lease.name + "\n", " " + lease.name, "x" + lease.name, lease.name.upper()):
        assert parse_lease(strange) is None


@given(st.text())
def test_no_text_upsets_the_parser_and_what_it_accepts_it_would_write_again(text: str) -> None:
    lease = parse_lease(text)
    assert lease is None or parse_lease(lease.name) == lease


@given(leases, leases)
def test_two_leases_never_share_a_name(one: Lease, other: Lease) -> None:
    assert (one.name == other.name) == (one == other)


@pytest.mark.parametrize(
    "name",
    [
        "pennypod-",
        "pennypod-demo",
        "pennypod-demo-1201-k3f7q",  # a run, no attempt and no deadline
        "pennypod-demo-1201-k3f7q-a1-tabc",
        "pennypod-demo-1201-k3f7q-a1-t-nabcde",
        "pennypod-demo-1201-k3f7q-a-1-tabc-nabcde",
        "pennypod-demo-1201-k3f7q-a1-tabc-nabcd1",  # 1 is not base 32
        "Pennypod-demo-1201-k3f7q-a1-tabc-nabcde",
        "someone-elses-machine",
        "",
    ],
)
def test_near_misses_are_not_ours(name: str) -> None:
    assert parse_lease(name) is None


@given(jobs, st.floats(0, 4e9), st.randoms(use_true_random=False))
def test_a_run_id_names_its_job_and_its_utc_day(job: str, now: float, rnd: random.Random) -> None:
    run = new_run_id(job, now, rnd.randrange)
    assert is_run_id(run)
    assert job_of_run(run) == job


def test_the_day_in_a_run_id_is_utc() -> None:
    assert new_run_id("demo", 1764633599, lambda _n: 0) == "demo-1201-aaaaa"
    assert new_run_id("demo", 1764633600, lambda _n: 31) == "demo-1202-77777"


@pytest.mark.parametrize("job", ["", "Demo", "1demo", "_demo", "de-mo", "demo ", "démo", "a" * 41, "demo\n", "../demo"])
def test_job_names_that_could_not_travel_in_a_pod_name_are_refused(job: str) -> None:
    with pytest.raises(InputError) as caught:
        check_job_name(job)
    assert caught.value.code == "input"


@pytest.mark.parametrize("run", ["demo", "demo-1201", "demo-1201-ABCDE", "demo-1201-abcdef", "demo-1201-abcde "])
def test_what_is_no_run_id_is_said_to_be_none(run: str) -> None:
    assert not is_run_id(run)
    with pytest.raises(InputError):
        job_of_run(run)


def test_random_base32_uses_every_letter_the_source_can_give() -> None:
    sequence = iter(range(32))
    assert random_base32(32, lambda _n: next(sequence)) == BASE32
