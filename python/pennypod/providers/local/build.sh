#!/bin/sh
# PID 1 of a build container: runs recipe.sh, says how it ended, and lives until its stdin closes. When the builder
# dies, however it dies, its end of the pipe closes, this exits, and the engine removes the container.
set -u
{
    sh -eu /run/pennypod-host/recipe.sh </dev/null 2>&1
    echo "pennypod-build-exit $?"
} &
cat >/dev/null
