"""Ray, Dask and Spark as engines of clusters; their executors are public elsewhere.

They start agents, and import only what an engine needs: `engine`, `connected_executor` and `keys`;
and `agent`, `executor`, `hub` and `supervisor` for Ray, whose actors are agents on nodes that
Cerebro chooses.
"""
