"""Object storage: checkpoints and data sets in an S3-compatible bucket. Floor 1; the bucket is its one outside thing.

The keys of the bucket stay here. A pod gets URLs that each allow one thing for a while (`UrlPlan`).
"""

from pennypod.store.bucket import Bucket, open_bucket
from pennypod.store.checkpoints import Checkpoints, Kept
from pennypod.store.config import StoreConfig, load_config
from pennypod.store.datasets import DatasetSent, Pack, into_packs, keep_dataset, keep_packs
from pennypod.store.layout import Marker, Slot
from pennypod.store.urls import UrlPlan, lifetime_s, renew_at

__all__ = [
    "Bucket",
    "Checkpoints",
    "DatasetSent",
    "Kept",
    "Marker",
    "Pack",
    "Slot",
    "StoreConfig",
    "UrlPlan",
    "into_packs",
    "keep_dataset",
    "keep_packs",
    "lifetime_s",
    "load_config",
    "open_bucket",
    "renew_at",
]
