# shellcheck shell=sh
# Makes an image out of its parent: Debian packages, then Python packages, told by variables that image.py puts before
# this text. Nothing of the host that builds stays behind.
# shellcheck source=python/pennypod/providers/local/host.sh
. /run/pennypod-host/host.sh
export DEBIAN_FRONTEND=noninteractive PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1
borrow

# As the registry's Debian images have it: no translations, and no waiting for the disk after each package.
echo 'Acquire::Languages "none";' >/etc/apt/apt.conf.d/docker-no-languages
echo force-unsafe-io >/etc/dpkg/dpkg.cfg.d/docker-apt-speedup

missing=
for package in $PENNYPOD_PACKAGES; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
if [ -n "$missing" ]; then
    apt-get -q update
    # shellcheck disable=SC2086 # a list of names
    if apt-get -q install -y --no-install-recommends $missing; then
        # Installing ca-certificates wrote a bundle of its own.
        lay_over
    elif [ -n "$PENNYPOD_INSTEAD" ]; then
        echo "these Debian packages cannot be had, pip's are used instead"
        PENNYPOD_REQUIREMENTS="$PENNYPOD_INSTEAD $PENNYPOD_REQUIREMENTS"
    else
        exit 1
    fi
fi
# Images of GPU providers let pip install into the system's Python.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED

# shellcheck disable=SC2086 # a list of requirements
python3 -m pip install --progress-bar off $PENNYPOD_REQUIREMENTS

give_back
[ -z "$missing" ] || update-ca-certificates --fresh >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /etc/apt/apt.conf.d/99mmdebstrap \
    /etc/ssh/ssh_host_* /root/.cache /tmp/* /var/log/*.log /var/log/apt
