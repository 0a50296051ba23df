#!/bin/sh
# PID 1 of a local pod: one key may log in, the host key is new for every pod, and sshd is all that runs.
set -eu
# shellcheck source=python/pennypod/providers/local/host.sh
. /run/pennypod-host/host.sh

if ! command -v ssh-keygen >/dev/null || [ ! -x /usr/sbin/sshd ]; then
    echo "pennypod: this image has no OpenSSH server" >&2
    exit 97
fi
lay_over

umask 077
mkdir -p /root/.ssh
printf '%s\n' "$PENNYPOD_PUBLIC_KEY" >/root/.ssh/authorized_keys
chmod 700 /root/.ssh
chmod 600 /root/.ssh/authorized_keys

# An image saved from a pod carries that pod's key: the mark tells whose it is. A restart keeps its own.
key=/etc/ssh/ssh_host_ed25519_key
if [ "$(cat /etc/ssh/pennypod_key_of 2>/dev/null || true)" != "$PENNYPOD_LEASE" ]; then
    rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
    ssh-keygen -q -t ed25519 -N '' -C pod -f "$key.new"
    mv "$key.new" "$key"
    printf '%s\n' "$PENNYPOD_LEASE" >/etc/ssh/pennypod_key_of
    # The public half comes last: whoever sees it may connect.
    mv "$key.new.pub" "$key.pub"
fi

# sshd gives sessions a fresh environment; only the first SetEnv line counts, so it is one line.
line=
for name in ${PENNYPOD_ENV_NAMES:-}; do
    eval "value=\${$name}"
    # shellcheck disable=SC2154 # eval sets it
    value=$(printf '%s' "$value" | sed 's/\\/\\\\/g; s/"/\\"/g')
    line="$line \"$name=$value\""
done
{
    echo "Port 22"
    echo "HostKey $key"
    echo "PermitRootLogin prohibit-password"
    echo "PasswordAuthentication no"
    echo "KbdInteractiveAuthentication no"
    echo "UsePAM no"
    echo "UseDNS no"
    echo "PrintMotd no"
    echo "MaxStartups 100"
    echo "MaxSessions 100"
    echo "Subsystem sftp internal-sftp"
    [ -z "$line" ] || echo "SetEnv$line"
} >/etc/ssh/pennypod_sshd_config

mkdir -p /run/sshd
chmod 755 /run/sshd
unset PENNYPOD_PUBLIC_KEY PENNYPOD_ENV_NAMES
umask 022
exec /usr/sbin/sshd -D -e -f /etc/ssh/pennypod_sshd_config
