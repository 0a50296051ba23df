"""RunPod: a catalogue of GPU types, pods placed by the provider. Floor 1: the HTTP API is its one outside thing.

REST v2 only; v1 is retired and answers 410, GraphQL is asked about the account only. A create names one GPU type in
one cloud and the service finds the machine: an offer here is a pool, not a machine, and stock is a hint, no promise.
A pod says RUNNING long before anybody can log in: `ssh.direct` is what tells. Sources differ on whether its meter
starts with RUNNING or with the container (`startedAt`), minutes later: the dearer one counts, and the disk with it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

from pennypod import fuse, gpus, startup
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
from pennypod.model.image import RegistryLogin, template_of
from pennypod.model.money import usd_to_micros
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.providers.base import Reach, Timing, tried
from pennypod.providers.http import Http, Reply
from pennypod.recording import recorder
from pennypod.settings import Settings

KEY_VARIABLE = "RUNPOD_API_KEY"
URL_VARIABLE = "RUNPOD_API_BASE_URL"
DEFAULT_URL = "https://api.runpod.io"
DEFAULT_IMAGE = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"

TIMING = Timing(
    listing_lag_s=30.0,
    absence_checks=3,
    absence_spacing_s=5.0,
    poll_s=5.0,
    start_patience_s=900.0,  # a pull shows no progress, and a cold one takes 9 to 13 minutes
    start_limit_s=1200.0,
    host_keys_s=30.0,
)

DISK_USD_PER_GB_MONTH = 0.10
HOURS_PER_MONTH = 720.0
CLOUDS = ("SECURE", "COMMUNITY")
_PAGE_ROWS = 100
_MAX_PAGES = 1000
_MAX_ENV = 50
_LOG_ROWS = 5000  # the most that it tells
_STATES = {
    "PROVISIONING": PodState.STARTING,
    "STARTING": PodState.STARTING,
    "RUNNING": PodState.RUNNING,
    "EXITED": PodState.STOPPED,
    "ERROR": PodState.FAILED,
}
_TERMINATED = "TERMINATED"
_STOCK = {"HIGH": 3, "MEDIUM": 2, "LOW": 1, "NONE": 0}
_NO_CAPACITY = re.compile(
    r"no longer any instances available|no instances (?:currently )?available|not enough free gpus|no available"
    r"|does not have the resources|out of stock|no capacity"
)
_MONEY = re.compile(r"\bbalance is too low\b|\badd funds\b|\binsufficient (?:funds|balance|credit)|\bspend limit\b")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COUNTRY = re.compile(r"[A-Za-z]{2}")
_POD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

# RunPod's own images have a start script that lets PUBLIC_KEY in; others may have no sshd. Ends in whatever stays.
_START_SSHD = (
    "[ -x /start.sh ] && exec /start.sh; "
    "command -v sshd >/dev/null || { apt-get update && apt-get install -y --no-install-recommends openssh-server; }; "
    'mkdir -p ~/.ssh /run/sshd; chmod 700 ~/.ssh; echo "$PUBLIC_KEY" >> ~/.ssh/authorized_keys; '
    "chmod 600 ~/.ssh/authorized_keys; ssh-keygen -A; exec $(command -v sshd) -D"
)


class RunpodProvider:
    """Pods on RunPod. Keeps nothing between calls."""

    def __init__(self, http: Http, clock: Clock, *, timing: Timing = TIMING) -> None:
        self._http = http
        self._clock = clock
        self._timing = timing
        self._holder: str | None = None

    @property
    def name(self) -> str:
        return "runpod"

    @property
    def timing(self) -> Timing:
        return self._timing

    # --- offers -------------------------------------------------------------------------------------------------------

    def offers(self, need: Need) -> list[Offer]:
        """One offer for each GPU type and cloud that has stock, or for each wished region of those, in their order.

        Secure and community are priced apart.
        """
        wanted = gpus.wanted(need.gpu)
        if wanted and not gpus.runpod_ids(wanted):
            return []
        found: list[Offer] = []
        for cloud in CLOUDS:
            if cloud == "COMMUNITY" and (need.secure or _asks_for_the_unknown(need)):
                continue
            reply = self._http.request("GET", "/v2/catalog/gpus", params=catalogue_query(need, cloud))
            rows = self._checked(reply, "the catalogue").get("gpus")
            if not isinstance(rows, list):
                raise TransientError("runpod: the catalogue holds no list of GPU types")
            for row in rows:
                offer = _offer(row, cloud, need, wanted) if isinstance(row, dict) else None
                if offer is not None:
                    found += _by_region(offer, row, need.region) if need.region else [offer]
        return found

    def prepare(self, image: str, on_progress: Callable[[str], None]) -> None:
        """Nothing: RunPod's hosts pull the image themselves."""

    # --- renting ------------------------------------------------------------------------------------------------------

    def rent(self, offer: Offer, order: Order) -> str:
        """Create a pod for the lease in `order.name`. One request, never repeated."""
        body = create_body(offer, order, self._http.url)
        if order.login is not None:
            body["registry"] = self._credential(order.login)
        reply = self._http.create("POST", "/v2/pods", body=body)
        if reply.ok:
            made = reply.fields.get("id")
            if isinstance(made, str) and _POD_ID.fullmatch(made):
                return made
            raise AmbiguousError(f"runpod: the create was answered without an id: {self._http.say(reply)}")
        raise self._create_error(reply)

    def _credential(self, login: RegistryLogin) -> str:
        """The id of the account's credential for a login, made once. It cannot be read back, so its name tells it.

        The name holds a mark of the login: another password makes another credential. Raises InvalidError where the key
        may not do this: the pod could not pull its image, so nothing is rented.
        """
        self._http.hide(login.password)
        name = f"pennypod-{login.registry}-{self._http.mark_of(login.registry, login.user, login.password)}"
        try:
            listed = self._checked(self._http.request("GET", "/v2/registries"), "the registry logins").get("registries")
            if not isinstance(listed, list):
                raise TransientError("runpod: the answer holds no list of registry logins")
            for row in listed:
                if isinstance(row, dict) and row.get("name") == name and isinstance(row.get("id"), str) and row["id"]:
                    return str(row["id"])
            body = {"name": name, "username": login.user, "password": login.password}
            # Not repeated: one that was made unseen is found by its name the next time.
            reply = self._http.request("POST", "/v2/registries", body=body, attempts=1)
            made = self._checked(reply, "the registry login").get("id")
        except AuthError as exc:
            raise InvalidError(f"runpod: no login for {login.registry} could be left there: {exc}") from exc
        if not isinstance(made, str) or not made:
            raise TransientError("runpod: the registry login was answered without an id")
        return made

    def _create_error(self, reply: Reply) -> ProviderError:
        said = self._http.say(reply)
        if reply.status in (400, 409) and _NO_CAPACITY.search(said.casefold()):
            return NoCapacityError(f"runpod: {said}")
        if reply.status == 403 and reply.fields:
            # The key is good, this pool is not for it: another offer may be.
            return InvalidError(f"runpod: the key may not rent this: {said}")
        return self._error(reply, "create")

    # --- what exists --------------------------------------------------------------------------------------------------

    def pods(self) -> list[Pod]:
        """Every pod of the account, all pages."""
        found: dict[str, Pod] = {}
        for row in self._rows():
            pod = _pod(row)
            if row.get("status") != _TERMINATED:
                found[pod.pod_id] = pod
        return list(found.values())

    def _rows(self) -> Iterator[dict[str, Any]]:
        cursor, seen = "", set()
        for _ in range(_MAX_PAGES):
            params = {"limit": str(_PAGE_ROWS), **({"cursor": cursor} if cursor else {})}
            page = self._checked(self._http.request("GET", "/v2/pods", params=params), "the listing")
            rows = page.get("pods")
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise TransientError("runpod: the listing holds no list of pods")
            yield from rows
            paging = page.get("pagination")
            if not isinstance(paging, dict) and len(rows) == _PAGE_ROWS:
                raise TransientError("runpod: the listing fills its page and does not say whether there is more")
            paging = paging if isinstance(paging, dict) else {}
            following = paging.get("nextCursor")
            if not following and not paging.get("hasNextPage"):
                return
            if not isinstance(following, str) or not following or following in seen:
                raise TransientError("runpod: the listing breaks off in the middle")
            seen.add(following)
            cursor = following
        raise TransientError(f"runpod: the listing has over {_MAX_PAGES} pages")

    def pod(self, pod_id: str) -> Pod | None:
        """One pod. None for the service's own 404, and for a pod that it calls terminated."""
        reply = self._http.request("GET", f"/v2/pods/{_id(pod_id)}")
        if _says_not_found(reply):
            return None
        row = self._checked(reply, "the pod")
        if row.get("id") != pod_id:
            raise TransientError(f"runpod: the answer is not about pod {pod_id}")
        return None if row.get("status") == _TERMINATED else _pod(row)

    # --- the end ------------------------------------------------------------------------------------------------------

    def destroy(self, pod_id: str) -> None:
        """Terminate a pod; one that is already gone is fine."""
        reply = self._http.request("DELETE", f"/v2/pods/{_id(pod_id)}", attempts=1)
        if reply.ok or _says_not_found(reply):
            return
        raise self._error(reply, "terminate")

    # --- the rest -----------------------------------------------------------------------------------------------------

    def host_keys(self, pod_id: str, name: str) -> list[str]:
        """As the start command has printed them into the pod's log."""
        return startup.host_keys_told("\n".join(self._log(pod_id, _LOG_ROWS)), name)

    def last_lines(self, pod_id: str, tail: int = 50) -> list[str]:
        """The newest lines of the pod's log, host and container, each one short."""
        return [self._http.clean(line) for line in self._log(pod_id, tail)]

    def _log(self, pod_id: str, tail: int) -> list[str]:
        """As a stream of events tells it."""
        reply = self._http.listen(f"/v2/pods/{_id(pod_id)}/logs", params={"tail": str(tail)})
        if not reply.ok:
            raise self._error(reply, "the logs")
        return list(_event_lines(reply.text))

    def balance_micros(self) -> int | None:
        """Money left, by GraphQL, the only place that tells. None once that API is gone, as announced."""
        balance = _float(self._account("clientBalance"))
        return None if balance is None else usd_to_micros(balance)

    def key_mark(self) -> str:
        return self._http.key_mark

    def holder(self) -> str | None:
        """The user's id, by GraphQL; a key need not have the right to read it."""
        if self._holder is None:
            with suppress(ProviderError):
                told = self._account("id", attempts=1)
                self._holder = told if isinstance(told, str) and told else None
        return self._holder

    def spend_micros_per_h(self) -> int | None:
        """What the account spends now, network volumes included. None where the key or the service does not tell."""
        try:
            spending = _float(self._account("currentSpendPerHr"))
        except (AuthError, InvalidError):
            return None  # a key that is good for pods need not be for the account
        return None if spending is None else usd_to_micros(spending)

    def _account(self, field: str, attempts: int | None = None) -> Any:
        """What GraphQL shows of the account; None where that API is gone."""
        query = {"query": f"query {{ myself {{ {field} }} }}"}
        reply = self._http.request("POST", "/graphql", body=query, attempts=attempts)
        if reply.status == 410:
            return None
        answer = self._checked(reply, field)
        errors = answer.get("errors")
        if isinstance(errors, list) and errors:
            said = self._http.clean(str(errors[0].get("message") if isinstance(errors[0], dict) else errors[0]))
            if "unauthorized" in said.casefold():
                raise AuthError(f"runpod refuses the key: {said}: check {KEY_VARIABLE}")
            raise TransientError(f"runpod: {field}: {said}")
        data = answer.get("data")
        myself = data.get("myself") if isinstance(data, dict) else None
        return myself.get(field) if isinstance(myself, dict) else None

    def reach(self) -> list[Reach]:
        """What the key may do. One that may only read cannot be told from one that may rent."""

        def seen(path: str, what: str, **params: str) -> Callable[[], object]:
            return lambda: self._checked(self._http.request("GET", path, params=params), what)

        return [
            tried("sees GPU types", "read access to the REST API", seen("/v2/catalog/gpus", "the catalogue")),
            tried("sees pods", "read and write access to pods", seen("/v2/pods", "the listing", limit="1")),
            tried("sees the bill", "read access to billing", lambda: self.charges(1), essential=False),
        ]

    def charges(self, hours: int, pod_id: str = "") -> list[dict[str, Any]]:
        """Invoiced amounts of the last `hours`, hour by hour: podId, totalAmount, gpuAmount, diskAmount."""
        params = {"bucketSize": "hour", "lastN": str(max(1, hours)), **({"podId": _id(pod_id)} if pod_id else {})}
        records = self._checked(self._http.request("GET", "/v2/billing/pods", params=params), "the bill").get("records")
        if not isinstance(records, list):
            raise TransientError("runpod: the bill holds no list")
        return [record for record in records if isinstance(record, dict)]

    # --- answers ------------------------------------------------------------------------------------------------------

    def _checked(self, reply: Reply, what: str) -> dict[str, Any]:
        if reply.ok and isinstance(reply.body, dict):
            return reply.fields
        raise self._error(reply, what)

    def _error(self, reply: Reply, what: str) -> ProviderError:
        """The typed error for an answer that is no success."""
        said = self._http.say(reply)
        message = f"runpod: {what}: {reply.status} {said}"
        if reply.status == 401:
            return AuthError(f"runpod refuses the key: {said}: check {KEY_VARIABLE}")
        if reply.status == 403:
            why = "" if reply.fields else " (not by RunPod itself, it seems: a firewall before it)"
            return AuthError(f"runpod: not allowed: {said}{why}")
        if reply.status == 429:
            return self._http.rate_limited(reply, "")
        if reply.status == 402 or _MONEY.search(said.casefold()):
            return FundsError(f"runpod wants money first: {said}")
        if reply.status == 410:
            return InvalidError(f"runpod has retired this API: {said}: check {URL_VARIABLE}, REST v2 is needed")
        if reply.status >= 500 or reply.ok:
            return TransientError(message)
        return InvalidError(message)


# --- what is sent -----------------------------------------------------------------------------------------------------


def catalogue_query(need: Need, cloud: str) -> dict[str, str]:
    """The query that tells price and stock for a need in one cloud. `include` and `product` only work together."""
    query = {"include": "AVAILABILITY", "product": "POD", "count": str(need.gpu_count), "cloud": cloud}
    if need.cuda_min is not None:
        query["minCudaVersion"] = _cuda(need.cuda_min)
    countries = [region.upper() for region in need.region if _COUNTRY.fullmatch(region)]
    if countries and len(countries) == len(need.region):
        query["countryCodes"] = ",".join(countries)
    return query


def create_body(offer: Offer, order: Order, api_url: str = DEFAULT_URL) -> dict[str, Any]:
    """The create call's body. Raises InvalidError for what RunPod would refuse."""
    if parse_lease(order.name) is None:
        raise InvalidError(f"{order.name!r} is not a lease of ours: nothing was rented")
    cloud, gpu = str(offer.details.get("cloud", "")), str(offer.details.get("gpu_id", ""))
    if cloud not in CLOUDS or not gpu:
        raise OfferGoneError(f"{offer.offer_id!r} is not an offer of RunPod")
    for name in order.env:
        if not _ENV_NAME.fullmatch(name):
            raise InvalidError(f"{name!r} is not the name of an environment variable: nothing was rented")
    env = {**order.env, "PUBLIC_KEY": order.public_key.strip()}
    if len(env) > _MAX_ENV:
        raise InvalidError(f"RunPod takes {_MAX_ENV} environment variables at most: nothing was rented")
    image, template = order.image or DEFAULT_IMAGE, template_of(order.image)
    body: dict[str, Any] = {
        "name": order.name,
        # What is given here wins over a template, so no image; its environment is added to ours.
        **({"templateId": template} if template else {"image": image}),
        # Without a count, though one is the default, the service has been seen to find no machine.
        "gpu": {"id": gpu, "count": offer.gpu_count},
        "cloud": cloud,
        "disk": _disk(max(order.disk_gb, offer.disk_gb)),
        "ports": ["22/tcp"],
        "env": env,
        "args": start_command(order, api_url),
    }
    # A floor; the list of allowed versions means equality. An older driver restarts such an image for ever, billed.
    floors = [floor for floor in (offer.details.get("cuda_min"), gpus.cuda_of_image(image)) if floor]
    if floors:
        body["gpu"]["minCudaVersion"] = max((str(floor) for floor in floors), key=_cuda_parts)
    if offer.details.get("data_centers"):
        body["dataCenterIds"] = list(offer.details["data_centers"])
    return body


def start_command(order: Order, api_url: str = DEFAULT_URL) -> str:
    """What the pod runs in place of its image's own command."""
    parts = [startup.tell_host_keys(order.name)]
    if order.fuse is not None:
        parts.insert(0, fuse.part(order.fuse, order.deadline, ending(api_url)))
    return startup.words("bash", "-c", startup.script([*parts, _START_SSHD]))


def ending(api_url: str) -> fuse.Ending:
    """What the key that a pod is given may do is documented for that pod only, and deleting is not proven.

    So both APIs are asked to delete it, then both to stop it; a stopped pod keeps no GPU and no container disk.
    """
    path, pod = "/v2/pods/@ID", '(input:{podId:"@ID"})'
    return fuse.Ending(
        ends=(
            ("DELETE", path, {}),
            ("POST", "/graphql", {"query": f"mutation{{podTerminate{pod}}}"}),
            ("POST", f"{path}/action", {"action": "stop"}),
            ("POST", "/graphql", {"query": f"mutation{{podStop{pod}{{id}}}}"}),
        ),
        url=api_url,
        url_variable=URL_VARIABLE,
        id_variable="RUNPOD_POD_ID",
        key_variable="RUNPOD_API_KEY",
    )


def _disk(disk_gb: float) -> int:
    return max(1, math.ceil(disk_gb))


def _asks_for_the_unknown(need: Need) -> bool:
    """RunPod tells neither reliability nor line speed: a data centre is trusted with them, a community host is not."""
    return any(wish is not None for wish in (need.reliability, need.inet_down_mbps, need.inet_up_mbps))


# --- what comes back --------------------------------------------------------------------------------------------------


def _offer(row: Mapping[str, Any], cloud: str, need: Need, wanted: tuple[str, ...]) -> Offer | None:
    """An offer of ours from a GPU type, in any region; None when this cloud has none to rent or it does not fit."""
    kind, gpu_id = cloud.lower(), str(row.get("id") or "")
    name = gpus.canonical(gpu_id)
    if not _is_wanted(row, gpu_id, name, wanted):
        return None
    # A type that a cloud does not have still shows a price, so the flag counts.
    price, most = _part(row, "price", kind), _part(row, "maxCount", kind)
    if row.get(kind) is not True or not price or price < 0 or (most is not None and most < need.gpu_count):
        return None
    stock = str(row.get("availability") or "")
    if stock == "NONE":
        return None
    memory = _float(row.get("memory"))
    if need.gpu_ram_gb is not None and (memory is None or memory < need.gpu_ram_gb):
        return None
    disk = _disk(need.disk_gb)
    per_hour = usd_to_micros(price * need.gpu_count + disk * DISK_USD_PER_GB_MONTH / HOURS_PER_MONTH)
    if need.max_price_micros_per_h is not None and per_hour > need.max_price_micros_per_h:
        return None
    details: dict[str, Any] = {"cloud": cloud, "gpu_id": gpu_id, "stock": stock}
    if need.cuda_min is not None:
        details["cuda_min"] = _cuda(need.cuda_min)
    return Offer(
        provider="runpod",
        offer_id=f"{kind}:{gpu_id}",
        machine_id=f"{kind}:{gpu_id}",
        gpu=name,
        gpu_count=need.gpu_count,
        price_micros_per_h=per_hour,
        disk_gb=float(disk),
        secure=cloud == "SECURE",
        gpu_ram_gb=memory,
        details=details,
        pooled=True,
    )


def _is_wanted(row: Mapping[str, Any], gpu_id: str, name: str, wanted: tuple[str, ...]) -> bool:
    if not gpu_id or gpu_id == "unknown":
        return False
    if wanted:
        return name in wanted or gpu_id in gpus.runpod_ids(wanted)
    return row.get("manufacturer") != "AMD"  # whoever wants one of those names it


def _by_region(offer: Offer, row: Mapping[str, Any], wishes: Sequence[str]) -> list[Offer]:
    """The offer once for each wish that has stock: a create over all of them would not say which had none.

    A wish is a data centre's id ("EU-RO-1"), the start of one ("EU"), or a country in it. What two wishes share is the
    first one's.
    """
    centres = row.get("dataCenters")
    rows = [centre for centre in (centres if isinstance(centres, list) else ()) if isinstance(centre, dict)]
    left = [str(centre["id"]) for centre in rows if centre.get("id") and centre.get("availability") != "NONE"]
    found = []
    for wish in wishes:
        places = [place for place in left if wish.upper() in (place.upper(), *place.upper().split("-"))]
        if places:
            left = [place for place in left if place not in places]
            name, details = f"{offer.offer_id}@{wish}", {**offer.details, "data_centers": places}
            found.append(replace(offer, offer_id=name, region=",".join(places), details=details))
    return found


def _part(row: Mapping[str, Any], name: str, kind: str) -> float | None:
    inner = row.get(name)
    return _float(inner.get(kind)) if isinstance(inner, dict) else None


def _pod(row: Mapping[str, Any]) -> Pod:
    pod_id = row.get("id")
    if not isinstance(pod_id, str) or not pod_id:
        raise TransientError("runpod: a pod without an id in the answer")
    status = str(row.get("status") or "")
    state = _STATES.get(status, PodState.FAILED)
    address = _address(row) if state is PodState.RUNNING else None
    gpu = row.get("gpu")
    gpu = gpu if isinstance(gpu, dict) else {}
    progress = status if status != "RUNNING" or address else "RUNNING, no way in yet"
    return Pod(
        provider="runpod",
        pod_id=pod_id,
        name=str(row.get("name") or ""),
        state=state,
        created=_time(row.get("createdAt")),
        changed=_time(row.get("startedAt")),
        price_micros_per_h=usd_to_micros(max(0.0, _float(row.get("cost")) or 0.0)),
        gpu=gpus.canonical(str(gpu.get("id") or "")),
        gpu_count=int(_float(gpu.get("count")) or 1),
        address=address,
        progress=progress,
        details={
            name: row[name] for name in ("status", "dataCenterId", "cloud", "cudaVersion", "image") if row.get(name)
        },
    )


def _address(row: Mapping[str, Any]) -> SshAddress | None:
    """Only the direct way: RunPod's proxy carries neither scp nor programs' logins."""
    ssh = row.get("ssh")
    direct = ssh.get("direct") if isinstance(ssh, dict) else None
    if not isinstance(direct, dict):
        return None
    host, port = str(direct.get("host") or "").strip(), direct.get("port")
    if not host or not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        return None
    return SshAddress(host, port, str(direct.get("username") or "root"))


def _event_lines(text: str) -> Iterator[str]:
    """The log lines in a text of server-sent events; half an event at its end, and what is no line, is left out."""
    for event in text.split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in event.splitlines() if line.startswith("data:"))
        try:
            line = json.loads(data).get("line") if data else None
        except (ValueError, AttributeError):
            continue
        if isinstance(line, str):
            yield line


def _says_not_found(reply: Reply) -> bool:
    """Whether the service itself says so, in its own error shape: some proxy's 404 page is no proof of anything."""
    return reply.status == 404 and ("detail" in reply.fields or "title" in reply.fields)


def _time(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def _cuda(version: float | str) -> str:
    major, minor = _cuda_parts(version)
    return f"{major}.{minor}"


def _cuda_parts(version: float | str) -> tuple[int, int]:
    parts = [int(part) for part in re.findall(r"\d+", str(version))[:2]]
    return (parts[0] if parts else 0, parts[1] if len(parts) > 1 else 0)


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _id(pod_id: str) -> str:
    if not _POD_ID.fullmatch(pod_id):
        raise InvalidError(f"{pod_id!r} is not an id of RunPod")
    return quote(pod_id, safe="")


def base_address(url: str) -> str:
    """The address without an API version at its end: some tools want it with one."""
    return re.sub(r"/(?:v[12]|graphql)/?$", "", url.strip().rstrip("/")) if urlsplit(url).scheme else url


def runpod_provider(settings: Settings, environ: Mapping[str, str]) -> RunpodProvider:  # noqa: ARG001
    """The provider from RUNPOD_API_KEY and, where set, RUNPOD_API_BASE_URL. Nothing is asked of the service yet."""
    clock = SystemClock()
    url, key = base_address(environ.get(URL_VARIABLE) or DEFAULT_URL), environ.get(KEY_VARIABLE, "")
    http = Http("runpod", url, key, clock, record=recorder(environ, key), address_variable=URL_VARIABLE)
    return RunpodProvider(http, clock)
