"""Exactly one pod per run, and proof of its end. Floor 2: providers, ledger and SSH, all passed in.

The order of steps is the guarantee: the intent is on disk before the create call, the id is on disk before anything is
done with the pod, a pod that does not work out is proven gone before the next one is asked for.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from pennypod import processes
from pennypod.accounts import account_of
from pennypod.clock import Clock
from pennypod.ending import Ended, Ending, Endings, Release, Report, short
from pennypod.errors import (
    AmbiguousError,
    AuthError,
    BudgetError,
    FencedError,
    FundsError,
    GateError,
    HostKeyError,
    InvalidError,
    LadderExhaustedError,
    NotReadyError,
    PennypodError,
    ProviderError,
    RateLimitedError,
    SshError,
    TransientError,
    UnprovenError,
)
from pennypod.fuse import AFTER_DEADLINE_S
from pennypod.ledger import AttemptRecord, AttemptState, Ledger, PassedOverRecord, QuarantineRecord
from pennypod.metering import MeterReader, pause_s
from pennypod.model.admission import NO_CAPS, Asked, Caps
from pennypod.model.ids import Lease, RandomBelow, parse_lease, random_base32
from pennypod.model.image import RegistryLogin, registry_of
from pennypod.model.money import cost_micros, format_usd, micros_to_usd
from pennypod.model.offer import FuseTerms, Offer, Order, located
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.providers.base import AttachesKeys, Provider, Restarts, TellsLogs, last_words
from pennypod.silence import Silence
from pennypod.spending import beyond_means, too_dear

QUARANTINE_S = 24 * 3600.0
"""A machine that failed the gate is left alone for a day; hosts do get repaired."""

RATE_LIMIT_PATIENCE_S = 180.0
"""For how long in all one offer is waited for while its provider says "too many calls"."""
RESTART_GRACE_S = 60.0
"""For so long a pod may still be shown as stopped after it was started again."""
_FIRST_RATE_PAUSE_S, _LONGEST_RATE_PAUSE_S = 2.0, 30.0

_MAY_BE_THE_IMAGE = (NotReadyError, GateError, SshError, InvalidError)

ATTESTED, ACCEPT_NEW = "attested", "accept-new"
"""How a pod's host key is known: told by its provider's authenticated API, or the first one that was met and kept."""


class Login(Protocol):
    """Makes a pod usable over SSH and checks it; see `acceptance.PodLogin`."""

    def log_in(
        self, addresses: Callable[[], Sequence[SshAddress]], host_keys: Sequence[str], limit_s: float
    ) -> SshAddress:
        """The address that let us in. Raises SshError when no login succeeds within `limit_s` seconds.

        `addresses` looks at the pod again each time it is called: ways in change while a pod starts. It raises when
        the pod will not become usable.
        """

    def host_key(self, address: SshAddress, ask: Callable[[], Sequence[str]], patience_s: float) -> str:
        """Compare the host key that was met with what the provider tells within `patience_s`, and pin what it tells.

        Returns ATTESTED, or ACCEPT_NEW when it tells nothing. Raises HostKeyError when it tells of other keys.
        """

    def check(self, address: SshAddress) -> dict[str, Any]:
        """Run the acceptance check and return its report. Raises GateError when the pod fails it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an offer is taken for: the seconds that the run is expected to need on it, and the cost of its traffic."""

    expected_s: float = 0.0
    traffic_micros: int = 0


@dataclass(frozen=True, slots=True)
class RentRequest:
    """What to rent for a run. `offers` in the order to try them; `images` maps a provider's name to its image.

    `instead` names the images that a provider's next pods start from when one of `images` gave no usable pod there;
    `logins` by registry are for those that not everybody may pull.

    With `controller`, nothing is rented once another controller has taken the run over. `terms` by offer id: an offer
    on which the run could no longer finish before the deadline is passed over, and so is one with which all attempts
    that would break one of `caps` by what it may cost at worst, whatever other runs are admitted meanwhile. With
    `lease_s`, the pod ends itself when for so many seconds nobody has renewed its lease; in any case it does so at the
    deadline.
    """

    run: str
    offers: Sequence[Offer]
    images: Mapping[str, str]
    disk_gb: float
    deadline: float
    public_key: str
    renter: str
    max_attempts: int = 5
    controller: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    terms: Mapping[str, Terms] = field(default_factory=dict)
    caps: Caps = NO_CAPS
    lease_s: int = 0
    instead: Mapping[str, str] = field(default_factory=dict)
    logins: Mapping[str, RegistryLogin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A pod that is ours, reachable and accepted. `created` says whether this call rented it, from `image`."""

    attempt: AttemptRecord
    pod: Pod
    address: SshAddress
    created: bool
    host_key: str = ACCEPT_NEW
    gate: dict[str, Any] = field(default_factory=dict)
    image: str = ""


class Rental:
    """Rents and destroys for runs in one ledger. Holds no state of its own between calls."""

    def __init__(
        self,
        providers: Mapping[str, Provider],
        ledger: Ledger,
        clock: Clock,
        *,
        randbelow: RandomBelow = secrets.randbelow,
        alive: Callable[[str], bool] = processes.is_alive,
    ) -> None:
        self._alive = alive
        self._providers = providers
        self._ledger = ledger
        self._clock = clock
        self._randbelow = randbelow
        self._endings = Endings(providers, ledger, clock)

    # --- renting ------------------------------------------------------------------------------------------------

    def existing(self, run: str) -> Tenancy | None:
        """The run's pod when it is ready and its provider still shows it running."""
        for attempt in self._ledger.attempts(run):
            if attempt.state is not AttemptState.READY or attempt.pod_id is None:
                continue
            pod = self._providers[attempt.provider].pod(attempt.pod_id)
            address = _address_of(attempt)
            if pod is not None and pod.state is PodState.RUNNING and address is not None:
                return Tenancy(attempt, pod, address, created=False, host_key=attempt.host_key or ACCEPT_NEW)
        return None

    def rent(self, request: RentRequest, login: Login, report: Report, before_create: Callable[[], None]) -> Tenancy:
        """Walk the offers until one gives a usable pod.

        `before_create` is called right before every create and raises when the guard is not there. Raises
        LadderExhaustedError with each rung's reason, FencedError when the run was taken away, AuthError or FundsError
        when no other offer can help, UnprovenError when a failed pod could not be proven gone (then nothing more is
        rented: one pod that may bill is enough).
        """
        found = self.existing(request.run)
        if found is not None:
            return found
        self._clear_leftovers(request, report)
        tried = len(self._ledger.attempts(request.run))
        rungs: list[dict[str, Any]] = []
        for offer in request.offers[: request.max_attempts]:
            self._ledger.raise_if_fenced(request.run, request.controller)
            try:
                self._refuse_beyond_limits(request, offer, first=not (tried or rungs))
            except NotReadyError as exc:
                rungs.append(_rung(offer, exc))
                self._pass_over(request.run, offer, exc, report)
                continue
            try:
                return self._try_until_heard(request, offer, login, report, before_create)
            except (AuthError, FundsError, FencedError, UnprovenError):
                raise
            except (ProviderError, NotReadyError, BudgetError, GateError, SshError) as exc:
                rungs.append(_rung(offer, exc))
                report("rent", f"{_describe(offer)}: {exc}")
                request = self._with_another_image(request, offer.provider, exc, report)
        said = [f"{located(rung['machine_id'], rung['region'])}: {rung['message']}" for rung in rungs]
        reasons = "; ".join(said) or "there was no offer to try"
        raise LadderExhaustedError(f"no usable pod after {len(rungs)} attempts: {reasons}", attempts=rungs)

    def _with_another_image(
        self, request: RentRequest, provider: str, why: PennypodError, report: Report
    ) -> RentRequest:
        """The request for the next rung: an image of ours that may be to blame is not paid for twice."""
        instead = request.instead.get(provider)
        blamed = isinstance(why, _MAY_BE_THE_IMAGE) and not isinstance(why, HostKeyError)
        if not blamed or instead is None or request.images.get(provider, "") == instead:
            return request
        report("rent", f"warning: the next pods at {provider} start from the stock image: this one may be to blame")
        return replace(request, images={**request.images, provider: instead})

    def _pass_over(self, run: str, offer: Offer, why: PennypodError, report: Report) -> None:
        self._ledger.record_passed_over(_passed_over(run, offer, why, self._clock.now()))
        report("rent", f"{_describe(offer)}: {why}")

    def _refuse_beyond_limits(self, request: RentRequest, offer: Offer, *, first: bool) -> None:
        """Raises when the tries before have left too little time for this offer."""
        terms = request.terms.get(offer.offer_id, Terms())
        left_s = request.deadline - self._clock.now()
        if not first and left_s < terms.expected_s:
            raise NotReadyError(
                f"passed over: {left_s / 60:.1f} min are left to the deadline, about {terms.expected_s / 60:.1f} needed"
            )

    def _asked(self, request: RentRequest, offer: Offer, report: Report) -> Asked:
        """What this offer may cost at worst, and what its provider has left for us where it tells."""
        worst = cost_micros(offer.price_micros_per_h, request.deadline - self._clock.now())
        worst += request.terms.get(offer.offer_id, Terms()).traffic_micros
        try:
            balance = self._providers[offer.provider].balance_micros()
        except ProviderError as exc:
            # A provider that wants money says so at the create; it must not be this call that keeps a run from renting.
            report("rent", f"the balance at {offer.provider} is not known: {exc}")
            balance = None
        return Asked(worst, request.caps, balance)

    def resume(
        self,
        run: str,
        public_key: str,
        login: Login,
        report: Report,
        *,
        pinned: Sequence[str],
        limit_s: float,
        restart: bool = True,
    ) -> Tenancy:
        """The pod that an earlier controller of the run has left, found in its provider's listing by its lease.

        Its address is read anew. A pod that had not been accepted yet is checked now. `pinned` are the host keys to
        believe where the provider cannot tell them. Raises NotReadyError when no pod is left that could go on,
        GateError or SshError when there is one and it does not prove usable within `limit_s`.
        """
        reasons = []
        for attempt in reversed(self._ledger.attempts(run)):
            if attempt.final:
                continue
            if attempt.state is AttemptState.DESTROYING:
                reasons.append(f"its end was asked for already ({attempt.reason or 'no reason given'})")
                continue
            provider = self._providers[attempt.provider]
            pod_id = self._endings.find_by_name(provider, attempt.lease_name) or attempt.pod_id
            pod = None if pod_id is None else self._look(provider, pod_id, report)
            if pod is None:
                reasons.append(f"{provider.name} has no pod {attempt.lease_name} any more")
                continue
            try:
                pod = self._start_again(provider, pod, report) if restart else pod
            except ProviderError as exc:
                reasons.append(f"{_given_up(pod)}, and cannot be started: {exc}")
                continue
            if pod.state in (PodState.FAILED, PodState.STOPPED):
                reasons.append(_given_up(pod))
                continue
            if attempt.pod_id is None:
                self._endings.adopt(attempt, pod.pod_id)
            report("rent", f"pod {short(pod.pod_id)} is still there, on {attempt.machine_id}", pod_id=pod.pod_id)
            return self._take_back(attempt, provider, pod.pod_id, public_key, login, report, pinned, limit_s)
        raise NotReadyError(f"run {run} has no pod to go on with: {'; '.join(reasons) or 'none was ever rented'}")

    def _start_again(self, provider: Provider, pod: Pod, report: Report) -> Pod:
        """The pod, started if it was stopped and its disk is still there: by its host, say, or for want of credit."""
        if pod.state is not PodState.STOPPED or not isinstance(provider, Restarts):
            return pod
        report("rent", f"pod {short(pod.pod_id)} was stopped; starting it again for what is on its disk")
        provider.start(pod.pod_id)
        until = self._clock.now() + RESTART_GRACE_S
        while True:
            self._clock.sleep(provider.timing.poll_s)
            seen = self._look(provider, pod.pod_id, report) or pod
            if seen.state is not PodState.STOPPED or self._clock.now() >= until:
                return seen

    def _take_back(
        self,
        attempt: AttemptRecord,
        provider: Provider,
        pod_id: str,
        public_key: str,
        login: Login,
        report: Report,
        pinned: Sequence[str],
        limit_s: float,
    ) -> Tenancy:
        pod = self._wait_until_running(attempt, provider, pod_id, report)
        ways_in = self._ways_in(provider, pod, public_key, report)
        told = self._told_host_keys(provider, pod_id, attempt.lease_name)
        host_key = ATTESTED if told else (attempt.host_key or ACCEPT_NEW)
        address = login.log_in(ways_in, told or pinned, limit_s)
        report("rent", f"logged in to {address.host}:{address.port} again, host key {host_key}")
        accepted = self._ledger.attempt(attempt.id).state is AttemptState.READY
        # A pod that was accepted may be at work: another matmul would only be in the way.
        gate = {} if accepted else self._check(attempt, login, address, report)
        if not accepted or address != _address_of(attempt) or host_key != attempt.host_key:
            self._ledger.record_ready(attempt.id, address, self._clock.now(), host_key=host_key)
        return Tenancy(self._ledger.attempt(attempt.id), pod, address, created=False, host_key=host_key, gate=gate)

    def _try_until_heard(
        self, request: RentRequest, offer: Offer, login: Login, report: Report, before_create: Callable[[], None]
    ) -> Tenancy:
        """Try an offer, again while its provider refuses the create for too many calls: that made nothing.

        Each try is an attempt with a name of its own. Raises RateLimitedError when waiting would take too long.
        """
        asked, pause = self._clock.now(), _FIRST_RATE_PAUSE_S
        while True:
            before_create()
            number = 1 + max((attempt.attempt for attempt in self._ledger.attempts(request.run)), default=0)
            try:
                return self._try_offer(request, offer, number, login, report)
            except RateLimitedError as exc:
                last = self._ledger.attempts(request.run)[-1]
                resumed = self._clock.now() + max(exc.retry_after_s, pause)
                expected_s = request.terms.get(offer.offer_id, Terms()).expected_s
                too_late = resumed > asked + RATE_LIMIT_PATIENCE_S or resumed + expected_s > request.deadline
                if last.state is not AttemptState.NEVER or too_late:
                    raise
                report("rent", f"{exc}; asking again in {resumed - self._clock.now():.0f} s")
                pause = min(2 * pause, _LONGEST_RATE_PAUSE_S)
                self._sleep_unless_fenced(request, resumed)

    def _sleep_unless_fenced(self, request: RentRequest, until: float) -> None:
        while (left := until - self._clock.now()) > 0:
            self._ledger.raise_if_fenced(request.run, request.controller)
            self._clock.sleep(min(left, 5.0))

    def _try_offer(self, request: RentRequest, offer: Offer, number: int, login: Login, report: Report) -> Tenancy:
        provider = self._providers[offer.provider]
        lease = Lease(request.run, number, int(request.deadline), random_base32(5, self._randbelow))
        report("rent", f"asking for {_describe(offer)}", usd_per_h=micros_to_usd(offer.price_micros_per_h))
        asked = self._asked(request, offer, report)
        try:
            attempt = self._ledger.open_attempt(
                lease,
                offer,
                renter=request.renter,
                at=self._clock.now(),
                controller=request.controller,
                lease_s=request.lease_s,
                asked=asked,
                account=account_of(provider),
            )
        except BudgetError as exc:
            exc.message = f"passed over: {exc.message}"
            self._ledger.record_passed_over(_passed_over(request.run, offer, exc, self._clock.now()))
            raise
        pod_id = self._create(provider, offer, attempt, request, lease)
        try:
            self._ledger.record_pod(attempt.id, pod_id, self._clock.now())
        except FencedError:
            # Somebody gave this attempt up while the create call was under way: the late arrival is destroyed.
            self._ledger.record_late(attempt.id, pod_id, self._clock.now())
            self.destroy(
                self._ledger.attempt(attempt.id), outcome="cancelled", reason="it came too late", report=report
            )
            raise
        report("rent", f"pod {short(pod_id)} rented on {located(offer.machine_id, offer.region)}", pod_id=pod_id)
        try:
            tenancy = self._make_usable(request, provider, attempt, pod_id, login, report)
            self._ledger.record_ready(attempt.id, tenancy.address, self._clock.now(), host_key=tenancy.host_key)
            return tenancy
        except PennypodError as exc:
            if isinstance(exc, (GateError, HostKeyError)) and not offer.pooled:
                self._quarantine(offer, exc)
            if isinstance(exc, (NotReadyError, SshError)):
                exc.message += self._why(provider, pod_id)
            self.destroy(self._ledger.attempt(attempt.id), outcome=exc.code, reason=str(exc), report=report)
            raise

    def _why(self, provider: Provider, pod_id: str) -> str:
        """What the pod's own log says of its trouble, asked before the log dies with the pod; "" when nothing does."""
        if not isinstance(provider, TellsLogs):
            return ""
        try:
            said = last_words(provider.last_lines(pod_id))
        except PennypodError:
            return ""
        return f"; its log says: {said}" if said else ""

    def _create(
        self, provider: Provider, offer: Offer, attempt: AttemptRecord, request: RentRequest, lease: Lease
    ) -> str:
        image = request.images.get(offer.provider, "")
        order = Order(
            name=lease.name,
            image=image,
            disk_gb=request.disk_gb,
            public_key=request.public_key,
            deadline=lease.deadline,
            env=dict(request.env),
            fuse=FuseTerms(
                seconds_left=math.ceil(max(0.0, lease.deadline - self._clock.now())),
                lease_s=request.lease_s,
                after_s=AFTER_DEADLINE_S,
            ),
            login=request.logins.get(registry_of(image)),
        )
        try:
            return provider.rent(offer, order)
        except AmbiguousError:
            pod_id = self._endings.find_by_name(provider, lease.name)
            if pod_id is not None:
                return pod_id
            self._ledger.record_never(
                attempt.id, "ambiguous", "the create call was lost and made no pod", self._clock.now()
            )
            raise
        except ProviderError as exc:
            # A plain refusal: the provider says that it made nothing.
            self._ledger.record_never(attempt.id, exc.code, str(exc), self._clock.now())
            raise

    def _make_usable(
        self,
        request: RentRequest,
        provider: Provider,
        attempt: AttemptRecord,
        pod_id: str,
        login: Login,
        report: Report,
    ) -> Tenancy:
        started = self._clock.now()
        pod = self._wait_until_running(attempt, provider, pod_id, report)
        left = max(5.0, provider.timing.start_limit_s - (self._clock.now() - started))
        ways_in = self._ways_in(provider, pod, request.public_key, report)
        address = login.log_in(ways_in, [], left)
        seconds = self._clock.now() - started
        host_key = login.host_key(
            address,
            lambda: self._told_host_keys(provider, pod_id, attempt.lease_name),
            provider.timing.host_keys_s,
        )
        report("rent", f"logged in to {address.host}:{address.port} after {seconds:.1f} s, host key {host_key}")
        self._ledger.finish_stage(request.run, "rent", self._clock.now())
        self._ledger.start_stage(request.run, "gate", self._clock.now())
        gate = self._check(attempt, login, address, report)
        self._ledger.finish_stage(request.run, "gate", self._clock.now())
        report("gate", f"accepted: {gate.get('summary', 'all checks passed')}")
        image = request.images.get(provider.name, "")
        done = self._ledger.attempt(attempt.id)
        return Tenancy(done, pod, address, created=True, host_key=host_key, gate=gate, image=image)

    def _told_host_keys(self, provider: Provider, pod_id: str, name: str) -> list[str]:
        """What the provider tells of the pod's host keys now; a fault of it is no reason to lose the pod."""
        try:
            return provider.host_keys(pod_id, name)
        except ProviderError:
            return []

    def _check(self, attempt: AttemptRecord, login: Login, address: SshAddress, report: Report) -> dict[str, Any]:
        """The acceptance check. A fuse that does not run is told and written down; the other rings are there."""
        gate = login.check(address)
        fuse = gate.get("fuse")
        if fuse is not None:
            self._ledger.record_fuse(attempt.id, fuse)
            if not fuse["armed"] or fuse["has_key"] is False:
                what = "has no key to end it with" if fuse["armed"] else "does not run"
                report(
                    "gate", f"warning: the pod's own fuse {what}: without this machine only `pennypod sweep` ends it"
                )
        return gate

    def _ways_in(
        self, provider: Provider, pod: Pod, public_key: str, report: Report
    ) -> Callable[[], Sequence[SshAddress]]:
        """A function that lets the run's key in and says where to log in, anew at every call.

        Ports move while a pod starts, and a provider may have lost the key: both are put right between two tries.
        """
        seen: Pod | None = pod

        def look() -> Sequence[SshAddress]:
            nonlocal seen
            self._attach_key(provider, pod.pod_id, public_key, report)
            found, seen = seen or self._look(provider, pod.pod_id, report), None
            if found is None:
                raise NotReadyError(f"pod {short(pod.pod_id)} vanished before anybody could log in")
            if found.state in (PodState.FAILED, PodState.STOPPED):
                raise NotReadyError(_given_up(found))
            return found.addresses

        return look

    def _attach_key(self, provider: Provider, pod_id: str, public_key: str, report: Report) -> None:
        if not isinstance(provider, AttachesKeys):
            return
        try:
            provider.attach_key(pod_id, public_key)
        except ProviderError as exc:
            # The create call has brought the key along as well; whether a login works is what counts.
            report("rent", f"pod {short(pod_id)}: the key could not be attached: {exc}")

    def _wait_until_running(self, attempt: AttemptRecord, provider: Provider, pod_id: str, report: Report) -> Pod:
        """Progress extends patience, a terminal state ends it at once, nothing waits without a limit."""
        timing = provider.timing
        started = changed = self._clock.now()
        seen: tuple[Any, ...] = ()
        meter = MeterReader(self._ledger, self._ledger.attempt(attempt.id), report)
        while True:
            self._ledger.raise_if_fenced(attempt.run)
            asked = self._clock.now()
            pod = self._look(provider, pod_id, report)
            now = self._clock.now()
            if pod is not None:
                meter.note(pod, asked, now)
                self._refuse_dearer(meter.attempt)
                if pod.state is PodState.RUNNING and pod.address is not None:
                    return pod
                if pod.state in (PodState.FAILED, PodState.STOPPED):
                    raise NotReadyError(_given_up(pod))
                look = (pod.state, pod.progress, pod.address)
                if look != seen:
                    seen, changed = look, now
                    report("rent", f"pod {short(pod_id)} {pod.state.value} {pod.progress}".rstrip())
            elif now - started > timing.listing_lag_s:
                raise NotReadyError(f"pod {short(pod_id)} vanished while it was starting")
            if now - changed > timing.start_patience_s:
                raise NotReadyError(f"pod {short(pod_id)} showed no progress for {timing.start_patience_s:.0f} s")
            if now - started > timing.start_limit_s:
                raise NotReadyError(f"pod {short(pod_id)} was not up within {timing.start_limit_s:.0f} s")
            running = pod is not None and pod.state is PodState.RUNNING
            self._clock.sleep(pause_s(now - started, timing.poll_s, running=running))

    def _refuse_dearer(self, attempt: AttemptRecord) -> None:
        """Raises BudgetError when a starting pod turns out to be dearer than the run may pay.

        One that was accepted before is at work: its own watch ends it in order.
        """
        lease, now = parse_lease(attempt.lease_name), self._clock.now()
        if attempt.ready is not None or lease is None:
            return
        why = too_dear(attempt) or beyond_means(self._ledger.attempts(attempt.run), lease.deadline, now)
        if why:
            raise BudgetError(why, price_micros_per_h=attempt.price_now)

    def _look(self, provider: Provider, pod_id: str, report: Report) -> Pod | None:
        """One look at a starting pod, however long the answer takes; while it does not come, that is told."""
        started = self._clock.now()
        with Silence(provider.name, lambda: started, partial(report, "rent"), self._clock):
            while True:
                try:
                    return provider.pod(pod_id)
                except RateLimitedError as exc:
                    self._clock.sleep(min(exc.retry_after_s, 60.0))
                except TransientError:
                    self._clock.sleep(provider.timing.poll_s)

    def _clear_leftovers(self, request: RentRequest, report: Report) -> None:
        """An earlier try of this run died half-way: its pod is proven gone before another is asked for.

        Raises FencedError while that try lives: its create call may be under way, and would come after our own.
        """
        for attempt in self._ledger.attempts(request.run):
            if attempt.final:
                continue
            renting = attempt.state in (AttemptState.INTENT, AttemptState.RENTED)
            if renting and attempt.renter != request.renter and self._alive(attempt.renter):
                raise FencedError(
                    f"run {request.run} is being rented for already, by process {processes.pid_of(attempt.renter)}",
                    renter=attempt.renter,
                )
            self.destroy(attempt, outcome="abandoned", reason="left by an earlier, broken try", report=report)

    def _quarantine(self, offer: Offer, exc: PennypodError) -> None:
        now = self._clock.now()
        self._ledger.quarantine(
            QuarantineRecord(offer.provider, offer.machine_id, at=now, until=now + QUARANTINE_S, reason=str(exc))
        )

    # --- destroying ---------------------------------------------------------------------------------------------

    def destroy(
        self, attempt: AttemptRecord, *, outcome: str, reason: str, report: Report, patience_s: float = 120.0
    ) -> dict[str, Any] | None:
        """End one attempt and prove it; the receipt, or None when no pod ever came of it.

        Safe to call from several processes at once. Raises UnprovenError when absence could not be proven within
        `patience_s`: the attempt then stays on the books as "may still be billing".
        """
        return self._endings.end(attempt, outcome=outcome, reason=reason, report=report, patience_s=patience_s)

    def destroy_all(
        self, endings: Sequence[Ending], report: Report, *, patience_s: float = 120.0, release: Release | None = None
    ) -> list[Ended]:
        """End pods side by side; what became of each. `release` holds back those with something left to save."""
        return self._endings.end_all(endings, report, patience_s, release)

    def settle(self, attempt: AttemptRecord) -> bool:
        """Find out what became of a create call whose caller is dead; returns whether there is a pod of it."""
        return self._endings.settle(attempt)


def _rung(offer: Offer, why: PennypodError) -> dict[str, Any]:
    return {"offer": offer.offer_id, "machine_id": offer.machine_id, "region": offer.region, **why.as_failure()}


def _passed_over(run: str, offer: Offer, why: PennypodError, at: float) -> PassedOverRecord:
    return PassedOverRecord(
        run=run,
        at=at,
        provider=offer.provider,
        offer_id=offer.offer_id,
        machine_id=offer.machine_id,
        region=offer.region,
        gpu=offer.gpu,
        price_micros_per_h=offer.price_micros_per_h,
        code=why.code,
        reason=str(why),
    )


def ours(pods: Sequence[Pod]) -> list[tuple[Pod, Lease]]:
    """The pods whose name carries a lease of ours; nothing else is ever touched."""
    return [(pod, lease) for pod in pods if (lease := parse_lease(pod.name)) is not None]


def _given_up(pod: Pod) -> str:
    return f"pod {short(pod.pod_id)} is {pod.state.value}: {pod.progress or 'no reason given'}"


def _address_of(attempt: AttemptRecord) -> SshAddress | None:
    if attempt.ssh_host is None or attempt.ssh_port is None:
        return None
    return SshAddress(attempt.ssh_host, attempt.ssh_port, attempt.ssh_user or "root")


def _describe(offer: Offer) -> str:
    count = f"{offer.gpu_count}x " if offer.gpu_count > 1 else ""
    where = located(offer.machine_id, offer.region)
    return f"{count}{offer.gpu} on {offer.provider}/{where} at {format_usd(offer.price_micros_per_h)}/h"
