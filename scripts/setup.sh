#!/usr/bin/env bash
# Prepares this machine: the system packages that are missing, then .venv with the locked Python packages and pennypod.
# Safe to run again and again: with nothing to do it only compares a stamp. PYTHON=/path/to/python3 picks the interpreter.
#
#   setup.sh            what running jobs needs
#   setup.sh --tests    also what the tests need: an OpenSSH server, PostgreSQL, a container registry, tmux and Chromium;
#                       no service is started
#                       or enabled for them
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
export PATH="$PATH:/usr/sbin:/sbin" # runc and iptables live there; a plain user's PATH may lack it
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }
started=$SECONDS

# One setup at a time per clone: `make demo` may be started twice at once.
mkdir -p .cache
exec 9>.cache/setup.lock
flock 9

log=$(mktemp)
policy_is_ours=no
trap 'rm -f "$log"; [ "$policy_is_ours" = no ] || "${as_root[@]}" rm -f /usr/sbin/policy-rc.d' EXIT

# Runs a command quietly; shows what it said only when it fails.
quietly() {
    if ! "$@" >"$log" 2>&1 9>&-; then
        tail -n 12 "$log" >&2
        return 1
    fi
}

# --- system packages ----------------------------------------------------------------------------------------------------

updated=no
as_root=()

# apt_install PACKAGE...: names that this release does not have are an error of the caller, see `first_known`.
apt_prepare() {
    [ "$updated" = no ] || return 0
    have apt-get || die "this machine lacks: $*. It has no apt-get, so please install them (or their like) and run this again"
    if [ "$(id -u)" -ne 0 ]; then
        # A password prompt is fine for a person, and a hang for a machine.
        if have sudo && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
            as_root=(sudo)
        else
            die "not root and no usable sudo; please run as root: apt-get install $*"
        fi
    fi
    say "apt-get update"
    # One broken third-party source must not stop us: whether the packages can be had is seen by the install.
    quietly apt_get update || say "apt-get update reported errors; going on with the lists at hand"
    updated=yes
}
apt_get() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y \
        -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" </dev/null
}
# --no-remove: never take somebody's Docker away to make room for ours.
apt_install() {
    apt_prepare "$@"
    say "installing $*"
    quietly apt_get install --no-install-recommends --no-remove "$@" \
        || die "apt-get could not install: $*"
}
# The first of several package names that this release knows; nothing when it knows none.
first_known() {
    local name
    for name; do
        if apt-cache show --no-all-versions "$name" >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return
        fi
    done
}
docker_answers() { have docker && timeout 20 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# The tests start servers of their own on loopback ports; this machine should not become reachable because of them.
policy=/usr/sbin/policy-rc.d
keep_off() { # SERVICE UNIT...
    local service=$1
    if [ -d /run/systemd/system ]; then
        quietly "${as_root[@]}" systemctl mask "${@:2}" || die "systemctl could not mask $service.service"
        say "the system's own $service service stays off; to want it: systemctl unmask $service.service && systemctl enable --now $service"
    elif [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" install -m 755 /dev/stdin "$policy"
        policy_is_ours=yes
    fi
}
allow_services_again() {
    [ "$policy_is_ours" = no ] || "${as_root[@]}" rm -f "$policy"
    policy_is_ours=no
}

missing=()
have git || missing+=(git)
have ssh && have ssh-keygen || missing+=(openssh-client)
have tar || missing+=(tar)
have gzip || missing+=(gzip)
have shellcheck || missing+=(shellcheck)
# The pod image is built from Debian packages where no image registry answers.
have mmdebstrap || missing+=(mmdebstrap)
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)

if [ "${1:-}" = --tests ]; then
    have tmux || missing+=(tmux)
    have sshd || missing+=(openssh-server)
    have docker-registry || missing+=(docker-registry)
    have pg_ctl || compgen -G '/usr/lib/postgresql/*/bin/pg_ctl' >/dev/null || missing+=(postgresql)
    # Ubuntu has Chromium as a snap only, which a machine without snapd cannot have: its test is skipped there.
    if ! grep -qsx 'ID="\?ubuntu"\?' /etc/os-release; then
        have chromium || missing+=(chromium)
        have chromedriver || missing+=(chromium-driver)
    fi
fi

engine_parts=()
if ! docker_answers; then
    have podman || engine_parts+=(podman)
    # Podman's default runtime does not start on every virtual machine; runc does.
    have runc || engine_parts+=(runc)
    have iptables || engine_parts+=(iptables)
    [ -x /usr/lib/podman/netavark ] || [ -x /usr/libexec/podman/netavark ] || [ -x /usr/lib/cni/bridge ] \
        || engine_parts+=(network)
    if [ "$(id -u)" -ne 0 ]; then
        have newuidmap || engine_parts+=(uidmap)
        have slirp4netns || have pasta || engine_parts+=(slirp4netns)
        have fuse-overlayfs || engine_parts+=(fuse-overlayfs)
    fi
fi
if [ ${#missing[@]} -gt 0 ] || [ ${#engine_parts[@]} -gt 0 ]; then
    wanted=("${missing[@]}" "${engine_parts[@]}")
    apt_prepare "${wanted[@]/#network/netavark}"
    packages=("${missing[@]}")
    for part in "${engine_parts[@]}"; do
        if [ "$part" = network ]; then
            part=$(first_known netavark containernetworking-plugins)
            [ -n "$part" ] || die "this release has neither netavark nor containernetworking-plugins"
        fi
        packages+=("$part")
    done
    case " ${packages[*]} " in *" openssh-server "*) keep_off ssh ssh.service ssh.socket ;; esac
    case " ${packages[*]} " in *" docker-registry "*) keep_off docker-registry docker-registry.service ;; esac
    case " ${packages[*]} " in *" postgresql "*) keep_off postgresql postgresql.service ;; esac
    apt_install "${packages[@]}"
    allow_services_again
fi

# --- a Python to build on -------------------------------------------------------------------------------------------------

# Runs (a pyenv shim may exist and not run), has the right version, and can make an environment with pip in it.
runs() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
can_venv() { "$1" -c 'import ensurepip, ssl, venv' >/dev/null 2>&1; }
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3 /usr/bin/python3.{13,12,11} \
        /usr/local/bin/python3{,.13,.12,.11}; do
        if have "$candidate" && runs "$candidate" && can_venv "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}
choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        runs "$PYTHON" || die "PYTHON=$PYTHON does not run or is not Python 3.11 to 3.13"
        can_venv "$PYTHON" || die "PYTHON=$PYTHON lacks ensurepip, ssl or venv"
        python=$PYTHON
        return
    fi
    python=$(find_python)
    [ -z "$python" ] || return 0
    # Debian's python3 comes without ensurepip: that is in python3-venv.
    apt_install python3 python3-venv
    python=$(find_python)
    [ -z "$python" ] || return 0
    # Older releases may have a newer Python beside their own.
    local version
    for version in 3.13 3.12 3.11; do
        if [ -n "$(first_known "python$version-venv")" ]; then
            apt_install "python$version" "python$version-venv"
            python=$(find_python)
            [ -z "$python" ] || return 0
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 here; install one, or name it: PYTHON=/path/to/python3 make setup"
}

# --- the environment ------------------------------------------------------------------------------------------------------

# Scripts in .venv/bin name the interpreter by its full path, so a clone that was moved needs a new environment.
stamp="$root $(cat requirements.lock pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)"
stamp_file=.venv/pennypod-setup
old_stamp=$(cat "$stamp_file" 2>/dev/null || true)

usable=no
if [ -x .venv/bin/python ] && runs .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    usable=yes
    [ -z "$old_stamp" ] || [ "${old_stamp% *}" = "$root" ] || usable=no
fi
if [ "$usable" = yes ] && [ "$old_stamp" = "$stamp" ]; then
    exit 0
fi
if [ "$usable" = no ]; then
    choose_python
    say "making .venv with $("$python" -V 2>&1) ($python)"
    quietly "$python" -m venv --clear .venv || die "$python could not make .venv"
fi
rm -f "$stamp_file"
say "installing the locked Python packages into .venv"
quietly .venv/bin/python -m pip install --no-input --no-deps -r requirements.lock \
    || die "pip could not install requirements.lock; is the package index reachable?"
say "installing pennypod itself (editable)"
quietly .venv/bin/python -m pip install --no-input --no-deps --no-build-isolation -e . \
    || die "pip could not install pennypod from this folder"
quietly .venv/bin/python -m pip check || die "the installed Python packages do not fit together"
printf '%s\n' "$stamp" >"$stamp_file"
say "ready after $((SECONDS - started)) s"
