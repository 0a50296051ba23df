"""A real pod that computes wrongly, or not at all, is destroyed and the next offer is tried."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pennypod.acceptance import GateOptions, PodLogin, run_key
from pennypod.clock import SystemClock
from pennypod.errors import LadderExhaustedError
from pennypod.ledger import AttemptState, Ledger, RunRecord, open_ledger
from pennypod.model.ids import new_run_id
from pennypod.model.offer import Need, Offer, Order
from pennypod.providers.local import LocalProvider
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.settings import Settings, load_settings

pytestmark = pytest.mark.pod

WRONG_NUMPY = """
class _Product:
    def tolist(self): return [[0.0] * 128] * 128
    def __getattr__(self, name): return lambda *a, **k: self
    def __matmul__(self, other): return self
    def __getitem__(self, key): return self
    def __iter__(self): return iter(self.tolist())
    def __array__(self, *a, **k): return self
    shape = (128, 128)
def array(*a, **k): return _Product()
asarray = matmul = dot = array
float32 = float64 = "f"
__version__ = "2.0.0"
"""
HANGING_NUMPY = "import time\ntime.sleep(10**6)\n"
BROKEN_LIBCUDA = """
int cuInit(unsigned flags) { return 999; }
int cuDeviceGetCount(int *count) { *count = 0; return 3; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_UNKNOWN"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "unknown error"; return 0; }
"""


class BadFirstMachine(LocalProvider):
    """Local pods of which those on local-1 are sabotaged as soon as they exist."""

    sabotage: Callable[[LocalProvider, str], None]

    def rent(self, offer: Offer, order: Order) -> str:
        pod_id = super().rent(offer, order)
        if offer.machine_id == "local-1":
            self.sabotage(self, pod_id)
        return pod_id


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.settings: Settings = load_settings({"PENNYPOD_HOME": str(tmp_path / "home")})
        self.clock = SystemClock()
        self.ledger: Ledger = open_ledger(self.settings)
        self.provider = BadFirstMachine(self.settings, {})
        self.run = new_run_id("gate", self.clock.now(), secrets.randbelow)
        self.ledger.open_run(RunRecord(self.run, "gate", "1:1", self.clock.now(), str(tmp_path / "artifacts")))
        self.rental = Rental({"local": self.provider}, self.ledger, self.clock)
        self.lines: list[str] = []

    def rent(self, gate: GateOptions) -> Tenancy:
        self.provider.prepare("stock", self.lines.append)
        _, public_key = run_key(self.settings, self.run)
        login = PodLogin(self.settings, self.run, gate, self.clock, on_wait=lambda _why: None)
        request = RentRequest(
            run=self.run,
            offers=self.provider.offers(Need(disk_gb=1))[:2],
            images={"local": "stock"},
            disk_gb=1,
            deadline=self.clock.now() + 300,
            public_key=public_key,
            renter="1:1",
        )
        return self.rental.rent(request, login, lambda _stage, text, **_n: self.lines.append(text), lambda: None)

    def live(self) -> list[str]:
        return [pod.machine_id for pod in self.provider.pods() if self.run in pod.name]

    def end(self) -> None:
        for attempt in self.ledger.attempts(self.run):
            self.rental.destroy(attempt, outcome="done", reason="the test is over", report=lambda *_a, **_k: None)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.end()


def replace_numpy(source: str) -> Callable[[LocalProvider, str], None]:
    def sabotage(provider: LocalProvider, pod_id: str) -> None:
        where = "$(python3 -c 'import site; print(site.getsitepackages()[0])')"
        script = f'rm -rf "{where}/numpy" && printf %s "$1" > "{where}/numpy.py"'
        done = provider.engine.call("exec", pod_id, "sh", "-c", script, "sh", source)
        assert done.rc == 0, done.stderr

    return sabotage


@pytest.mark.parametrize(
    ("source", "said"), [(WRONG_NUMPY, "matmul"), (HANGING_NUMPY, "matmul")], ids=["wrong", "hang"]
)
def test_a_pod_that_multiplies_wrongly_or_never_ends_is_replaced(world: World, source: str, said: str) -> None:
    world.provider.sabotage = replace_numpy(source)
    tenancy = world.rent(GateOptions(device="cpu", time_limits={"matmul": 5}))
    assert tenancy.attempt.machine_id == "local-2"
    assert world.live() == ["local-2"]
    bad = world.ledger.attempts(world.run)[0]
    assert (bad.state, bad.outcome) == (AttemptState.GONE, "gate_failed")
    assert said in (bad.reason or "")
    assert [record.machine_id for record in world.ledger.quarantined(world.clock.now())] == ["local-1"]


def test_a_pod_whose_driver_does_not_start_is_destroyed(world: World, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler to make a broken libcuda with")
    library = tmp_path / "libcuda.so.1"
    (tmp_path / "cuda.c").write_text(BROKEN_LIBCUDA)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)

    def break_driver(provider: LocalProvider, pod_id: str) -> None:
        assert provider.engine.call("cp", str(library), f"{pod_id}:/usr/lib/libcuda.so.1").rc == 0
        assert provider.engine.call("exec", pod_id, "ldconfig").rc == 0

    world.provider.sabotage = break_driver
    with pytest.raises(LadderExhaustedError) as caught:
        world.rent(GateOptions(device="cuda"))  # the second machine has no GPU at all, so it fails too
    assert world.live() == []
    codes = [rung["code"] for rung in caught.value.details["attempts"]]
    assert codes == ["gate_failed", "gate_failed"]
