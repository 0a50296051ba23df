"""Lets a pod talk only to what it needs, by nftables. Standalone: Python 3.8 or newer, standard library only.

    isolate.py apply        asked for on stdin, one line of JSON:
                            {"phase": "setup"|"closed", "allow": [[host, port], ...], "setup": [[host, port], ...],
                             "until": Unix time, "install": seconds that installing nft may take}

In both phases the pod may open connections to `allow`, to its name servers, and to the API with which its own fuse ends
it; in the phase "setup" also to `setup` and to the hosts of apt and pip as this pod has them set up. Answers to whoever
has connected to the pod, us by SSH above all, always go out. Anything else is refused at once, so that a program fails
and does not wait. At `until`, the run's deadline, all of it ends: a fuse must never find its way blocked.

Rules hold addresses, and names may change theirs: each name is written to /etc/hosts with the addresses that the rules
have. The rules come and are replaced in one step. Nothing is enforced, and the answer says why, where the pod has no
NET_ADMIN, no nft and no way to get it, or a proxy, which would decide in our place.

Prints one line ``@pennypod {"enforced": true|false, "reason": text, "hosts": [text, ...], "changed": true|false}``.
"""

from __future__ import annotations

import contextlib
import glob
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

TYPE_CHECKING = False  # importing typing would make every start slower
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, List, Tuple

    Target = Tuple[str, int]

MARK = "@pennypod "
TABLE = "pennypod"
NET_ADMIN = 12
HOSTS = "/etc/hosts"
PROC = "/proc"
PIN = "# pennypod-isolation"
FUSE = {"F", "C", "K"}  # what the fuse and the shell that keeps it have in their environment
MORE_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
PIP_INDEX = "from pip._internal.models.index import PyPI as p; print(p.simple_url, 'https://' + p.file_storage_domain)"
PACKAGE_FILES = (
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d/*",
    "/etc/pip.conf",
    "/etc/xdg/pip/pip.conf",
    "~/.pip/pip.conf",
    "~/.config/pip/pip.conf",
)
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
NOWHERE = ("192.0.2.1", 9)  # RFC 5737: nobody has this address
QUICK_S = 20


class NotPossibleError(Exception):
    """Why this pod is not isolated."""


def apply(order: Dict[str, Any]) -> Dict[str, Any]:
    """Put the rules in force. Raises NotPossibleError, having changed nothing."""
    refuse_where_it_makes_no_sense()
    nft = find_nft(int(order["install"]) if order["phase"] == "setup" else 0)
    wanted = [(str(host), int(port)) for host, port in order["allow"]]
    ends = fuse_api()
    if order["phase"] == "setup":
        wanted += [(str(host), int(port)) for host, port in order["setup"]] + package_hosts()
    found = resolve(unique(wanted + ends))
    for host, port in ends:
        if not found[(host, port)]:
            raise NotPossibleError("the address of %s, by which this pod can end itself, cannot be found out" % host)
    rules = ruleset(found, name_servers(), ssh_port(), float(order["until"]))
    before = run([nft, "list", "table", "inet", TABLE]).stdout
    loaded = run([nft, "-f", "-"], rules)
    if loaded.returncode != 0:
        raise NotPossibleError("nft refuses the rules: %s" % last_line(loaded.stderr))
    if refused(nft) == 0:
        run([nft, "delete", "table", "inet", TABLE])
        raise NotPossibleError("the rules are loaded and let everything through")
    pin(found)
    names = ["%s:%d" % target for target in sorted(found) if found[target]]
    changed = without_counts(before) != without_counts(run([nft, "list", "table", "inet", TABLE]).stdout)
    return {"enforced": True, "reason": "", "hosts": names, "changed": changed}


# -- what this pod is -------------------------------------------------------------------------------------------------


def refuse_where_it_makes_no_sense() -> None:
    with open(PROC + "/self/status", encoding="ascii") as file:
        capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    if capabilities is None or not int(capabilities.group(1), 16) >> NET_ADMIN & 1:
        raise NotPossibleError("the provider gives this pod no NET_ADMIN, so it cannot have rules of its own")
    known = {name.lower() for name, value in environment().items() if value}
    for name in PROXIES:
        if name in known:
            raise NotPossibleError("%s is set: a proxy decides what this pod can reach" % name)


def environment() -> Dict[str, str]:
    """Ours, and below it that of the pod's first process, which an SSH login does not have."""
    found = {}  # type: Dict[str, str]
    with contextlib.suppress(OSError), open(PROC + "/1/environ", encoding="utf-8", errors="replace") as file:
        found = dict(item.split("=", 1) for item in file.read().split("\0") if "=" in item)
    found.update(os.environ)
    return found


def find_nft(install_s: int) -> str:
    path = "%s:%s" % (os.environ.get("PATH", ""), MORE_PATH)
    found = shutil.which("nft", path=path)
    apt = shutil.which("apt-get", path=path)
    if found is None and apt is not None and install_s > 0:
        command = [apt, "-q", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=30", "nftables"]
        for words in (command, [apt, "-q", "update"], command):
            done = run(words, limit_s=install_s, env={"DEBIAN_FRONTEND": "noninteractive"})
            found = shutil.which("nft", path=path)
            if found is not None or (done.returncode != 0 and words is not command):
                break
    if found is None:
        raise NotPossibleError("this pod has no nft, and it could not be installed")
    return found


def ssh_port() -> int:
    """The port that we are logged in by. From it goes out whatever an SSH server says."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return int(words[3]) if len(words) == 4 else 22


def fuse_api() -> List[Target]:
    """Where this pod's fuse asks for its end; none where it needs nobody for that, or there is no fuse."""
    for path in glob.glob(PROC + "/[0-9]*/environ"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                env = dict(item.split("=", 1) for item in file.read().split("\0") if "=" in item)
        except OSError:
            continue  # it has ended meanwhile
        if not FUSE.issubset(env):
            continue
        try:
            address, variable = json.loads(env["C"])["url"]
        except (ValueError, KeyError, TypeError):
            raise NotPossibleError("the settings of this pod's fuse cannot be read") from None
        return targets([env.get(variable) or environment().get(variable) or address])
    return []


def name_servers() -> List[str]:
    found = []
    with contextlib.suppress(OSError), open("/etc/resolv.conf", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[:1] == ["nameserver"] and len(words) > 1:
                found.append(words[1].partition("%")[0])
    return found


def package_hosts() -> List[Target]:
    """The hosts of apt and pip by their settings here, and those that pip takes without any."""
    texts = [run([sys.executable, "-c", PIP_INDEX]).stdout]
    texts += [value for name, value in environment().items() if name.startswith("PIP_")]
    for pattern in PACKAGE_FILES:
        for path in sorted(glob.glob(os.path.expanduser(pattern))):
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                texts += [line.partition("#")[0] for line in file]
    return targets(texts)


def targets(texts: Iterable[str]) -> List[Target]:
    """Host and port of every web address in some texts."""
    found = []
    for text in texts:
        for url in re.findall(r"https?://[^\s'\"\]]+", text):
            with contextlib.suppress(ValueError):
                parts = urlsplit(url)
                if parts.hostname:
                    found.append((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)))
    return found


# -- the rules --------------------------------------------------------------------------------------------------------


def resolve(wanted: List[Target]) -> Dict[Target, List[str]]:
    """The addresses of each target; none of one that has no name here."""
    return {target: addresses(target[0]) for target in wanted}


def addresses(host: str) -> List[str]:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return unique([str(row[4][0]).partition("%")[0] for row in rows])


def ruleset(found: Dict[Target, List[str]], servers: List[str], ssh: int, until: float) -> str:
    """What nft loads, in place of what it has of us. Addresses are checked here: whatever resolves them is not ours."""
    lines = [
        'oif "lo" accept',
        'meta time >= "%s" accept' % time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(until)),
        "ct state established,related accept",
        "tcp sport %d accept" % ssh,
        "icmpv6 type { nd-router-solicit, nd-neighbor-solicit, nd-neighbor-advert } accept",
        "udp sport 68 udp dport 67 accept",
    ]
    for server in servers:
        lines += ["%s meta l4proto { tcp, udp } th dport 53 accept" % to(server)]
    for target in sorted(found):
        lines += ["%s tcp dport %d accept" % (to(address), target[1]) for address in found[target]]
    lines.append("counter reject with icmpx type admin-prohibited")
    body = "".join("    %s\n" % line for line in unique(lines))
    chain = "  chain out {\n    type filter hook output priority 0; policy drop;\n%s  }\n" % body
    return "add table inet %s\ndelete table inet %s\ntable inet %s {\n%s}\n" % (TABLE, TABLE, TABLE, chain)


def to(text: str) -> str:
    address = ipaddress.ip_address(text)
    return "%s daddr %s" % ("ip" if address.version == 4 else "ip6", address)


def refused(nft: str) -> int:
    """How many packets the last rule has met, once one was sent to nowhere."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", NOWHERE)
    listed = run([nft, "list", "table", "inet", TABLE]).stdout
    counted = re.search(r"counter packets (\d+)", listed)
    return int(counted.group(1)) if counted else 0


def without_counts(listed: str) -> str:
    return re.sub(r"packets \d+ bytes \d+", "", listed)


def pin(found: Dict[Target, List[str]]) -> None:
    """Give each name the addresses that the rules have. Written over in place: in a container the file is a mount."""
    with open(HOSTS, encoding="utf-8", errors="surrogateescape") as file:
        kept = [line for line in file if PIN not in line]
    if kept and not kept[-1].endswith("\n"):
        kept[-1] += "\n"
    pinned = [
        "%s %s %s\n" % (address, host, PIN)
        for host, known in sorted({host: found[(host, port)] for host, port in found}.items())
        for address in known
        if address != host
    ]
    with open(HOSTS, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(kept + pinned)


def unique(items: List[Any]) -> List[Any]:
    return list(dict.fromkeys(items))


# -- programs ---------------------------------------------------------------------------------------------------------


def run(words: List[str], text: str = "", limit_s: int = QUICK_S, env: Any = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            timeout=limit_s,
            check=False,
            env=dict(os.environ, LC_ALL="C", TZ="UTC0", **(env or {})),
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return subprocess.CompletedProcess(words, 1, "", str(exc))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
    return lines[0][:200] if lines else "no reason given"


def main(args: List[str]) -> int:
    if args != ["apply"]:
        print("usage: " + (__doc__ or "").split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    order = json.loads(sys.stdin.buffer.readline())
    answer = {"enforced": False, "reason": "", "hosts": [], "changed": False}  # type: Dict[str, Any]
    try:
        answer = apply(order)
    except NotPossibleError as exc:
        answer["reason"] = str(exc)
    except Exception as exc:
        answer["reason"] = "isolate.py has failed on this pod: %s" % type(exc).__name__
    print(MARK + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
