"""Renting on Vast: every way out of it has an id, or is certain, or says that it is not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock
from pennypod.errors import (
    AmbiguousError,
    AuthError,
    FundsError,
    InputError,
    InvalidError,
    NoCapacityError,
    OfferGoneError,
    ProviderError,
    RateLimitedError,
    TransientError,
)
from pennypod.model.ids import Lease
from pennypod.model.image import RegistryLogin
from pennypod.model.offer import Offer, Order
from pennypod.providers.base import AttachesKeys
from pennypod.providers.http import Http
from pennypod.providers.vast import DEFAULT_IMAGE, VastProvider, onstart_script
from scripted_api import KEY, Answer, ScriptedApi, scripted_api
from vast_shapes import CREATE_FIELDS

CREATE = "PUT /api/v0/asks/4242/"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0o pennypod demo-1201-abcde"
LEASE = Lease("demo-1201-abcde", 1, 1_764_610_000, "abcde").name


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


@pytest.fixture
def vast(api: ScriptedApi) -> VastProvider:
    clock = FakeClock()
    return VastProvider(Http("vast", api.url, KEY, clock), clock)


def offer(**details: Any) -> Offer:
    return Offer("vast", "4242", "12", "RTX 4090", 1, 304_167, 40.0, details=details)


def order(**changes: Any) -> Order:
    values: dict[str, Any] = {
        "name": LEASE,
        "image": "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        "disk_gb": 40.0,
        "public_key": PUBLIC_KEY,
        "deadline": 1_764_610_000,
        "env": {"A": "b c"},
    }
    return Order(**(values | changes))


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_login_goes_along_with_its_image_and_into_no_message(api: ScriptedApi, vast: VastProvider) -> None:
    login = RegistryLogin("ghcr.io", "pods", "canary-51c7")
    image = f"ghcr.io/me/golden@sha256:{'5' * 64}"
    api.on(CREATE, Answer(400, {"success": False, "error": "invalid_args", "msg": "bad login canary-51c7"}))
    with pytest.raises(InvalidError) as refused:
        vast.rent(offer(), order(image=image, login=login))
    assert "canary-51c7" not in str(refused.value)
    body = api.asked[0].body
    assert (body["image"], body["image_login"]) == (image, "-u pods -p canary-51c7 ghcr.io")
    assert set(body) <= set(CREATE_FIELDS)


def test_a_login_that_vast_would_part_in_the_wrong_place_rents_nothing(api: ScriptedApi, vast: VastProvider) -> None:
    with pytest.raises(InvalidError, match="no blanks"):
        vast.rent(offer(), order(login=RegistryLogin("ghcr.io", "pods", "two words")))
    assert api.asked == []


def test_the_create_call_field_by_field(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(CREATE, Answer(200, {"success": True, "new_contract": 5678, "instance_api_key": "secret"}))
    assert vast.rent(offer(), order()) == "5678"
    (asked,) = api.asked
    onstart = asked.body.pop("onstart")
    assert asked.body == {
        "client_id": "me",
        "image": "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        "disk": 40.0,
        "label": LEASE,
        "env": {"A": "b c"},
        "runtype": "ssh_direc ssh_proxy",
        "target_state": "running",
        "cancel_unavail": True,
    }
    assert "touch ~/.no_auto_tmux" in onstart.splitlines()
    assert PUBLIC_KEY in onstart
    assert asked.headers["content-type"] == "application/json"


def test_every_field_is_one_of_the_specification(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(CREATE, Answer(200, {"success": True, "new_contract": 5678}))
    vast.rent(offer(), order())
    for name, value in api.asked[0].body.items():
        assert isinstance(value, CREATE_FIELDS[name]), name
    assert "price" not in api.asked[0].body  # a price would make it interruptible


def test_without_an_image_it_is_one_that_fits_every_driver(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(CREATE, Answer(200, {"success": True, "new_contract": 1}))
    vast.rent(offer(), order(image=""))
    assert api.asked[0].body["image"] == DEFAULT_IMAGE


def test_the_disk_is_what_the_offer_was_priced_for(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(CREATE, Answer(200, {"success": True, "new_contract": 1}))
    vast.rent(offer(), order(disk_gb=1))
    assert api.asked[0].body["disk"] == 40


def test_a_template_of_the_account_stands_in_the_images_place(api: ScriptedApi, vast: VastProvider) -> None:
    api.on(CREATE, Answer(200, {"success": True, "new_contract": 1}))
    vast.rent(offer(), order())
    vast.rent(offer(), order(image="template:4e17788f74f075dd9aab7d0d4427968f"))
    plain, body = (asked.body for asked in api.asked)
    assert body == {**plain, "image": None, "template_hash_id": "4e17788f74f075dd9aab7d0d4427968f"}
    assert set(body) <= set(CREATE_FIELDS)


@pytest.mark.parametrize(
    ("changes", "details", "error"),
    [
        ({"name": "not a lease"}, {}, InvalidError),
        ({"image": "template:"}, {}, InputError),
        ({"env": {"BAD NAME": "x"}}, {}, InvalidError),
        ({"env": {"A": "two\nlines"}}, {}, InvalidError),
        ({"env": {"A": "x" * 40_000}}, {}, InvalidError),
        ({"public_key": "ssh-rsa " + "A" * 5000}, {}, InvalidError),
        ({}, {"cuda_max_good": 12.2}, NoCapacityError),
        ({}, {"end_date": 1_764_609_000.0}, OfferGoneError),
    ],
)
def test_what_cannot_work_is_not_even_asked_for(
    api: ScriptedApi, vast: VastProvider, changes: dict[str, Any], details: dict[str, Any], error: type[ProviderError]
) -> None:
    with pytest.raises(error):
        vast.rent(offer(**details), order(**changes))
    assert api.asked == []


def test_the_start_script_lets_the_key_in_once_and_quotes_what_it_is_given(tmp_path: Path) -> None:
    script = onstart_script(order(env={"A": "it's $HOME"})).replace("/etc/environment", str(tmp_path / "environment"))
    script = script.replace("/etc/ssh/", f"{tmp_path}/").replace("sleep 2", "exit")
    for _ in range(2):  # Vast runs it again at every start
        subprocess.run(["sh", "-ec", script], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    assert (tmp_path / ".no_auto_tmux").exists()
    keys = tmp_path / ".ssh" / "authorized_keys"
    assert keys.read_text() == PUBLIC_KEY + "\n"
    assert keys.stat().st_mode & 0o077 == 0
    assert (tmp_path / "environment").read_text().splitlines()[0] == 'A="it\'s $HOME"'


# --- ways out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {"success": True, "new_contract": 5678}),
        Answer(200, {"success": True, "new_contract": "5678"}),
        Answer(200, {"success": False, "error": "bid_too_low", "msg": "stopped", "new_contract": 5678}),
        Answer(400, {"success": False, "error": "invalid_args", "msg": "credit", "new_contract": 5678}),
        Answer(410, {"success": False, "error": "no_such_ask", "new_contract": 5678}),
        Answer(404, {"success": False, "error": "auth_error", "new_contract": 5678}),
    ],
    ids=lambda answer: f"{answer.status}-{answer.body.get('error', 'fine')}",
)
def test_an_id_is_ours_whatever_else_the_answer_says(api: ScriptedApi, vast: VastProvider, answer: Answer) -> None:
    api.on(CREATE, answer)
    assert vast.rent(offer(), order()) == "5678"


REFUSALS = [
    (
        404,
        {"success": False, "error": "no_such_ask", "msg": "error 404/3603: no_such_ask", "ask_id": 4242},
        OfferGoneError,
    ),
    (
        404,
        {"success": False, "error": "invalid_args", "msg": "error 404/3603: no_such_ask Instance type"},
        OfferGoneError,
    ),
    (410, {"success": False, "error": "no_such_ask", "msg": "Offer 4242 is no longer available"}, OfferGoneError),
    (404, {"success": False, "error": "auth_error", "msg": "Invalid user key"}, AuthError),
    (403, {"success": False, "error": "auth_error", "msg": "This action requires login."}, AuthError),
    (401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}, AuthError),
    (
        400,
        {"success": False, "error": "invalid_args", "msg": "error 400/3609: billing problem, add a card"},
        FundsError,
    ),
    (400, {"success": False, "error": "insufficient_credit", "msg": "You lack credit."}, FundsError),
    (400, {"success": False, "error": "missing_billing", "msg": "see the billing page."}, FundsError),
    (400, {"success": False, "error": "spend_rate_limit", "msg": "limit for new accounts"}, FundsError),
    (411, {"success": False, "error": "x", "msg": "insufficient credit"}, FundsError),
    (200, {"success": False, "error": "insufficient_credit", "msg": "You lack credit."}, FundsError),
    (400, {"success": False, "error": "invalid_args", "msg": "blacklisted host"}, InvalidError),
    (
        400,
        {"success": False, "error": "invalid_args", "msg": "insufficient disk space, account suspended"},
        InvalidError,
    ),
    (400, {"success": False, "error": "invalid_price", "msg": "stale quote"}, InvalidError),
    (403, {"success": False, "error": "invalid_args", "msg": "Offer 4242 is not your own"}, InvalidError),
    (200, {"success": False, "error": "resources_unavailable", "msg": "no free GPU"}, NoCapacityError),
    (429, {"detail": "API requests too frequent: endpoint threshold=4.5"}, RateLimitedError),
    (400, "<html>bad request</html>", InvalidError),
]


@pytest.mark.parametrize(("status", "body", "error"), REFUSALS)
def test_a_refusal_is_certain_and_has_its_error(
    api: ScriptedApi, vast: VastProvider, status: int, body: Any, error: type[ProviderError]
) -> None:
    api.on(CREATE, Answer(status, body))
    with pytest.raises(error) as caught:
        vast.rent(offer(), order())
    assert type(caught.value) is error
    assert len(api.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {"success": True}),
        Answer(200, {}),
        Answer(200, {"success": True, "new_contract": None}),
        Answer(200, {"success": True, "new_contract": "soon"}),
        Answer(200, {"success": True, "new_contract": -1}),
        Answer(200, {"success": True, "new_contract": True}),
        Answer(200, {"success": False, "error": "brand_new_trouble", "msg": "something happened"}),
        Answer(200, "fine"),
        Answer(500, {"success": False, "error": "server_error"}),
        Answer(503, {"success": False, "new_contract": 5678}),
        Answer(504, "<html>gateway timeout</html>"),
        Answer(408, {"error": "timeout"}),
        Answer(fault="drop"),
        Answer(200, {"success": True, "new_contract": 5678}, fault="half"),
    ],
    ids=lambda answer: f"{answer.status}{answer.fault}",
)
def test_what_may_have_happened_is_ambiguous_and_asked_once(
    api: ScriptedApi, vast: VastProvider, answer: Answer
) -> None:
    api.on(CREATE, answer)
    with pytest.raises(AmbiguousError):
        vast.rent(offer(), order())
    assert len(api.asked) == 1


def test_without_a_connection_nothing_was_rented() -> None:
    clock = FakeClock()
    with pytest.raises(TransientError):
        VastProvider(Http("vast", "http://127.0.0.1:9", KEY, clock), clock).rent(offer(), order())


def test_after_a_429_the_next_create_keeps_its_distance(api: ScriptedApi) -> None:
    clock = FakeClock()
    vast = VastProvider(Http("vast", api.url, KEY, clock), clock)
    api.on(
        CREATE, Answer(429, {"detail": "x"}, {"Retry-After": "12"}), Answer(200, {"success": True, "new_contract": 1})
    )
    with pytest.raises(RateLimitedError):
        vast.rent(offer(), order())
    before = clock.now()
    assert vast.rent(offer(), order()) == "1"
    assert clock.now() - before == pytest.approx(12, abs=0.1)


@pytest.mark.parametrize("bad", ["", "12/../13", "12?x=1", "\u0661\u0662", "-3"])
def test_an_id_is_a_number_before_it_goes_into_a_path(api: ScriptedApi, vast: VastProvider, bad: str) -> None:
    for call in (vast.pod, vast.destroy, lambda pod: vast.attach_key(pod, PUBLIC_KEY)):
        with pytest.raises(InvalidError):
            call(bad)
    assert api.asked == []


# --- the key of the run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, {"success": True, "msg": "SSH key added to instance.", "key": "{}"}),
        Answer(200, {"success": False, "msg": "SSH key already associated with instance."}),
    ],
)
def test_a_key_is_attached_through_the_instance_and_twice_is_fine(
    api: ScriptedApi, vast: VastProvider, answer: Answer
) -> None:
    assert isinstance(vast, AttachesKeys)
    api.on("POST /api/v0/instances/5678/ssh/", answer)
    vast.attach_key("5678", PUBLIC_KEY)
    assert api.asked[0].body == {"ssh_key": PUBLIC_KEY}


def test_a_key_that_is_refused_is_an_error(api: ScriptedApi, vast: VastProvider) -> None:
    api.on("POST /api/v0/instances/5678/ssh/", Answer(400, {"success": False, "error": "no_ssh_key"}))
    with pytest.raises(InvalidError):
        vast.attach_key("5678", PUBLIC_KEY)
