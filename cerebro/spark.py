"""Cerebro with Spark: a search on the executors of a Spark application.

    spark = SparkSession.builder.getOrCreate()
    result = cerebro.search(build, space, train, ..., executor=cerebro.spark.Executor(spark))

Agents run as the tasks of one Spark job, and connect to the driver (docs/guide/cluster.md). Spark
only starts them: data, states and messages use Cerebro's own connections.
"""

from __future__ import annotations

from cerebro.cluster.engines.spark import Executor

__all__ = ["Executor"]
