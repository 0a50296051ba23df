"""The ways into a fresh pod: direct, by proxy, with ports and keys that come late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import ADDRESS, FakeClock, FakeLogin, FakeProvider, offer
from pennypod import acceptance
from pennypod.acceptance import GateOptions, PodLogin
from pennypod.errors import FencedError, GateError, HostKeyError, LadderExhaustedError, SshError, TransientError
from pennypod.ledger import Ledger, RunRecord, open_ledger
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.settings import Settings
from pennypod.ssh import Ssh, pinned_host_keys, trust_host_keys

RUN = "demo-1201-abcde"
PROXY = SshAddress("proxy.example", 10600)
MOVED = SshAddress("127.0.0.1", 3333)


class Network:
    """What answers on the network: addresses that let us in, each from some time on."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.opens: dict[SshAddress, float] = {}
        self.tried: list[SshAddress] = []

    def wait_for_ssh(
        self, ssh: Ssh, *, deadline_s: float, clock: FakeClock, on_wait: Callable[[str], None] | None = None
    ) -> None:
        address = SshAddress(ssh.target.host, ssh.target.port, ssh.target.user)
        self.tried.append(address)
        end = clock.now() + deadline_s
        while clock.now() < self.opens.get(address, float("inf")):
            if on_wait is not None:
                on_wait("refused")
            if clock.now() >= end:
                raise SshError(f"no login within {deadline_s:g} s; last answer: refused by {address.host}")
            clock.sleep(1)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def network(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network(clock)
    monkeypatch.setattr(acceptance, "wait_for_ssh", network.wait_for_ssh)
    return network


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}")


@pytest.fixture
def login(settings: Settings, clock: FakeClock) -> PodLogin:
    return PodLogin(settings, RUN, GateOptions(), clock, on_wait=lambda _why: None)


def test_the_first_way_in_is_taken_when_it_works(login: PodLogin, network: Network) -> None:
    network.opens = {ADDRESS: 0, PROXY: 0}
    assert login.log_in(lambda: [ADDRESS, PROXY], [], 100) == ADDRESS
    assert network.tried == [ADDRESS]


def test_the_proxy_is_taken_when_the_direct_way_stays_shut(login: PodLogin, network: Network, clock: FakeClock) -> None:
    network.opens = {PROXY: 0}
    before = clock.now()
    assert login.log_in(lambda: [ADDRESS, PROXY], [], 300) == PROXY
    assert clock.now() - before < 60


def test_a_port_that_moves_is_followed(login: PodLogin, network: Network) -> None:
    network.opens = {MOVED: 0}
    looks = iter([[ADDRESS], [], [MOVED]])
    assert login.log_in(lambda: next(looks), [], 300) == MOVED


def test_a_late_sshd_is_waited_for_on_every_way(login: PodLogin, network: Network, clock: FakeClock) -> None:
    network.opens = {ADDRESS: clock.now() + 90}
    assert login.log_in(lambda: [ADDRESS, PROXY], [], 300) == ADDRESS
    assert network.tried.count(PROXY) >= 1


def test_the_limit_holds_over_all_ways(login: PodLogin, network: Network, clock: FakeClock) -> None:
    before = clock.now()
    with pytest.raises(SshError, match=r"no login within 100 s; last answer: refused by"):
        login.log_in(lambda: [ADDRESS, PROXY], [], 100)
    assert 100 <= clock.now() - before < 110


def test_a_pod_without_any_address_ends_at_the_limit_too(login: PodLogin, network: Network, clock: FakeClock) -> None:
    with pytest.raises(SshError, match="shows no address"):
        login.log_in(list, [], 30)


def test_a_pod_that_lets_nobody_in_is_told_of(settings: Settings, network: Network, clock: FakeClock) -> None:
    said: list[str] = []
    network.opens = {ADDRESS: clock.now() + 50}
    login = PodLogin(settings, RUN, GateOptions(), clock, lambda _why: None, said.append)
    login.log_in(lambda: [ADDRESS], [], 300)
    assert said == [f"no login after {passed} s, waiting for {300 - passed} s more: refused" for passed in (20, 40)]


def test_a_pod_whose_address_went_away_is_asked_for_it_once_a_second(
    login: PodLogin, network: Network, clock: FakeClock
) -> None:
    looks = 0

    def look() -> list[SshAddress]:
        nonlocal looks
        looks += 1
        return [ADDRESS] if looks == 1 else []

    with pytest.raises(SshError):
        login.log_in(look, [], 60)
    assert looks <= 60


def test_an_earlier_pods_host_key_does_not_lock_the_next_one_out(
    login: PodLogin, network: Network, settings: Settings
) -> None:
    known_hosts = settings.run_dir(RUN) / "known_hosts"
    known_hosts.write_text(f"[{ADDRESS.host}]:{ADDRESS.port} ssh-ed25519 OLD\nother ssh-ed25519 KEPT\n")
    network.opens = {ADDRESS: 0}
    login.log_in(lambda: [ADDRESS], [], 10)
    assert known_hosts.read_text() == "other ssh-ed25519 KEPT\n"
    login.log_in(lambda: [ADDRESS], ["ssh-ed25519 TOLD"], 10)
    assert f"[{ADDRESS.host}]:{ADDRESS.port} ssh-ed25519 TOLD\n" in known_hosts.read_text()


def test_whoever_waits_may_stop_it(settings: Settings, clock: FakeClock, network: Network) -> None:
    def stop(_why: str) -> None:
        raise FencedError("taken away")

    with pytest.raises(FencedError):
        PodLogin(settings, RUN, GateOptions(), clock, on_wait=stop).log_in(lambda: [ADDRESS], [], 100)


# --- whose host key it is ---------------------------------------------------------------------------------------------

KEY, OTHER_KEY, RSA_KEY = (
    f"{kind} {letter * 40}" for kind, letter in (("ssh-ed25519", "A"), ("ssh-ed25519", "B"), ("ssh-rsa", "C"))
)


@pytest.fixture
def met(settings: Settings) -> Path:
    """A first login has taken KEY."""
    known_hosts = settings.run_dir(RUN) / "known_hosts"
    trust_host_keys(known_hosts, ADDRESS.host, ADDRESS.port, [KEY])
    return known_hosts


def test_a_key_that_the_provider_tells_is_attested_and_its_others_are_pinned_too(login: PodLogin, met: Path) -> None:
    assert login.host_key(ADDRESS, lambda: [RSA_KEY, f"{KEY} comment"], 0) == "attested"
    assert pinned_host_keys(met, ADDRESS.host, ADDRESS.port) == [RSA_KEY, KEY]


def test_a_provider_that_tells_nothing_leaves_the_key_that_was_met(
    login: PodLogin, met: Path, clock: FakeClock
) -> None:
    before = clock.now()
    assert login.host_key(ADDRESS, list, 30) == "accept-new"
    assert 30 <= clock.now() - before < 40
    assert pinned_host_keys(met, ADDRESS.host, ADDRESS.port) == [KEY]


def test_what_is_told_late_or_corrected_still_counts(login: PodLogin, met: Path) -> None:
    answers = iter([[], [OTHER_KEY], [KEY]])
    assert login.host_key(ADDRESS, lambda: next(answers), 30) == "attested"


def test_another_key_than_the_provider_tells_is_refused(login: PodLogin, met: Path) -> None:
    with pytest.raises(HostKeyError, match="shows a host key that its provider does not tell of"):
        login.host_key(ADDRESS, lambda: [OTHER_KEY, RSA_KEY], 30)


def test_a_run_that_was_taken_away_does_not_wait_for_keys(settings: Settings, clock: FakeClock, met: Path) -> None:
    def stop(_why: str) -> None:
        raise FencedError("taken away")

    with pytest.raises(FencedError):
        PodLogin(settings, RUN, GateOptions(), clock, on_wait=stop).host_key(ADDRESS, list, 30)


# --- what rental puts between two tries -------------------------------------------------------------------------------


class KeyedProvider(FakeProvider):
    """A provider that lets keys into pods that already exist."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.attached: list[tuple[str, str]] = []
        self.refuses: list[TransientError] = []

    def attach_key(self, pod_id: str, public_key: str) -> None:
        self.attached.append((pod_id, public_key))
        if self.refuses:
            raise self.refuses.pop(0)

    def renew_key(self, pod_id: str, public_key: str) -> None:
        self.attach_key(pod_id, public_key)


class RoundsLogin(FakeLogin):
    """Looks at the pod as many times as it is told before it gets in."""

    def __init__(self, rounds: int, between: Callable[[int], None]) -> None:
        super().__init__()
        self._rounds, self._between = rounds, between

    def log_in(
        self, addresses: Callable[[], Sequence[SshAddress]], host_keys: Sequence[str], limit_s: float
    ) -> SshAddress:
        found = addresses()
        for number in range(self._rounds):
            self._between(number)
            found = addresses()
        return found[-1]


class World:
    def __init__(self, settings: Settings, clock: FakeClock) -> None:
        self.provider = KeyedProvider(clock)
        self.ledger: Ledger = open_ledger(settings)
        self.ledger.open_run(RunRecord(RUN, "demo", "1:1", clock.now(), str(settings.home)))
        self.rental = Rental({"fake": self.provider}, self.ledger, clock)
        self.deadline = clock.now() + 600
        self.lines: list[str] = []

    def rent(self, login: Any, *, offers: int = 1, pooled: bool = False) -> Tenancy:
        choices = [replace(offer(number), pooled=pooled) for number in range(1, offers + 1)]
        request = RentRequest(RUN, choices, {}, 20, self.deadline, "ssh-ed25519 AAAA", "1:1")
        return self.rental.rent(request, login, lambda _s, text, **_n: self.lines.append(text), lambda: None)

    def change(self, **values: Any) -> None:
        for pod_id, pod in self.provider.live.items():
            self.provider.live[pod_id] = replace(pod, **values)


@pytest.fixture
def world(settings: Settings, clock: FakeClock) -> Iterator[World]:
    world = World(settings, clock)
    yield world
    world.ledger.close()


def test_the_runs_key_is_attached_before_the_first_login_and_again_after_each_failed_round(world: World) -> None:
    world.rent(RoundsLogin(2, lambda _n: None))
    assert world.provider.attached == [("pod-1", "ssh-ed25519 AAAA")] * 3


def test_a_key_that_cannot_be_attached_is_said_and_the_login_decides(world: World) -> None:
    world.provider.refuses = [TransientError("busy")]
    assert world.rent(FakeLogin()).created
    assert any("key could not be attached: busy" in line for line in world.lines)


def test_the_address_that_let_us_in_is_the_tenancys(world: World) -> None:
    tenancy = world.rent(RoundsLogin(1, lambda _n: world.change(address=MOVED, other_addresses=(PROXY,))))
    assert tenancy.address == PROXY
    attempt = world.ledger.attempts(RUN)[0]
    assert (attempt.ssh_host, attempt.ssh_port) == (PROXY.host, PROXY.port)


@pytest.mark.parametrize("state", [PodState.FAILED, PodState.STOPPED])
def test_a_pod_that_dies_while_we_knock_is_given_up_at_once(world: World, state: PodState) -> None:
    def die(_number: int) -> None:
        world.change(state=state, progress="exited")

    with pytest.raises(LadderExhaustedError, match="exited"):
        world.rent(RoundsLogin(1, die))
    assert world.provider.live == {}


def test_a_pod_that_vanishes_while_we_knock_is_given_up_at_once(world: World) -> None:
    with pytest.raises(LadderExhaustedError, match="vanished"):
        world.rent(RoundsLogin(1, lambda _n: world.provider.live.clear()))


class ImpostorsLogin(FakeLogin):
    """Whoever answers shows a key that the provider does not tell of."""

    def host_key(self, address: SshAddress, ask: Callable[[], Sequence[str]], patience_s: float) -> str:
        raise HostKeyError("another key")


def test_an_impostor_gets_no_work_and_its_machine_is_left_alone(world: World, clock: FakeClock) -> None:
    with pytest.raises(LadderExhaustedError, match="another key"):
        world.rent(ImpostorsLogin())
    assert world.provider.live == {}
    (attempt,) = world.ledger.attempts(RUN)
    assert (attempt.outcome, attempt.ready) == ("host_key", None)
    assert [record.machine_id for record in world.ledger.quarantined(clock.now())] == ["machine-1"]


def test_the_ledger_keeps_how_the_host_key_is_known(world: World) -> None:
    assert world.rent(FakeLogin()).host_key == "accept-new"
    assert world.ledger.attempts(RUN)[0].host_key == "accept-new"


def test_a_bad_machine_of_a_pool_does_not_bar_the_whole_pool(world: World, clock: FakeClock) -> None:
    world.rent(FakeLogin(GateError("bad GPU")), offers=2, pooled=True)
    assert world.ledger.quarantined(clock.now()) == []


def test_all_ways_in_are_the_pods_addresses() -> None:
    pod = Pod("p", "1", "n", PodState.RUNNING, 0, 0, other_addresses=(PROXY,))
    assert pod.addresses == ()
    assert replace(pod, address=ADDRESS).addresses == (ADDRESS, PROXY)
