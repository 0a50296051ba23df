#!/bin/sh
# lifeline.sh FOLDER SIGNAL COMMAND...: runs the command, with FOLDER as its place for temporary files, for as long as our
# stdin stays open. When the builder dies, however it dies, its end of the pipe closes: the command gets SIGNAL, and FOLDER
# goes once the command is gone.
set -u
folder=$1 signal=$2
shift 2

exec 3<&0
"$@" </dev/null 3<&- &
command=$!
{
    cat
    : >"$folder/cut"
    kill -s "$signal" "$command"
    patience=100
    while kill -0 "$command" && [ "$patience" -gt 0 ]; do
        sleep 0.2
        patience=$((patience - 1))
    done
    kill -s KILL "$command"
    # Its children may need another moment to let go.
    for _ in 1 2 3 4 5; do
        # Never into a file system that was mounted below: it may be the host's own.
        rm -rf --one-file-system "$folder" && break
        sleep 1
    done
} <&3 >/dev/null 2>&1 3<&- &
watcher=$!
exec 3<&-
wait "$command"
status=$?
if [ -e "$folder/cut" ] || [ ! -e "$folder" ]; then
    wait "$watcher"
else
    # The builder is alive: it takes over.
    kill -s KILL "$watcher" 2>/dev/null
fi
exit "$status"
