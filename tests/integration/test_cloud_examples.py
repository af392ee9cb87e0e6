"""The files of examples/cloud: their commands exist, and their parts fit together.

No container is made here.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from cerebro.cli import main, make_parser
from cerebro.cli.agent import AGAIN
from cerebro.cluster import agent, keys
from cerebro.data.cache import VARIABLE

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parent.parent.parent
CLOUD = ROOT / "examples" / "cloud"
FILES = ["indexed-job.yaml", "kuberay.yaml"]


def documents(name):
    return [found for found in yaml.safe_load_all((CLOUD / name).read_text()) if found]


def pods(value):
    """Every description of a pod in a document."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for part in value.values():
            yield from pods(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods(part)


def commands(name):
    """Every command of a file."""
    for document in documents(name):
        if "entrypoint" in document["spec"]:
            yield shlex.split(document["spec"]["entrypoint"])
        for pod in pods(document):
            for container in pod["containers"]:
                if "command" in container:
                    yield container["command"]


def search_options(given):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("cloud_search", CLOUD / "search.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.arguments(given)


def cerebro_options(given):
    return make_parser().parse_args(given)


@pytest.mark.parametrize("name", FILES)
def test_every_command_exists_with_its_options(name):
    found = list(commands(name))
    assert found
    for python, *rest in found:
        assert python == "python"
        if rest[0] == "-m":
            assert rest[1] == "cerebro" and cerebro_options(rest[2:])
        else:
            assert rest[0] == "/app/search.py" and search_options(rest[1:])


def test_the_pods_of_the_job_find_each_other():
    service, script, agents = documents("indexed-job.yaml")
    (search,), (worker,) = pods(script), pods(agents)
    (container,) = search["containers"]
    options = search_options(container["command"][2:])
    assert script["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
    (port,) = {p["port"] for p in service["spec"]["ports"]}
    assert options.listen == f"0.0.0.0:{port}"
    assert container["ports"][0]["containerPort"] == port
    (of_agent,) = worker["containers"]
    environment = {entry["name"]: entry for entry in of_agent["env"]}
    assert environment["HUB"]["value"] == f"{service['metadata']['name']}:{port}"
    given = [part.replace("$(HUB)", environment["HUB"]["value"]) for part in of_agent["command"]]
    parsed = cerebro_options(given[3:])
    assert (parsed.connect, parsed.again) == (environment["HUB"]["value"], True)
    assert agents["spec"]["completionMode"] == "Indexed"
    assert agents["spec"]["completions"] == agents["spec"]["parallelism"]
    assert {search["restartPolicy"], worker["restartPolicy"]} == {"OnFailure"}
    assert worker["terminationGracePeriodSeconds"] > agent.LEAVE_SECONDS


def test_both_ends_take_the_key_from_one_secret():
    _, script, agents = documents("indexed-job.yaml")
    (search,), (worker,) = pods(script), pods(agents)
    secret = search["volumes"][0]["secret"]
    assert secret["defaultMode"] & keys.OTHERS == 0
    entries = worker["containers"][0]["env"]
    (source,) = [e["valueFrom"]["secretKeyRef"] for e in entries if e["name"] == keys.VARIABLE]
    assert source["name"] == secret["secretName"]
    mount = search["containers"][0]["volumeMounts"][0]["mountPath"]
    assert search_options(search["containers"][0]["command"][2:]).key == f"{mount}/{source['key']}"
    made = re.search(r"openssl rand -hex (\d+)", (CLOUD / "indexed-job.yaml").read_text())
    assert int(made[1]) == keys.KEY_BYTES


def test_the_image_has_what_the_pods_run():
    text = (CLOUD / "Containerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    kinds = [line.split()[0] for line in lines]
    assert kinds[0] == "FROM" and set(kinds) <= {"FROM", "COPY", "RUN", "ENV", "WORKDIR", "CMD"}
    assert "COPY examples/cloud/search.py /app/search.py" in lines
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\$wheel\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert project["name"].replace("-", "_") in text
    variables = dict(part.split("=") for part in lines[kinds.index("ENV")].split()[1:])
    for name in FILES:
        for document in documents(name):
            mounts = [m for pod in pods(document) for c in pod["containers"]
                      for m in c.get("volumeMounts", ())]  # fmt: skip
            for mount in mounts:
                if mount["name"] == "cache":
                    assert mount["mountPath"] == variables[VARIABLE]
    for line in lines:
        for command in re.findall(r"python -m cerebro ([\w -]+)", line):
            assert cerebro_options(command.split())


@pytest.mark.parametrize(
    ("status", "plain", "again"),
    [(agent.ENDED, 0, AGAIN), (agent.UNHEARD, agent.UNHEARD, 0), (agent.REFUSED, 1, 1)],
)
def test_an_agent_asks_to_be_started_again(monkeypatch, status, plain, again):
    monkeypatch.setattr(agent, "main", lambda *given, **named: status)
    monkeypatch.setenv(keys.VARIABLE, "00" * keys.KEY_BYTES)
    assert main(["agent", "--connect", "host:7070"]) == plain
    assert main(["agent", "--connect", "host:7070", "--again"]) == again
