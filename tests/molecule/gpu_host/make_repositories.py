"""Stand-ins for NVIDIA's repositories: `make_repositories.py FOLDER`, run on the machine, with dpkg-deb and gpg.

Real packages with nothing in them but scripts that answer as the real programs do, in signed flat repositories; PCI
buses as the kernel shows them; a Docker that does nothing. `made.json` has the role's variables that point to them. The
machine's own repositories are replaced as well, so that from here on it fetches from itself alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "http://127.0.0.1:8089"
SMI = """\
#!/bin/sh
[ -e /run/restarted ] || { echo 'no driver'; exit 9; }
echo 'NVIDIA Make-Believe 4090'
"""
CTK = """\
#!/bin/sh
[ "$*" = "runtime configure --runtime=docker" ] || exit 1
mkdir -p /etc/docker
echo '{"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}' >/etc/docker/daemon.json
"""
# The driver must win over a newer one of the system's own, the toolkit's own repository over the copy in the other one.
CUDA = {
    "nvidia-open": ("590.1", {"/usr/bin/nvidia-smi": SMI}),
    "cuda-toolkit-12-9": ("12.9.1", {}),
    "cudnn9-cuda-12": ("9.1", {}),
    "nvidia-container-toolkit": ("2.0", {"/usr/bin/nvidia-ctk": "#!/bin/sh\nexit 1\n"}),
    "dkms": ("0.1", {}),
    f"linux-headers-{os.uname().release}": ("1", {}),
}
TOOLKIT = {"nvidia-container-toolkit": ("1.0", {"/usr/bin/nvidia-ctk": CTK})}
SYSTEM = {"dkms": ("3.0", {})}
UNIT = "[Service]\nExecStart=/bin/sleep infinity\n"


def run(*words: str, **options: object) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **options).stdout  # type: ignore[call-overload,no-any-return]


def make_package(folder: Path, name: str, version: str, files: dict[str, str]) -> str:
    """One .deb in `folder`, and its paragraph of the index."""
    control = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody\nDescription: x\n"
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "root"
        for path, text in {"/DEBIAN/control": control, **files}.items():
            file = root / path[1:]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o644 if path.startswith("/DEBIAN") else 0o755)
        root.chmod(0o755)
        deb = folder / f"{name}_{version}_amd64.deb"
        run("dpkg-deb", "--build", "--root-owner-group", "-Znone", str(root), str(deb))
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    return f"{control}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"


def make_repository(folder: Path, label: str, key: str, packages: dict[str, tuple[str, dict[str, str]]]) -> str:
    """A signed flat repository with its key in the file `key`; whose key that is."""
    folder.mkdir(parents=True)
    index = "\n".join(make_package(folder, name, *rest) for name, rest in packages.items())
    (folder / "Packages").write_text(index)
    line = f" {hashlib.sha256(index.encode()).hexdigest()} {len(index)} Packages\n"
    date = run("date", "-u", "-R").strip().replace("+0000", "UTC")
    (folder / "Release").write_text(f"Origin: NVIDIA\nLabel: {label}\nDate: {date}\nSHA256:\n{line}")
    with tempfile.TemporaryDirectory() as home:
        gpg = ("gpg", "--homedir", home, "--batch", "--quiet", "--passphrase", "")
        run(*gpg, "--quick-generate-key", label, "rsa2048", "sign", "never", stderr=subprocess.DEVNULL)
        run(*gpg, "--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release"))
        (folder / key).write_text(run(*gpg, "--armor", "--export"))
        listed = run(*gpg, "--with-colons", "--list-keys")
        run("gpgconf", "--homedir", home, "--kill", "gpg-agent")
    return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))


def make_bus(folder: Path, *devices: tuple[str, str]) -> None:
    for number, (kind, identity) in enumerate(devices):
        device = folder / f"0000:00:0{number}.0"
        device.mkdir(parents=True)
        (device / "uevent").write_text(f"DRIVER=x\nPCI_CLASS={kind}\nPCI_ID={identity}\nPCI_SUBSYS_ID=0000:0000\n")


def main(folder: Path) -> None:
    made = {
        "golden_image_host_cuda_repository": f"{ADDRESS}/cuda",
        "golden_image_host_cuda_fingerprint": make_repository(
            folder / "cuda/debian12/x86_64", "NVIDIA CUDA", "3bf863cc.pub", CUDA
        ),
        "golden_image_host_toolkit_repository": f"{ADDRESS}/toolkit",
        "golden_image_host_toolkit_key": "gpgkey",
        "golden_image_host_toolkit_fingerprint": make_repository(folder / "toolkit", "toolkit", "gpgkey", TOOLKIT),
    }
    make_repository(folder / "forged", "toolkit", "gpgkey", TOOLKIT)
    # A display controller of another maker, and the sound of one of NVIDIA's.
    make_bus(folder / "bus/none", ("30000", "1234:1111"), ("40300", "10DE:22BA"))
    make_bus(folder / "bus/one", ("40300", "10DE:22BA"), ("30200", "10DE:2330"))
    Path("/usr/bin/dockerd").touch()
    Path("/etc/systemd/system/docker.service").write_text(UNIT)
    for file in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").iterdir()):
        file.unlink(missing_ok=True)
    make_repository(folder / "system", "Debian", "key", SYSTEM)
    Path("/etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{folder}/system /\n")
    run("apt-get", "-qq", "update")
    Path("/etc/apt/apt.conf.d/99loopback").write_text('Acquire::http::Proxy::127.0.0.1 "DIRECT";\n')
    (folder / "made.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
