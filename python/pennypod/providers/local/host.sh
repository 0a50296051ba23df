# shellcheck shell=sh
# Sourced by start.sh and the recipes: lays what the host knows about pip, apt and certificates over the pod's own files.
here=/run/pennypod-host

same_release() {
    [ -d "$here/apt" ] || return 1
    # Only a pod of the host's own release can use the host's apt sources.
    # shellcheck disable=SC1091 # belongs to the image
    ours=$(. /etc/os-release 2>/dev/null && printf '%s %s' "${ID:-}" "${VERSION_CODENAME:-}") || return 1
    [ "$ours" = "$(cat "$here/release")" ]
}

lay_over() {
    [ ! -d "$here/root" ] || cp -R "$here/root/." /
    if same_release; then
        rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
        cp -R "$here/apt/." /
    fi
}

laid_files() {
    [ ! -d "$here/root" ] || (cd "$here/root" && find . -type f)
    ! same_release || (cd "$here/apt" && find . -type f)
}

# For the time of a build: an image must not carry the settings of the host it was built on.
borrow() {
    {
        laid_files
        echo ./etc/apt/sources.list
        (cd / && find ./etc/apt/sources.list.d -type f)
    } | sort -u | (cd / && while read -r file; do [ ! -e "$file" ] || echo "$file"; done) >/run/pennypod-kept.list
    (cd / && tar -cf /run/pennypod-kept.tar -T /run/pennypod-kept.list)
    lay_over
    if [ -s /etc/ssl/certs/ca-certificates.crt ]; then
        export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
    fi
}

give_back() {
    laid_files | (cd / && while read -r file; do rm -f "$file"; done)
    (cd / && tar -xf /run/pennypod-kept.tar)
    rm -f /run/pennypod-kept.list /run/pennypod-kept.tar
}
