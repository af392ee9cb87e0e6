"""Keywords of other libraries, and misspelt ones, are answered with ours."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import cerebro
import cerebro.arguments as keywords
from cerebro.arguments import KeywordError, explain_keywords


def build(config: dict[str, Any]) -> None:
    """Never called."""


def call_search(**given: Any) -> Any:
    return cerebro.search(build, {}, None, **given)


def call_search_cv(**given: Any) -> Any:
    pytest.importorskip("sklearn")
    return cerebro.sklearn.SearchCV(None, **given)


def call_resume(**given: Any) -> Any:
    return cerebro.resume("nowhere", **given)


def call_shard(**given: Any) -> Any:
    return cerebro.shard({"x": [1]}, "nowhere", **given)


def call_optimize(**given: Any) -> Any:
    pytest.importorskip("optuna")
    return cerebro.optuna.optimize(None, build, None, **given)


def call_fit(**given: Any) -> Any:
    pytest.importorskip("ray")
    return cerebro.ray.fit(build, None, **given)


def call_model(**given: Any) -> Any:
    pytest.importorskip("torch")
    return cerebro.torch.Model(None, optimizer=None, **given)


@pytest.mark.parametrize(
    ("call", "wrong", "answer"),
    [
        (call_search, "direction", r"^search\(\) takes mode=, not direction=$"),
        (call_search, "trials", r"^search\(\) takes n_trials=, not trials=$"),
        (call_search, "num_samples", r"^search\(\) takes n_trials=, not num_samples=$"),
        (call_search, "max_epochs", r"^search\(\) takes epochs=, not max_epochs=$"),
        (call_search, "verbose", r"^search\(\) takes progress=, not verbose=$"),
        (call_search, "n_jobs", r"^search\(\) takes workers=, not n_jobs=$"),
        (call_search, "lr", r"^search\(\) does not take lr=: the space has it"),
        (call_search, "cv", r"KFold\(5\)"),
        (
            call_search,
            "n_trails",
            r"^search\(\) does not take n_trails=: did you mean n_trials=\?$",
        ),
        (call_search, "zzz", r"of the 3\d that it takes, the nearest are (\w+, ){3}\w+$"),
        (call_search, "dtypes", r"^search\(\) does not take dtypes=: cerebro.shard\(\) takes it"),
        (call_search, "objective", r"build=, .* metric="),
        (call_search, "storage", r"^search\(\) takes run=, not storage=$"),
        (call_search_cv, "n_jobs", r"^SearchCV\(\) takes workers=, not n_jobs=$"),
        (call_search_cv, "verbose", r"^SearchCV\(\) takes progress=, not verbose=$"),
        (call_search_cv, "param_grid", r"^SearchCV\(\) takes space=, not param_grid=$"),
        (call_search_cv, "param_distributions", r"takes space=, not"),
        (call_search_cv, "n_iter", r"^SearchCV\(\) takes n_trials=, not n_iter=$"),
        (call_search_cv, "error_score", r"does not take error_score=: leave it out: .* NaN"),
        (call_search_cv, "factor", r"searcher=cerebro.SuccessiveHalving"),
        (call_search_cv, "scorring", r"did you mean scoring=\?"),
        (call_resume, "path", r"^resume\(\) takes run=, not path=$"),
        (call_resume, "n_trials", r"if_exists='resume'"),
        (call_shard, "num_shards", r"^shard\(\) takes shards=, not num_shards=$"),
        (call_shard, "overwrite", r"exist_ok=True"),
        (call_optimize, "n_jobs", r"^cerebro.optuna.optimize\(\) takes workers=, not n_jobs=$"),
        (call_optimize, "show_progress_bar", r"takes progress=, not"),
        (call_optimize, "gc_after_trial", r"optimize\(\) does not take gc_after_trial=: leave"),
        (call_optimize, "mode", r"the study has one"),
        (call_optimize, "sede", r"did you mean seed=\?"),  # which it passes to search
        (call_fit, "search_alg", r"^cerebro.ray.fit\(\) takes searcher=, not search_alg=$"),
        (call_fit, "max_concurrent_trials", r"takes width=, not"),
        (call_model, "criterion", r"^cerebro.torch.Model\(\) takes loss=, not criterion=$"),
        (call_model, "lr_scheduler", r"takes scheduler=, not"),
    ],
)
def test_keywords_of_other_libraries_are_explained(
    call: Callable[..., Any], wrong: str, answer: str
) -> None:
    with pytest.raises(TypeError, match=answer):
        call(**{wrong: 1})
    with pytest.raises(cerebro.InputError):
        call(**{wrong: 1})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (cerebro.search, keywords.SEARCH),
        (cerebro.resume, keywords.RESUME),
        (cerebro.shard, keywords.SHARD),
    ],
)
def test_keyword_tables_match_the_signatures(
    function: Callable[..., Any], words: keywords.Words
) -> None:
    own = set(inspect.signature(function).parameters)
    assert own.isdisjoint(words)
    assert {word for word in words.values() if " " not in word} <= own


def test_keyword_tables_of_functions_that_forward_options() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("ray")
    search = set(inspect.signature(cerebro.search).parameters)
    for name, function in (
        ("optuna.optimize", cerebro.optuna.optimize),
        ("ray_tune.fit", cerebro.ray.fit),
    ):
        words = importlib.import_module(f"cerebro.integrations.{name}").WORDS
        own = set(inspect.signature(function).parameters)
        assert own.isdisjoint(words)
        assert {word for word in words.values() if " " not in word} <= own | search


def test_table_of_the_torch_model() -> None:
    pytest.importorskip("torch")
    own = set(inspect.signature(cerebro.torch.Model).parameters)
    assert own.isdisjoint(keywords.TORCH_MODEL)
    assert {word for word in keywords.TORCH_MODEL.values() if " " not in word} <= own


def test_table_of_the_search_with_folds() -> None:
    pytest.importorskip("sklearn")
    own = set(inspect.signature(cerebro.sklearn.SearchCV).parameters)
    from cerebro.integrations.sklearn.search_cv import WORDS

    assert own.isdisjoint(WORDS)
    assert {word for word in WORDS.values() if " " not in word} <= own
    search = cerebro.sklearn.SearchCV(None, {}, epochs=3)
    assert search.get_params()["epochs"] == 3


def test_known_keywords_pass() -> None:
    @explain_keywords({"b": "a"})
    def function(x: int, *, a: int = 0) -> int:
        return x + a

    assert function(1, a=2) == 3
    assert function(x=1) == 1
    with pytest.raises(KeywordError, match=r"^function\(\) takes a=, not b=$"):
        function(1, b=2)  # type: ignore[call-arg]


def test_warning_names_the_callers_line(tmp_path: Any) -> None:
    data = cerebro.shard({"x": [1.0, 2.0]}, tmp_path / "data")
    kept = {"epochs": 1, "n_trials": 1, "batch_size": 1, "workers": 0, "run": tmp_path / "run"}
    no_validation = pytest.warns(UserWarning, match="no validation data")
    with no_validation as caught, pytest.raises(cerebro.RunError):
        cerebro.search(broken, {}, data, **kept)
    assert caught[0].filename == __file__


def broken(config: dict[str, Any]) -> Any:
    raise TypeError("never built")
