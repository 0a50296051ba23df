"""Is this machine fit to rent from? Floor 2: asks, reads and tries out, changes nothing but one file that it removes.

Every check is one finding: ok, warn (a run can work) or fail (it cannot), what was seen, and what to do about it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pennypod import __version__
from pennypod.clock import Clock
from pennypod.errors import AuthError, FundsError, PennypodError
from pennypod.ledger import open_ledger
from pennypod.model.money import format_usd
from pennypod.providers.base import Provider, Reach, TellsReach
from pennypod.providers.local.provider import LocalProvider
from pennypod.providers.registry import LOCAL, PROVIDERS, configured, open_provider
from pennypod.providers.servertime import told_time
from pennypod.sentinel import last_look
from pennypod.settings import Settings, home_advice

OK, WARN, FAIL = "ok", "warn", "fail"
PYTHONS = ((3, 11), (3, 13))
ANSIBLE = "2.19."
SSH_TOOLS = ("ssh", "ssh-keygen", "tar")
DISK_FAIL_BYTES, DISK_WARN_BYTES = 200_000_000, 2_000_000_000
SKEW_WARN_S, SKEW_FAIL_S = 5.0, 120.0
BALANCE_WARN_MICROS = 1_000_000
SENTINEL_WARN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's. `advice` is empty when there is nothing to do."""

    name: str
    level: str
    seen: str
    advice: str = ""


class Doctor:
    """All checks over one environment; what lies outside is passed in so that tests can make it ill."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        clock: Clock,
        *,
        open_named: Callable[[str, Settings, Mapping[str, str]], Provider] = open_provider,
        which: Callable[[str], str | None] = shutil.which,
        server_time: Callable[[str], float | None] = told_time,
        engine: Callable[[Settings, Mapping[str, str]], str] | None = None,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
        versions: Callable[[str], str] = importlib.metadata.version,
        python: tuple[int, int, int] = sys.version_info[:3],
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._clock = clock
        self._open = open_named
        self._which = which
        self._server_time = server_time
        self._engine = engine or probe_engine
        self._free_bytes = free_bytes
        self._versions = versions
        self._python = python

    def findings(self) -> Iterator[Finding]:
        """Every finding, the cheap checks first, so that a slow provider keeps nobody from reading the rest."""
        yield from self.software()
        yield self.state_folder()
        yield self.disk()
        yield self.ledger()
        yield self.sentinel()
        yield self.fuses()
        yield from self.ssh_tools()
        yield self.container_engine()
        for name, entry in PROVIDERS.items():
            if entry.key_variable:
                yield from self.provider(name, entry.key_variable)
        yield self.choice()

    # --- this machine -------------------------------------------------------------------------------------------------

    def software(self) -> Iterator[Finding]:
        """Versions of what everything else stands on."""
        yield Finding("pennypod", OK, __version__)
        text = ".".join(str(part) for part in self._python)
        low, high = PYTHONS
        if low <= self._python[:2] <= high:
            yield Finding("python", OK, text)
        else:
            span = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
            yield Finding("python", FAIL, text, f"use Python {span}: PYTHON=/path/to/python3 make setup")
        try:
            ansible = self._versions("ansible-core")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("ansible-core", FAIL, "not installed", "make setup installs it")
            return
        if ansible.startswith(ANSIBLE):
            yield Finding("ansible-core", OK, ansible)
        else:
            yield Finding("ansible-core", WARN, ansible, f"pennypod is tried with {ANSIBLE}x: make setup installs that")

    def state_folder(self) -> Finding:
        """Keys and the ledger live there: ours alone, and writable."""
        home = self._settings.home
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix=".doctor-", dir=home)
            os.close(handle)
            Path(path).unlink()
            mode = stat.S_IMODE(home.stat().st_mode)
        except OSError as exc:
            return Finding(
                "state folder",
                FAIL,
                f"{home}: {exc.strerror or exc}",
                home_advice(exc),
            )
        if mode & 0o077:
            return Finding(
                "state folder",
                WARN,
                f"{home} is open to others (mode {mode:03o})",
                f"chmod 700 {home}: SSH keys are in it",
            )
        return Finding("state folder", OK, str(home))

    def disk(self) -> Finding:
        """Room for checkpoints, logs and the ledger."""
        try:
            free = self._free_bytes(self._settings.home)
        except OSError as exc:
            return Finding("free disk", FAIL, f"cannot be told: {exc.strerror or exc}", "repair the state folder first")
        seen = f"{free / 1e9:.1f} GB free at {self._settings.home}"
        if free < DISK_FAIL_BYTES:
            return Finding("free disk", FAIL, seen, "free some room: neither ledger nor weights could be written")
        if free < DISK_WARN_BYTES:
            return Finding("free disk", WARN, seen, "free some room: checkpoints and images may not fit")
        return Finding("free disk", OK, seen)

    def ledger(self) -> Finding:
        """It opens, and nothing in it is past its time."""
        try:
            with contextlib.closing(open_ledger(self._settings)) as ledger:
                pending = ledger.pending_attempts()
                now = self._clock.now()
                late = [a for a in pending if (ledger.run(a.run).deadline or now) < now]
        except PennypodError as exc:
            return Finding("ledger", FAIL, str(exc), "without it nothing is rented")
        if late:
            names = ", ".join(attempt.lease_name for attempt in late)
            return Finding("ledger", WARN, f"past their deadline and not proven gone: {names}", "pennypod sweep")
        return Finding("ledger", OK, f"opens; {len(pending)} pods may be billing")

    def sentinel(self) -> Finding:
        """Ring 2: who ends a pod past its deadline when everything else here has died."""
        beat = last_look(self._settings)
        advice = "let cron or systemd look: ansible-playbook playbooks/control_node.yml; by hand: pennypod sweep"
        if beat is None and configured(self._environ) == (LOCAL,):
            return Finding("sentinel", OK, "not needed: no provider's key is set")
        if beat is None:
            return Finding("sentinel", WARN, "no sentinel has looked for overdue pods from here yet", advice)
        ago_s = max(0.0, self._clock.now() - beat.at)
        seen = f"looked {ago_s / 60:.0f} min ago"
        if ago_s > SENTINEL_WARN_S:
            since = datetime.fromtimestamp(beat.at, UTC)
            return Finding("sentinel", WARN, f"no sentinel has looked since {since:%Y-%m-%d %H:%M} UTC", advice)
        if not beat.complete:
            missed = ", ".join(
                [*beat.not_listed, *([f"{beat.unproven} pods not proven gone"] if beat.unproven else [])]
            )
            return Finding("sentinel", WARN, f"{seen}, in vain at: {missed}", "pennypod sweep says why")
        return Finding("sentinel", OK, seen)

    def fuses(self) -> Finding:
        """Whether the pods that run now would end themselves if this machine were gone."""
        try:
            with contextlib.closing(open_ledger(self._settings)) as ledger:
                asked = [attempt for attempt in ledger.pending_attempts() if attempt.fuse is not None]
        except PennypodError as exc:
            return Finding("fuses", FAIL, str(exc), "repair the ledger first")
        bare = [a for a in asked if a.fuse and (not a.fuse["armed"] or a.fuse["has_key"] is False)]
        if bare:
            names = ", ".join(attempt.lease_name for attempt in bare)
            advice = "only the guard here and `pennypod sweep` end them: sweep from a second machine as well"
            return Finding("fuses", WARN, f"pods that cannot end themselves: {names}", advice)
        unproven = [attempt.lease_name for attempt in asked if attempt.provider == "runpod"]
        seen = f"{len(asked)} running pods would end themselves at their deadline"
        if unproven:
            advice = "whether RunPod lets a pod delete itself is unproven; stopped pods are left for `pennypod sweep`"
            return Finding("fuses", OK, seen, advice)
        return Finding("fuses", OK, seen)

    def ssh_tools(self) -> Iterator[Finding]:
        """What talks to pods."""
        missing = [tool for tool in SSH_TOOLS if self._which(tool) is None]
        if missing:
            yield Finding(
                "ssh tools", FAIL, f"not found: {', '.join(missing)}", "make setup installs them (openssh-client, tar)"
            )
        else:
            yield Finding("ssh tools", OK, ", ".join(SSH_TOOLS))

    def container_engine(self) -> Finding:
        """For local pods only: without one, rented pods work all the same."""
        needed = LOCAL in configured(self._environ)
        try:
            return Finding("container engine", OK, self._engine(self._settings, self._environ))
        except PennypodError as exc:
            advice = (
                "make setup installs podman" if needed else "needed for local pods only: make setup installs podman"
            )
            return Finding("container engine", FAIL if needed else WARN, str(exc), advice)

    # --- providers ----------------------------------------------------------------------------------------------------

    def provider(self, name: str, key_variable: str) -> Iterator[Finding]:
        """The key, by one call that changes nothing, and the clock against theirs."""
        if not self._environ.get(key_variable):
            yield Finding(name, OK, f"not used: {key_variable} is not set")
            return
        try:
            provider = self._open(name, self._settings, self._environ)
        except PennypodError as exc:
            yield Finding(name, FAIL, str(exc), f"correct {key_variable} and the address")
        else:
            reach = provider.reach() if isinstance(provider, TellsReach) else []
            works = any(item.allowed for item in reach)
            yield self._account(name, key_variable, provider, works=works)
            if works:
                yield self._scopes(name, reach)
        skew = self._skew(name)
        if skew is not None:
            yield skew

    def _scopes(self, name: str, reach: Sequence[Reach]) -> Finding:
        """What the key may do as far as calls that change nothing can show it."""
        allowed = [item.what for item in reach if item.allowed]
        refused = [item for item in reach if item.allowed is False]
        unknown = [item.what for item in reach if item.allowed is None]
        seen = f"the key {', '.join(allowed)}"
        if unknown:
            seen += f"; could not be found out whether it {', '.join(unknown)}"
        title = f"{name} key"
        if refused:
            seen += f"; it may not do this: {', '.join(item.what for item in refused)}"
            advice = f"give the key {', '.join(item.scope for item in refused)}"
            level = FAIL if any(item.essential for item in refused) else WARN
            return Finding(title, level, seen, advice)
        if unknown:
            return Finding(title, WARN, seen, "try again later")
        return Finding(title, OK, f"{seen}; that it may rent and destroy shows only when it does")

    def _account(self, name: str, key_variable: str, provider: Provider, *, works: bool) -> Finding:
        try:
            balance = provider.balance_micros()
            if balance is None:
                return Finding(name, OK, f"the key works; {len(provider.pods())} pods; it tells no balance")
        except AuthError as exc:
            if works:
                advice = "let the key read the account (user_read at Vast.ai, GraphQL at RunPod), or watch it yourself"
                return Finding(name, WARN, f"the key works, but may not see the balance: {exc}", advice)
            return Finding(name, FAIL, str(exc), f"make a new key and put it into {key_variable}, or unset that")
        except FundsError as exc:
            return Finding(name, FAIL, str(exc), "add credit to the account")
        except PennypodError as exc:
            return Finding(name, FAIL, str(exc), "try again later; check the network, a proxy, and the address")
        seen = f"the key works; balance {format_usd(balance, 2)}"
        if balance <= 0:
            return Finding(name, FAIL, seen, "add credit to the account: nothing can be rented")
        if balance < BALANCE_WARN_MICROS:
            return Finding(name, WARN, seen, "add credit: pods are ended, with their data, when it is used up")
        return Finding(name, OK, seen)

    def _skew(self, name: str) -> Finding | None:
        """None when the service tells no time: then there is nothing to compare with."""
        url = self._environ.get(PROVIDERS[name].url_variable) or _default_url(name)
        before = self._clock.now()
        told = self._server_time(url)
        if told is None:
            return None
        # The header has whole seconds, cut off: half a second is the best guess of the rest.
        skew = (before + self._clock.now()) / 2 - (told + 0.5)
        seen = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} {name}'s clock"
        if abs(skew) > SKEW_WARN_S:
            level = FAIL if abs(skew) > SKEW_FAIL_S else WARN
            return Finding("clock", level, seen, "set the clock (timedatectl set-ntp true): deadlines are judged by it")
        return Finding("clock", OK, f"within {SKEW_WARN_S:.0f} s of {name}'s")

    def choice(self) -> Finding:
        """What `provider=auto` would mean now."""
        names = configured(self._environ)
        if names == (LOCAL,):
            keys = " or ".join(entry.key_variable for entry in PROVIDERS.values() if entry.key_variable)
            return Finding("provider=auto", WARN, "local pods: no provider's key is set", f"set {keys} to rent GPUs")
        return Finding("provider=auto", OK, f"the cheapest of {', '.join(names)}")


def probe_engine(settings: Settings, environ: Mapping[str, str]) -> str:
    """The engine that starts containers here, by trying it. Raises EngineError."""
    engine = LocalProvider(settings, environ).engine
    return f"{engine.kind} {engine.version} starts containers"


def _default_url(name: str) -> str:
    return str(importlib.import_module(f"pennypod.providers.{name}").DEFAULT_URL)
