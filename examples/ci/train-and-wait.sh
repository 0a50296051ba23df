#!/bin/sh
# Asks a pennypod orchestrator for a run and waits for its end. Needs curl and openssl, nothing else.
#
#   PENNYPOD_URL             where it is, https://pennypod.example
#   PENNYPOD_WEBHOOK_SECRET  what webhooks are signed with
#   PENNYPOD_READ_TOKEN      only where the orchestrator wants one for reading
#   train-and-wait.sh PAYLOAD [KEY]
#
# PAYLOAD is the JSON of the webhook. KEY names the delivery: asked for twice with the same one, there is one run.
# Exit code: 0 the run succeeded, 1 it did not, 2 it was not accepted.
#
# Neither secret nor token is ever an argument of a program: those are for everybody on the machine to see.
set -eu
LC_ALL=C # a character is a byte
export LC_ALL

payload=$1
key=${2:-$(openssl rand -hex 16)}
answer=$(mktemp)
trap 'rm -f "$answer"' EXIT

# taken NAME: a string of the JSON that answers a webhook. told NAME: a line of the text that tells of a run.
taken() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p" "$answer"; }
told() { sed -n "s/^$1: //p" "$answer"; }

# The HMAC-SHA256 of standard input under the secret, in hex. OpenSSL before 4.0 takes its key from the command line only,
# so it is made of two hashes here, as RFC 2104 defines it. printf is a part of the shell, no program.
hmac() { { padded_key 92; { padded_key 54; cat; } | openssl dgst -sha256 -binary; } | openssl dgst -sha256 -r | cut -d ' ' -f 1; }
# The secret with each byte XORed with this one, up to the 64 bytes of a block.
padded_key() {
    left=64
    for byte in $(secret_bytes); do
        printf '%b' "\\0$(printf '%03o' $((byte ^ $1)))"
        left=$((left - 1))
    done
    while [ "$left" -gt 0 ]; do
        printf '%b' "\\0$(printf '%03o' "$1")"
        left=$((left - 1))
    done
}
# Its bytes, or those of its hash where it is longer than a block, as numbers.
secret_bytes() {
    if [ "${#PENNYPOD_WEBHOOK_SECRET}" -le 64 ]; then
        printf '%s' "$PENNYPOD_WEBHOOK_SECRET"
    else
        printf '%s' "$PENNYPOD_WEBHOOK_SECRET" | openssl dgst -sha256 -binary
    fi | od -A n -v -t u1
}

timestamp=$(date +%s)
signature=$(printf '%s.%s' "$timestamp" "$payload" | hmac)
# A full queue answers 429 with Retry-After, which curl obeys; the signature is good for five minutes.
status=$(printf '%s' "$payload" | curl --silent --show-error --max-time 30 --retry 6 --retry-max-time 240 \
    --output "$answer" --write-out '%{http_code}' --data-binary @- \
    --header 'Content-Type: application/json' \
    --header "X-Pennypod-Timestamp: $timestamp" \
    --header "X-Pennypod-Signature: sha256=$signature" \
    --header "Idempotency-Key: $key" \
    "$PENNYPOD_URL/hooks/train")
run=$(taken run)
# 409 with a run: the first try had arrived, only its answer was lost.
if [ -z "$run" ] || { [ "$status" != 202 ] && [ "$(taken code)" != replayed ]; }; then
    echo "not accepted ($status): $(cat "$answer")" >&2
    exit 2
fi
echo "run $run: $PENNYPOD_URL/runs/$run"

said=
while :; do
    if printf 'Authorization: Bearer %s\n' "${PENNYPOD_READ_TOKEN:-none}" | curl --silent --fail --max-time 30 \
        --output "$answer" --header 'Accept: text/plain' --header @- "$PENNYPOD_URL/runs/$run"; then
        stage=$(told stage)
        [ "$stage" = "$said" ] || echo "$(date -u +%H:%M:%S) $stage"
        said=$stage
        [ "$(told state)" != ended ] || break
    fi
    sleep "${PENNYPOD_POLL_S:-15}"
done
echo "$run: $(told outcome): $(told reason)"
[ "$(told outcome)" = succeeded ]
