"""Training on a pod: started once in tmux, watched from here until it is over. Floor 2.

The trainer belongs to its supervisor on the pod (onpod/supervise.py), never to an SSH session: this side may come and
go. One session streams frames from onpod/watch_log.py; when it breaks, another one goes on where it ended.
"""

from pennypod.training.frames import SESSION, Frame, look
from pennypod.training.launching import Launched, launch, would_launch
from pennypod.training.log import Epoch, last_epoch, parse_epoch
from pennypod.training.watching import TrainingResult, WatchPlan, watch

__all__ = [
    "SESSION",
    "Epoch",
    "Frame",
    "Launched",
    "TrainingResult",
    "WatchPlan",
    "last_epoch",
    "launch",
    "look",
    "parse_epoch",
    "watch",
    "would_launch",
]
