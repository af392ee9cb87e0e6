"""The pages that train on a Ray cluster: their code blocks run, each on a small cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("ray")
pytest.importorskip("distributed")
pytest.importorskip("optuna")

from pages import WITH_RAY, Kernel, check, kernel


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("pages")) as started:
        yield started


@pytest.mark.parametrize("name", sorted(WITH_RAY))
def test_a_page_runs(process: Kernel, name: str) -> None:
    check(process, name)
