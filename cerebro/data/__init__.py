"""Datasets: write them (`shard`), open them (`Dataset`), read image folders (`images`)."""

from __future__ import annotations

from cerebro.data.dataset import Dataset
from cerebro.data.manifest import Column
from cerebro.data.sharding import shard
from cerebro.data.shards import RaggedRows
from cerebro.data.sources.image_folders import images
from cerebro.data.stats import Stats

__all__ = ["Column", "Dataset", "RaggedRows", "Stats", "images", "shard"]
