"""What every provider can do. Floor 1: the protocol only; knows the model, no provider.

Truths that are never mixed: `pods()` and `pod()` say what exists. A failed listing raises; it never looks empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pennypod.errors import AuthError, ProviderError
from pennypod.model.image import RegistryLogin, Repository
from pennypod.model.offer import Need, Offer, Order
from pennypod.model.pod import Pod

_COMPLAINT = re.compile(
    r"\b(?:errors?|failed|failure|fatal|denied|not found|no such|unsatisfied|unable|cannot|exit status)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Timing:
    """How a provider behaves in time, in seconds.

    listing_lag_s      how long a fresh pod may be missing from the listing
    absence_checks     how many spaced answers of "not there" count as gone
    absence_spacing_s  the space between them
    poll_s             how often a pod is looked at while it starts
    start_patience_s   without any sign of progress for this long, a starting pod is given up
    start_limit_s      however much progress it shows, a pod must be reachable within this
    host_keys_s        how long after the first login the word on its host keys may take to come; 0: at once or never
    """

    listing_lag_s: float
    absence_checks: int
    absence_spacing_s: float
    poll_s: float
    start_patience_s: float
    start_limit_s: float
    host_keys_s: float = 0.0


class Provider(Protocol):
    """A place that rents pods. Every method may raise a `ProviderError` subclass and nothing else of its own."""

    @property
    def name(self) -> str: ...

    @property
    def timing(self) -> Timing: ...

    def offers(self, need: Need) -> list[Offer]:
        """Rentable offers that satisfy `need`, in no promised order."""

    def prepare(self, image: str, on_progress: Callable[[str], None]) -> None:
        """Make what must exist before a create (a local image, say). Free of charge, may take minutes, idempotent."""

    def rent(self, offer: Offer, order: Order) -> str:
        """Create a pod named `order.name` and return its id without waiting for it to be usable.

        Raises AmbiguousError when the pod may or may not exist; never repeats a create on its own.
        """

    def pods(self) -> list[Pod]:
        """Every pod of the account, whoever made it: all pages, all states."""

    def pod(self, pod_id: str) -> Pod | None:
        """One pod, or None only when the provider says plainly that there is none."""

    def destroy(self, pod_id: str) -> None:
        """Ask once for the end of a pod. Idempotent; returning is no proof, and `pennypod.proof` asks again."""

    def host_keys(self, pod_id: str, name: str) -> list[str]:
        """The SSH host keys ("ssh-ed25519 AAAA...") of the pod rented as `name`, over an authenticated channel.

        Empty where there is no such channel, and while it does not tell them yet.
        """

    def balance_micros(self) -> int | None:
        """Money left in the account, None where the notion does not exist."""


@runtime_checkable
class AttachesKeys(Protocol):
    """A provider that lets a key into a pod that already exists; elsewhere the create call is the only chance."""

    def attach_key(self, pod_id: str, public_key: str) -> None:
        """Let `public_key` log in. Idempotent, also with a key that is there already."""

    def renew_key(self, pod_id: str, public_key: str) -> None:
        """Let `public_key` log in again after the pod has lost it, whatever the provider believes of it."""


@runtime_checkable
class Restarts(Protocol):
    """A provider that keeps the disk of a stopped pod: started again, it has what was on it, and nothing runs."""

    def start(self, pod_id: str) -> None:
        """Ask for it; returning is not being up. Raises NoCapacityError when its GPUs are taken by somebody else."""


@runtime_checkable
class TellsLogs(Protocol):
    """A provider that can say what a pod and its host wrote last."""

    def last_lines(self, pod_id: str, tail: int = 50) -> list[str]:
        """The host's lines, then the container's; empty when none come within some seconds. Changes nothing."""


@dataclass(frozen=True, slots=True)
class PriceRequest:
    """A host asks for more than its pod costs: what it wants per hour, all parts of the price together."""

    request_id: str
    pod_id: str
    asked_micros_per_h: int


@runtime_checkable
class HearsPriceRequests(Protocol):
    """A provider whose hosts may ask for more while a pod runs. Until somebody accepts, the price stays as it is."""

    def price_requests(self) -> list[PriceRequest]:
        """Those of the account that wait for an answer."""

    def refuse_price(self, request_id: str) -> None:
        """Say no. One that no longer waits is fine."""


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image made of a pod. `layer_bytes` is what it adds to its base; digests are "sha256:..."."""

    reference: str
    image_id: str
    digest: str
    bytes: int
    base_digest: str
    layer_bytes: int


@runtime_checkable
class SavesImages(Protocol):
    """A provider that makes images of pods. Whatever changes images is done inside `saving`, one process at a time."""

    def saving(self, on_progress: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the images; what a killed bake has left is gone once inside. `on_progress` is told while it waits."""

    def image_base(self, image: str) -> str:
        """The name of what a pod of `image` is started from; another content has another name."""

    def save_image(
        self, pod_id: str, run: str, labels: Mapping[str, str], pod_home: str, on_progress: Callable[[str], None]
    ) -> SavedImage:
        """Make a draft of the run's pod, without anything that is the pod's alone. The pod is left as it is."""

    def publish_image(self, run: str, name: str) -> str:
        """Give the run's draft its lasting name, in one step; returns the reference to rent pods with."""

    def discard_images(self, run: str) -> None:
        """Delete every image made of the run's pods, draft or not. Raises when one is left."""

    def saved_images(self) -> dict[str, str]:
        """The lasting names that are there, each with the id ("sha256:...") of what it names now."""

    def push_image(self, name: str, to: Repository, tag: str, login: RegistryLogin | None) -> str:
        """Send the image of that lasting name to a registry; returns the digest it has there. May take an hour."""

    def remove_image(self, name: str) -> None:
        """Delete the image of that lasting name; none is fine."""

    def ask_pod(self, pod_id: str, argv: Sequence[str]) -> str:
        """The stdout of a command on the pod, empty when it fails there."""


@runtime_checkable
class TakesSnapshots(Protocol):
    """A provider whose hosts make images of pods, and push them to a registry themselves."""

    def take_snapshot(self, pod_id: str, to: Repository, login: RegistryLogin) -> None:
        """Ask for it; returning is not being there. The host gets the login."""


def last_words(lines: Sequence[str], limit: int = 200) -> str:
    """The one line of a log that most likely says why a pod does not come up: the last complaint, else the last one."""
    said = [" ".join(line.split()) for line in lines if line.strip()]
    complaints = [line for line in said if _COMPLAINT.search(line)]
    line = (complaints or said or [""])[-1]
    return line if len(line) <= limit else line[: limit - 3] + "..."


@runtime_checkable
class TellsAccount(Protocol):
    """A provider that can say whose pods it shows, so that another account's silence is not taken for absence."""

    def key_mark(self) -> str:
        """A one-way mark of the key in use, `model.account.mark`. Asks nobody."""

    def holder(self) -> str | None:
        """The provider's own id of the account, asked for once; None where it is not told to this key, or now."""


@runtime_checkable
class TellsSpend(Protocol):
    """A provider that says what the account spends per hour: a view of its own of what still bills."""

    def spend_micros_per_h(self) -> int | None:
        """What the account's pods cost per hour now; None where this key may not know. Raises on a passing fault."""


@dataclass(frozen=True, slots=True)
class Reach:
    """One thing that the key may do or not, as a call that changes nothing has shown.

    `what` goes on from "the key ..."; `allowed` is None when it could not be found out; `scope` is what to give the key
    as the provider calls it; without an `essential` one there is no run.
    """

    what: str
    scope: str
    allowed: bool | None
    essential: bool = True


@runtime_checkable
class TellsReach(Protocol):
    """A provider that can find out what its key may do, beside seeing the balance. It never raises a ProviderError."""

    def reach(self) -> list[Reach]:
        """Whether it may rent or destroy is no part of it: that shows only when it does."""


def tried(what: str, scope: str, call: Callable[[], object], *, essential: bool = True) -> Reach:
    """The result of one read-only call."""
    try:
        call()
    except AuthError:
        return Reach(what, scope, False, essential)
    except ProviderError:
        return Reach(what, scope, None, essential)
    return Reach(what, scope, True, essential)
