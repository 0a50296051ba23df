"""Golden images: what was baked, which one a run may start from, and the bake's last step. Floor 2.

The manifests in the state folder (`golden/<name>.json`), the engine's images and registries are its outside things. A
name, `golden-<job>-v<N>`, is given once and its image never changes. An image without a manifest is no golden image, a
manifest without its image is one that is missing: only both together are used. Other machines pull an image from a
registry: its manifest names the place only once that registry has confirmed the digest.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from pennypod import __version__, processes
from pennypod.clock import Clock
from pennypod.errors import AuthError, FencedError, InputError, ProviderError, TransientError
from pennypod.files import write_atomically
from pennypod.ledger import Ledger
from pennypod.model.image import RegistryLogin, Repository, is_loopback, parse_pinned
from pennypod.oci.logins import PULL_VARIABLE
from pennypod.providers.base import Provider, SavesImages, TakesSnapshots
from pennypod.settings import Settings

FOLDER = "golden"
MARK = "bake.json"
"""In a run's own folder, from before its image is begun: tells the guard that there may be one to take away."""
MANIFEST_LABEL = "pennypod.golden.manifest"
_NAME = re.compile(r"golden-(?P<job>[a-z0-9_]+)-v(?P<version>[1-9]\d*)")
_LOCK_PATIENCE = 120  # times that the holder of the lock may be waited for, half a second to two each
_DEBIAN = ("dpkg-query", "-W", "-f", "${Package} ${Version}\n")
_PROBE = """\
import importlib.metadata, json
print(json.dumps({found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}))
"""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Golden:
    """One baked image. Bytes, Unix seconds, digests as "sha256:..."; packages by name with their version."""

    name: str
    job: str
    version: int
    provider: str
    run: str
    baked: float
    base: str
    requirements_hash: str
    role_hash: str
    pennypod: str
    python: str
    debian_packages: dict[str, str] = field(default_factory=dict)
    python_packages: dict[str, str] = field(default_factory=dict)
    base_weights: list[dict[str, Any]] = field(default_factory=list)
    reference: str = ""
    image_id: str = ""
    digest: str = ""
    base_digest: str = ""
    bytes: int = 0
    layer_bytes: int = 0
    remote: str = ""
    """Where a registry has confirmed it, "HOST/REPO@sha256:...". The digest is of the manifest there."""

    @property
    def only_remote(self) -> bool:
        """Whether no engine ever had it: the host of a pod has pushed it."""
        return self.reference == self.remote

    @property
    def tag(self) -> str:
        """What it is called in a registry. For people, and so that it is not cleared away: nothing is started by it."""
        return f"{self.name}-{self.run.rpartition('-')[2]}"

    def as_document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Golden:
        """Raises TypeError when it is none; what a newer pennypod has added is left out."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in known})


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is baked for: its base, and the job's requirements as the role bootstrap takes them.

    Without a base, whatever base an image has will do: elsewhere the stock image is another one anyway.
    """

    job: str
    provider: str
    base: str
    requirements: Mapping[str, Any]

    @property
    def hash(self) -> str:
        """Equal for two recipes that lead to the same image, whatever the order of their names."""
        told = {"base": self.base, "requirements": self.requirements}
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()

    def fits(self, golden: Golden) -> bool:
        """Whether an image was baked for the same."""
        wanted = self if self.base else replace(self, base=golden.base)
        return golden.requirements_hash == wanted.hash


@dataclass(frozen=True, slots=True)
class Choice:
    """The image to start from, None for the stock one, and what a person should know about that."""

    golden: Golden | None
    note: str = ""


def choose(baked: Iterable[Golden], recipe: Recipe, missing: Callable[[Golden], str]) -> Choice:
    """The newest image of the job that fits and is there. `missing` says why one cannot be used, "" when it can."""
    of_job = [item for item in baked if item.job == recipe.job and item.provider == recipe.provider]
    newest_first = sorted(of_job, key=lambda item: item.version, reverse=True)
    if not newest_first:
        return Choice(None)
    fitting = [item for item in newest_first if recipe.fits(item)]
    again = f"bake it again: ansible-playbook bake.yml -e job={recipe.job}"
    if not fitting:
        return Choice(
            None, f"{newest_first[0].name} was baked for other requirements, the stock image is used; {again}"
        )
    why = ""
    for item in fitting:
        reason = missing(item)
        if not reason:
            return Choice(item, f"{fitting[0].name} {why}, {item.name} is used" if why else "")
        why = why or reason
    advice = f"; {again}" if why.startswith("is missing") else ""
    return Choice(None, f"{fitting[0].name} {why}, the stock image is used{advice}")


def is_there(golden: Golden, saved: Mapping[str, str]) -> bool:
    """Whether the provider has this very image: a name that means another one by now does not count."""
    return saved.get(golden.name) == golden.image_id


class AsksRegistry(Protocol):
    """A registry that can be asked for an image; see `oci.client.Registry`."""

    def has(self, repository: Repository, digest: str) -> bool: ...


class Pulls:
    """Which images a provider's machines can pull. Asks each registry as they would, and a silent one only once."""

    def __init__(
        self,
        provider: str,
        login_of: Callable[[str], RegistryLogin | None],
        registry: Callable[[str, RegistryLogin | None], AsksRegistry],
        *,
        beside_us: bool = False,
    ) -> None:
        self._provider = provider
        self._login_of = login_of
        self._registry = registry
        self._beside_us = beside_us
        self._silent: dict[str, str] = {}

    def choose(self, baked: Iterable[Golden], recipe: Recipe) -> Choice:
        """What a run is to start from there. An image that is in no registry yet is none for it."""
        baked = [item for item in baked if item.job == recipe.job]
        choice = choose(served(baked, self._provider), replace(recipe, base="", provider=self._provider), self.missing)
        unsent = [item for item in baked if not item.remote]
        if choice.golden is not None or choice.note or not unsent:
            return choice
        newest = max(unsent, key=lambda item: item.version).name
        return Choice(
            None,
            f"{newest} is in no registry that {self._provider} could pull it from, the stock image is used;"
            f" send it there: pennypod images push {newest} HOST/REPO",
        )

    def missing(self, golden: Golden) -> str:
        """Why its machines could not pull an image, "" when they can, as far as can be seen from here."""
        try:
            repository, digest = parse_pinned(golden.reference)
        except InputError:
            return "names no registry that could be asked"
        host = repository.host
        if is_loopback(host) and not self._beside_us:
            return f"is in {host} on this machine, which {self._provider} cannot reach"
        if host in self._silent:
            return self._silent[host]
        login = self._login_of(host)
        try:
            there = self._registry(host, login).has(repository, digest)
        except AuthError as exc:
            return f"cannot be pulled: {exc}" if login else f"is in {host}, which lets no pods in: set {PULL_VARIABLE}"
        except ProviderError as exc:
            self._silent[host] = f"cannot be confirmed: {exc}"
            return self._silent[host]
        return "" if there else f"is missing in {host}"


def served(baked: Iterable[Golden], provider: str) -> list[Golden]:
    """The images that are in a registry, as a provider's machines would start from them."""
    return [
        replace(item, provider=provider, reference=item.remote, digest=item.remote.partition("@")[2])
        for item in baked
        if item.remote
    ]


def next_version(job: str, names: Iterable[str], last: int = 0) -> int:
    """One above every version of the job that was ever given."""
    found = [_NAME.fullmatch(name) for name in names]
    return 1 + max([last, *(int(match["version"]) for match in found if match and match["job"] == job)])


def content_hash(folder: Path, *files: Path) -> str:
    """What a role is, file by file, for an image's manifest."""
    digest = hashlib.sha256()
    for path in (*sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"), *files):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class GoldenStore:
    """The manifests, one file each."""

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER

    def all(self) -> list[Golden]:
        """Every manifest, by job and version. Raises InputError for a file that is none."""
        return sorted(
            (self._read(path) for path in self.folder.glob("golden-*.json")), key=lambda g: (g.job, g.version)
        )

    def _read(self, path: Path) -> Golden:
        try:
            return Golden.from_document(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as exc:
            raise InputError(f"{path} is no manifest of a golden image ({exc}): move it away") from exc

    def write(self, golden: Golden) -> None:
        write_atomically(self.folder / f"{golden.name}.json", json.dumps(golden.as_document(), indent=2) + "\n", 0o600)

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """One at a time gives names, or takes away what no engine's lock guards."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "naming.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def remove_of(self, run: str) -> None:
        """Forget what a run has baked."""
        for item in self.all():
            if item.run == run:
                self.remove(item.name)

    def last_version(self, job: str) -> int:
        """The highest version that the job's images have had, also when it was removed meanwhile."""
        try:
            return int((self.folder / f"{job}.last").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0

    def would_take(self, job: str, saved: Iterable[str] = ()) -> tuple[str, int]:
        """Name and version that an image of the job would get now. `saved` are the names that a provider has."""
        version = next_version(job, [*(item.name for item in self.all()), *saved], self.last_version(job))
        return f"golden-{job}-v{version}", version

    def take_name(self, job: str, saved: Iterable[str] = ()) -> tuple[str, int]:
        """The same, and nobody gets it again: two bakes at once, at one provider or two, have two names."""
        with self.naming():
            name, version = self.would_take(job, saved)
            write_atomically(self.folder / f"{job}.last", f"{version}\n", 0o600)
        return name, version


@dataclass(frozen=True, slots=True)
class Bake:
    """A bootstrapped pod that is to become an image of its job."""

    run: str
    pod_id: str
    recipe: Recipe
    role_hash: str
    python: str
    pod_home: str


Ask = Callable[[Sequence[str]], str]
"""The stdout of a command on the pod, empty when it fails there."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What is on a bootstrapped pod, by name with its version: Debian's packages, and those of the job's Python."""

    debian: dict[str, str]
    python: dict[str, str]


def installed(ask: Ask, python: str) -> Installed:
    """Ask a pod for it, before anything is taken off it."""
    debian = (line.partition(" ") for line in ask(_DEBIAN).splitlines())
    return Installed({package: version for package, _, version in debian}, _packages(ask([python, "-c", _PROBE])))


def begun(bake: Bake, name: str, version: int, there: Installed, now: float) -> Golden:
    """An image as far as it is known before it is made."""
    return Golden(
        name=name,
        job=bake.recipe.job,
        version=version,
        provider=bake.recipe.provider,
        run=bake.run,
        baked=round(now, 3),
        base=bake.recipe.base,
        requirements_hash=bake.recipe.hash,
        role_hash=bake.role_hash,
        pennypod=__version__,
        python=bake.python,
        debian_packages=there.debian,
        python_packages=there.python,
        base_weights=[dict(item) for item in bake.recipe.requirements.get("base_weights") or []],
    )


def raise_if_cut_off(ledger: Ledger, run: str, controller: str) -> None:
    """Before an image counts. The guard fences a run before it takes its image away, and waits for the lock that the
    caller holds: it comes after us. Raises FencedError."""
    ledger.raise_if_fenced(run, controller)
    if not processes.is_alive(controller):
        raise FencedError("the command that started this bake has ended")


def mark_begun(settings: Settings, bake: Bake) -> None:
    """Tell the guard that there may be an image to take away."""
    write_atomically(settings.run_dir(bake.run) / MARK, json.dumps({"provider": bake.recipe.provider}), 0o600)


class Bakery:
    """Bakes, discards and removes, at one provider."""

    def __init__(self, settings: Settings, provider: SavesImages, clock: Clock) -> None:
        self.store = GoldenStore(settings.home)
        self._settings = settings
        self._provider = provider
        self._clock = clock

    def choose(self, recipe: Recipe) -> Choice:
        """What a run of the job is to start from."""
        baked = self.store.all()
        saved = self._provider.saved_images() if baked else {}
        return choose(baked, recipe, lambda item: "" if is_there(item, saved) else "is missing on the engine")

    def bake(self, bake: Bake, ledger: Ledger, on_progress: OnProgress) -> Golden:
        """Make an image of the pod and give it its name. Raises, and leaves nothing, when the run was taken away."""
        controller = ledger.run(bake.run).controller
        mark_begun(self._settings, bake)
        with self._provider.saving(on_progress):
            there = installed(lambda argv: self._provider.ask_pod(bake.pod_id, argv), bake.python)
            name, version = self.store.take_name(bake.recipe.job, self._provider.saved_images())
            golden = begun(bake, name, version, there, self._clock.now())
            try:
                saved = self._provider.save_image(
                    bake.pod_id, bake.run, labels_of(golden), bake.pod_home, _watching(ledger, bake.run, on_progress)
                )
                raise_if_cut_off(ledger, bake.run, controller)
                reference = self._provider.publish_image(bake.run, name)
                facts = {key: value for key, value in asdict(saved).items() if key != "reference"}
                golden = Golden.from_document({**golden.as_document(), **facts, "reference": reference})
                self.store.write(golden)
            except BaseException:
                self._discard(bake.run)
                raise
        return golden

    def push(
        self,
        golden: Golden,
        to: Repository,
        login: RegistryLogin | None,
        registry: AsksRegistry,
        on_progress: OnProgress,
    ) -> Golden:
        """Send an image to a registry; its manifest names the place once the registry has confirmed the digest.

        One that is there already is not sent again. Raises InputError for an image that the engine does not have, and
        TransientError when it could not be sent or confirmed: then the manifest is as it was.
        """
        if golden.remote.startswith(f"{to}@") and registry.has(*parse_pinned(golden.remote)):
            return golden
        if not is_there(golden, self._provider.saved_images()):
            raise InputError(f"{golden.name} is missing on the engine: only its own machine can push it")
        on_progress(f"pushing {golden.name}, {golden.bytes / 1e6:.0f} MB, to {to}")
        digest = self._provider.push_image(golden.name, to, golden.tag, login)
        if not registry.has(to, digest):
            again = f"pennypod images push {golden.name} {to}"
            raise TransientError(f"{to.host} does not have {golden.name} after the push: try again: {again}")
        pushed = replace(golden, remote=to.at(digest))
        with self._provider.saving(_patience()):
            if golden not in self.store.all():
                raise InputError(f"{golden.name} was removed or pushed by somebody else meanwhile")
            self.store.write(pushed)
        return pushed

    def discard(self, run: str) -> None:
        """Take away whatever a run has baked, finished or not. Raises when that cannot be done now; ask again then."""
        with self._provider.saving(_patience()):
            self._discard(run)

    def _discard(self, run: str) -> None:
        self._provider.discard_images(run)
        self.store.remove_of(run)

    def remove(self, golden: Golden) -> None:
        """Delete an image and its manifest. Raises when the engine keeps the image, for a pod that uses it, say."""
        with self._provider.saving(_patience()):
            self._provider.remove_image(golden.name)
            self.store.remove(golden.name)


def unbake(settings: Settings, providers: Mapping[str, Provider], clock: Clock, run: str) -> None:
    """Discard what a run that was cut off has baked; a run that has not begun to leaves nothing to do."""
    mark = settings.runs_dir / run / MARK
    try:
        name = str(json.loads(mark.read_text(encoding="utf-8"))["provider"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(f"{mark} cannot be read: {exc}") from exc
    if isinstance(providers.get(name), TakesSnapshots):
        store = GoldenStore(settings.home)
        with store.naming():
            store.remove_of(run)  # what its host pushes from now on is named by no manifest
    else:
        Bakery(settings, image_maker(name, providers), clock).discard(run)
    mark.unlink(missing_ok=True)


def image_maker(name: str, providers: Mapping[str, Provider]) -> SavesImages:
    """The provider as one that makes images of pods. Raises InputError where it does not."""
    provider = providers.get(name)
    if provider is None:
        raise InputError(f"{name} is not available here: its images cannot be looked at")
    if not isinstance(provider, SavesImages):
        raise InputError(f"no image of a pod at {name} is on this machine: bake with -e provider=local")
    return provider


def superseded(baked: Iterable[Golden], keep: int) -> list[Golden]:
    """All but the `keep` newest of each job and provider, and the `keep` newest of those that are in a registry."""
    groups: dict[tuple[str, str], list[Golden]] = {}
    for item in baked:
        groups.setdefault((item.job, item.provider), []).append(item)
    newest_first = [sorted(group, key=lambda item: item.version, reverse=True) for group in groups.values()]
    pushed = {item.name for group in newest_first for item in [item for item in group if item.remote][:keep]}
    return [item for group in newest_first for item in group[keep:] if item.name not in pushed]


def labels_of(golden: Golden) -> dict[str, str]:
    """What the image says of itself: short labels for people, and the manifest as far as it is known by then."""
    manifest = json.dumps(golden.as_document(), separators=(",", ":"), sort_keys=True)
    return {
        "pennypod.golden.name": golden.name,
        "pennypod.golden.job": golden.job,
        "pennypod.golden.base": golden.base,
        "pennypod.golden.requirements": golden.requirements_hash,
        "pennypod.golden.role": golden.role_hash,
        MANIFEST_LABEL: base64.b64encode(manifest.encode()).decode(),
    }


def _packages(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return {str(name): str(version) for name, version in sorted(found.items())} if isinstance(found, dict) else {}


def _watching(ledger: Ledger, run: str, on_progress: OnProgress) -> OnProgress:
    """A build may take minutes: each word of it is a moment to see that the run was taken away."""

    def tell(text: str) -> None:
        ledger.raise_if_fenced(run)
        on_progress(text)

    return tell


def _patience() -> OnProgress:
    left = iter(range(_LOCK_PATIENCE))

    def tell(_text: str) -> None:
        if next(left, None) is None:
            raise TransientError("another process has been building an image for minutes: try again")

    return tell
