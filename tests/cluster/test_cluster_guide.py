"""The manifest in the guide is YAML, and has what Kubernetes and KubeRay ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide" / "cluster.md"


@pytest.fixture(scope="module")
def manifest():
    (text,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return yaml.safe_load(text)


def test_the_manifest_is_a_ray_job_with_a_cluster(manifest):
    assert manifest["apiVersion"] == "ray.io/v1"
    assert manifest["kind"] == "RayJob"
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    assert manifest["spec"]["entrypoint"].startswith("python ")
    cluster = manifest["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    for group in workers:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"]


def test_every_container_has_an_image_resources_and_its_volumes(manifest):
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        # Ray takes these as they stand on its command line: text, not numbers.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["name"]
            assert container["image"]
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert set(container["resources"]["limits"]) == {"cpu", "memory"}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
