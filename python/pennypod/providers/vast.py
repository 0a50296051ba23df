"""Vast.ai: a market of other people's machines. Floor 1: the HTTP API is its one outside thing.

What its API does differently from what one would expect, each with its place below: a refusal may come with status 200
and `success: false`; a wrong key looks like 404; a create may say "failed" and still have made an instance; a listing
has 25 rows per page and an old endpoint that is gone; an offer can be rented once; calls need a pause between them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pennypod import fuse, gpus, startup, vastquery
from pennypod.clock import Clock, SystemClock
from pennypod.errors import (
    AmbiguousError,
    AuthError,
    FundsError,
    InvalidError,
    NoCapacityError,
    OfferGoneError,
    ProviderError,
    TransientError,
)
from pennypod.model.ids import parse_lease
from pennypod.model.image import RegistryLogin, Repository, template_of
from pennypod.model.money import MICROS_PER_USD, usd_to_micros
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.providers.base import PriceRequest, Reach, Timing, tried
from pennypod.providers.http import Http, Pacing, Reply
from pennypod.recording import recorder
from pennypod.settings import Settings

KEY_VARIABLE = "VAST_API_KEY"
URL_VARIABLE = "VAST_URL"
DEFAULT_URL = "https://console.vast.ai"
DEFAULT_IMAGE = "vastai/pytorch:@vastai-automatic-tag"  # Vast resolves the tag to one that the host's driver can run

TIMING = Timing(
    listing_lag_s=30.0,
    absence_checks=3,
    absence_spacing_s=5.0,
    poll_s=5.0,
    start_patience_s=600.0,  # pull progress shows in status_msg and starts it anew
    start_limit_s=1800.0,
    host_keys_s=30.0,
)

# Seconds between two calls, as the service enforces them, and a little more.
SPACING_S = {
    "search": 2.1,
    "create": 4.6,
    "list": 1.1,
    "get": 2.1,
    "destroy": 3.1,
    "label": 1.1,
    "ssh": 2.1,
    "logs": 1.1,
    "snapshot": 2.1,
    "prices": 2.1,
    "user": 2.1,
    "charges": 1.1,
    "spend": 2.1,
}

HOURS_PER_MONTH = 720.0  # Vast's month, by its own arithmetic: $/GB/month over 30 days
MIN_DISK_GB = 8.0
_SEARCH_ROWS = 64
_PAGE_ROWS = 25
_MAX_PAGES = 2000
_LISTINGS = 3  # at most, when one falls short of its own count
_MAX_ONSTART = 4000
_MAX_LABEL = 256
_MAX_ENV = 32_000
_LOG_TRIES = 30
_LOG_PAUSE_S = 0.3
_LOG_ROWS = 5000

_MONEY = re.compile(r"\b(?:credits?|billing|spend|payment|funds)\b")
_BROKEN = re.compile(r"\b(?:error|failed|failure|oci runtime|permission denied|no space left)\b")
_GONE_ASK = re.compile(r"\bno such ask\b|no longer available")
_NO_CAPACITY = re.compile(r"\bresources unavailable\b|\bnot available\b|\bunavailable\b|\bno capacity\b")
_NO_INSTANCE = frozenset({"no_such_instance", "not_found"})
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COUNTRY = re.compile(r"[A-Za-z]{2}")

_STARTING = frozenset({"", "created", "loading", "rebooting", "restarting", "recycling", "scheduling"})
_AT_REST = frozenset({"exited", "stopped", "frozen"})


class VastProvider:
    """Instances on Vast.ai. Keeps nothing but the pauses between its calls."""

    def __init__(self, http: Http, clock: Clock, *, timing: Timing = TIMING) -> None:
        self._http = http
        self._clock = clock
        self._timing = timing
        self._holder: str | None = None

    @property
    def name(self) -> str:
        return "vast"

    @property
    def timing(self) -> Timing:
        return self._timing

    # --- offers -------------------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> list[Offer]:
        """The cheapest offers that fit, priced for the disk that will be rented; one for each machine and GPU count."""
        body = search_body(need)
        if body is None:
            return []
        reply = self._http.request(
            "POST", "/api/v0/bundles/", body=body, endpoint="search", final_errors=("search_quota_exceeded",)
        )
        rows = self._checked(reply, "search").get("offers")
        if not isinstance(rows, list):
            raise TransientError("vast: the search gave no list of offers")
        # A machine that fails once fails again: a ladder with the same one on every rung is none.
        found: dict[tuple[str, int], Offer] = {}
        for row in rows:
            offer = _offer(row, need) if isinstance(row, dict) else None
            if offer is None:
                continue
            same = found.setdefault((offer.machine_id, offer.gpu_count), offer)
            if offer.price_micros_per_h < same.price_micros_per_h:
                found[offer.machine_id, offer.gpu_count] = offer
        return list(found.values())

    def prepare(self, image: str, on_progress: Callable[[str], None]) -> None:
        """Nothing: Vast's hosts pull the image themselves."""

    # --- renting ------------------------------------------------------------------------------------------------------

    def rent(self, offer: Offer, order: Order) -> str:
        """Rent an offer for the lease in `order.name`. One request, never repeated."""
        body = create_body(offer, order, self._http.url)
        if order.login is not None:
            self._http.hide(order.login.password)
        end = offer.details.get("end_date")
        if isinstance(end, (int, float)) and end < order.deadline:
            raise OfferGoneError(f"vast: offer {offer.offer_id} ends before the run's deadline")
        reply = self._http.create("PUT", f"/api/v0/asks/{_number(offer.offer_id)}/", body=body, endpoint="create")
        made = reply.fields.get("new_contract")
        if str(made).isdigit() and int(str(made)) > 0:
            # Also with success false or an error status: then the instance exists, stopped, and bills for its disk.
            # It is ours; whoever waits for it sees that it will not run, and destroys it.
            return str(made)
        if made:
            raise AmbiguousError(
                f"vast: the create was answered with an id that is none: {self._http.clean(str(made))}"
            )
        if reply.ok and reply.fields.get("success") is not False:
            raise AmbiguousError(f"vast: the create was answered without an id: {self._http.say(reply)}")
        error = self._error(reply, "create", "create")
        if reply.ok and type(error) is InvalidError:
            # "Failed" with a status of success and a reason we do not know: look before believing it.
            raise AmbiguousError(f"vast: the create failed in an unknown way: {self._http.say(reply)}")
        raise error

    def attach_key(self, pod_id: str, public_key: str) -> None:
        """Register the key with the instance: a key that only onstart wrote is lost when Vast rewrites the file."""
        path = f"/api/v0/instances/{_number(pod_id)}/ssh/"
        reply = self._http.request("POST", path, body={"ssh_key": public_key}, endpoint="ssh")
        if "already associated" in self._http.say(reply).casefold():
            return
        self._checked(reply, "ssh")

    def renew_key(self, pod_id: str, public_key: str) -> None:
        """Register the key anew: for one that it knows already, Vast would not write the instance's file again."""
        path = f"/api/v0/instances/{_number(pod_id)}/ssh/"
        answer = self._checked(self._http.request("GET", path, endpoint="ssh"), "ssh")
        for key_id in _key_ids(answer.get("ssh_keys"), public_key):
            self._http.request("DELETE", f"{path}{_number(key_id)}/", body={}, endpoint="ssh")
        self.attach_key(pod_id, public_key)

    # --- what exists --------------------------------------------------------------------------------------------------

    def pods(self) -> list[Pod]:
        """Every instance of the account, all pages. A listing that stays shorter than its own total is none."""
        rows, total = self._rows()
        for attempt in range(_LISTINGS):
            if attempt:
                rows, total = self._rows()
            if len(rows) >= total:
                return [_pod(row, self._clock.now()) for row in {str(row.get("id")): row for row in rows}.values()]
        raise TransientError(f"vast: the listing shows {len(rows)} of {total} instances")

    def _rows(self) -> tuple[list[dict[str, Any]], int]:
        """All rows of one listing, and how many there are by its own count."""
        found: list[dict[str, Any]] = []
        token, seen = "", set()
        for _ in range(_MAX_PAGES):
            params = {"limit": str(_PAGE_ROWS), "order_by": '[{"col":"id","dir":"asc"}]'}
            if token:
                params["after_token"] = token
            reply = self._http.request("GET", "/api/v1/instances/", params=params, endpoint="list")
            page = self._checked(reply, "list")
            rows = page.get("instances")
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise TransientError("vast: the listing holds no list of instances")
            found += rows
            token = page.get("next_token") or ""
            if not token:
                return found, int(_float(page.get("total_instances")) or 0)
            if not isinstance(token, str) or token in seen:
                raise TransientError("vast: the listing goes round in circles")
            seen.add(token)
        raise TransientError(f"vast: the listing has over {_MAX_PAGES} pages")

    def pod(self, pod_id: str) -> Pod | None:
        """One instance. A wrong key also answers 404; only a plain "no such instance" is absence."""
        path = f"/api/v0/instances/{_number(pod_id)}/"
        reply = self._http.request("GET", path, params={"owner": "me"}, endpoint="get")
        if self._is_absent(reply):
            return None
        answer = self._checked(reply, "get")
        if "instances" not in answer:
            raise TransientError(f"vast: no word about instance {pod_id} in the answer")
        row = answer["instances"]
        if isinstance(row, list) and len(row) == 1:
            row = row[0]
        if not row:
            return None
        if not isinstance(row, dict) or str(row.get("id")) != pod_id:
            raise TransientError(f"vast: the answer is not about instance {pod_id}")
        return _pod(row, self._clock.now())

    def start(self, pod_id: str) -> None:
        """Start a stopped instance: its disk is as it was. Its GPUs may be taken: then Vast would start it some day."""
        body = {"state": "running"}
        path = f"/api/v0/instances/{_number(pod_id)}/"
        self._checked(self._http.request("PUT", path, body=body, endpoint="label"), "start")

    # --- the end ------------------------------------------------------------------------------------------------------

    def destroy(self, pod_id: str) -> None:
        """Destroy an instance; one that is already gone is fine. `success: false` is a failure."""
        path = f"/api/v0/instances/{_number(pod_id)}/"
        reply = self._http.request("DELETE", path, body={}, endpoint="destroy", attempts=1)
        if self._is_absent(reply):
            return
        answer = self._checked(reply, "destroy")
        if answer.get("success") is not True:
            raise TransientError(f"vast: destroying {pod_id} was not confirmed: {self._http.say(reply)}")

    # --- the rest -----------------------------------------------------------------------------------------------------

    def host_keys(self, pod_id: str, name: str) -> list[str]:
        """As the start script has printed them into the instance's log."""
        return startup.host_keys_told(self.logs(pod_id, _LOG_ROWS, containing=name), name)

    def label(self, pod_id: str, text: str) -> None:
        """Give an instance another label. Our own leases are labelled by the create call."""
        body = {"label": text}
        self._checked(
            self._http.request("PUT", f"/api/v0/instances/{_number(pod_id)}/", body=body, endpoint="label"), "label"
        )

    def take_snapshot(self, pod_id: str, to: Repository, login: RegistryLogin) -> None:
        """Have the host commit the instance's container and push it to that repository, without a tag.

        As the official client asks (cli/commands/misc.py): asynchronous, no job to ask for, five to ten minutes or
        more. The instance stands still meanwhile.
        """
        self._http.hide(login.password)
        path = f"/api/v0/instances/take_snapshot/{_number(pod_id)}/"
        body = {
            "id": str(_number(pod_id)),
            "container_registry": to.host,
            "personal_repo": to.path,
            "docker_login_user": login.user,
            "docker_login_pass": login.password,
            "pause": "true",
        }
        self._checked(self._http.request("POST", path, body=body, endpoint="snapshot"), "snapshot")

    def logs(self, pod_id: str, tail: int = 200, *, daemon: bool = False, containing: str = "") -> str:
        """The last lines of an instance's log, "" when they do not come in time. `daemon` asks for the host's side."""
        body = {"tail": str(tail), **({"daemon_logs": "true"} if daemon else {})}
        if containing:
            body["filter"] = containing
        path = f"/api/v0/instances/request_logs/{_number(pod_id)}/"
        answer = self._checked(self._http.request("PUT", path, body=body, endpoint="logs"), "logs")
        url = answer.get("result_url")
        if not isinstance(url, str):
            return ""
        for _ in range(_LOG_TRIES):
            text = self._http.fetch_plain(url)
            if text is not None:
                return text
            self._clock.sleep(_LOG_PAUSE_S)
        return ""

    def last_lines(self, pod_id: str, tail: int = 50) -> list[str]:
        """The newest lines of the host's log about an instance, and of the instance's own."""
        lines = [*self.logs(pod_id, tail, daemon=True).splitlines(), *self.logs(pod_id, tail).splitlines()]
        return [self._http.clean(line) for line in lines]

    def price_requests(self) -> list[PriceRequest]:
        """What hosts ask for in return for a longer contract. A part of the price that they leave alone is null."""
        path = "/api/v0/instances/pending-price-increases/"
        rows = self._checked(self._http.request("GET", path, endpoint="prices"), "price requests")
        found = rows.get("pending_price_increases") or []
        if not isinstance(found, list):
            raise TransientError("vast: the price requests hold no list")
        requests = [_price_request(row) for row in found if isinstance(row, dict)]
        return [request for request in requests if request is not None]

    def refuse_price(self, request_id: str) -> None:
        """Reject a host's wish. Its answer to one that is over is 404, and 409 before that."""
        body = {"pending_price_increase_id": int(_number(request_id))}
        path = "/api/v0/instances/reject-price-increase/"
        reply = self._http.request("PUT", path, body=body, endpoint="prices")
        if reply.status == 409 or reply.fields.get("error") == "no_pending_price_increase":
            return
        self._checked(reply, "refusing a price")

    def balance_micros(self) -> int | None:
        """What can be spent: the larger of `credit` and `balance`, whose meanings the sources tell differently."""
        user = self._user()
        amounts = [float(user[name]) for name in ("credit", "balance") if isinstance(user.get(name), (int, float))]
        return usd_to_micros(max(amounts)) if amounts else None

    def key_mark(self) -> str:
        return self._http.key_mark

    def holder(self) -> str | None:
        """The user's number; a key need not have the right to read it."""
        if self._holder is None:
            with suppress(ProviderError):
                self._user(attempts=1)
        return self._holder

    def _user(self, attempts: int | None = None) -> dict[str, Any]:
        reply = self._http.request("GET", "/api/v0/users/current/", endpoint="user", attempts=attempts)
        user = self._checked(reply, "user")
        if isinstance(user.get("id"), int):
            self._holder = str(user["id"])
        return user

    def spend_micros_per_h(self) -> int | None:
        """What computing and the instances' own disks cost now; volumes, which outlive instances, are left out."""
        try:
            rates = self.spend_rate()
        except (AuthError, InvalidError):
            return None  # a key that is good for instances need not be for the account
        parts = [_float(rates.get(name)) for name in ("gpu_cost_per_hour", "container_storage_cost_per_hour")]
        if parts[0] is None:
            raise TransientError("vast: the spend rate holds no cost per hour")
        return usd_to_micros(sum(part for part in parts if part is not None))

    def reach(self) -> list[Reach]:
        """What the key may do, by Vast's own permission groups. The search is asked for one row."""

        def search() -> None:
            body = (search_body(Need()) or {}) | {"limit": 1}
            self._checked(self._http.request("POST", "/api/v0/bundles/", body=body, endpoint="search"), "search")

        def instances() -> None:
            params = {"limit": "1"}
            self._checked(self._http.request("GET", "/api/v1/instances/", params=params, endpoint="list"), "list")

        now = self._clock.now()
        return [
            tried(
                "searches the market", "nothing more (a search needs no permission: the key itself is refused)", search
            ),
            tried("sees instances", "instance_read and instance_write", instances),
            tried("sees the bill", "billing_read", lambda: self.charges(now - 60, now), essential=False),
        ]

    def spend_rate(self) -> dict[str, Any]:
        """What the account spends per hour now; `has_active_resources` is false when nothing is left."""
        return self._checked(self._http.request("GET", "/api/v0/users/spend-rate/", endpoint="spend"), "spend")

    def charges(self, since: float, until: float) -> list[dict[str, Any]]:
        """Invoiced charges of instances between two times, all pages: source, amount, metadata.label, items."""
        wanted = {"day": {"gte": since, "lte": until}, "type": {"in": ["instance"]}}
        rows: list[dict[str, Any]] = []
        token = ""
        for _ in range(_MAX_PAGES):
            params = {"select_filters": json.dumps(wanted), "format": "table", "latest_first": "true", "limit": "100"}
            if token:
                params["after_token"] = token
            page = self._checked(
                self._http.request("GET", "/api/v0/charges/", params=params, endpoint="charges"), "charges"
            )
            found = page.get("results")
            if not isinstance(found, list):
                raise TransientError("vast: the charges hold no list")
            rows += [row for row in found if isinstance(row, dict)]
            following = page.get("next_token") or ""
            if not following or following == token:
                return rows
            token = str(following)
        raise TransientError(f"vast: the charges have over {_MAX_PAGES} pages")

    # --- answers ------------------------------------------------------------------------------------------------------

    def _is_absent(self, reply: Reply) -> bool:
        return reply.status == 404 and str(reply.fields.get("error")) in _NO_INSTANCE

    def _checked(self, reply: Reply, endpoint: str) -> dict[str, Any]:
        """The fields of an answer that says success; the typed error of any other."""
        if reply.ok and isinstance(reply.body, dict) and reply.fields.get("success") is not False:
            return reply.fields
        if reply.ok and isinstance(reply.body, list):
            raise TransientError(f"vast: an unexpected answer to {endpoint}")
        raise self._error(reply, endpoint, endpoint)

    def _error(self, reply: Reply, endpoint: str, what: str) -> ProviderError:
        """The typed error for an answer that is no success. The code decides; where there is none, the words."""
        code = str(reply.fields.get("error") or "")
        said = self._http.say(reply)
        words = said.replace("_", " ").casefold()
        message = f"vast: {what}: {reply.status} {said}"
        if code == "auth_error" or reply.status == 401 or "invalid user key" in words or "session expired" in words:
            return AuthError(f"vast refuses the key: {said}: check {KEY_VARIABLE}")
        if reply.status == 429:
            return self._http.rate_limited(reply, endpoint)
        if _GONE_ASK.search(words):
            return OfferGoneError(message)
        if reply.status in (402, 411) or _MONEY.search(words):
            return FundsError(f"vast wants money first: {said}")
        if reply.status == 403 and what != "create":
            return AuthError(f"vast: the key may not do this ({what}): {said}")
        if _NO_CAPACITY.search(words):
            return NoCapacityError(message)
        if reply.status == 410:
            return InvalidError(f"vast no longer has this call ({what}): {said}")
        if reply.status >= 500 or (reply.ok and not isinstance(reply.body, dict)):
            return TransientError(message)
        return InvalidError(message)


# --- what is sent -----------------------------------------------------------------------------------------------------


def disk_to_rent(disk_gb: float) -> float:
    """Vast rents whole gigabytes, eight at least, and never lets them grow."""
    return float(max(MIN_DISK_GB, math.ceil(disk_gb)))


def search_body(need: Need) -> dict[str, Any] | None:
    """The search for a need; None when Vast has none of the GPUs that are wanted.

    The job's own query adds to the filters made from the need, chooses GPUs in their place, and with `field=any` takes
    one away; the highest price and the secure-only rule always hold.
    """
    disk = disk_to_rent(need.disk_gb)
    query: dict[str, Any] = {
        "verified": {"eq": True},
        "external": {"eq": False},
        "rentable": {"eq": True},
        "num_gpus": {"eq": need.gpu_count},
        "direct_port_count": {"gte": 1},
        "disk_space": {"gte": disk},
    }
    wanted = gpus.wanted(need.gpu)
    names = gpus.vast_names(wanted)
    if wanted and not names:
        return None
    if names:
        query["gpu_name"] = {"in": list(names)}
    floors = {
        "gpu_ram": None if need.gpu_ram_gb is None else need.gpu_ram_gb * 1000,
        "reliability": need.reliability,
        "inet_down": need.inet_down_mbps,
        "inet_up": need.inet_up_mbps,
        "cuda_max_good": need.cuda_min,
    }
    query |= {field: {"gte": floor} for field, floor in floors.items() if floor is not None}
    if need.region and all(_COUNTRY.fullmatch(region) for region in need.region):
        query["geolocation"] = {"in": [region.upper() for region in need.region]}
    if need.vast_query:
        chosen = vastquery.parse(need.vast_query)
        base = {
            field: wish for field, wish in query.items() if field not in ("gpu_name", "num_gpus") or field not in chosen
        }
        query = vastquery.parse(need.vast_query, base)
    if need.secure:
        query["datacenter"] = {"eq": True}
    if need.max_price_micros_per_h is not None:
        price = query.setdefault("dph_total", {})
        cap = need.max_price_micros_per_h / MICROS_PER_USD
        price["lte"] = min(cap, _float(price.get("lte", cap)) or cap)
    return {
        **query,
        "order": [["dph_total", "asc"]],
        "type": "on-demand",
        "limit": _SEARCH_ROWS,
        "allocated_storage": disk,
    }


def create_body(offer: Offer, order: Order, api_url: str = DEFAULT_URL) -> dict[str, Any]:
    """The create call's body. Raises InvalidError or NoCapacityError for what Vast would refuse or charge in vain."""
    if parse_lease(order.name) is None or len(order.name) > _MAX_LABEL:
        raise InvalidError(f"{order.name!r} is not a lease of ours: nothing was rented")
    image, template = order.image or DEFAULT_IMAGE, template_of(order.image)
    needs, has = gpus.cuda_of_image(image), offer.details.get("cuda_max_good")
    if needs and has and not gpus.cuda_at_least(has, needs):
        raise NoCapacityError(f"vast: machine {offer.machine_id} runs CUDA up to {has} and the image needs {needs}")
    for name, value in order.env.items():
        if not _ENV_NAME.fullmatch(name):
            raise InvalidError(f"{name!r} is not the name of an environment variable: nothing was rented")
        if "\0" in value or "\n" in value:
            raise InvalidError(f"the environment variable {name} is more than one line: nothing was rented")
    if sum(len(name) + len(value) for name, value in order.env.items()) > _MAX_ENV:
        raise InvalidError("the environment variables are too long for Vast: nothing was rented")
    onstart = onstart_script(order, api_url)
    if len(onstart) > _MAX_ONSTART:
        raise InvalidError(
            f"the start script has {len(onstart)} characters, Vast takes {_MAX_ONSTART}:"
            " shorten pod_env; nothing was rented"
        )
    return {
        "client_id": "me",
        # What is given here wins over a template, so no image: null, as the official client says it. Its environment is
        # added to ours.
        "image": None if template else image,
        **({"template_hash_id": template} if template else {}),
        **({} if order.login is None else {"image_login": image_login(order.login)}),
        "disk": disk_to_rent(max(order.disk_gb, offer.disk_gb)),
        "label": order.name,
        "env": dict(order.env),
        "onstart": onstart,
        "runtype": "ssh_direc ssh_proxy",  # as the official client spells it
        "target_state": "running",
        # Without it, a machine that was taken meanwhile leaves us a stopped instance that bills for its disk.
        "cancel_unavail": True,
    }


def image_login(login: RegistryLogin) -> str:
    """As Vast wants it: words of `docker login`, which it parts at blanks. Raises InvalidError for a login with one."""
    words = (login.user, login.password, login.registry)
    if any(not word or any(letter.isspace() for letter in word) for word in words):
        raise InvalidError(f"Vast takes no blanks in the login for {login.registry}: nothing was rented")
    return f"-u {login.user} -p {login.password} {login.registry}"


def onstart_script(order: Order, api_url: str = DEFAULT_URL) -> str:
    """What the instance runs at every start."""
    parts = [
        startup.no_auto_tmux(),
        startup.let_in(order.public_key),
        startup.environment(order.env),
        startup.tell_host_keys(order.name),
    ]
    if order.fuse is not None:
        parts.insert(0, fuse.part(order.fuse, order.deadline, ending(api_url)))
    return startup.script(parts)


def ending(api_url: str) -> fuse.Ending:
    """The key that an instance is given can start, stop and destroy that instance, and nothing else."""
    path = "/api/v0/instances/@ID/"
    return fuse.Ending(
        ends=(("DELETE", path, {}), ("PUT", path, {"state": "stopped"})),
        url=api_url,
        url_variable=URL_VARIABLE,
        id_variable="CONTAINER_ID",
        key_variable="CONTAINER_API_KEY",
    )


def _key_ids(listed: Any, public_key: str) -> list[str]:
    """The ids of a key in an instance's list of keys, which is JSON within JSON."""
    try:
        rows = json.loads(listed) if isinstance(listed, str) else listed
    except ValueError:
        return []
    wanted = public_key.split()[:2]
    return [
        str(row["id"])
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
        and str(row.get("id")).isdigit()
        and str(row.get("public_key") or row.get("key") or "").split()[:2] == wanted
    ]


# --- what comes back --------------------------------------------------------------------------------------------------


def _offer(row: Mapping[str, Any], need: Need) -> Offer | None:
    """An offer of ours from a row of the search; None for what cannot be rented or does not fit after all."""
    number = row.get("ask_contract_id") or row.get("id")
    total, machine = _float(row.get("dph_total")), row.get("machine_id")
    if not number or machine is None or total is None or total <= 0:
        return None
    if row.get("rented") is True or row.get("rentable") is False:
        return None  # the search does not filter by `rented` itself
    disk = disk_to_rent(need.disk_gb)
    storage = max(0.0, _float(row.get("storage_cost")) or 0.0)
    price = usd_to_micros(max(total, _sum_of_parts(row, disk)))
    if need.max_price_micros_per_h is not None and price > need.max_price_micros_per_h:
        return None
    region = str(row.get("geolocation") or "").strip()
    if need.region and not _in_region(region, need.region):
        return None
    count = int(_float(row.get("num_gpus")) or 1)
    if count < need.gpu_count:
        return None
    memory = _float(row.get("gpu_ram"))
    return Offer(
        provider="vast",
        offer_id=str(number),
        machine_id=str(machine),
        gpu=gpus.canonical(str(row.get("gpu_name") or "")),
        gpu_count=count,
        price_micros_per_h=price,
        disk_gb=disk,
        secure=bool(row.get("datacenter")) or (_float(row.get("hosting_type")) or 0) >= 1 or need.secure,
        region=region,
        gpu_ram_gb=None if memory is None else memory / 1000,
        reliability=_float(row.get("reliability2", row.get("reliability"))),
        inet_down_mbps=_float(row.get("inet_down")),
        inet_up_mbps=_float(row.get("inet_up")),
        traffic_down_micros_per_gb=usd_to_micros(max(0.0, _float(row.get("inet_down_cost")) or 0.0)),
        traffic_up_micros_per_gb=usd_to_micros(max(0.0, _float(row.get("inet_up_cost")) or 0.0)),
        details={
            name: row[name]
            for name in ("host_id", "cuda_max_good", "driver_version", "end_date", "direct_port_count", "verification")
            if row.get(name) is not None
        },
        disk_micros_per_h=usd_to_micros(storage * disk / HOURS_PER_MONTH),
    )


def _sum_of_parts(row: Mapping[str, Any], disk: float) -> float:
    """GPU and disk added up ourselves, in case the search priced another disk than ours."""
    base, storage = _float(row.get("dph_base")), _float(row.get("storage_cost"))
    return 0.0 if base is None or storage is None else base + storage * disk / HOURS_PER_MONTH


def _in_region(place: str, wanted: tuple[str, ...]) -> bool:
    """Whether a place like "Texas, US" is wanted: by its country code, or by any part of its name."""
    country = place.rpartition(",")[2].strip().casefold()
    for region in wanted:
        wish = region.strip().casefold()
        if wish == country or (len(wish) > 2 and wish in place.casefold()):
            return True
    return False


def _pod(row: Mapping[str, Any], now: float) -> Pod:
    """An instance of ours from a row that was read at `now`."""
    number = row.get("id")
    if not isinstance(number, int) or isinstance(number, bool):
        raise TransientError("vast: an instance without an id in the answer")
    state, progress = pod_state(row)
    addresses = _addresses(row) if state is PodState.RUNNING else ()
    return Pod(
        provider="vast",
        pod_id=str(number),
        name=str(row.get("label") or "").strip(),
        state=state,
        created=_float(row.get("start_date")) or 0.0,
        price_micros_per_h=usd_to_micros(max(0.0, _float(row.get("dph_total")) or 0.0)),
        machine_id=str(row.get("machine_id") or ""),
        gpu=gpus.canonical(str(row.get("gpu_name") or "")),
        gpu_count=int(_float(row.get("num_gpus")) or 1),
        address=addresses[0] if addresses else None,
        other_addresses=addresses[1:],
        computing_since=_running_since(row, state, now),
        progress=progress,
        details={
            name: row[name]
            for name in ("actual_status", "intended_status", "cur_state", "geolocation", "host_id", "image_uuid")
            if row.get(name) is not None
        },
    )


def _running_since(row: Mapping[str, Any], state: PodState, now: float) -> float | None:
    """By `uptime_mins`, which is relative and so needs no clock but ours. A whole number of minutes was rounded."""
    uptime = _float(row.get("uptime_mins"))
    if state is not PodState.RUNNING or uptime is None or uptime <= 0 or uptime.is_integer():
        return None
    return now - uptime * 60


def pod_state(row: Mapping[str, Any]) -> tuple[PodState, str]:
    """The state table: what is wanted (intended), what the container does (actual), what the contract holds (cur)."""
    actual, wanted, contract = (_word(row.get(name)) for name in ("actual_status", "intended_status", "cur_state"))
    message = " ".join(str(row.get("status_msg") or "").split())[:300]
    progress = " ".join(part for part in (actual or "provisioning", message) if part)
    if actual in _AT_REST:
        return PodState.STOPPED, progress
    if wanted in ("stopped", "frozen") or contract in ("stopped", "unloaded"):
        # Vast gives up on a start that does not work by wanting it stopped, while it may say "loading" for ever.
        return PodState.FAILED, f"{progress} (Vast wants it {wanted or contract})"
    if actual == "running":
        return PodState.RUNNING, progress
    if actual not in _STARTING or _BROKEN.search(message.casefold()):
        return PodState.FAILED, progress  # offline, unknown and whatever is new never run again by themselves
    return PodState.STARTING, progress


def _addresses(row: Mapping[str, Any]) -> tuple[SshAddress, ...]:
    """The direct way when port 22 is mapped, then the proxy: some hosts are reachable only through it."""
    found = []
    host, port = str(row.get("public_ipaddr") or "").strip(), _mapped_port(row.get("ports"))
    if host and port:
        found.append(SshAddress(host, port))
    proxy, proxy_port = str(row.get("ssh_host") or "").strip(), _port(row.get("ssh_port"))
    if proxy and proxy_port:
        found.append(SshAddress(proxy, proxy_port))
    return tuple(dict.fromkeys(found))


def _mapped_port(ports: Any) -> int | None:
    mapped = ports.get("22/tcp") if isinstance(ports, dict) else None
    for binding in mapped if isinstance(mapped, list) else ():
        port = _port(binding.get("HostPort")) if isinstance(binding, dict) else None
        if port:
            return port
    return None


def _port(value: Any) -> int | None:
    """A port number, which Vast writes as a number or as a string, or -1 before there is one."""
    text = str(value).strip()
    return int(text) if text.isdigit() and 0 < int(text) < 65536 else None


def _price_request(row: Mapping[str, Any]) -> PriceRequest | None:
    """A row of a host's wish, in dollars per second for GPUs and for disk; None for one that asks for nothing."""
    number, contract = row.get("pending_price_increase_id"), row.get("contract_id")
    if not isinstance(number, int) or not isinstance(contract, int):
        return None
    per_second = 0.0
    for part in ("gpu", "disk_ram"):
        new = _float(row.get(f"new_{part}_costpersec"))
        per_second += (_float(row.get(f"old_{part}_costpersec")) or 0.0) if new is None else new
    return PriceRequest(str(number), str(contract), usd_to_micros(per_second * 3600))


def _word(value: Any) -> str:
    return str(value or "").strip().casefold()


def _float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _number(text: str) -> str:
    """An id that is safe in a path; Vast's are numbers."""
    if not (text.isascii() and text.isdigit()):
        raise InvalidError(f"{text!r} is not an id of Vast")
    return text


def vast_provider(settings: Settings, environ: Mapping[str, str]) -> VastProvider:  # noqa: ARG001
    """The provider from VAST_API_KEY and, where set, VAST_URL. Nothing is asked of the service yet."""
    clock = SystemClock()
    url = environ.get(URL_VARIABLE) or DEFAULT_URL
    key = environ.get(KEY_VARIABLE, "")
    record, pacing = recorder(environ, key), Pacing(SPACING_S)
    http = Http("vast", url, key, clock, pacing=pacing, record=record, address_variable=URL_VARIABLE)
    return VastProvider(http, clock)
