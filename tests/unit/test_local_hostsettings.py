"""What pip and apt of a host reach, read from made-up hosts; nothing else of the host may come along."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pennypod.providers.local.hostsettings import (
    CA_BUNDLE,
    HostSettings,
    apt_options,
    pip_conf,
    pip_settings,
    read_host_settings,
    wheel_folders,
    write_tree,
)

BOOKWORM = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_CODENAME=bookworm\n'


class Host:
    """A made-up host's file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: str, text: str = "") -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def read(self, **environ: str) -> HostSettings:
        return read_host_settings({"HOME": "/root", **environ}, self.root, prefix="/venv")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def conf(settings: HostSettings) -> dict[str, list[str]]:
    parser = configparser.RawConfigParser()
    parser.read_string(settings.files["/etc/pip.conf"].decode())
    return {key: value.split() for key, value in parser.items("global")}


# --- pip -----------------------------------------------------------------------------------------------------------


def test_pips_files_are_merged_as_pip_does(host: Host) -> None:
    host.put("/etc/xdg/pip/pip.conf", "[global]\nindex-url = https://first/simple\ntimeout = 5\n")
    host.put("/etc/pip.conf", "[global]\nindex-url = https://second/simple\n")
    host.put("/root/.config/pip/pip.conf", "[global]\nindex_url = https://third/simple\n[install]\nno-binary = x\n")
    host.put("/venv/pip.conf", "[global]\nretries = 7\n")
    assert conf(host.read()) == {
        "index-url": ["https://third/simple"],
        "no-binary": ["x"],
        "retries": ["7"],
        "timeout": ["5"],
    }
    found = conf(host.read(PIP_INDEX_URL="https://env/simple", PIP_DEFAULT_TIMEOUT="9"))
    assert (found["index-url"], found["timeout"]) == (["https://env/simple"], ["9"])


def test_a_config_file_named_by_the_environment_replaces_the_users(host: Host) -> None:
    host.put("/root/.config/pip/pip.conf", "[global]\nindex-url = https://user/simple\n")
    host.put("/etc/pip.conf", "[global]\ntimeout = 5\n")
    host.put("/opt/pip.ini", "[global]\nfind-links = https://links/\n")
    assert conf(host.read(PIP_CONFIG_FILE="/opt/pip.ini")) == {"find-links": ["https://links/"], "timeout": ["5"]}
    assert "/etc/pip.conf" not in host.read(PIP_CONFIG_FILE=os.devnull).files


def test_what_is_no_matter_of_reach_stays_at_home(host: Host) -> None:
    host.put("/etc/pip.conf", "[global]\nclient-cert = /root/secret.pem\nrequire-virtualenv = true\ntarget = /x\n")
    settings = host.read(PIP_USER="1", VAST_API_KEY="secret-key", AWS_SECRET_ACCESS_KEY="secret-key")
    assert "/etc/pip.conf" not in settings.files
    assert settings.env == {}
    assert b"secret" not in b"".join(settings.files.values())


@pytest.mark.parametrize("broken", ["not an ini file", "[global\nx=1", "\x00\x01"])
def test_a_broken_pip_file_counts_as_none(host: Host, broken: str) -> None:
    host.put("/etc/xdg/pip/pip.conf", broken)
    host.put("/etc/pip.conf", "[global]\ntimeout = 5\n")
    assert conf(host.read()) == {"timeout": ["5"]}


def test_the_written_file_is_what_pip_itself_reads(tmp_path: Path) -> None:
    settings = {"extra-index-url": "https://a/simple https://b/simple", "timeout": "7", "find-links": "/w"}
    file = tmp_path / "pip.conf"
    file.write_text(pip_conf(settings))
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(file)}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, env=environ, timeout=60
    )
    if done.returncode:
        pytest.skip("no pip in this environment")
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert [part for part in shown["global.extra-index-url"].strip("'").split(r"\n") if part] == [
        "https://a/simple",
        "https://b/simple",
    ]
    assert (shown["global.timeout"], shown["global.find-links"]) == ("'7'", "'/w'")


def test_this_host_is_read_as_its_own_pip_reads_it() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("no pip in this environment")
    theirs = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        if key.startswith(("global.", ":env:.")):
            theirs[key.rpartition(".")[2]] = value.strip("'").replace(r"\n", " ").split()
    ours = pip_settings(os.environ, Path("/"), sys.prefix)
    for key in ("index-url", "extra-index-url", "find-links", "constraint", "cert"):
        assert ours.get(key, "").split() == theirs.get(key, []), key


def test_local_wheel_folders_are_mounted_where_they_are(host: Host) -> None:
    host.put("/srv/wheels/a-1-py3-none-any.whl")
    host.put("/etc/pip.conf", "[global]\nfind-links = /srv/wheels file:///srv/none\n")
    settings = host.read()
    assert settings.mounts == ("/srv/wheels",)
    assert settings.notes == ("pip's find-links /srv/none does not exist",)


def test_an_index_brings_the_folder_its_pages_link_to(host: Host) -> None:
    host.put("/srv/pypi/simple/six/index.html", '<a href="../../files/six-1.whl#sha256=00">six</a>')
    host.put("/srv/pypi/files/six-1.whl")
    host.put("/srv/pypi/private/key.pem", "secret")
    host.put("/etc/pip.conf", "[global]\nindex-url = file:///srv/pypi/simple\n")
    assert host.read().mounts == ("/srv/pypi/files", "/srv/pypi/simple")


def test_wheels_that_are_links_bring_the_folder_they_lie_in(host: Host) -> None:
    real = host.put("/data/store/a.whl")
    (host.root / "srv/wheels").mkdir(parents=True)
    (host.root / "srv/wheels/a.whl").symlink_to(real)
    assert wheel_folders("/srv/wheels", host.root) == {"/srv/wheels", "/data/store"}


def test_no_whole_home_or_system_folder_is_ever_mounted(host: Host) -> None:
    host.put("/root/index.html", '<a href="../secret/a.whl">a</a>')
    host.put("/secret/a.whl")
    assert wheel_folders("/root", host.root) == {"/secret"}


def test_constraints_and_link_pages_are_copied(host: Host) -> None:
    host.put("/srv/limits.txt", "six<2\n")
    host.put("/srv/links.html", "<a href='https://x/a.whl'>a</a>")
    settings = host.read(PIP_CONSTRAINT="/srv/limits.txt", PIP_FIND_LINKS="/srv/links.html")
    assert settings.files["/srv/limits.txt"] == b"six<2\n"
    assert "/srv/links.html" in settings.files
    assert settings.mounts == ()


def test_a_file_inside_a_mounted_folder_is_not_copied_over_it(host: Host) -> None:
    host.put("/srv/wheels/limits.txt", "six<2\n")
    settings = host.read(PIP_CONSTRAINT="/srv/wheels/limits.txt", PIP_FIND_LINKS="/srv/wheels")
    assert settings.mounts == ("/srv/wheels",)
    assert "/srv/wheels/limits.txt" not in settings.files


def test_an_index_on_the_hosts_loopback_is_noted_without_its_login(host: Host) -> None:
    (note,) = host.read(PIP_INDEX_URL="http://me:hunter2@localhost:3141/simple").notes
    assert "a pod cannot reach it" in note
    assert "hunter2" not in note


# --- certificates and proxies --------------------------------------------------------------------------------------


def test_the_bundle_goes_to_its_usual_place(host: Host) -> None:
    host.put("/etc/pki/tls/certs/ca-bundle.crt", "BUNDLE")
    settings = host.read()
    assert settings.files[CA_BUNDLE] == b"BUNDLE"
    assert settings.env == {}, "nothing special about this host"


def test_an_extra_authority_is_told_to_python_as_well(host: Host) -> None:
    host.put("/opt/corp.pem", "CORP")
    host.put(CA_BUNDLE, "PLAIN")
    host.put("/usr/local/share/ca-certificates/corp.crt", "ROOT")
    settings = host.read(SSL_CERT_FILE="/opt/corp.pem")
    assert settings.files[CA_BUNDLE] == b"CORP"
    assert settings.files["/usr/local/share/ca-certificates/corp.crt"] == b"ROOT"
    assert settings.env == {"SSL_CERT_FILE": CA_BUNDLE, "REQUESTS_CA_BUNDLE": CA_BUNDLE}


def test_pips_own_certificate_is_kept_where_it_is_named(host: Host) -> None:
    host.put("/opt/pip.pem", "PIP")
    settings = host.read(PIP_CERT="/opt/pip.pem")
    assert settings.files["/opt/pip.pem"] == b"PIP"
    gone = host.read(PIP_CERT="/opt/none.pem")
    assert gone.notes == ("pip's cert /opt/none.pem cannot be read",)
    assert "/etc/pip.conf" not in gone.files


def test_proxies_come_along(host: Host) -> None:
    settings = host.read(https_proxy="http://proxy:3128", NO_PROXY="localhost")
    assert settings.env == {"https_proxy": "http://proxy:3128", "NO_PROXY": "localhost"}


# --- apt -----------------------------------------------------------------------------------------------------------

SOURCES = """\
Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/mirror.gpg

Types: deb
URIs: https://vendor.example/apt
Suites: stable
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""


def test_apt_sources_of_the_hosts_own_release(host: Host) -> None:
    host.put("/etc/os-release", BOOKWORM)
    host.put("/etc/apt/sources.list.d/debian.sources", SOURCES)
    host.put(
        "/etc/apt/sources.list", "deb [arch=amd64] http://old.example/debian bookworm-security main\ndeb-src x y z\n"
    )
    host.put("/etc/apt/sources.list.d/node.list", "deb https://node.example/ nodistro main\n")
    host.put("/usr/share/keyrings/mirror.gpg", "KEY")
    host.put("/etc/apt/auth.conf.d/corp.conf", "machine mirror.example\nlogin me\npassword pw\n")
    host.put("/etc/apt/auth.conf", "machine elsewhere.example login other password other-secret\n")
    files = host.read().apt_files
    text = files["/etc/apt/sources.list.d/debian.sources"].decode()
    assert "mirror.example" in text
    assert "vendor.example" not in text
    assert "off.example" not in text
    assert files["/etc/apt/sources.list"] == b"deb [arch=amd64] http://old.example/debian bookworm-security main\n"
    assert "/etc/apt/sources.list.d/node.list" not in files
    assert files["/usr/share/keyrings/mirror.gpg"] == b"KEY"
    assert files["/etc/apt/auth.conf.d/pennypod-host.conf"] == b"machine mirror.example login me password pw\n"


def test_a_host_of_another_kind_has_no_apt_sources_to_give(host: Host) -> None:
    host.put("/etc/os-release", "ID=fedora\nVERSION_CODENAME=\n")
    host.put("/etc/apt/sources.list", "deb http://x/debian bookworm main\n")
    settings = host.read()
    assert (settings.release, settings.apt_files) == ("", {})


def test_of_apts_configuration_only_reach_and_trust_is_taken() -> None:
    dump = (
        'APT::Architecture "amd64";\n'
        'Acquire::http::Proxy "http://proxy:3142";\n'
        'Acquire::http::Proxy::mirror.example "DIRECT";\n'
        'Acquire::https::SslKey "/root/key.pem";\n'
        'Acquire::https::CaInfo "/opt/corp.pem";\n'
        'Acquire::Check-Date "false";\n'
        'Acquire::http::ProxyAutoDetect "/usr/bin/detect";\n'
        'Acquire::Languages "none";\n'
        'Acquire::http "";\n'
        'DPkg::Post-Invoke:: "rm -rf /";\n'
    )
    assert apt_options(dump).splitlines() == [
        'Acquire::http::Proxy "http://proxy:3142";',
        'Acquire::http::Proxy::mirror.example "DIRECT";',
        'Acquire::https::CaInfo "/opt/corp.pem";',
        'Acquire::Check-Date "false";',
    ]


# --- the folder a pod mounts ---------------------------------------------------------------------------------------


def test_the_tree_is_written_once_per_content(tmp_path: Path) -> None:
    settings = HostSettings(
        release="debian bookworm",
        files={"/etc/pip.conf": b"[global]\n"},
        apt_files={"/etc/apt/auth.conf.d/x.conf": b"machine m login l password p\n"},
    )
    tree = write_tree(settings, tmp_path, {"start.sh": "#!/bin/sh\n"})
    assert (tree / "root/etc/pip.conf").read_bytes() == b"[global]\n"
    assert (tree / "release").read_text() == "debian bookworm\n"
    assert (tree / "apt/etc/apt/auth.conf.d/x.conf").stat().st_mode & 0o777 == 0o600
    assert write_tree(settings, tmp_path, {"start.sh": "#!/bin/sh\n"}) == tree
    assert write_tree(settings, tmp_path, {"start.sh": "#!/bin/sh\nexit\n"}) != tree
    assert len(list(tmp_path.iterdir())) == 2, "no half-written tree stays"


def test_the_scripts_are_shell_that_shellcheck_accepts() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    from pennypod.providers.local import image

    files = sorted(str(path) for path in image.HERE.glob("*.sh"))
    assert len(files) >= 4
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
