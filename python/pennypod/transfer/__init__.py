"""Trees to the pod, files back home, both verified by hash and resumed after a broken line. Floor 1: knows `ssh`."""

from pennypod.transfer.fetch import BUSY, Fetched, fetch, fetch_tree, keep
from pennypod.transfer.plan import DEFAULT_EXCLUDES, UploadPlan, plan_upload
from pennypod.transfer.pull import Pulled, PullFile, PullPack, pull
from pennypod.transfer.session import Progress
from pennypod.transfer.upload import Preview, UploadResult, preview, upload

__all__ = [
    "BUSY",
    "DEFAULT_EXCLUDES",
    "Fetched",
    "Preview",
    "Progress",
    "PullFile",
    "PullPack",
    "Pulled",
    "UploadPlan",
    "UploadResult",
    "fetch",
    "fetch_tree",
    "keep",
    "plan_upload",
    "preview",
    "pull",
    "upload",
]
