#!/bin/sh
# The yardstick: the demo's work as a person would script it, with ssh, scp, tar and no safety at all.
#
#   plain.sh POD_HOST POD_PORT KEY KNOWN_HOSTS CODE DATA OUT
#
# Prints one line per stage: its name, and when it began and ended in Unix milliseconds. The pod is rented and destroyed by the caller, as with a vendor's CLI.
set -eu
host=$1 port=$2 key=$3 known_hosts=$4 code=$5 data=$6 out=$7

options="-i $key -o UserKnownHostsFile=$known_hosts -o StrictHostKeyChecking=accept-new -o BatchMode=yes -o LogLevel=ERROR"
pod() {
    # shellcheck disable=SC2086 # the options are words
    ssh $options -p "$port" "root@$host" "$@"
}
now_ms() { echo $(($(date +%s%N) / 1000000)); }
stage() {
    name=$1 start=$(now_ms)
    shift
    "$@" >&2
    echo "$name $start $(now_ms)"
}

wait_for_ssh() { until pod true 2>/dev/null; do sleep 0.2; done; }
bootstrap() {
    pod 'set -e
        python3 -c "import cv2, numpy, PIL" 2>/dev/null && exit 0
        apt-get -qq update
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends libgl1 libglib2.0-0 tmux
        python3 -c "import cv2, numpy, PIL"'
}
upload() {
    pod 'mkdir -p /root/job/code /root/job/data /root/job/out'
    tar -C "$code" -czf - . | pod 'tar -xzf - -C /root/job/code'
    tar -C "$data" -cf - . | pod 'tar -xf - -C /root/job/data'
}
launch() {
    # shellcheck disable=SC2016 # expanded on the pod
    pod 'tmux start-server \; new-session -d -s job "cd /root/job/out && { date +began=%s.%N; python3 /root/job/code/train_demo.py \
        --data /root/job/data --name demo; s=\$?; date +ended=%s.%N; } > /root/job/train.log 2>&1; echo \$s > /root/job/exit"'
}
train() {
    until pod 'test -s /root/job/exit'; do sleep 2; done
    test "$(pod cat /root/job/exit)" = 0
}
fetch() {
    best=$(pod 'find /root/job/out -name best.npz')
    # shellcheck disable=SC2086
    scp -q $options -P "$port" "root@$host:$best" "root@$host:/root/job/train.log" "$out/"
}

mkdir -p "$out"
stage ssh wait_for_ssh
stage bootstrap bootstrap
stage dataset upload
stage launch launch
stage training train
stage weights fetch
