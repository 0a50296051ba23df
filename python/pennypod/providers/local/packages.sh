# shellcheck shell=sh
# Recipe of a variant: more Python packages on top of its parent image.
# shellcheck source=python/pennypod/providers/local/host.sh
. /run/pennypod-host/host.sh
export PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1
borrow
# shellcheck disable=SC2086 # a list of requirements
python3 -m pip install --progress-bar off $PENNYPOD_REQUIREMENTS
give_back
rm -rf /root/.cache /tmp/*
