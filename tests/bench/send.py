"""Our own contender of the data bench, a process like the others: sends one folder to one pod, and says how it went.

send.py JOB [STREAMS]    JOB is a JSON list: folder, the pod's folder, host, port, user, key file, known_hosts, and
                         the socket of the connection that is open already, or "" for none
"""

import json
import sys
import time
from pathlib import Path

from pennypod.ssh import Ssh, SshTarget
from pennypod.transfer import plan_upload, upload
from pennypod.transfer.shares import MAX_STREAMS


def main(job: str, streams: str = "") -> None:
    images, pod, host, port, user, key_file, known_hosts, shared = json.loads(job)
    started = time.monotonic()
    master = Path(shared) if shared else None
    ssh = Ssh(SshTarget(host, int(port), user, Path(key_file), Path(known_hosts), master))
    done = upload(ssh, plan_upload(None, Path(images)), pod, most_streams=int(streams or MAX_STREAMS))
    print(json.dumps({"streams": done.streams, "seconds_without_start": round(time.monotonic() - started, 2)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
