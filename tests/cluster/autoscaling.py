"""A Ray cluster on this machine whose own autoscaler starts and ends its nodes.

The autoscaler is Ray's, of either version, in the monitor process of the head. Its provider is the
one of Ray's own tests: a node is a raylet on this machine. `ray.cluster_utils.AutoscalingCluster`
does the same, but it ends all of the machine's Ray processes, those of other tests too, and needs a
file that is not in Ray's wheel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from clusters import STORE_BYTES, wait_until

from benchmarks.peers import free_port

HEAD, HEAD_ID = "ray.head.default", "f" * 51 + "00000"
"""The type and the number of the head node, as the provider has them."""
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
MARK = "AUTOSCALED_BY"
"""An environment variable of all the cluster's processes, and of no others: its folder."""
IDLE_SECONDS = 1.0
START_SECONDS = 120.0
TRIES = 3
"""How often a port is drawn: another process may take it before the head does."""


class AutoscaledCluster:
    """A head without CPUs, and an autoscaler.

    Parameters
    ----------
    folder
        A short path: Ray's sockets are in it.
    types
        For each type of node, its resources and how many nodes there may be.
    version
        The autoscaler's: "v1" or "v2".
    """

    def __init__(self, folder, types, version):
        self.folder, self.version = folder, version
        for _ in range(TRIES):
            if self._start(types):
                return
        raise AssertionError(f"no head has started: {(folder / 'output').read_text()}")

    def _start(self, types):
        import ray

        self.address = f"{ray.util.get_node_ip_address()}:{free_port()}"
        config = self.folder / "autoscaler.json"
        config.write_text(json.dumps(self._config(types)))
        variables = {
            **os.environ,
            # This process connects to the address, so both must have the same kind of access.
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
            "RAY_TMPDIR": str(self.folder),
            "RAY_FAKE_CLUSTER": "1",  # the provider asks for it
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            MARK: str(self.folder),
        }
        if self.version == "v2":
            variables |= {
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            }
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
            *(f"--port={self.address.rpartition(':')[2]}", f"--autoscaling-config={config}"),
            *("--num-cpus=0", f"--object-store-memory={STORE_BYTES}", "--include-dashboard=false"),
            *(f"--ray-client-server-port={free_port()}", "--disable-usage-stats"),
        ]
        with (self.folder / "output").open("w") as output:
            done = subprocess.run(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=START_SECONDS,
                check=False,
            )
        if done.returncode:
            self.kill()
        return done.returncode == 0

    def _config(self, types):
        """The autoscaler's configuration, with the fields that a provider's defaults would fill."""
        lists = ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        named = {
            name: {
                "resources": {**resources, "object_store_memory": STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            }
            for name, (resources, most) in types.items()
        }
        return {
            "cluster_name": "autoscaled",
            "max_workers": sum(most for _, most in types.values()),
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": IDLE_SECONDS / 60,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "gcs_address": self.address,
                "head_node_id": HEAD_ID,
                "use_node_id_as_ip": True,  # all nodes have one address
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "launch_multiple": self.version == "v2",
            },
            "head_node_type": HEAD,
            "available_node_types": {
                HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                **named,
            },
            **{f"{name}_commands": [] for name in lists},
            "initialization_commands": [],
            "cluster_synced_files": [],
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "auth": {},
            "docker": {},
        }

    def connect(self):
        """Connect this process, which may have used a cluster with the other version before."""
        import ray
        from ray.autoscaler.v2 import utils

        utils.cached_is_autoscaler_v2 = None
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    def nodes(self):
        """The numbers of the nodes that are alive, apart from the head."""
        import ray

        return [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]

    def log(self):
        """The end of the autoscaler's log."""
        logs = sorted(self.folder.glob("ray/session_latest/logs/monitor.*"))
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in logs)

    def processes(self):
        """The numbers of the cluster's processes."""
        found = []
        mark = f"{MARK}={self.folder}\0".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def kill(self):
        """End all of the cluster's processes, also those that are starting others."""

        def are_gone():
            found = self.processes()
            for number in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            return not found

        wait_until(are_gone)

    def close(self):
        import ray
        from ray.autoscaler.v2 import utils

        ray.shutdown()
        utils.cached_is_autoscaler_v2 = None
        self.kill()


def requested(version):
    """Return the request that the cluster of this process keeps for an autoscaler of a version."""
    return {"v1": _requested_v1, "v2": _requested_v2}[version]()


def _requested_v1():
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental import internal_kv

    return json.loads(internal_kv._internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"[]")


def _requested_v2():
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    from ray.experimental import internal_kv

    state = get_cluster_resource_state(internal_kv.internal_kv_get_gcs_client())
    return [
        dict(each.request.resources_bundle)
        for constraint in state.cluster_resource_constraints
        for each in constraint.resource_requests
        for _ in range(each.count)
    ]
