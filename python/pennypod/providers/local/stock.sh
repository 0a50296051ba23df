# shellcheck shell=sh
# Recipe of the stock image: what a rented machine's image typically has, with its typical gaps. On purpose numpy is 2.x,
# cv2 is installed without the libraries it loads, no tmux server runs and there is no rsync.
# shellcheck source=python/pennypod/providers/local/host.sh
. /run/pennypod-host/host.sh
export DEBIAN_FRONTEND=noninteractive PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1
borrow

missing=
for package in $PENNYPOD_PACKAGES; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
if [ -n "$missing" ]; then
    apt-get -q update
    # shellcheck disable=SC2086 # a list of names
    apt-get -q install -y --no-install-recommends $missing
    # Installing ca-certificates wrote a bundle of its own.
    lay_over
fi
# Images of GPU providers let pip install into the system's Python.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED

# shellcheck disable=SC2086 # a list of requirements
python3 -m pip install --progress-bar off $PENNYPOD_REQUIREMENTS

give_back
[ -z "$missing" ] || update-ca-certificates --fresh >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /etc/apt/apt.conf.d/99mmdebstrap \
    /etc/ssh/ssh_host_* /root/.cache /tmp/* /var/log/*.log /var/log/apt
